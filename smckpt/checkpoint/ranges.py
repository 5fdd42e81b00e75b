"""From boxes of arrays to ranges of bytes: what a read plan is made of.

A *direct* read fills a contiguous range of a target with consecutive bytes of a file. A *gather*
reads a range of a stored array into scratch and copies a strided box out of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from smckpt.checkpoint.blocks import SavedFile
from smckpt.checkpoint.catalogue import StoredSlot
from smckpt.layout.geometry import Box, Piece
from smckpt.layout.mesh import Shape

__all__ = ["Direct", "Gather", "ReadPlan"]

RUN_BYTES = 64 << 10  # shorter contiguous runs go through scratch: a read each would cost more
SCRATCH_BYTES = 16 << 20


class Direct(NamedTuple):
    """Bytes [offset, offset + nbytes) of `file` → target number `target` at byte `at`."""

    file: SavedFile
    offset: int
    nbytes: int
    target: int
    at: int


@dataclass(frozen=True, slots=True)
class Gather:
    """A strided box. `reads` fill a scratch of `nbytes` bytes (offsets `at` in the scratch); then
    element (i, j, …) of `sizes` goes from `Σ i*source_strides` of the scratch to
    `start + Σ i*strides` of the target, all in elements of `itemsize` bytes."""

    reads: tuple[Direct, ...]
    nbytes: int
    target: int
    itemsize: int
    sizes: Shape
    source_strides: Shape
    start: int
    strides: Shape


@dataclass
class ReadPlan:
    """What to read for one rank; targets are numbered as the entries were given.

    missing, unexpected: names that only the target, or only the checkpoint, has; both are empty in
    a strict plan.
    """

    directs: list[Direct] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of files that targets, or the scratch of gathers, want."""
        return sum(d.nbytes for d in self.directs) + sum(
            r.nbytes for g in self.gathers for r in g.reads
        )

    def add_box(
        self,
        slots: Sequence[StoredSlot],
        saved: Piece,
        target: int,
        piece: Piece,
        box: Box,
        itemsize: int,
    ) -> None:
        """Copy `box`, which lies in both pieces, from the stored array in `slots`."""
        src = saved.start + _dot(box.offsets, saved.box.offsets, saved.strides)
        dst = piece.start + _dot(box.offsets, piece.box.offsets, piece.strides)
        outer, run = _runs(box.sizes, saved.strides, piece.strides)
        sizes = box.sizes[:outer]
        if run * itemsize >= RUN_BYTES or math.prod(sizes) == 1:
            for a, b in _walk(sizes, saved.strides[:outer], piece.strides[:outer], src, dst):
                self.add_range(slots, a, a + run, itemsize, target, b)
            return
        for gather in _gathers(
            slots, target, itemsize, box.sizes, saved.strides, piece.strides, src, dst
        ):
            self.gathers.append(gather)

    def add_range(
        self,
        slots: Sequence[StoredSlot],
        low: int,
        high: int,
        itemsize: int,
        target: int,
        start: int,
    ) -> None:
        """Copy elements [low, high) of the stored array to the target from element `start`."""
        self.directs += _reads(slots, low, high, itemsize, target, start * itemsize)


def _gathers(
    slots: Sequence[StoredSlot],
    target: int,
    itemsize: int,
    sizes: Shape,
    source_strides: Shape,
    strides: Shape,
    src: int,
    dst: int,
) -> Iterator[Gather]:
    extent = 1 + sum((n - 1) * s for n, s in zip(sizes, source_strides, strict=True))
    if extent * itemsize <= SCRATCH_BYTES or max(sizes) == 1:
        reads = tuple(_reads(slots, src, src + extent, itemsize, target, 0))
        yield Gather(
            reads, extent * itemsize, target, itemsize, sizes, source_strides, dst, strides
        )
        return
    # Halve the dimension that reaches farthest, until the scratch is small enough.
    dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * source_strides[d])
    half = sizes[dim] // 2
    for at, count in ((0, half), (half, sizes[dim] - half)):
        yield from _gathers(
            slots,
            target,
            itemsize,
            (*sizes[:dim], count, *sizes[dim + 1 :]),
            source_strides,
            strides,
            src + at * source_strides[dim],
            dst + at * strides[dim],
        )


def _reads(
    slots: Sequence[StoredSlot], low: int, high: int, itemsize: int, target: int, at: int
) -> Iterator[Direct]:
    """Elements [low, high) of a stored array, from the slots that have them."""
    done = low
    for first, last, file, offset in slots:
        start = first if first > done else done
        stop = last if last < high else high
        if stop <= start:
            continue
        place = offset + (start - first) * itemsize
        nbytes = (stop - start) * itemsize
        yield Direct(file, place, nbytes, target, at + (start - low) * itemsize)
        done = stop


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
