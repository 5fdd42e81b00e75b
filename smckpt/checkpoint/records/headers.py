"""Read the header of a data file. Every bound is checked before a value is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

from msgspec import Meta

from smckpt.checkpoint.records.crc import BLOCK
from smckpt.checkpoint.records.sealed import strict_json
from smckpt.decoding import Count, decode
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.image import HEADER_LIMIT, SLICES_KEY
from smckpt.layout.mesh import MOST_DIMS

_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
    "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,  # in files of others
}  # fmt: skip


T = TypeVar("T")
_Span = Annotated[tuple[Count, ...], Meta(min_length=2, max_length=2)]


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=MOST_DIMS)]
    data_offsets: _Span


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
    metadata = _decoded(dict[str, str], table.pop("__metadata__", {}), "its metadata", path)
    # for entries that are not whole in the file: the elements that the file has
    try:
        listed = strict_json(metadata.get(SLICES_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        _bad(path, f"the slices in its metadata are not a JSON object: {error}")
    slices = _decoded(dict[str, _Span], listed, "the slices in its metadata", path)
    slots = _slots(table, start, size, slices, path)
    if stray := sorted(slices.keys() - slots.keys()):
        _bad(path, f"it lists slices of {stray[0]!r}, which is not in the file")
    return Header(start, slots, metadata)


def _slots(
    table: dict[str, Any], start: int, size: int, slices: dict[str, tuple[int, ...]], path: str
) -> dict[str, StoredSlot]:
    slots: dict[str, StoredSlot] = {}
    at = start
    try:
        entries = decode(dict[str, _Entry], table, newer=True)
    except ValueError:  # which does not name the key
        entries = {key: _decoded(_Entry, data, repr(key), path) for key, data in table.items()}
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].data_offsets, item[0])):
        code, shape, (low, high) = entry.dtype, entry.shape, entry.data_offsets
        nbytes, part = high - low, slices.get(key)
        if code not in _SIZES:
            _bad(path, f"{key!r} has the unknown dtype {code!r}")
        if math.prod(shape) * _SIZES[code] != nbytes:
            _bad(path, f"{key!r}: {code} {list(shape)} does not take bytes {low} to {high}")
        if part is not None and (not shape or shape[0] != part[1] - part[0]):
            what = f"claims elements {part[0]} to {part[1]}, but has the shape {list(shape)}"
            _bad(path, f"{key!r} {what}")
        if start + low != at:
            _bad(path, f"{key!r} begins at byte {start + low} of the file, expected {at}")
        # A part counts elements: shape[0] of them are here.
        first = 0 if part is None or not nbytes else part[0] * (nbytes // shape[0])
        slots[key] = StoredSlot(first, first + nbytes, at, code, shape, part is not None)
        at += nbytes
    if at != size:
        _bad(path, f"the arrays end at byte {at}, but the file at byte {size}")
    return slots


def _decoded(kind: type[T], data: Any, what: str, path: str) -> T:
    try:
        return decode(kind, data, newer=True)
    except ValueError as error:
        _bad(path, f"{what}: {error}")


def _bad(path: str, what: str) -> NoReturn:
    raise CorruptCheckpointError(
        f"the header is damaged: {what}", remedy="use an older checkpoint", path=path
    )
