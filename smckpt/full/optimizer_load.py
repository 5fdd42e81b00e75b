"""A full optimizer state, back into the live optimizer of all ranks.

Rank 0 holds the state. It sends the outline first, by which all ranks make room, and then tensor
after tensor. Each rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from smckpt.errors import KeysMismatchError
from smckpt.full.wire import Attempt, Wire, gathers, own_rank
from smckpt.layout.containers import items_of, like
from smckpt.layout.entries import Path
from smckpt.layout.strided import Piece, execute, meet
from smckpt.state_dict.of_optimizers.bindings import Binding, bind, walked
from smckpt.state_dict.of_optimizers.groups import fill_groups
from smckpt.state_dict.of_optimizers.optimizers import in_common, of_no_parameter, put
from smckpt.state_dict.of_optimizers.own_methods import hand_over
from smckpt.state_dict.of_optimizers.slots import SavedSlot, room
from smckpt.state_dict.select import geometry_of
from smckpt.state_dict.tensors import flags_of, is_dtensor, order_of
from smckpt.state_dict.views import ModelView

__all__ = ["load_full_optimizer", "put_full_optimizer"]


def put_full_optimizer(
    view: ModelView, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> None:
    """As `load_full_optimizer`, with what the optimizer's own methods add."""
    load_full_optimizer(view, optimizer, given)
    asker = getattr(_binding_of(given), "asker", None)
    hand_over(replace(bind(optimizer, "SHARDED", view), asker=asker), given)


def load_full_optimizer(
    view: ModelView, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> None:
    """Put a full optimizer state into the live one. Rank 0 holds it and broadcasts."""
    import torch.distributed as dist

    whole: dict[str, Any] = dict(given)
    boxed: list[Any] = [_outline(whole)]
    if gathers():
        dist.broadcast_object_list(boxed, src=0)
    outline = boxed[0]
    attempt = Attempt()
    binding: Any = attempt(lambda: bind(optimizer, "SHARDED", view))
    partly = getattr(_binding_of(given), "partly", False)
    attempt(lambda: _rooms(binding, outline, partly))
    live: Any = attempt(lambda: binding.take()["state"])
    attempt.settle()
    wire = Wire()
    for fqn, slots in outline["state"].items():
        for at, coming in _leaves(slots):
            target = _leaf(live.get(fqn), at)
            if not gathers() and target is _leaf(whole["state"][fqn], at):
                continue  # it is the live one
            if own_rank() == 0:
                value = wire.placed(_leaf(whole["state"][fqn], at).contiguous(), coming.device)
            else:
                value = wire.room(coming.dtype, coming.shape, coming.device)
            wire.share(value, coming.dtype, coming.shape, coming.device)
            if target is not None:  # otherwise this rank holds nothing of it
                local, geometry = geometry_of(target, str(fqn), own_rank())
                memory = (
                    local
                    if local.is_contiguous()
                    else torch.empty_like(local, memory_format=torch.contiguous_format)
                )
                for piece in geometry.pieces(own_rank()):
                    copy = meet(Piece.whole(piece.name, piece.shape), piece)
                    if copy is not None:
                        execute(copy, value, memory)
                if memory is not local:
                    local.copy_(memory)
    fill_groups(binding, outline["param_groups"])


def _binding_of(given: Mapping[str, Any]) -> Binding | None:
    return getattr(given.get("param_groups"), "binding", None)


def _rooms(binding: Binding, outline: Mapping[str, Any], partly: bool) -> None:
    """Give the live optimizer the slots of the outline, with empty tensors.

    partly: keep its other slots, also those that it has from the start.

    Raises:
        KeysMismatchError: the optimizer has no parameter of some name.
        StateError: nothing says how to make a state tensor.
    """
    known: set[Any] = set()
    outlined, state = outline["state"], binding.optimizer.state
    named = {name for group in outline["param_groups"] for name in group.get("params", ())}
    for index, (parameter, group) in enumerate(binding.members()):
        names = binding.names(parameter, index)
        known.update(names)
        found = [outlined[name] for name in names if name in outlined]
        if not found:
            if not partly:
                state.pop(parameter, None)
            continue
        wanted = _wanted(found[0], parameter)
        if partly:
            wanted, _ = in_common(binding.optimizer, group, parameter, wanted)
        put(state, parameter, wanted, room(binding, parameter, group), not partly)
    others = outlined.keys() - known
    if unknown := sorted(
        str(key)
        for key in others
        if (key in named or not named) and not of_no_parameter(binding, key, outlined[key])
    ):
        raise KeysMismatchError(
            f"the optimizer has no parameter {unknown[:12]}, but the state to load does",
            remedy="load the state of an optimizer over the same parameters",
        )
    spares = [k for k in state if not isinstance(k, torch.Tensor) and k not in others]
    for spare in () if partly else spares:
        del state[spare]
    for other in others:
        put(state, other, _wanted(outlined[other], None), room(None, None, {}))


def _wanted(outlined: Any, parameter: torch.Tensor | None) -> Any:
    """The outline with a `SavedSlot` for each tensor. A whole tensor that is not shaped like its
    DTensor parameter comes to all ranks."""
    if isinstance(outlined, _Coming):
        mesh = parameter is not None and is_dtensor(parameter) and outlined.shape
        shape = tuple(outlined.shape)
        local = None if mesh and "whole" not in outlined.flags else shape
        dtype = getattr(torch, outlined.dtype)
        return SavedSlot(dtype, shape, local, order=outlined.order, flags=outlined.flags)
    if (pairs := items_of(outlined)) is None:
        return outlined
    items = {key: _wanted(child, parameter) for key, child in pairs}
    return items if isinstance(outlined, Mapping) else like(outlined, items)


def _leaves(value: Any, at: Path = ()) -> Iterator[tuple[Path, _Coming]]:
    if isinstance(value, _Coming):
        yield at, value
    else:
        for key, child in items_of(value) or ():
            yield from _leaves(child, (*at, key))


def _leaf(value: Any, at: Path) -> Any:
    """The value at a path; None if there is none."""
    for key in at:
        value = dict(items_of(value) or ()).get(key)
    return value


def _outline(given: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that all ranks need before rank 0 sends the tensors."""
    known: frozenset[Path] = getattr(_binding_of(given), "whole", frozenset())

    def coming(fqn: Any, v: torch.Tensor, at: Path) -> _Coming:
        flags = flags_of(v) + "whole" * ((fqn, *at) in known)
        dtype = str(v.dtype).removeprefix("torch.")
        return _Coming(tuple(v.shape), dtype, v.device.type, order_of(v), flags)

    state = {fqn: walked(v, partial(coming, fqn)) for fqn, v in given.get("state", {}).items()}
    return {"state": state, "param_groups": [dict(g) for g in given.get("param_groups", [])]}


@dataclass(frozen=True)
class _Coming:
    """A tensor that rank 0 will send. flags: as in a `SavedSlot`. (smckpt's own classes are no
    containers of a state.)"""

    shape: tuple[int, ...]
    dtype: str
    device: str
    order: tuple[int, ...] | None
    flags: str
