"""Reading a shard file's header: every bound is checked before anything in it is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from smckpt.checkpoint.crc import BLOCK
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.image import HEADER_LIMIT, SLICES_KEY

__all__ = ["Header", "HeaderEntry", "read_header"]

_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
    "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class HeaderEntry(NamedTuple):
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


def read_header(read: Callable[[int, int], bytes | bytearray], size: int, path: str) -> Header:
    """Read and check the header of a file of `size` bytes.

    Args:
        read: gives the bytes [start, stop) of the file.
        path: of the file, for errors.

    Raises:
        CorruptCheckpointError: naming what is wrong with which key.
    """
    if size < 8:
        _bad(path, f"{size} bytes hold no header")
    head = read(0, min(BLOCK, size))
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        _bad(path, f"bytes 0 to 8 say the header has {length} bytes, the file has {size}")
    start = 8 + length
    if start > len(head):
        head = head + read(len(head), start)
    try:
        table = json.loads(head[8:start].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _bad(path, f"the header (bytes 8 to {start}) is no JSON object: {error}")
    if not isinstance(table, dict):
        _bad(path, "the header is no JSON object")
    slices = _slices(table.pop("__metadata__", {}), path)
    entries = _entries(table, start, size, slices, path)
    if stray := sorted(slices.keys() - entries.keys()):
        _bad(path, f"slices of {stray[0]!r}, which is not in the file")
    return Header(start, entries)


def _entries(
    table: dict[str, Any], start: int, size: int, slices: dict[str, tuple[int, int]], path: str
) -> dict[str, HeaderEntry]:
    entries: dict[str, HeaderEntry] = {}
    at = start
    placed = sorted((*_offsets(data, path), key) for key, data in table.items())
    for low, high, key in placed:
        entry = _entry(key, table[key], low, high, start, slices.get(key), path)
        if entry.offset != at:
            _bad(path, f"{key!r} begins at byte {entry.offset} of the file, expected {at}")
        at += entry.nbytes
        entries[key] = entry
    if at != size:
        _bad(path, f"the arrays end at byte {at}, the file at {size}")
    return entries


def _entry(
    key: str,
    data: dict[str, Any],
    low: int,
    high: int,
    start: int,
    slice_: tuple[int, int] | None,
    path: str,
) -> HeaderEntry:
    code, shape = data.get("dtype"), data.get("shape")
    if not isinstance(code, str) or code not in _SIZES:
        _bad(path, f"{key!r} has the unknown dtype {code!r}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        _bad(path, f"{key!r} has the shape {shape!r}")
    if math.prod(shape) * _SIZES[code] != high - low:
        _bad(path, f"{key!r}: {code} {shape} does not take {high - low} bytes")
    if slice_ is not None and (not shape or shape[0] != slice_[1] - slice_[0]):
        _bad(path, f"{key!r}: elements {slice_[0]} to {slice_[1]} in the shape {shape}")
    return HeaderEntry(code, tuple(shape), start + low, high - low, slice_)


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
    """The elements that the file has of entries which it does not have whole."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _bad(path, "its metadata is no object of texts")
    try:
        slices = json.loads(metadata.get(SLICES_KEY, "{}"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _bad(path, f"the slices in its metadata are no JSON object: {error}")
    if not isinstance(slices, dict):
        _bad(path, "the slices in its metadata are no JSON object")
    for key, pair in slices.items():
        if (
            not isinstance(pair, list)
            or [type(n) for n in pair] != [int, int]
            or not 0 <= pair[0] <= pair[1]
        ):
            _bad(path, f"{key!r} has the slice {pair!r}")
    return {key: (pair[0], pair[1]) for key, pair in slices.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _bad(path: str, what: str) -> NoReturn:
    raise CorruptCheckpointError(
        f"the header is damaged: {what}", remedy="use an older checkpoint", path=path
    )
