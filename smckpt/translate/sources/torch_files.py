"""The tensors of a rank's file, of `torch.save` or safetensors. No code that it names is run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from smckpt.checkpoint.reading.catalogue import LogicalTensor
from smckpt.checkpoint.records.headers import read_header
from smckpt.checkpoint.records.objects import refuse_inflating
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.layout.entries import DTYPES, dotted
from smckpt.layout.entries import Path as StatePath
from smckpt.layout.strided import row_major_strides
from smckpt.translate.archives.pickled import Global, Inert
from smckpt.translate.archives.source_files import ArchiveRecord, SourceFiles
from smckpt.translate.archives.torch_archive import (
    StoredTensor,
    is_archive,
    open_archive,
    open_legacy,
)
from smckpt.translate.sources.source_facts import SourceFacts, facts_of_state
from smckpt.translate.tables.names import places_of_optimizers, stage_tensors

__all__ = [
    "StoredState",
    "is_safetensors",
    "load_inert",
    "safetensors_of",
    "stored_state",
    "torch_root",
]

_DEEPEST, _MOST_VALUES = 64, 1 << 23  # of a state in a file
_STEPS = ("step", "iteration", "global_step", "global_steps")  # the step's names in trainers' files
# How files of other formats begin: their names, and what to do.
_OTHERS = (
    (b"GGUF", ("llama.cpp (GGUF)", "pass the model that it was converted from; or load it with "
     "from_pretrained(gguf_file=) of transformers, and save that")),
    (b"\x93NUMPY", ("NumPy, with one array", "save a state dict of all tensors")),
    (b"\x89HDF", ("HDF5 (Keras, TensorFlow)", "load it with from_pretrained(from_tf=True) of "
     "transformers 4, and save that")),
)  # fmt: skip
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
    class is imported. The tensors of a file of a torch before 1.6 are in memory instead.

    Raises:
        UsageError: it is not such a file.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    try:
        with path.open("rb") as file:
            archive = is_archive(file.read(4))
            if archive:
                refuse_inflating(file, os.fstat(file.fileno()).st_size)
        if not archive:  # of a torch before 1.6; such a file cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
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
            f"the file holds a {type(root).__name__}", remedy="pass files of state dicts",
            path=file.path,
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
    return StoredState(file.path, state.model(prefix), step, facts_of_state(root, file.path))


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
    # Raises:
    # UsageError: the file begins as one of a format that holds weights, and is not read.
    kinds = [what for begins, what in _OTHERS if first.startswith(begins)]
    if is_archive(first[:4]) and b".npy" in first[30:]:
        kinds.append(("NumPy's .npz", "make safetensors of it: safetensors.numpy.save_file"))
    for name, remedy in kinds:
        raise UsageError(
            f"this is a file of {name}, which smckpt does not read", remedy=remedy, path=file.path
        )
    if is_archive(first[:4]):
        return open_archive(source, file).root
    found = open_legacy(source, file)
    if found is None:
        raise UsageError(
            "the file is neither safetensors nor a torch.save file of tensors",
            remedy="pass files that hold a state dict of tensors and plain values only",
            path=file.path,
        )
    return found.root


def safetensors_of(source: SourceFiles, file: ArchiveRecord) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file.

    Raises:
        UsageError: it is a file of a checkpoint of smckpt.
        CorruptCheckpointError: it is damaged.
    """
    codes = {d.code: d.name for d in DTYPES.values() if d.code is not None}
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
        record = file.part(slot.offset, slot.nbytes)
        strides = row_major_strides(slot.shape)
        out[name] = StoredTensor(codes[slot.code], slot.shape, strides, 0, record)
    return out


def _odd_tensor(value: Any) -> str:
    """What makes a tensor that is not read; "" for another value."""
    if isinstance(value, Inert) and isinstance(value.of, Global):
        of = value.of
        if of.module.startswith("torch") and of.name.startswith("_rebuild"):
            return str(of)
        if of.module == "torch" and of.name not in ("device", "dtype"):
            return str(of)  # a dtype
    return ""
