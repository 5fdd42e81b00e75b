"""Tensors in the state of an optimizer or object that are one tensor, such as a table that several
parameters use.

A step that changes one of them in place changes all. So a load gives a new optimizer or object one
tensor for all of them again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from smckpt.layout.containers import items_of
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.of_optimizers.bindings import Binding, optimizer_dicts
from smckpt.state_dict.of_optimizers.slots import SAME, Room, SavedSlot
from smckpt.state_dict.tensors import dtensor_parts, flagged, is_dtensor, is_wrapper

__all__ = ["same_in", "same_slots", "sharing"]


def sharing(make: Room, known: dict[str, torch.Tensor], *, keep: bool = False) -> Room:
    """Makes one tensor for all slots that had one when they were saved.

    Args:
        known: the tensors of one optimizer or object that were made so far, which this adds to.
        keep: keep a live tensor that fits, although it is another one: an object may have the
            state of a model.
    """

    def shared(saved: SavedSlot, live: Any, at: Path) -> torch.Tensor:
        if not saved.shared:
            return make(saved, live, at)
        if saved.shared not in known:
            known[saved.shared] = flagged(make(saved, live, at), saved.flags)
        one = known[saved.shared]
        if keep and make(saved, live, at) is live:
            return live
        return live if isinstance(live, torch.Tensor) and _memory(live) == _memory(one) else one

    return shared


def same_slots(
    owners: Iterable[tuple[Path, Binding | None]],
    given: Iterable[tuple[Path, Any, Any]],
    unmade: list[tuple[str, str, str]],
) -> dict[Path, str]:
    """As `same_in`, of all optimizers and objects of a state, by the paths in the state. Adds to
    `unmade` of a `Selection` what a load could not make, as only a part of the memory is the same.

    Args:
        given: the objects of the state, each with its path and what its `state_dict` gave. A module
            has its tensors already, so those that are one are one in a new module.
    """
    of_objects: list[Any] = []
    of_optimizers: list[Any] = []
    for path, value, state in given:
        if isinstance(state, Mapping) and not isinstance(value, nn.Module):
            of_objects.append((path, state, _itself))
            trees = [
                (at, tree) for at, tree, bound in optimizer_dicts(state, path) if bound is None
            ]
            of_optimizers += [((*at, "state"), tree["state"], _itself) for at, tree in trees]
    for path, binding in owners:
        if binding is not None and isinstance(getattr(binding.optimizer, "state", None), Mapping):
            state = binding.optimizer.state
            of_optimizers.append(((*path, "state"), state, _keys_of(binding)))
    found: dict[Path, str] = {}
    for path, state, keys in of_objects + of_optimizers:
        if near := _near(state):
            found |= {path + at: word for at, word in _words(near, keys).items()}
    for path, state, keys in of_optimizers:
        if (pair := _overlapping(_near(state))) is not None:
            one, other = (dotted((*path, keys(at[0])[0], *at[1:])) for at in pair)
            unmade.append((other, f"tensor in a part of the memory of {one}", _SEPARATE))
    return found


_SEPARATE = "give each tensor memory of its own (.clone()), or keep them as one tensor"


def _itself(key: Any) -> Sequence[Any]:
    return (key,)


def _keys_of(binding: Binding) -> Callable[[Any], Sequence[Any]]:
    known: dict[int, Sequence[Any]] = {}
    for index, parameter in enumerate(binding.parameters()):
        names = binding.names(parameter, index)
        known[id(parameter)] = (binding.number(index),) if binding.by_id else names
    return lambda key: known.get(id(key), (key,))


def same_in(state: Mapping[Any, Any]) -> dict[Path, str]:
    """The paths in an optimizer's state of tensors that are one tensor, with the word by which a
    load knows which ones."""
    return _words(_near(state), _itself)


_Found = Sequence[tuple[Path, torch.Tensor]]


def _near(state: Mapping[Any, Any]) -> _Found:
    """The tensors of a state if two of them may share memory; none otherwise, as nearly always."""
    found = [*_tensors_in(state)]
    spans = sorted((t.data_ptr(), t.numel() * t.element_size()) for _, t in found)
    near = any(begin + size > after for (begin, size), (after, _) in pairwise(spans))
    return found if near else ()


def _words(found: _Found, keys: Callable[[Any], Sequence[Any]]) -> dict[Path, str]:
    """
    Args:
        keys: the keys that a key of the state has in the checkpoint.
    """
    alike: dict[Any, list[Path]] = {}
    for path, tensor in found:
        alike.setdefault(_memory(tensor), []).append(path)
    return {
        (key, *rest): f"{SAME}{zlib.crc32(repr(([*keys(same[0][0])], same[0][1:])).encode()):08x}"
        for same in alike.values()
        if len(same) > 1
        for owner, *rest in same
        for key in keys(owner)
    }


def _overlapping(found: _Found) -> tuple[Path, Path] | None:
    """Two tensors of which one is a part of the other, or shares a part."""
    dense: dict[Any, tuple[int, int, Path]] = {}
    for path, tensor in found:
        size = tensor.numel() * tensor.element_size()
        if tensor.is_contiguous():
            dense.setdefault(_memory(tensor), (tensor.data_ptr(), tensor.data_ptr() + size, path))
    for (_, end, one), (begin, _, other) in pairwise(sorted(dense.values(), key=lambda d: d[:2])):
        if begin < end:
            return one, other
    return None


def _tensors_in(value: Any, at: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors with elements and memory of their own, each as its local tensor."""
    if type(value) is torch.Tensor and value.is_cpu and value.layout is torch.strided:
        if value.numel():
            yield at, value
    elif isinstance(value, torch.Tensor):
        local = dtensor_parts(value)[0] if is_dtensor(value) else value
        plain = not is_wrapper(local) and local.layout is torch.strided and not local.is_meta
        if plain and local.numel():
            yield at, local
    else:
        for key, child in items_of(value) or ():
            yield from _tensors_in(child, (*at, key))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = dtensor_parts(tensor)[0] if is_dtensor(tensor) else tensor
    return local.data_ptr(), local.device, local.dtype, local.shape, local.stride()
