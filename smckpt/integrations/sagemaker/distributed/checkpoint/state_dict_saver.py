"""`async_save`, `save` and `maybe_finalize_async_calls`."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import smckpt
from smckpt.errors import UsageError
from smckpt.integrations.sagemaker.distributed.checkpoint.async_utils import (
    DEFAULT_ASYNC_REQUEST_QUEUE,
    AsyncCallsQueue,
)
from smckpt.integrations.sagemaker.distributed.checkpoint.filesystem import (
    DistributedFileSystemWriter,
)
from smckpt.integrations.sagemaker.distributed.checkpoint.s3_filesystem import store_options
from smckpt.integrations.sagemaker.state_handler import state

__all__ = ["async_save", "maybe_finalize_async_calls", "save"]


def async_save(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    coordinator_rank: int | None = None,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: Any = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> smckpt.SaveHandle | None:
    """`smckpt.async_save`, with the groups of a step from `torch.sagemaker.state`.

    Args:
        queue: None uses the queue of `maybe_finalize_async_calls`.
        coordinator_rank: None uses the lowest rank of the group.
        sharded_strategy: SMP's strategy of writing; refused.
        wait_error_handling: whether SMP waits until all ranks know of an error. Here no rank waits,
            and all raise at their next call; the value has no effect.
        force_check_all_plans: whether SMP compares the ranks' plans although its cache has them.
            Here each save compares the layouts of all ranks, without a collective.
        Others: as in `smckpt.async_save`.

    Raises:
        As `smckpt.async_save`.
    """
    if sharded_strategy is not None:
        raise UsageError(
            "sharded_strategy= is not honoured: smckpt writes in its own format",
            remedy="leave it out",
        )
    if queue is not None and not isinstance(queue, AsyncCallsQueue):
        raise UsageError(
            f"queue is a {type(queue).__name__}",
            remedy="pass an AsyncCallsQueue() of torch.sagemaker, or leave it out",
        )
    chosen = queue or DEFAULT_ASYNC_REQUEST_QUEUE
    given: dict[str, Any] = {}
    if planner is None and isinstance(
        storage_writer, (type(None), smckpt.DistributedFileSystemWriter)
    ):
        given = state.of_step(process_group)
        if isinstance(storage_writer, DistributedFileSystemWriter):
            given |= storage_writer.hooked(process_group, coordinator_rank)
    handle = smckpt.async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        coordinator_rank=coordinator_rank,
        options=smckpt.SaveOptions(queue=chosen.name, **given),
        storage=store_options(s3_region, s3client_config),
    )
    if handle is not None and isinstance(storage_writer, DistributedFileSystemWriter):
        chosen.follow(storage_writer.after(handle))
    return handle


def save(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    coordinator_rank: int | None = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """`async_save`, then wait for the commit and the writer's hooks."""
    queue = DEFAULT_ASYNC_REQUEST_QUEUE
    handle = async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        coordinator_rank=coordinator_rank,
        wait_error_handling=wait_error_handling,
        force_check_all_plans=force_check_all_plans,
        s3_region=s3_region,
        s3client_config=s3client_config,
    )
    if handle is not None:
        queue.maybe_finalize_async_calls(blocking=True, process_group=process_group)


def maybe_finalize_async_calls(blocking: bool = True, process_group: Any = None) -> list[int]:
    """As `AsyncCallsQueue.maybe_finalize_async_calls`, for the default queue."""
    return DEFAULT_ASYNC_REQUEST_QUEUE.maybe_finalize_async_calls(
        blocking, process_group=process_group
    )
