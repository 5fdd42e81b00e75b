"""A tensor with a LoRA pair added during the export: weight + scaling · B·A, range by range.

The arithmetic is that of PEFT, which loads an adapter in float32: the product and the sum are
computed in float32. The sum is rounded once, to the dtype that is written. For embeddings and for
parameters of experts, PEFT rounds the product to the base's dtype first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box
from smckpt.translate.cast import cast, stored_type
from smckpt.translate.files import aligned
from smckpt.translate.rank_files import TensorReader
from smckpt.translate.stream import CHUNK
from smckpt.translate.targets import Chunk, Range, Target
from smckpt.translate.translated import Translated, TranslatedSource

__all__ = ["Change", "Merged", "MergedSource"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_AT_ONCE = 1 << 18  # elements of the product that are computed at once
_KEPT = 4  # pairs of matrices that stay in memory, because several ranges or experts use them


@dataclass(frozen=True)
class Change:
    """What an adapter adds to a weight of the model.

    name: the weight's, in memory. shape: (experts, rows, columns); (1, rows, columns) of a weight
    without experts. flip: the product is transposed (embeddings, Conv1D). rounded: the product is
    rounded to the base's dtype. magnitude: DoRA's length of each row of the sum; of each column
    with `flip`.
    """

    name: str
    shape: Shape
    a: Translated
    b: Translated
    scaling: float
    flip: bool
    rounded: bool
    magnitude: Translated | None = None

    @property
    def dtype(self) -> str:
        """In which it is computed."""
        return "float64" if self.b.dtype == "float64" else "float32"

    @property
    def adapted(self) -> tuple[Translated, ...]:
        """What the adapter has for the weight: A, B and DoRA's vector if there is one."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    @property
    def of_columns(self) -> bool:
        """Whether DoRA needs the lengths of columns, so the whole weight."""
        return self.flip and self.magnitude is not None


@dataclass(frozen=True)
class Merged:
    """A tensor with a change. box: the part of the changed weight that the tensor is. turned: its
    rows are the weight's columns."""

    name: str
    dtype: str
    base: Translated
    change: Change
    box: Box
    turned: bool = False

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def source_dtype(self) -> str:
        wide = "float64" in (self.base.dtype, self.change.dtype)
        return "float64" if wide else "float32"


class MergedSource:
    """Reads merged targets, and other targets unchanged."""

    def __init__(self, reader: TensorReader) -> None:
        self.url = reader.url
        self._parts = TranslatedSource(reader)
        self._plans: dict[str, Any] = {}
        self._bases: dict[str, list[tuple[Range, Any]]] = {}
        self._lock = threading.Lock()
        self._pairs: dict[str, tuple[Array, ...]] = {}
        self._lengths: dict[str, Array] = {}

    def plans_of(self, chunks: Sequence[Chunk]) -> list[Any]:
        """For each chunk: the chunk, and a plan for the weights that it reads."""
        for target in (item.target for chunk in chunks for item in chunk.ranges):
            if isinstance(target, Merged) and target.change.name not in self._plans:
                self._plan(target)
        plain = [replace(c, ranges=tuple(map(_of_base, c.ranges))) for c in chunks]
        return list(zip(chunks, self._parts.plans_of(plain), strict=True))

    def _plan(self, target: Merged) -> None:
        """Plan to read a change's matrices, and if columns' lengths are needed, the whole base."""
        change, base = target.change, target.base
        pair = tuple(Range(t, 0, math.prod(t.shape), 0) for t in change.adapted)
        (self._plans[change.name],) = self._parts.plans_of([Chunk(0, 0, pair)])
        if change.of_columns:
            rows, columns = base.shape
            step = max(1, CHUNK // DTYPES[base.dtype].itemsize // columns)
            ranges = [
                Range(base, at * columns, min(at + step, rows) * columns, 0)
                for at in range(0, rows, step)
            ]
            plans = self._parts.plans_of([Chunk(0, 0, (item,)) for item in ranges])
            self._bases[change.name] = list(zip(ranges, plans, strict=True))

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        chunk, own = plan
        views = [self._view(item, data) for item, data in zip(chunk.ranges, buffers, strict=True)]
        self._parts.read(own, views)
        for item, view, buffer in zip(chunk.ranges, views, buffers, strict=True):
            if isinstance(item.target, Merged):
                self._merge(item.target, item.start, item.stop, view, buffer)

    def close(self) -> None:
        self._parts.close()

    @staticmethod
    def _view(item: Range, buffer: memoryview) -> memoryview:
        """The memory for the base: a buffer of its own, unless the base is used unchanged."""
        if not isinstance(item.target, Merged):
            return buffer
        own = _of_base(item)
        return aligned((own.stop - own.start) * DTYPES[item.target.base.dtype].itemsize)

    def _merge(
        self, target: Merged, start: int, stop: int, base: memoryview, out: memoryview
    ) -> None:
        """Compute elements [start, stop) of a target, some rows at a time."""
        wide, change = target.source_dtype, target.change
        left, right, *more = self._pair(change)
        lengths = self._column_lengths(target) if change.of_columns else None
        first, at, left_at = target.box.offsets
        _, height, columns = target.box.sizes
        if target.turned:
            left, right = right.transpose(0, 2, 1), left.transpose(0, 2, 1)
            at, left_at, height, columns = left_at, at, columns, height
        values = np.frombuffer(base, stored_type(target.base.dtype))
        skipped = _of_base(Range(target, start, stop, 0)).start
        result = np.frombuffer(out, stored_type(wide))
        row, end = start // columns, -(-stop // columns)
        while row < end:
            expert, inside = divmod(row, height)
            last = min(row + max(1, _AT_ONCE // columns), end, (expert + 1) * height)
            low, high = max(start, row * columns), min(stop, last * columns)
            here = slice(at + inside, at + inside + last - row)
            matrix = right[first + expert][:, left_at : left_at + columns]
            product = change.scaling * (left[first + expert][here] @ matrix).reshape(-1)
            whole_rows = change.magnitude is not None and lengths is None
            begin, until = (row * columns, last * columns) if whole_rows else (low, high)
            product = product[begin - row * columns : until - row * columns]
            if change.rounded:
                rounded = cast(product, change.dtype, target.base.dtype)
                product = cast(rounded, target.base.dtype, wide)
            stored = values[begin - skipped : until - skipped]
            total = cast(stored, target.base.dtype, wide) + product
            if lengths is not None:
                total *= (more[0] / lengths)[np.arange(begin, until) % columns]
            elif change.magnitude is not None:
                rows = total.reshape(-1, columns)
                rows *= (more[0][here] / _lengths(rows, 1))[:, None]
            result[low - start : high - start] = total[low - begin : high - begin]
            row = last

    def _pair(self, change: Change) -> tuple[Array, ...]:
        """The two matrices to multiply, for each expert, and DoRA's vector if there is one. The
        first matrix has the weight's rows."""
        with self._lock:
            found = self._pairs.get(change.name)
        if found is not None:
            return found
        memory = [aligned(_nbytes(t)) for t in change.adapted]
        self._parts.read(self._plans[change.name], memory)
        matrices: list[Array] = [
            cast(np.frombuffer(data, stored_type(t.dtype)), t.dtype, change.dtype).reshape(t.shape)
            for data, t in zip(memory, change.adapted, strict=True)
        ]
        a, b, *more = matrices
        experts = change.shape[0]
        a = a.reshape(experts, -1, a.shape[1])  # an expert's rows of A lie together,
        b = b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)  # its columns of B do not
        if change.flip:
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        made = (np.ascontiguousarray(b), np.ascontiguousarray(a), *more)
        with self._lock:
            self._pairs[change.name] = made
            while len(self._pairs) > _KEPT:
                del self._pairs[next(iter(self._pairs))]
        return made

    def _column_lengths(self, target: Merged) -> Array:
        """The lengths of all columns of the sum, from one more pass over the base."""
        change, wide = target.change, target.source_dtype
        with self._lock:
            found = self._lengths.get(change.name)
        if found is not None:
            return found
        left, right, *_ = self._pair(change)
        columns = change.shape[-1]
        squares = np.zeros(columns)
        for item, plan in self._bases[change.name]:
            memory = aligned(item.nbytes)
            self._parts.read(plan, [memory])
            values = np.frombuffer(memory, stored_type(target.base.dtype)).reshape(-1, columns)
            first = item.start // columns
            step = max(1, _AT_ONCE // columns)
            for at in range(0, len(values), step):
                rows = values[at : at + step]
                product = change.scaling * (left[0][first + at : first + at + len(rows)] @ right[0])
                total = cast(rows.reshape(-1), target.base.dtype, wide).reshape(rows.shape)
                squares += np.square(total + product, dtype=np.float64).sum(0)
        made: Array = np.sqrt(squares).astype(wide)
        with self._lock:
            self._lengths[change.name] = made
        return made


def _lengths(values: Array, axis: int) -> Array:
    """Euclidean lengths, rounded once."""
    found: Array = np.sqrt(np.square(values, dtype=np.float64).sum(axis))
    return found.astype(values.dtype)


def _of_base(item: Range) -> Range:
    """The base's elements for a range: whole rows where their lengths are needed."""
    target: Target = item.target.base if isinstance(item.target, Merged) else item.target
    start, stop = item.start, item.stop
    if isinstance(item.target, Merged) and _by_rows(item.target.change):
        columns = target.shape[1]
        start, stop = start // columns * columns, -(-stop // columns) * columns
    return Range(target, start, stop, 0)


def _by_rows(change: Change) -> bool:
    return change.magnitude is not None and not change.flip


def _nbytes(tensor: Translated) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
