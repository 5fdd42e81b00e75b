"""A directory that DCP or its `HuggingFaceStorageWriter` wrote: recognised, and opened.

`.metadata`, in which DCP says what a checkpoint holds and where, is a pickle, and is read as data.
The other writer makes safetensors files with parts of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from smckpt.checkpoint.records.headers import Header, read_header
from smckpt.checkpoint.records.sealed import strict_json
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.formats.boxes import ForeignCheckpoint, SavedBox, SavedTensor, SavedValue
from smckpt.formats.pickled import Global, Inert, read_pickle
from smckpt.formats.readers.megatron import (
    backend_of,
    facts_of,
    model_facts_of,
    optimizers_of,
    unstacked,
)
from smckpt.formats.readers.torch_files import is_safetensors, stored_slot
from smckpt.formats.source_facts import yaml_beside
from smckpt.formats.source_files import ArchiveRecord, Folder, SourceFiles
from smckpt.formats.torch_archive import StoredTensor, open_archive, read_value
from smckpt.layout.entries import DTYPES, Path
from smckpt.layout.mesh import MOST_DIMS, Shape
from smckpt.layout.strided import Box
from smckpt.storage.urls import is_plain_name

METADATA = ".metadata"
LIMIT = 512 << 20  # bytes
_FEW = 1000  # parts of tensors, and keys of paths, however short the pickle is
_PART = 8  # bytes of a pickle take at most one part more: it can name one list again and again
_NAME = 4096  # characters of a file's path


class FileRange(NamedTuple):
    """Bytes of a file of the directory."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorMetadata:
    """A tensor, and the boxes of it that were saved, each in a place."""

    dtype: str
    shape: Shape
    boxes: tuple[tuple[Box, FileRange], ...]


@dataclass(frozen=True)
class Metadata:
    """tensors: by name. objects: names of other values, and where they are. paths: the places in
    the state dict, where they are known."""

    tensors: Mapping[str, TensorMetadata]
    objects: Mapping[str, FileRange]
    paths: Mapping[str, Path]


def read_metadata(data: bytes, where: str) -> Metadata:
    """
    Raises:
        CorruptCheckpointError: it is damaged, or points outside the directory.
        UsageError: its tensors are stored in a way that smckpt does not read.
    """
    try:
        if len(data) > LIMIT:
            raise ValueError(f"it has {len(data)} bytes, more than {LIMIT}")
        root = read_pickle(data)
        entries = _fields(root, "state_dict_metadata")
        positions = dict(_positions(_fields(root, "storage_data")))
        tensors, objects, left = {}, {}, _FEW + len(data) // _PART
        for name, entry in entries.items():
            if not isinstance(name, str) or not isinstance(entry, Inert):
                raise ValueError(f"the entry {name!r} is damaged")
            if entry.field("chunks") is None:  # some writers keep values without a place
                if (name, None) in positions:
                    objects[name] = positions[name, None]
            else:
                left = _less(left, entry.field("chunks"))
                shape = _shape(entry.field("size"))
                boxes: dict[Box, FileRange] = {}
                for chunk in entry.field("chunks"):
                    box = Box(_shape(chunk.field("offsets")), _shape(chunk.field("sizes")))
                    if not len(box.offsets) == len(box.sizes) == len(shape):
                        raise ValueError(f"{name} has a part of another number of dimensions")
                    stored = positions.get((name, box.offsets))
                    if stored is None:
                        raise ValueError(f"{name} has a part at {box.offsets} that is in no file")
                    if box.numel:
                        boxes[box] = stored  # what replicas saved is there once
                properties = entry.field("properties")
                state = properties.state
                found = state[0] if isinstance(state, tuple) else properties.field("dtype")
                if not isinstance(found, Global) or found.module != "torch":
                    raise ValueError(f"{name} has no dtype")
                if found.name not in DTYPES:
                    raise UsageError(
                        f"{name} has the dtype {found}",
                        remedy="save it in a dtype of plain numbers",
                    )
                tensors[name] = TensorMetadata(found.name, shape, tuple(boxes.items()))
        planned, left = root.field("planner_data"), _FEW + len(data)  # what it flattened
        paths: dict[str, Path] = {}
        for name, path in planned.items() if isinstance(planned, dict) else ():
            left = _less(left, path) if isinstance(path, (tuple, list)) else left
            if isinstance(path, (tuple, list)) and all(type(part) in (str, int) for part in path):
                paths[name] = tuple(path)
        return Metadata(tensors, objects, paths)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            error.path = where
            raise
        raise CorruptCheckpointError(
            f"this is no metadata of torch.distributed.checkpoint: {error}",
            remedy="fetch the file again, or use another checkpoint",
            path=where,
        ) from error


def _fields(root: Any, name: str) -> dict[Any, Any]:
    found = root.field(name) if isinstance(root, Inert) else None
    if not isinstance(found, dict):
        raise ValueError(f"it has no {name}")
    return found


def _positions(stored: dict[Any, Any]) -> Iterator[tuple[tuple[str, Shape | None], FileRange]]:
    """(name, offsets of the part) → where it is; offsets are None for what is no tensor."""
    for index, info in stored.items():
        if not isinstance(index, Inert) or not isinstance(info, Inert):
            raise ValueError("its storage_data is damaged")
        name, offsets = index.field("fqn"), index.field("offset")
        if info.field("transform_descriptors"):
            raise UsageError(
                f"{name} is stored through {info.field('transform_descriptors')}",
                remedy="save it without extensions of the writer (_extensions)",
            )
        file = info.field("relative_path")
        inside = isinstance(file, str) and all(map(is_plain_name, file.split("/")))
        if not inside or len(file) > _NAME:
            raise ValueError(f"it names the file {str(file)[:_NAME]!r}, which is not below it")
        offset, nbytes = (_whole(info.field(key)) for key in ("offset", "length"))
        key = (name, None if offsets is None else _shape(offsets))
        yield key, FileRange(file, offset, nbytes)


def _less(left: int, parts: Any) -> int:
    if len(parts) > left:
        raise ValueError("its lists are longer than it")
    return left - len(parts)


def _shape(value: Any) -> Shape:
    if not isinstance(value, (tuple, list)) or len(value) > MOST_DIMS:
        raise ValueError("a shape or place is no short list of numbers")
    return tuple(map(_whole, value))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no size or place")
    return value


DCP = "torch.distributed.checkpoint (DCP)"
_OF_RANK = re.compile(r"__\d+\.metadata")  # where each rank planned for itself
_ACCELERATE = "pytorch_model_fsdp_"
_NEMO = ("weights", "model_weights")  # beside `context` in NeMo 2; in an unpacked .nemo
_BELOW = (f"{_ACCELERATE}0", *_NEMO)


def open_dcp(folder: Folder) -> ForeignCheckpoint | None:
    """The checkpoint in a directory: for accelerate's, that of its first model; for NeMo's, its
    weights. None: it has none.

    Raises:
        CorruptCheckpointError: its metadata is damaged; a file is missing or cut short.
    """
    kind, outer = DCP, folder
    described = _described(folder)
    for below in () if described else _BELOW:
        if below in folder.folders and (inner := _described(folder.at(below))):
            folder, described = folder.at(below), inner
            break
    backend = backend_of(folder)
    if not described:
        return None
    if folder.name.startswith(_ACCELERATE):
        kind = f"accelerate, FSDP with {DCP}"
    # One checkpoint of what each rank says of its own part.
    first, *others = [read_metadata(folder.read(n, LIMIT), folder.files[n].path) for n in described]
    tensors, objects, paths = dict(first.tensors), dict(first.objects), dict(first.paths)
    for part in others:
        objects |= part.objects
        paths |= part.paths
        for name, tensor in part.tensors.items():
            known = tensors.get(name, tensor)
            boxes = tuple({**dict(tensor.boxes), **dict(known.boxes)}.items())
            tensors[name] = TensorMetadata(known.dtype, known.shape, boxes)
    found = Metadata(tensors, objects, paths)
    records = _records(folder, found)
    saved = {
        name: SavedTensor(
            name, found.paths.get(name, (name,)), tensor.dtype, tensor.shape,
            tuple(
                SavedBox(box, records[at].path, partial(_find, folder.source, records[at]))
                for box, at in tensor.boxes
            ),
        )
        for name, tensor in found.tensors.items()
    }  # fmt: skip
    values = {
        name: SavedValue(
            found.paths.get(name, (name,)), partial(read_value, folder.source, records[at], name)
        )
        for name, at in found.objects.items()
    }
    # DCP records the keys of lists as numbers, and those of all other containers as text
    lists = {
        path[:depth]: "list"
        # NumPy's arrays are among the values
        for path in (*(one.path for one in saved.values()), *(one.path for one in values.values()))
        for depth, key in enumerate(path)
        if isinstance(key, int)
    }
    made = ForeignCheckpoint(
        folder.url, kind, saved, folder.source, tuple(sorted(found.objects)),
        {at.file: folder.find(at.file).nbytes for at in records},  # type: ignore[union-attr]
        values=values, containers=lists,
    )  # fmt: skip
    if backend is None:
        return made
    return replace(
        made,
        format=f"{'NeMo, ' if folder.name in _NEMO else ''}Megatron-core's distributed checkpoint "
        f"({backend})",
        saved=unstacked(saved),
        facts=facts_of(folder), of_optimizers=optimizers_of(saved),
        model_facts=(*model_facts_of(folder), *yaml_beside(outer)),
    )  # fmt: skip


def _described(folder: Folder) -> list[str]:
    """The files that say what is there."""
    if METADATA in folder.files:
        return [METADATA]
    return [name for name in folder.files if _OF_RANK.fullmatch(name)]


def _records(folder: Folder, found: Metadata) -> dict[FileRange, ArchiveRecord]:
    """The bytes at each place that is named.

    Raises:
        CorruptCheckpointError: a file is missing or too short; two parts share bytes.
    """
    positions = [at for tensor in found.tensors.values() for _, at in tensor.boxes]
    files: dict[str, ArchiveRecord] = {}
    records: dict[FileRange, ArchiveRecord] = {}
    last = FileRange("", 0, 0)
    for at in sorted({*positions, *found.objects.values()}):
        if at.file not in files:
            file = folder.find(at.file)
            if file is None:
                raise CorruptCheckpointError(
                    f"the metadata names {at.file}, which is missing",
                    remedy="fetch the files of all ranks",
                )
            files[at.file] = file
        file = files[at.file]
        if at.offset + at.nbytes > file.nbytes:
            raise CorruptCheckpointError(
                f"the file has {file.nbytes} bytes, but the metadata places a tensor at bytes "
                f"{at.offset} to {at.offset + at.nbytes}",
                remedy="fetch the file again",
                path=file.path,
            )
        if at.file == last.file and at.offset < last.offset + last.nbytes:
            raise CorruptCheckpointError(
                f"the metadata places two parts at byte {at.offset}",
                remedy="use another checkpoint",
                path=file.path,
            )
        records[at] = file.part(at.offset, at.nbytes)
        last = at
    if len(positions) != len(set(positions)):
        raise CorruptCheckpointError(
            "the metadata places two parts at the same bytes",
            remedy="use another checkpoint",
        )
    return records


def _find(source: SourceFiles, record: ArchiveRecord) -> StoredTensor:
    """The tensor in a part of a file: an archive of `torch.save`."""
    root = open_archive(source, record).root
    if not isinstance(root, StoredTensor):
        raise CorruptCheckpointError(
            f"bytes {record.offset} to {record.offset + record.nbytes} hold no dense tensor, but "
            f"{root!r}",
            remedy="save dense tensors",
            path=record.path,
        )
    return root


FORMAT = "torch's HuggingFaceStorageWriter (safetensors with parts of tensors)"
_SHARDED = "sharded"  # beside the consolidated files
_SHARDING_INFO = "DCP_SHARDING_INFO"
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
        if any(_SHARDING_INFO in header.metadata for header in headers.values()):
            headers |= {n: _header(within, f) for n, f in files.items() if n not in headers}
            return _opened(within, headers)
    return None


def _opened(folder: Folder, headers: dict[str, Header]) -> ForeignCheckpoint:
    numbers = {int(m.group(1)) for file in headers if (m := _NUMBER.fullmatch(file))}
    if lost := sorted(set(range(1, max(numbers, default=0))) - numbers):
        raise CorruptCheckpointError(
            f"the files of shards {lost[:8]} are missing", remedy="fetch the files of all ranks",
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
    out = []
    try:
        positions = strict_json(header.metadata[_SHARDING_INFO])
        for name, slot in header.slots.items():
            offsets = positions[name]["saved_offsets"]
            if len(offsets) != len(slot.shape) or any(type(n) is not int or n < 0 for n in offsets):
                raise ValueError(f"{name} is at {offsets}")
            out.append((name, Box(tuple(offsets), slot.shape), stored_slot(file, name, slot)))
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptCheckpointError(
            f"its {_SHARDING_INFO} is damaged: {error}",
            remedy="fetch the file again",
            path=file.path,
        ) from error
    return out
