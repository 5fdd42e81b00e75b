"""Saves and loads that torch.distributed.checkpoint plans, for planners and writers of others.

DCP runs collectives here. They would mix with the collectives of training, so each such save has a
gloo group of its own. It waits for the save before it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import (
    AsyncStager,
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from smckpt.engine.saving.job import SaveHandle, SavesOfGroup, Timings
from smckpt.errors import CheckpointError, SaveFailedError, StateError, UsageError
from smckpt.integrations.dcp.reader import DistributedFileSystemReader
from smckpt.layout.entries import dotted
from smckpt.meeting.group import Group, gloo_group
from smckpt.state_dict.of_optimizers.bindings import optimizer_dicts
from smckpt.state_dict.tensors import is_sharded_tensor

__all__ = ["CopyStager", "ForeignQueue", "load_with_dcp", "set_whole_values"]

log = logging.getLogger("smckpt")


class ForeignQueue(SavesOfGroup):
    """The saves of one group that DCP plans, in order, one in flight."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._process_group: Any = None
        self._world: Any = None
        self._numbers = 0

    # -- the front: called by the training thread -------------------------------------------

    def submit(
        self,
        state_dict: Mapping[str, Any] | None,
        *,
        checkpoint_id: str | os.PathLike[str] | None,
        writer: StorageWriter,
        planner: SavePlanner | None,
        group: Group,
        meet: Callable[[], str],
    ) -> SaveHandle:
        """Copy the state, let DCP save it in the background; see `smckpt.async_save`.

        Args:
            meet: meets the ranks of the group that make this save too, and gives a name on which
                they agree.
        """
        began = time.perf_counter()
        handle = SaveHandle(self._numbers, _directory_of(checkpoint_id, writer), None)
        self._numbers += 1
        if self.flying is not None and not self.flying.done():
            log.info("a save waits for save %d, which DCP is still writing", self.flying.number)
            self.flying.ended()  # gloo's timeout bounds each collective of it
        name, process_group = meet(), None
        if dist.is_available() and dist.is_initialized():
            if self._process_group is None or self._world is not dist.group.WORLD:
                # it is another object after the job has made the process group again
                self._world = dist.group.WORLD
                self._process_group = gloo_group(group, name)
            process_group = self._process_group
        refused: BaseException | None = None
        staged: dict[str, Any] = {}
        try:
            staged = _staged(state_dict, writer)
        except BaseException as error:
            # The peers wait in DCP's collectives, so they must learn the error there.
            refused, planner = error, _refusing(error)
        blocked = time.perf_counter() - began
        arguments = {
            "checkpoint_id": checkpoint_id,
            "storage_writer": writer,
            "planner": planner,
            "process_group": process_group,
        }
        self.flying = handle
        threading.Thread(
            target=self._run,
            args=(handle, staged, arguments, began, blocked, refused is not None),
            name="smckpt-dcp",
            daemon=True,
        ).start()
        if refused is not None:
            raise refused
        self._raise_failures()
        return handle

    # -- the thread --------------------------------------------------------------------------

    def _run(
        self,
        handle: SaveHandle,
        staged: dict[str, Any],
        arguments: dict[str, Any],
        began: float,
        blocked: float,
        reported: bool,
    ) -> None:
        error: CheckpointError | None = None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp_save(staged, **arguments)
        except BaseException as raised:  # CheckpointException is not an Exception
            error = error_of_dcp(raised, self.group, handle.checkpoint_id)
        committed = time.perf_counter() - began
        with self._lock:
            if error is None:
                self._committed.append(handle.number)
            elif not reported:
                self._unreported.append(handle)
        if error is not None:
            log.error("save %d was not committed: %s", handle.number, error)
        handle.finish(Timings(blocked, 0.0, blocked, committed, committed, 0), error)


class CopyStager(DefaultStager):
    """torch's stager, and for states of FSDP1 the one that DCP's own writer has: `DefaultStager`
    of torch 2.13 cannot copy ShardedTensors."""

    def __init__(self) -> None:
        super().__init__(StagingOptions(False, False, False, False))

    def stage(self, state_dict: dict[str, Any], **more: Any) -> Any:
        if _holds_sharded_tensor(state_dict):
            return BlockingAsyncStager().stage(state_dict)
        return super().stage(state_dict, **more)


def load_with_dcp(
    state_dict: MutableMapping[str, Any],
    group: Group,
    *,
    checkpoint_id: str | os.PathLike[str] | None,
    reader: StorageReader,
    planner: LoadPlanner | None,
    process_group: Any,
    no_dist: bool,
) -> MutableMapping[str, Any]:
    """`torch.distributed.checkpoint.load`, with smckpt's errors.

    Raises:
        CheckpointError: DCP's load failed; with the cause and the rank where it happened.
        UsageError: it failed because the reader cannot read a checkpoint of smckpt.
    """
    for path, _, binding in optimizer_dicts(state_dict):
        if binding is not None and not binding.optimizer.state:
            log.warning(
                "%s at %s has no state, and DCP loads only what the target has: if it was saved "
                "with some, call init_optim_state(optimizer) before its state_dict() is taken",
                type(binding.optimizer).__name__,
                dotted(path),
            )
    try:
        dcp_load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
        set_whole_values(state_dict, planner)
    except CheckpointException as error:
        if isinstance(failure := getattr(reader, "failure", None), CheckpointError):
            raise failure from error
        where = _directory_of(checkpoint_id, reader)
        foreign = not isinstance(reader, DistributedFileSystemReader)
        if foreign and where and DistributedFileSystemReader.validate_checkpoint_id(where):
            raise UsageError(
                f"a {type(reader).__name__} cannot read a checkpoint of smckpt",
                remedy="leave storage_reader out, or pass a DistributedFileSystemReader",
                path=where,
            ) from error
        raise error_of_dcp(error, group, where, CheckpointError) from error
    return state_dict


def set_whole_values(state_dict: MutableMapping[str, Any], planner: Any) -> None:
    """Set the values that a planner with `flatten_state_dict=False` has loaded. DCP 2.13 puts them
    into a copy of the state alone, so that the caller's would keep what it had."""
    if type(planner) is not DefaultLoadPlanner or planner.flatten_state_dict:
        return
    for key, value in planner.state_dict.items():
        old = state_dict.get(key)
        filled = isinstance(old, (Stateful, torch.Tensor)) or is_sharded_tensor(old)
        if key in state_dict and not filled:
            state_dict[key] = value


def error_of_dcp(
    error: BaseException, group: Group, where: str, kind: type[CheckpointError] = SaveFailedError
) -> CheckpointError:
    """DCP's error as a `CheckpointError`: the first rank's cause, with that rank."""
    if isinstance(error, CheckpointError):
        return error
    rank = group.rank
    if isinstance(error, CheckpointException):
        causes = {r: pair[0] for r, pair in sorted(error.failures.items())}
        for cause in causes.values():
            if isinstance(cause, CheckpointError):
                return cause
        index, error = next(iter(causes.items()))
        rank = group.ranks[index]
    return kind(
        f"torch.distributed.checkpoint failed: {type(error).__name__}: {error}",
        remedy="see the traceback on that rank; the planner and the storage passed in are DCP's",
        path=where,
        rank=rank,
    )


def _staged(state_dict: Mapping[str, Any] | None, writer: StorageWriter) -> dict[str, Any]:
    """A copy of the state for DCP to save, by the writer's own stager if it has one."""
    if state_dict is None:
        raise StateError(
            "this rank has nothing to save (None)",
            remedy="pass {} on ranks without state, or leave them out of the process group",
        )
    plain = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}
    stages_itself = isinstance(writer, AsyncStager)
    stager: Any = writer if stages_itself else CopyStager()
    try:
        staged: Any = stager.stage(plain)
        whole: dict[str, Any] = staged.result() if isinstance(staged, Future) else staged
        return whole
    finally:
        if not stages_itself:
            stager.close()


def _holds_sharded_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_sharded_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_sharded_tensor, value))
    return is_sharded_tensor(value)


def _directory_of(checkpoint_id: Any, storage: Any) -> str:
    """The directory of a reader or writer, if it has one."""
    urls = (checkpoint_id, getattr(storage, "checkpoint_id", None), getattr(storage, "path", None))
    return str(next((one for one in urls if one), ""))


def _refusing(error: BaseException) -> Any:
    """In place of the planner of a rank that could not stage, so that DCP sends its error to all:
    DCP calls this first."""

    def set_up_planner(
        state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        if isinstance(error, CheckpointError):
            raise error
        raise StateError(
            f"the state could not be copied: {type(error).__name__}: {error}",
            remedy="see the traceback on that rank",
        )

    return SimpleNamespace(set_up_planner=set_up_planner)
