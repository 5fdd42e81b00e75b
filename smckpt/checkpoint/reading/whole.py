"""The tensors of a checkpoint read whole, a box at a time, and the state as nested containers of
the kinds that it had, an optimizer's under the names of its parameters: what conversions read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smckpt.checkpoint.reading.catalogue import Catalogue, LogicalTensor
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import Planner
from smckpt.checkpoint.reading.read import execute
from smckpt.layout.containers import made
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.strided import Box

__all__ = ["WholeTensors", "are_groups", "nested", "under_names"]


class WholeTensors:
    """Reads a checkpoint as rank `rank` of the ranks that saved it would load it without a target.
    Every block is compared with its checksum."""

    def __init__(self, catalogue: Catalogue, rank: int, threads: int) -> None:
        """
        Raises:
            TopologyError: ranks saved tensors of their own, and it is not known whose is wanted.
        """
        self.me = LoadingRank.of(catalogue, rank, catalogue.object_ranks)
        self._planner = Planner(self.me)
        self._threads, self._rank = threads, rank
        self.tensors = [*self._planner.tensors()]

    def read(self, tensor: LogicalTensor, box: Box, target: memoryview) -> None:
        """Fill `target` with the elements of a box, row-major.

        Raises:
            CorruptCheckpointError: a block differs, or elements are in no file.
        """
        name = str(tensor.path[-1])
        rule = BoxGeometry(name, tensor.shape, (box,), (self._rank,))
        entry = Entry(tensor.path, tensor.dtype, rule, tensor.path[:-1], (), (self._rank,))
        execute(self._planner.copies([entry]), [target], threads=self._threads)


_Nodes = dict[Path, dict[Any, None]]  # container → its keys, in order


def nested(
    catalogue: Catalogue, leaves: Mapping[Path, Any], kinds: Mapping[Path, str] | None
) -> dict[str, Any]:
    """The containers around the leaves, the innermost made first, of these kinds."""
    nodes: _Nodes = {(): {}}
    for path in leaves:
        for depth in range(len(path)):
            nodes.setdefault(path[:depth], {})[path[depth]] = None
    found = dict(leaves)
    for path in sorted(nodes, key=len, reverse=True):
        if path in leaves:  # one rank has a value where another has tensors below
            continue
        items = {key: found[at] for key in nodes[path] for at in [(*path, key)]}
        kind = (kinds or {}).get(path)
        if kinds is None:
            kind = "list" if _looks_like_list(catalogue, path, items) else None
        found[path] = made(kind, items)
    state: dict[str, Any] = found[()]
    return state


def _looks_like_list(catalogue: Catalogue, path: Path, items: Mapping[Any, Any]) -> bool:
    """For format 1.0 and 2.0, which do not record kinds: a container with the keys 0, 1, … was a
    list, unless it is the state of an optimizer, whose keys number its parameters."""
    of_optimizer = path[-1:] == ("state",) and dotted(path[:-1]) in catalogue.optimizers
    return (
        not of_optimizer
        and sorted(map(str, items)) == sorted(map(str, range(len(items))))
        and (all(type(key) is int for key in items))
    )


def under_names(optimizers: Mapping[str, Any], path: Path, value: Any) -> list[tuple[Path, Any]]:
    """A value of an optimizer that numbers its parameters, under their names. Any other value is
    unchanged.

    Args:
        optimizers: the saved names of each optimizer's parameters (`Catalogue.optimizers`).
        value: decoded, or in its stored form; the containers of param_groups look the same in both.
    """
    for at, part in enumerate(path):
        record = optimizers.get(dotted(path[:at])) or {}
        ids = [] if record.get("form") == "fqn" else record.get("ids", [])
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
