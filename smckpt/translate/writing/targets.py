"""The target tensors of an export, laid out in files.

Only a `ChunkSource` (`stream`) knows the sources of a range of a target.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from smckpt.errors import UsageError
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape

__all__ = [
    "ADAPTER_WEIGHTS",
    "ADAPTER_WEIGHTS_BIN",
    "ALIGNMENT",
    "INDEX",
    "INDEX_BIN",
    "SINGLE",
    "SINGLE_BIN",
    "Chunk",
    "OutputFile",
    "Range",
    "Target",
    "arrange",
    "is_quantized",
    "nbytes_of",
]

ALIGNMENT = 4096  # bytes; data and chunks start at multiples of it, which direct writes need
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# what `save_pretrained` wrote before safetensors; only read
SINGLE_BIN = "pytorch_model.bin"
INDEX_BIN = "pytorch_model.bin.index.json"
# PEFT's
ADAPTER_WEIGHTS, ADAPTER_WEIGHTS_BIN = "adapter_model.safetensors", "adapter_model.bin"


class Target(Protocol):
    """A tensor of the export."""

    @property
    def name(self) -> str:
        """The name in the file."""

    @property
    def dtype(self) -> str:
        """The dtype in the file: a name in `DTYPES` with a safetensors code."""

    @property
    def shape(self) -> Shape: ...

    @property
    def source_dtype(self) -> str:
        """The dtype of the elements that are read."""


def is_quantized(target: Target) -> bool:
    """Whether a tensor holds quantized weights, or parts of them."""
    return target.dtype in ("int8", "uint8", "int32") or target.dtype.startswith("float8")


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a target, at byte `offset` of a chunk."""

    target: Target
    start: int
    stop: int
    offset: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.target.dtype].itemsize

    @property
    def source_bytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.target.source_dtype].itemsize

    @property
    def casts(self) -> bool:
        return self.target.dtype != self.target.source_dtype


@dataclass(frozen=True)
class Chunk:
    """Bytes [offset, offset + length) of a file and the ranges that fill them, without a gap."""

    offset: int
    length: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class OutputFile:
    """One safetensors file: targets ordered so that each is aligned to its element size."""

    name: str
    targets: tuple[Target, ...]

    @cached_property
    def ordered(self) -> tuple[Target, ...]:
        return tuple(sorted(self.targets, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name)))

    @cached_property
    def header(self) -> bytes:
        """The header, padded so that the data starts at a multiple of `ALIGNMENT`."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for target in self.ordered:
            end = at + nbytes_of(target)
            table[target.name] = {
                "dtype": DTYPES[target.dtype].code,
                "shape": list(target.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(table, separators=(",", ":")).encode()
        padded = -(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8
        return padded.to_bytes(8, "little") + text.ljust(padded)

    @cached_property
    def data_bytes(self) -> int:
        return sum(map(nbytes_of, self.targets))

    @property
    def size(self) -> int:
        return len(self.header) + self.data_bytes

    def chunks(self, length: int) -> Iterator[Chunk]:
        """The data in chunks of `length` bytes, a multiple of `ALIGNMENT`. The first chunk is
        shorter, so that the others begin at multiples of `length` in the file; the last may be
        shorter too.

        No element is split, because chunks start at multiples of every element size.
        """
        ranges: list[Range] = []
        base, filled = len(self.header), 0
        room = length - base % length
        for target in self.ordered:
            itemsize = DTYPES[target.dtype].itemsize
            start, numel = 0, math.prod(target.shape)
            while start < numel:
                stop = min(numel, start + (room - filled) // itemsize)
                ranges.append(Range(target, start, stop, filled))
                filled += (stop - start) * itemsize
                start = stop
                if filled == room:
                    yield Chunk(base, filled, tuple(ranges))
                    base, filled, ranges, room = base + filled, 0, [], length
        if filled:
            yield Chunk(base, filled, tuple(ranges))


def arrange(targets: Sequence[Target], max_bytes: int) -> tuple[OutputFile, ...]:
    """The targets in files of at most `max_bytes` of data each, in their order.

    A larger tensor has a file of its own. A single file is called model.safetensors. Several files
    are numbered as by `save_pretrained`.

    Raises:
        UsageError: a target's dtype has no code in safetensors.
    """
    batches: list[list[Target]] = [[]]
    room = max_bytes
    for target in targets:
        if DTYPES[target.dtype].code is None:
            raise UsageError(
                f"{target.name} has dtype {target.dtype}, which safetensors files cannot hold",
                remedy="leave that tensor out of the model's state, or keep it in another dtype",
            )
        need = nbytes_of(target)
        if need > room and batches[-1]:
            batches.append([])
            room = max_bytes
        batches[-1].append(target)
        room -= need
    count = len(batches)
    if count == 1:
        return (OutputFile(SINGLE, tuple(batches[0])),)
    return tuple(
        OutputFile(f"model-{number:05d}-of-{count:05d}.safetensors", tuple(batch))
        for number, batch in enumerate(batches, 1)
    )


def nbytes_of(target: Target) -> int:
    return math.prod(target.shape) * DTYPES[target.dtype].itemsize
