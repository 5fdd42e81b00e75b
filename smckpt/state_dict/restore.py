"""Gives back values that are not tensors, to the user's dict and to live optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from smckpt.checkpoint.parameter_names import are_groups
from smckpt.errors import CorruptCheckpointError, StateError
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.bindings import optimizer_dicts, stock_record
from smckpt.state_dict.computed import is_extra_state
from smckpt.state_dict.optimizers import fill_groups
from smckpt.state_dict.select import Selection
from smckpt.state_dict.tags import (
    ModelStateDict,
    RememberingDict,
    StatefulStateDict,
)

__all__ = [
    "gathered_parts",
    "make_extra_state",
    "put",
    "restore",
    "tuple_like",
]

log = logging.getLogger("smckpt")


def restore(
    state_dict: MutableMapping[str, Any],
    objects: Mapping[str, tuple[Path, Any]],
    *,
    saved_optimizers: Mapping[str, Any],
    strict: bool = True,
) -> None:
    """Put the saved values into `state_dict`, in place, and through to live optimizers.

    Args:
        objects: key → (path, value), as saved.
        saved_optimizers: the saved names of each optimizer's parameters.
        strict: whether a value without a place in the target is an error or a log line.
    """
    live = {
        dotted(path): (path, tree, binding) for path, tree, binding in optimizer_dicts(state_dict)
    }
    for key, (path, value) in objects.items():
        prefix, _, last = key.rpartition(".")
        if last == "param_groups" and prefix in live:
            _, tree, binding = live[prefix]
            if not are_groups(value):
                raise CorruptCheckpointError(
                    f"{key} is no list of groups of parameters", remedy="use an older checkpoint"
                )
            groups = _renamed(value, tree, saved_optimizers.get(prefix))
            _refill(tree["param_groups"], groups)
            if binding is not None:
                fill_groups(binding, groups)
            continue
        if last == "params" and _is_in_groups(path, live.values()):
            # the target's own names, because those of the checkpoint may have the other form
            continue
        if last == "state" and prefix in live and value == {}:
            continue  # a rank without elements saved it; this rank's own values are filled
        if not put(state_dict, path, value) and strict:
            raise StateError(
                f"the saved value {key} has no place in the target",
                remedy="give the target the structure that was saved, or pass "
                "check_keys_matched=False",
            )
    for path, tree, binding in live.values():
        if binding is None:
            if isinstance(tree, StatefulStateDict):
                continue  # its object loads it, when all is read
            # torch's set_state_dict takes a dict by names, such as that of the AppState recipe.
            numbered = stock_record(tree) is not None
            log.log(
                logging.WARNING if numbered else logging.INFO,
                "%s: its optimizer is not known, so its plain values were loaded into the dict "
                "only. Call its load_state_dict, or put the optimizer itself into the state",
                dotted(path),
            )
            continue
        # If the groups hold a tensor (a learning rate), each of their values is stored by itself.
        if any(isinstance(v, torch.Tensor) for g in tree["param_groups"] for v in g.values()):
            fill_groups(binding, tree["param_groups"])
        if binding.kind != "FULL":  # there rank 0 holds it, and `put_through` tells the others
            _write_through(binding, tree)
    for tree in _model_dicts(state_dict):
        if tree.give_back is not None:
            tree.give_back(tree)


def empty_states(
    state_dict: MutableMapping[str, Any], objects: Mapping[str, tuple[Path, Any]]
) -> frozenset[str]:
    """The keys of optimizers' states that are empty here or in the checkpoint, because the rank
    holds no element of a trained parameter. Other ranks have that state, by name."""
    keys = {
        dotted((*path, "state")): tree["state"] for path, tree, _ in optimizer_dicts(state_dict)
    }
    return frozenset(
        key for key, here in keys.items() if not here or (key in objects and objects[key][1] == {})
    )


def gathered_parts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, RememberingDict]]:
    """The gathered state dicts in a state, each with its path, in the user's order. A load fills
    them, and their `put_through` fills the live objects."""
    if getattr(tree, "put_through", None) is not None:
        yield path, tree
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


def _is_in_groups(path: Path, live: Iterable[tuple[Path, Any, Any]]) -> bool:
    return any(path[:-2] == (*its, "param_groups") for its, _, _ in live)


def _write_through(binding: Any, tree: dict[str, Any]) -> None:
    """Write plain values of the state (an integer step) to the optimizer's own dicts."""
    for index, parameter in enumerate(binding.parameters()):
        for name in (index, *binding.names(parameter, index)):
            slots = tree["state"].get(name)
            if not isinstance(slots, dict):
                continue
            for slot, value in slots.items():
                if not isinstance(value, torch.Tensor) and parameter in binding.optimizer.state:
                    binding.optimizer.state[parameter][slot] = value
            break


def _renamed(saved: list[Any], tree: dict[str, Any], record: Any) -> list[dict[str, Any]]:
    """Saved groups in the target's order, with the target's names of parameters.

    Groups are matched by the names of their parameters where both sides have names, else by
    position.
    """
    target = tree["param_groups"]
    binding = getattr(target, "binding", None)
    if binding is None or record is None or len(saved) != len(target):
        groups = [dict(g) for g in saved]
        for group, mine in zip(groups, target, strict=False):
            group["params"] = mine["params"]
        return groups
    names = record["ids"]

    def members(group: Mapping[str, Any]) -> set[str]:
        out: set[str] = set()
        for p in group["params"]:
            known = isinstance(p, int) and 0 <= p < len(names)
            out.update(names[p] if known else (str(p),))
        return out

    mine_names = [list(binding.names(p, i)) for i, p in enumerate(binding.parameters())]
    at = 0
    out = []
    by_members = [(members(g), g) for g in saved]
    for position, (mine, live) in enumerate(
        zip(target, binding.optimizer.param_groups, strict=True)
    ):
        count = len(live["params"])
        wanted = {n for names_ in mine_names[at : at + count] for n in names_}
        at += count
        found = max(by_members, key=lambda pair: len(pair[0] & wanted), default=None)
        chosen = found[1] if found is not None and found[0] & wanted else saved[position]
        out.append({**chosen, "params": mine["params"]})
    return out


def _refill(target: list[Any], groups: list[dict[str, Any]]) -> None:
    target[:] = groups


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


def tuple_like(values: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(values)(items) if type(values) is tuple else type(values)(*items)


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
