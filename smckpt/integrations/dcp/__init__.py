"""torch.distributed.checkpoint: smckpt's reader and writer for DCP, and DCP for the planners,
readers and writers of others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from smckpt.engine.runtime import Runtime
from smckpt.engine.saving.job import SaveHandle
from smckpt.errors import UsageError
from smckpt.integrations.dcp.foreign import ForeignQueue, load_with_dcp
from smckpt.integrations.dcp.reader import DistributedFileSystemReader
from smckpt.integrations.dcp.writer import DistributedFileSystemWriter
from smckpt.meeting.group import Group, gloo_group, group_of
from smckpt.storage.urls import path_on_disk

__all__ = [
    "DistributedFileSystemReader",
    "DistributedFileSystemWriter",
    "foreign_load",
    "foreign_save",
]

_PATIENCE = 1800.0  # seconds that the ranks wait for the one that looks, as in a load


def foreign_save(
    runtime: Runtime,
    group: Group,
    state_dict: Any,
    checkpoint_id: str | os.PathLike[str] | None,
    writer: Any,
    planner: Any,
    process_group: Any,
    *,
    queue: str = "default",
) -> SaveHandle:
    """A save that DCP plans, with its collectives. The default writer is smckpt's.

    Raises:
        UsageError: neither `checkpoint_id` nor the writer names a directory.
        SaveFailedError: an earlier save of the queue was not committed.
    """
    del process_group  # the queue makes a group of its own with the same ranks (see `foreign`)
    ours = runtime.queue(group, queue)
    try:
        writer, checkpoint_id = _storage(writer, checkpoint_id, DistributedFileSystemWriter)
    except Exception as error:
        ours.meet(error)  # raises it, on all ranks
        raise
    foreign_queue = runtime.adopt(queue, group.ranks, lambda: ForeignQueue(group))
    assert isinstance(foreign_queue, ForeignQueue)
    return foreign_queue.submit(
        state_dict,
        checkpoint_id=checkpoint_id,
        writer=writer,
        planner=planner,
        group=group,
        meet=ours.meet,
    )


def foreign_load(
    runtime: Runtime,
    state_dict: MutableMapping[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    reader: Any,
    planner: Any,
    process_group: Any,
    no_dist: bool = False,
    refusal: Exception | None = None,
) -> MutableMapping[str, Any]:
    """A load that DCP plans, with its collectives. The default reader is smckpt's, or DCP's own
    for a directory that DCP wrote.

    Args:
        refusal: why this rank's call fails. It only brings the error to the peers.

    Raises:
        UsageError: neither `checkpoint_id` nor the reader names a directory; or it is in a store,
            and DCP wrote it.
        CheckpointError: the load failed on a rank.
    """
    group = group_of(process_group, no_dist)
    assert group is not None
    # All ranks of the group read together, because of DCP's own collectives.
    together = process_group
    if together is None and len(group.ranks) > 1:
        together = dist.group.WORLD
    ours: Callable[..., Any] = partial(DistributedFileSystemReader, process_group=together)

    def look() -> dict[str, Any]:
        location = None if reader is not None else checkpoint_id
        of_dcp = bool(location and DistributedFileSystemReader.leaves_to_dcp(location))
        return {"dcp": of_dcp, "name": uuid4().hex}

    agreed = runtime.loader(group).agreed("load(planner=)", look, _PATIENCE, refusal)
    reader, checkpoint_id = _storage(
        reader, checkpoint_id, _reader_of_dcp if agreed["dcp"] else ours
    )
    made = None
    if isinstance(process_group, Group):  # ranks alone, and DCP runs collectives
        made = process_group = gloo_group(group, agreed["name"])
    try:
        return load_with_dcp(
            state_dict,
            group,
            checkpoint_id=checkpoint_id,
            reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
    finally:
        if made is not None:
            dist.destroy_process_group(made)


def _reader_of_dcp(location: str | os.PathLike[str]) -> Any:
    path = path_on_disk(
        location,
        "torch.distributed.checkpoint wrote this checkpoint, and its planner reads it from a disk "
        "only",
        "leave planner= out, or copy the checkpoint to a disk",
    )
    return FileSystemReader(path)


def _storage(
    given: Any,
    checkpoint_id: str | os.PathLike[str] | None,
    ours: Callable[[str | os.PathLike[str]], Any],
) -> tuple[Any, str | os.PathLike[str] | None]:
    """The reader or writer to use, and the id to reset it with."""
    if given is not None:
        return given, checkpoint_id
    if not checkpoint_id:
        raise UsageError(
            "checkpoint_id was left out",
            remedy="pass checkpoint_id= (a directory) with planner=",
        )
    return ours(checkpoint_id), None
