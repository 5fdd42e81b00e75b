"""Compare two checkpoints by logical name, bit for bit, with bounded memory: `compare_checkpoints`.

Both may be of any kind, format version and sharding. Per-rank tensors and values are compared rank
by rank. If several groups have saved copies of one tensor, every copy is compared.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smckpt.calls import alone, in_threads
from smckpt.checkpoint.reading.catalogue import Catalogue, SavedPiece
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.reading.read import Meter, Progress, StoredCopy, execute
from smckpt.checkpoint.upkeep.difference import Difference, leaves_of, value_difference
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import CODES, DTYPES, Entry, numbers
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Piece, elements, row_major_strides
from smckpt.storage import access_to

_AT_ONCE = 8 << 20  # bytes of each side that a thread holds


@dataclass(frozen=True)
class Compared:
    """What was compared, and what differs: values first, then per-rank tensors, then the others. A
    cause is more often among the first, an effect among the last.

    tensors, values: how many names were compared. nbytes: of A's tensors. ignored: names that were
        not compared.
    """

    a: str
    b: str
    tensors: int
    values: int
    nbytes: int
    differences: tuple[Difference, ...]
    ignored: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {
            "a": self.a, "b": self.b, "equal": self.equal, "tensors": self.tensors,
            "values": self.values, "bytes": self.nbytes, "ignored": list(self.ignored),
            "differences": [one.to_json() for one in self.differences],
        }  # fmt: skip


@alone()
def compare_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    ignore: Sequence[str] = (),
    moved: tuple[str, str] | None = None,
    threads: int = 4,
    progress: Progress | None = None,
) -> Compared:
    """Compare the newest commits at `a` and `b`. Every block that is read is compared with its
    checksum.

    Args:
        ignore: globs of names that are not compared.
        moved: the directories of the runs that saved A and B. Texts that differ only in these are
            equal.
        threads: how many threads read and compare.
        progress: called with (bytes of A compared, bytes of A), from any thread, one call at a
            time.

    Raises:
        CheckpointNotFoundError, FormatVersionError: one of them is no checkpoint.
        CorruptCheckpointError: one of them is damaged.
        UsageError: one of them is one group of a step.
    """
    opened = (open_catalogue(access_to(url).open(url)) for url in (a, b))
    return compare_catalogues(
        *opened, ignore=ignore, moved=moved, threads=threads, progress=progress
    )


def compare_catalogues(
    a: Catalogue,
    b: Catalogue,
    *,
    ignore: Sequence[str] = (),
    moved: tuple[str, str] | None = None,
    threads: int = 4,
    progress: Progress | None = None,
) -> Compared:
    """Compare what two catalogues have; see `compare_checkpoints`. Their stores are closed."""
    for catalogue in (a, b):
        catalogue.refuse_one_group()
    sides = _Side(a), _Side(b)
    of_values, differences = _compare_values(sides[0].catalogue, sides[1].catalogue, moved)
    every = {name for side in sides for name in side.catalogue.pieces.by_name}
    ignored = {n for n in {*every, *of_values} if any(fnmatch.fnmatchcase(n, p) for p in ignore)}
    differences = [one for one in differences if one.name not in ignored]
    names = sorted(every - ignored)
    total = sum(sides[0].nbytes(name) for name in names)
    meter = Meter(progress, total)

    def compare(name: str) -> list[Difference]:
        found = list(_compare_named(name, *sides))
        meter.add(sides[0].nbytes(name))
        return found

    try:
        each = in_threads(compare, names, threads, "smckpt-diff")
    finally:
        for side in sides:
            side.catalogue.stores.close()
    found = [one for some in each for one in some]
    own = [one for one in found if one.holder]
    shared = [one for one in found if not one.holder]
    return Compared(
        a.url, b.url, len(names), len(of_values - ignored), total,
        (*differences, *own, *shared), tuple(sorted(ignored)),
    )  # fmt: skip


# -- values ----------------------------------------------------------------------------------------


def _compare_values(
    a: Catalogue, b: Catalogue, moved: tuple[str, str] | None
) -> tuple[set[str], list[Difference]]:
    """The names of all values, and the differences."""
    found: list[Difference] = []
    if a.step != b.step and a.ours and b.ours:
        found.append(Difference("(recorded step)", "value", "", f"{a.step} and {b.step}"))
    names: set[str] = set()
    ranks = [one.object_ranks for one in (a, b)]
    common = [rank for rank in ranks[0] if rank in set(ranks[1])] or [ranks[0][0]]
    for rank in common:
        other = rank if rank in ranks[1] else ranks[1][0]
        ours = _in_other_directory(leaves_of(a, rank), moved)
        found += _values_apart(f"rank {rank}", ours, leaves_of(b, other), names)
    for side, catalogue in (("A", a), ("B", b)):
        base = common[0] if common[0] in catalogue.object_ranks else catalogue.object_ranks[0]
        rest = [rank for rank in catalogue.object_ranks if rank not in {*common, base}]
        first = leaves_of(catalogue, base) if rest else {}
        for rank in rest:
            apart = _values_apart(f"rank {rank}", first, leaves_of(catalogue, rank), names)
            found += [_of_one(one.name, f"rank {rank}", side, f"rank {base}") for one in apart]
    return names, found


def _in_other_directory(value: Any, moved: tuple[str, str] | None) -> Any:
    """A value with the other directory in its texts."""
    if moved is None:
        return value
    if isinstance(value, str):
        return value.replace(*moved)
    if isinstance(value, list):
        return [_in_other_directory(each, moved) for each in value]
    if isinstance(value, dict):
        return {key.replace(*moved): _in_other_directory(v, moved) for key, v in value.items()}
    return value


def _values_apart(
    holder: str, a: Mapping[str, Any], b: Mapping[str, Any], names: set[str]
) -> list[Difference]:
    both = sorted({*a, *b})
    names.update(both)
    return [one for name in both if (one := value_difference(name, holder, a, b)) is not None]


def _of_one(name: str, holder: str, side: str, other: str) -> Difference:
    detail = f"only {side} has {holder}, and it differs from {other} there"
    return Difference(name, "ranks", holder, detail)


# -- tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """A tensor of one side. holder: the ranks that have it to themselves; "" if all share it.

    unused: it belongs to shards without elements, such as the step of a rank that never stepped.
    """

    name: str
    holder: str
    dtype: str
    shape: Shape
    pieces: tuple[SavedPiece, ...]
    unused: bool = False


class _Side:
    """A checkpoint, and how elements of its tensors are read."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def nbytes(self, name: str) -> int:
        tensor = self.catalogue.logical.get(name)
        return 0 if tensor is None else tensor.nbytes

    def tensors(self, name: str) -> dict[str, _Tensor]:
        """Holder → tensor."""
        pieces = self.catalogue.pieces
        found: list[_Tensor] = []
        for rows in self._grouped(pieces.by_name.get(name, [])):
            row, fqn = rows[0]
            shape = row.geometry.shape_of(fqn)
            whole = Box.whole(shape)
            all_of = tuple(p for r, f in rows if whole.numel for p in pieces.meeting(r, f, whole))
            if row.geometry.per_rank:
                used = pieces.filled(row, fqn) or set(row.ranks)
                for rank in row.ranks:
                    own = tuple(p for p in all_of if p.holders == (rank,))
                    found.append(
                        _Tensor(name, f"rank {rank}", row.dtype, shape, own, rank not in used)
                    )
                continue
            ranks = sorted({rank for r, _ in rows for rank in r.geometry.ranks})
            holder = "ranks " + ",".join(map(str, ranks))
            found.append(_Tensor(name, holder, row.dtype, shape, all_of))
        if len(found) == 1 and found[0].holder.startswith("ranks"):
            one = found[0]
            return {"": _Tensor(name, "", one.dtype, one.shape, one.pieces)}
        return {one.holder: one for one in found}

    def _grouped(self, rows: Sequence[tuple[Entry, str]]) -> list[list[tuple[Entry, str]]]:
        """Groups of rows that belong to one tensor. A per-rank row is a group by itself."""
        known, groups = self.catalogue.pieces, list[list[tuple[Entry, str]]]()
        for row, fqn in rows:
            for group in groups:
                other, other_fqn = group[0]
                if (
                    not (row.geometry.per_rank or other.geometry.per_rank)
                    and (row.dtype, row.geometry.shape_of(fqn))
                    == (other.dtype, other.geometry.shape_of(other_fqn))
                    and known.one_tensor(row, other)
                ):
                    group.append((row, fqn))
                    break
            else:
                groups.append([(row, fqn)])
        return groups

    def read(self, tensor: _Tensor, box: Box, pieces: Sequence[SavedPiece]) -> bytearray:
        """The elements of a box, row-major. Each is read from the first piece that has it.

        Raises:
            CorruptCheckpointError: no piece has some of them.
        """
        itemsize = DTYPES[tensor.dtype].itemsize
        target = Piece(tensor.name, tensor.shape, box, 0, row_major_strides(box.sizes))
        copies, left = list[StoredCopy](), box.numel
        for number, part in box.shared(source.piece.box for source in pieces):
            source = pieces[number]
            copy = Copy(source.piece.part(part), target.part(part))
            slots = self.catalogue.slots(source.row, source.holders)
            copies.append(StoredCopy(slots, copy, 0, itemsize))
            left -= part.numel
        if left:
            raise CorruptCheckpointError(
                f"{left} elements of {tensor.name} are in no shard",
                remedy="use another checkpoint",
                path=self.catalogue.url,
            )
        data = bytearray(box.numel * itemsize)
        execute(copies, [memoryview(data)], threads=1)
        return data


def _compare_named(name: str, a: _Side, b: _Side) -> Iterator[Difference]:
    ours, theirs = a.tensors(name), b.tensors(name)
    if not theirs or not ours:
        there = ours or theirs
        one = next(iter(there.values()))
        side = "A" if ours else "B"
        holder = one.holder if len(there) == 1 else ""
        yield Difference(
            name, f"only {side}", holder, f"only {side} has it: {one.dtype} {list(one.shape)}"
        )
        return
    common = [holder for holder in ours if holder in theirs]
    first, other = next(iter(ours.values())), next(iter(theirs.values()))
    if common:
        pairs = [(ours[holder], theirs[holder]) for holder in common]
    elif "" in theirs:
        pairs = [(one, theirs[""]) for one in ours.values() if not one.unused]
    elif "" in ours:
        pairs = [(ours[""], one) for one in theirs.values() if not one.unused]
    else:
        pairs = [(first, other)]
    for left, right in pairs:
        yield from _compare(a, left, b, right)
    if not common and ("" in ours or "" in theirs):
        return
    for number, held in enumerate((ours, theirs)):
        at, base = (a, b)[number], pairs[0][number]
        for one in held.values():
            if one.unused or any(one is pair[number] for pair in pairs):
                continue
            if any(True for _ in _compare(at, base, at, one)):
                yield _of_one(name, one.holder, "AB"[number], base.holder)


def tensors_apart(catalogue: Catalogue) -> list[str]:
    """The names of the tensors of which ranks, or groups of ranks, hold different ones.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged.
    """
    side, found = _Side(catalogue), []
    for name in catalogue.pieces.by_name:
        first, *others = (one for one in side.tensors(name).values() if not one.unused)
        if any(True for one in others for _ in _compare(side, first, side, one)):
            found.append(name)
    return found


def _compare(a: _Side, ours: _Tensor, b: _Side, theirs: _Tensor) -> Iterator[Difference]:
    """The difference of two tensors, if there is one."""
    holder = ours.holder or theirs.holder
    for what, left, right in (
        ("dtype", ours.dtype, theirs.dtype),
        ("shape", list(ours.shape), list(theirs.shape)),
    ):
        if left != right:
            yield Difference(ours.name, what, holder, f"{left} and {right}")
            return
    apart = _Apart(ours)
    for box, from_a, from_b in _jobs(ours, theirs):
        for chunk in box.chunks(_AT_ONCE // DTYPES[ours.dtype].itemsize):
            apart.add(chunk, a.read(ours, chunk, from_a), b.read(theirs, chunk, from_b))
    if apart.count:
        yield apart.difference(holder)


def _jobs(
    a: _Tensor, b: _Tensor
) -> Iterator[tuple[Box, Sequence[SavedPiece], Sequence[SavedPiece]]]:
    """Boxes to compare, and the pieces of each side that have their elements. Each saved piece is
    compared at least once. If the same ranks hold the same box on both sides, the two pieces are
    compared with each other."""
    alike = {(source.piece.box, source.holders): source for source in b.pieces}
    for source in a.pieces:
        same = alike.pop((source.piece.box, source.holders), None)
        yield source.piece.box, [source], b.pieces if same is None else [same]
    held = [sum(source.piece.box.numel for source in side.pieces) for side in (a, b)]
    whole = math.prod(b.shape)
    if held[0] < whole or held[1] > whole:
        for source in alike.values():  # A lacks these, or the loop above took another copy
            yield source.piece.box, a.pieces, [source]


class _Apart:
    """How two tensors differ in the parts that were compared so far."""

    def __init__(self, tensor: _Tensor) -> None:
        self.count = 0
        self._tensor = tensor
        self._of = 0
        self._first: Shape | None = None
        self._largest: float | None = None
        self._nonfinite = 0

    def add(self, box: Box, a: bytearray, b: bytearray) -> None:
        self._of += box.numel
        if a == b:
            return
        import numpy as np

        size = DTYPES[self._tensor.dtype].itemsize
        x, y = (elements(data, 1).reshape(-1, size) for data in (a, b))
        apart = np.flatnonzero((x != y).any(axis=1))
        self.count += len(apart)
        index = np.unravel_index(int(apart[0]), box.sizes) if box.sizes else ()
        first = tuple(int(i) + offset for i, offset in zip(index, box.offsets, strict=True))
        self._first = first if self._first is None else min(self._first, first)
        if self._tensor.dtype in CODES:
            x, y = (numbers(data, self._tensor.dtype)[apart] for data in (a, b))
            if x.dtype.kind in "iu":  # exact: the difference of two numbers fits the unsigned type
                gap = (np.maximum(x, y) - np.minimum(x, y)).view(f"u{x.dtype.itemsize}")
            else:
                finite = np.isfinite(x) & np.isfinite(y)
                self._nonfinite += len(x) - int(finite.sum())
                with np.errstate(over="ignore"):
                    gap = np.abs(x[finite].astype(np.float64) - y[finite].astype(np.float64))
            if len(gap):
                self._largest = max(self._largest or 0.0, float(gap.max()))

    def difference(self, holder: str) -> Difference:
        return Difference(
            self._tensor.name, "bits", holder, "", self.count, self._of, self._first,
            self._largest, self._nonfinite,
        )  # fmt: skip
