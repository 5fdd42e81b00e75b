"""Which part of which logical tensor a rank's local array holds.

A *geometry* is a rule: given a rank, it answers which *pieces* of logical tensors that rank's
local array holds, and which ranks hold the same array (its *replicas*). Rules are what a manifest
records, so its size grows with tensors and not with tensors times ranks, and every tool can
evaluate them offline, without torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from smckpt.layout.mesh import Holding, Interval, Mesh, Placement, Shape
from smckpt.layout.remembered import remembered

__all__ = [
    "Box",
    "BoxGeometry",
    "FlatGeometry",
    "FlatUnit",
    "Geometry",
    "KeptGeometry",
    "MeshGeometry",
    "Piece",
    "Segment",
    "boxes_of_range",
    "row_major_strides",
]


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a tensor: per dimension an offset and a size, in elements."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common block, or None when it has no element. Zero-dimensional boxes meet."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if high <= low:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of logical tensor `name`, and where its elements lie in the local array.

    Element (i, j, …) of the box is element `start + i*strides[0] + j*strides[1] + …` of the local
    array, flattened in row-major order.
    """

    name: str
    shape: Shape
    box: Box
    start: int
    strides: Shape


@dataclass(frozen=True)
class MeshGeometry:
    """A tensor placed on a mesh (DTensor, DDP, FSDP2, TP): `fqn` with global `shape`."""

    fqn: str
    shape: Shape
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise ValueError(f"{len(self.placements)} placements on mesh {self.mesh.shape}")
        for placement in self.placements:
            if placement.kind != "replicate" and placement.dim >= len(self.shape):
                raise ValueError(f"{placement} of a tensor of shape {self.shape}")

    @property
    def fqns(self) -> tuple[str, ...]:
        return (self.fqn,)

    @remembered
    def shard_dims(self) -> tuple[int, ...]:
        """Mesh dimensions that tell ranks' contents apart."""
        return tuple(
            i
            for i, p in enumerate(self.placements)
            if p.kind != "replicate" and self.mesh.shape[i] > 1
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    def coordinate(self, rank: int) -> Shape:
        """The shard coordinate: equal for two ranks exactly when they hold the same array."""
        found = self._coordinates.get(rank)
        if found is None:
            whole = self.mesh.coordinate(rank)
            found = self._coordinates[rank] = tuple(map(whole.__getitem__, self.shard_dims))
        return found

    @remembered
    def _coordinates(self) -> dict[int, Shape]:
        return self.mesh.coordinates_on(self.shard_dims)

    def replicas(self, rank: int) -> tuple[int, ...]:
        return self.mesh.same_on(rank, self.shard_dims)

    def shard_degree(self) -> int:
        return math.prod(self.mesh.shape[d] for d in self.shard_dims)

    @remembered
    def _cuts(self) -> tuple[tuple[int, Placement], ...]:
        """Mesh dimensions that cut the tensor, and how, in their order: from left to right, but a
        strided one that stands for "those to my right cut first" (FSDP over TP) comes after them,
        as plain chunks. torch's own function takes it from left to right, which for uneven sizes
        is not what `fully_shard` does.
        """
        first: list[tuple[int, Placement]] = []
        last: list[tuple[int, Placement]] = []
        pairs = list(zip(self.placements, self.mesh.shape, strict=True))
        for index, (placement, _) in enumerate(pairs):
            right = math.prod(n for p, n in pairs[index + 1 :] if p.dim == placement.dim)
            if placement.kind == "strided" and placement.split == right:
                last.insert(0, (index, Placement("shard", placement.dim)))
            elif placement.kind != "replicate":
                first.append((index, placement))
        return (*first, *last)

    def intervals(self, rank: int) -> tuple[tuple[Interval, ...], ...]:
        """Per tensor dimension, the index ranges held, in the order of the local array."""
        return self._of(rank).intervals

    def local_shape(self, rank: int) -> Shape:
        return self._of(rank).shape

    def _of(self, rank: int) -> Holding:
        found = self._held.get(rank)
        if found is None:
            intervals = tuple(map(tuple, self._intervals(rank)))
            shape = tuple(sum(b - a for a, b in dim) for dim in intervals)
            found = self._held[rank] = Holding(intervals, shape)
        return found

    @remembered
    def _held(self) -> dict[int, Holding]:
        return self.mesh.holdings((self.shape, self.placements))

    def _intervals(self, rank: int) -> list[list[Interval]]:
        held: list[list[Interval]] = [[(0, n)] if n else [] for n in self.shape]
        where = self.mesh.coordinate(rank)
        for dim, placement in self._cuts:
            index, size = where[dim], self.mesh.shape[dim]
            if placement.kind == "shard":
                held[placement.dim] = _chunk(held[placement.dim], size, index)
            else:
                parts = (
                    _chunk(_chunk(held[placement.dim], placement.split, k), size, index)
                    for k in range(placement.split)
                )
                held[placement.dim] = _merge(itertools.chain.from_iterable(parts))
        return held

    def pieces(self, rank: int) -> list[Piece]:
        held = self.intervals(rank)
        strides = row_major_strides(self.local_shape(rank))
        placed = []  # per dimension: (global offset, size, local offset)
        for dim in held:
            at = itertools.accumulate((b - a for a, b in dim), initial=0)
            placed.append([(a, b - a, start) for (a, b), start in zip(dim, at, strict=False)])
        out = []
        for combo in itertools.product(*placed):
            box = Box(tuple(c[0] for c in combo), tuple(c[1] for c in combo))
            start = sum(c[2] * s for c, s in zip(combo, strides, strict=True))
            out.append(Piece(self.fqn, self.shape, box, start, strides))
        return out


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter inside a flat parameter, or padding when `fqn` is None. `numel` in elements."""

    fqn: str | None
    shape: Shape
    numel: int


@dataclass(frozen=True)
class FlatUnit:
    """The record of one FSDP1 flat parameter: its segments in order; shards of `shard_numel`.

    Shard i holds elements [i * shard_numel, (i + 1) * shard_numel) of the concatenated segments;
    what lies beyond the last segment is padding.
    """

    segments: tuple[Segment, ...]
    shard_numel: int

    def __post_init__(self) -> None:
        for segment in self.segments:
            if segment.fqn is not None and math.prod(segment.shape) != segment.numel:
                raise ValueError(f"{segment.fqn}: shape {segment.shape} has not {segment.numel}")

    @remembered
    def starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((s.numel for s in self.segments), initial=0))[:-1]


@dataclass(frozen=True)
class FlatGeometry:
    """A shard of an FSDP1 flat parameter (`member` None), or the part of it that belongs to
    segment number `member` (`use_orig_params=True`), or a state tensor of the same extent.

    mesh has the shape (replicate, shard).
    """

    unit: FlatUnit
    mesh: Mesh
    member: int | None = None

    def __post_init__(self) -> None:
        if len(self.mesh.shape) != 2:
            raise ValueError("a flat shard's mesh has the two dimensions (replicate, shard)")

    @remembered
    def fqns(self) -> tuple[str, ...]:
        chosen = self.unit.segments if self.member is None else (self.unit.segments[self.member],)
        return tuple(s.fqn for s in chosen if s.fqn is not None)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    def coordinate(self, rank: int) -> Shape:
        return (self.mesh.coordinate(rank)[1],)

    def replicas(self, rank: int) -> tuple[int, ...]:
        return self.mesh.same_on(rank, (1,))

    def shard_degree(self) -> int:
        return self.mesh.shape[1]

    def _extent(self, rank: int) -> Interval:
        low = self.coordinate(rank)[0] * self.unit.shard_numel
        high = low + self.unit.shard_numel
        if self.member is None:
            return low, high
        start = self.unit.starts[self.member]
        stop = start + self.unit.segments[self.member].numel
        return max(low, start), max(min(high, stop), max(low, start))

    def local_shape(self, rank: int) -> Shape:
        low, high = self._extent(rank)
        return (high - low,)

    def pieces(self, rank: int) -> list[Piece]:
        low, high = self._extent(rank)
        out = []
        for begin, segment in zip(self.unit.starts, self.unit.segments, strict=True):
            if segment.fqn is None:
                continue
            a, b = max(low, begin), min(high, begin + segment.numel)
            if b <= a:
                continue
            at = a - low
            for box in boxes_of_range(segment.shape, a - begin, b - begin):
                strides = row_major_strides(box.sizes)
                out.append(Piece(segment.fqn, segment.shape, box, at, strides))
                at += box.numel
        return out


@dataclass(frozen=True)
class BoxGeometry:
    """Explicit boxes of one tensor, held by `holders` only: for what no rule describes.

    The boxes lie in the local array one after the other, each in row-major order.
    """

    fqn: str
    shape: Shape
    boxes: tuple[Box, ...]
    holders: tuple[int, ...]

    @property
    def fqns(self) -> tuple[str, ...]:
        return (self.fqn,)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.holders

    def coordinate(self, rank: int) -> Shape:
        return tuple(itertools.chain.from_iterable(b.offsets + b.sizes for b in self.boxes))

    def replicas(self, rank: int) -> tuple[int, ...]:
        return self.holders

    def shard_degree(self) -> int:
        return 0  # unknown to one rank

    def local_shape(self, rank: int) -> Shape:
        one = len(self.boxes) == 1
        return self.boxes[0].sizes if one else (sum(box.numel for box in self.boxes),)

    def pieces(self, rank: int) -> list[Piece]:
        out, at = [], 0
        for box in self.boxes:
            if box.numel:
                out.append(Piece(self.fqn, self.shape, box, at, row_major_strides(box.sizes)))
            at += box.numel
        return out


@dataclass(frozen=True)
class KeptGeometry:
    """A tensor kept per rank: buffers, RNG, scalars, whatever has no sharding of its own.

    Every rank writes its own. `fqns` are the logical names for which the array stands (a flat
    parameter's `step` stands for the step of each of its members).
    """

    fqns: tuple[str, ...]
    shape: Shape
    rank: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    def coordinate(self, rank: int) -> Shape:
        return (rank,)

    def replicas(self, rank: int) -> tuple[int, ...]:
        return (rank,)

    def shard_degree(self) -> int:
        return 0

    def local_shape(self, rank: int) -> Shape:
        return self.shape

    def pieces(self, rank: int) -> list[Piece]:
        strides = row_major_strides(self.shape)
        return [Piece(f, self.shape, Box.whole(self.shape), 0, strides) for f in self.fqns]


Geometry: TypeAlias = MeshGeometry | FlatGeometry | BoxGeometry | KeptGeometry


def row_major_strides(shape: Sequence[int]) -> Shape:
    """Strides in elements of a contiguous array of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut elements [start, stop) of a row-major tensor into at most 2 * ndim - 1 boxes."""
    shape = tuple(shape)
    if stop <= start:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    head, tail = start - first * row, stop - last * row
    if first == last:  # within one row
        yield from _in_row(shape, first, head, tail)
        return
    if head:
        yield from _in_row(shape, first, head, row)
        first += 1
    if last > first:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if tail:
        yield from _in_row(shape, last, 0, tail)


def _in_row(shape: Shape, index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *box.offsets), (1, *box.sizes))


def _chunk(held: list[Interval], count: int, index: int) -> list[Interval]:
    """Chunk `index` of `count` of the held indices, as `torch.chunk` cuts: ceil(n / count) each."""
    total = sum(b - a for a, b in held)
    size = -(-total // count)
    low, high = min(index * size, total), min((index + 1) * size, total)
    out, at = [], 0
    for a, b in held:
        start, stop = max(low - at, 0), min(high - at, b - a)
        if stop > start:
            out.append((a + start, a + stop))
        at += b - a
    return out


def _merge(intervals: Iterator[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for a, b in intervals:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out
