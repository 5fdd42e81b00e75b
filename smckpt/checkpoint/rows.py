"""Entries as rows of a table: the geometry by rule, once for all ranks that share it.

A part carries the table of one rank. A manifest carries the tables of all its parts merged: equal
rows stand once, whatever the number of ranks; meshes and flat units stand once and are referred to
by number. A row that not every rank of the group has says which ranks have it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    Mesh,
    MeshGeometry,
    Placement,
    Segment,
    Shape,
)

__all__ = ["Row", "decode_rows", "encode_rows", "merge_rows"]


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

    @cached_property
    def key(self) -> str:
        return dotted(self.path)

    def entry(self, rank: int) -> Entry:
        """The entry as rank `rank` saved it."""
        geometry: Geometry = self.geometry or KeptGeometry(self.fqns, self.shape, rank)
        return Entry(
            self.path, self.dtype, geometry.local_shape(rank), geometry, self.before, self.after
        )

    def logical_path(self, fqn: str) -> Path:
        return (*self.before, fqn, *self.after)


class _Table:
    """Distinct values in order of appearance, by their JSON."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[str, int] = {}

    def add(self, value: Any) -> int:
        text = json.dumps(value)
        if text not in self._index:
            self._index[text] = len(self.values)
            self.values.append(value)
        return self._index[text]


def encode_rows(entries: Iterable[Entry]) -> dict[str, Any]:
    """One rank's table: {"meshes": […], "units": […], "rows": […]}."""
    meshes, units = _Table(), _Table()
    known: dict[int, int] = {}  # by identity: geometries share their mesh and unit objects
    keep: list[object] = []

    def number(table: _Table, value: Mesh | FlatUnit) -> int:
        if id(value) not in known:
            keep.append(value)
            known[id(value)] = table.add(_mesh(value) if isinstance(value, Mesh) else _unit(value))
        return known[id(value)]

    rows = []
    for entry in entries:
        geometry = entry.geometry
        if isinstance(geometry, MeshGeometry):
            data: dict[str, Any] = {
                "mesh": number(meshes, geometry.mesh),
                "placements": [str(p) for p in geometry.placements],
                "fqn": geometry.fqn,
                "shape": list(geometry.shape),
            }
        elif isinstance(geometry, FlatGeometry):
            data = {
                "unit": number(units, geometry.unit),
                "mesh": number(meshes, geometry.mesh),
                "member": geometry.member,
            }
        elif isinstance(geometry, BoxGeometry):
            data = {
                "boxes": [[list(b.offsets), list(b.sizes)] for b in geometry.boxes],
                "holders": list(geometry.holders),
                "fqn": geometry.fqn,
                "shape": list(geometry.shape),
            }
        else:
            data = {"kept": list(geometry.fqns), "shape": list(geometry.shape)}
        rows.append(
            {
                "path": list(entry.path),
                "dtype": entry.dtype,
                "before": list(entry.before),
                "after": list(entry.after),
                "geometry": data,
            }
        )
    return {"meshes": meshes.values, "units": units.values, "rows": rows}


def merge_rows(tables: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The tables of several ranks as one; rows that some ranks lack get a "ranks" list."""
    meshes, units = _Table(), _Table()
    merged: dict[str, tuple[dict[str, Any], list[int]]] = {}
    seen: dict[str, list[str]] = {}  # most ranks have the very same table: translate it once
    for rank in sorted(tables):
        table = tables[rank]
        text = json.dumps(table)
        if text not in seen:
            at_mesh = [meshes.add(m) for m in table["meshes"]]
            at_unit = [units.add(u) for u in table["units"]]
            seen[text] = []
            for row in table["rows"]:
                moved = {**row, "geometry": _moved(row["geometry"], at_mesh, at_unit)}
                key = json.dumps(moved)
                merged.setdefault(key, (moved, []))
                seen[text].append(key)
        for key in seen[text]:
            merged[key][1].append(rank)
    rows = [
        row if len(ranks) == len(tables) else {**row, "ranks": ranks}
        for row, ranks in merged.values()
    ]
    return {"meshes": meshes.values, "units": units.values, "rows": rows}


def decode_rows(table: dict[str, Any], ranks: Sequence[int], path: str = "") -> list[Row]:
    """The rows of a table that belongs to `ranks`.

    Raises:
        CorruptCheckpointError: the table does not make sense.
    """
    try:
        meshes = [
            Mesh(tuple(m["names"]), tuple(m["shape"]), tuple(_expanded(m["ranks"])))
            for m in table["meshes"]
        ]
        units = [
            FlatUnit(tuple(Segment(f, tuple(s), n) for f, s, n in u["segments"]), u["shard_numel"])
            for u in table["units"]
        ]
        return [_row(row, meshes, units, tuple(ranks)) for row in table["rows"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptCheckpointError(
            f"the table of tensors does not make sense: {error}",
            remedy="use an older checkpoint",
            path=path,
        ) from error


def _row(
    row: dict[str, Any], meshes: list[Mesh], units: list[FlatUnit], ranks: tuple[int, ...]
) -> Row:
    data = row["geometry"]
    geometry: MeshGeometry | FlatGeometry | BoxGeometry | None
    if "placements" in data:
        geometry = MeshGeometry(
            data["fqn"],
            tuple(data["shape"]),
            meshes[data["mesh"]],
            tuple(map(Placement.parse, data["placements"])),
        )
        fqns, shape = geometry.fqns, geometry.shape
    elif "unit" in data:
        geometry = FlatGeometry(units[data["unit"]], meshes[data["mesh"]], data["member"])
        fqns, shape = geometry.fqns, ()
    elif "boxes" in data:
        boxes = tuple(Box(tuple(o), tuple(s)) for o, s in data["boxes"])
        geometry = BoxGeometry(data["fqn"], tuple(data["shape"]), boxes, tuple(data["holders"]))
        fqns, shape = geometry.fqns, geometry.shape
    else:
        geometry, fqns, shape = None, tuple(data["kept"]), tuple(data["shape"])
    return Row(
        tuple(row["path"]),
        row["dtype"],
        tuple(row["before"]),
        tuple(row["after"]),
        geometry,
        fqns,
        shape,
        tuple(row.get("ranks", ranks)),
    )


def _moved(data: dict[str, Any], at_mesh: list[int], at_unit: list[int]) -> dict[str, Any]:
    out = dict(data)
    if "mesh" in out:
        out["mesh"] = at_mesh[out["mesh"]]
    if "unit" in out:
        out["unit"] = at_unit[out["unit"]]
    return out


def _mesh(mesh: Mesh) -> dict[str, Any]:
    return {
        "names": list(mesh.dim_names),
        "shape": list(mesh.shape),
        "ranks": _compressed(mesh.ranks),
    }


def _unit(unit: FlatUnit) -> dict[str, Any]:
    return {
        "segments": [[s.fqn, list(s.shape), s.numel] for s in unit.segments],
        "shard_numel": unit.shard_numel,
    }


def _compressed(ranks: Sequence[int]) -> Any:
    """{"first", "count", "stride"} when evenly spaced, as nearly every mesh is; else the list."""
    if len(ranks) > 2:
        stride = ranks[1] - ranks[0]
        if all(b - a == stride for a, b in itertools.pairwise(ranks)):
            return {"first": ranks[0], "count": len(ranks), "stride": stride}
    return list(ranks)


def _expanded(data: Any) -> Sequence[int]:
    if isinstance(data, dict):
        first, stride = data["first"], data["stride"]
        return [first + i * stride for i in range(data["count"])]
    return list(data)
