"""Gives back values that are not tensors, to the user's dict and to live optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from smckpt.errors import StateError
from smckpt.layout.containers import items_of, renewed
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.modes import is_extra_state
from smckpt.state_dict.of_optimizers.bindings import (
    bound,
    is_optimizer_dict,
    optimizer_dicts,
    stock_record,
)
from smckpt.state_dict.of_optimizers.groups import fill_groups, with_own_numbers
from smckpt.state_dict.of_optimizers.own_methods import hand_over, hand_to_wrapper, wrappers_in
from smckpt.state_dict.select import Selection
from smckpt.state_dict.tags import (
    ModelStateDict,
    StatefulStateDict,
)

__all__ = [
    "gathered_parts",
    "make_extra_state",
    "put",
    "restore",
]

log = logging.getLogger("smckpt")


def restore(
    state_dict: MutableMapping[str, Any],
    objects: Mapping[str, tuple[Path, Any]],
    *,
    strict: bool = True,
) -> None:
    """Put the saved values into `state_dict`, in place, and through to live optimizers.

    Args:
        objects: key → (path, value), without what optimizers have already.
        strict: whether a value without a place in the target is an error or a log line.
    """
    for key, (path, value) in objects.items():
        if not put(state_dict, path, value) and strict:
            raise StateError(
                f"the saved value {key} has no place in the target",
                remedy="give the target the structure that was saved, or pass "
                "check_keys_matched=False",
            )
    for path, tree, binding in optimizer_dicts(state_dict):
        if binding is not None:
            fill_groups(binding, tree["param_groups"])
            if binding.put_through is None:  # otherwise that fills the optimizers of all ranks
                hand_over(binding, tree)
            with_own_numbers(tree, binding)
        elif not isinstance(tree, StatefulStateDict):  # its object loads it, when all is read
            # torch's set_state_dict takes a dict by names, such as that of the AppState recipe.
            numbered = stock_record(tree) is not None
            log.log(
                logging.WARNING if numbered else logging.INFO,
                "%s: its optimizer is not known, so its plain values were loaded into the dict "
                "only. Call its load_state_dict, or put the optimizer itself into the state",
                dotted(path),
            )
    for _, tree, wrapper in wrappers_in(state_dict):
        hand_to_wrapper(wrapper, tree)
    for model in _model_dicts(state_dict):
        if model.give_back is not None:
            model.give_back(model)


def gathered_parts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Callable[[], object]]]:
    """The gathered state dicts in a state, in the user's order: the path of each, and what puts it
    through to the live objects after a load has filled it."""
    if is_optimizer_dict(tree):  # first that of an optimizer inside, which the outer one takes
        for key, child in tree.items():
            if key not in ("state", "param_groups"):
                yield from gathered_parts(child, (*path, key))
    if (put_through := getattr(tree, "put_through", None)) is not None:
        yield path, partial(put_through, tree)
    elif is_optimizer_dict(tree):
        if (put_through := getattr(bound(tree), "put_through", None)) is not None:
            yield path, partial(put_through, tree)  # a class added keys in a new dict
    elif isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from gathered_parts(child, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, child in enumerate(tree):
            yield from gathered_parts(child, (*path, index))


def _model_dicts(tree: Any) -> Iterator[ModelStateDict]:
    if isinstance(tree, ModelStateDict):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for child in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(child, (dict, list, tuple)):  # not a generator for each number of a list
                yield from _model_dicts(child)


def put(tree: Any, path: Path, value: Any) -> bool:
    """Assign at `path`; False if the structure lacks it. A container that cannot change is replaced
    by a new one."""
    return _put(tree, path, value) is not None


def _put(tree: Any, path: Path, value: Any) -> Any:
    """The container with `value` at `path`: itself, or one like it; None if it lacks the path."""
    key, children = _key_in(tree, path[0]) if path else (None, None)
    if children is None:
        return None
    new = value if len(path) == 1 else _put(children[key], path[1:], value)
    if len(path) > 1 and (new is None or new is children[key]):
        return None if new is None else tree
    return renewed(tree, {key: new})


def _key_in(tree: Any, key: Any) -> tuple[Any, Mapping[Any, Any] | None]:
    """The container's own key for one of a path, and its children; None without such a key."""
    children: Mapping[Any, Any] = tree if isinstance(tree, Mapping) else dict(items_of(tree) or ())
    if key in children:
        return key, children
    odd = (each for each in children if type(each) not in (str, int) and repr(each) == key)
    found = next(odd, _NONE)
    return found, None if found is _NONE else children


_NONE = object()


def make_extra_state(
    state_dict: MutableMapping[str, Any],
    selection: Selection,
    rows: Mapping[str, Sequence[Any]],
    saved: int,
) -> bool:
    """Give tensors of modules' extra state the saved shapes and dtypes; returns whether any
    changed. Nothing else says their size: Transformer Engine pickles its scales into bytes, and has
    none before the first step.

    Args:
        selection: of `state_dict`.
        rows: key → the saved arrays of this key (the catalogue's).
        saved: the saved rank whose per-rank values this rank takes.
    """
    made = False
    for entry, live in zip(selection.entries, selection.tensors, strict=True):
        if not any(map(is_extra_state, entry.path)) or not entry.geometry.per_rank:
            continue
        for row in rows.get(entry.key, ()):
            if not row.geometry.per_rank or saved not in row.ranks:
                continue
            shape = tuple(row.geometry.local_shape(saved))
            if (row.dtype, shape) != (entry.dtype, entry.shape):
                room = torch.empty(shape, dtype=getattr(torch, row.dtype), device=live.device)
                made |= put(state_dict, entry.path, room)
    return made
