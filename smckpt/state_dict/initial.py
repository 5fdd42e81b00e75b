"""Making an optimizer's state before its first step, without changing anything else.

torch's optimizers make their state lazily, in the first step, so a fresh one has nothing into which
a checkpoint could be read. Stepping with zero gradients is no way out: it decays weights and counts
a step (pytorch #164929). Their own `_init_group` makes the state and does nothing else; what even
that leaves to the first step (SGD's momentum), a load makes after the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smckpt.errors import StateError, UsageError
from smckpt.state_dict.private import dtensor_parts, is_dtensor

__all__ = ["init_optim_state", "make_slots"]


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Give each parameter the state that it would have just before its first step.

    Parameters, gradients, existing state, step counts and hyperparameters stay bit for bit as they
    are. Runs no collective.

    Args:
        optimizer: any `torch.optim.Optimizer` that makes its state in `_init_group`, as torch's
            own do, or that needs none.
        skip_empty_param: leave out parameters without elements on this rank, as a step does under
            FSDP1 with `use_orig_params=True`.

    Raises:
        UsageError: the optimizer makes its state in some other way.
    """
    from smckpt.state_dict.context import remember_optimizer

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimizer.state.get(parameter):
                continue
            local = dtensor_parts(parameter)[0] if is_dtensor(parameter) else parameter
            if skip_empty_param and local.numel() == 0:
                continue
            _initialise(optimizer, group, parameter)
    remember_optimizer(optimizer)


def _initialise(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        return  # one state for all parameters, made of the steps' history: there is none yet
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
        # It fills lists, one for each argument but the first.
        lists: list[list[Any]] = [[] for _ in list(inspect.signature(initialise).parameters)[1:]]
        with torch.no_grad():
            initialise({**group, "params": [parameter]}, *lists)
    finally:
        parameter.grad = before
    _momentum_of_sgd(optimizer, group, parameter)
    if parameter in optimizer.state and not optimizer.state[parameter]:
        del optimizer.state[parameter]  # looked at, not filled


def make_slots(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    wanted: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    *,
    flat: bool,
) -> bool:
    """Make room for state tensors that are about to be filled; whether anything was made.

    The optimizer's own way first; what it makes later than that (SGD's momentum), or has no way
    to make, is made after the parameter.

    Args:
        wanted: slot → dtype and global shape of what was saved.
        flat: the parameter is a flat one, or a view into it; shapes are those of its members.

    Raises:
        StateError: a slot has neither the parameter's shape nor is a scalar.
    """
    made = False
    if not optimizer.state.get(parameter) and hasattr(optimizer, "_init_group"):
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        _initialise(optimizer, group, parameter)
        made = bool(optimizer.state.get(parameter))
    for slot, (dtype, shape) in wanted.items():
        if isinstance(optimizer.state[parameter].get(slot), torch.Tensor):
            continue
        if not tuple(shape):
            room = torch.zeros((), dtype=dtype)
        elif flat or tuple(shape) == tuple(parameter.shape):
            room = torch.zeros_like(parameter.detach(), dtype=dtype)
        else:
            raise StateError(
                f"{type(optimizer).__name__} has no {slot!r} yet, which was saved with the shape "
                f"{list(shape)} for a parameter of shape {list(parameter.shape)}",
                remedy="take one step before the load, so that the optimizer makes it",
            )
        optimizer.state[parameter][slot] = room
        made = True
    return made


def _momentum_of_sgd(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> None:
    """SGD begins with the first gradient itself as momentum. So does a buffer of negative zeros:
    μ · −0.0 + g is g to the bit, where 0.0 + −0.0 would lose the sign. With dampening the first
    gradient counts in full only without a buffer; a load makes that one (`momentum_buffer`)."""
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(
            parameter, -0.0, requires_grad=False
        )
