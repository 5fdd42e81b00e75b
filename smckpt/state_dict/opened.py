"""Replaces objects in a user's state by their state dicts, for a load to fill."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from smckpt.state_dict.bindings import is_optimizer_dict, stock, stock_record
from smckpt.state_dict.modes import mode_of, neutral
from smckpt.state_dict.restore import tuple_like
from smckpt.state_dict.select import is_sharded_tensor, is_stateful
from smckpt.state_dict.tags import (
    OptimizerStateDict,
    RememberingDict,
    StatefulStateDict,
    set_tag,
    tag_of,
)
from smckpt.state_dict.tensors import dtensor_parts, is_dtensor

__all__ = ["Opened"]


class Opened:
    """Copies of containers for the time of a load. In a copy, an object is replaced by its state
    dict, and a tensor without memory by one with memory. The user's own containers change only
    after the load has succeeded.

    Objects give their state dicts in the order of their keys on all ranks, since their
    `state_dict` may run a collective.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # by id: the copy and its original

    def open(self, value: Any) -> Any:
        """The value that a load fills for `value`: `value` itself where nothing is replaced."""
        if isinstance(value, torch.Tensor):
            # a ShardedTensor of several shards does not tell their places
            meta = not is_sharded_tensor(value) and value.is_meta
            return _with_memory(value) if meta else value
        if isinstance(value, MutableMapping):
            items = {key: self.open(value[key]) for key in sorted(value, key=str)}
            if all(items[key] is child for key, child in value.items()):
                return value
            items = {key: items[key] for key in value}
            return self._copy(
                value.like(items) if isinstance(value, RememberingDict) else items, value
            )
        if isinstance(value, (list, tuple)):
            opened = [self.open(child) for child in value]
            if all(new is child for new, child in zip(opened, value, strict=True)):
                return value
            return self._copy(opened, value)
        if is_stateful(value):
            return self._taken(value)
        return value

    def _taken(self, value: Any) -> Any:
        given = value.state_dict()
        inner = self.open(given)
        if isinstance(value, torch.optim.Optimizer) and is_optimizer_dict(inner):
            if stock_record(inner) is not None:
                return stock(value, inner)
            if getattr(inner["param_groups"], "binding", None) is not None:
                return inner
            # Names from elsewhere, such as those of torch's get_optimizer_state_dict, which an
            # object's own state_dict may call: only its own load_state_dict knows them.
        return self._copy(StatefulStateDict(inner), given) if isinstance(inner, dict) else inner

    def _copy(self, made: Any, of: Any) -> Any:
        self._copies[id(made)] = made, of
        return made

    def settle(self, value: Any, filled: Any) -> Any:
        """The value after a load: the user's own containers get the new values from the copies, and
        objects get their state dicts."""
        if filled is value:
            return value
        if not isinstance(value, torch.Tensor) and is_stateful(value):
            # The load wrote to the optimizer already; its load_state_dict would cast the state.
            if not isinstance(filled, OptimizerStateDict):
                _, given = self._copies.get(id(filled), (filled, filled))
                empty = _without_memory(given)
                state = self._into(given, filled)
                if empty and isinstance(value, torch.nn.Module):  # it would copy into nothing
                    made = {key: state[key] for key in empty}
                    torch.nn.Module.load_state_dict(value, made, strict=False, assign=True)
                with mode_of(given):
                    value.load_state_dict(state)
            return value
        return self._into(value, filled) if id(filled) in self._copies else filled

    def _into(self, own: Any, filled: Any) -> Any:
        if own is filled:
            return own
        if isinstance(own, tuple):
            return tuple_like(own, [self.settle(*pair) for pair in zip(own, filled, strict=True)])
        if isinstance(own, MutableMapping):
            for key in [key for key in own if key not in filled]:
                del own[key]
        for key in _keys(filled):
            had = isinstance(own, list) or key in own
            new = self.settle(own[key], filled[key]) if had else filled[key]
            if not had or new is not own[key]:
                own[key] = new
        return own


def _keys(container: Any) -> Iterator[Any]:
    yield from sorted(container, key=str) if isinstance(container, dict) else range(len(container))


def _without_memory(state: Any) -> list[Any]:
    """Keys of the tensors of a state dict on the meta device."""
    items = state.items() if isinstance(state, dict) else ()
    return [key for key, value in items if isinstance(value, torch.Tensor) and value.is_meta]


@neutral()
def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor like this one of the meta device, on its mesh's device or the CPU."""
    if is_dtensor(tensor):
        local, mesh, placements, shape = dtensor_parts(tensor)
        made: torch.Tensor = type(tensor).from_local(  # type: ignore[attr-defined]
            torch.empty_like(local, device=mesh.device_type),
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=tensor.stride(),
        )
    else:
        made = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if (tag := tag_of(tensor)) is not None:
        set_tag(made, tag)
    return made
