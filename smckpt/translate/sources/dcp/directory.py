"""A directory that DCP wrote: recognised, and opened."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from smckpt.errors import CorruptCheckpointError
from smckpt.translate.archives.folders import Folder
from smckpt.translate.archives.source_files import ArchiveRecord, SourceFiles
from smckpt.translate.archives.torch_archive import StoredTensor, open_archive
from smckpt.translate.archives.torch_values import read_value
from smckpt.translate.sources.boxes import SavedBox, SavedTensor
from smckpt.translate.sources.dcp.megatron import (
    backend_of,
    facts_of,
    model_facts_of,
    optimizers_of,
    unstacked,
)
from smckpt.translate.sources.dcp.metadata import (
    LIMIT,
    METADATA,
    FileRange,
    Metadata,
    TensorMetadata,
    read_metadata,
)
from smckpt.translate.sources.foreign import ForeignCheckpoint, SavedValue
from smckpt.translate.sources.source_facts import yaml_beside

__all__ = ["DCP", "open_dcp"]

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
        tensor.path[:depth]: "list"
        for tensor in saved.values()
        for depth, key in enumerate(tensor.path)
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
    places = [at for tensor in found.tensors.values() for _, at in tensor.boxes]
    files: dict[str, ArchiveRecord] = {}
    records: dict[FileRange, ArchiveRecord] = {}
    last = FileRange("", 0, 0)
    for at in sorted({*places, *found.objects.values()}):
        if at.file not in files:
            file = folder.find(at.file)
            if file is None:
                raise CorruptCheckpointError(
                    f"the metadata names {at.file}, which is missing",
                    remedy="fetch the files of all ranks",
                    path=folder.url,
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
    if len(places) != len(set(places)):
        raise CorruptCheckpointError(
            "the metadata places two parts at the same bytes",
            remedy="use another checkpoint",
            path=folder.url,
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
