"""Targets that are made of blocks of other tensors, and the source that reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.geometry import Box, boxes_of_range, row_major_strides
from smckpt.layout.mesh import Shape
from smckpt.translate.cast import cast, stored_type
from smckpt.translate.compile import Block, Span
from smckpt.translate.files import aligned
from smckpt.translate.pieces import Key
from smckpt.translate.stores import Part, Store
from smckpt.translate.targets import Chunk, Range

__all__ = ["Translated", "TranslatedSource", "whole"]

_AT_ONCE = 1 << 17  # elements computed at once: their arrays stay in the processor's cache


@dataclass(frozen=True)
class Translated:
    """A target made of blocks.

    padding: rows at its end that no block fills; they are zero. terms: blocks of other ranks that
    are added; with `mean`, the sum is divided by their number and one. shift: added to all. view:
    the shape that the blocks are of, where the target says it has another.
    """

    name: str
    dtype: str
    shape: Shape
    source_dtype: str
    blocks: tuple[Block, ...]
    padding: int = 0
    terms: tuple[tuple[Block, ...], ...] = ()
    mean: bool = False
    shift: float = 0.0
    view: Shape | None = None

    @property
    def computed(self) -> bool:
        return bool(self.terms or self.shift)

    def entry(self, start: int, stop: int) -> Entry:
        raise NotImplementedError("a translated tensor is read by its blocks")


class TranslatedSource:
    """Reads ranges of `Translated` targets out of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url

    def plans_of(self, chunks: Sequence[Chunk]) -> list[Any]:
        """A plan for each chunk."""
        return [self._plan(chunk.ranges) for chunk in chunks]

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers of a chunk's ranges."""
        own, padded, computed = plan
        for number in padded:
            np.frombuffer(buffers[number], np.uint8)[:] = 0
        self.store.read(own, buffers)
        for number, target, terms in computed:
            self._compute(target, terms, buffers[number])

    def _compute(self, target: Translated, terms: Sequence[Any], buffer: memoryview) -> None:
        """Add the other ranks' and the shift, exactly in float64, rounded once a term."""
        values = np.frombuffer(buffer, stored_type(target.source_dtype))
        others = [aligned(len(buffer)) for _ in terms]
        for plan, other in zip(terms, others, strict=True):
            self.store.read(plan, [other])
        for at in range(0, len(values), _AT_ONCE):
            where = slice(at, at + _AT_ONCE)
            total = cast(values[where], target.source_dtype, "float64")
            for other in others:
                term = np.frombuffer(other, stored_type(target.source_dtype))[where]
                total = total + cast(term, target.source_dtype, "float64")
            total = total / (len(others) + 1) if target.mean else total
            values[where] = cast(total + target.shift, "float64", target.source_dtype)

    def close(self) -> None:
        self.store.close()

    def equal(self, a: Translated, b: Translated, length: int) -> bool:
        """Whether two targets are bitwise equal; at most 2 × `length` bytes are held."""
        if (a.source_dtype, a.shape) != (b.source_dtype, b.shape):
            return False
        itemsize = DTYPES[a.source_dtype].itemsize
        numel, step = math.prod(a.shape), max(1, length // itemsize)
        left, right = aligned(step * itemsize), aligned(step * itemsize)
        for start in range(0, numel, step):
            stop = min(numel, start + step)
            views = [memory[: (stop - start) * itemsize] for memory in (left, right)]
            self.read(self._plan([Range(t, start, stop, 0) for t in (a, b)]), views)
            if not np.array_equal(np.frombuffer(views[0], "u1"), np.frombuffer(views[1], "u1")):
                return False
        return True

    def _plan(self, ranges: Sequence[Range]) -> tuple[Any, tuple[int, ...], tuple[Any, ...]]:
        parts: list[Part] = []
        padded, computed = [], []
        for number, item in enumerate(ranges):
            target = item.target
            assert isinstance(target, Translated)
            if target.padding:
                padded.append(number)
            parts += _parts(target, target.blocks, item.start, item.stop, number)
            if target.computed:
                terms = [
                    self.store.plan(list(_parts(target, blocks, item.start, item.stop, 0)))
                    for blocks in target.terms
                ]
                computed.append((number, target, terms))
        return self.store.plan(parts), tuple(padded), tuple(computed)


def _parts(
    target: Translated, blocks: Sequence[Block], start: int, stop: int, buffer: int
) -> Iterator[Part]:
    """What to read for elements [start, stop) of a target, into buffer number `buffer`."""
    done = 0
    for box in boxes_of_range(target.view or target.shape, start, stop):
        strides = row_major_strides(box.sizes)
        for block in blocks:
            part = _part(block, box, done, strides, buffer)
            if part is not None:
                yield part
        done += box.numel


def _part(block: Block, box: Box, done: int, strides: Shape, buffer: int) -> Part | None:
    """What of a block lies in a box of the target, which is at element `done` of the buffer."""
    start = done
    if block.to_index >= 0:
        inside = block.to_index - box.offsets[0]
        if not 0 <= inside < box.sizes[0]:
            return None
        start += inside * strides[0]
    sizes, dims, ats, steps, places = [], [], [], [], []
    for span in block.spans:
        low = box.offsets[span.to_dim]
        high = low + box.sizes[span.to_dim]
        first = max(0, -((span.to_at - low) // span.to_step))
        last = min(span.count, -((span.to_at - high) // span.to_step))
        if last <= first:
            return None
        sizes.append(last - first)
        dims.append(span.dim)
        ats.append(span.at + first * span.step)
        steps.append(span.step)
        start += (span.to_at + first * span.to_step - low) * strides[span.to_dim]
        places.append(span.to_step * strides[span.to_dim])
    return Part(
        block.source, tuple(sizes), tuple(dims), tuple(ats), tuple(steps), block.index,
        buffer, start, tuple(places),
    )  # fmt: skip


def whole(key: Key, shape: Shape, dtype: str) -> Translated:
    """A stored tensor as it is: to compare it with another."""
    spans = tuple(Span(n, d, 0, 1, d, 0, 1) for d, n in enumerate(shape))
    return Translated(key.name, dtype, shape, dtype, (Block(key, spans),))
