"""Making an optimizer's state before its first step, without changing anything else.

torch's optimizers make their state lazily, in the first step, so a fresh one has nothing into which
a checkpoint could be read. Stepping with zero gradients is no way out: it decays weights and counts
a step (pytorch #164929). Their own `_init_group` makes the state and does nothing else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from smckpt.state_dict.private import dtensor_parts, is_dtensor

__all__ = ["init_optim_state", "init_parameter_state"]


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Give each parameter the state that it would have just before its first step.

    Parameters, gradients, existing state, step counts and hyperparameters stay bit for bit as they
    are. Runs no collective.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        skip_empty_param: leave out parameters without elements on this rank, as a step does under
            FSDP1 with `use_orig_params=True`.
    """
    from smckpt.state_dict.context import remember_optimizer

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimizer.state.get(parameter):
                continue
            local = dtensor_parts(parameter)[0] if is_dtensor(parameter) else parameter
            if skip_empty_param and local.numel() == 0:
                continue
            init_parameter_state(optimizer, parameter)
    remember_optimizer(optimizer)


def init_parameter_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """The state of one parameter that has none."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    alone = {**group, "params": [parameter]}
    before = parameter.grad
    try:
        parameter.grad = torch.zeros_like(parameter)
        initialise = getattr(optimizer, "_init_group", None)
        if initialise is not None:
            with torch.no_grad():
                initialise(alone, *_empty_lists(initialise))
        else:
            _by_a_step_of_a_twin(optimizer, alone, parameter)
    finally:
        parameter.grad = before


def _empty_lists(initialise: Any) -> Iterable[list[Any]]:
    """`_init_group(group, params, grads, …)` fills lists: one for each argument but the first."""
    return [[] for _ in list(inspect.signature(initialise).parameters)[1:]]


def _by_a_step_of_a_twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> None:
    """For optimizers of other houses: one step with lr 0 on the parameter alone, undone.

    What the step changed in the parameter is put back; counters named "step" go back to zero.
    """
    others = [
        (p, p.grad) for g in optimizer.param_groups for p in g["params"] if p is not parameter
    ]
    kept = parameter.detach().clone()
    rates = [(g, g.get("lr")) for g in optimizer.param_groups]
    state_before = {id(p): copy.copy(s) for p, s in optimizer.state.items() if p is not parameter}
    try:
        for other, _ in others:
            other.grad = None
        optimizer.step()
    finally:
        for other, gradient in others:
            other.grad = gradient
        for its_group, rate in rates:
            if rate is not None:
                its_group["lr"] = rate
        with torch.no_grad():
            parameter.copy_(kept)
    for p in list(optimizer.state):
        if p is not parameter and id(p) not in state_before:
            del optimizer.state[p]
    for key, value in optimizer.state.get(parameter, {}).items():
        if key == "step":
            optimizer.state[parameter][key] = (
                torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
            )
    del group
