"""The kind of state to take, and the interval between saves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

import smckpt
from smckpt.meeting.group import torch_group_of
from smckpt.state_dict import SMStateDictType, init_optim_state
from smckpt.state_dict.context import instead

__all__ = [
    "SMStateDictType",
    "compute_auto_checkpoint_interval",
    "init_optim_state",
    "sm_state_dict_type",
]


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
    import torch.distributed as dist

    from smckpt.errors import UsageError

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
