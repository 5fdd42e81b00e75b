"""Optimizers whose classes or hooks add to torch's `state_dict` and `load_state_dict`.

A load fills live state bit for bit. What such an optimizer adds to its dict only its own
`load_state_dict` knows. So it is called too, and what torch's rounds on the way (float32 state of
bfloat16 parameters) is put back to the saved bits.

This module also makes an optimizer's state before its first step. torch's optimizers make their
state in the first step, so a new one has no tensors that a load could fill. A step with zero
gradients decays weights and counts as a step (pytorch #164929). The optimizers' own `_init_group`
makes the state alone. It leaves SGD's momentum to the first step; a load makes that one in the
shape of the parameter.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from smckpt.errors import UsageError
from smckpt.layout.containers import items_of, like
from smckpt.layout.entries import Path
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.of_optimizers.bindings import (
    Binding,
    bound,
    is_optimizer_dict,
    live_optimizers,
    optimizer_dicts,
)
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor, is_flattening, is_value

log = logging.getLogger("smckpt")

_METHODS = ("state_dict", "load_state_dict")
_STOCK = ("state", "param_groups")  # the keys of torch's dict
_HOOKS = tuple(f"_optimizer_{m}_{when}_hooks" for m in _METHODS for when in ("pre", "post"))
_LOAD_HOOKS = _HOOKS[2:]  # of `load_state_dict`


def is_optimizer(value: Any) -> bool:
    return issubclass(type(value), torch.optim.Optimizer)


def has_own_methods(optimizer: Any) -> bool:
    """Whether its state dict may be more than torch's."""
    kind, own = type(optimizer), object.__getattribute__(optimizer, "__dict__")
    return any(
        name in own or getattr(kind, name) is not getattr(torch.optim.Optimizer, name)
        for name in _METHODS
    ) or any(own.get(name) for name in _HOOKS)


@contextmanager
def stock_methods() -> Iterator[None]:
    """torch's own methods of optimizers, also inside a block of `sm_state_dict_type`."""
    kind: Any = torch.optim.Optimizer
    before = {name: getattr(kind, name) for name in _METHODS}
    try:
        for name, method in before.items():
            while (under := getattr(method, "own", None)) is not None:
                method = under
            setattr(kind, name, method)
        yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)


def hand_over(binding: Binding, tree: Mapping[str, Any]) -> None:
    """Give a loaded state dict to the own `load_state_dict` of its optimizer, or of the wrapper
    around it that added keys. The live state is filled already."""
    more = {key: _numbered(value) for key, value in tree.items() if key not in _STOCK}
    optimizer = binding.optimizer
    numbers = {
        name: index
        for index, parameter in enumerate(binding.parameters())
        for name in binding.names(parameter, index)
    }
    other = {
        key: _with_numbers(tree["state"].get(key, value), numbers)
        for key, value in optimizer.state.items()
        if not isinstance(key, torch.Tensor)
    }
    owner = None
    if more or other:  # a dict from outside a block does not tell who asked for it
        owner = binding.asker if binding.held else _wrapper_of(optimizer)
    if owner is not None:
        with stock_methods():
            if not is_optimizer_dict(owner.state_dict()):
                return  # the dict is one of several in its own, for `hand_to_wrapper`
    if owner is None and has_own_methods(optimizer):
        owner = optimizer
    if owner is None:
        if more:
            log.warning(
                "%s of an optimizer were loaded into the dict only. Call load_state_dict of the "
                "object that added them, or put that object into the state",
                ", ".join(map(str, more)),
            )
        if sets_state(optimizer):
            own = object.__getattribute__(optimizer, "__dict__")
            optimizer.__setstate__({key: own[key] for key in _STOCK})
        return
    exact = {**_numbered(binding), **more}
    exact["state"] |= copied(other)
    with stock_methods():
        owner.load_state_dict(copied(exact))
        exactly(owner.state_dict(), exact)


def sets_state(optimizer: Any) -> bool:
    """Whether its class has a `__setstate__` of its own, which torch calls in each load."""
    return not str(getattr(type(optimizer).__setstate__, "__module__", "")).startswith("torch.")


def hand_to_hooks(binding: Binding, tree: Mapping[str, Any]) -> None:
    """Load as torch's own `load_state_dict` does, for the hooks of an optimizer and its
    `__setstate__`, in a call of that method. The live state is filled already."""
    optimizer = binding.optimizer
    own = object.__getattribute__(optimizer, "__dict__")
    if not (any(map(own.get, _LOAD_HOOKS)) or sets_state(optimizer)):
        return  # without two more copies of the state
    exact = {**_numbered(binding), **{k: v for k, v in tree.items() if k not in _STOCK}}
    with stock_methods():
        torch.optim.Optimizer.load_state_dict(optimizer, copied(exact))
        exactly(torch.optim.Optimizer.state_dict(optimizer), exact)


def _with_numbers(value: Any, numbers: Mapping[str, int]) -> Any:
    """State that belongs to no parameter, with numbers for parameters' names among its keys."""
    if not isinstance(value, dict):
        return value
    return {numbers.get(key, key): child for key, child in value.items()}


def _numbered(value: Any) -> Any:
    """The live state of a binding, or of the dicts in a value that have one, as torch numbers it;
    any other value unchanged."""
    if isinstance(value, dict) and is_optimizer_dict(value) and bound(value) is not None:
        more = {k: _numbered(v) for k, v in value.items() if k not in _STOCK}
        return {**_numbered(bound(value)), **more}
    if not isinstance(value, Binding):
        pairs = items_of(value)
        return value if pairs is None else like(value, {k: _numbered(v) for k, v in pairs})
    members = {id(p): index for index, p in enumerate(value.parameters())}
    groups = [
        {**group, "params": [members[id(p)] for p in group["params"]]}
        for group in value.optimizer.param_groups
    ]
    return {"state": copied(value.numbered()), "param_groups": groups}


def _wrapper_of(optimizer: Any) -> Any:
    """The only live optimizer that has this one inside, and loads in a manner of its own."""
    found = []
    for each, own in live_optimizers():
        if each is optimizer:
            continue
        if any(value is optimizer for value in own.values()) and has_own_methods(each):
            found.append(each)
    return found[0] if len(found) == 1 else None


def wrappers_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, dict[Any, Any], Any]]:
    """Dicts that optimizers gave which have those of other optimizers somewhere in them: the path,
    the dict, the optimizer that gave it."""
    if not isinstance(tree, dict) or is_optimizer_dict(tree):
        return
    inside = [(at, binding) for at, _, binding in optimizer_dicts(tree)]
    askers = {id(b.asker): b.asker for _, b in inside if b is not None and b.asker is not None}
    for wrapper in askers.values():
        with stock_methods():
            given = wrapper.state_dict()
        paths = [at for at, _, _ in optimizer_dicts(given)]
        same = isinstance(given, dict) and given.keys() == tree.keys()
        if same and paths == [at for at, _ in inside]:
            yield path, tree, wrapper
            return
    for key, value in tree.items() if askers else ():
        yield from wrappers_in(value, (*path, key))


def hand_to_wrapper(wrapper: Any, tree: Mapping[str, Any]) -> None:
    """Give a loaded state dict to the optimizer that gave it. The one inside is filled already."""
    exact = {key: _numbered(value) for key, value in tree.items()}
    with stock_methods():
        wrapper.load_state_dict(copied(exact))
        exactly(wrapper.state_dict(), exact)


def copied(value: Any) -> Any:
    """The same tensors and values in new containers."""
    if isinstance(value, dict):
        return {key: copied(child) for key, child in value.items()}
    if (pairs := items_of(value)) is None:
        return value
    return like(value, {key: copied(child) for key, child in pairs})


def exactly(now: Any, saved: Any) -> Any:
    """Give the tensors of a live state dict the saved bits, in place where they have the dtype.
    Returns what belongs in the place of `now`."""
    if isinstance(saved, torch.Tensor):
        if is_value(saved):
            return saved
        if not isinstance(now, torch.Tensor) or now is saved or now.shape != saved.shape:
            return now
        if is_flattening(saved):  # its class would compute other parts
            return saved
        target, source = (dtensor_parts(t)[0] if is_dtensor(t) else t for t in (now, saved))
        if is_dtensor(now) is not is_dtensor(saved) or target.shape != source.shape:
            return now
        if target.dtype != source.dtype:
            return saved.to(target.device)
        with torch.no_grad():
            target.detach().copy_(source)
        return now
    if isinstance(saved, Mapping) and isinstance(now, dict):
        for key in saved.keys() & now.keys():
            new = exactly(now[key], saved[key])
            if new is not now[key]:
                now[key] = new
        return now
    pairs, theirs = items_of(now), dict(items_of(saved) or ())
    if pairs is None or theirs.keys() != {key for key, _ in pairs}:
        return now
    items = {key: exactly(child, theirs[key]) for key, child in pairs}
    if all(items[key] is child for key, child in pairs):
        return now
    if isinstance(now, list):
        now[:] = items.values()
        return now
    return like(now, items)


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


def swaps_parameters(optimizer: Any) -> bool:
    """Whether it has two modes, between which it changes the parameters (schedule-free)."""
    inner = getattr(optimizer, "optimizer", None)  # accelerate's wrapper always has both methods
    if is_optimizer(inner):
        return swaps_parameters(inner)
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
