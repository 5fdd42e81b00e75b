"""What adapters change in a base: each LoRA pair with its weight, and the tensor with the pairs
added during the export, weight + scaling · B·A, range by range.

The arithmetic is that of PEFT, which loads an adapter in float32: the product and the sum are
computed in float32. The sum is rounded once, to the dtype that is written. For embeddings and for
parameters of experts, PEFT rounds the product to the base's dtype first. Several adapters are added
one after another, and between them PEFT rounds the sum to the base's dtype.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from smckpt.errors import KeysMismatchError, TensorMismatchError, UsageError
from smckpt.formats.tensors import TensorReader
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Strided, row_major_strides
from smckpt.translate.cast import CASTABLE, cast, stored_type
from smckpt.translate.files import Chunk, Range, Target, aligned, nbytes_of
from smckpt.translate.models.lora import LoraConfig, PeftTensors
from smckpt.translate.ranks.translated import Translated, TranslatedSource
from smckpt.translate.stream import CHUNK, read_elements

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_AT_ONCE = 1 << 18  # elements of the product that are computed at once
_LOOKED_AT = 4096  # elements of a weight
_KEPT = 4  # pairs of matrices that stay in memory, because several ranges or experts use them


@dataclass(frozen=True)
class Change:
    """What one adapter adds to a weight of the model.

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
    def key(self) -> str:
        """One for each weight and adapter."""
        return self.a.name

    @property
    def of_columns(self) -> bool:
        """Whether DoRA needs the lengths of columns, so the whole weight."""
        return self.flip and self.magnitude is not None


@dataclass(frozen=True)
class Merged:
    """A tensor with the changes of its weight, in the adapters' order. Only the first may have a
    magnitude. box: the part of the changed weight that the tensor is. turned: its rows are the
    weight's columns."""

    name: str
    dtype: str
    base: Translated
    changes: tuple[Change, ...]
    box: Box
    turned: bool = False

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def source_dtype(self) -> str:
        wide = "float64" in (self.base.dtype, *(change.dtype for change in self.changes))
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
        targets = [item.target for chunk in chunks for item in chunk.ranges]
        for target in (target for target in targets if isinstance(target, Merged)):
            for change in target.changes:
                if change.key in self._plans:
                    continue
                pair = tuple(Range(t, 0, math.prod(t.shape), 0) for t in change.adapted)
                (self._plans[change.key],) = self._parts.plans_of([Chunk(0, 0, pair)])
                if change.of_columns:  # the whole base
                    base = target.base
                    rows, columns = base.shape
                    step = max(1, CHUNK // DTYPES[base.dtype].itemsize // columns)
                    ranges = [
                        Range(base, at * columns, min(at + step, rows) * columns, 0)
                        for at in range(0, rows, step)
                    ]
                    plans = self._parts.plans_of([Chunk(0, 0, (item,)) for item in ranges])
                    self._bases[change.key] = list(zip(ranges, plans, strict=True))
        plain = [replace(c, ranges=tuple(map(_of_base, c.ranges))) for c in chunks]
        return list(zip(chunks, self._parts.plans_of(plain), strict=True))

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        chunk, own = plan
        views = [  # the base has memory of its own, unless it is used unchanged
            aligned(_of_base(item).nbytes) if isinstance(item.target, Merged) else data
            for item, data in zip(chunk.ranges, buffers, strict=True)
        ]
        self._parts.read(own, views)
        for item, view, buffer in zip(chunk.ranges, views, buffers, strict=True):
            if isinstance(item.target, Merged):
                self._merge(item.target, item.start, item.stop, view, buffer)

    def close(self) -> None:
        self._parts.close()

    def _merge(
        self, target: Merged, start: int, stop: int, base: memoryview, out: memoryview
    ) -> None:
        """Compute elements [start, stop) of a target, some rows at a time."""
        wide, dtype = target.source_dtype, target.base.dtype
        parts = []  # a change, its matrices for the target's rows, DoRA's vector, columns' lengths
        for change in target.changes:
            left, right, *more = self._pair(change)
            if target.turned:
                left, right = right.transpose(0, 2, 1), left.transpose(0, 2, 1)
            lengths = self._column_lengths(change, target) if change.of_columns else None
            parts.append((change, left, right, more[0] if more else None, lengths))
        by_rows = any(map(_by_rows, target.changes))
        first, at, left_at = target.box.offsets
        _, height, columns = target.box.sizes
        if target.turned:
            at, left_at, height, columns = left_at, at, columns, height
        values = np.frombuffer(base, stored_type(dtype))
        skipped = _of_base(Range(target, start, stop, 0)).start
        result = np.frombuffer(out, stored_type(wide))
        row, end = start // columns, -(-stop // columns)
        while row < end:
            expert, inside = divmod(row, height)
            last = min(row + max(1, _AT_ONCE // columns), end, (expert + 1) * height)
            low, high = max(start, row * columns), min(stop, last * columns)
            here = slice(at + inside, at + inside + last - row)
            begin, until = (row * columns, last * columns) if by_rows else (low, high)
            total = cast(values[begin - skipped : until - skipped], dtype, wide)
            for number, (change, left, right, magnitude, lengths) in enumerate(parts):
                if number:
                    total = cast(cast(total, wide, dtype), dtype, wide)
                matrix = right[first + expert][:, left_at : left_at + columns]
                product = change.scaling * (left[first + expert][here] @ matrix).reshape(-1)
                product = product[begin - row * columns : until - row * columns]
                if change.rounded:
                    product = cast(cast(product, change.dtype, dtype), dtype, wide)
                total = total + product
                if magnitude is not None and lengths is not None:
                    total *= (magnitude / lengths)[np.arange(begin, until) % columns]
                elif magnitude is not None:
                    rows = total.reshape(-1, columns)
                    rows *= (magnitude[here] / _lengths(rows, 1))[:, None]
            result[low - start : high - start] = total[low - begin : high - begin]
            row = last

    def _pair(self, change: Change) -> tuple[Array, ...]:
        """The two matrices to multiply, for each expert, and DoRA's vector if there is one. The
        first matrix has the weight's rows."""
        with self._lock:
            found = self._pairs.get(change.key)
        if found is not None:
            return found
        memory = [aligned(nbytes_of(t)) for t in change.adapted]
        self._parts.read(self._plans[change.key], memory)
        matrices: list[Array] = [
            cast(np.frombuffer(data, stored_type(t.dtype)), t.dtype, change.dtype).reshape(t.shape)
            for data, t in zip(memory, change.adapted, strict=True)
        ]
        a, b, *more = matrices
        experts = change.shape[0]
        a = a.reshape(experts, -1, math.prod(a.shape[1:]))  # an expert's rows of A lie together,
        b = b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)  # its columns of B do not
        if change.flip:
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        made = (np.ascontiguousarray(b), np.ascontiguousarray(a), *(m.reshape(-1) for m in more))
        with self._lock:
            self._pairs[change.key] = made
            while len(self._pairs) > _KEPT:
                del self._pairs[next(iter(self._pairs))]
        return made

    def _column_lengths(self, change: Change, target: Merged) -> Array:
        """The lengths of all columns of the sum, from one more pass over the base."""
        wide = target.source_dtype
        with self._lock:
            found = self._lengths.get(change.key)
        if found is not None:
            return found
        left, right, *_ = self._pair(change)
        columns = change.shape[-1]
        squares = np.zeros(columns)
        for item, plan in self._bases[change.key]:
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
            self._lengths[change.key] = made
        return made


def _lengths(values: Array, axis: int) -> Array:
    """Euclidean lengths, rounded once."""
    found: Array = np.sqrt(np.square(values, dtype=np.float64).sum(axis))
    return found.astype(values.dtype)


def _of_base(item: Range) -> Range:
    """The base's elements for a range: whole rows where their lengths are needed."""
    target: Target = item.target.base if isinstance(item.target, Merged) else item.target
    start, stop = item.start, item.stop
    if isinstance(item.target, Merged) and any(map(_by_rows, item.target.changes)):
        columns = math.prod(target.shape[1:])
        start, stop = start // columns * columns, -(-stop // columns) * columns
    return Range(target, start, stop, 0)


def _by_rows(change: Change) -> bool:
    return change.magnitude is not None and not change.flip


# The adapters to merge, in order.
Adapters: TypeAlias = "Sequence[tuple[PeftTensors[Translated], LoraConfig]]"


def changes_of(
    adapters: Adapters, shapes: Mapping[str, Shape], built: Mapping[str, Shape]
) -> dict[str, tuple[Change, ...]]:
    """What the adapters change, by the model's names in memory, whose `shapes` these are; the
    changes of a weight in the adapters' order.

    Args:
        built: of the tensors that transformers builds, which are all that PEFT adapts.

    Raises:
        KeysMismatchError, TensorMismatchError: weights are missing or do not fit the adapter.
        UsageError: DoRA would come after another adapter.
    """
    made: dict[str, tuple[Change, ...]] = {}
    for parts, config in adapters:
        weights = config.weights(parts.pairs, shapes)
        if lost := sorted(parts.pairs.keys() - set(weights.values())):
            raise KeysMismatchError(
                f"the base weights that the adapter changes are missing: {lost[:8]}",
                remedy="pass base= the Hugging Face directory of the base model, and config= if "
                "that has none; a head that is tied to the embedding goes out with "
                'lora="adapter" alone',
            )
        config.check_targets(parts.pairs, built, parts.saved)
        own = {
            name: change_of_pair(parts, config, module, name, shapes[name])
            for name, module in weights.items()
        }
        oriented = {name: _oriented(change, own) for name, change in own.items()}
        for name, change in oriented.items():
            if name in made and change.magnitude is not None:
                raise UsageError(
                    f"an adapter with DoRA would be merged into {name} after another adapter. PEFT "
                    "takes the other one out again first, and rounds",
                    remedy="name the adapter with DoRA first, or merge them with PEFT",
                )
            made[name] = (*made.get(name, ()), change)
    return made


def change_of_pair(
    parts: PeftTensors[Translated], config: LoraConfig, module: str, name: str, shape: Shape
) -> Change:  # fmt: skip
    a, b = (parts.pairs[module][side] for side in "AB")
    magnitude = parts.magnitudes.get(module)
    parameter = config.has_parameter(name)
    embeds = module in parts.embeddings
    key = name if parameter else module
    turned = False if parameter else config.transposes(module)
    form = shape
    if len(a.shape) > 2 and a.shape[1:] == shape[1:]:  # a convolution's kernels are rows of A
        form = (shape[0], math.prod(shape[1:]))
    experts, rows, columns = form if len(form) == 3 else (1, *form, 1)[:3]
    product = (math.prod(b.shape) // b.shape[1], math.prod(a.shape[1:]))
    flip = embeds or (product != (rows, columns) if turned is None else turned)
    if turned is None and rows == columns and not embeds:
        raise TensorMismatchError(
            f"{name} is square, and the adapter's config has fan_in_fan_out=True: whether it is "
            "transposed (Conv1D) cannot be told",
            remedy="pass config= of a model that transformers has, or lora_config= with "
            "fan_in_fan_out=False if it is a Linear",
        )
    if len(form) == 3:
        flip = product != (rows, columns)
    if len(form) not in (2, 3) or product != ((columns, rows) if flip else (rows, columns)):
        raise TensorMismatchError(
            f"{name} has the shape {shape}, but the adapter's product has "
            f"{product[::-1] if flip else product}",
            remedy="pass the base that the adapter was trained on, and its own lora_config=",
        )
    if a.shape[0] != config.rank(key) * experts:
        raise TensorMismatchError(
            f"{name} of {experts} experts has LoRA matrices of rank {a.shape[0]}; the config says "
            f"{config.rank(key)} for each",
            remedy="pass lora_config= of this adapter",
        )
    if magnitude is not None and math.prod(magnitude.shape) != (columns if flip else rows):
        raise TensorMismatchError(
            f"{name} has the shape {shape}, and DoRA's vector {magnitude.shape}",
            remedy="pass the base that the adapter was trained on, and its own lora_config=",
        )
    made = Change(
        name, (experts, rows, columns), a, b, config.scaling(key), flip, embeds or parameter,
        magnitude,
    )  # fmt: skip
    if strange := {part.dtype for part in made.adapted} - CASTABLE.keys():
        raise _of_strange_dtype(name, strange)
    return made


def _oriented(change: Change, others: Mapping[str, Change]) -> Change:
    """Square matrices of experts do not show whether they are transposed. All parameters of one
    module are alike.

    Raises:
        TensorMismatchError: no other shows it either.
    """
    experts, rows, columns = change.shape
    if rows != columns or experts == 1:
        return change
    prefix = change.name.rpartition(".")[0]
    for other in others.values():
        if other.name.rpartition(".")[0] == prefix and other.shape[1] != other.shape[2]:
            return replace(change, flip=other.flip)
    raise TensorMismatchError(
        f"{change.name} has square matrices, and no other parameter of its module has a LoRA pair "
        "that shows their order",
        remedy="merge it with PEFT",
    )


def changed_tensor(
    base: Translated, changes: tuple[Change, ...], copy: Copy | None
) -> Merged | Translated:
    """A tensor with the changes of the weight of which it is `copy`, or all.

    Raises:
        TensorMismatchError: its dtype cannot be computed with.
        UsageError: it is not a block of the weight.
    """
    if not changes:
        return base
    change = changes[0]  # all are of one shape, and only the first may be DoRA's
    if base.dtype not in CASTABLE:
        raise _of_strange_dtype(base.name, {base.dtype})
    box, turned = Box.whole(change.shape), False
    whole = Strided.whole(base.shape)
    if copy is not None and copy != Copy(whole, whole):
        found = _block(copy, change.shape)
        cut = found is not None and (found[1] or found[0].sizes[2] != change.shape[2])
        if found is None or (change.magnitude is not None and (cut or change.flip)):
            raise UsageError(
                f"released models of this family hold {change.name} in other tensors "
                f"({base.name}), which are not merged with an adapter",
                remedy="pass ExportOptions(naming='module'), which transformers 5 loads, or merge "
                "it with PEFT",
            )
        box, turned = found
    return Merged(base.name, base.dtype, base, changes, box, turned)


def first_elements(source: MergedSource, target: Target) -> Array:
    """The first elements of a tensor, in float64."""
    dtype = target.source_dtype
    memory = read_elements(source, target, 0, min(math.prod(target.shape), _LOOKED_AT))
    return cast(np.frombuffer(memory, stored_type(dtype)), dtype, "float64")


def _block(copy: Copy, shape: Shape) -> tuple[Box, bool] | None:
    """The block of a weight that a copy is, and whether it is transposed; None if it is none."""
    sizes, target = copy.sizes, copy.target
    ordered = zip(sizes, target.strides, row_major_strides(sizes), strict=True)
    if target.start or any(size > 1 and stride != unit for size, stride, unit in ordered):
        return None
    steps = copy.source.steps(shape)
    dims = [step.dim for step in steps if step.dim >= 0]
    if any(step.number > 1 and step.step != 1 for step in steps):
        return None
    turned = dims != sorted(dims)
    if turned and sorted((*dims[:-2], *dims[:-3:-1])) != [*dims[:-2], *dims[:-3:-1]]:
        return None
    return Box(tuple(s.at for s in steps), tuple(s.number for s in steps)), turned


def _of_strange_dtype(name: str, dtypes: set[str]) -> TensorMismatchError:
    return TensorMismatchError(
        f"{name}, or its LoRA pair, has dtype {', '.join(sorted(dtypes))}",
        remedy='export it with lora="adapter"; a quantized base is not merged',
    )
