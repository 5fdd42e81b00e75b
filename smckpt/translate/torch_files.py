"""Maps files of `torch.save` into memory, without running any code that they name."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from smckpt.errors import UsageError
from smckpt.layout.entries import DTYPES
from smckpt.layout.strided import elements
from smckpt.translate.torch_archive import is_archive

__all__ = ["TorchFile", "load_inert", "open_torch"]

_STEPS = ("step", "iteration", "global_step", "global_steps")  # the step's names in trainers' files
# the model's names in trainers' files; DeepSpeed's is "module"
_MODELS = ("model", "state_dict", "module")
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class _Inert:
    """A placeholder for an object of an unknown class. It holds the state and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class TorchFile:
    """The tensors of a file, the step that it records, and the mapping to release."""

    def __init__(self, tensors: dict[str, tuple[str, Array]], step: Any, path: Path) -> None:
        self.tensors = tensors
        self.step = step
        self._ranges = _mapped(path)
        self._madvise: Callable[..., int] = ctypes.CDLL(None, use_errno=True).madvise

    def let_go(self) -> None:
        """Release the mapped pages, which would otherwise count as this process's memory. A later
        read maps them again."""
        for start, length in self._ranges:
            self._madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED)
            )


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


def open_torch(path: Path) -> TorchFile:
    """
    Raises:
        UsageError: it does not hold a state dict of dense tensors.
    """
    import torch

    loaded = load_inert(path)
    out: dict[str, tuple[str, Array]] = {}
    for name, tensor in _model_of(loaded, path).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            raise UsageError(
                f"{name} is a {tensor.layout} {tensor.dtype} tensor on {tensor.device.type}",
                remedy="save dense tensors with their values",
                path=str(path),
            )
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        out[str(name)] = (
            dtype, elements(flat, DTYPES[dtype].itemsize).reshape(tuple(tensor.shape))
        )  # fmt: skip
    steps = [loaded[key] for key in _STEPS if isinstance(loaded.get(key), int)]
    return TorchFile(out, steps[0] if steps else None, path)


def _model_of(loaded: Any, path: Path) -> Mapping[str, Any]:
    """The model's part of what was saved, or all of it."""
    if not isinstance(loaded, Mapping):
        raise UsageError(
            f"the file holds a {type(loaded).__name__}",
            remedy="pass files of state dicts",
            path=str(path),
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


def _mapped(path: Path) -> list[tuple[int, int]]:
    """Where the file is mapped: (address, bytes)."""
    inode = os.stat(path).st_ino
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, number, *_ = line.split()
        if int(number) == inode and inode:
            start, stop = (int(part, 16) for part in addresses.split("-"))
            found.append((start, stop - start))
    return found
