"""The doors to torch.distributed.checkpoint: a reader and a writer of ours for DCP, and DCP for
planners, readers and writers of others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch.distributed as dist

from smckpt.engine.dcp_foreign import ForeignQueue, load_with_dcp
from smckpt.engine.dcp_reader import DistributedFileSystemReader
from smckpt.engine.dcp_writer import DistributedFileSystemWriter
from smckpt.engine.groups import Group, group_of
from smckpt.engine.job import SaveHandle
from smckpt.engine.runtime import Runtime
from smckpt.errors import UsageError

__all__ = [
    "DistributedFileSystemReader",
    "DistributedFileSystemWriter",
    "foreign_load",
    "foreign_save",
]


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
    """A save that DCP plans, with its collectives; ours writes where no writer is given.

    Raises:
        UsageError: neither `checkpoint_id` nor the writer says where.
        SaveFailedError: an earlier save of the queue was not committed.
    """
    del process_group  # the queue has a group of its own with the same ranks: see its module
    writer, checkpoint_id = _storage(writer, checkpoint_id, DistributedFileSystemWriter)
    its_queue = runtime.adopt(queue, group.ranks, lambda: ForeignQueue(group))
    assert isinstance(its_queue, ForeignQueue)
    return its_queue.submit(state_dict, checkpoint_id=checkpoint_id, writer=writer, planner=planner)


def foreign_load(
    state_dict: MutableMapping[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    reader: Any,
    planner: Any,
    process_group: Any,
) -> MutableMapping[str, Any]:
    """A load that DCP plans, with its collectives; ours reads where no reader is given.

    Raises:
        UsageError: neither `checkpoint_id` nor the reader says where.
        CheckpointError: the load failed, on some rank.
    """
    group = group_of(process_group)
    assert group is not None
    # DCP's own collectives have all ranks of the group read together.
    together = process_group
    if together is None and len(group.ranks) > 1:
        together = dist.group.WORLD
    ours = partial(DistributedFileSystemReader, process_group=together)
    reader, checkpoint_id = _storage(reader, checkpoint_id, ours)
    return load_with_dcp(
        state_dict,
        group,
        checkpoint_id=checkpoint_id,
        reader=reader,
        planner=planner,
        process_group=process_group,
    )


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
