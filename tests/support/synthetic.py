"""Checkpoints of any mesh, made in one process: whole arrays and rules in, files out.

`Rule` says how one tensor is held; `state` cuts the whole arrays accordingly for a rank. Laid out,
written and published by the functions that a rank and its coordinator run. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smckpt.checkpoint.commits.commit import publish_record, take_lease
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import ReadPlan, plan_local, plan_logical
from smckpt.checkpoint.reading.plan_local import refuse_names
from smckpt.checkpoint.reading.read import execute
from smckpt.checkpoint.records.format import GroupManifest, record_name
from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import BoxGeometry, Geometry, MeshGeometry, PerRankGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.layout.strided import Box
from smckpt.storage import Access
from tests.support.saves import Group, State

Arrays = Mapping[str, "np.ndarray[Any, Any]"]  # whole tensors by fqn, of bytes: (*shape, itemsize)


@dataclass(frozen=True)
class Rule:
    """One entry, for every rank: its key, and the geometry that a rank has (None: not held)."""

    key: str
    dtype: str
    geometry: Callable[[int], Geometry | None]

    def entry(self, rank: int) -> Entry | None:
        geometry = self.geometry(rank)
        if geometry is None:
            return None
        path = ("model", self.key)
        return Entry(path, self.dtype, geometry, ("model",), (), (rank,))


def whole(shapes: Mapping[str, Sequence[int]], dtype: str = "float32", seed: int = 0) -> Arrays:
    """Random bytes for each fqn."""
    rng = np.random.default_rng(seed)
    size = DTYPES[dtype].itemsize
    return {
        fqn: rng.integers(0, 256, (*shape, size), dtype=np.uint8) for fqn, shape in shapes.items()
    }


def cut(entry: Entry, rank: int, arrays: Arrays, padding: int = 0xEE) -> bytearray:
    """The local array of an entry, as bytes."""
    local = np.full((entry.numel, entry.itemsize), padding, np.uint8)
    for piece in entry.geometry.pieces(rank):
        local[_places(piece.start, piece.strides, piece.box.sizes)] = arrays[piece.name][
            tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True))
        ].reshape(-1, entry.itemsize)
    return bytearray(local.tobytes())


def _places(start: int, strides: Sequence[int], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    at = np.full(tuple(sizes), start, np.int64)
    for dim, (stride, size) in enumerate(zip(strides, sizes, strict=True)):
        at += (np.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(len(sizes))])
    return at.reshape(-1)


def entries_of(rules: Iterable[Rule], rank: int) -> list[Entry]:
    return [entry for rule in rules if (entry := rule.entry(rank)) is not None]


def state(
    rules: Sequence[Rule], arrays: Arrays, kept: Callable[[int, str], bytes] | None = None
) -> State:
    """What `saves.Group` writes. `kept` gives the bytes of kept entries, by rank and key."""

    def of(rank: int) -> tuple[list[Entry], dict[str, bytes]]:
        entries = entries_of(rules, rank)
        data = {}
        for entry in entries:
            if entry.geometry.per_rank and kept is not None:
                data[entry.key] = kept(rank, entry.key)
            else:
                data[entry.key] = bytes(cut(entry, rank, arrays))
        return entries, data

    return of


# -- rules -----------------------------------------------------------------------------------------


def on_mesh(
    fqn: str, shape: Sequence[int], mesh: Mesh, places: str, dtype: str = "float32"
) -> Rule:
    """`places`: "R S0 SS1/2", one for each mesh dimension."""
    placements = tuple(Placement.parse(place) for place in places.split())
    geometry = MeshGeometry(fqn, tuple(shape), mesh, placements)
    return Rule(fqn, dtype, lambda rank: geometry if rank in mesh else None)


def flat(
    shapes: Mapping[str, Sequence[int]],
    mesh: Mesh,
    dtype: str = "float32",
    key: str = "_flat_param",
    gap: int = 0,
) -> Rule:
    """One flat parameter of all `shapes`, `gap` elements of padding between them."""
    unit = _unit(shapes, mesh, gap)
    geometry = FlatGeometry(unit, mesh)
    return Rule(key, dtype, lambda rank: geometry if rank in mesh else None)


def members(
    shapes: Mapping[str, Sequence[int]], mesh: Mesh, dtype: str = "float32", gap: int = 0
) -> list[Rule]:
    """The same as the original parameters (`use_orig_params=True`); empty ones are not held."""
    unit = _unit(shapes, mesh, gap)

    def rule(number: int, fqn: str) -> Rule:
        geometry = FlatGeometry(unit, mesh, number)

        def held(rank: int) -> Geometry | None:
            return geometry if rank in mesh and geometry.local_shape(rank) != (0,) else None

        return Rule(fqn, dtype, held)

    return [rule(n, s.fqn) for n, s in enumerate(unit.segments) if s.fqn is not None]


def _unit(shapes: Mapping[str, Sequence[int]], mesh: Mesh, gap: int) -> FlatUnit:
    segments: list[Segment] = []
    for fqn, shape in shapes.items():
        if gap and segments:
            segments.append(Segment(None, (), gap))
        segments.append(Segment(fqn, tuple(shape), int(np.prod(shape, dtype=int))))
    total = sum(segment.numel for segment in segments)
    return FlatUnit(tuple(segments), max(1, -(-total // mesh.shape[1])))


def kept(
    fqns: str | Sequence[str], shape: Sequence[int] = (), dtype: str = "float32", key: str = ""
) -> Rule:
    names = (fqns,) if isinstance(fqns, str) else tuple(fqns)
    return Rule(key or names[0], dtype, lambda rank: PerRankGeometry(names, tuple(shape), (rank,)))


def boxes(
    fqn: str, shape: Sequence[int], held: Mapping[int, Sequence[Box]], dtype: str = "float32"
) -> Rule:
    """Explicit boxes by rank; ranks with equal boxes are each other's replicas."""

    def geometry(rank: int) -> Geometry | None:
        if rank not in held:
            return None
        own = tuple(held[rank])
        holders = tuple(sorted(r for r, b in held.items() if tuple(b) == own))
        return BoxGeometry(fqn, tuple(shape), own, holders)

    return Rule(fqn, dtype, geometry)


# -- saving and loading ----------------------------------------------------------------------------


def save(
    directory: Path, ranks: Sequence[int], made: State, *, session: str = "a" * 12, **part: Any
) -> Group:
    """One save of one group, committed by its manifest; the group saves again with `save()`."""
    group = Group(directory, ranks, session=session, state=made)
    group.save(**part)
    return group


@dataclass
class Step:
    """Groups that save under one record in `root`."""

    root: Path
    groups: Mapping[str, Sequence[int]]  # directory, relative → ranks
    made: State
    session: str = "f" * 12
    numbers: Any = field(default_factory=itertools.count)

    def save(self, commit: bool = True, **part: Any) -> str:
        """The next step; the name of its record, which exists only if `commit`."""
        number = next(self.numbers)
        urls = [str(self.root / name) for name in self.groups]
        fencing_token = take_lease(Access(), str(self.root), self.session, "host", urls)[
            "fencing_token"
        ]
        record = record_name(fencing_token, number, self.session)
        published = []
        for index, (name, ranks) in enumerate(self.groups.items()):
            way = "../" * (name.count("/") + 1) + record
            group = Group(
                self.root / name,
                ranks,
                session=f"{index:012x}",
                state=self.made,
                fencing_token=fencing_token,
                numbers=itertools.count(number),
            )
            done = group.save(record=way, **{"step": 10 * number, **part})
            published.append(GroupManifest(name, done["manifest"], done["crc64"], min(ranks)))
        if commit:
            publish_record(Access(), str(self.root), self.session, number, fencing_token, published)
        return record


@dataclass
class Loaded:
    """What a rank got: a plan and, by key, the bytes."""

    plan: ReadPlan
    data: dict[str, bytearray]


def load(
    catalogue: Catalogue,
    entries: Sequence[Entry],
    rank: int,
    ranks: Sequence[int],
    *,
    local: bool = False,
    strict: bool = True,
    **how: Any,
) -> Loaded:
    """Plan and read, as a rank would."""
    me = LoadingRank(catalogue, rank, ranks)
    plan = plan_local(me, entries, strict=strict) if local else plan_logical(me, entries)
    if strict:
        refuse_names(plan.missing, plan.unexpected, me)
    data = {entry.key: bytearray(b"\xee" * entry.nbytes) for entry in entries}
    execute(plan.copies, [memoryview(data[entry.key]) for entry in entries], **how)
    return Loaded(plan, data)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))
