"""`.metadata`, in which DCP says what a checkpoint holds and where: a pickle, read as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.layout.entries import DTYPES, Path
from smckpt.layout.mesh import MOST_DIMS, Shape
from smckpt.layout.strided import Box
from smckpt.storage.urls import is_plain_name
from smckpt.translate.archives.pickled import Global, Inert, read_pickle

__all__ = ["LIMIT", "METADATA", "FileRange", "Metadata", "TensorMetadata", "read_metadata"]

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
        places = dict(_places(_fields(root, "storage_data")))
        tensors, objects, left = {}, {}, _FEW + len(data) // _PART
        for name, entry in entries.items():
            if not isinstance(name, str) or not isinstance(entry, Inert):
                raise ValueError(f"the entry {name!r} is damaged")
            if entry.field("chunks") is None:  # some writers keep values without a place
                if (name, None) in places:
                    objects[name] = places[name, None]
            else:
                left = _less(left, entry.field("chunks"))
                shape = _shape(entry.field("size"))
                boxes: dict[Box, FileRange] = {}
                for chunk in entry.field("chunks"):
                    box = Box(_shape(chunk.field("offsets")), _shape(chunk.field("sizes")))
                    if not len(box.offsets) == len(box.sizes) == len(shape):
                        raise ValueError(f"{name} has a part of another number of dimensions")
                    stored = places.get((name, box.offsets))
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


def _places(stored: dict[Any, Any]) -> Iterator[tuple[tuple[str, Shape | None], FileRange]]:
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
