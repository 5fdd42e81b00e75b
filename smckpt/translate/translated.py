"""Targets that are made of blocks of other tensors, and the source that reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.geometry import Box, Shape, boxes_of_range, row_major_strides
from smckpt.translate.compile import Block, Span
from smckpt.translate.files import aligned
from smckpt.translate.pieces import Key
from smckpt.translate.stores import Part, Store
from smckpt.translate.targets import Chunk, Range

__all__ = ["Translated", "TranslatedSource", "whole"]


@dataclass(frozen=True)
class Translated:
    """A target made of blocks. `padding`: rows at its end that no block fills; they are zero."""

    name: str
    dtype: str
    shape: Shape
    source_dtype: str
    blocks: tuple[Block, ...]
    padding: int = 0

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
        own, padded = plan
        for number in padded:
            np.frombuffer(buffers[number], np.uint8)[:] = 0
        self.store.read(own, buffers)

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

    def _plan(self, ranges: Sequence[Range]) -> tuple[Any, tuple[int, ...]]:
        parts: list[Part] = []
        padded = []
        for number, item in enumerate(ranges):
            target = item.target
            assert isinstance(target, Translated)
            if target.padding:
                padded.append(number)
            parts += _parts(target, item.start, item.stop, number)
        return self.store.plan(parts), tuple(padded)


def _parts(target: Translated, start: int, stop: int, buffer: int) -> Iterator[Part]:
    """What to read for elements [start, stop) of a target, into buffer number `buffer`."""
    done = 0
    for box in boxes_of_range(target.shape, start, stop):
        strides = row_major_strides(box.sizes)
        for block in target.blocks:
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
