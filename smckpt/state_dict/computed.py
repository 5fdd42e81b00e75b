"""Values that modules compute for their state dict: extra state, and values from hooks.

A load cannot fill them in place, because they are not memory of the model. So modules get them back
through their own methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smckpt.errors import StateError
from smckpt.state_dict.modes import mode_of
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor

__all__ = [
    "computed_names",
    "give_back",
    "give_extra_state",
    "is_extra_state",
    "own_state_dict",
]


def is_extra_state(key: Any) -> bool:
    """Whether torch gives the value of this key to a module's `set_extra_state`."""
    return isinstance(key, str) and key.endswith("_extra_state")


def own_state_dict(model: nn.Module) -> dict[str, Any]:
    """Call the class's own `state_dict`, if possible without torch's detaching (see `detached`)."""
    method: Any = type(model).state_dict
    try:
        inspect.signature(method).bind(model, keep_vars=True)
    except TypeError:  # the class's own method, which takes other arguments
        return dict(method(model))
    return dict(method(model, keep_vars=True))


def computed_names(model: nn.Module, raw: Mapping[str, Any]) -> Iterator[str]:
    """The names in the model's own state dict whose values are not memory of the model."""
    live: set[int] = set()
    for module in model.modules():
        live.update(map(id, module._parameters.values()))
        live.update(map(id, module._buffers.values()))
    others = [(name, value) for name, value in raw.items() if id(value) not in live]
    if not others:  # the common case
        return
    memory = {_memory_of(t) for tensors in (model.parameters(), model.buffers()) for t in tensors}
    memory.discard(None)
    for name, value in others:
        if not isinstance(value, torch.Tensor) or _memory_of(value) not in memory:
            yield name


def _memory_of(tensor: torch.Tensor) -> int | None:
    """The address at which it begins; None if torch cannot tell."""
    local = dtensor_parts(tensor)[0] if is_dtensor(tensor) else tensor
    try:
        return local.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # it computes its values from other tensors
        return None


def give_back(model: nn.Module, given: Mapping[str, Any], name_of: Callable[[str], str]) -> None:
    """Give modules their computed values: extra state to `set_extra_state`, other values to the
    class's own `load_state_dict`, which reverts what hooks do.

    Args:
        given: values under the names that `name_of` makes from the model's own.
    """
    raw = own_state_dict(model)
    names = {name for name in computed_names(model, raw) if name_of(name) in given}
    if all(map(is_extra_state, names)):
        give_extra_state(model, given, name_of)
        return
    for name in names:
        raw[name] = given[name_of(name)]
    method: Any = type(model).load_state_dict
    try:
        inspect.signature(method).bind(model, raw, strict=False)
    except TypeError:
        with mode_of(raw):
            method(model, raw)
        return
    with mode_of(raw):
        keys = method(model, raw, strict=False)
    if left := names.intersection(getattr(keys, "unexpected_keys", ())):
        raise StateError(
            f"the model gives {sorted(left)[:8]} in its state dict, but its own load_state_dict "
            "does not take them back, so it would go on with other values",
            remedy="load without a target, and build the model from what was saved as its library "
            "says; the model here is now undefined",
        )


def give_extra_state(
    model: nn.Module, given: Mapping[str, Any], name_of: Callable[[str], str]
) -> None:
    """Give modules the values that their `get_extra_state` gave."""
    for raw, module in model.named_modules():
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            name = name_of(f"{raw}._extra_state" if raw else "_extra_state")
            if name in given:
                module.set_extra_state(given[name])
