"""A Trainer's steps in the memory of its hosts."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from smckpt.errors import UsageError
from smckpt.integrations.kept import KeptSteps
from smckpt.integrations.replaced import run_directory
from smckpt.manager.memory import Memory
from smckpt.translate.conversion.stock import state_of

__all__ = ["SmckptMemory"]


class SmckptMemory(Callback):  # type: ignore[misc]
    """`SmckptTrainer(callbacks=[SmckptMemory(Memory(interval=20)), ...])`: each 20th step is saved
    in the memory of the hosts too, and `ckpt_path="last"` is the newest step of memory and of the
    `ModelCheckpoint`s' directories (docs/recovery.md). It has one process, or a sharded strategy of
    smckpt's.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.kept: KeptSteps | None = None
        self._seen = 0  # the step at the end of the last batch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """
        Raises:
            UsageError: a strategy, under which rank 0 alone saves.
        """
        if stage != "fit":
            return
        saves = getattr(trainer.strategy, "saves", None)
        if trainer.world_size > 1 and saves is None:
            raise UsageError(
                f"SmckptMemory is not honoured under {type(trainer.strategy).__name__}, whose rank "
                "0 saves alone",
                remedy="leave it out, or train with SmckptFSDPStrategy or "
                "SmckptModelParallelStrategy",
            )
        # The steps in memory are told from those of other runs by where the run saves.
        found = (one.dirpath for one in trainer.callbacks if isinstance(one, ModelCheckpoint))
        root = next(filter(None, found), None) or trainer.default_root_dir
        self.kept = KeptSteps(self.memory, run_directory(os.fspath(root), "memory-{step}", {}))
        self.kept.begin()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._seen = trainer.global_step
        if self.kept is not None:
            self.kept.restored(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        stepped, self._seen = self._seen != trainer.global_step, trainer.global_step
        if self.kept is not None and stepped:  # not between the batches of accumulate_grad_batches
            connector = trainer._checkpoint_connector
            self.kept.save(trainer.global_step, lambda: state_of(connector.dump_checkpoint(False)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the saves under way."""
        if self.kept is not None:
            self.kept.close()
            self.kept = None
