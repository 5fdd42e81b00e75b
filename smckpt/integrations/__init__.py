"""What stands in for other checkpoint systems, and the versions with which it was tested.

A Lightning of another version may save and then fail to resume. So an import of an integration
refuses it, as `smckpt run` does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from types import ModuleType

from smckpt.errors import UsageError

__all__ = ["ANY_VERSION", "TESTED", "give_paths", "refuse_untested"]

ANY_VERSION = "SMCKPT_ANY_VERSION"  # the environment variable that takes every version
TESTED = {  # the beginnings of versions
    "accelerate": ("1.15",),
    "lightning": ("2.6",),
    "torch": ("2.13",),  # its private names, its calls, and DCP's planners
    "torchtitan": ("0.3.0",),
    "torchtune": ("0.6.1",),
    "transformers": ("4.57", "5.23"),
}


def refuse_untested(package: str) -> None:
    """
    Raises:
        ModuleNotFoundError: the package is not installed.
        UsageError: the version that is installed was not tested, and `ANY_VERSION` is not set.
    """
    version, tested = metadata.version(package).partition("+")[0], TESTED[package]
    if not os.environ.get(ANY_VERSION) and not f"{version}.".startswith(
        tuple(f"{begin}." for begin in tested)
    ):
        raise UsageError(
            f"{package} {version} was not tested; {', '.join(tested)} was",
            remedy="install that version, or take it as it is: `smckpt run --force`, force=True, "
            f"or {ANY_VERSION}=1 in the environment for an import",
        )


def give_paths(package: str, paths: Mapping[str, str]) -> None:
    """Let modules of a package of ours be imported by the further paths that the package which it
    stands for has.

    Args:
        paths: path below the package → the path of our module with its names.
    """
    for path, ours in paths.items():
        module, above = importlib.import_module(f"{package}.{ours}"), sys.modules[package]
        *between, last = path.split(".")
        for name in between:
            full = f"{above.__name__}.{name}"
            if full not in sys.modules:
                sys.modules[full] = ModuleType(full, f"Stands between {package} and its modules.")
                sys.modules[full].__path__ = []
                setattr(above, name, sys.modules[full])
            above = sys.modules[full]
        sys.modules[f"{above.__name__}.{last}"] = module
        setattr(above, last, module)
