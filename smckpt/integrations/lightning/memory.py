"""A Trainer's last steps in the memory of its hosts (docs/recovery.md)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from smckpt.formats.conversion.stock import state_of
from smckpt.integrations.kept import KeptSteps, memory_of
from smckpt.manager.memory import Memory

__all__ = ["SmckptMemory"]


class SmckptMemory(Callback):  # type: ignore[misc]
    """`SmckptTrainer(callbacks=[SmckptMemory(Memory(interval=20)), ...])`. All ranks save, also
    under DDP. `ckpt_path="last"` takes the newest step of memory and of the `ModelCheckpoint`s.

    A step has the state that callbacks after this one have before they see its end.

    Raises:
        UsageError: `memory` is no `Memory` of keepers.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory_of({"memory": memory})
        self._kept: KeptSteps | None = None
        self._saved = -1

    def begin(self, trainer: Any) -> KeptSteps:
        """The steps of the run, which the directory of its `ModelCheckpoint` names. All ranks call
        it."""
        if self._kept is None:
            assert self.memory is not None
            of_run = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]
            where = next((str(one.dirpath) for one in of_run if one.dirpath), "")
            named = trainer.strategy.broadcast(where or trainer.default_root_dir)
            self._kept = KeptSteps(self.memory, None, named=named)
            self._kept.begin()
        return self._kept

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._saved = trainer.global_step
        self.begin(trainer).restored(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == self._saved:  # the optimizer has not stepped
            return
        self._saved = step

        def state() -> dict[str, Any]:
            saved: dict[str, Any] = trainer._checkpoint_connector.dump_of_each_rank()
            return state_of(saved)

        self.begin(trainer).save(step, state)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == TrainerFn.FITTING and self._kept is not None:
            self._kept.close()
            self._kept = None
