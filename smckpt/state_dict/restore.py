"""Giving back what is no tensor: into the user's dict, and into the optimizers it came from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from smckpt.errors import StateError
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.optimizers import Binding, fill_groups, optimizer_dicts
from smckpt.state_dict.select import is_stateful
from smckpt.state_dict.tags import (
    FullStateDict,
    ModelStateDict,
    OptimizerStateDict,
    StatefulStateDict,
)

__all__ = ["gathered_parts", "put", "restore", "rewrap_stateful", "unwrap_stateful"]

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
        saved_optimizers: how each optimizer's parameters were called when it was saved.
        strict: a value without a place in the target is an error rather than a log line.
    """
    live = {
        dotted(path): (path, tree, binding) for path, tree, binding in optimizer_dicts(state_dict)
    }
    for key, (path, value) in objects.items():
        prefix, _, last = key.rpartition(".")
        if last == "param_groups" and prefix in live:
            _, tree, binding = live[prefix]
            groups = _renamed(value, tree, saved_optimizers.get(prefix))
            _refill(tree["param_groups"], groups)
            if binding is not None:
                fill_groups(binding, groups)
            continue
        if last == "params" and _is_in_groups(path, live.values()):
            continue  # the target's own names: the checkpoint's may be of the other form
        if last == "state" and prefix in live and value == {}:
            continue  # of a rank that held none: what this one holds is filled
        if not put(state_dict, path, value) and strict:
            raise StateError(
                f"the saved value {key} has no place in the target",
                remedy="give the target the structure that was saved, or pass "
                "check_keys_matched=False",
            )
    for path, tree, binding in live.values():
        if binding is None:
            log.warning(
                "%s: the live optimizer is not known, so what is no tensor is in the dict only: "
                "call its load_state_dict",
                dotted(path),
            )
            continue
        # A tensor in the groups (a rate) makes each of their values an entry of its own.
        if any(isinstance(v, torch.Tensor) for g in tree["param_groups"] for v in g.values()):
            fill_groups(binding, tree["param_groups"])
        if binding.kind != "FULL":  # held by rank 0, which tells the others: `put_through`
            _write_through(binding, tree)
    for tree in _model_dicts(state_dict):
        tree.give_back(tree)


def empty_states(
    state_dict: MutableMapping[str, Any], objects: Mapping[str, tuple[Path, Any]]
) -> frozenset[str]:
    """The keys of optimizers' states that are empty, saved or here: of a rank that holds no element
    of what is trained. The state is that of other ranks, and tensors tell it by name."""
    keys = {
        dotted((*path, "state")): tree["state"] for path, tree, _ in optimizer_dicts(state_dict)
    }
    return frozenset(
        key for key, here in keys.items() if not here or (key in objects and objects[key][1] == {})
    )


def gathered_parts(
    tree: Any, path: Path = ()
) -> Iterator[tuple[Path, FullStateDict | OptimizerStateDict]]:
    """The state dicts below that were gathered, in the user's order, each with its place: a load
    fills the copies, and `put_through` the objects that they are copies of."""
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
    """Plain values among the state (an integer step) live in the optimizer's own dicts too."""
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
    """Saved groups, in the target's order, with the target's way of naming parameters.

    A hyperparameter belongs to parameters, so groups are matched by their members' names where
    both sides know them, else by position.
    """
    target = tree["param_groups"]
    binding = getattr(target, "binding", None) or getattr(tree, "binding", None)
    if binding is None or record is None or len(saved) != len(target):
        groups = [dict(g) for g in saved]
        for group, mine in zip(groups, target, strict=False):
            group["params"] = mine["params"]
        return groups
    names = record["ids"]

    def members(group: Mapping[str, Any]) -> set[str]:
        out: set[str] = set()
        for p in group["params"]:
            out.update(names[p] if isinstance(p, int) else (p,))
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
    """Assign at `path`; False where the structure lacks the place. Tuples are made anew."""
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
    """The tuple with `value` at `path`; its other elements are the same objects."""
    key = path[0]
    assert isinstance(key, int)
    items = list(values)
    if len(path) == 1:
        items[key] = value
    elif isinstance(items[key], tuple):
        items[key] = _with(items[key], path[1:], value)
    else:
        put(items[key], path[1:], value)
    return _tuple_like(values, items)


def _tuple_like(values: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(values)(items) if type(values) is tuple else type(values)(*items)


# -- objects that have a state dict of their own --------------------------------------------------


def unwrap_stateful(tree: Any, found: list[tuple[Any, Any, Any]] | None = None) -> list[Any]:
    """Put the state dicts of Stateful objects (schedulers, loaders, models, optimizers) in their
    places, so that they can be filled. `rewrap_stateful` undoes it.

    What stands inside an object's state dict comes before the object itself.
    """
    found = [] if found is None else found
    items: Any = ()
    if isinstance(tree, MutableMapping):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    for key, value in items:
        if isinstance(value, torch.Tensor):
            continue  # most of all; and a subclass may have a state dict for reasons of its own
        if isinstance(value, torch.optim.Optimizer):
            tree[key] = Binding(value, "LOCAL", {}, {}).adopt(value.state_dict())
            found.append((tree, key, value))
        elif is_stateful(value):
            taken = value.state_dict()
            tree[key] = StatefulStateDict(taken) if isinstance(taken, dict) else taken
            unwrap_stateful(tree[key], found)
            found.append((tree, key, value))
        elif isinstance(value, tuple):
            _unwrap_tuple(tree, key, value, found)
        else:
            unwrap_stateful(value, found)
    return found


def _unwrap_tuple(tree: Any, key: Any, values: tuple[Any, ...], found: list[Any]) -> None:
    """As a list for the time of the load, where it holds such objects; it is what it was after."""
    items, before = list(values), len(found)
    unwrap_stateful(items, found)
    if len(found) > before:
        tree[key] = items
        found.append((tree, key, values))


def rewrap_stateful(found: list[tuple[Any, Any, Any]], *, loaded: bool) -> None:
    """Put the objects back; when the load went well they take what was read."""
    for tree, key, value in found:
        filled, tree[key] = tree[key], value
        if isinstance(value, tuple):
            tree[key] = _tuple_like(value, filled) if loaded else value
        # An optimizer was written through already; its load_state_dict would cast the state.
        elif loaded and not isinstance(value, torch.optim.Optimizer):
            mine = filled.returned() if isinstance(filled, StatefulStateDict) else filled
            value.load_state_dict(mine)
