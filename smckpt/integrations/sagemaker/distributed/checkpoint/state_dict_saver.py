"""`async_save`, `save`, `load` and the queue of saves; the kind of state to take, and the interval
between saves.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

import smckpt
from smckpt.errors import UsageError
from smckpt.integrations.sagemaker.distributed.checkpoint.filesystem import (
    DistributedFileSystemWriter,
    store_options,
)
from smckpt.integrations.sagemaker.state_handler import state
from smckpt.meeting.group import torch_group_of
from smckpt.state_dict import SMStateDictType, init_optim_state
from smckpt.state_dict.context import instead

__all__ = [
    "DEFAULT_ASYNC_REQUEST_QUEUE",
    "AsyncCallsQueue",
    "SMStateDictType",
    "async_save",
    "compute_auto_checkpoint_interval",
    "init_optim_state",
    "load",
    "maybe_finalize_async_calls",
    "save",
    "sm_state_dict_type",
]


_NUMBERS = itertools.count(1)


class AsyncCallsQueue:
    """The saves of one queue, in order, one in flight. The n-th queue of a rank meets the n-th of
    the other ranks, so make the same number on each, in one order.

    Args:
        name: smckpt's name for the queue; None gives it a number.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or f"sagemaker-{next(_NUMBERS)}"
        self._hooks: list[Future[None]] = []  # of saves, where hooks follow the commit

    def maybe_finalize_async_calls(
        self, blocking: bool = True, skip_sync: bool = False, process_group: Any = None
    ) -> list[int]:
        """The numbers of the saves committed since the last call.

        Args:
            blocking: wait for the save in flight.
            skip_sync: no effect. SMP asks the other ranks unless this is set; here every rank knows
                of every failure.
            process_group: only saves of this group; None for all.

        Raises:
            SaveFailedError: a save was not committed. After the commit: the error of a hook.
        """
        done = smckpt.maybe_finalize_async_calls(blocking, process_group, queue=self.name)
        for hook in [h for h in self._hooks if blocking or h.done()]:
            self._hooks.remove(hook)
            hook.result()
        return done

    def follow(self, hooks: Future[None]) -> None:
        """Make the hooks after a commit part of the save."""
        self._hooks.append(hooks)


DEFAULT_ASYNC_REQUEST_QUEUE = AsyncCallsQueue("default")


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


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    check_keys_matched: bool = True,
    coordinator_rank: int | None = None,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """`smckpt.load`, with the groups of a step from `torch.sagemaker.state`.

    Args:
        check_keys_matched: check that the names of all ranks are those of the checkpoint, without a
            collective. Others: as in `smckpt.load`.

    Raises:
        As `smckpt.load`.
    """
    options = smckpt.LoadOptions(**state.of_step(process_group)) if planner is None else None
    smckpt.load(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        check_keys_matched=check_keys_matched,
        coordinator_rank=coordinator_rank,
        options=options,
        storage=store_options(s3_region, s3client_config),
    )


@contextmanager
def sm_state_dict_type(
    model: nn.Module,
    state_dict_type: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """`smckpt.sm_state_dict_type`; for torch's own types, as `StateDictType.FULL_STATE_DICT`,
    `FSDP.state_dict_type`, so that `FSDP.optim_state_dict` gives the same kind in the block.

    Under LOCAL also the modules inside FSDP give what they hold, without a collective: gathered
    parameters inside `FSDP.summon_full_params`, else this rank's flat ones.
    """
    with ExitStack() as stack:
        of_torch = isinstance(state_dict_type, StateDictType)
        enter = FullyShardedDataParallel.state_dict_type if of_torch else smckpt.sm_state_dict_type
        if of_torch:
            units = FullyShardedDataParallel.fsdp_modules(model)
            on_cpu = units and all(unit.compute_device == torch.device("cpu") for unit in units)
            config = state_dict_config
            if on_cpu and isinstance(config, FullStateDictConfig) and config.offload_to_cpu:
                # with shards already on the CPU, torch's offloading reads memory that it has freed
                state_dict_config = replace(config, offload_to_cpu=False)
        elif state_dict_type is SMStateDictType.LOCAL:
            for unit in FullyShardedDataParallel.fsdp_modules(model):
                # FSDP's own hooks would gather, and hang where one rank calls alone.
                stack.enter_context(instead(unit, "state_dict", unit.module.state_dict))
        stack.enter_context(
            enter(model, state_dict_type, state_dict_config, optim_state_dict_config)
        )
        yield


@dataclass(frozen=True)
class _Interval:
    """Steps between two saves, and the seconds it was computed from; 0: not yet known."""

    interval: int = 0
    step: float = 0.0
    save: float = 0.0


def compute_auto_checkpoint_interval(
    step_durations: Sequence[float],
    step_ckpt_durations: Sequence[float],
    ckpt_preprocessing_durations: Sequence[float],
    ckpt_io_durations: Sequence[float],
    process_group: Any = None,
) -> _Interval:
    """The smallest number of steps in which a save ends, so that no save waits for the last one.

    It runs a collective and uses the fastest step and the slowest save of all ranks. SMP's own
    formula is not public, so this one may differ.

    Args:
        step_durations: seconds of steps without a save.
        step_ckpt_durations: seconds of steps during a save; they count if they are faster.
        ckpt_preprocessing_durations, ckpt_io_durations: seconds of saves, until the state was taken
            and until it was written.

    Raises:
        UsageError: there are no measurements.
    """
    steps = [s for s in (*step_durations, *step_ckpt_durations) if s > 0]
    saves = list(map(sum, zip(ckpt_preprocessing_durations, ckpt_io_durations, strict=True)))
    if not steps or not saves:
        raise UsageError(
            "there is no measured step, or no measured save",
            remedy="pass the seconds of at least one of each",
        )
    extremes = torch.tensor([-min(steps), max(saves)], dtype=torch.float64)
    if dist.is_initialized():
        backend = dist.get_backend(torch_group_of(process_group))
        device = "cpu" if "gloo" in backend else torch.accelerator.current_accelerator()
        extremes = extremes.to(device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=process_group)
    step, save = -float(extremes[0]), float(extremes[1])
    return _Interval(max(1, math.ceil(save / step)), step, save)
