"""The resumption point of a run: rank 0 alone looks for it, and tells the other ranks.

It also saves and restores the random numbers of each rank, which Lightning does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import distributed as dist

from smckpt.checkpoint.records.objects import decode_object, encode_object
from smckpt.integrations.lightning.saves import Saves, written_by_lightning
from smckpt.manager.state import random_state, set_random_state
from smckpt.storage.urls import is_local

__all__ = ["SmckptCheckpointConnector"]

_KEY = "smckpt"


class SmckptCheckpointConnector(_CheckpointConnector):  # type: ignore[misc]
    """`trainer._checkpoint_connector = SmckptCheckpointConnector(trainer)`, as in NeMo.

    `ckpt_path="last"` is the newest committed checkpoint in the directories of the Trainer's
    `ModelCheckpoint`s, in S3 too. Without one the run begins anew.
    """

    def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        if ckpt_path == "last" and any(map(_is_model_checkpoint, self.trainer.callbacks)):
            return ckpt_path  # the ranks do not meet yet
        return super()._parse_ckpt_path(state_fn, ckpt_path, *args, **kwargs)

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        strategy = self.trainer.strategy
        if not checkpoint_path and self._user_managed:  # a callback's setup() has told this rank
            checkpoint_path = self._ckpt_path
        if checkpoint_path == "last":
            found = self._newest() if strategy.is_global_zero else None
            checkpoint_path = strategy.broadcast(found)
            if checkpoint_path is None:
                rank_zero_warn("there is no committed checkpoint: training begins anew")
        super().resume_start(checkpoint_path, weights_only)

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().dump_checkpoint(weights_only)
        if not weights_only:
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            checkpoint[_KEY] = {
                "epoch_ended": bool(progress.is_last_batch),
                "ranks": self.trainer.world_size,
                "random": self._random_states(),
            }
        return checkpoint

    def resume_end(self) -> None:
        saved = self._loaded_checkpoint.get(_KEY)
        if saved is not None and self.trainer.state.fn == TrainerFn.FITTING:
            own = saved["random"].get(str(self.trainer.global_rank))
            if own is None or saved["ranks"] != self.trainer.world_size:
                rank_zero_info("the number of ranks changed: random numbers are not restored")
            else:
                own = decode_object(json.loads(own))
                self.trainer.callbacks.append(_RestoresRandom(own, saved["epoch_ended"]))
        super().resume_end()

    def _newest(self) -> str | None:
        saves = _saves_of(self.trainer)
        found = []
        for callback in filter(_is_model_checkpoint, self.trainer.callbacks):
            if callback.dirpath:
                found += saves.find(os.fspath(callback.dirpath), 1)
        ours = max(found, key=lambda one: (one.step or 0, one.committed_at), default=None)
        last = self._last_of_lightning()
        stock = max(filter(written_by_lightning, last), key=_modified, default=None)
        if stock is not None and (ours is None or _modified(stock) > ours.committed_at):
            return stock
        if ours is None:
            return None
        # Lightning never removes the path that a run resumed from: by the name of the link it may
        linked = (one for one in last if os.path.islink(one) and os.path.samefile(one, ours.path))
        return next(linked, ours.path)

    def _last_of_lightning(self) -> set[str]:
        """What stands under the names that Lightning looks for."""
        found = set[str]()
        for callback in filter(_is_model_checkpoint, self.trainer.callbacks):
            if is_local(os.fspath(callback.dirpath or "")):
                found |= callback._find_last_checkpoints(self.trainer)
        return {one for one in found if os.path.exists(one)}

    def _random_states(self) -> dict[str, str]:
        """By rank: of all ranks, where rank 0 saves alone."""
        rank = self.trainer.global_rank
        own = json.dumps(encode_object(random_state()))
        if self.trainer.world_size == 1 or getattr(self.trainer.strategy, "saves", None):
            return {str(rank): own}
        states: list[Any] = [None] * self.trainer.world_size
        dist.gather_object(own, states if rank == 0 else None)
        return {str(each): state for each, state in enumerate(states)}


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


def _saves_of(trainer: Any) -> Saves:
    """Those of the strategy or of its plugin; they have the options of S3."""
    plugin = trainer.strategy.checkpoint_io
    inner = getattr(plugin, "checkpoint_io", plugin)
    for owner in (trainer.strategy, inner):
        if isinstance(saves := getattr(owner, "saves", None), Saves):
            return saves
    return Saves({})


def _modified(path: str) -> int:
    return os.stat(path).st_mtime_ns


def _is_model_checkpoint(callback: Any) -> bool:
    return isinstance(callback, ModelCheckpoint)
