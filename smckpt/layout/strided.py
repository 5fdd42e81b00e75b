"""Copies between arrays: boxes of a tensor, strided elements of an array, and what joins them.

A `Box` is a block of a tensor's index space. A `Strided` is a grid of elements of a flat array. A
`Piece` is a box and the elements of an array that hold it. Two pieces of one tensor `meet` in a
`Copy`, from one array into the other. Saves, loads, exports and imports compile to copies;
`coverage` proves on shapes that the copies fill their target, and `execute` carries one out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from smckpt.errors import CorruptCheckpointError
from smckpt.layout.mesh import Shape


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a tensor: per dimension an offset and a size, in elements."""

    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common block, or None if it is empty. Boxes without dimensions always meet."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if high <= low:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def shared(self, among: Iterable[Box]) -> list[tuple[int, Box]]:
        """Assign each element to the first of the boxes that has it. Yields (number of the box,
        part of this box). The parts are disjoint; `covered` proves whether they cover all of this
        box. Boxes that overlap in too many ways are a CorruptCheckpointError."""
        return self._split(list(among))[0]

    def subtract(self, *others: Box) -> list[Box]:
        """The elements of this box that are in none of the others, as disjoint boxes."""
        return self._split(others)[1]

    def _split(self, others: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
        """What others have of this box, as `shared` gives it, and what is left."""
        found: list[tuple[int, Box]] = []
        left, work = [self], _Effort(len(others), len(self.sizes))
        for number, other in enumerate(others):
            if not left:
                break
            met = [(box, box.intersect(other)) for box in left]
            found += [(number, common) for _, common in met if common is not None]
            left = [part for box, common in met for part in box._around(common)]
            work.count(len(met), len(found))
        return found, left

    def chunks(self, most: int) -> Iterator[Box]:
        """This box in parts of at most `most` elements, in row-major order."""
        if self.numel <= most:
            yield self
            return
        dim = next(d for d, size in enumerate(self.sizes) if size > 1)
        step = max(1, most // math.prod(self.sizes[dim + 1 :]))
        low, size = self.offsets[dim], self.sizes[dim]
        for at in range(low, low + size, step):
            offsets = (*self.offsets[:dim], at, *self.offsets[dim + 1 :])
            sizes = (*self.sizes[:dim], min(step, low + size - at), *self.sizes[dim + 1 :])
            yield from Box(offsets, sizes).chunks(most)

    def _around(self, common: Box | None) -> list[Box]:
        """This box without a block of it."""
        if common is None:
            return [self]
        out = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (low, kept) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            start, stop = offsets[dim], offsets[dim] + sizes[dim]
            for a, b in ((start, low), (low + kept, stop)):
                if a < b:
                    offsets[dim], sizes[dim] = a, b - a
                    out.append(Box(tuple(offsets), tuple(sizes)))
            offsets[dim], sizes[dim] = low, kept
        return out


class _Effort:
    """Bounds the steps with boxes of one tensor, which can cut each other into countless parts.
    Boxes of a mesh take about as many steps as there are boxes; in any order each cuts one part."""

    def __init__(self, boxes: int, dims: int) -> None:
        self._boxes = boxes
        self._left = 4096 + max(dims, 1) * max(256 * boxes, min(boxes * boxes, 1 << 20))
        self._most_cuts = 4096 + 8 * boxes

    def count(self, steps: int, cuts_in_all: int = 0) -> None:
        self._left -= steps
        if self._left < 0 or cuts_in_all > self._most_cuts:
            raise CorruptCheckpointError(
                f"{self._boxes} parts of a tensor overlap in too many ways",
                remedy="use an older checkpoint, or one from a source that you trust",
            )


@dataclass(frozen=True, slots=True)
class Strided:
    """Elements of a flat array, as a grid of `sizes`: element (i, j, …) of the grid is element
    `start + i*strides[0] + j*strides[1] + …` of the array."""

    sizes: Shape
    start: int
    strides: Shape

    @classmethod
    def whole(cls, shape: Sequence[int], start: int = 0) -> Strided:
        """A contiguous array of `shape`, row-major, that begins at element `start`."""
        return cls(tuple(shape), start, row_major_strides(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def extent(self) -> int:
        """The number of elements of the array from the first to the last of these, inclusive."""
        if 0 in self.sizes:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))

    def part(self, box: Box) -> Strided:
        """A block of the grid."""
        start = self.start
        for offset, stride in zip(box.offsets, self.strides, strict=True):
            start += offset * stride
        return Strided(box.sizes, start, self.strides)

    def steps(self, shape: Sequence[int]) -> tuple[_Steps, ...]:
        """The same elements as indices along each dimension of a row-major array of `shape`.

        Raises:
            ValueError: they do not form a grid of that array: a stride leaves the array or runs
                along two of its dimensions, or two strides run along one.
        """
        found = [_Steps(at, 1, 1, -1) for at in _unravelled(self.start, shape)]
        for dim, (count, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            if count == 1:
                continue
            unit = 1
            along = len(shape) - 1
            while along >= 0 and stride >= unit * shape[along]:
                unit *= shape[along]
                along -= 1
            if along < 0 or stride % unit or found[along].number != 1:
                raise ValueError(f"{self} is not a grid of an array of shape {tuple(shape)}")
            at, step = found[along].at, stride // unit
            if at + (count - 1) * step >= shape[along]:
                raise ValueError(f"{self} reaches beyond dimension {along} of {tuple(shape)}")
            found[along] = _Steps(at, step, count, dim)
        return tuple(found)

    def inside(self, piece: Piece) -> tuple[Box, Strided] | None:
        """Take these as elements of the whole tensor, row-major, and find those in `piece`: a block
        of the grid, and its elements in the array that holds the piece. None if there are none.
        """
        if 0 in self.sizes:
            return None
        steps = self.steps(piece.shape)
        offsets, sizes = [0] * len(self.sizes), list(self.sizes)
        for (at, step, _, dim), offset, size in zip(
            steps, piece.box.offsets, piece.box.sizes, strict=True
        ):
            if dim >= 0:  # index k of the grid is at + k * step
                offsets[dim] = -(-(offset - at) // step)
                sizes[dim] = -(-(offset + size - at) // step) - offsets[dim]
            elif not offset <= at < offset + size:
                return None
        block = Box(tuple(offsets), tuple(sizes)).intersect(Box.whole(self.sizes))
        if block is None:
            return None
        start, strides = piece.start, [0] * len(sizes)
        for (at, step, _, dim), offset, stride in zip(
            steps, piece.box.offsets, piece.strides, strict=True
        ):
            start += (at - offset) * stride
            if dim >= 0:
                strides[dim] = step * stride
                start += block.offsets[dim] * strides[dim]
        return block, Strided(block.sizes, start, tuple(strides))


class _Steps(NamedTuple):
    """The indices at, at + step, … (`number` of them) along one dimension of an array. Dimension
    `dim` of a grid runs along it; -1: none does."""

    at: int
    step: int
    number: int
    dim: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of logical tensor `name` of global `shape`, and the place of its elements in an array.

    Element (i, j, …) of the box is element `start + i*strides[0] + j*strides[1] + …` of the
    array, flattened in row-major order.
    """

    name: str
    shape: Shape
    box: Box
    start: int
    strides: Shape

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], start: int = 0) -> Piece:
        """All of the tensor, row-major, from element `start` of the array on."""
        shape = tuple(shape)
        return cls(name, shape, Box.whole(shape), start, row_major_strides(shape))

    def part(self, box: Box) -> Strided:
        """The elements of a box inside the piece."""
        start = self.start
        for offset, origin, stride in zip(box.offsets, self.box.offsets, self.strides, strict=True):
            start += (offset - origin) * stride
        return Strided(box.sizes, start, self.strides)


@dataclass(frozen=True, slots=True)
class Copy:
    """Element (i, j, …) of `source`, in one array, goes to element (i, j, …) of `target`, in
    another; both have the same sizes."""

    source: Strided
    target: Strided

    @property
    def sizes(self) -> Shape:
        return self.target.sizes

    @property
    def numel(self) -> int:
        return self.target.numel

    def reversed(self) -> Copy:
        return Copy(self.target, self.source)

    def part(self, box: Box) -> Copy:
        """The copy of a block of its grid."""
        return Copy(self.source.part(box), self.target.part(box))

    def read_from(self, piece: Piece) -> Copy | None:
        """Take `source` as elements of the whole tensor, row-major: the part of the copy that comes
        out of an array holding `piece`. None if there is none."""
        found = self.source.inside(piece)
        return None if found is None else Copy(found[1], self.target.part(found[0]))

    def written_to(self, piece: Piece) -> Copy | None:
        """The same for the target: the part of the copy that goes into an array holding `piece`."""
        found = self.reversed().read_from(piece)
        return None if found is None else found.reversed()

    def from_start(self) -> Copy:
        """The same copy out of an array that begins with its first source element."""
        return Copy(Strided(self.sizes, 0, self.source.strides), self.target)

    def stretch(self) -> tuple[int, int]:
        """The number of outer dimensions to walk, and the number of elements inside them that are
        contiguous in both source and target."""
        a, b, sizes = self.source.strides, self.target.strides, self.target.sizes
        run, dim = 1, len(sizes)
        while dim and (sizes[dim - 1] == 1 or a[dim - 1] == b[dim - 1] == run):
            run *= sizes[dim - 1]
            dim -= 1
        return dim, run

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Its runs of elements that are contiguous on both sides: (source, target, count)."""
        outer, run = self.stretch()
        if not run:
            return
        starts = [(self.source.start, self.target.start)]
        dims = zip(self.sizes[:outer], self.source.strides, self.target.strides, strict=False)
        for size, a, b in dims:
            starts = [(x + i * a, y + i * b) for x, y in starts for i in range(size)]
        for x, y in starts:
            yield x, y, run


def meet(source: Piece, target: Piece) -> Copy | None:
    """The copy of the elements common to two pieces of one tensor; None if there are none."""
    common = source.box.intersect(target.box)
    return None if common is None else Copy(source.part(common), target.part(common))


# -- the proof ---------------------------------------------------------------------------------


class Coverage(NamedTuple):
    """How many elements of a tensor are covered `never` or `often` (more than once).

    outside: whether a part reaches beyond the tensor.
    """

    never: int
    often: int
    outside: bool

    @property
    def exact(self) -> bool:
        """Whether each element is covered once, and nothing outside."""
        return self == (0, 0, False)


def coverage(shape: Sequence[int], parts: Iterable[Strided]) -> Coverage:
    """How `parts` cover a row-major array of `shape`: the proof that copies fill their target, or
    use their source, exactly once.

    It works on indices alone, and groups the indices of a dimension that all parts treat the same.
    So the cost grows with the number of parts and not of elements, unless a part has steps above 1.
    Parts that overlap in too many ways are a CorruptCheckpointError."""
    shape = tuple(shape)
    grids = []
    for part in parts:
        if part.numel:
            try:
                grids.append(part.steps(shape))
            except ValueError:
                return Coverage(math.prod(shape), 0, True)
    return Coverage(*_counted(shape, grids, _Effort(len(grids), len(shape))), False)


def _counted(shape: Shape, grids: Sequence[tuple[_Steps, ...]], work: _Effort) -> tuple[int, int]:
    """How many elements of `shape` no grid meets, and how many more than one meets.

    The first dimension is swept from edge to edge of the grids. Between two edges the indices that
    the same grids meet repeat with the period of their steps, and the dimensions that are left are
    counted once for all indices that the same grids meet.
    """
    if len(grids) < 2:
        met = [math.prod(steps.number for steps in grid) for grid in grids]
        return math.prod(shape) - sum(met), 0
    if not shape:
        return 0, 1
    edges: dict[int, list[int]] = {0: [], shape[0]: []}
    for number, (along, *_) in enumerate(grids):
        edges.setdefault(along.at, []).append(number)  # begins here
        last = along.at + (along.number - 1) * along.step
        edges.setdefault(last + 1, []).append(number)  # ends before here
    known: dict[frozenset[int], tuple[int, int]] = {}
    within: frozenset[int] = frozenset()
    never = often = 0
    for low, end in itertools.pairwise(sorted(edges)):
        work.count(len(within) + 1)
        within = within.symmetric_difference(edges[low])
        for times, here in _repeated(grids, within, low, end):
            if here not in known:
                inner = [grids[number][1:] for number in sorted(here)]
                known[here] = _counted(shape[1:], inner, work)
            never += known[here][0] * times
            often += known[here][1] * times
    return never, often


def _repeated(
    grids: Sequence[tuple[_Steps, ...]], within: frozenset[int], low: int, end: int
) -> Iterator[tuple[int, frozenset[int]]]:
    """The indices from `low` to `end` of the first dimension, all `within` the same grids: how many
    of them meet the same grids, and which these are."""
    period = math.lcm(*(grids[number][0].step for number in within))
    if period == 1:
        yield end - low, within
        return
    for index in range(low, min(low + period, end)):
        met = (n for n in within if (index - grids[n][0].at) % grids[n][0].step == 0)
        yield -(-(end - index) // period), frozenset(met)


def covered(box: Box, parts: Iterable[Box]) -> Coverage:
    """How boxes inside `box` cover it."""
    whole = Piece("", box.sizes, box, 0, row_major_strides(box.sizes))
    return coverage(box.sizes, map(whole.part, parts))


# -- carrying out ------------------------------------------------------------------------------


def execute(copy: Copy, source: Any, target: Any) -> None:
    """Carry a copy out.

    Args:
        source, target: contiguous NumPy arrays or torch tensors of any shape; they are flattened.

    Raises:
        ValueError: an array is not contiguous or too small. Nothing was copied.
    """
    to, value = _viewed(target, copy.target), _viewed(source, copy.source)
    if hasattr(to, "copy_"):
        to.copy_(value)
    else:
        to[...] = value


def elements(memory: Any, itemsize: int) -> Any:
    """Bytes as a flat NumPy array of elements of `itemsize` bytes, whatever their dtype."""
    import numpy

    return numpy.frombuffer(memory, f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}")


def _viewed(array: Any, at: Strided) -> Any:
    torch_like = hasattr(array, "as_strided")
    size = array.numel() if torch_like else array.size
    contiguous = array.is_contiguous() if torch_like else array.flags.c_contiguous
    if not contiguous or min(at.start, *at.strides, 0) < 0 or at.start + at.extent > size:
        raise ValueError(f"{at} of an array of {size} elements, contiguous: {contiguous}")
    if torch_like:
        return array.as_strided(at.sizes, at.strides, array.storage_offset() + at.start)
    from numpy.lib.stride_tricks import as_strided

    flat = array.reshape(-1)[at.start :]
    return as_strided(flat, at.sizes, [s * array.itemsize for s in at.strides])


# -- row-major arrays --------------------------------------------------------------------------


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


def _unravelled(start: int, shape: Sequence[int]) -> list[int]:
    """The indices of element `start` of a row-major array."""
    out = []
    for size in reversed(shape):
        start, at = divmod(start, max(size, 1))
        out.append(at)
    if start or 0 in shape:
        raise ValueError(f"an array of shape {tuple(shape)} has no such element")
    return out[::-1]
