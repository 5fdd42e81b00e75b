"""Weights that a release stores in eight or four bits, read as the numbers that they stand for.

DeepSeek's float8 has a factor for each block of a weight, in `<weight>_scale_inv`. GPT-OSS's mxfp4
has two numbers in a byte and a power of two for each 32 of them, in `<weight>_blocks` and
`<weight>_scales`. Both are multiplied in float32 and rounded once, as transformers does.

A release is opened by the names of the family's table, without the layers that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np

from smckpt.errors import (
    CorruptCheckpointError,
    KeysMismatchError,
    TensorMismatchError,
    UsageError,
    errors_at,
)
from smckpt.formats.tensors import Block, RankTensors, TensorKey, TensorReader
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Strided, elements, execute
from smckpt.translate.cast import CASTABLE, cast, stored_type
from smckpt.translate.config import ModelConfig
from smckpt.translate.prediction import (
    DROP,
    PREDICTION_LAYERS,
    further_layers,
    kept_layers,
    left_out_note,
)
from smckpt.translate.ranks.pipeline import JoinedTensors, some
from smckpt.translate.tables.table import Family

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_AT_ONCE = 1 << 18  # elements computed at once, so that their arrays stay in the processor's cache
_FLOAT8 = "float8_e4m3fn"
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_OTHER_SCALES = ("_scale", "_scale_2", "_zero_point")
_METHODS = ("fp8", "mxfp4")  # quantization_config.quant_method
_SQUARE = (128, 128)  # blocks of float8 where the config names none, as in transformers
_GROUP = 32  # numbers of mxfp4 with one scale, in 16 bytes
_NO_SCALE = 255


def _constant(values: Sequence[Any]) -> Array:
    made = np.array(values, np.float32)
    made.setflags(write=False)
    return made


def _float8(byte: int) -> float:
    """The number of a byte of float8_e4m3fn: a sign, 4 bits of exponent, 3 of fraction; no
    infinity."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        size = math.nan
    else:
        size = math.ldexp(8 * (exponent > 0) + fraction, max(exponent, 1) - 10)
    return -size if byte & 128 else size


_OF_FLOAT8 = _constant([_float8(byte) for byte in range(256)])
_FOUR = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Twice the numbers and half the scales: float32 has no 2**128, which is the last of the scales.
_TWICE = _constant([(2 * _FOUR[byte & 15], 2 * _FOUR[byte >> 4]) for byte in range(256)])
_HALF = _constant([math.ldexp(1.0, byte - 128) for byte in range(256)])


class _Quantized(Protocol):
    @property
    def shape(self) -> Shape:
        """The shape of the weight that it stands for."""

    def values(self, reader: TensorReader, at: Strided) -> Array:
        """Its elements `at`, in float32 and in the shape of the grid."""


@dataclass(frozen=True)
class _Float8:
    """A weight of two dimensions, and the factors of its blocks."""

    weight: str
    scale: str
    scale_dtype: str
    shape: Shape
    block: tuple[int, int]

    def values(self, reader: TensorReader, at: Strided) -> Array:
        rows, columns = at.steps(self.shape)
        out: Array = _OF_FLOAT8.take(_read(reader, self.weight, at, "uint8"))
        r, c = (
            (along.at + along.step * np.arange(along.number)) // size
            for along, size in zip((rows, columns), self.block, strict=True)
        )
        box = Box((int(r[0]), int(c[0])), (int(r[-1] - r[0]) + 1, int(c[-1] - c[0]) + 1))
        grid = tuple(-(-n // size) for n, size in zip(self.shape, self.block, strict=True))
        stored = _read(reader, self.scale, Strided.whole(grid).part(box), self.scale_dtype)
        factors = cast(stored, self.scale_dtype, "float32").take(c - c[0], axis=1)
        factors = factors.take(r - r[0], axis=0)
        if rows.dim > columns.dim >= 0:
            factors = factors.T
        factors = factors.reshape(out.shape)
        # a factor is the largest size in its block over 448, so zero where all of it is
        if bad := factors[(factors < 0) | ((factors == 0) & (out != 0))].tolist():
            raise CorruptCheckpointError(
                f"{self.scale} has the factor {bad[0]}, which no weights have",
                remedy="fetch all files of the release again", path=reader.url,
            )  # fmt: skip
        with np.errstate(over="ignore", invalid="ignore"):
            out *= factors
        return out


@dataclass(frozen=True)
class _Mxfp4:
    """The experts of a layer. They are stored by (expert, column, 16 bytes of rows), and stand for
    (expert, row, column)."""

    blocks: str
    scales: str
    shape: Shape

    def values(self, reader: TensorReader, at: Strided) -> Array:
        expert, row, column = steps = at.steps(self.shape)
        last = row.at + (row.number - 1) * row.step
        index = row.at + row.step * np.arange(row.number)

        def part(name: str, each: int) -> Array:
            """The bytes of these experts and columns for these rows, `each` rows in a byte."""
            line, low = self.shape[1] // each, row.at // each
            start = (expert.at * self.shape[2] + column.at) * line + low
            sizes = (expert.number, column.number, last // each - low + 1)
            strides = (expert.step * self.shape[2] * line, column.step * line, 1)
            return _read(reader, name, Strided(sizes, start, strides), "uint8")

        pairs = part(self.blocks, 2)
        numbers = _TWICE[pairs].reshape(*pairs.shape[:2], -1)
        scales = part(self.scales, _GROUP)
        if (scales == _NO_SCALE).any():
            raise CorruptCheckpointError(
                f"{self.scales} has the scale {_NO_SCALE}, which stands for NaN (E8M0); "
                "transformers takes it for 2**128",
                remedy="fetch all files of the release again", path=reader.url,
            )  # fmt: skip
        factors = _HALF.take(scales)
        with np.errstate(over="ignore"):
            out: Array = numbers.take(index - row.at // 2 * 2, axis=2)
            out *= factors.take(index // _GROUP - row.at // _GROUP, axis=2)
        stored = (steps[0].dim, steps[2].dim, steps[1].dim)  # the grid's dimensions, as in `out`
        order = sorted(range(3), key=lambda axis: stored[axis])
        out = out.transpose(order).reshape(at.sizes)
        return out


class Dequantized:
    """A reader of a release's files, whose quantized weights have the dtype `dtype`."""

    def __init__(
        self, reader: TensorReader, found: Mapping[str, _Quantized], parts: frozenset[str],
        dtype: str,
    ) -> None:  # fmt: skip
        """parts: the names of scales and packed bytes, which are no weights by themselves."""
        self.url = reader.url
        self._reader = reader
        self._found = found
        self._dtype = dtype
        plain = {name: held for name, held in reader.held.items() if name not in parts}
        made = {name: RankTensors(name, dtype, {}, weight.shape) for name, weight in found.items()}
        self.held: Mapping[str, RankTensors] = {**plain, **made}

    def plan(self, blocks: Sequence[Block]) -> tuple[Any, list[Block]]:
        plain = [block for block in blocks if block.source.name not in self._found]
        return self._reader.plan(plain), [b for b in blocks if b.source.name in self._found]

    def read(self, plan: tuple[Any, list[Block]], buffers: Sequence[memoryview]) -> None:
        """
        Raises:
            UsageError: a number is beyond the range of the dtype.
        """
        plain, others = plan
        self._reader.read(plain, buffers)
        size = DTYPES[self._dtype].itemsize
        for block in others:
            name = block.source.name
            for copy in _pieces(block.copy):
                wide = self._found[name].values(self._reader, copy.source)
                try:
                    made = np.ascontiguousarray(cast(wide, "float32", self._dtype))
                except OverflowError as error:
                    raise UsageError(
                        f"{name} cannot be read as {self._dtype}: {error}",
                        remedy="choose bfloat16 or float32 as the dtype", path=self.url,
                    ) from error  # fmt: skip
                there = Copy(Strided.whole(copy.sizes), copy.target)
                execute(there, made.view(f"u{size}"), elements(buffers[block.buffer], size))

    def close(self) -> None:
        self._reader.close()


def dequantized(reader: TensorReader, settings: ModelConfig | None) -> TensorReader:
    """The reader, with the weights that it holds quantized as weights of the config's dtype, or of
    bfloat16. It is the same reader if none is quantized.

    Args:
        reader: of the files of one directory.

    Raises:
        KeysMismatchError: a weight lacks its scales, or scales their weight.
        TensorMismatchError: shapes or dtypes of the two do not fit each other.
        UsageError: the weights are quantized in another way.
    """
    held = reader.held
    found: dict[str, _Quantized] = {}
    parts: set[str] = set()
    sizes = _quantization(settings).get("weight_block_size") or _SQUARE
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or not all(
        type(size) is int and size > 0 for size in sizes
    ):  # fmt: skip
        raise UsageError(
            f"the config has weight_block_size={sizes!r}, which is not two sizes",
            remedy="pass the release's own config",
        )  # fmt: skip
    block = int(sizes[0]), int(sizes[1])
    for name, tensor in held.items():
        if name.endswith(_SCALE):
            weight = name.removesuffix(_SCALE)
            found[weight] = _float8_of(held.get(weight), tensor, block)
            parts |= {name, weight}
        elif name.endswith(_BLOCKS) and tensor.dtype == "uint8":
            scales = held.get(name.removesuffix(_BLOCKS) + _SCALES)
            found[name.removesuffix(_BLOCKS)] = _mxfp4_of(tensor, scales)
            parts |= {name, name.removesuffix(_BLOCKS) + _SCALES}
    bare = sorted(
        name
        for name in held.keys() - parts
        if held[name].dtype.startswith("float8")
        or (held[name].dtype == "uint8" and name.endswith(_SCALES))
    )
    if others := [f"{n}{end}" for n in bare for end in _OTHER_SCALES if f"{n}{end}" in held]:
        raise UsageError(
            f"the weights are quantized with {others[0]}, one for a whole weight or a row, as "
            "compressed-tensors and ModelOpt do, which smckpt does not read",
            remedy="pass the release in bfloat16, or decompress it with the library that wrote it",
        )
    if bare:
        _lack(f"{bare[:8]} have no {_SCALE[1:]}, or no {_BLOCKS[1:]}, beside them")
    if not found:
        return reader
    method = _quantization(settings).get("quant_method", _METHODS[0])
    if method not in _METHODS:
        raise UsageError(
            f"the config says quant_method={method!r}, which smckpt does not read",
            remedy=f"it reads {' and '.join(_METHODS)}: pass the release in one of them, or in "
            "bfloat16",
        )
    return Dequantized(reader, found, frozenset(parts), _dtype(settings))


def _quantization(settings: ModelConfig | None) -> dict[str, Any]:
    section = settings.values.get("quantization_config") if settings is not None else None
    return section if isinstance(section, dict) else {}


def _dtype(settings: ModelConfig | None) -> str:
    values = settings.values if settings is not None else {}
    dtype = str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch.")
    return dtype if dtype in CASTABLE else "bfloat16"


def _float8_of(weight: RankTensors | None, scale: RankTensors, block: tuple[int, int]) -> _Float8:
    if weight is None:
        _lack(f"{scale.name} has no weight beside it")
    shape, grid = _shape(weight), _shape(scale)
    wanted = tuple(-(-n // size) for n, size in zip(shape, block, strict=False))
    if weight.dtype != _FLOAT8 or scale.dtype not in CASTABLE or len(shape) != 2 or grid != wanted:
        raise TensorMismatchError(
            f"{weight.name} is {weight.dtype} {shape} with {scale.dtype} scales {grid}; in blocks "
            f"of {block[0]} × {block[1]} it should be {_FLOAT8} with float scales {wanted}",
            remedy="pass the release's own files and config (quantization_config, "
            "weight_block_size)",
        )
    return _Float8(weight.name, scale.name, scale.dtype, shape, block)


def _mxfp4_of(blocks: RankTensors, scales: RankTensors | None) -> _Mxfp4:
    if scales is None:
        _lack(f"{blocks.name} has no scales beside it")
    shape = _shape(blocks)
    fits = len(shape) == 4 and shape[3] == _GROUP // 2 and _shape(scales) == shape[:3]
    if not fits or scales.dtype != "uint8":
        raise TensorMismatchError(
            f"{blocks.name} is {blocks.dtype} {shape} with {scales.dtype} scales "
            f"{_shape(scales)}; mxfp4 is uint8 (experts, columns, groups, {_GROUP // 2}) with "
            "uint8 scales (experts, columns, groups)",
            remedy="pass the release's own files",
        )  # fmt: skip
    return _Mxfp4(blocks.name, scales.name, (shape[0], shape[2] * _GROUP, shape[1]))


def _lack(what: str) -> NoReturn:
    raise KeysMismatchError(
        f"the weights are quantized, but {what}",
        remedy="fetch all files of the release again",
    )  # fmt: skip


def _shape(tensor: RankTensors) -> Shape:
    return tensor.shards[0, 0] if tensor.whole is None else tensor.whole


def _read(reader: TensorReader, name: str, at: Strided, dtype: str) -> Array:
    """Elements of a stored tensor, in the shape of the grid."""
    kind = np.dtype(np.uint8) if dtype == "uint8" else stored_type(dtype)
    out = np.empty(at.sizes, kind)
    key = TensorKey(name) if reader.held[name].whole is not None else TensorKey(name, 0, 0)
    block = Block(key, Copy(at, Strided.whole(at.sizes)))
    reader.read(reader.plan([block]), [out.reshape(-1).view(np.uint8).data])
    return out


def _pieces(copy: Copy) -> Iterator[Copy]:
    """The copy in pieces of at most `_AT_ONCE` elements."""
    if copy.numel <= _AT_ONCE:
        yield copy
        return
    dim = next(d for d, size in enumerate(copy.sizes) if size > 1)
    rest = copy.numel // copy.sizes[dim]
    step = max(1, _AT_ONCE // rest)
    for at in range(0, copy.sizes[dim], step):
        offsets, sizes = [0] * len(copy.sizes), list(copy.sizes)
        offsets[dim], sizes[dim] = at, min(step, copy.sizes[dim] - at)
        yield from _pieces(copy.part(Box(tuple(offsets), tuple(sizes))))


def open_release(
    reader: TensorReader, settings: ModelConfig, family: Family, mtp: str = DROP
) -> tuple[TensorReader, int, tuple[str, ...]]:
    """A reader of the model's tensors by the names of the family's table, how many layers that
    predict further tokens it has, and notes for the user.

    Quantized weights are read in the config's dtype. With DROP, layers that predict further tokens
    are left out.

    Raises:
        as `dequantized` and `kept_layers`.
    """
    outer = next(row.name for row in family.hub.rows if "{i}" in row.name).split(".")[0]
    heads = {row.name for row in family.hub.rows if row.roles == ("head",)}
    if not any(name.startswith(f"{outer}.") for name in reader.held):  # a bare model, as of GPT-2's
        held = {n if n in heads else f"{outer}.{n}": (0, n) for n in reader.held}
        reader = JoinedTensors((reader,), held)
    return weights_of(reader, settings, family, mtp)


def weights_of(
    reader: TensorReader, settings: ModelConfig, family: Family | None, mtp: str | None = DROP
) -> tuple[TensorReader, int, tuple[str, ...]]:
    """As `open_release`. Without a family, no layer is left out."""
    found = further_layers(reader.held, family, settings)
    if isinstance(configured := settings.values.get(PREDICTION_LAYERS), int):
        found = {name: number for name, number in found.items() if number < configured}
    with errors_at(reader.url):
        count = kept_layers(found, family, settings, mtp)
        if found and not count:
            reader = some(reader, [name for name in reader.held if name not in found])
        return dequantized(reader, settings), count, () if count else left_out_note(found)
