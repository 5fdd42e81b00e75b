"""A load without a target: the whole saved state, in new containers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smckpt.checkpoint.catalogue import Catalogue
from smckpt.checkpoint.coordinates import ParallelCoordinates
from smckpt.checkpoint.parameter_names import under_names
from smckpt.checkpoint.plan import whole_tensors
from smckpt.errors import KeysMismatchError
from smckpt.layout.containers import FACTORIES
from smckpt.layout.entries import Path, dotted
from smckpt.meeting.group import Group

__all__ = ["whole_state"]

_Nodes = dict[Path, dict[Any, None]]  # container → its keys, in order


def whole_state(
    catalogue: Catalogue,
    saved: int,
    group: Group,
    coordinates: ParallelCoordinates,
    only: Sequence[str] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saved nested state, with empty tensors to fill; and these tensors alone, nested in dicts.
    (Values may hold arrays too, which are not tensors of the state.)

    Tensors are whole, on the CPU, by logical name. An optimizer's state has the names of its
    parameters if they are known. Values come from the rank that this one follows, or, if that did
    not save them, from the lowest rank that did.

    Args:
        saved: the rank that is followed.
        only: the top keys to load.

    Raises:
        KeysMismatchError: one of `only` was not saved.
    """
    leaves: dict[Path, Any] = {}
    tensors: dict[Any, Any] = {}
    for path, dtype, shape in whole_tensors(
        catalogue, rank=group.rank, group_ranks=group.ranks, coordinates=coordinates
    ):
        if only is None or str(path[0]) in only:
            room = torch.empty(shape, dtype=getattr(torch, dtype))
            leaves[path] = room.numpy() if _kind(catalogue, path) == "ndarray" else room
            around = tensors
            for key in path[:-1]:
                around = around.setdefault(key, {})
            around[path[-1]] = room
    for rank in dict.fromkeys((saved, min(catalogue.object_ranks))):
        for path, value in catalogue.objects(rank).values():
            if only is None or str(path[0]) in only:
                for place, renamed in under_names(catalogue.optimizers, path, value):
                    leaves.setdefault(place, renamed)
    if lacking := set(only or ()) - {str(path[0]) for path in leaves}:
        had = sorted({str(t.path[0]) for t in catalogue.logical.values()})
        raise KeysMismatchError(
            f"only= names {sorted(lacking)}, which was not saved; the saved keys are {had[:12]}",
            remedy="name top keys of the saved state",
            path=catalogue.url,
            rank=group.rank,
        )
    return _built(catalogue, leaves), tensors


def _kind(catalogue: Catalogue, path: Path) -> str | None:
    return (catalogue.containers or {}).get(path)


def _built(catalogue: Catalogue, leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The containers around the leaves, the innermost made first."""
    nodes: _Nodes = {(): {}}
    for path in leaves:
        for depth in range(len(path)):
            nodes.setdefault(path[:depth], {})[path[depth]] = None
    made = dict(leaves)
    for path in sorted(nodes, key=len, reverse=True):
        if path in leaves:  # one rank has a value where another has tensors below
            continue
        items = {key: made[at] for key in nodes[path] for at in [(*path, key)]}
        made[path] = _container(catalogue, path, items)
    state: dict[str, Any] = made[()]
    return state


def _container(catalogue: Catalogue, path: Path, items: dict[Any, Any]) -> Any:
    kind = _kind(catalogue, path)
    if kind is None and catalogue.containers is None and _looks_like_list(catalogue, path, items):
        kind = "list"
    if kind in ("list", "tuple"):
        ordered = [items[key] for key in sorted(items)]
        return ordered if kind == "list" else tuple(ordered)
    if kind == "ordered":
        return OrderedDict(items)
    if kind is not None and kind.startswith("defaultdict:"):
        return defaultdict(FACTORIES[kind.partition(":")[2]], items)
    return items


def _looks_like_list(catalogue: Catalogue, path: Path, items: Mapping[Any, Any]) -> bool:
    """For format 1.0 and 2.0, which do not record kinds: a container with the keys 0, 1, … was a
    list, unless it is the state of an optimizer, whose keys number its parameters."""
    of_optimizer = path[-1:] == ("state",) and dotted(path[:-1]) in catalogue.optimizers
    return (
        not of_optimizer
        and sorted(map(str, items)) == sorted(map(str, range(len(items))))
        and (all(type(key) is int for key in items))
    )
