"""Local checkpoints as files: one for each state, in a directory of each rank. What is due in the
hosts' memory goes there in place of the directory (docs/recovery.md)."""

from __future__ import annotations

import copy
import io
import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

import smckpt
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.engine.saving.job import SaveHandle
from smckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
    as_checkpoint_error,
)
from smckpt.integrations.kept import KeptSteps, memory_of
from smckpt.integrations.nvrx.async_ckpt import save_whole, sweep_unfinished
from smckpt.integrations.nvrx.async_ckpt.core import AsyncRequest, PendingSave
from smckpt.integrations.nvrx.local.basic_state_dict import TensorAwareStateDict
from smckpt.integrations.nvrx.local.replication.strategies import GroupWrapper, ReplicationStrategy
from smckpt.storage.disk.directory import Directory
from smckpt.storage.urls import Below

__all__ = [
    "BaseCheckpointManager",
    "CheckpointingException",
    "CkptID",
    "LocalCheckpointManager",
    "SameMachineReplicationException",
]


CkptID = tuple[int, int, Any]  # iteration, rank, session


class CheckpointingException(CheckpointError):
    """A local checkpoint is not whole, or is not there."""


class SameMachineReplicationException(CheckpointingException):
    """NVRx's error for a file that two ranks of one directory would write. Nothing here raises it;
    a `_save` of the user's may."""

    def __init__(self, ckpt_id: Any) -> None:
        super().__init__(f"checkpoint {ckpt_id} is on this machine already")


class BaseCheckpointManager(ABC):
    """A class of the user's has the abstract methods, or overrides `_save` and `_load`, as of NVRx.
    `_save` runs in the worker, on a copy of the object without the strategy.

    Args:
        session_id: what tells the checkpoints of one training from others in the place.
        repl_strategy: which ranks keep copies for each other; None: none do.
    """

    def __init__(self, session_id: str, repl_strategy: ReplicationStrategy | None = None) -> None:
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.latest_iteration = -1
        self.globally_available_ids: list[list[CkptID]] = []
        self._rank: int | None = None  # of the copy in the worker, where no process group is

    @property
    def rank(self) -> int:
        if self._rank is not None:
            return self._rank
        return dist.get_rank() if dist.is_initialized() else 0

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """What this rank has."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict: ...

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Write a state."""

    @abstractmethod
    def _cleanup(self, iteration: int) -> None:
        """Remove what is older than the checkpoint of an iteration, which is whole."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove what was written of an iteration."""

    def _save_fn(self, id_to_state_dict: dict[CkptID, TensorAwareStateDict]) -> None:
        for ckpt_id, state_dict in id_to_state_dict.items():
            self._save(state_dict, ckpt_id)

    def find_latest(self) -> int:
        """The newest iteration of which every rank can have its state, or -1; all ranks call
        this."""
        if self.latest_iteration == -1:
            self.latest_iteration = self._newest_written()
        return self.latest_iteration

    def _newest_written(self) -> int:
        """The newest iteration that `_save` has written for every rank, or -1; all ranks call
        this."""
        mine = list(self._my_ckpt_ids())
        if self.repl_strategy is None:
            mine = [one for one in mine if one[1] == self.rank]
        everyone = GroupWrapper()
        self.globally_available_ids = everyone.all_gather_object(mine)
        ranks_of = defaultdict(set)
        for iteration, rank, _ in (one for ids in self.globally_available_ids for one in ids):
            ranks_of[iteration].add(rank)
        # states of ranks that the job does not have are parts of a larger job's
        whole = [it for it, ranks in ranks_of.items() if ranks == set(everyone.ranks)]
        return max(whole, default=-1)

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """This rank's state of the iteration that `find_latest` has found, and its id; all ranks
        call this.

        Raises:
            CheckpointingException: `find_latest` has found none, or was not called.
            NoReplicasAvailableError: it is lost, with all copies.
        """
        if self.latest_iteration == -1:
            raise CheckpointingException(
                "there is no local checkpoint to load",
                remedy="call find_latest() first; -1 says that there is none",
            )
        wanted = self._ckpt_id(self.latest_iteration)
        if self.repl_strategy is None:
            state = self._load(wanted)
        else:
            plan = self.repl_strategy.retrieve_plan(self.globally_available_ids, [wanted])
            mine = {one: self._load(one) for one in plan.required_ids()}
            state = self.repl_strategy.retrieve_execute(plan, mine)[wanted]
        state.restore_tensor_device(non_blocking=False)
        return state, wanted

    def save(
        self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> AsyncRequest | None:
        """Save this rank's state; all ranks call this.

        Args:
            is_async: return a request for an AsyncCallsQueue, of either kind.

        Raises:
            CheckpointingException: there is a newer one; or not all ranks could write.
        """
        self._refuse_older(iteration)
        mine = self._ckpt_id(iteration)
        states = {mine: state_dict}
        if self.repl_strategy is not None:
            copies, ids = self.repl_strategy.replicate(state_dict, mine)
            states = dict(zip(ids, copies, strict=True))
        states[mine].copy_tensors_to_cpu(non_blocking=False)
        self.latest_iteration = -1
        if is_async:
            sent = copy.copy(self)
            sent.repl_strategy, sent.globally_available_ids, sent._rank = None, [], self.rank
            finalize = [lambda: self._finalize(iteration, True)]
            return AsyncRequest(sent._save_fn, (states,), finalize, {})
        failed: Exception | None = None
        try:
            self._save_fn(states)
        except Exception as error:  # the peers wait for this rank
            log.exception("a local checkpoint could not be written")
            failed = error
        if dist.is_initialized():
            dist.barrier()
        try:
            self._finalize(iteration, False)
        except CheckpointingException as error:
            raise error from failed
        return None

    def _refuse_older(self, iteration: int) -> None:
        if self.latest_iteration >= iteration:
            raise CheckpointingException(
                f"iteration {iteration} is not newer than {self.latest_iteration}",
                remedy="save iterations in order",
            )

    def _finalize(self, iteration: int, in_background: bool) -> None:
        began = time.monotonic()
        found, self.latest_iteration = self._newest_written(), -1
        remove = self._cleanup if found >= iteration else self._cleanup_failed_save
        if in_background:
            threading.Thread(target=remove, args=(iteration,), name="smckpt-local").start()
        else:
            remove(iteration)
        log.debug("finalize_fn took %.4fs", time.monotonic() - began)  # NVRx's own words
        if found < iteration:
            raise CheckpointingException(
                f"the local checkpoint of iteration {iteration} is not whole: the newest that is, "
                f"is {found} (-1: none)",
                remedy="see the log of the rank that could not write; is its disk full?",
            )

    def _ckpt_id(self, iteration: int) -> CkptID:
        if iteration < 0:
            raise CheckpointingException(f"iteration {iteration}", remedy="pass 0 or more")
        return iteration, self.rank, self.session_id


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
        smckpt_arguments: `{"memory": smckpt.Memory(interval=1)}` keeps the iterations that are due
            there in the hosts' memory, with copies on other hosts.

    Raises:
        UsageError: other arguments; or memory with a strategy, or with a `_save` or `_load` of the
            user's own, which it would not call.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | Path,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        smckpt_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(session_id, repl_strategy)
        self.root_local_ckpt_dir = root_local_ckpt_dir
        self._memory = memory_of(smckpt_arguments)
        self._kept: KeptSteps | None = None
        self._in_memory = -1  # of the iterations that `find_latest` has found there
        self._lost: set[int] = set()  # iterations there that did not load
        own = [each for each in ("_save", "_load") if getattr(type(self), each)
               is not getattr(LocalCheckpointManager, each)]  # fmt: skip
        refused = sorted(map(str, smckpt_arguments.keys() - {"memory"}))
        if self._memory is not None:
            refused += ["memory beside repl_strategy"] * (repl_strategy is not None)
            refused += [f"memory, with which {each} would not be called" for each in own]
        if refused:
            raise UsageError(
                f"smckpt_arguments has {', '.join(refused)}, which is not honoured",
                remedy="leave it out; keepers make the copies of what is in memory",
            )

    def __getstate__(self) -> dict[str, Any]:  # to the worker, which writes files
        return {**vars(self), "_kept": None}

    def find_latest(self) -> int:
        if self.latest_iteration == -1 and (kept := self._kept_steps()) is not None:
            ranks = len(GroupWrapper().ranks)
            self._in_memory = kept.newest(
                lambda one: one.metadata.get("ranks") == ranks and one.step not in self._lost
            )
        self.latest_iteration = max(super().find_latest(), self._in_memory)
        return self.latest_iteration

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        kept, iteration = self._kept_steps(), self.latest_iteration
        if kept is None or iteration == -1 or iteration != self._in_memory:
            loaded = super().load()
            if kept is not None:
                kept.restored(iteration)
            return loaded
        found: dict[str, Any] = {}
        failed: CheckpointError | None = None

        def fill(step: FoundCheckpoint) -> None:
            mine = smckpt.LoadOptions(only=[str(self.rank)])
            found.update(smckpt.load(checkpoint_id=step, options=mine) or {})

        try:
            is_loaded = kept.resume(fill, only=iteration)
        except (CorruptCheckpointError, StorageError) as error:
            is_loaded, failed = False, error
        if not is_loaded:
            self._lost.add(iteration)  # `find_latest` passes over it, to an older one
            self.latest_iteration = -1
            raise _gone(f"iteration {iteration} in memory") from failed
        tensors, hollow = found[str(self.rank)]
        # as of a file: the class of the state is the user's own
        state: TensorAwareStateDict = torch.load(io.BytesIO(hollow.numpy()), weights_only=False)
        state.insert_tensors(tensors)
        state.restore_tensor_device(non_blocking=False)
        return state, self._ckpt_id(iteration)

    def save(
        self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> AsyncRequest | None:
        handle: SaveHandle | CheckpointError | None = None
        if (kept := self._kept_steps()) is not None:
            self._refuse_older(iteration)
            ranks = {"ranks": len(GroupWrapper().ranks)}
            mine = str(self._ckpt_id(iteration)[1])
            self._lost.discard(iteration)
            try:
                handle = kept.save(iteration, lambda: {mine: _parts(state_dict)}, ranks)
            except Exception as error:  # of this rank alone; the others have a handle, which fails
                if not is_async:
                    raise
                handle = as_checkpoint_error(error, self.rank)  # all hear it when they finalize
        if handle is None:
            return super().save(state_dict, iteration, is_async)
        self.latest_iteration = -1
        if is_async:
            return AsyncRequest(PendingSave(handle), (), [])
        assert not isinstance(handle, CheckpointError)
        if (failed := handle.exception()) is not None:
            raise CheckpointingException(
                f"iteration {iteration} is not kept in memory: {failed}",
                remedy="see the log; the iterations that were kept before stay",
            ) from failed
        return None

    def _kept_steps(self) -> KeptSteps | None:
        """Those of the job; all ranks call it first together. A rank may name a root of its own:
        that of rank 0 counts."""
        if self._memory is not None and self._kept is None:
            root = f"{os.path.abspath(self.root_local_ckpt_dir)}/{self.session_id}"
            root = GroupWrapper().all_gather_object(root)[0]
            self._kept = KeptSteps(self._memory, None, named=root)
        return self._kept

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
            raise _gone("the local checkpoint", str(path)) from error
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


def _parts(state: TensorAwareStateDict) -> list[Any]:
    """The tensors of a state, and the rest of it, pickled."""
    tensors, rest = list(state.pop_tensors()), io.BytesIO()
    try:
        torch.save(state, rest)
    finally:
        state.insert_tensors(tensors)
    return [tensors, torch.frombuffer(rest.getbuffer(), dtype=torch.uint8)]


def _gone(what: str, path: str | None = None) -> CheckpointingException:
    return CheckpointingException(f"{what} is gone", remedy="call find_latest() anew", path=path)
