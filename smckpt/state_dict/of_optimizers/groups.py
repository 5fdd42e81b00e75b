"""The groups and the numbers of an optimizer's parameters, on both sides of a load."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from smckpt.checkpoint.records.objects import encode_object
from smckpt.errors import KeysMismatchError, StateError, few
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.of_optimizers.bindings import Binding, bound, inside, is_optimizer_dict
from smckpt.state_dict.of_optimizers.slots import ABSENT, SavedSlot, SavedState
from smckpt.state_dict.tags import RememberingDict
from smckpt.state_dict.tensors import expanded_in, is_value, same_bits

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.catalogue import Catalogue


log = logging.getLogger("smckpt")


def fill_groups(binding: Binding, groups: list[dict[str, Any]]) -> None:
    """Write hyperparameters into the live param_groups, matched by position."""
    live = binding.optimizer.param_groups
    if len(groups) != len(live):
        raise StateError(
            f"{len(groups)} parameter groups were saved, the optimizer has {len(live)}",
            remedy="build the optimizer with the same groups, or pass check_keys_matched=False, "
            "which matches them by their parameters",
        )
    given: dict[int, torch.Tensor] = {}  # groups may share one tensor (a learning rate)
    for mine, theirs in zip(live, groups, strict=True):
        for key, value in theirs.items():
            if key == "params":
                continue
            both = isinstance(mine.get(key), torch.Tensor) and isinstance(value, torch.Tensor)
            if both and not is_value(value):
                first = given.setdefault(id(mine[key]), value)
                if expanded_in(mine[key]) or not same_bits(first, value):
                    mine[key] = value
                elif mine[key] is not value:
                    mine[key].copy_(value)
            else:
                mine[key] = value


def renamed_groups(
    saved: list[Any], tree: dict[str, Any], record: Any, where: str | None = None
) -> list[dict[str, Any]]:
    """Saved groups in the target's order, with the target's names of parameters.

    Groups are matched by the names of their parameters where both sides have names, else by
    position.

    Args:
        where: the optimizer's path, if the groups of an object must have the same parameters.

    Raises:
        KeysMismatchError: they have others.
    """
    target = tree["param_groups"]
    binding = getattr(target, "binding", None)
    if binding is None or record is None or len(saved) != len(target):
        groups = [dict(g) for g in saved]
        for group, mine in zip(groups, target, strict=False):
            group["params"] = mine["params"]
        return groups
    mine_names = [list(binding.names(p, i)) for i, p in enumerate(binding.parameters())]
    at = 0
    out = []
    by_members = [(_members(g, binding, record), g) for g in saved]
    for position, (mine, live) in enumerate(
        zip(target, binding.optimizer.param_groups, strict=True)
    ):
        count = len(live["params"])
        wanted = {n for names_ in mine_names[at : at + count] for n in names_}
        at += count
        found = max(by_members, key=lambda pair: len(pair[0] & wanted), default=None)
        chosen = found[1] if found is not None and found[0] & wanted else saved[position]
        if where is not None and not binding.held and _members(chosen, binding, record) != wanted:
            raise KeysMismatchError(
                f"group {position} of {where} has other parameters than the saved groups",
                remedy="give the groups of the optimizer the parameters that they had",
            )
        out.append({**chosen, "params": mine["params"]})
    return out


def _members(group: Mapping[str, Any], binding: Binding, record: Mapping[str, Any]) -> set[str]:
    """The names of a saved group's parameters, as the binding has them; numbers in text where it
    has no names."""
    numbered = not binding.held and record.get("form") == "id"
    names = () if numbered else record["ids"]
    out: set[str] = set()
    for p in group["params"]:
        known = isinstance(p, int) and 0 <= p < len(names)
        out.update(names[p] if known else (str(p),))
    return out


def matched_groups(
    saved: list[Any], binding: Binding, record: Mapping[str, Any] | None, where: str
) -> list[dict[str, Any]]:
    """For each live group the values of the saved groups that have its parameters, for a load of
    what both sides have. A live value stays, and is named, if these groups do not agree on it, if
    live groups were given different ones, or if it switches an option on or off that the optimizer
    was made with.

    Raises:
        StateError: the numbers of groups differ, and nothing tells the names of their parameters.
    """
    groups, defaults = binding.optimizer.param_groups, binding.optimizer.defaults
    named = binding.order or binding.held
    if len(saved) != len(groups) and (record is None or not named):
        raise StateError(
            f"{len(saved)} parameter groups were saved, the optimizer has {len(groups)}, and "
            "nothing tells the names of their parameters",
            remedy="save and load the model beside its optimizer, both as objects or both in "
            "sm_state_dict_type",
        )
    kept: list[str] = []
    out: list[dict[str, Any]] = []
    at = 0
    for number, group in enumerate(groups):
        found = saved[number : number + 1]
        if record is not None and named:
            members = enumerate(group["params"], at)
            wanted = {name for n, p in members for name in binding.names(p, n)}
            found = [each for each in saved if _members(each, binding, record) & wanted]
        at += len(group["params"])
        values: dict[str, Any] = {}
        for key in dict.fromkeys(key for each in found for key in each if key != "params"):
            theirs = [each[key] for each in found if key in each]
            live = group.get(key, ABSENT)
            given = len(saved) != len(groups) and any(
                key in other and not _equal(other[key], live) for other in groups
            )
            switched = (
                key in defaults
                and _equal(live, defaults[key])
                and isinstance(live, _OPTIONS)
                and isinstance(theirs[0], _OPTIONS)
                and bool(live) is not bool(theirs[0])
            )
            agreed = all(_equal(each, theirs[0]) for each in theirs)
            if key not in group or (agreed and not given and not switched):
                values[key] = theirs[0]
            elif not all(_equal(each, live) for each in theirs):
                kept.append(f"{where}.{number}.{key}")
        out.append({**{k: v for k, v in group.items() if k != "params"}, **values, "params": []})
    if kept:
        log.warning("kept as the optimizer has them: %s", ", ".join(kept))
    return out


def name_left(binding: Binding, saved: SavedState, other: Sequence[str], state: Path) -> None:
    """Warn of values whose parameter the target lacks or has under another name. Tensors that are
    left are named where they are planned."""
    members = enumerate(binding.parameters())
    known = {str(key) for n, p in members for key in (binding.number(n), *binding.names(p, n))}
    owners = {owner for owner in saved.owners() if saved.mine(owner)} - known - {*other}
    if left := sorted(dotted((*state, owner)) for owner in owners if not saved.tensors([owner])):
        log.warning("not loaded, because the target has no such parameters: %s", few(left, 5))


_OPTIONS = (bool, int, float, type(None))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, SavedSlot) or isinstance(other, SavedSlot):
        return one is other
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if both and (is_value(one) or is_value(other)):
            return bool(encode_object(one) == encode_object(other))
        return both and bool(torch.equal(one, other))
    return bool(one == other)


# -- optimizers that are objects in the state ------------------------------------------------------


def names_of(optimizer: Any, known: Mapping[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The names of an optimizer's parameters; [] if one is not a parameter of a known module.

    Args:
        known: by id of the parameter, as `names_in_state` gives them.
    """
    groups = object.__getattribute__(optimizer, "__dict__").get("param_groups")
    if not known or not isinstance(groups, list):
        return []
    found = [known.get(id(p), ()) for group in groups for p in group["params"]]
    return found if all(found) else []


def names_record(names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """As `Binding.record`, for an optimizer object, which numbers its parameters. A load knows a
    parameter by any of its names."""
    ids = [[str(number)] for number in range(len(names))]
    return {"form": "id", "ids": ids, "names": [list(each) for each in names]}


def number_as_saved(
    state_dict: MutableMapping[str, Any], catalogue: Catalogue, rank: int, *, strict: bool
) -> bool:
    """Number the parameters of optimizer objects in the target as in the checkpoint, where the
    names of parameters tell that. Returns whether a number changed.

    Args:
        rank: the saved rank whose own state this rank takes.

    Raises:
        KeysMismatchError: a parameter was not saved; or the order differs in the dict of an
            optimizer with its own `load_state_dict`, or in one that was taken under LOCAL.
    """
    changed = False
    for path, tree, names in _numbered(state_dict):
        record = catalogue.optimizers_of(rank).get(dotted(path)) or {}
        binding = bound(tree) if is_optimizer_dict(tree) else None
        block = binding is not None and bool(binding.held)
        state = (*path, "state")
        by_values = not any(
            t.path[: len(state)] == state for t in catalogue.logical.values()
        ) and any(
            at[: len(state)] == state and (not isinstance(value, dict) or value)
            for at, value in catalogue.objects(rank, unmade=True).values()
        )
        if "names" not in record and (
            record.get("form") != "id" or ((strict or not block) and not by_values)
        ):
            continue  # nothing tells, or names in the tensors do
        order = _order(names, record.get("names", record["ids"]), dotted(path), strict)
        differs = order != tuple(range(len(order)))
        if differs and (binding is None or (strict and block)):
            raise KeysMismatchError(
                f"the parameters of {dotted(path)} stand in another order than the saved ones",
                remedy="give the optimizer its parameters in the order that they had",
            )
        if binding is not None:
            _number(tree, replace(binding, order=order), dict(enumerate(order)))
        changed |= differs
    return changed


def with_own_numbers(tree: Any, binding: Binding) -> None:
    """Number the parameters in a user's dict by their positions again, after a load."""
    if binding.order:
        own = replace(binding, order=())
        _number(tree, own, {number: at for at, number in enumerate(binding.order)})


def _number(tree: Any, binding: Binding, numbers: Mapping[int, int]) -> None:
    tree["param_groups"].binding = binding
    tree["state"] = {
        numbers.get(key, key) if type(key) is int else key: slots
        for key, slots in tree["state"].items()
    }
    tree["param_groups"][:] = [
        {**group, "params": [numbers[p] for p in group["params"]]} for group in tree["param_groups"]
    ]


def _numbered(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Sequence[Sequence[str]]]]:
    """The dicts of optimizers that number parameters whose names are known, with these names."""
    binding = bound(tree) if is_optimizer_dict(tree) else None
    if isinstance(tree, RememberingDict) and tree.names:
        yield path, tree, tree.names
    elif binding is not None and binding.held and binding.by_id:
        yield path, tree, [binding.names(p, n) for n, p in enumerate(binding.parameters())]
    else:
        for at, child in inside(tree, path):
            yield from _numbered(child, at)


def _order(
    mine: Sequence[Sequence[str]], saved: Sequence[Sequence[str]], where: str, strict: bool
) -> tuple[int, ...]:
    """The saved number of each parameter. One that was not saved gets a number that nothing has, if
    the load is not strict."""
    here, there = _positions(mine), _positions(saved)
    order: list[int] = []
    for number, names in enumerate(mine):
        known = next((there[name] for name in names if name in here and name in there), None)
        if known is None:
            renamed = number < len(saved) and here.keys().isdisjoint(saved[number])
            known = number if renamed else len(saved) + number
        if strict and (known >= len(saved) or known in order):
            raise KeysMismatchError(
                f"the checkpoint has no state of {names[0]!r}, parameter {number} of {where}",
                remedy="give the optimizer the parameters that it had",
            )
        order.append(known)
    return tuple(order)


def _positions(names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Name → number, without names of two parameters."""
    found: dict[str, int] = {}
    twice: set[str] = set()
    for number, each in enumerate(names):
        for name in each:
            if found.setdefault(name, number) != number:
                twice.add(name)
    return {name: number for name, number in found.items() if name not in twice}
