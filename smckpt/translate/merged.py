"""Exports an adapter, or merges it into its base during the export: weight + scaling · B·A, range
by range.

The sum is computed in float32 and rounded once, to the dtype that is written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from smckpt.checkpoint.catalogue import open_catalogue
from smckpt.errors import KeysMismatchError, TensorMismatchError, UsageError
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.storage import Access
from smckpt.translate.arguments import refuse_given
from smckpt.translate.cast import CASTABLE, cast, stored_type
from smckpt.translate.comparison import Comparison
from smckpt.translate.compile import Block
from smckpt.translate.config import ModelConfig
from smckpt.translate.contents import HUB, MODULE, ExportContents, head_notes, whole_tensors
from smckpt.translate.detect import looks_packed, looks_transformed
from smckpt.translate.files import aligned
from smckpt.translate.logical_tensors import LogicalTensors
from smckpt.translate.lora import LoraConfig, PeftTensors, read_lora_config, sort
from smckpt.translate.names import HubTensor, model_tensors
from smckpt.translate.pieces import RankTensors, TensorKey
from smckpt.translate.quantized import dequantized
from smckpt.translate.rank_files import TensorReader, open_directory
from smckpt.translate.stream import tied_names
from smckpt.translate.targets import Chunk, Range, Target
from smckpt.translate.translated import Translated, TranslatedSource
from smckpt.translate.translated import whole as whole_of

__all__ = ["Merged", "MergedSource", "find_peft_contents"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_AT_ONCE = 1 << 18  # elements of the product that are computed at once


def find_peft_contents(
    access: Access, checkpoint: Any, prefix: str | None, settings: ModelConfig | None, lora: str,
    lora_config: Any, base: str | os.PathLike[str] | None, naming: str, comparison: Comparison,
    name: str | None = None,
) -> ExportContents:  # fmt: skip
    """The adapter in a checkpoint of a PEFT model, or the base with the adapter merged into it.

    Raises:
        as `export_hf`.
    """
    if lora not in ("adapter", "merge"):
        raise UsageError(f"lora={lora!r}", remedy='pass "adapter" or "merge"')
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise UsageError("lora= is for checkpoints, not for files of ranks", remedy="leave it out")
    adapter = read_lora_config(lora_config, name)
    catalogue = open_catalogue(access.open(checkpoint))
    found = model_tensors(catalogue, prefix, peft=True)
    reader = LogicalTensors(catalogue, found)
    tensors = {target.name: target for target in whole_tensors(reader)}
    parts = sort(tensors, catalogue.url, name)
    adapter.check(parts.pairs, catalogue.url)
    adapter.check_magnitudes(parts.pairs, parts.magnitudes, catalogue.url)
    if lora == "adapter":
        refuse_given('with lora="adapter"', base=base, config=settings)
        adapter.refuse_biases(catalogue.url)
        own = [replace(tensor, name=name) for name, tensor in parts.adapter.items()]
        source = TranslatedSource(reader)
        return ExportContents(
            source, own, naming=MODULE, adapter=adapter, identity=catalogue.identity
        )
    directory = _open_base(base, adapter, settings) if base is not None else None
    family = settings.values["model_type"] if settings is not None else None
    if directory is None and (looks_transformed(parts.base) or looks_packed(parts.base, family)):
        raise UsageError(
            "the base's names are not those that Hugging Face has on disk",
            remedy="pass base= the Hugging Face directory of the base model",
            path=catalogue.url,
        )
    made = _merged_targets(parts, adapter, directory, catalogue.url)
    merged = MergedSource(reader if directory is None else _Both(reader, directory))
    notes = head_notes([t.name for t in made], settings)
    if naming == HUB:
        made, naming, more = _named(made, settings, comparison, catalogue.url)
        notes = (*notes, *more)
    tied: tuple[str, ...] = ()
    if directory is None:
        if settings is not None and settings.ties_embeddings:
            plain = [t.base if isinstance(t, Merged) else t for t in made]
            tied = tied_names(TranslatedSource(reader), plain, catalogue.url)
        adapter.refuse_tied(tied, parts.pairs, catalogue.url)
    targets = [target for target in made if target.name not in tied]
    return ExportContents(merged, targets, tied, notes, naming, identity=catalogue.identity)


def _named(
    targets: list[Merged | Translated], settings: ModelConfig | None, comparison: Comparison,
    where: str,
) -> tuple[list[Merged | Translated], str, tuple[str, ...]]:  # fmt: skip
    """The targets by the names of released models, if only the names differ."""
    found = comparison.names(targets, where)
    if isinstance(found, str):
        note = f"the names are those of the state dict: {found}"
        return targets, MODULE, (note,) if settings is not None else ()
    if found is None or found.hub is None:
        return targets, HUB, ()
    named = {tensor.parts[0][0]: tensor.name for tensor in found.hub if _is_renamed(tensor)}
    others = [target.name for target in targets if target.name not in named]
    if others:
        raise UsageError(
            f"released models of this family hold {others[:4]} in other tensors, which are not "
            "merged with an adapter",
            remedy="pass naming='module', which transformers 5 loads, or base=",
            path=where,
        )
    return [_with_name(target, named[target.name]) for target in targets], HUB, ()


def _is_renamed(tensor: HubTensor) -> bool:
    (_, copy), *others = tensor.parts
    return not others and copy.source == copy.target and copy.numel == math.prod(tensor.shape)


def _with_name(target: Merged | Translated, name: str) -> Merged | Translated:
    if isinstance(target, Merged):
        return replace(target, name=name, base=replace(target.base, name=name))
    return replace(target, name=name)


@dataclass(frozen=True)
class Merged:
    """A weight with its LoRA pair. `flip`: the product is transposed (embeddings, Conv1D).
    `magnitude`: DoRA's length of each row of the sum."""

    name: str
    dtype: str
    base: Translated
    a: Translated
    b: Translated
    scaling: float
    flip: bool
    magnitude: Translated | None = None

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def source_dtype(self) -> str:
        return "float64" if self.base.dtype == "float64" else "float32"


class _Both:
    """One reader for a checkpoint's tensors, which are whole, and for a directory's."""

    def __init__(self, checkpoint: LogicalTensors, directory: TensorReader) -> None:
        self.url = checkpoint.url
        self.held: Mapping[str, RankTensors] = {**directory.held, **checkpoint.held}
        self._checkpoint = checkpoint
        self._directory = directory

    def plan(self, blocks: Sequence[Block]) -> Any:
        own = [block for block in blocks if block.source.tp < 0]
        others = [block for block in blocks if block.source.tp >= 0]
        return self._checkpoint.plan(own), self._directory.plan(others)

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        self._checkpoint.read(plan[0], buffers)
        self._directory.read(plan[1], buffers)

    def close(self) -> None:
        self._checkpoint.close()
        self._directory.close()


class MergedSource:
    """Reads merged targets, and other targets unchanged."""

    def __init__(self, reader: TensorReader) -> None:
        self.url = reader.url
        self._parts = TranslatedSource(reader)
        self._pairs: dict[str, Any] = {}

    def plans_of(self, chunks: Sequence[Chunk]) -> list[Any]:
        """For each chunk: the chunk, and a plan for the weights that it reads."""
        for target in (item.target for chunk in chunks for item in chunk.ranges):
            if isinstance(target, Merged) and target.name not in self._pairs:
                pair = tuple(Range(t, 0, math.prod(t.shape), 0) for t in _adapted(target))
                (self._pairs[target.name],) = self._parts.plans_of([Chunk(0, 0, pair)])
        plain = [replace(c, ranges=tuple(map(_of_base, c.ranges))) for c in chunks]
        return list(zip(chunks, self._parts.plans_of(plain), strict=True))

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
        wide = target.source_dtype
        left, right, *lengths = self._pair(target)
        columns = target.shape[1]
        values = np.frombuffer(base, stored_type(target.base.dtype))
        first = _of_base(Range(target, start, stop, 0)).start
        result = np.frombuffer(out, stored_type(wide))
        step = max(1, _AT_ONCE // columns)
        for row in range(start // columns, -(-stop // columns), step):
            last = min(row + step, -(-stop // columns))
            low, high = max(start, row * columns), min(stop, last * columns)
            product = (left[row:last] @ right).reshape(-1)
            begin, end = (row * columns, last * columns) if lengths else (low, high)
            product = product[begin - row * columns : end - row * columns]
            stored = values[begin - first : end - first]
            total = cast(stored, target.base.dtype, wide) + target.scaling * product
            if lengths:
                rows = total.reshape(-1, columns)
                norms = np.linalg.norm(rows, axis=1)
                rows *= (lengths[0][row:last] / norms)[:, None]
            result[low - start : high - start] = total[low - begin : high - begin]

    def _pair(self, target: Merged) -> tuple[Array, ...]:
        """The two matrices to multiply, and DoRA's vector if there is one. The first matrix has the
        weight's rows."""
        parts = _adapted(target)
        memory = [aligned(_nbytes(t)) for t in parts]
        self._parts.read(self._pairs[target.name], memory)
        wide = np.dtype(target.source_dtype)
        a, b, *more = (
            np.asarray(
                cast(np.frombuffer(data, stored_type(t.dtype)), t.dtype, target.source_dtype), wide
            ).reshape(t.shape)
            for data, t in zip(memory, parts, strict=True)
        )
        return (a.T, b.T, *more) if target.flip else (b, a, *more)


def _adapted(target: Merged) -> tuple[Translated, ...]:
    """What the adapter has for a weight: A, B and DoRA's vector if there is one."""
    more = () if target.magnitude is None else (target.magnitude,)
    return (target.a, target.b, *more)


def _merged_targets(
    parts: PeftTensors[Translated], config: LoraConfig, directory: TensorReader | None, url: str
) -> list[Merged | Translated]:
    """The model's tensors in their dtypes: those of the base, those with a LoRA pair, those saved
    whole.

    Raises:
        UsageError, KeysMismatchError, TensorMismatchError: the base is missing or does not fit this
            adapter, or the adapter is of a kind that is not merged.
    """
    config.refuse_unmerged(url)
    base = parts.base
    if directory is not None:
        base = {
            name: whole_of(TensorKey(name, 0, 0), held.shards[0, 0], held.dtype)
            for name, held in directory.held.items()
        }
        base |= parts.saved
    lost = [m for m in parts.pairs if f"{m}.weight" not in base]
    if lost:
        raise KeysMismatchError(
            f"the base weights that the adapter changes are missing: {lost[:8]}",
            remedy="pass base= the Hugging Face directory of the base model",
            path=url,
        )
    pairs = {f"{module}.weight": module for module in parts.pairs}
    out: list[Merged | Translated] = []
    for name, stored in base.items():
        stored = replace(stored, name=name)
        if name not in pairs:
            out.append(stored)
            continue
        module = pairs[name]
        a, b = (parts.pairs[module][side] for side in "AB")
        flip = module in parts.embeddings or config.transposed
        made = Merged(
            name, stored.dtype, stored, a, b, config.scaling(module), flip,
            parts.magnitudes.get(module),
        )  # fmt: skip
        _check(made, url)
        out.append(made)
    return out


def _open_base(
    directory: str | os.PathLike[str], config: LoraConfig, settings: ModelConfig | None
) -> TensorReader:
    """The base's weights in a Hugging Face directory; those that are quantized become numbers."""
    config.refuse_biases(os.fspath(directory))
    return dequantized(open_directory(Path(os.fspath(directory))), settings)


def _check(made: Merged, url: str) -> None:
    product = (made.b.shape[0], *made.a.shape[1:])
    product = product[::-1] if made.flip else product
    if len(made.a.shape) != 2 or product != made.shape:
        raise TensorMismatchError(
            f"{made.name} has the shape {made.shape}, but the adapter's product has {product}",
            remedy="pass the base that the adapter was trained on, and its own lora_config=",
            path=url,
        )
    if made.magnitude is not None and (made.flip or made.magnitude.shape != made.shape[:1]):
        raise TensorMismatchError(
            f"{made.name} has the shape {made.shape}, and DoRA's vector {made.magnitude.shape}"
            + (", of columns" if made.flip else ""),
            remedy="DoRA is merged for linear layers only: merge it with PEFT" if made.flip
            else "pass the base that the adapter was trained on, and its own lora_config=",
            path=url,
        )  # fmt: skip
    strange = {made.base.dtype, *(part.dtype for part in _adapted(made))} - CASTABLE.keys()
    if strange:
        raise TensorMismatchError(
            f"{made.name}, or its LoRA pair, has dtype {', '.join(sorted(strange))}",
            remedy='export it with lora="adapter"; a quantized base is not merged',
            path=url,
        )


def _of_base(item: Range) -> Range:
    """The base's elements for a range: whole rows where their lengths are needed."""
    target: Target = item.target.base if isinstance(item.target, Merged) else item.target
    start, stop = item.start, item.stop
    if isinstance(item.target, Merged) and item.target.magnitude is not None:
        columns = target.shape[1]
        start, stop = start // columns * columns, -(-stop // columns) * columns
    return Range(target, start, stop, 0)


def _nbytes(tensor: Translated) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
