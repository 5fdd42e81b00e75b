"""Puts smckpt in the place of an absent `nvidia_resiliency_ext.checkpointing`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType

from smckpt.run.places import Provided, refuse_shadow, refuse_version

__all__ = ["TESTED", "put"]

TESTED = ("2.13",)  # versions of torch, whose writer and planners this uses
_OURS, _THEIRS = "smckpt.integrations.nvrx", "nvidia_resiliency_ext.checkpointing"
_OWN = f"{_OURS}.worker"  # not NVRx's names


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: torch is of another version, or the real package is installed.
    """
    import torch

    refuse_version("torch", torch.__version__.partition("+")[0], TESTED, force)
    refuse_shadow(_THEIRS, shadow)
    package = importlib.import_module(_OURS)
    above = _THEIRS.partition(".")[0]
    if above not in sys.modules:
        if importlib.util.find_spec(above) is not None:
            importlib.import_module(above)
        else:
            top = ModuleType(above, "Stands for NVRx, of which smckpt has the checkpointing.")
            top.__path__ = []  # a package, without modules of its own
            vars(top)["__version__"] = package.VERSION  # Megatron-core asks for it
            provided.module(above, top)
    below = pkgutil.walk_packages(package.__path__, f"{_OURS}.")
    for name in (_OURS, *(found.name for found in below if not found.name.startswith(_OWN))):
        provided.module(_THEIRS + name.removeprefix(_OURS), importlib.import_module(name))
