"""Entries as rows of a table: the geometry by rule, once for all ranks that share it.

A part carries the table of one rank. A manifest carries the tables of all its parts merged: equal
rows stand once, whatever the number of ranks; meshes and flat units stand once and are referred to
by number. A row that not every rank of the group has says which ranks have it. Ranks are written as
runs [first, count, stride].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.geometry import (
    Box,
    BoxGeometry,
    FlatGeometry,
    FlatUnit,
    Geometry,
    KeptGeometry,
    MeshGeometry,
    Segment,
)
from smckpt.layout.mesh import Mesh, Placement, Shape
from smckpt.layout.remembered import remembered

__all__ = ["Row", "RowMerger", "decode_rows", "encode_rows", "merge_rows"]

_MOST_RANKS = 1 << 24  # that a table may name: a crafted one cannot fill the memory


@dataclass(frozen=True)
class Row:
    """What the ranks in `ranks` hold under one key; `geometry` is None for a kept row, whose
    `fqns` and `shape` then say it."""

    path: Path
    dtype: str
    before: Path
    after: Path
    geometry: MeshGeometry | FlatGeometry | BoxGeometry | None
    fqns: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]

    @remembered
    def key(self) -> str:
        return dotted(self.path)

    def local_shape(self, rank: int) -> Shape:
        """Of the array that rank `rank` saved."""
        return self.shape if self.geometry is None else self.geometry.local_shape(rank)

    def coordinate(self, rank: int) -> Shape:
        """Equal for two of the ranks exactly when they hold the same array."""
        return (rank,) if self.geometry is None else self.geometry.coordinate(rank)

    def entry(self, rank: int) -> Entry:
        """The entry as rank `rank` saved it."""
        geometry: Geometry = self.geometry or KeptGeometry(self.fqns, self.shape, rank)
        return Entry(
            self.path, self.dtype, geometry.local_shape(rank), geometry, self.before, self.after
        )

    def logical_path(self, fqn: str) -> Path:
        return (*self.before, fqn, *self.after)


# -- writing -----------------------------------------------------------------------------------


class _Table:
    """Distinct values in order of appearance, by their JSON."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[str, int] = {}
        self._known: dict[int, tuple[object, int]] = {}  # by identity; holds what it knows

    def add(self, value: Any) -> int:
        text = json.dumps(value)
        if text not in self._index:
            self._index[text] = len(self.values)
            self.values.append(value)
        return self._index[text]

    def number(self, of: Mesh | FlatUnit) -> int:
        """The number of a mesh or unit. Geometries share these objects: each is encoded once."""
        if id(of) not in self._known:
            number = self.add(_mesh(of) if isinstance(of, Mesh) else _unit(of))
            self._known[id(of)] = (of, number)
        return self._known[id(of)][1]


def encode_rows(entries: Iterable[Entry]) -> dict[str, Any]:
    """One rank's table: {"meshes": […], "units": […], "rows": […]}."""
    meshes, units = _Table(), _Table()
    rows = [
        {
            "path": list(entry.path),
            "dtype": entry.dtype,
            "before": list(entry.before),
            "after": list(entry.after),
            "geometry": _geometry(entry.geometry, meshes, units),
        }
        for entry in entries
    ]
    return {"meshes": meshes.values, "units": units.values, "rows": rows}


def _geometry(geometry: Geometry, meshes: _Table, units: _Table) -> dict[str, Any]:
    if isinstance(geometry, MeshGeometry):
        return {
            "mesh": meshes.number(geometry.mesh),
            "placements": [str(p) for p in geometry.placements],
            "fqn": geometry.fqn,
            "shape": list(geometry.shape),
        }
    if isinstance(geometry, FlatGeometry):
        return {
            "unit": units.number(geometry.unit),
            "mesh": meshes.number(geometry.mesh),
            "member": geometry.member,
        }
    if isinstance(geometry, BoxGeometry):
        return {
            "boxes": [[list(b.offsets), list(b.sizes)] for b in geometry.boxes],
            "holders": _runs(geometry.holders),
            "fqn": geometry.fqn,
            "shape": list(geometry.shape),
        }
    return {"kept": list(geometry.fqns), "shape": list(geometry.shape)}


def _mesh(mesh: Mesh) -> dict[str, Any]:
    return {
        "names": list(mesh.dim_names),
        "shape": list(mesh.shape),
        "ranks": _runs(mesh.ranks),
    }


def _unit(unit: FlatUnit) -> dict[str, Any]:
    return {
        "segments": [[s.fqn, list(s.shape), s.numel] for s in unit.segments],
        "shard_numel": unit.shard_numel,
    }


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """(0, 1, 2, 3, 8, 10, 12) → [[0, 4, 1], [8, 3, 2]]; order is kept."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == 1:
            runs[-1][1:] = [2, rank - runs[-1][0]]
        elif runs and rank == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1, 1])
    return runs


# -- merging -----------------------------------------------------------------------------------


class RowMerger:
    """The tables of several ranks, added one by one, as one.

    Most ranks of a mesh have the very same table. `same` lets a caller that has a table's bytes
    (or a digest of them) skip reading it again: at 16,384 ranks that is the difference between
    minutes and nothing.
    """

    def __init__(self) -> None:
        self._meshes, self._units = _Table(), _Table()
        self._rows: dict[str, tuple[dict[str, Any], list[int]]] = {}
        self._seen: dict[object, list[list[int]]] = {}  # token → the rank lists of its rows
        self._count = 0

    def same(self, rank: int, token: object) -> bool:
        """Whether a table with this token was added; if so, `rank` has it too now."""
        if token not in self._seen:
            return False
        self._count += 1
        for ranks in self._seen[token]:
            ranks.append(rank)
        return True

    def add(self, rank: int, table: Mapping[str, Any], token: object = None) -> None:
        """Add the table of `rank`."""
        at_mesh = [self._meshes.add(mesh) for mesh in table["meshes"]]
        at_unit = [self._units.add(unit) for unit in table["units"]]
        lists = []
        for row in table["rows"]:
            moved = {**row, "geometry": _moved(row["geometry"], at_mesh, at_unit)}
            lists.append(self._rows.setdefault(json.dumps(moved), (moved, []))[1])
        if token is not None:
            self._seen[token] = lists
        for ranks in lists:
            ranks.append(rank)
        self._count += 1

    def merged(self) -> dict[str, Any]:
        """The table of all; rows that some ranks lack get "ranks"."""
        rows = [
            row if len(ranks) == self._count else {**row, "ranks": _runs(sorted(ranks))}
            for row, ranks in self._rows.values()
        ]
        return {"meshes": self._meshes.values, "units": self._units.values, "rows": rows}


def merge_rows(tables: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The tables of several ranks as one; rows that some ranks lack get "ranks"."""
    merger = RowMerger()
    for rank in sorted(tables):
        token = json.dumps(tables[rank])
        if not merger.same(rank, token):
            merger.add(rank, tables[rank], token)
    return merger.merged()


def _moved(data: dict[str, Any], at_mesh: list[int], at_unit: list[int]) -> dict[str, Any]:
    out = dict(data)
    if "mesh" in out:
        out["mesh"] = at_mesh[out["mesh"]]
    if "unit" in out:
        out["unit"] = at_unit[out["unit"]]
    return out


# -- reading -----------------------------------------------------------------------------------


def decode_rows(table: Mapping[str, Any], ranks: Sequence[int], path: str = "") -> list[Row]:
    """The rows of a table that belongs to `ranks`. Rows of the same ranks share one tuple.

    Raises:
        CorruptCheckpointError: the table does not make sense.
    """
    try:
        return _Decoder(table, tuple(ranks)).rows()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"the table of tensors does not make sense: {type(error).__name__} {error}",
            remedy="use an older checkpoint",
            path=path,
        ) from error


class _Decoder:
    def __init__(self, table: Mapping[str, Any], ranks: tuple[int, ...]) -> None:
        self._table = table
        self._ranks = ranks
        self._members = frozenset(ranks)
        self._subsets: dict[str, tuple[int, ...]] = {}
        self._rules: dict[Any, MeshGeometry] = {}  # a parameter's state has the parameter's
        self._meshes = [
            Mesh(_texts(m["names"]), _sizes(m["shape"]), _expanded(m["ranks"]))
            for m in table["meshes"]
        ]
        self._units = [
            FlatUnit(tuple(Segment(f, _sizes(s), n) for f, s, n in u["segments"]), u["shard_numel"])
            for u in table["units"]
        ]

    def rows(self) -> list[Row]:
        return [self._row(row) for row in self._table["rows"]]

    def _row(self, row: Mapping[str, Any]) -> Row:
        data = row["geometry"]
        if "kept" in data:
            geometry, fqns, shape = None, _texts(data["kept"]), _sizes(data["shape"])
        else:
            geometry = self._rule(data)
            fqns = geometry.fqns
            shape = () if isinstance(geometry, FlatGeometry) else geometry.shape
        return Row(
            tuple(row["path"]),
            _text(row["dtype"]),
            tuple(row["before"]),
            tuple(row["after"]),
            geometry,
            fqns,
            shape,
            self._subset(row["ranks"]) if "ranks" in row else self._ranks,
        )

    def _rule(self, data: Mapping[str, Any]) -> MeshGeometry | FlatGeometry | BoxGeometry:
        if "placements" in data:
            key = data["fqn"], data["mesh"], *data["shape"], *data["placements"]
            if key not in self._rules:
                placements = tuple(map(Placement.parse, data["placements"]))
                mesh = self._meshes[data["mesh"]]
                rule = MeshGeometry(data["fqn"], _sizes(data["shape"]), mesh, placements)
                self._rules[key] = rule
            return self._rules[key]
        if "unit" in data:
            return FlatGeometry(
                self._units[data["unit"]], self._meshes[data["mesh"]], data["member"]
            )
        boxes = tuple(Box(_sizes(o), _sizes(s)) for o, s in data["boxes"])
        return BoxGeometry(data["fqn"], _sizes(data["shape"]), boxes, _expanded(data["holders"]))

    def _subset(self, runs: list[list[int]]) -> tuple[int, ...]:
        key = json.dumps(runs)
        if key not in self._subsets:
            ranks = _expanded(runs)
            if not self._members.issuperset(ranks):
                raise ValueError(f"a row of ranks {runs} in a group without them")
            self._subsets[key] = ranks
        return self._subsets[key]


def _expanded(runs: list[list[int]]) -> tuple[int, ...]:
    if sum(_sizes(map(itemgetter(1), runs))) > _MOST_RANKS:
        raise ValueError(f"more than {_MOST_RANKS} ranks")
    return tuple(first + i * stride for first, count, stride in runs for i in range(count))


def _sizes(values: Iterable[Any]) -> Shape:
    """As whole numbers from 0: what a crafted table has instead would be met far from here."""
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{list(sizes)} for sizes")
    return sizes


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(_text, values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} for a name")
    return value
