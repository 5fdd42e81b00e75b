"""The resumption point of a run: rank 0 alone looks for it, and tells the other ranks.

`SmckptTrainer` has this connector, and NeMo's names stand for it. It also saves and
restores the random numbers of each rank, which Lightning does not.

`SmckptMemory` keeps the last steps in the memory of the hosts (docs/recovery.md).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import distributed as dist

from smckpt.checkpoint.records.objects import decode_object, encode_object
from smckpt.formats.conversion.stock import optimizer_key, state_of
from smckpt.integrations.kept import KeptSteps, memory_of
from smckpt.integrations.lightning.plugin import OF_SLURM, SAVE_OPTIONS, Saves, written_by_lightning
from smckpt.manager.memory import Memory
from smckpt.manager.room import get_memory
from smckpt.manager.state import random_state, set_random_state
from smckpt.meeting.group import group_at
from smckpt.storage.urls import disk_path, is_local

_KEY = "smckpt"


class SmckptCheckpointConnector(_CheckpointConnector):  # type: ignore[misc]
    """`trainer._checkpoint_connector = SmckptCheckpointConnector(trainer)`, as in NeMo.

    `ckpt_path="last"` is the newest committed checkpoint of the Trainer's `ModelCheckpoint`s and
    `OnExceptionCheckpoint`s, in S3 too. Without one the run begins anew. `fit` takes it also where
    Lightning does: without a `ckpt_path`, if there is an `OnExceptionCheckpoint`.
    """

    _each_saves = False

    def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks = self.trainer.callbacks
        on_exception = any(isinstance(one, OnExceptionCheckpoint) for one in callbacks)
        hpc = SLURMEnvironment.detect() and self._hpc_resume_path  # Lightning's own, which is first
        fits = self.trainer.state.fn == TrainerFn.FITTING
        if ckpt_path is None and on_exception and fits and not hpc:
            ckpt_path = "last"
            rank_zero_info("there is an OnExceptionCheckpoint, so ckpt_path=None is 'last'")
        if ckpt_path == "last" and (on_exception or any(map(_is_model_checkpoint, callbacks))):
            return ckpt_path  # the ranks do not meet yet
        return super()._parse_ckpt_path(state_fn, ckpt_path, *args, **kwargs)

    @property
    def _hpc_resume_path(self) -> str | None:
        """The newest of SLURM's checkpoints; one that a kill left uncommitted is passed over."""
        newest: str | None = super()._hpc_resume_path
        if newest is None or not is_local(newest):
            return newest
        saves, found = self._saves() or Saves({}), list[tuple[int, str]]()
        for one in os.scandir(os.path.dirname(newest)):
            number = OF_SLURM.fullmatch(one.name)
            if number and (written_by_lightning(one.path) or saves.find(one.path)):
                found.append((int(number[1]), one.path))
        return max(found)[1] if found else None

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        strategy = self.trainer.strategy
        if not checkpoint_path and self._user_managed:  # a callback's setup() has told this rank
            checkpoint_path = self._ckpt_path
        if checkpoint_path == "last":
            memory = [one for one in self.trainer.callbacks if isinstance(one, SmckptMemory)]
            kept = [one.begin(self.trainer) for one in memory]  # on all ranks
            found = self._newest(kept) if strategy.is_global_zero else None
            checkpoint_path = strategy.broadcast(found)
            if checkpoint_path is None:
                rank_zero_warn("there is no committed checkpoint: training begins anew")
        super().resume_start(checkpoint_path, weights_only)

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().dump_checkpoint(weights_only)
        if weights_only:
            return checkpoint
        trainer, own = self.trainer, json.dumps(encode_object(random_state()))
        random = {str(trainer.global_rank): own}
        alone = not (self._each_saves or getattr(trainer.strategy, "saves", None))
        if trainer.world_size > 1 and alone:
            # rank 0 saves alone, so it saves the numbers of all ranks
            states: list[Any] = [None] * trainer.world_size
            dist.gather_object(own, states if trainer.global_rank == 0 else None)
            random = {str(rank): state for rank, state in enumerate(states)}
        checkpoint[_KEY] = {
            "epoch_ended": bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch),
            "ranks": trainer.world_size,
            "random": random,
        }
        return checkpoint

    def dump_of_each_rank(self) -> dict[str, Any]:
        """A checkpoint that all ranks save, whatever the strategy."""
        self._each_saves = True
        try:
            return self.dump_checkpoint(False)
        finally:
            self._each_saves = False

    def resume_end(self) -> None:
        saved = self._loaded_checkpoint.get(_KEY)
        if saved is not None and self.trainer.state.fn == TrainerFn.FITTING:
            own = saved["random"].get(str(self.trainer.global_rank))
            if own is None or saved["ranks"] != self.trainer.world_size:
                rank_zero_info("the number of ranks changed: random numbers are not restored")
            else:
                own = decode_object(json.loads(own))
                self.trainer.callbacks.append(_RestoresRandom(own, saved["epoch_ended"]))
        resumed, fits = bool(self._loaded_checkpoint), self.trainer.state.fn == TrainerFn.FITTING
        super().resume_end()
        callbacks = self.trainer.checkpoint_callbacks
        if fits and not all(getattr(one, "save_weights_only", False) for one in callbacks):
            if resumed:
                self._get_memory()
            else:
                self.trainer.callbacks.append(_GetsMemory(self._get_memory))

    def _get_memory(self) -> None:
        """Begin to get that of the first save."""
        strategy = self.trainer.strategy
        each = getattr(strategy, "saves", None) is not None  # else rank 0 saves alone
        optimizers = self.trainer.optimizers
        if not each:
            known = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and self._saves()
            gathers = any(hasattr(one, "consolidate_state_dict") for one in optimizers)
            if not known or gathers or not strategy.is_global_zero:
                return

        def take() -> dict[str, Any]:
            states = map(strategy.optimizer_state, optimizers)
            state = {optimizer_key(index): saved for index, saved in enumerate(states)}
            return {**state, "model": strategy.lightning_module_state_dict()}

        group = None if each else group_at([self.trainer.global_rank])
        get_memory(take, group, [SAVE_OPTIONS])

    def _saves(self) -> Saves | None:
        """Those of the strategy or of its plugin, which have the options of S3."""
        strategy = self.trainer.strategy
        plugin = getattr(strategy.checkpoint_io, "checkpoint_io", strategy.checkpoint_io)
        given = [getattr(owner, "saves", None) for owner in (strategy, plugin)]
        return next((one for one in given if isinstance(one, Saves)), None)

    def _newest(self, kept: Sequence[KeptSteps]) -> str | None:
        saves = self._saves() or Saves({})
        found, last = [], set[str]()  # last: what stands under the names that Lightning looks for
        for callback in filter(_is_model_checkpoint, self.trainer.callbacks):
            if callback.dirpath:
                found += saves.find(os.fspath(callback.dirpath), 1)
            if is_local(os.fspath(callback.dirpath or "")):
                last |= set(filter(os.path.exists, callback._find_last_checkpoints(self.trainer)))
        for callback in self.trainer.callbacks:
            if isinstance(callback, OnExceptionCheckpoint):
                found += saves.find(callback.ckpt_path)
                last |= {callback.ckpt_path} if os.path.exists(callback.ckpt_path) else set()
        for steps in kept:
            found += islice(steps.newest_first(), 1)
        found.sort(key=lambda one: (one.step or 0, one.committed_at), reverse=True)
        fits = self.trainer.state.fn == TrainerFn.FITTING
        # fit needs the optimizers, which a save_weights_only callback leaves out
        resumable = (one for one in found if not fits or saves.has_optimizers(one))
        ours = next(resumable, found[0] if found else None)
        stock = max(filter(written_by_lightning, last), key=_modified, default=None)
        if stock is not None and (ours is None or _modified(stock) > ours.committed_at):
            return stock
        if ours is None or (there := disk_path(ours.path)) is None:
            return ours and ours.path
        # Lightning never removes the path that a run resumed from: by the name of the link it may
        linked = (one for one in last if os.path.islink(one) and os.path.samefile(one, there))
        return next(linked, ours.path)


class _RestoresRandom(Callback):  # type: ignore[misc]
    """Sets the generators when the data's iterators exist, before the first batch is fetched."""

    def __init__(self, state: Mapping[str, Any], epoch_ended: bool) -> None:
        self.state = state
        self.epoch_ended = epoch_ended

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        set_random_state(self.state)
        loop = trainer.fit_loop
        plain = not any(hasattr(one, "load_state_dict") for one in loop._combined_loader.flattened)
        if self.epoch_ended and plain:
            iter(loop._data_fetcher)  # the next epoch's order is drawn from these generators
        trainer.callbacks.remove(self)


class _GetsMemory(Callback):  # type: ignore[misc]
    """Begins to get the first save's memory after a new run's first step, if that was not saved."""

    def __init__(self, get_memory: Callable[[], None]) -> None:
        self.get_memory = get_memory

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not (step := trainer.global_step):
            return  # gradients are accumulated
        trainer.callbacks.remove(self)
        saved = (getattr(c, "_last_global_step_saved", 0) for c in trainer.checkpoint_callbacks)
        if step not in saved:
            self.get_memory()


def _modified(path: str) -> int:
    return os.stat(path).st_mtime_ns


def _is_model_checkpoint(callback: Any) -> bool:
    return isinstance(callback, ModelCheckpoint)


class SmckptTrainer(Trainer):  # type: ignore[misc]
    """Lightning's `Trainer`, resuming through `SmckptCheckpointConnector`."""

    @functools.wraps(Trainer.__init__)  # type: ignore[misc] # Lightning reads its arguments' names
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoint_connector = SmckptCheckpointConnector(self)


# NeMo: rank 0 alone finds where to resume from S3. `trainer._checkpoint_connector =
# NeMoCheckpointConnector(trainer)`; rank 0 sets `trainer.ckpt_path`, `NeMoModelCheckpoint.setup()`
# broadcasts it, and the connector of each rank takes it.
NeMoCheckpointConnector = SmckptCheckpointConnector


class NeMoModelCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Lightning's `ModelCheckpoint`; `setup` tells all ranks where rank 0 resumes. It has none of
    the arguments that concern `.nemo` archives."""

    last_model_path: str

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        trainer.ckpt_path = trainer.strategy.broadcast(trainer.ckpt_path)
        last: str = self.last_model_path
        self.last_model_path = trainer.strategy.broadcast(last)


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
