"""What DCP's `HuggingFaceStorageWriter` writes: safetensors files with parts of tensors."""

from __future__ import annotations

import re
from functools import partial

from smckpt.checkpoint.records.headers import Header, read_header
from smckpt.checkpoint.records.strict_json import strict_json
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import DTYPES
from smckpt.layout.strided import Box, row_major_strides
from smckpt.translate.archives.folders import Folder
from smckpt.translate.archives.source_files import ArchiveRecord
from smckpt.translate.archives.torch_archive import StoredTensor
from smckpt.translate.sources.boxes import SavedBox, SavedTensor
from smckpt.translate.sources.foreign import ForeignCheckpoint
from smckpt.translate.sources.torch_files import is_safetensors

__all__ = ["open_shards"]

FORMAT = "torch's HuggingFaceStorageWriter (safetensors with parts of tensors)"
_SHARDED = "sharded"  # beside the consolidated files
_PLACES = "DCP_SHARDING_INFO"
_NUMBER = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")


def open_shards(folder: Folder) -> ForeignCheckpoint | None:
    """The checkpoint in a directory, or in `sharded` below it; None: it has none.

    Raises:
        CorruptCheckpointError: a file is damaged, or one of them is missing.
    """
    below = [folder.at(_SHARDED)] if _SHARDED in folder.folders else []
    for within in (folder, *below):
        files = {n: file for n, file in within.files.items() if n.endswith(".safetensors")}
        headers = {n: _header(within, file) for n, file in [*files.items()][:1]}
        if any(_PLACES in header.metadata for header in headers.values()):
            headers |= {n: _header(within, f) for n, f in files.items() if n not in headers}
            return _opened(within, headers)
    return None


def _opened(folder: Folder, headers: dict[str, Header]) -> ForeignCheckpoint:
    numbers = {int(m.group(1)) for file in headers if (m := _NUMBER.fullmatch(file))}
    if lost := sorted(set(range(1, max(numbers, default=0))) - numbers):
        raise CorruptCheckpointError(
            f"the files of shards {lost[:8]} are missing", remedy="fetch the files of all ranks",
            path=folder.url,
        )  # fmt: skip
    boxes: dict[str, dict[Box, SavedBox]] = {}
    dtypes: dict[str, str] = {}
    for name_of_file, header in headers.items():
        file = folder.files[name_of_file]
        for name, box, stored in _parts(file, header):
            if dtypes.setdefault(name, stored.dtype) != stored.dtype:
                raise CorruptCheckpointError(
                    f"{name} is {stored.dtype} here, and {dtypes[name]} in another file",
                    remedy="files of two checkpoints are mixed: use another one", path=file.path,
                )  # fmt: skip
            boxes.setdefault(name, {})[box] = SavedBox.of(box, stored)
    saved = {}
    for name, found in boxes.items():
        # the files do not tell the shape: it is as far as the parts reach
        ends = zip(*(zip(box.offsets, box.sizes, strict=True) for box in found), strict=True)
        shape = tuple(max(offset + size for offset, size in end) for end in ends)
        saved[name] = SavedTensor(name, (name,), dtypes[name], shape, tuple(found.values()))
    sizes = {file: folder.files[file].nbytes for file in headers}
    return ForeignCheckpoint(folder.url, FORMAT, saved, folder.source, files=sizes)


def _header(folder: Folder, file: ArchiveRecord) -> Header:
    is_safetensors(folder.source, file)  # refuses what git-lfs has not fetched
    return read_header(partial(folder.source.read, file), file.nbytes, file.path)


def _parts(file: ArchiveRecord, header: Header) -> list[tuple[str, Box, StoredTensor]]:
    codes = {d.code: d.name for d in DTYPES.values() if d.code is not None}
    out = []
    try:
        places = strict_json(header.metadata[_PLACES])
        for name, slot in header.slots.items():
            offsets = places[name]["saved_offsets"]
            if len(offsets) != len(slot.shape) or any(type(n) is not int or n < 0 for n in offsets):
                raise ValueError(f"{name} is at {offsets}")
            record = file.part(slot.offset, slot.nbytes)
            strides = row_major_strides(slot.shape)
            stored = StoredTensor(codes[slot.code], slot.shape, strides, 0, record)
            box = Box(tuple(offsets), slot.shape)
            out.append((name, box, stored))
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            f"its {_PLACES} is damaged: {error}", remedy="fetch the file again", path=file.path
        ) from error
    return out
