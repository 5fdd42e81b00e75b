"""Read the header of a data file. Every bound is checked before a value is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from smckpt.checkpoint.records.crc import BLOCK
from smckpt.checkpoint.records.strict_json import strict_json
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.image import HEADER_LIMIT, SLICES_KEY
from smckpt.layout.mesh import MOST_DIMS

__all__ = ["Header", "StoredSlot", "read_header"]

_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
    "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class StoredSlot(NamedTuple):
    """Bytes [start, stop) of a rank's array, at byte `offset` of the file.

    code, shape: safetensors' dtype code and the shape of these elements. part: whether the header
        marks them as a part of the array; otherwise they are the whole array.
    """

    start: int
    stop: int
    offset: int
    code: str
    shape: tuple[int, ...]
    part: bool

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """The arrays of a data file by key. `data_start`: the byte at which the header ends. metadata:
    the texts in it that are not about one array."""

    data_start: int
    slots: dict[str, StoredSlot]
    metadata: dict[str, str]


def read_header(read: Callable[[int, int], bytes | bytearray], size: int, path: str) -> Header:
    """Read and check the header of a file of `size` bytes.

    Args:
        read: returns the bytes [start, stop) of the file.
        path: the file's path, for errors.

    Raises:
        CorruptCheckpointError: the header is damaged; the message names the key and the fault.
    """
    if size < 8:
        _bad(path, f"the file has {size} bytes, too few for a header")
    head = read(0, min(BLOCK, size))
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        _bad(path, f"bytes 0 to 8 say that the header has {length} bytes, but the file has {size}")
    start = 8 + length
    if start > len(head):
        head = head + read(len(head), start)
    try:
        table = strict_json(head[8:start].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        _bad(path, f"the header (bytes 8 to {start}) is not a JSON object: {error}")
    if not isinstance(table, dict):
        _bad(path, "the header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    slices = _slices(metadata, path)
    slots = _slots(table, start, size, slices, path)
    if stray := sorted(slices.keys() - slots.keys()):
        _bad(path, f"it lists slices of {stray[0]!r}, which is not in the file")
    return Header(start, slots, metadata)


def _slots(
    table: dict[str, Any], start: int, size: int, slices: dict[str, tuple[int, int]], path: str
) -> dict[str, StoredSlot]:
    slots: dict[str, StoredSlot] = {}
    at = start
    placed = sorted((*_offsets(data, path), key) for key, data in table.items())
    for low, high, key in placed:
        slot = _slot(key, table[key], low, high, start, slices.get(key), path)
        if slot.offset != at:
            _bad(path, f"{key!r} begins at byte {slot.offset} of the file, expected {at}")
        at += high - low
        slots[key] = slot
    if at != size:
        _bad(path, f"the arrays end at byte {at}, but the file at byte {size}")
    return slots


def _slot(
    key: str,
    data: dict[str, Any],
    low: int,
    high: int,
    start: int,
    slice_: tuple[int, int] | None,
    path: str,
) -> StoredSlot:
    code, shape = data.get("dtype"), data.get("shape")
    if not isinstance(code, str) or code not in _SIZES:
        _bad(path, f"{key!r} has the unknown dtype {code!r}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        _bad(path, f"{key!r} has the impossible shape {shape!r}")
    if len(shape) > MOST_DIMS:  # the product of countless sizes would take for ever
        _bad(path, f"{key!r} has {len(shape)} dimensions")
    if math.prod(shape) * _SIZES[code] != high - low:
        _bad(path, f"{key!r}: {code} {shape} does not take {high - low} bytes")
    if slice_ is not None and (not shape or shape[0] != slice_[1] - slice_[0]):
        _bad(path, f"{key!r} claims elements {slice_[0]} to {slice_[1]}, but has the shape {shape}")
    nbytes = high - low
    # A part counts elements: shape[0] of them are here.
    first = 0 if slice_ is None or not nbytes else slice_[0] * (nbytes // shape[0])
    return StoredSlot(first, first + nbytes, start + low, code, tuple(shape), slice_ is not None)


def _offsets(data: Any, path: str) -> tuple[int, int]:
    offsets = data.get("data_offsets") if isinstance(data, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not type(offsets[0]) is type(offsets[1]) is int
        or not 0 <= offsets[0] <= offsets[1]
    ):
        _bad(path, f"data_offsets {offsets!r}")
    return offsets[0], offsets[1]


def _slices(metadata: Any, path: str) -> dict[str, tuple[int, int]]:
    """For entries that are not whole in the file: the elements that the file has."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _bad(path, "its metadata is not a JSON object with text values")
    try:
        slices = strict_json(metadata.get(SLICES_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        _bad(path, f"the slices in its metadata are not a JSON object: {error}")
    if not isinstance(slices, dict):
        _bad(path, "the slices in its metadata are not a JSON object")
    for key, pair in slices.items():
        if (
            not isinstance(pair, list)
            or [type(n) for n in pair] != [int, int]
            or not 0 <= pair[0] <= pair[1]
        ):
            _bad(path, f"{key!r} has the impossible slice {pair!r}")
    return {key: (pair[0], pair[1]) for key, pair in slices.items()}


def _bad(path: str, what: str) -> NoReturn:
    raise CorruptCheckpointError(
        f"the header is damaged: {what}", remedy="use an older checkpoint", path=path
    )
