"""The values of an optimizer that numbers its parameters, under the parameters' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smckpt.layout.entries import Path, dotted

__all__ = ["under_names"]


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
            names = ids[owner] if owner < len(ids) else [owner]
            return [((*path[: at + 1], name, *path[at + 2 :]), value) for name in names]
        if part == "param_groups" and path[-1] == "params" and len(path) == at + 3:
            return [(path, _members(value, ids))]
        if part == "param_groups" and len(path) == at + 1:
            return [(path, [{**g, "params": _members(g["params"], ids)} for g in value])]
    return [(path, value)]


def _members(params: Sequence[Any], ids: Sequence[Sequence[str]]) -> list[Any]:
    return [
        name for p in params for name in (ids[p] if isinstance(p, int) and p < len(ids) else (p,))
    ]
