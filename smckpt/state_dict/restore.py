"""Gives back values that are not tensors, to the user's dict and to live optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from smckpt.errors import StateError
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.bindings import (
    bound,
    is_optimizer_dict,
    optimizer_dicts,
    stock_record,
    tuple_like,
)
from smckpt.state_dict.computed import is_extra_state
from smckpt.state_dict.groups import fill_groups
from smckpt.state_dict.own_methods import hand_over
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
            if binding.kind != "FULL":  # there rank 0 holds it, and `put_through` fills all ranks
                hand_over(binding, tree)
        elif not isinstance(tree, StatefulStateDict):  # its object loads it, when all is read
            # torch's set_state_dict takes a dict by names, such as that of the AppState recipe.
            numbered = stock_record(tree) is not None
            log.log(
                logging.WARNING if numbered else logging.INFO,
                "%s: its optimizer is not known, so its plain values were loaded into the dict "
                "only. Call its load_state_dict, or put the optimizer itself into the state",
                dotted(path),
            )
    for model in _model_dicts(state_dict):
        if model.give_back is not None:
            model.give_back(model)


def gathered_parts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Callable[[], object]]]:
    """The gathered state dicts in a state, in the user's order: the path of each, and what puts it
    through to the live objects after a load has filled it."""
    if (put_through := getattr(tree, "put_through", None)) is not None:
        yield path, partial(put_through, tree)
    elif is_optimizer_dict(tree) and getattr(bound(tree), "put_through", None) is not None:
        yield path, partial(bound(tree).put_through, tree)  # a class added keys in a new dict
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
    """Assign at `path`; False if the structure lacks it. A tuple is replaced by a new one."""
    if not path:
        return False
    key = path[0]
    if isinstance(tree, MutableMapping):
        if key not in tree:
            return False
        if len(path) == 1:
            tree[key] = value
            return True
        if isinstance(tree[key], tuple):
            remade = _with(tree[key], path[1:], value)
            tree[key] = remade
            return True
        return put(tree[key], path[1:], value)
    if isinstance(tree, list) and isinstance(key, int) and key < len(tree):
        if len(path) == 1:
            tree[key] = value
            return True
        if isinstance(tree[key], tuple):
            tree[key] = _with(tree[key], path[1:], value)
            return True
        return put(tree[key], path[1:], value)
    return False


def _with(values: tuple[Any, ...], path: Path, value: Any) -> tuple[Any, ...]:
    """A new tuple with `value` at `path` and the same other elements."""
    key = path[0]
    assert isinstance(key, int)
    items = list(values)
    if len(path) == 1:
        items[key] = value
    elif isinstance(items[key], tuple):
        items[key] = _with(items[key], path[1:], value)
    else:
        put(items[key], path[1:], value)
    return tuple_like(values, items)


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
