"""The door to Lightning: replaces its default plugin, its sharded strategies and its connector."""

from __future__ import annotations

import importlib
from typing import Any

from smckpt.run.places import Provided, refuse_version

__all__ = ["TESTED", "put"]

TESTED = ("2.6",)
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

    told = "saves in the background, on disk and in S3"
    provided.attribute(strategy, "TorchCheckpointIO", ours.SmckptCheckpointIO, told)
    provided.attribute(saving, "pl_load", ours.load_any(saving.pl_load), "loads what was committed")
    told = "resumes from what was committed, random numbers included"
    provided.attribute(trainer, "_CheckpointConnector", ours.SmckptCheckpointConnector, told)
    _put_strategies(provided, ours)


def _put_strategies(provided: Provided, ours: Any) -> None:
    top = importlib.import_module("lightning.pytorch.strategies")
    told = "saves each rank's shards in the background"
    for module, name in _STRATEGIES.items():
        for owner in (top, importlib.import_module(f"{top.__name__}.{module}")):
            provided.attribute(owner, name, getattr(ours, f"Smckpt{name}"), told)
    registry = top.StrategyRegistry
    for name in ("fsdp", "fsdp_cpu_offload"):
        entry = registry[name]
        stock, entry["strategy"] = entry["strategy"], ours.SmckptFSDPStrategy

        def undo(entry: Any = entry, stock: Any = stock) -> None:
            entry["strategy"] = stock

        provided.by(undo, f"replaced the strategy {name!r}: {told}")
