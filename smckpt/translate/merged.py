"""An adapter merged into its base as it streams: weight + scaling · B·A, range by range.

Computed in float32 and rounded once, to the dtype that is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from smckpt.checkpoint.catalogue import LogicalTensor
from smckpt.errors import KeysMismatchError, TensorMismatchError
from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.mesh import Shape
from smckpt.translate.cast import CASTABLE, cast, stored_type
from smckpt.translate.files import aligned
from smckpt.translate.lora import LoraConfig, Parts
from smckpt.translate.pieces import Key
from smckpt.translate.source import Source
from smckpt.translate.stores import open_directory
from smckpt.translate.targets import Chunk, Range, Same
from smckpt.translate.translated import Translated, TranslatedSource
from smckpt.translate.translated import whole as whole_of

__all__ = ["Merged", "MergedSource", "merged_targets", "open_base"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_AT_ONCE = 1 << 18  # elements of the product made at once


@dataclass(frozen=True)
class Merged:
    """A weight with its LoRA pair. `flip`: the product is transposed (embeddings, Conv1D)."""

    name: str
    dtype: str
    base: Same | Translated
    a: Same
    b: Same
    scaling: float
    flip: bool

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def source_dtype(self) -> str:
        return "float64" if self.base.dtype == "float64" else "float32"

    def entry(self, start: int, stop: int) -> Entry:
        raise NotImplementedError("a merged tensor is read by its parts")


class MergedSource:
    """Reads merged targets, and others as they are: from a checkpoint, or from a directory."""

    def __init__(self, checkpoint: Source, directory: TranslatedSource | None) -> None:
        self.url = checkpoint.url
        self._checkpoint = checkpoint
        self._directory = directory
        self._pairs: dict[str, Any] = {}

    def plans_of(self, chunks: Sequence[Chunk]) -> list[Any]:
        """For each chunk its ranges, and a plan for those of each source."""
        found: list[dict[bool, list[int]]] = []
        for chunk in chunks:
            numbers: dict[bool, list[int]] = {True: [], False: []}
            for number, item in enumerate(chunk.ranges):
                target = item.target
                if isinstance(target, Merged) and target.name not in self._pairs:
                    pair = [[_all(target.a), _all(target.b)]]
                    (self._pairs[target.name],) = self._checkpoint.plans(pair)
                numbers[isinstance(_base(item), Translated)].append(number)
            found.append(numbers)
        plans: dict[bool, Sequence[Any]] = {}
        for far, source in ((False, self._checkpoint), (True, self._directory)):
            if source is not None:
                plans[far] = source.plans_of([
                    Chunk(0, 0, tuple(_of_base(chunk.ranges[n]) for n in numbers[far]))
                    for chunk, numbers in zip(chunks, found, strict=True)
                ])  # fmt: skip
        return [
            (chunk, [(far, numbers[far], plans[far][i]) for far in plans if numbers[far]])
            for i, (chunk, numbers) in enumerate(zip(chunks, found, strict=True))
        ]

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        chunk, parts = plan
        for far, numbers, own in parts:
            views = [self._view(chunk.ranges[n], buffers[n]) for n in numbers]
            source = self._directory if far else self._checkpoint
            assert source is not None
            source.read(own, views)
            for number, view in zip(numbers, views, strict=True):
                item = chunk.ranges[number]
                if isinstance(item.target, Merged):
                    self._merge(item.target, item.start, item.stop, view, buffers[number])

    def close(self) -> None:
        self._checkpoint.close()
        if self._directory is not None:
            self._directory.close()

    @staticmethod
    def _view(item: Range, buffer: memoryview) -> memoryview:
        """Where the base is read to: memory of its own, unless it is taken as it is."""
        if not isinstance(item.target, Merged):
            return buffer
        return aligned((item.stop - item.start) * DTYPES[item.target.base.dtype].itemsize)

    def _merge(
        self, target: Merged, start: int, stop: int, base: memoryview, out: memoryview
    ) -> None:
        wide = target.source_dtype
        left, right = self._pair(target)
        columns = target.shape[1]
        values = np.frombuffer(base, stored_type(target.base.dtype))
        result = np.frombuffer(out, stored_type(wide))
        step = max(1, _AT_ONCE // columns)
        for row in range(start // columns, -(-stop // columns), step):
            last = min(row + step, -(-stop // columns))
            low, high = max(start, row * columns), min(stop, last * columns)
            product = (left[row:last] @ right).reshape(-1)
            product = product[low - row * columns : high - row * columns]
            where = slice(low - start, high - start)
            result[where] = cast(values[where], target.base.dtype, wide) + target.scaling * product

    def _pair(self, target: Merged) -> tuple[Array, Array]:
        """What is multiplied, rows of the weight first."""
        a, b = aligned(_nbytes(target.a)), aligned(_nbytes(target.b))
        self._checkpoint.read(self._pairs[target.name], [a, b])
        wide = np.dtype(target.source_dtype)
        left, right = (
            np.asarray(
                cast(np.frombuffer(data, stored_type(t.dtype)), t.dtype, target.source_dtype), wide
            ).reshape(t.shape)
            for data, t in ((b, target.b), (a, target.a))
        )
        return (right.T, left.T) if target.flip else (left, right)


def merged_targets(
    parts: Parts[LogicalTensor], config: LoraConfig, directory: TranslatedSource | None, url: str
) -> list[Merged | Same | Translated]:
    """The model's tensors, in their dtypes: the base's, those with a pair, those saved whole.

    Raises:
        UsageError, KeysMismatchError, TensorMismatchError: the base is not there, or not this
            adapter's; the adapter is of a kind that is not merged.
    """
    config.refuse_unmerged(url)
    base: dict[str, Same | Translated] = {name: _same(name, t) for name, t in parts.base.items()}
    if directory is not None:
        base = dict(_stored(directory))
        base |= {name: _same(name, t) for name, t in parts.saved.items()}
    lost = [m for m in parts.pairs if f"{m}.weight" not in base]
    if lost:
        raise KeysMismatchError(
            f"the weights that the adapter adds to are not there: {lost[:8]}",
            remedy="pass base= the Hugging Face directory of the base model",
            path=url,
        )
    pairs = {f"{module}.weight": module for module in parts.pairs}
    out: list[Merged | Same | Translated] = []
    for name, stored in base.items():
        if name not in pairs:
            out.append(stored)
            continue
        module = pairs[name]
        a, b = (_same(f"{module}.{side}", parts.pairs[module][side]) for side in "AB")
        flip = module in parts.embeddings or config.transposed
        made = Merged(name, stored.dtype, stored, a, b, config.scaling(module), flip)
        _check(made, url)
        out.append(made)
    return out


def open_base(directory: str | os.PathLike[str], config: LoraConfig) -> TranslatedSource:
    """The base's weights in a Hugging Face directory."""
    config.refuse_biases(os.fspath(directory))
    return TranslatedSource(open_directory(Path(os.fspath(directory))))


def _check(made: Merged, url: str) -> None:
    product = (made.b.shape[0], *made.a.shape[1:])
    product = product[::-1] if made.flip else product
    if len(made.a.shape) != 2 or product != made.shape:
        raise TensorMismatchError(
            f"{made.name} has the shape {made.shape}, and what the adapter adds {product}",
            remedy="pass the base that the adapter was trained on, and its own lora_config=",
            path=url,
        )
    strange = {made.base.dtype, made.a.dtype, made.b.dtype} - CASTABLE.keys()
    if strange:
        raise TensorMismatchError(
            f"{made.name} or what is added to it has dtype {', '.join(sorted(strange))}",
            remedy='export it with lora="adapter"; a quantized base is not merged',
            path=url,
        )


def _stored(directory: TranslatedSource) -> dict[str, Translated]:
    return {
        name: whole_of(Key(name, 0, 0), held.shards[0, 0], held.dtype)
        for name, held in directory.store.held.items()
    }


def _same(name: str, tensor: LogicalTensor) -> Same:
    return Same(name, tensor.dtype, tuple(tensor.shape), tensor.name, tensor.dtype)


def _all(tensor: Same) -> Entry:
    return tensor.entry(0, _numel(tensor))


def _base(item: Range) -> Any:
    return item.target.base if isinstance(item.target, Merged) else item.target


def _of_base(item: Range) -> Range:
    return Range(_base(item), item.start, item.stop, 0)


def _numel(tensor: Same) -> int:
    return int(np.prod(tensor.shape))


def _nbytes(tensor: Same) -> int:
    return _numel(tensor) * DTYPES[tensor.dtype].itemsize
