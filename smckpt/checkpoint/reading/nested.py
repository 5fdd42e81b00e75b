"""A saved state as nested containers of the kinds that it had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.layout.containers import made
from smckpt.layout.entries import Path, dotted

__all__ = ["kind_of", "nested"]

_Nodes = dict[Path, dict[Any, None]]  # container → its keys, in order


def kind_of(catalogue: Catalogue, path: Path) -> str | None:
    """The recorded kind of a container; None for a dict."""
    return (catalogue.containers or {}).get(path)


def nested(catalogue: Catalogue, leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The containers around the leaves, the innermost made first."""
    nodes: _Nodes = {(): {}}
    for path in leaves:
        for depth in range(len(path)):
            nodes.setdefault(path[:depth], {})[path[depth]] = None
    found = dict(leaves)
    for path in sorted(nodes, key=len, reverse=True):
        if path in leaves:  # one rank has a value where another has tensors below
            continue
        items = {key: found[at] for key in nodes[path] for at in [(*path, key)]}
        found[path] = _container(catalogue, path, items)
    state: dict[str, Any] = found[()]
    return state


def _container(catalogue: Catalogue, path: Path, items: dict[Any, Any]) -> Any:
    kind = kind_of(catalogue, path)
    if kind is None and catalogue.containers is None and _looks_like_list(catalogue, path, items):
        kind = "list"
    return made(kind, items)


def _looks_like_list(catalogue: Catalogue, path: Path, items: Mapping[Any, Any]) -> bool:
    """For format 1.0 and 2.0, which do not record kinds: a container with the keys 0, 1, … was a
    list, unless it is the state of an optimizer, whose keys number its parameters."""
    of_optimizer = path[-1:] == ("state",) and dotted(path[:-1]) in catalogue.optimizers
    return (
        not of_optimizer
        and sorted(map(str, items)) == sorted(map(str, range(len(items))))
        and (all(type(key) is int for key in items))
    )
