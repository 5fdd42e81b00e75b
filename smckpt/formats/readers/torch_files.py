"""The state in a file of `torch.save` or safetensors, a rank's or whole. No code in it is run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from smckpt.checkpoint.commits.foreign import not_read
from smckpt.checkpoint.reading.catalogue import LogicalTensor
from smckpt.checkpoint.records.headers import StoredSlot, read_header
from smckpt.checkpoint.records.objects import refuse_inflating
from smckpt.errors import CorruptCheckpointError, StateError, UsageError
from smckpt.formats.boxes import ForeignCheckpoint, SavedTensor, SavedValue, whole_tensor
from smckpt.formats.names import places_of_optimizers, stage_tensors
from smckpt.formats.pickled import Global, Inert
from smckpt.formats.source_facts import SourceFacts, facts_of_state
from smckpt.formats.source_files import ArchiveRecord, SourceFiles
from smckpt.formats.torch_archive import (
    StoredTensor,
    is_archive,
    open_archive,
    open_legacy,
    plain_globals,
    plain_load,
)
from smckpt.layout.containers import container_kind
from smckpt.layout.entries import DTYPES, dotted
from smckpt.layout.entries import Path as StatePath
from smckpt.layout.strided import row_major_strides

_DEEPEST, _MOST_VALUES = 64, 1 << 23  # of a state in a file
_STEPS = ("step", "iteration", "global_step", "global_steps")  # the step's names in trainers' files
# How a file begins in a clone of a release without its large files.
_POINTER = b"version https://git-lfs.github.com/spec/v1"


class _Inert:
    """A placeholder for an object of an unknown class. It holds the state and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def load_inert(path: Path) -> Any:
    """What `torch.save` wrote, tensors mapped. torch's restricted unpickler reads it. A placeholder
    replaces an object of a class that it does not know (argparse.Namespace, a trainer's own). No
    class is imported.

    Raises:
        UsageError: it is not such a file.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    try:
        with path.open("rb") as file:
            refuse_inflating(file, os.fstat(file.fileno()).st_size)
        with plain_globals():
            foreign = [(_Inert, name) for name in get_unsafe_globals_in_checkpoint(path)]
            with safe_globals(foreign):  # type: ignore[arg-type]
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch, zip and pickle raise many kinds
        raise UsageError(
            f"the file is neither safetensors nor a torch.save file of tensors: {error}",
            remedy="pass files that hold a state dict of tensors and plain values only",
            path=str(path),
        ) from error


def is_safetensors(source: SourceFiles, file: ArchiveRecord) -> bool:
    """
    Raises:
        UsageError: git-lfs has not fetched the file.
    """
    first = source.read(file, 0, min(len(_POINTER), file.nbytes))
    if first == _POINTER:
        raise UsageError(
            "this is git-lfs's pointer to the file, not the file",
            remedy="fetch it: git lfs pull",
            path=file.path,
        )
    return first[8:9] == b"{"


@dataclass(frozen=True)
class StoredState:
    """Where a model's tensors are in a file, the training step that it records, and what it says of
    the model."""

    path: str
    tensors: dict[str, StoredTensor]
    step: Any = None
    facts: SourceFacts | None = None


def stored_state(
    source: SourceFiles, file: ArchiveRecord, prefix: str | None = None
) -> StoredState:
    """The model in a file.

    Args:
        prefix: as of `tensors_at`.

    Raises:
        UsageError: it does not hold a state dict of dense tensors.
        KeysMismatchError: nothing is at the place.
        CorruptCheckpointError: it is damaged.
    """
    if is_safetensors(source, file):
        found: dict[str, Any] = safetensors_of(source, file)
        whole = _State(file.path, {name: ((name,), t) for name, t in found.items()})
        return StoredState(file.path, whole.model(prefix))
    root = torch_root(source, file)
    if not isinstance(root, Mapping):
        raise UsageError(
            f"the file holds {_kind(root)}",
            remedy="pass files of state dicts: model.state_dict(), not the model", path=file.path,
        )  # fmt: skip
    state = _State(
        file.path, {dotted(path): (path, value) for path, value in _leaves(root, file.path)}
    )
    if not state.logical:
        raise UsageError(
            f"there is no model in the file, whose keys are {[str(key) for key in root][:8]}",
            remedy="save the model's state dict (model.state_dict(), not the model) alone, or "
            "under the key model",
            path=file.path,
        )
    steps = [root[key] for key in _STEPS if isinstance(root.get(key), int)]
    step = steps[0] if steps else None
    facts = next(iter(facts_of_state(root, file.path)), None)
    return StoredState(file.path, state.model(prefix), step, facts)


@dataclass(frozen=True)
class _State:
    """What a file holds: name → its place in what was saved, and the tensor or other value."""

    url: str
    leaves: Mapping[str, tuple[StatePath, Any]]

    @cached_property
    def logical(self) -> dict[str, LogicalTensor]:
        """Tensors, also those of a kind that is not read."""
        return {
            name: LogicalTensor(name, path, value.dtype, value.shape)
            if isinstance(value, StoredTensor)
            else LogicalTensor(name, path, "float32", ())
            for name, (path, value) in self.leaves.items()
            if isinstance(value, StoredTensor) or _odd_tensor(value)
        }

    @property
    def optimizers(self) -> frozenset[str]:
        return places_of_optimizers(self.leaves)

    def model(self, prefix: str | None) -> dict[str, StoredTensor]:
        """
        Raises:
            UsageError, KeysMismatchError: as `stage_tensors`; or a tensor is not dense.
        """
        out = {}
        for name, tensor in stage_tensors(self, prefix).items():
            value = self.leaves[tensor.name][1]
            if odd := _odd_tensor(value):
                raise UsageError(
                    f"{name} is a {odd}, not a dense tensor of plain numbers",
                    remedy="save dense tensors with their values",
                    path=self.url,
                )
            out[name] = value
        return out


def _leaves(root: Mapping[Any, Any], where: str) -> Iterator[tuple[StatePath, Any]]:
    """The values in nested dicts, and in lists of tensors or dicts, with their places.

    Raises:
        CorruptCheckpointError: a forged file holds itself, or one part many times.
    """
    rest: list[tuple[StatePath, Any]] = [((), root)]
    seen = 0
    while rest:
        above, value = rest.pop()
        items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        seen += len(items)
        if len(above) > _DEEPEST or seen > _MOST_VALUES:
            raise CorruptCheckpointError(
                f"its values are nested more than {_DEEPEST} times, or more than {_MOST_VALUES}",
                remedy="fetch the file again, from a source that you trust", path=where,
            )  # fmt: skip
        for key, inner in items:
            path = (*above, key if type(key) in (str, int) else str(key))
            more = isinstance(inner, Mapping)
            if isinstance(inner, (list, tuple)):
                more = any(isinstance(one, (Mapping, list, tuple, StoredTensor)) for one in inner)
            if inner and more:
                rest.append((path, inner))
            else:
                yield path, inner


def torch_root(source: SourceFiles, file: ArchiveRecord) -> Any:
    """What `torch.save` wrote, with `StoredTensor` for tensors and `Inert` for other objects.

    Raises:
        UsageError: it is not such a file.
        CorruptCheckpointError: it is damaged.
    """
    first = source.read(file, 0, min(128, file.nbytes))
    other = not_read("", first)
    if is_archive(first[:4]):
        keras = first[30:].startswith(b"metadata.json")
        if b".npy" not in first[30:] and not keras:
            return open_archive(source, file).root
        other = not_read(".keras" if keras else ".npz")
    found = None if other else open_legacy(source, file)
    if found is not None:
        return found.root
    # Raises:
    # UsageError: the file is of a format that holds weights, and is not read, or of no such format.
    what, remedy = (
        other
        or not_read(os.path.basename(file.path))
        or (
            "neither a file of safetensors nor one of torch.save with tensors",
            "pass files that hold a state dict of tensors and plain values only",
        )
    )
    raise UsageError(f"this is {what}", remedy=remedy, path=file.path)


def _kind(root: Any) -> str:
    return f"an object of {root.of}" if isinstance(root, Inert) else f"a {type(root).__name__}"


def safetensors_of(source: SourceFiles, file: ArchiveRecord) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file.

    Raises:
        UsageError: it is a file of a checkpoint of smckpt, or has a dtype that is not read.
        CorruptCheckpointError: it is damaged.
    """
    try:
        header = read_header(partial(source.read, file), file.nbytes, file.path)
    except CorruptCheckpointError as error:
        error.remedy = "pass the file as it was written"
        raise
    out = {}
    for name, slot in header.slots.items():
        if slot.part:
            raise UsageError(
                f"{name} is a part of a rank's array, so the file belongs to a checkpoint",
                remedy="export the checkpoint's directory",
                path=file.path,
            )
        out[name] = stored_slot(file, name, slot)
    return out


def stored_slot(file: ArchiveRecord, name: str, slot: StoredSlot) -> StoredTensor:
    """Where a tensor of a safetensors file is.

    Raises:
        UsageError: it has a dtype of safetensors that is not read.
    """
    dtype = next((d.name for d in DTYPES.values() if d.code == slot.code), None)
    if dtype is None:
        raise UsageError(
            f"{name} has the dtype {slot.code}, which smckpt does not read",
            remedy="pass the model in another dtype, such as the release in bfloat16",
            path=file.path,
        )
    record = file.part(slot.offset, slot.nbytes)
    return StoredTensor(dtype, slot.shape, row_major_strides(slot.shape), 0, record)


def _odd_tensor(value: Any) -> str:
    """What makes a tensor that is not read; "" for another value."""
    if isinstance(value, Inert) and isinstance(value.of, Global):
        of = value.of
        if of.module.startswith("torch") and of.name.startswith("_rebuild"):
            return str(of)
        if of.module == "torch" and of.name not in ("device", "dtype"):
            return str(of)  # a dtype
    return ""


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
    # torch says what the state is, with tensors that are mapped and not read (but those of a torch
    # before 1.6). The file, read in the same order, says where their bytes are. In a store it says
    # both.
    root = state = torch_root(source, file)
    mapped = is_archive(source.read(file, 0, min(4, file.nbytes)))
    if file.on_disk and file == source.whole(file.path):
        try:
            state = plain_load(file.path, mmap=mapped)
        except Exception:  # torch, zip and pickle raise many kinds
            state = load_inert(Path(file.path)) if mapped else root
    if not isinstance(state, Mapping) or not isinstance(root, dict):
        raise UsageError(
            f"the file holds {_kind(root)}",
            remedy="pass a file of a state dict: model.state_dict(), not the model",
            path=file.path,
        )
    saved: dict[str, SavedTensor] = {}
    values: dict[str, SavedValue] = {}
    containers: dict[StatePath, str] = {}
    for path, stored, value in _leaves_of_state((), root, state, containers):
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


def _name(file: ArchiveRecord) -> str:
    return file.path.rpartition("/")[2]


def _leaves_of_state(
    path: StatePath, stored: Any, value: Any, containers: dict[StatePath, str]
) -> Iterator[tuple[StatePath, Any, Any]]:
    """Tensors, and the largest subtrees without one: the place, what the archive has, and torch."""
    if path and (isinstance(stored, StoredTensor) or not _has_tensor(stored)):
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
        yield from _leaves_of_state((*path, at), below, item, containers)


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
