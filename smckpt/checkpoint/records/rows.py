"""Entries as rows of a table. A geometry is written as a rule, once for all ranks that share it.

A part has the table of one rank. A manifest has the merged tables of all its parts: equal rows are
written once, for any number of ranks; meshes and flat units are written once and referred to by
number. A row that only some ranks of the group have lists those ranks. Ranks are written as runs
[first, count, stride].
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from smckpt.decoding import SENSELESS
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.containers import FACTORIES
from smckpt.layout.entries import DTYPES, Entry, Path, dotted
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import BoxGeometry, Geometry, MeshGeometry, PerRankGeometry
from smckpt.layout.mesh import MOST_DIMS, Mesh, Placement, Shape, runs_of
from smckpt.layout.strided import Box

# These limits keep a forged table of a kilobyte from filling the memory or keeping a reader busy
# for minutes.
_MOST_RANKS = 1 << 20  # in all runs of meshes, holders and rows together
_MOST_REPLICAS = 64  # plus this many for each row
_MOST_CHUNKS = 1 << 12  # per rank, into which placements may cut one tensor
_ALL_CHUNKS = 1 << 18  # and all tensors together,
_CHUNKS = 256  # plus this many for each row


# -- writing -----------------------------------------------------------------------------------


class _Table:
    """Distinct values in order of appearance, compared by their JSON."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[str, int] = {}
        self._known: dict[int, tuple[object, int]] = {}  # by id(); it keeps the objects alive

    def add(self, value: Any) -> int:
        text = json.dumps(value)
        if text not in self._index:
            self._index[text] = len(self.values)
            self.values.append(value)
        return self._index[text]

    def number(self, of: Mesh | FlatUnit) -> int:
        """The number of a mesh or unit. Geometries share these objects, so each is encoded once."""
        if id(of) not in self._known:
            if isinstance(of, Mesh):
                ranks, names = runs_of(of.ranks), list(of.dim_names)
                body = {"names": names, "shape": list(of.shape), "ranks": ranks}
            else:
                segments = [[s.fqn, list(s.shape), s.numel] for s in of.segments]
                body = {"segments": segments, "shard_numel": of.shard_numel}
            self._known[id(of)] = (of, self.add(body))
        return self._known[id(of)][1]


def encode_rows(
    entries: Iterable[Entry], containers: Mapping[Path, str] | None = None
) -> dict[str, Any]:
    """One rank's table: {"meshes": […], "units": […], "rows": […], "containers": […]}.

    Args:
        containers: path of a container above tensors → its kind, if it is not a dict; None if kinds
            are not known.
    """
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
    table = {"meshes": meshes.values, "units": units.values, "rows": rows}
    if containers is None:
        return table
    return {**table, "containers": [[list(path), kind] for path, kind in containers.items()]}


def _geometry(geometry: Geometry, meshes: _Table, units: _Table) -> dict[str, Any]:
    record = geometry.record()
    for key, table in (("mesh", meshes), ("unit", units)):
        if key in record:
            record[key] = table.number(record[key])
    if "holders" in record:
        record["holders"] = runs_of(record["holders"])
    return record


# -- merging -----------------------------------------------------------------------------------


class RowMerger:
    """Merges the tables of several ranks, which are added one by one.

    Most ranks of a mesh have identical tables. A caller that has a table's bytes (or their digest)
    asks `same` and need not parse the table again. At 16,384 ranks that saves minutes.
    """

    def __init__(self) -> None:
        self._meshes, self._units = _Table(), _Table()
        # each with the ranks of every table that has it: equal tables have one list of ranks
        self._rows: dict[str, tuple[dict[str, Any], list[list[int]]]] = {}
        self._containers: dict[str, tuple[Any, list[list[int]]]] | None = None
        self._seen: dict[object, list[int]] = {}  # token → the ranks of its table
        self._count = 0

    def same(self, rank: int, token: object) -> bool:
        """Whether a table with this token was added; if so, `rank` has it too now."""
        if token not in self._seen:
            return False
        self._count += 1
        self._seen[token].append(rank)
        return True

    def add(self, rank: int, table: Mapping[str, Any], token: object = None) -> None:
        """Add the table of `rank`."""
        at_mesh = [self._meshes.add(mesh) for mesh in table["meshes"]]
        at_unit = [self._units.add(unit) for unit in table["units"]]
        of_table = [rank]
        for row in table["rows"]:
            rule = dict(row["geometry"])
            for key, numbers in (("mesh", at_mesh), ("unit", at_unit)):
                if key in rule:
                    rule[key] = numbers[rule[key]]
            moved = {**row, "geometry": rule}
            self._rows.setdefault(json.dumps(moved), (moved, []))[1].append(of_table)
        if "containers" in table:
            self._containers = {} if self._containers is None else self._containers
            for one in table["containers"]:
                self._containers.setdefault(json.dumps(one), (one, []))[1].append(of_table)
        if token is not None:
            self._seen[token] = of_table
        self._count += 1

    def merged(self) -> dict[str, Any]:
        """The merged table. Rows that some ranks lack get "ranks"; such containers get theirs in
        "container_ranks", by their numbers, since older readers know pairs alone."""
        rows = [
            {**row, "ranks": ranks} if (ranks := self._some(lists)) else row
            for row, lists in self._rows.values()
        ]
        out = {"meshes": self._meshes.values, "units": self._units.values, "rows": rows}
        if self._containers is None:
            return out
        containers = [one for one, _ in self._containers.values()]
        some = [
            [number, ranks]
            for number, (_, lists) in enumerate(self._containers.values())
            if (ranks := self._some(lists))
        ]
        out |= {"containers": containers}
        return {**out, "container_ranks": some} if some else out

    def _some(self, lists: Sequence[list[int]]) -> list[Any]:
        """The ranks of these tables; [] if they are all that were added."""
        if sum(map(len, lists)) == self._count:
            return []
        return runs_of(sorted(itertools.chain(*lists)))


# -- reading -----------------------------------------------------------------------------------


def decode_rows(table: Mapping[str, Any], ranks: Sequence[int], path: str = "") -> list[Entry]:
    """The rows of a table that belongs to `ranks`. Rows of the same ranks share one tuple.

    Raises:
        CorruptCheckpointError: the table is malformed.
    """
    try:
        return _Decoder(table, tuple(ranks), path).rows()
    except SENSELESS as error:
        raise CorruptCheckpointError(
            f"the table of tensors cannot be decoded: {type(error).__name__} {error}",
            remedy="use an older checkpoint",
            path=path,
        ) from error


def rows_of_groups(
    tables: Iterable[tuple[Mapping[str, Any], Sequence[int], str]],
) -> Iterator[Entry]:
    """The rows of the groups of a step, as `decode_rows` gives them of each table. Groups that hold
    other shards of the same tensors, such as those of LOCAL state, have equal tables, which are
    decoded once.

    Args:
        tables: each group's table, ranks, and path.
    """
    known: list[tuple[list[Any], list[Entry]]] = []
    for table, ranks, path in tables:
        parts = [table.get(key) for key in ("meshes", "units", "rows")]
        rows = next((found for one, found in known if one == parts), None)
        if rows is None or not _inside(rows, ranks):
            rows = decode_rows(table, ranks, path)
            if not any("ranks" in row for row in table["rows"]):  # those list ranks of this group
                known.append((parts, rows))
        else:
            here = tuple(ranks)
            rows = [_of_ranks(row, here) for row in rows]
        yield from rows


def _inside(rows: Sequence[Entry], ranks: Sequence[int]) -> bool:
    """Whether the rules of these rows are of these ranks too."""
    rules = {
        id(row.geometry.ranks): row.geometry.ranks for row in rows if not row.geometry.per_rank
    }
    return all(set(each).issuperset(ranks) for each in rules.values())


def _of_ranks(row: Entry, ranks: tuple[int, ...]) -> Entry:
    rule = row.geometry
    if isinstance(rule, PerRankGeometry):
        rule = PerRankGeometry(rule.fqns, rule.shape, ranks)
    return Entry(row.path, row.dtype, rule, row.before, row.after, ranks)


def decode_containers(
    table: Mapping[str, Any], ranks: Sequence[int], path: str = ""
) -> list[tuple[Path, str, frozenset[int]]] | None:
    """The path and the kind of each container that is not a dict, with the ranks that have it;
    None if an older writer recorded no kinds.

    Raises:
        CorruptCheckpointError: the table is malformed.
    """
    if "containers" not in table:
        return None
    try:
        pairs = [(_path(where), _kind(kind)) for where, kind in table["containers"]]
        here, some = frozenset(ranks), dict[int, frozenset[int]]()
        if table.get("container_ranks"):
            decoder = _Decoder(table, tuple(ranks), path)
            sets: dict[str, frozenset[int]] = {}  # containers share them
            for number, runs in table["container_ranks"]:
                one = decoder.subset(runs)
                some[number] = sets.setdefault(json.dumps(runs), frozenset(one))
        return [(*pair, some.get(number, here)) for number, pair in enumerate(pairs)]
    except SENSELESS as error:
        raise CorruptCheckpointError(
            f"the kinds of containers cannot be decoded: {type(error).__name__} {error}",
            remedy="use an older checkpoint",
            path=path,
        ) from error


def _kind(value: Any) -> str:
    """The kind of a container. One that is not known here is read as a dict."""
    kind, _, what = _text(value).removeprefix("keys:").partition(":")
    if kind == "object":
        _kind(what.partition("/")[2])
    if kind == "sequence":
        keys, end = json.JSONDecoder().raw_decode(what)
        _path(keys)
        _kind(what[end:])
    if kind == "defaultdict" and what not in FACTORIES:
        raise ValueError(f"a defaultdict of {what!r}")
    if kind == "deque" and what and not what.isdecimal():
        raise ValueError(f"a deque of {what!r}")
    return str(value)


def _path(keys: Iterable[Any]) -> Path:
    path = tuple(keys) if isinstance(keys, (list, tuple)) else (None,)
    if not all(type(key) in (str, int) for key in path):
        raise ValueError(f"{path} is not a path of names and numbers")
    return path


class _Decoder:
    def __init__(self, table: Mapping[str, Any], ranks: tuple[int, ...], path: str) -> None:
        self._path = path
        self._table = table
        self._ranks = ranks
        self._members = frozenset(ranks)
        self._subsets: dict[str, tuple[int, ...]] = {}
        self._rules: dict[Any, MeshGeometry] = {}  # optimizer state shares its parameter's
        self._inside: set[tuple[int, int]] = set()
        self._left = _MOST_RANKS + _MOST_REPLICAS * len(table["rows"])
        self._chunks = _ALL_CHUNKS + _CHUNKS * len(table["rows"])
        self._meshes = [
            Mesh(_texts(m["names"]), _shape(m["shape"]), self._expanded(m["ranks"]))
            for m in table["meshes"]
        ]
        self._units = [
            FlatUnit(
                tuple(
                    Segment(None if fqn is None else _text(fqn), _shape(shape), *_sizes([numel]))
                    for fqn, shape, numel in u["segments"]
                ),
                *_sizes([u["shard_numel"]]),
            )
            for u in table["units"]
        ]

    def rows(self) -> list[Entry]:
        rows = [self._row(row) for row in self._table["rows"]]
        for logical in (False, True):
            first: dict[Path, Entry] = {}
            holders: dict[Path, set[int]] = {}  # of a name that several rows have
            for row in rows:
                if logical and (row.geometry.per_rank or len(row.fqns) != 1):
                    continue
                name = row.logical_path(row.fqns[0]) if logical else row.path
                other = first.setdefault(name, row)
                if other is row:
                    continue
                held = holders.setdefault(name, set(other.ranks))
                if not held.isdisjoint(row.ranks):
                    raise ValueError(f"{row.key!r} and {other.key!r} of one rank have one name")
                held.update(row.ranks)
            for name, row in first.items():
                for length in range(1, len(name)):
                    above = first.get(name[:length])
                    if above is None:
                        continue
                    held = holders.get(name[:length]) or set(above.ranks)
                    if not held.isdisjoint(holders.get(name) or row.ranks):
                        raise ValueError(f"{row.key!r} is inside {above.key!r}, a tensor")
        return rows

    def _row(self, row: Mapping[str, Any]) -> Entry:
        ranks = self.subset(row["ranks"]) if "ranks" in row else self._ranks
        rule = self._rule(row["geometry"], ranks)
        known = id(rule.ranks), id(ranks)  # rows share both objects, and keep them alive
        if known not in self._inside and not rule.per_rank:
            if not set(rule.ranks).issuperset(ranks):
                raise ValueError(f"{rule.fqns[:1]} is held by ranks outside its mesh")
            self._inside.add(known)
        if (dtype := _text(row["dtype"])) not in DTYPES:
            raise CorruptCheckpointError(
                f"{dotted(row['path'])!r} has the dtype {dtype!r}, which this smckpt does not know",
                remedy="install a newer smckpt, or use another checkpoint",
                path=self._path,
            )
        return Entry(
            _path(row["path"]),
            dtype,
            rule,
            _path(row["before"]),
            _path(row["after"]),
            ranks,
        )

    def _rule(self, data: Mapping[str, Any], ranks: tuple[int, ...]) -> Geometry:
        if "kept" in data:
            return PerRankGeometry(_texts(data["kept"]), _shape(data["shape"]), ranks)
        if "placements" in data:
            key = data["fqn"], data["mesh"], *data["shape"], *data["placements"]
            if key not in self._rules:
                placements = tuple(map(Placement.parse, data["placements"]))
                chunks = math.prod(p.split for p in placements)
                self._chunks -= chunks
                if chunks > _MOST_CHUNKS or self._chunks < 0:
                    raise ValueError(f"placements {data['placements']} cut into too many chunks")
                mesh = self._meshes[data["mesh"]]
                rule = MeshGeometry(data["fqn"], _shape(data["shape"]), mesh, placements)
                self._rules[key] = rule
            return self._rules[key]
        if "unit" in data:
            unit, member = self._units[data["unit"]], data["member"]
            if member is not None and _sizes([member])[0] >= len(unit.segments):
                raise ValueError(f"member {member} of {len(unit.segments)} segments")
            return FlatGeometry(unit, self._meshes[data["mesh"]], member)
        shape = _shape(data["shape"])
        boxes = tuple(Box(_shape(o), _shape(s)) for o, s in data["boxes"])
        for box in boxes:
            ends = zip(shape, box.offsets, box.sizes, strict=True)
            if box.numel and any(at + size > most for most, at, size in ends):
                raise ValueError(f"{box} is not in a tensor of shape {list(shape)}")
        return BoxGeometry(_text(data["fqn"]), shape, boxes, self._expanded(data["holders"]))

    def _expanded(self, runs: list[list[int]]) -> tuple[int, ...]:
        self._left -= sum(_sizes(map(itemgetter(1), runs)))
        if self._left < 0:
            raise ValueError(f"runs stand for more than {_MOST_RANKS} ranks")
        return tuple(first + i * stride for first, count, stride in runs for i in range(count))

    def subset(self, runs: list[list[int]]) -> tuple[int, ...]:
        key = json.dumps(runs)
        if key not in self._subsets:
            ranks = self._expanded(runs)
            if not self._members.issuperset(ranks):
                raise ValueError(f"the ranks {runs} are not in the group")
            self._subsets[key] = ranks
        return self._subsets[key]


def _shape(values: Sequence[Any]) -> Shape:
    if len(values) > MOST_DIMS:
        raise ValueError(f"{len(values)} dimensions")
    return _sizes(values)


def _sizes(values: Iterable[Any]) -> Shape:
    """Check that the sizes are whole numbers from 0. Other values of a forged table would fail far
    from here."""
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"the sizes are {list(sizes)}")
    return sizes


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(_text, values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name is {value!r}, not text")
    return value
