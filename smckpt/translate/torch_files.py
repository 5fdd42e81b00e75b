"""The tensors of a rank's file, of `torch.save` or safetensors. No code that it names is run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from smckpt.checkpoint.headers import read_header
from smckpt.checkpoint.objects import refuse_inflating
from smckpt.errors import CorruptCheckpointError, KeysMismatchError, UsageError
from smckpt.layout.entries import DTYPES
from smckpt.layout.strided import row_major_strides
from smckpt.translate.names import places_of_models, prefix_remedy
from smckpt.translate.pickled import Global, Inert
from smckpt.translate.source_facts import SourceFacts, facts_of_state
from smckpt.translate.source_files import ArchiveRecord, SourceFiles
from smckpt.translate.torch_archive import StoredTensor, is_archive, open_archive, open_legacy

__all__ = [
    "StoredState",
    "is_safetensors",
    "keys_of",
    "load_inert",
    "places_in",
    "stored_state",
    "torch_root",
]

T = TypeVar("T")
_STEPS = ("step", "iteration", "global_step", "global_steps")  # the step's names in trainers' files
# the model's names in trainers' files; DeepSpeed's is "module", that of torch's tutorials the last
_MODELS = ("model", "state_dict", "module", "model_state_dict")
# How files of other formats begin: their names, and what to do.
_OTHERS = (
    (b"GGUF", ("llama.cpp (GGUF)", "pass the model that it was converted from; or load it with "
     "from_pretrained(gguf_file=) of transformers, and save that")),
    (b"\x93NUMPY", ("NumPy, with one array", "save a state dict of all tensors")),
    (b"\x89HDF", ("HDF5 (Keras, TensorFlow)", "load it with from_pretrained(from_tf=True) of "
     "transformers 4, and save that")),
)  # fmt: skip
# Megatron-LM's names before Megatron-core. ChatGLM has them without the first part.
_BEFORE_CORE = re.compile(
    r"(?:.*\.)?language_model\.(?:encoder|transformer)\.layers\.\d+"
    r"\.(?:self_)?attention\.query_key_value\.weight"
)
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
        prefix: its dotted place, from the top of what was saved, or in the model that is found
            without it. "" for the top. None: a key that trainers use for a model, or the top.

    Raises:
        UsageError: it does not hold a state dict of dense tensors.
        CorruptCheckpointError: it is damaged.
    """
    if is_safetensors(source, file):
        return StoredState(file.path, _below(_of_safetensors(source, file), prefix, file.path))
    root = torch_root(source, file)
    out: dict[str, StoredTensor] = {}
    for name, value in _picked(root, prefix, file.path).items():
        if isinstance(value, StoredTensor):
            out[str(name)] = value
        elif odd := _odd_tensor(value):
            raise UsageError(
                f"{name} is a {odd}, not a dense tensor of plain numbers",
                remedy="save dense tensors with their values",
                path=file.path,
            )
    steps = [root[key] for key in _STEPS if isinstance(root.get(key), int)]
    step = steps[0] if steps else None
    return StoredState(file.path, out, step, facts_of_state(root, file.path))


def _picked(root: Any, prefix: str | None, path: str) -> Mapping[str, Any]:
    if prefix is None:
        found = _model_of(root, path)
        _refuse_before_core(found, path)
        if any(isinstance(value, StoredTensor) for value in found.values()):
            return found
    flat = _flat(root)
    _refuse_before_core(flat, path)
    if prefix is None:
        places = [place for place in places_of_models(flat) if place]
        return _below(flat, places[0], path) if len(places) == 1 else found
    if not prefix or any(name.startswith(f"{prefix}.") for name in flat):
        return _below(flat, prefix, path)
    return _below(_flat(_model_of(root, path)), prefix, path)


def _refuse_before_core(names: Mapping[str, Any], path: str) -> None:
    found = next((name for name in names if _BEFORE_CORE.fullmatch(name)), None)
    if found is not None:
        raise UsageError(
            f"these are Megatron-LM's names before Megatron-core (its legacy models): {found}",
            remedy="convert it with Megatron-LM's tools/checkpoint/convert.py --model-type GPT "
            "--loader legacy --saver core, and pass what that writes",
            path=path,
        )


def _flat(root: Any, lead: str = "") -> dict[str, Any]:
    """Tensors and other values of nested dicts, by dotted names."""
    if not isinstance(root, Mapping):
        return {}
    out: dict[str, Any] = {}
    for key, value in root.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{lead}{key}.")
        else:
            out[f"{lead}{key}"] = value
    return out


def _below(found: Mapping[str, T], prefix: str | None, path: str) -> dict[str, T]:
    if not prefix:
        return dict(found)
    picked = {n[len(prefix) + 1 :]: v for n, v in found.items() if n.startswith(f"{prefix}.")}
    if not picked:
        raise KeysMismatchError(
            f"no tensor's name starts with {prefix + '.'!r}", remedy=prefix_remedy(found), path=path
        )
    return picked


def keys_of(source: SourceFiles, file: ArchiveRecord) -> list[str]:
    """The keys at the top of a file, for a message; [] for safetensors."""
    if is_safetensors(source, file):
        return []
    root = torch_root(source, file)
    return [str(key) for key in root] if isinstance(root, Mapping) else []


def places_in(source: SourceFiles, file: ArchiveRecord) -> list[str]:
    """The names of embeddings in a file, from its top."""
    if is_safetensors(source, file):
        return []
    return [n for n in _flat(torch_root(source, file)) if any(places_of_models([n]))]


def torch_root(source: SourceFiles, file: ArchiveRecord) -> Any:
    """What `torch.save` wrote, with `StoredTensor` for tensors and `Inert` for other objects.

    Raises:
        UsageError: it is not such a file.
        CorruptCheckpointError: it is damaged.
    """
    first = source.read(file, 0, min(128, file.nbytes))
    _refuse_other_format(first, file.path)
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


def _refuse_other_format(first: bytes, path: str) -> None:
    """
    Raises:
        UsageError: the file begins as one of a format that holds weights, and is not read.
    """
    kinds = [what for begins, what in _OTHERS if first.startswith(begins)]
    if is_archive(first[:4]) and b".npy" in first[30:]:
        kinds.append(("NumPy's .npz", "make safetensors of it: safetensors.numpy.save_file"))
    for name, remedy in kinds:
        raise UsageError(
            f"this is a file of {name}, which smckpt does not read", remedy=remedy, path=path
        )


def _of_safetensors(source: SourceFiles, file: ArchiveRecord) -> dict[str, StoredTensor]:
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


def _model_of(loaded: Any, path: str) -> Mapping[str, Any]:
    """The model's part of what was saved, or all of it."""
    if not isinstance(loaded, Mapping):
        raise UsageError(
            f"the file holds a {type(loaded).__name__}",
            remedy="pass files of state dicts",
            path=path,
        )
    chunks = [f"model{number}" for number in range(len(loaded)) if f"model{number}" in loaded]
    if len(chunks) > 1:  # Megatron-LM's, of a virtual pipeline
        return {
            f"{number}.{name}": tensor
            for number, key in enumerate(chunks)
            for name, tensor in _model_of(loaded[key], path).items()
        }
    for key in _MODELS:
        if isinstance(loaded.get(key), Mapping):
            return _model_of(loaded[key], path)
    return loaded
