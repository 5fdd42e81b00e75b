"""Local checkpoints as files: one for each state, in a directory of each rank."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch

from smckpt.errors import UsageError
from smckpt.integrations.nvrx.async_ckpt.torch_ckpt import save_whole, sweep_unfinished
from smckpt.integrations.nvrx.local.base_state_dict import TensorAwareStateDict
from smckpt.integrations.nvrx.local.ckpt_managers.base_manager import (
    BaseCheckpointManager,
    CheckpointingException,
    CkptID,
)
from smckpt.integrations.nvrx.local.replication.strategies import ReplicationStrategy
from smckpt.storage.disk.directory import Directory
from smckpt.storage.urls import Below

__all__ = ["LocalCheckpointManager"]

log = logging.getLogger("smckpt")

_DIGITS = 7
_NAME = re.compile(r"iter_(\d+)_(\d+)_local\.pt")
_ANY = re.compile(r"iter_(\d+)_\d+_local.*\.pt")


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

    def _opened(self, *, make: bool = False) -> Directory:
        """It, below the directory that the user named: no link leads from there."""
        root = os.path.abspath(self.root_local_ckpt_dir)
        names = Path(self.session_id, str(self.rank)).parts
        return Directory.open(root, names, make=make)

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        try:
            with self._opened() as directory:
                sweep_unfinished(directory, _NAME)
                names = directory.names()
        except FileNotFoundError:
            return
        except (OSError, UsageError) as error:  # the other ranks wait: this one has nothing
            log.warning("%s cannot be read: %s", self.local_ckpt_dir, error)
            return
        for name in names:
            if named := _NAME.fullmatch(name):
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

    def _ensure_dir(self) -> None:
        with self._opened(make=True) as directory:
            sweep_unfinished(directory, _NAME)  # before a save needs the room

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        self._ensure_dir()
        path = str(self._local_ckpt_path_from_id(ckpt_id))
        save_whole(state_dict, Below(path, os.path.abspath(self.root_local_ckpt_dir)))

    def _cleanup(self, iteration: int) -> None:
        self._remove(lambda there: there < iteration)

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._remove(lambda there: there == iteration)

    def _remove(self, chosen: Callable[[int], bool]) -> None:
        with suppress(FileNotFoundError, NotADirectoryError), self._opened() as directory:
            for name in directory.names():
                # what a killed save of NVRx's own has left (".dirty") goes too
                if (named := _ANY.fullmatch(name)) and chosen(int(named[1])):
                    directory.remove(name)

    def _filename_from_template(
        self, iteration: int | str, rank: int | str, extra_suffix: str = ""
    ) -> str:
        if isinstance(iteration, int):
            iteration = str(iteration).zfill(_DIGITS)
        return f"iter_{iteration}_{rank}_local{extra_suffix}.pt"

    def _local_ckpt_path_from_id(self, ckpt_id: CkptID, is_dirty: bool = False) -> Path:
        suffix = ".dirty" if is_dirty else ""
        return self.local_ckpt_dir / self._filename_from_template(ckpt_id[0], ckpt_id[1], suffix)
