"""The values of an optimizer that numbers its parameters, under the parameters' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smckpt.layout.entries import Path, dotted

__all__ = ["are_groups", "under_names"]


def under_names(optimizers: Mapping[str, Any], path: Path, value: Any) -> list[tuple[Path, Any]]:
    """A value of an optimizer that numbers its parameters, under their names. Any other value is
    unchanged.

    Args:
        optimizers: the saved names of each optimizer's parameters (`Catalogue.optimizers`).
        value: decoded, or in its stored form; the containers of param_groups look the same in both.
    """
    for at, part in enumerate(path):
        ids = (optimizers.get(dotted(path[:at])) or {}).get("ids", [])
        if not any(names != [str(index)] for index, names in enumerate(ids)):
            continue
        if part == "state" and len(path) > at + 1 and isinstance(owner := path[at + 1], int):
            names = ids[owner] if 0 <= owner < len(ids) else [owner]
            return [((*path[: at + 1], name, *path[at + 2 :]), value) for name in names]
        if part == "param_groups" and path[-1] == "params" and len(path) == at + 3:
            return [(path, _members(value, ids) if isinstance(value, list) else value)]
        if part == "param_groups" and len(path) == at + 1 and are_groups(value):
            return [(path, [{**g, "params": _members(g["params"], ids)} for g in value])]
    return [(path, value)]


def are_groups(value: Any) -> bool:
    """Whether these are param_groups; they may be in a container of somebody's own."""
    return isinstance(value, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in value
    )


def _members(params: Sequence[Any], ids: Sequence[Sequence[str]]) -> list[Any]:
    known = range(len(ids))
    return [n for p in params for n in (ids[p] if isinstance(p, int) and p in known else (p,))]
