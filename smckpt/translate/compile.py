"""From two sides of a translation to block copies, proven on shapes before any data moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from smckpt.errors import KeysMismatchError, TensorMismatchError
from smckpt.layout.mesh import Shape
from smckpt.translate.pieces import Axis, Key, Piece, Side

__all__ = ["Block", "Span", "compile_blocks"]


@dataclass(frozen=True, slots=True)
class Span:
    """`count` indices: `at`, `at + step`, … of dimension `dim` of the source, and as many of
    dimension `to_dim` of the target."""

    count: int
    dim: int
    at: int
    step: int
    to_dim: int
    to_at: int
    to_step: int


@dataclass(frozen=True, slots=True)
class Block:
    """Elements of stored tensor `source` that go, as they are, into a target; one span for each
    dimension but an expert's, of which there is one index: `index`, `to_index` of dimension 0."""

    source: Key
    spans: tuple[Span, ...]
    index: int = -1
    to_index: int = -1


def compile_blocks(source: Side, target: Side) -> dict[Key, list[Block]]:
    """Target tensor → the blocks that fill it.

    Proves that each target element is written once (but padding of the vocabulary), and that each
    source element is used once (but the same).

    Raises:
        KeysMismatchError, TensorMismatchError: the proof fails; lists what is left over.
    """
    blocks: dict[Key, list[Block]] = {key: [] for key in target.shapes}
    for role, pieces in target.pieces.items():
        for piece in pieces:
            for other in source.pieces.get(role, ()):
                block = _meet(other, piece)
                if block is not None:
                    blocks[piece.key].append(block)
    _prove_sources(source, blocks)
    for first, (how, others) in target.joined.items():
        for rank in others:  # the mean of equal ones, or the sum of one and of zeros
            blocks[rank] = blocks[first] if how == "mean" else []
            target.padding[rank] = 0 if how == "mean" else target.shapes[rank][0]
    for first, copy in target.copies:
        blocks[copy] = blocks[first]
    _prove_targets(target, blocks)
    return blocks


def _meet(source: Piece, target: Piece) -> Block | None:
    spans = []
    for a, b in zip(source.axes, target.axes, strict=True):
        span = _common(a, b)
        if span is None:
            return None
        spans.append(span)
    return Block(source.key, tuple(spans), source.index, target.index)


def _common(a: Axis, b: Axis) -> Span | None:
    """The indices of a role's dimension that both hold."""
    low = max(a.role_at, b.role_at)
    high = min(a.role_at + a.count, b.role_at + b.count)
    if high <= low:
        return None
    at, to_at = a.at + (low - a.role_at) * a.step, b.at + (low - b.role_at) * b.step
    return Span(high - low, a.dim, at, a.step, b.dim, to_at, b.step)


# -- the proof ---------------------------------------------------------------------------------


def _prove_targets(target: Side, blocks: dict[Key, list[Block]]) -> None:
    painter = _Painter()
    wrong = []
    for key, shape in target.shapes.items():
        boxes = [_target_box(block, len(shape)) for block in blocks[key]]
        bad = painter.not_once(shape, boxes, target.padding.get(target.original(key), 0))
        if bad:
            wrong.append(f"{key.name} {shape}: {bad}")
    if wrong:
        raise KeysMismatchError(
            f"{len(wrong)} tensors would not be filled exactly once: {'; '.join(wrong[:8])}",
            remedy="the source lacks parts of them, or has some twice: check layout= and config=",
        )


def _prove_sources(source: Side, blocks: dict[Key, list[Block]]) -> None:
    used: dict[Key, list[_Ranges]] = {key: [] for key in source.shapes}
    for held in blocks.values():
        for block in held:
            used[block.source].append(_source_box(block, len(source.shapes[block.source])))
    painter = _Painter()
    repeated = {other for _, other in source.copies}
    repeated.update(other for _, others in source.joined.values() for other in others)
    wrong = []
    for key, boxes in used.items():
        if key not in repeated:
            bad = painter.not_once(source.shapes[key], boxes, source.padding.get(key, 0))
            if bad:
                wrong.append(f"{key.name} {source.shapes[key]}: {bad}")
    if wrong:
        raise TensorMismatchError(
            f"{len(wrong)} tensors of the source would not be used once: {'; '.join(wrong[:8])}",
            remedy="check layout= and config=: they do not describe this source",
        )


_Ranges = tuple[tuple[int, int, int], ...]  # per dimension: first, step, count


def _target_box(block: Block, ndim: int) -> _Ranges:
    found = {span.to_dim: (span.to_at, span.to_step, span.count) for span in block.spans}
    return tuple(found.get(d, (block.to_index, 1, 1)) for d in range(ndim))


def _source_box(block: Block, ndim: int) -> _Ranges:
    found = {span.dim: (span.at, span.step, span.count) for span in block.spans}
    return tuple(found.get(d, (block.index, 1, 1)) for d in range(ndim))


class _Painter:
    """Counts how often each element is meant; layers alike are counted once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Shape, tuple[_Ranges, ...], int], str] = {}

    def not_once(self, shape: Shape, boxes: Iterable[_Ranges], padding: int) -> str:
        """What is wrong with it; "" if all of the shape but the last `padding` rows is met once."""
        key = (shape, tuple(sorted(boxes)), padding)
        if key not in self._known:
            self._known[key] = _counted(shape, key[1], padding)
        return self._known[key]


def _counted(shape: Shape, boxes: Sequence[_Ranges], padding: int) -> str:
    # A dimension that every box has whole needs one count for all of its indices.
    counted = [
        d for d, n in enumerate(shape) if padding or any(box[d] != (0, 1, n) for box in boxes)
    ]
    if not boxes:
        counted = []
    counts = np.zeros([n if d in counted else 1 for d, n in enumerate(shape)], np.int32)
    for box in boxes:
        where = tuple(
            slice(at, at + step * count, step) if d in counted else slice(None)
            for d, (at, step, count) in enumerate(box)
        )
        counts[where] += 1
        reach = [at + step * (count - 1) for at, step, count in box]
        if any(r >= n for r, n in zip(reach, shape, strict=True)):
            return "a part reaches beyond it"
    scale = math.prod(n for d, n in enumerate(shape) if d not in counted)
    if padding:
        if counts[shape[0] - padding :].any():
            return "padding is taken for vocabulary"
        counts = counts[: shape[0] - padding]
    never, often = int((counts == 0).sum()) * scale, int((counts > 1).sum()) * scale
    return f"{never} elements never, {often} more than once" if never or often else ""
