"""Targets that are made from blocks of other tensors, and the source that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smckpt.formats.tensors import Block, Holder, TensorKey, TensorReader
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Copy, Piece, Strided, boxes_of_range, row_major_strides
from smckpt.translate.cast import cast, stored_type
from smckpt.translate.files import Chunk, aligned

_AT_ONCE = 1 << 17  # elements computed at once, so that their arrays stay in the processor's cache


@dataclass(frozen=True)
class Translated:
    """A target made of blocks.

    padding: rows at its end that no block fills; they are zero. terms: blocks of other ranks that
        are added; with `mean`, the sum is divided by the number of ranks. shift: a number that is
        added to all elements. view: the shape of the blocks, if the target has another.
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


class TranslatedSource:
    """Reads ranges of `Translated` targets from a reader."""

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self.url = reader.url

    def plans_of(self, chunks: Sequence[Chunk]) -> list[Any]:
        """A plan for each chunk."""
        plans = []
        for chunk in chunks:
            parts: list[Block] = []
            padded, computed = [], []
            for number, item in enumerate(chunk.ranges):
                target = item.target
                assert isinstance(target, Translated)
                if target.padding:
                    padded.append(number)
                parts += _parts(target, target.blocks, item.start, item.stop, number)
                if target.computed:
                    terms = [
                        self.reader.plan(list(_parts(target, blocks, item.start, item.stop, 0)))
                        for blocks in target.terms
                    ]
                    computed.append((number, target, terms))
            plans.append((self.reader.plan(parts), padded, computed))
        return plans

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers of a chunk's ranges."""
        own, padded, computed = plan
        for number in padded:
            np.frombuffer(buffers[number], np.uint8)[:] = 0
        self.reader.read(own, buffers)
        for number, target, terms in computed:
            # Add the other ranks' terms and the shift in float64, rounded once per term
            buffer = buffers[number]
            values = np.frombuffer(buffer, stored_type(target.source_dtype))
            others = [aligned(len(buffer)) for _ in terms]
            for plan, other in zip(terms, others, strict=True):
                self.reader.read(plan, [other])
            for at in range(0, len(values), _AT_ONCE):
                where = slice(at, at + _AT_ONCE)
                total = cast(values[where], target.source_dtype, "float64")
                for other in others:
                    term = np.frombuffer(other, stored_type(target.source_dtype))[where]
                    total = total + cast(term, target.source_dtype, "float64")
                total = total / (len(others) + 1) if target.mean else total
                values[where] = cast(total + target.shift, "float64", target.source_dtype)

    def close(self) -> None:
        self.reader.close()


def _parts(
    target: Translated, blocks: Sequence[Block], start: int, stop: int, buffer: int
) -> Iterator[Block]:
    """The blocks to read for elements [start, stop) of a target, into buffer number `buffer`."""
    shape = target.view or target.shape
    there = [
        block for block in blocks
        if block.copy.target.start < stop
        and start < block.copy.target.start + block.copy.target.extent
    ]  # fmt: skip
    done = 0
    for box in boxes_of_range(shape, start, stop):
        room = Piece(target.name, shape, box, done, row_major_strides(box.sizes))
        for block in there:
            copy = block.copy.written_to(room)
            if copy is not None:
                yield Block(block.source, copy, buffer, block.sample)
        done += box.numel


def whole_tensors(reader: Holder) -> list[Translated]:
    """The tensors that a reader holds once, unchanged."""
    return [
        whole(TensorKey(name), held.whole, held.dtype)
        if held.whole is not None
        else whole(TensorKey(name, 0, 0), held.shards[0, 0], held.dtype)
        for name, held in reader.held.items()
    ]


def whole(key: TensorKey, shape: Shape, dtype: str, *, sample: bool = False) -> Translated:
    """A target that is one stored tensor, for comparison with another. sample: as of `Block`."""
    all_of_it = Strided.whole(shape)
    block = Block(key, Copy(all_of_it, all_of_it), sample=sample)
    return Translated(key.name, dtype, shape, dtype, (block,))
