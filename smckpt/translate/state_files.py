"""Single files of states: of `torch.save`, and safetensors; and the directories of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from smckpt.checkpoint.headers import read_header
from smckpt.errors import CorruptCheckpointError, StateError, UsageError
from smckpt.layout.containers import container_kind
from smckpt.layout.entries import DTYPES, dotted
from smckpt.layout.entries import Path as StatePath
from smckpt.layout.strided import Box, row_major_strides
from smckpt.translate.boxes import SavedBox, SavedTensor
from smckpt.translate.foreign import ForeignCheckpoint, SavedValue
from smckpt.translate.rank_files import weight_files
from smckpt.translate.torch_archive import ArchiveRecord, StoredTensor, is_archive, open_archive
from smckpt.translate.torch_files import load_inert
from smckpt.translate.torch_values import plain_load

__all__ = ["open_state"]

_PLAIN = ("Size", "device", "dtype")  # of torch


def open_state(path: Path) -> ForeignCheckpoint | None:
    """The state in a file, or the weights in a directory of Hugging Face. None: it is neither.

    Raises:
        UsageError: a file has another format.
        CorruptCheckpointError: a file is damaged, or a tensor is in two files.
    """
    if path.is_dir():
        files = weight_files(path)
        return _joined(path, [_opened(file) for file in files]) if files else None
    return _opened(path)


def _opened(file: Path) -> ForeignCheckpoint:
    if not file.is_file():  # to open a pipe would wait for ever
        raise UsageError("this is no regular file", remedy="remove it", path=str(file))
    with file.open("rb") as opened:
        start = opened.read(9)
    if start[8:9] == b"{":
        return _of_safetensors(file)
    if is_archive(start):
        return _of_torch(file)
    raise UsageError(
        "the file is neither safetensors nor of today's torch.save",
        remedy="load it with the torch that wrote it, and save it again", path=str(file),
    )  # fmt: skip


def _joined(directory: Path, parts: Sequence[ForeignCheckpoint]) -> ForeignCheckpoint:
    saved: dict[str, SavedTensor] = {}
    values: dict[str, SavedValue] = {}
    for part in parts:
        if twice := sorted(saved.keys() & part.saved.keys()):
            raise CorruptCheckpointError(
                f"{twice[0]} is here and in another file",
                remedy="remove the files of another model", path=part.url,
            )  # fmt: skip
        saved |= part.saved
        values |= part.values
    files = {Path(part.url).name: next(iter(part.files.values())) for part in parts}
    kind = f"Hugging Face ({parts[0].format})"
    return ForeignCheckpoint(str(directory), kind, saved, tuple(values), files, values=values)


# -- safetensors -----------------------------------------------------------------------------------


def _of_safetensors(file: Path) -> ForeignCheckpoint:
    codes = {d.code: d.name for d in DTYPES.values() if d.code is not None}
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        header = read_header(lambda a, b: os.pread(opened.fileno(), b - a, a), size, str(file))
    saved = {}
    for name, slot in header.slots.items():
        record = ArchiveRecord(str(file), slot.offset, slot.nbytes)
        strides = row_major_strides(slot.shape)
        stored = StoredTensor(codes[slot.code], slot.shape, strides, 0, record)
        saved[name] = _whole((name,), stored)
    return ForeignCheckpoint(str(file), "safetensors", saved, files={file.name: size})


def _whole(path: StatePath, stored: StoredTensor) -> SavedTensor:
    find = partial(_same, stored)
    box = SavedBox(Box.whole(stored.shape), stored.record.path, find)
    return SavedTensor(dotted(path), path, stored.dtype, stored.shape, (box,))


def _same(stored: StoredTensor) -> StoredTensor:
    return stored


# -- torch.save ------------------------------------------------------------------------------------


def _of_torch(file: Path) -> ForeignCheckpoint:
    """torch says what the state is, with tensors that are mapped and not read. The archive, read in
    the same order, says where their bytes are."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        root = open_archive(descriptor, str(file)).root
    finally:
        os.close(descriptor)
    try:
        state = plain_load(file, mmap=True)
    except Exception:  # torch, zip and pickle raise many kinds
        state = load_inert(file)
    if not isinstance(state, Mapping) or not isinstance(root, dict):
        raise UsageError(
            f"the file holds a {type(state).__name__}", remedy="pass a file of a state dict",
            path=str(file),
        )  # fmt: skip
    saved: dict[str, SavedTensor] = {}
    values: dict[str, SavedValue] = {}
    containers: dict[StatePath, str] = {}
    for path, stored, value in _leaves((), root, state, containers):
        name = dotted(path)
        if name in saved or name in values:
            raise UsageError(
                f"two entries of the state have the dotted name {name}",
                remedy="rename one: 'a.b' beside {'a': {'b': …}} cannot be told apart",
                path=str(file),
            )
        if isinstance(stored, StoredTensor):
            saved[name] = _whole(path, stored)
        else:
            values[name] = SavedValue(path, partial(_plain, name, value, file))
    size = file.stat().st_size
    return ForeignCheckpoint(
        str(file), "torch.save", saved, tuple(values), {file.name: size}, values=values,
        containers=containers,
    )  # fmt: skip


def _leaves(
    path: StatePath, stored: Any, value: Any, containers: dict[StatePath, str]
) -> Iterator[tuple[StatePath, Any, Any]]:
    """Tensors, and the largest subtrees without one: the place, what the archive has, and torch."""
    if isinstance(stored, StoredTensor) or not _has_tensor(stored):
        yield path, stored, value
        return
    if (kind := container_kind(value)) is not None:
        containers[path] = kind
    if isinstance(stored, dict):
        inner: Sequence[Any] = [(k, stored[k], value[k]) for k in stored]
    else:
        inner = [(i, *pair) for i, pair in enumerate(zip(stored, value, strict=True))]
    for key, below, its in inner:
        at = key if type(key) in (str, int) else str(key)
        yield from _leaves((*path, at), below, its, containers)


def _has_tensor(stored: Any) -> bool:
    if isinstance(stored, (dict, list, tuple)):
        return any(map(_has_tensor, stored.values() if isinstance(stored, dict) else stored))
    return isinstance(stored, StoredTensor)


def _plain(name: str, value: Any, file: Path) -> Any:
    """The value, if it is plain data.

    Raises:
        StateError: it has tensors that are not dense ones, or objects of unknown classes.
    """
    if odd := next(_odd(value), None):
        raise StateError(
            f"the value {name} has {odd}, which is not plain data",
            remedy="leave it out by name (ignore=), or save dense tensors and plain values",
            path=str(file),
        )
    return value


def _odd(value: Any) -> Iterator[str]:
    kind = type(value)
    if kind.__module__.startswith(("torch", "smckpt")) and kind.__name__ not in _PLAIN:
        yield f"a {kind.__name__}"
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _odd(inner)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            yield from _odd(inner)
