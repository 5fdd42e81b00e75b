"""A directory that DCP wrote: recognised, and opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import Path as StatePath
from smckpt.translate.boxes import SavedBox, SavedTensor
from smckpt.translate.dcp.megatron import backend_of, facts_of, optimizers_of, unstacked
from smckpt.translate.dcp.metadata import METADATA, Metadata, Place, TensorMetadata, read_metadata
from smckpt.translate.foreign import ForeignCheckpoint, SavedValue
from smckpt.translate.torch_archive import StoredTensor, open_archive
from smckpt.translate.torch_values import read_value

__all__ = ["DCP", "open_dcp"]

DCP = "torch.distributed.checkpoint (DCP)"
_OF_RANK = re.compile(r"__\d+\.metadata")  # where each rank planned for itself
_ACCELERATE = "pytorch_model_fsdp_"
_NEMO = ("weights", "model_weights")  # beside `context` in NeMo 2; in an unpacked .nemo
_BELOW = (f"{_ACCELERATE}0", *_NEMO)


def open_dcp(path: Path) -> ForeignCheckpoint | None:
    """The checkpoint in a directory: for accelerate's, that of its first model; for NeMo's, its
    weights. None: it has none.

    Raises:
        CorruptCheckpointError: its metadata is damaged; a file is missing or cut short.
    """
    kind = DCP
    for below in () if _described(path) else _BELOW:
        if _described(path / below):
            path = path / below
            break
    backend = backend_of(path)
    described = _described(path)
    if not described:
        return None
    if path.name.startswith(_ACCELERATE):
        kind = f"accelerate, FSDP with {DCP}"
    found = _joined([read_metadata((path / n).read_bytes(), str(path / n)) for n in described])
    sizes = _files(path, found)
    saved = {
        name: SavedTensor(
            name, found.paths.get(name, (name,)), tensor.dtype, tensor.shape,
            tuple(
                SavedBox(box, str(path / at.file), partial(_find, path / at.file, at))
                for box, at in tensor.boxes
            ),
        )
        for name, tensor in found.tensors.items()
    }  # fmt: skip
    values = {
        name: SavedValue(
            found.paths.get(name, (name,)),
            partial(read_value, path / at.file, at.offset, at.nbytes, name),
        )
        for name, at in found.objects.items()
    }
    made = ForeignCheckpoint(
        str(path), kind, saved, tuple(sorted(found.objects)), sizes, values=values,
        containers=_lists(t.path for t in saved.values()),
    )  # fmt: skip
    if backend is None:
        return made
    return replace(
        made,
        format=f"{'NeMo, ' if path.name in _NEMO else ''}Megatron-core's distributed checkpoint "
        f"({backend})",
        saved=unstacked(saved),
        facts=facts_of(path), of_optimizers=optimizers_of(saved),
    )  # fmt: skip


def _lists(paths: Iterable[StatePath]) -> dict[StatePath, str]:
    """The lists above tensors. DCP records the keys of all other containers as text."""
    return {
        path[:depth]: "list" for path in paths for depth in range(len(path))
        if isinstance(path[depth], int)
    }  # fmt: skip


def _described(path: Path) -> list[str]:
    """The files that say what is there."""
    if (path / METADATA).is_file():
        return [METADATA]
    found = path.iterdir() if path.is_dir() else ()
    names = sorted(entry.name for entry in found if entry.is_file())
    return [name for name in names if _OF_RANK.fullmatch(name)]


def _joined(parts: Iterable[Metadata]) -> Metadata:
    """One checkpoint of what each rank says of its own part."""
    first, *others = parts
    tensors, objects, paths = dict(first.tensors), dict(first.objects), dict(first.paths)
    for part in others:
        objects |= part.objects
        paths |= part.paths
        for name, tensor in part.tensors.items():
            known = tensors.get(name, tensor)
            boxes = tuple({**dict(tensor.boxes), **dict(known.boxes)}.items())
            tensors[name] = TensorMetadata(known.dtype, known.shape, boxes)
    return Metadata(tensors, objects, paths)


def _files(path: Path, found: Metadata) -> dict[str, int]:
    """The sizes of the files that are named.

    Raises:
        CorruptCheckpointError: a file is missing or too short; two parts share bytes.
    """
    places = [at for tensor in found.tensors.values() for _, at in tensor.boxes]
    sizes: dict[str, int] = {}
    last = Place("", 0, 0)
    for at in sorted({*places, *found.objects.values()}):
        file = path / at.file
        if at.file not in sizes:
            if not file.is_file():
                raise CorruptCheckpointError(
                    f"the metadata names {at.file}, which is missing",
                    remedy="fetch the files of all ranks",
                    path=str(path),
                )
            sizes[at.file] = file.stat().st_size
        if at.offset + at.nbytes > sizes[at.file]:
            raise CorruptCheckpointError(
                f"the file has {sizes[at.file]} bytes, but the metadata places a tensor at bytes "
                f"{at.offset} to {at.offset + at.nbytes}",
                remedy="fetch the file again",
                path=str(file),
            )
        if at.file == last.file and at.offset < last.offset + last.nbytes:
            raise CorruptCheckpointError(
                f"the metadata places two parts at byte {at.offset}",
                remedy="use another checkpoint",
                path=str(file),
            )
        last = at
    if len(places) != len(set(places)):
        raise CorruptCheckpointError(
            "the metadata places two parts at the same bytes",
            remedy="use another checkpoint",
            path=str(path),
        )
    return sizes


def _find(file: Path, at: Place) -> StoredTensor:
    """The tensor in a part of a file: an archive of `torch.save`."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        root = open_archive(descriptor, str(file), at.offset, at.nbytes).root
    finally:
        os.close(descriptor)
    if not isinstance(root, StoredTensor):
        raise CorruptCheckpointError(
            f"bytes {at.offset} to {at.offset + at.nbytes} hold no dense tensor, but {root!r}",
            remedy="save dense tensors",
            path=str(file),
        )
    return root
