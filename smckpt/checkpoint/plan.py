"""Read plans: which bytes of which files go where in this rank's arrays. Only headers are read.

A *direct* read fills a contiguous range of a target with consecutive bytes of a file. A *gather*
reads a range of a stored array into scratch and copies a strided box out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from smckpt.checkpoint.catalogue import Catalogue, SavedFile, Source, StoredSlot, remaining_after
from smckpt.checkpoint.rows import Row
from smckpt.errors import (
    CorruptCheckpointError,
    KeysMismatchError,
    TensorMismatchError,
    TopologyError,
)
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import Box, KeptGeometry, MeshGeometry, Piece, Shape

__all__ = ["Direct", "Gather", "ReadPlan", "plan_local", "plan_logical"]

RUN_BYTES = 64 << 10  # shorter contiguous runs go through scratch: a read each would cost more
SCRATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Direct:
    """Bytes [offset, offset + nbytes) of `file` → target number `target` at byte `at`."""

    file: SavedFile
    offset: int
    nbytes: int
    target: int
    at: int


@dataclass(frozen=True, slots=True)
class Gather:
    """A strided box. `reads` fill a scratch of `nbytes` bytes (offsets `at` in the scratch); then
    element (i, j, …) of `sizes` goes from `source + Σ i*source_strides` of the scratch to
    `start + Σ i*strides` of the target, all in elements of `itemsize` bytes."""

    reads: tuple[Direct, ...]
    nbytes: int
    target: int
    itemsize: int
    sizes: Shape
    source: int
    source_strides: Shape
    start: int
    strides: Shape


@dataclass
class ReadPlan:
    """What to read for one rank; targets are numbered as the entries were given."""

    directs: list[Direct] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(d.nbytes for d in self.directs) + sum(
            r.nbytes for g in self.gathers for r in g.reads
        )


# -- by logical name: any mesh ------------------------------------------------------------------


def plan_logical(
    catalogue: Catalogue,
    entries: Sequence[Entry],
    *,
    rank: int,
    group_ranks: Sequence[int],
    strict: bool = True,
) -> ReadPlan:
    """Fill entries by logical name, from whatever mesh they were saved on.

    Raises:
        KeysMismatchError, TensorMismatchError: names, shapes or dtypes differ.
        CorruptCheckpointError: an element would be left unwritten.
    """
    plan = ReadPlan()
    here = {e.logical_name(f) for e in entries for f in e.geometry.fqns}
    plan.missing = tuple(sorted(here - catalogue.logical.keys()))
    plan.unexpected = tuple(sorted(catalogue.logical.keys() - here))
    if strict:
        _refuse_mismatch(plan, catalogue.url, rank)
    context = _Context(catalogue, plan, rank, tuple(sorted(group_ranks)))
    for number, entry in enumerate(entries):
        for piece in entry.geometry.pieces(rank):
            name = entry.logical_name(piece.name)
            if name in catalogue.logical:
                context.fill(number, entry, piece, name)
    return plan


@dataclass
class _Context:
    catalogue: Catalogue
    plan: ReadPlan
    rank: int
    group_ranks: tuple[int, ...]
    _slots: dict[tuple[int, tuple[int, ...]], list[StoredSlot]] = field(default_factory=dict)

    def fill(self, number: int, entry: Entry, piece: Piece, name: str) -> None:
        logical = self.catalogue.logical[name]
        if logical.dtype != entry.dtype or logical.shape != piece.shape:
            raise TensorMismatchError(
                f"{name}: saved as {logical.dtype} {list(logical.shape)}, the target is "
                f"{entry.dtype} {list(piece.shape)}",
                remedy="build the model and optimizer as they were when the state was saved",
                path=self.catalogue.url,
                rank=self.rank,
            )
        left = [piece.box] if piece.box.numel else []
        for source in self.sources(name):
            if not left:
                break
            pending = left
            left = []
            for box in pending:
                common = box.intersect(source.piece.box)
                if common is None:
                    left.append(box)
                    continue
                self.copy(number, entry.itemsize, piece, source, common)
                left += remaining_after([box], common)
        if left:
            raise CorruptCheckpointError(
                f"{name}: {sum(b.numel for b in left)} of {piece.box.numel} elements that this "
                f"rank needs are not in the checkpoint (first at {list(left[0].offsets)})",
                remedy="load from the directory above all groups' directories, or use another step",
                path=self.catalogue.url,
                rank=self.rank,
            )

    def sources(self, name: str) -> list[Source]:
        """The saved pieces; of values kept per rank only those of the rank that this one follows:
        the i-th rank of the group takes those of the saved rank i mod n."""
        sources = self.catalogue.sources(name)
        kept = [s for s in sources if s.row.geometry is None]
        if not kept:
            return sources
        ranks = sorted({s.holders[0] for s in kept})
        chosen = ranks[self.group_ranks.index(self.rank) % len(ranks)]
        return [s for s in sources if s.row.geometry is not None or s.holders[0] == chosen]

    def slots(self, row: Row, holders: tuple[int, ...]) -> list[StoredSlot]:
        key = (id(row), holders)
        if key not in self._slots:
            self._slots[key] = self.catalogue.slots(row, holders)
        return self._slots[key]

    def copy(self, number: int, itemsize: int, piece: Piece, source: Source, box: Box) -> None:
        """Add the reads for `box`, which lies in both pieces."""
        saved = source.piece
        src = saved.start + _dot(box.offsets, saved.box.offsets, saved.strides)
        dst = piece.start + _dot(box.offsets, piece.box.offsets, piece.strides)
        slots = self.slots(source.row, source.holders)
        outer, run = _runs(box.sizes, saved.strides, piece.strides)
        sizes = box.sizes[:outer]
        if run * itemsize >= RUN_BYTES or math.prod(sizes) == 1:
            for a, b in _walk(sizes, saved.strides[:outer], piece.strides[:outer], src, dst):
                self.plan.directs += _reads(slots, a, a + run, itemsize, number, b * itemsize)
            return
        self._gather(number, itemsize, box.sizes, saved.strides, piece.strides, src, dst, slots)

    def _gather(
        self,
        number: int,
        itemsize: int,
        sizes: Shape,
        source_strides: Shape,
        strides: Shape,
        src: int,
        dst: int,
        slots: list[StoredSlot],
    ) -> None:
        extent = 1 + sum((n - 1) * s for n, s in zip(sizes, source_strides, strict=True))
        if extent * itemsize > SCRATCH_BYTES and max(sizes) > 1:
            # Halve the dimension that reaches farthest, until the scratch is small enough.
            dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * source_strides[d])
            half = sizes[dim] // 2
            for at, count in ((0, half), (half, sizes[dim] - half)):
                self._gather(
                    number,
                    itemsize,
                    (*sizes[:dim], count, *sizes[dim + 1 :]),
                    source_strides,
                    strides,
                    src + at * source_strides[dim],
                    dst + at * strides[dim],
                    slots,
                )
            return
        reads = tuple(_reads(slots, src, src + extent, itemsize, number, 0))
        self.plan.gathers.append(
            Gather(
                reads, extent * itemsize, number, itemsize, sizes, 0, source_strides, dst, strides
            )
        )


def _dot(offsets: Shape, origin: Shape, strides: Shape) -> int:
    return sum((o - z) * s for o, z, s in zip(offsets, origin, strides, strict=True))


def _runs(sizes: Shape, a: Shape, b: Shape) -> tuple[int, int]:
    """How many outer dimensions remain, and how many elements then run contiguously in both."""
    run, dim = 1, len(sizes)
    while dim and (sizes[dim - 1] == 1 or a[dim - 1] == b[dim - 1] == run):
        run *= sizes[dim - 1]
        dim -= 1
    return dim, run


def _walk(sizes: Shape, a: Shape, b: Shape, src: int, dst: int) -> list[tuple[int, int]]:
    starts = [(src, dst)]
    for size, sa, sb in zip(sizes, a, b, strict=True):
        starts = [(x + i * sa, y + i * sb) for x, y in starts for i in range(size)]
    return starts


def _reads(
    slots: Sequence[StoredSlot], low: int, high: int, itemsize: int, target: int, at: int
) -> list[Direct]:
    """Elements [low, high) of a stored array, from the slots that have them."""
    out, done = [], low
    for slot in slots:
        start, stop = max(done, slot.start), min(high, slot.stop)
        if stop <= start:
            continue
        offset = slot.offset + (start - slot.start) * itemsize
        nbytes = (stop - start) * itemsize
        out.append(Direct(slot.file, offset, nbytes, target, at + (start - low) * itemsize))
        done = stop
    return out


# -- by key: the same shard degree ----------------------------------------------------------------


def plan_local(
    catalogue: Catalogue,
    entries: Sequence[Entry],
    *,
    rank: int,
    group_ranks: Sequence[int],
    strict: bool = True,
) -> ReadPlan:
    """Fill entries by key with the arrays of the saved ranks that held the same shard.

    Raises:
        TopologyError: the shard degree differs; names both.
        KeysMismatchError, TensorMismatchError, CorruptCheckpointError: as for `plan_logical`.
    """
    twins = _twins(catalogue, entries, rank)
    ordered = sorted(group_ranks)
    twin = twins[_replica_index(entries, rank, ordered) % len(twins)]
    saved = {
        key: row for key, rows in catalogue.rows_by_key.items() for row in rows if twin in row.ranks
    }
    plan = ReadPlan()
    here = {entry.key for entry in entries}
    plan.missing = tuple(sorted(here - saved.keys()))
    plan.unexpected = tuple(sorted(saved.keys() - here))
    if strict:
        _refuse_mismatch(plan, catalogue.url, rank)
    for number, entry in enumerate(entries):
        row = saved.get(entry.key)
        if row is None:
            continue
        _check_local(catalogue, entry, row, rank, twin)
        if entry.numel:
            slots = catalogue.slots(row, _sharers(row, twin))
            plan.directs += _reads(slots, 0, entry.numel, entry.itemsize, number, 0)
    return plan


def _twins(catalogue: Catalogue, entries: Sequence[Entry], rank: int) -> list[int]:
    """The saved ranks whose shards this rank's are; all saved ranks when nothing is sharded."""
    candidates = set(catalogue.parts)
    for entry in entries:
        geometry = entry.geometry
        if isinstance(geometry, KeptGeometry):
            continue
        for row in catalogue.rows_by_key.get(entry.key, []):
            if row.geometry is None or type(row.geometry) is not type(geometry):
                continue
            if row.geometry.shard_degree() != geometry.shard_degree():
                raise _other_degree(
                    catalogue, rank, row.geometry.shard_degree(), geometry.shard_degree()
                )
            same = {r for r in row.ranks if row.geometry.coordinate(r) == geometry.coordinate(rank)}
            if not same:
                continue
            candidates &= same
    if not candidates:
        raise TopologyError(
            "no saved rank held the shards that this rank holds",
            remedy="load from this rank's own group directory, or make it a SHARDED load of the "
            "directory above the groups' directories",
            path=catalogue.url,
            rank=rank,
        )
    return sorted(candidates)


def _other_degree(catalogue: Catalogue, rank: int, saved: int, live: int) -> TopologyError:
    return TopologyError(
        f"the checkpoint was saved with shard degree {saved}, the model is sharded by {live}: a "
        "LOCAL load needs the same degree",
        remedy="take the target under sm_state_dict_type(model, SHARDED) and load it from the "
        "directory above the groups' directories: that reshards",
        path=catalogue.url,
        rank=rank,
    )


def _replica_index(entries: Sequence[Entry], rank: int, group_ranks: list[int]) -> int:
    for entry in entries:
        if not isinstance(entry.geometry, KeptGeometry):
            return entry.geometry.replicas(rank).index(rank)
    return group_ranks.index(rank)


def _sharers(row: Row, twin: int) -> tuple[int, ...]:
    """The saved ranks that shared the writing of the array that `twin` held."""
    if row.geometry is None:
        return (twin,)
    replicas = set(row.geometry.replicas(twin))
    return tuple(r for r in row.ranks if r in replicas)


def _check_local(catalogue: Catalogue, entry: Entry, row: Row, rank: int, twin: int) -> None:
    saved = row.entry(twin)
    same_whole = True
    if isinstance(entry.geometry, MeshGeometry) and isinstance(row.geometry, MeshGeometry):
        same_whole = entry.geometry.shape == row.geometry.shape
    if saved.dtype == entry.dtype and saved.shape == entry.shape and same_whole:
        return
    one_side_is_kept = isinstance(entry.geometry, KeptGeometry) != (row.geometry is None)
    if one_side_is_kept and saved.dtype == entry.dtype and saved.numel == entry.numel:
        return  # the same bytes, seen flat by one side
    raise TensorMismatchError(
        f"{entry.key}: saved as {saved.dtype} {list(saved.shape)}, the target is {entry.dtype} "
        f"{list(entry.shape)}",
        remedy="build the model and optimizer as they were when the state was saved",
        path=catalogue.url,
        rank=rank,
    )


def _refuse_mismatch(plan: ReadPlan, url: str, rank: int) -> None:
    if not plan.missing and not plan.unexpected:
        return

    def listed(names: tuple[str, ...]) -> str:
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        return f"{list(names[:12])}{more}"

    raise KeysMismatchError(
        f"the checkpoint lacks {listed(plan.missing)}; the target lacks {listed(plan.unexpected)}",
        remedy="give the target the keys that were saved (an optimizer without state: "
        "init_optim_state), or pass check_keys_matched=False to take what both have",
        path=url,
        rank=rank,
    )
