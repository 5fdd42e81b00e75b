"""Reading a shard file's header: every bound is checked before anything in it is believed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from smckpt.errors import CorruptCheckpointError
from smckpt.layout.image import HEADER_LIMIT, SLICES_KEY
from smckpt.storage import Storage
from smckpt.storage.urls import join_url

__all__ = ["Header", "HeaderEntry", "read_header"]

_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
    "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One array in the file: bytes [offset, offset + nbytes) of the file; elements
    `elements` = [start, stop) of the entry, or None for all of it."""

    code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    elements: tuple[int, int] | None


@dataclass(frozen=True)
class Header:
    """The arrays of a shard file by key. `data_start`: where the header ends, in bytes."""

    data_start: int
    entries: dict[str, HeaderEntry]


def read_header(storage: Storage, name: str, size: int) -> Header:
    """Read and check the header of a file of `size` bytes.

    Raises:
        CorruptCheckpointError: naming what is wrong with which key.
    """
    path = join_url(storage.url, name)
    if size < 8:
        _bad(path, f"{size} bytes hold no header")
    length = int.from_bytes(storage.read(name, 0, 8), "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        _bad(path, f"bytes 0 to 8 say the header has {length} bytes, the file has {size}")
    try:
        table = json.loads(storage.read(name, 8, length), object_pairs_hook=_unique)
    except ValueError as error:
        _bad(path, f"the header (bytes 8 to {8 + length}) is no JSON object: {error}")
    if not isinstance(table, dict):
        _bad(path, "the header is no JSON object")
    metadata = table.pop("__metadata__", {})
    slices = _slices(metadata, path)
    start = 8 + length
    entries: dict[str, HeaderEntry] = {}
    at = 0
    for key, data in sorted(table.items(), key=lambda item: _offsets(item[1], path)):
        entry = _entry(key, data, start, slices.get(key), path)
        if entry.offset != start + at:
            _bad(path, f"{key!r} begins at {entry.offset - start} of the data, expected {at}")
        at += entry.nbytes
        entries[key] = entry
    if start + at != size:
        _bad(path, f"the arrays end at byte {start + at}, the file at {size}")
    return Header(start, entries)


def _entry(
    key: str, data: Any, start: int, slice_: tuple[int, int] | None, path: str
) -> HeaderEntry:
    low, high = _offsets(data, path)
    code, shape = data.get("dtype"), data.get("shape")
    if code not in _SIZES:
        _bad(path, f"{key!r} has the unknown dtype {code!r}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        _bad(path, f"{key!r} has the shape {shape!r}")
    if math.prod(shape) * _SIZES[code] != high - low:
        _bad(path, f"{key!r}: {code} {shape} does not take {high - low} bytes")
    return HeaderEntry(code, tuple(shape), start + low, high - low, slice_)


def _offsets(data: Any, path: str) -> tuple[int, int]:
    offsets = data.get("data_offsets") if isinstance(data, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(n) is not int for n in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        _bad(path, f"data_offsets {offsets!r}")
    return offsets[0], offsets[1]


def _slices(metadata: Any, path: str) -> dict[str, tuple[int, int]]:
    try:
        raw = json.loads(metadata.get(SLICES_KEY, "{}"))
        slices = {key: (int(a), int(b)) for key, (a, b) in raw.items()}
    except (AttributeError, TypeError, ValueError) as error:
        _bad(path, f"the slices in the header's metadata do not make sense: {error}")
    for key, (a, b) in slices.items():
        if not 0 <= a <= b:
            _bad(path, f"{key!r} has the slice [{a}, {b})")
    return slices


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _bad(path: str, what: str) -> NoReturn:
    raise CorruptCheckpointError(
        f"the header is damaged: {what}", remedy="use an older checkpoint", path=path
    )
