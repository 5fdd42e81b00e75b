"""Who holds which box of a logical tensor: the saved rules, evaluated once per shard.

A rule is evaluated for each distinct shard coordinate, not for each rank, and once for all tensors
that it treats alike: the layers of a model share a handful of shapes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smckpt.checkpoint.rows import Row
from smckpt.layout.entries import Path, dotted
from smckpt.layout.geometry import Box, BoxGeometry, FlatGeometry, Geometry, MeshGeometry, Piece
from smckpt.layout.mesh import Shape

__all__ = ["Source", "Sources", "remaining_after", "row_shape"]


@dataclass(frozen=True, slots=True)
class Source:
    """A piece of a logical tensor as saved, and the ranks that hold (and wrote) the array that it
    is part of."""

    piece: Piece
    row: Row
    holders: tuple[int, ...]


class Sources:
    """The rows of a checkpoint by logical name, and their pieces."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.by_name: dict[str, list[tuple[Row, str]]] = {}
        self._divided: dict[tuple[Path, str], list[Row]] = {}
        for row in rows:
            for fqn in row.fqns:
                self.by_name.setdefault(dotted(row.logical_path(fqn)), []).append((row, fqn))
                if row.geometry is not None:
                    self._divided.setdefault((row.before, fqn), []).append(row)
        # Keys hold ids of objects that the rows keep alive.
        self._holders: dict[Any, dict[Shape, tuple[int, ...]]] = {}
        self._pieces: dict[Any, dict[str, _Pieces]] = {}
        self._filled: dict[Any, frozenset[int]] = {}
        self._families: dict[int, frozenset[int]] = {}
        self._family_of: dict[frozenset[int], frozenset[int]] = {}

    def holders(self, row: Row) -> dict[Shape, tuple[int, ...]]:
        """The ranks that share an array of this row, by shard coordinate."""
        key = (_sharding(row), id(row.ranks))
        if key not in self._holders:
            self._holders[key] = _holders(row)
        return self._holders[key]

    def family(self, row: Row) -> frozenset[int]:
        """The ranks among which the tensor is divided and copied: those of its mesh.

        Explicit boxes name the rank that has them and not who has the rest: they are one family.
        """
        if isinstance(row.geometry, BoxGeometry):
            return frozenset()
        shared = row.ranks if row.geometry is None else row.geometry.ranks
        if id(shared) not in self._families:
            ranks = frozenset(shared)
            self._families[id(shared)] = self._family_of.setdefault(ranks, ranks)
        return self._families[id(shared)]

    # Ranks of one mesh hold parts or copies of one tensor. Ranks of two meshes that save under one
    # name may hold copies (what FSDP + TP leaves out of the TP plan), or different tensors: slices
    # of plain tensors under TP, stages that number their layers alike.

    def one_tensor(self, a: Row, b: Row) -> bool:
        """Whether two rows of a name are known to be of one tensor: they have one mesh, or some
        other tensor's mesh joins their ranks."""
        ranks, others = self.family(a), self.family(b)
        return ranks is others or any(f >= ranks and f >= others for f in self.joined)

    @cached_property
    def joined(self) -> set[frozenset[int]]:
        """The ranks of each mesh."""
        rows = (row for named in self.by_name.values() for row, _ in named)
        return {self.family(row) for row in rows if row.geometry is not None}

    def own_family(self, live: Geometry, rows: list[Row]) -> list[Row]:
        """Of rows of several meshes those of the live one; all, if it is none of them."""
        if len(rows) < 2:
            return rows
        ours = frozenset(live.ranks)
        return [row for row in rows if self.family(row) == ours] or rows

    def meeting(self, row: Row, fqn: str, box: Box) -> Iterator[Source]:
        """The pieces of `fqn` in this row that have elements in common with `box`."""
        for holders, piece in self._of(row, fqn).meeting(box):
            if piece.name != fqn:  # found for another tensor of the same shape and sharding
                piece = Piece(fqn, piece.shape, piece.box, piece.start, piece.strides)
            yield Source(piece, row, holders)

    def filled(self, row: Row, fqn: str) -> set[int]:
        """The ranks that have elements of what is divided beside a kept row of `fqn`, such as the
        step of its state. The others may have one too, but never stepped."""
        found: set[int] = set()
        for beside in self._divided.get((row.before, fqn), ()):
            key = _rule(beside), fqn if isinstance(beside.geometry, FlatGeometry) else None
            if key not in self._filled:
                whole = Box.whole(row_shape(beside, fqn))
                of = self.meeting(beside, fqn, whole) if whole.numel else ()
                self._filled[key] = frozenset(rank for source in of for rank in source.holders)
            found |= self._filled[key]
        return found

    def all(self, name: str) -> list[Source]:
        """All saved pieces of a logical tensor; of a kept row one for each rank."""
        out: list[Source] = []
        for row, fqn in self.by_name[name]:
            whole = Box.whole(row_shape(row, fqn))
            if whole.numel:
                out += self.meeting(row, fqn, whole)
        return out

    def _of(self, row: Row, fqn: str) -> _Pieces:
        key = _rule(row)
        if key not in self._pieces:
            self._pieces[key] = _gathered(row, self.holders(row).values())
        found = self._pieces[key]
        # Rules of one tensor each are shared by those of other names; a flat unit's are not.
        if isinstance(row.geometry, FlatGeometry):
            return found.get(fqn, _NOTHING)
        return next(iter(found.values()), _NOTHING)


class _Pieces:
    """Disjoint or equal boxes with what lies there, found by where they are."""

    def __init__(self, items: Sequence[tuple[tuple[int, ...], Piece]]) -> None:
        dims = range(len(items[0][1].box.offsets)) if items else range(0)
        # Sorted along the dimension that tells most of them apart.
        self._dim = max(dims, key=lambda d: len({p.box.offsets[d] for _, p in items}), default=-1)
        d = self._dim
        self._items = sorted(items, key=lambda i: i[1].box.offsets[d]) if d >= 0 else [*items]
        self._lows = [piece.box.offsets[d] for _, piece in self._items] if d >= 0 else []
        self._widest = max((p.box.sizes[d] for _, p in self._items), default=0) if d >= 0 else 0

    def meeting(self, box: Box) -> Iterator[tuple[tuple[int, ...], Piece]]:
        first, last, d = 0, len(self._items), self._dim
        if d >= 0:
            low, high = box.offsets[d], box.offsets[d] + box.sizes[d]
            first = bisect.bisect_right(self._lows, low - self._widest)
            last = bisect.bisect_left(self._lows, high)
        for item in self._items[first:last]:
            if item[1].box.intersect(box) is not None:
                yield item


_NOTHING = _Pieces(())


def row_shape(row: Row, fqn: str) -> Shape:
    """The global shape of the tensor `fqn` in a row."""
    if isinstance(row.geometry, FlatGeometry):
        return next(s.shape for s in row.geometry.unit.segments if s.fqn == fqn)
    return row.shape


def _sharding(row: Row) -> Any:
    """What decides which ranks hold the same array."""
    geometry = row.geometry
    if isinstance(geometry, MeshGeometry):
        return id(geometry.mesh), geometry.shard_dims
    if isinstance(geometry, FlatGeometry):
        return id(geometry.mesh), "flat"
    return None if geometry is None else id(geometry)


def _rule(row: Row) -> Any:
    """What decides which pieces they hold, but for the tensor's name."""
    geometry = row.geometry
    ranks = id(row.ranks)
    if isinstance(geometry, MeshGeometry):
        return id(geometry.mesh), geometry.placements, geometry.shape, ranks
    if isinstance(geometry, FlatGeometry):
        return id(geometry.mesh), id(geometry.unit), geometry.member, ranks
    return id(geometry) if isinstance(geometry, BoxGeometry) else ("kept", row.shape, ranks)


def _holders(row: Row) -> dict[Shape, tuple[int, ...]]:
    if row.geometry is None:
        return {(rank,): (rank,) for rank in row.ranks}
    found: dict[Shape, list[int]] = {}
    for rank in row.ranks:
        found.setdefault(row.geometry.coordinate(rank), []).append(rank)
    return {coordinate: tuple(ranks) for coordinate, ranks in found.items()}


def _gathered(row: Row, holders: Iterable[tuple[int, ...]]) -> dict[str, _Pieces]:
    found: dict[str, list[tuple[tuple[int, ...], Piece]]] = {}
    for ranks in holders:
        pieces = row.entry(ranks[0]).geometry.pieces(ranks[0])
        if row.geometry is None:
            pieces = pieces[:1]  # one array, whatever number of names it stands for
        for piece in pieces:
            found.setdefault(piece.name, []).append((ranks, piece))
    return {name: _Pieces(items) for name, items in found.items()}


def remaining_after(boxes: Iterable[Box], taken: Box) -> list[Box]:
    """`boxes` without what `taken` covers, as disjoint boxes."""
    out: list[Box] = []
    for box in boxes:
        common = box.intersect(taken)
        if common is None:
            out.append(box)
            continue
        offsets, sizes = list(box.offsets), list(box.sizes)
        for dim in range(len(sizes)):
            low, high = common.offsets[dim], common.offsets[dim] + common.sizes[dim]
            if offsets[dim] < low:
                before = [*sizes]
                before[dim] = low - offsets[dim]
                out.append(Box(tuple(offsets), tuple(before)))
            end = offsets[dim] + sizes[dim]
            if high < end:
                at, after = [*offsets], [*sizes]
                at[dim], after[dim] = high, end - high
                out.append(Box(tuple(at), tuple(after)))
            offsets[dim], sizes[dim] = low, high - low
    return out
