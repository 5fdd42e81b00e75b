"""Makes an optimizer's state before its first step, and changes nothing else.

torch's optimizers make their state in the first step, so a new one has no tensors that a load could
fill. A step with zero gradients decays weights and counts as a step (pytorch #164929). The
optimizers' own `_init_group` makes the state alone. It leaves SGD's momentum to the first step; a
load makes that one in the shape of the parameter.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from smckpt.errors import UsageError
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor

__all__ = ["init_optim_state", "init_slots"]


@neutral()
def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Give each parameter the state that it has just before its first step.

    Parameters, gradients, existing state, step counts and hyperparameters do not change by a bit.
    No collective runs.

    Args:
        optimizer: a `torch.optim.Optimizer` that makes its state in `_init_group`, as torch's own
            do, or that needs none.
        skip_empty_param: skip parameters without elements on this rank, as a step does under FSDP1
            with `use_orig_params=True`.

    Raises:
        UsageError: the optimizer makes its state elsewhere.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimizer.state.get(parameter):
                continue
            local = dtensor_parts(parameter)[0] if is_dtensor(parameter) else parameter
            if skip_empty_param and local.numel() == 0:
                continue
            init_slots(optimizer, group, parameter)


def init_slots(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> None:
    """As `init_optim_state`, for one parameter of a group."""
    if isinstance(optimizer, torch.optim.LBFGS):
        # one state for all parameters: the history of steps, which is empty before the first step
        return
    initialise = getattr(optimizer, "_init_group", None)
    if initialise is None:
        raise UsageError(
            f"{type(optimizer).__name__} has no _init_group, so its state cannot be made without "
            "a step",
            remedy="leave it out: smckpt.load makes the state that was saved; or give the class an "
            "_init_group(group, …) that fills self.state as torch's optimizers do",
        )
    before = parameter.grad
    try:
        parameter.grad = torch.zeros_like(parameter)
        # `_init_group` fills one list for each argument except the first.
        lists: list[list[Any]] = [[] for _ in list(inspect.signature(initialise).parameters)[1:]]
        with torch.no_grad():
            initialise({**group, "params": [parameter]}, *lists)
    finally:
        parameter.grad = before
    _momentum_of_sgd(optimizer, group, parameter)
    if parameter in optimizer.state and not optimizer.state[parameter]:
        del optimizer.state[parameter]  # the lookup made an empty dict


def _momentum_of_sgd(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> None:
    """SGD takes the first gradient itself as its first momentum. A buffer of negative zeros has the
    same effect to the bit: μ · −0.0 + g is g, where 0.0 + −0.0 would lose the sign. With dampening
    the first gradient counts in full only without a buffer, so a load makes it there."""
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(
            parameter, -0.0, requires_grad=False
        )
