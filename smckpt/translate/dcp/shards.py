"""What DCP's `HuggingFaceStorageWriter` writes: safetensors files with parts of tensors."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from smckpt.checkpoint.headers import Header, read_header
from smckpt.checkpoint.strict_json import strict_json
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, row_major_strides
from smckpt.translate.boxes import SavedBox, SavedTensor
from smckpt.translate.foreign import ForeignCheckpoint
from smckpt.translate.torch_archive import ArchiveRecord, StoredTensor

__all__ = ["open_shards"]

FORMAT = "torch's HuggingFaceStorageWriter (safetensors with parts of tensors)"
_SHARDED = "sharded"  # beside the consolidated files
_PLACES = "DCP_SHARDING_INFO"
_NUMBER = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")


def open_shards(path: Path) -> ForeignCheckpoint | None:
    """The checkpoint in a directory, or in `sharded` below it; None: it has none.

    Raises:
        CorruptCheckpointError: a file is damaged, or one of them is missing.
    """
    for folder in (path, path / _SHARDED):
        found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        files = [file for file in found if file.is_file()]  # to open a pipe would wait for ever
        headers = {file: _header(file) for file in files[:1]}
        if headers and _PLACES in headers[files[0]].metadata:
            headers |= {file: _header(file) for file in files[1:]}
            return _opened(folder, headers)
    return None


def _opened(folder: Path, headers: dict[Path, Header]) -> ForeignCheckpoint:
    numbers = {int(m.group(1)) for file in headers if (m := _NUMBER.fullmatch(file.name))}
    if lost := sorted(set(range(1, max(numbers, default=0))) - numbers):
        raise CorruptCheckpointError(
            f"the files of shards {lost[:8]} are missing", remedy="fetch the files of all ranks",
            path=str(folder),
        )  # fmt: skip
    boxes: dict[str, dict[Box, SavedBox]] = {}
    dtypes: dict[str, str] = {}
    for file, header in headers.items():
        for name, box, stored in _parts(file, header):
            if dtypes.setdefault(name, stored.dtype) != stored.dtype:
                raise CorruptCheckpointError(
                    f"{name} is {stored.dtype} here, and {dtypes[name]} in another file",
                    remedy="files of two checkpoints are mixed: use another one", path=str(file),
                )  # fmt: skip
            boxes.setdefault(name, {})[box] = SavedBox(box, str(file), partial(_same, stored))
    saved = {
        name: SavedTensor(name, (name,), dtypes[name], _shape(found), tuple(found.values()))
        for name, found in boxes.items()
    }
    sizes = {file.name: file.stat().st_size for file in headers}
    return ForeignCheckpoint(str(folder), FORMAT, saved, files=sizes)


def _same(stored: StoredTensor) -> StoredTensor:
    return stored


def _shape(boxes: dict[Box, Any]) -> Shape:
    """The files do not tell the shape: it is as far as the parts reach."""
    return tuple(
        max(offset + size for offset, size in ends)
        for ends in zip(*(zip(box.offsets, box.sizes, strict=True) for box in boxes), strict=True)
    )


def _header(file: Path) -> Header:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        return read_header(lambda a, b: os.pread(descriptor, b - a, a), size, str(file))
    finally:
        os.close(descriptor)


def _parts(file: Path, header: Header) -> list[tuple[str, Box, StoredTensor]]:
    codes = {d.code: d.name for d in DTYPES.values() if d.code is not None}
    out = []
    try:
        places = strict_json(header.metadata[_PLACES])
        for name, slot in header.slots.items():
            offsets = places[name]["saved_offsets"]
            if len(offsets) != len(slot.shape) or any(type(n) is not int or n < 0 for n in offsets):
                raise ValueError(f"{name} is at {offsets}")
            record = ArchiveRecord(str(file), slot.offset, slot.nbytes)
            strides = row_major_strides(slot.shape)
            stored = StoredTensor(codes[slot.code], slot.shape, strides, 0, record)
            box = Box(tuple(offsets), slot.shape)
            out.append((name, box, stored))
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            f"its {_PLACES} is damaged: {error}", remedy="fetch the file again", path=str(file)
        ) from error
    return out
