"""Lightning's sharded strategies, saving and loading through smckpt.

They do not use a `CheckpointIO`: each saves with torch DCP, removes without waiting, and never asks
a plugin to end. So a strategy of smckpt's own takes all four over: saving, loading, removing and
the wait at the end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

import smckpt
from smckpt.errors import UsageError
from smckpt.formats.conversion.stock import LIGHTNING_KEYS, optimizer_key, rest_of, state_of
from smckpt.integrations.lightning.plugin import (
    Saves,
    SmckptCheckpointIO,
    refuse_storage_options,
    written_by_lightning,
)
from smckpt.manager.state import optimizer_state
from smckpt.storage import StoreOptions


class _ThroughSmckpt:
    """Put before a strategy among the bases of a class. All ranks save, each its shards."""

    saves: Saves
    async_checkpointing: bool

    model: Any
    lightning_module: Any
    optimizers: Any
    is_global_zero: bool

    def _set(
        self, async_checkpointing: bool, storage: StoreOptions | Mapping[str, Any] | None
    ) -> None:
        self.saves = Saves({"storage": storage})
        self.async_checkpointing = async_checkpointing

    @property
    def checkpoint_io(self) -> Any:
        """Lightning asks for one; nothing is saved through it."""
        return TorchCheckpointIO()

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if not isinstance(io, SmckptCheckpointIO):
            raise UsageError(
                f"{type(io).__name__} is not honoured: a sharded strategy does not save through it",
                remedy=f"leave it out; {type(self).__name__} saves to disk and S3 itself",
            )
        self.saves, self.async_checkpointing = io.saves, io.async_checkpointing

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with smckpt.sm_state_dict_type(self.model, smckpt.SHARDED):
            state: dict[str, Any] = self.model.state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> Any:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return optimizer_state(optimizer, [self.model], smckpt.SHARDED)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """
        Raises:
            SaveFailedError: as `SmckptCheckpointIO.save_checkpoint`, on all ranks.
        """
        refuse_storage_options(storage_options)
        state = state_of(checkpoint)
        if self.is_global_zero:
            self.saves.make_room(os.fspath(filepath))
        self.saves.save(
            state,
            self.broadcast(os.fspath(filepath)),  # type: ignore[attr-defined]
            wait=not self.async_checkpointing,
            step=checkpoint.get("global_step"),
        )

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the model, and for training the optimizers, and return the rest.

        Raises:
            CheckpointError: as `smckpt.load`.
        """
        path: str = self.broadcast(os.fspath(checkpoint_path))  # type: ignore[attr-defined]
        if written_by_lightning(path):
            stock: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return stock
        target = {"model": self.lightning_module_state_dict()}
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            for index, optimizer in enumerate(self.optimizers):
                target[optimizer_key(index)] = self.optimizer_state(optimizer)
        strict = self.lightning_module.strict_loading
        self.saves.load(path, target, check_keys_matched=strict)
        rest = self.saves.load(path, options=smckpt.LoadOptions(only=LIGHTNING_KEYS))
        return rest_of(rest, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove it when the save that replaces it is committed."""
        if self.is_global_zero:
            self.saves.drop(os.fspath(filepath))

    def teardown(self) -> None:
        """
        Raises:
            SaveFailedError: the last save was not committed.
        """
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self.saves.finish()


class SmckptFSDPStrategy(_ThroughSmckpt, FSDPStrategy):  # type: ignore[misc]
    """Lightning's `FSDPStrategy` (FSDP1). Its arguments stay as they are.

    Args:
        state_dict_type: "sharded"; "full" is refused, since `smckpt export` makes one file.
        async_checkpointing, storage: as for `SmckptCheckpointIO`.
    """

    def __init__(
        self,
        *args: Any,
        state_dict_type: str = "sharded",
        async_checkpointing: bool = True,
        storage: StoreOptions | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_whole("state_dict_type", state_dict_type, "sharded")
        self._set(async_checkpointing, storage)
        super().__init__(*args, state_dict_type="sharded", **kwargs)


class SmckptModelParallelStrategy(_ThroughSmckpt, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's `ModelParallelStrategy` (FSDP2, tensor parallel). Its arguments stay as they are.

    Args:
        save_distributed_checkpoint: True; False is refused, since `smckpt export` makes one file.
        async_checkpointing, storage: as for `SmckptCheckpointIO`.
    """

    def __init__(
        self,
        *args: Any,
        save_distributed_checkpoint: bool = True,
        async_checkpointing: bool = True,
        storage: StoreOptions | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_whole("save_distributed_checkpoint", save_distributed_checkpoint, True)
        self._set(async_checkpointing, storage)
        super().__init__(*args, save_distributed_checkpoint=True, **kwargs)


def _refuse_whole(name: str, given: Any, only: Any) -> None:
    if given != only:
        raise UsageError(
            f"{name}={given!r} is not honoured: each rank saves its shards",
            remedy="leave it out, and make one file of weights with `smckpt export`",
        )
