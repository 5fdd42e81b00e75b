"""Local checkpoints as files: one for each state, in a directory of each rank."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from smckpt.integrations.nvrx.async_ckpt.torch_ckpt import save_whole, sweep_unfinished
from smckpt.integrations.nvrx.local.base_state_dict import TensorAwareStateDict
from smckpt.integrations.nvrx.local.ckpt_managers.base_manager import (
    BaseCheckpointManager,
    CheckpointingException,
    CkptID,
)
from smckpt.integrations.nvrx.local.replication.strategies import ReplicationStrategy

__all__ = ["LocalCheckpointManager"]

log = logging.getLogger("smckpt")

_DIGITS = 7
_NAME = re.compile(r"iter_(\d+)_(\d+)_local\.pt")


class LocalCheckpointManager(BaseCheckpointManager):
    """
    Args:
        root_local_ckpt_dir: on a disk of each node, or in its memory (/dev/shm).
        session_id: a directory below it.
        repl_strategy: which ranks keep copies for each other; None: none do.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | Path,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
    ) -> None:
        super().__init__(session_id, repl_strategy)
        self.root_local_ckpt_dir = root_local_ckpt_dir

    @property
    def local_ckpt_dir(self) -> Path:
        return Path(self.root_local_ckpt_dir) / self.session_id / str(self.rank)

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        sweep_unfinished(self.local_ckpt_dir, _NAME)
        try:
            names = sorted(self.local_ckpt_dir.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:  # the other ranks wait: this one has nothing
            log.warning("%s cannot be read: %s", self.local_ckpt_dir, error)
            return
        for path in names:
            if named := _NAME.fullmatch(path.name):
                yield int(named[1]), int(named[2]), self.session_id

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        path = self._local_ckpt_path_from_id(ckpt_id)
        try:
            # the class of the state is the user's own, so only a full unpickler loads it
            found: TensorAwareStateDict = torch.load(path, weights_only=False)
        except FileNotFoundError as error:
            raise CheckpointingException(
                "the local checkpoint is gone", remedy="call find_latest() anew", path=str(path)
            ) from error
        return found

    def _writer(self) -> Callable[[dict[CkptID, TensorAwareStateDict]], None]:
        return partial(_write, self.local_ckpt_dir)

    def _cleanup(self, iteration: int) -> None:
        self._remove(lambda there: there < iteration)

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._remove(lambda there: there == iteration)

    def _remove(self, chosen: Callable[[int], bool]) -> None:
        for one in list(self._my_ckpt_ids()):
            if chosen(one[0]):
                with contextlib.suppress(FileNotFoundError):
                    self._local_ckpt_path_from_id(one).unlink()

    def _filename_from_template(
        self, iteration: int | str, rank: int | str, extra_suffix: str = ""
    ) -> str:
        return _name(iteration, rank, extra_suffix)

    def _local_ckpt_path_from_id(self, ckpt_id: CkptID, is_dirty: bool = False) -> Path:
        return self.local_ckpt_dir / _name(ckpt_id[0], ckpt_id[1], ".dirty" if is_dirty else "")


def _write(directory: Path, states: dict[CkptID, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    sweep_unfinished(directory, _NAME)  # before this save needs the room
    for (iteration, rank, _), state in states.items():
        save_whole(state, directory / _name(iteration, rank))


def _name(iteration: int | str, rank: int | str, suffix: str = "") -> str:
    return f"iter_{str(iteration).zfill(_DIGITS)}_{rank}_local{suffix}.pt"
