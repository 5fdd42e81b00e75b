"""The groups of an optimizer and the numbers of its parameters, on both sides of a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from smckpt.errors import KeysMismatchError, StateError
from smckpt.layout.entries import Path, dotted
from smckpt.state_dict.bindings import Binding, bound, is_optimizer_dict
from smckpt.state_dict.tags import RememberingDict

if TYPE_CHECKING:
    from smckpt.checkpoint.catalogue import Catalogue

__all__ = ["fill_groups", "names_record", "number_as_saved", "renamed_groups"]


def fill_groups(binding: Binding, groups: list[dict[str, Any]]) -> None:
    """Write hyperparameters into the live param_groups, matched by position."""
    live = binding.optimizer.param_groups
    if len(groups) != len(live):
        raise StateError(
            f"{len(groups)} parameter groups were saved, the optimizer has {len(live)}",
            remedy="build the optimizer with the same groups",
        )
    given: dict[int, torch.Tensor] = {}  # groups may share one tensor (a learning rate)
    for mine, theirs in zip(live, groups, strict=True):
        for key, value in theirs.items():
            if key == "params":
                continue
            if isinstance(mine.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                if not torch.equal(given.setdefault(id(mine[key]), value), value):
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
    numbered = not binding.held and record.get("form") == "id"
    names = () if numbered else record["ids"]

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
        if where is not None and not binding.held and members(chosen) != wanted:
            raise KeysMismatchError(
                f"group {position} of {where} has other parameters than the saved groups",
                remedy="give the groups of the optimizer the parameters that they had",
            )
        out.append({**chosen, "params": mine["params"]})
    return out


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
        KeysMismatchError: a parameter was not saved; or the order differs in a dict whose numbers
            are not ours to change: that of an optimizer with its own `load_state_dict`, or one that
            was taken under LOCAL.
    """
    changed = False
    for path, tree, names in _numbered(state_dict):
        record = catalogue.optimizers_of(rank).get(dotted(path)) or {}
        order = _order(names, record.get("names", ()), dotted(path), strict)
        binding = bound(tree) if is_optimizer_dict(tree) else None
        if binding is None or binding.held:
            if order:
                raise KeysMismatchError(
                    f"the parameters of {dotted(path)} stand in another order than the saved ones",
                    remedy="give the optimizer its parameters in the order that they had",
                )
            continue
        tree["param_groups"].binding = replace(binding, order=order)
        if order:
            changed = True
            tree["state"] = {
                order[key] if type(key) is int else key: slots
                for key, slots in tree["state"].items()
            }
            for group in tree["param_groups"]:
                group["params"] = [order[number] for number in group["params"]]
    return changed


def _numbered(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Sequence[Sequence[str]]]]:
    """The dicts of optimizers that number parameters whose names are known, with these names."""
    binding = bound(tree) if is_optimizer_dict(tree) else None
    if isinstance(tree, RememberingDict) and tree.names:
        yield path, tree, tree.names
    elif binding is not None and binding.held and binding.by_id:
        yield path, tree, [binding.names(p, n) for n, p in enumerate(binding.parameters())]
    elif isinstance(tree, (dict, list, tuple)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(child, (dict, list, tuple)):
                yield from _numbered(child, (*path, key))


def _order(
    mine: Sequence[Sequence[str]], saved: Sequence[Sequence[str]], where: str, strict: bool
) -> tuple[int, ...]:
    """The saved number of each parameter; () if these are their positions, or nothing tells. One
    that was not saved gets a number that nothing has, if the load is not strict."""
    here, there = _places(mine), _places(saved)
    order: list[int] = []
    for number, names in enumerate(mine):
        known = next((there[name] for name in names if name in here and name in there), None)
        if known is None:
            renamed = number < len(saved) and here.keys().isdisjoint(saved[number])
            known = number if renamed or not saved else len(saved) + number
        if strict and saved and (known >= len(saved) or known in order):
            raise KeysMismatchError(
                f"the checkpoint has no state of {names[0]!r}, parameter {number} of {where}",
                remedy="give the optimizer the parameters that it had",
            )
        order.append(known)
    return () if order == list(range(len(mine))) else tuple(order)


def _places(names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Name → number, without names of two parameters."""
    found: dict[str, int] = {}
    twice: set[str] = set()
    for number, each in enumerate(names):
        for name in each:
            if found.setdefault(name, number) != number:
                twice.add(name)
    return {name: number for name, number in found.items() if name not in twice}
