"""The door to Lightning: replaces its default plugin, its sharded strategies and its connector."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from smckpt.errors import UsageError
from smckpt.integrations import versions
from smckpt.run.places import Provided, refuse_version

__all__ = ["TESTED", "put"]

TESTED = versions.TESTED["lightning"]
_STRATEGIES = {"fsdp": "FSDPStrategy", "model_parallel": "ModelParallelStrategy"}


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: lightning is of another version.
    """
    import lightning
    from lightning.pytorch.core import saving
    from lightning.pytorch.strategies import strategy
    from lightning.pytorch.trainer import trainer

    refuse_version("lightning", lightning.__version__, TESTED, force)
    from smckpt.integrations import lightning as ours

    effect = "saves in the background, on disk and in S3"
    provided.attribute(strategy, "TorchCheckpointIO", ours.SmckptCheckpointIO, effect)
    provided.attribute(saving, "pl_load", ours.load_any(saving.pl_load), "loads what was committed")
    effect = "resumes from what was committed, random numbers included"
    provided.attribute(trainer, "_CheckpointConnector", ours.SmckptCheckpointConnector, effect)
    _put_strategies(provided, ours)
    _put_other_name(provided)


def _put_strategies(provided: Provided, ours: Any) -> None:
    top = importlib.import_module("lightning.pytorch.strategies")
    effect = "saves each rank's shards in the background"
    for module, name in _STRATEGIES.items():
        for owner in (top, importlib.import_module(f"{top.__name__}.{module}")):
            provided.attribute(owner, name, getattr(ours, f"Smckpt{name}"), effect)
    registry = top.StrategyRegistry
    for name in ("fsdp", "fsdp_cpu_offload"):
        entry = registry[name]
        stock, entry["strategy"] = entry["strategy"], ours.SmckptFSDPStrategy

        def undo(entry: Any = entry, stock: Any = stock) -> None:
            entry["strategy"] = stock

        provided.by(undo, f"replaced the strategy {name!r}: {effect}")


_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def _put_other_name(provided: Provided) -> None:
    """Let the package pytorch_lightning be lightning.pytorch. It holds the same code a second time,
    whose classes these are not.

    Raises:
        UsageError: it is imported already, so the script would run on it.
    """
    for name in _NAMES:
        if name in sys.modules:
            raise UsageError(
                f"{name} is imported already, and smckpt's classes are those of {_NAMES[name]}",
                remedy=f"provide before it is imported, or import {_NAMES[name]}",
            )
    finder = _OtherName()
    sys.meta_path.insert(0, finder)

    def undo() -> None:
        sys.meta_path.remove(finder)
        for name in [one for one in sys.modules if one.partition(".")[0] in _NAMES]:
            del sys.modules[name]

    provided.by(undo, "provided the package pytorch_lightning: it is lightning.pytorch")


class _OtherName(MetaPathFinder, Loader):
    """Imports a module of lightning under the name that it has in the package's other edition."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        top, dot, below = fullname.partition(".")
        if top not in _NAMES:
            return None
        module = importlib.import_module(_NAMES[top] + dot + below)
        return ModuleSpec(fullname, self, loader_state=(module, module.__spec__))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        _, module.__spec__ = module.__spec__.loader_state
