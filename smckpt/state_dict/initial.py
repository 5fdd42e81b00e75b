"""Making an optimizer's state before its first step, without changing anything else.

torch's optimizers make their state lazily, in the first step, so a fresh one has nothing into which
a checkpoint could be read. Stepping with zero gradients is no way out: it decays weights and counts
a step (pytorch #164929). Their own `_init_group` makes the state and does nothing else.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from smckpt.errors import UsageError
from smckpt.state_dict.private import dtensor_parts, is_dtensor

__all__ = ["init_optim_state", "init_parameter_state"]


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


def init_parameter_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """The state of one parameter that has none."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    _initialise(optimizer, group, parameter)


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
            remedy="take one step before the load, or give the class an _init_group(group, …) "
            "that fills self.state as torch's optimizers do",
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
