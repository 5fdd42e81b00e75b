"""Single files of states: of `torch.save`, and safetensors; and the directories of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from smckpt.errors import CorruptCheckpointError, StateError, UsageError
from smckpt.layout.containers import container_kind
from smckpt.layout.entries import Path as StatePath
from smckpt.layout.entries import dotted
from smckpt.storage.urls import is_local
from smckpt.translate.archives.source_files import ArchiveRecord, SourceFiles
from smckpt.translate.archives.torch_archive import StoredTensor, is_archive, open_archive
from smckpt.translate.archives.torch_values import plain_load
from smckpt.translate.sources.boxes import SavedTensor, whole_tensor
from smckpt.translate.sources.foreign import ForeignCheckpoint, SavedValue
from smckpt.translate.sources.torch_files import is_safetensors, load_inert, safetensors_of

__all__ = ["open_state"]

_PLAIN = ("Size", "device", "dtype")  # of torch


def open_state(files: Sequence[ArchiveRecord], source: SourceFiles) -> ForeignCheckpoint:
    """The state in a file, or in the files of a directory of Hugging Face.

    Raises:
        UsageError: a file has another format.
        CorruptCheckpointError: a file is damaged, or a tensor is in two files.
    """
    first, *others = [_opened(source, file) for file in files]
    saved, values, sizes = dict(first.saved), dict(first.values), dict(first.files)
    for part in others:
        if twice := sorted(saved.keys() & part.saved.keys()):
            raise CorruptCheckpointError(
                f"{twice[0]} is here and in another file",
                remedy="remove the files of another model", path=part.url,
            )  # fmt: skip
        saved |= part.saved
        values |= part.values
        sizes |= part.files
    return replace(first, saved=saved, values=values, objects=tuple(values), files=sizes)


def _opened(source: SourceFiles, file: ArchiveRecord) -> ForeignCheckpoint:
    if is_safetensors(source, file):
        tensors = safetensors_of(source, file)
        whole = {name: whole_tensor((name,), stored) for name, stored in tensors.items()}
        sizes = {_name(file): file.nbytes}
        return ForeignCheckpoint(file.path, "safetensors", whole, source, files=sizes)
    if is_archive(source.read(file, 0, min(4, file.nbytes))):
        # torch says what the state is, with tensors that are mapped and not read. The archive, read
        # in the same order, says where their bytes are. In a store the archive says both.
        root = state = open_archive(source, file).root
        if is_local(file.path) and file == source.whole(file.path):
            try:
                state = plain_load(file.path, mmap=True)
            except Exception:  # torch, zip and pickle raise many kinds
                state = load_inert(Path(file.path))
        if not isinstance(state, Mapping) or not isinstance(root, dict):
            raise UsageError(
                f"the file holds a {type(state).__name__}", remedy="pass a file of a state dict",
                path=file.path,
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
                    path=file.path,
                )
            if isinstance(stored, StoredTensor):
                saved[name] = whole_tensor(path, stored)
            else:
                values[name] = SavedValue(path, partial(_plain, name, value, file))
        return ForeignCheckpoint(
            file.path, "torch.save", saved, source, tuple(values), {_name(file): file.nbytes},
            values=values, containers=containers,
        )  # fmt: skip
    raise UsageError(
        "the file is neither safetensors nor of today's torch.save",
        remedy="load it with the torch that wrote it, and save it again", path=file.path,
    )  # fmt: skip


def _name(file: ArchiveRecord) -> str:
    return file.path.rpartition("/")[2]


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
    for key, below, item in inner:
        at = key if type(key) in (str, int) else str(key)
        yield from _leaves((*path, at), below, item, containers)


def _has_tensor(stored: Any) -> bool:
    if isinstance(stored, (dict, list, tuple)):
        return any(map(_has_tensor, stored.values() if isinstance(stored, dict) else stored))
    return isinstance(stored, StoredTensor)


def _plain(name: str, value: Any, file: ArchiveRecord) -> Any:
    """The value, if it is plain data.

    Raises:
        StateError: it has tensors that are not dense ones, or objects of unknown classes.
    """
    if odd := next(_odd(value), None):
        raise StateError(
            f"the value {name} has {odd}, which is not plain data",
            remedy="leave it out by name (ignore=), or save dense tensors and plain values",
            path=file.path,
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
