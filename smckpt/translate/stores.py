"""Where the tensors of a source lie: bare files of ranks, or a checkpoint.

A store answers what it holds, and copies strided boxes of it into memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.layout.entries import DTYPES
from smckpt.layout.geometry import Shape
from smckpt.translate.degrees import Degrees
from smckpt.translate.pieces import Held, Key

__all__ = ["FileStore", "Part", "Store", "bits", "open_directory", "open_files"]

_RESIDENT = 128 << 20  # bytes read between two times that mapped pages are let go
_STEPS = ("step", "iteration", "global_step", "global_steps")  # as trainers call it in their files
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Part:
    """A strided box of a stored tensor, and where it goes.

    Its dimension i has `sizes[i]` elements; they lie in dimension `dims[i]` of the tensor, from
    `at[i]` by `steps[i]`, and in buffer number `buffer` from element `start` by `strides`. `fixed`
    is the index of dimension 0, where `dims` leaves it out.
    """

    source: Key
    sizes: Shape
    dims: Shape
    at: Shape
    steps: Shape
    fixed: int
    buffer: int
    start: int
    strides: Shape


class Store(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def held(self) -> Mapping[str, Held]: ...

    def view(self, key: Key, shape: Shape) -> None:
        """Read a tensor in another shape from now on, its elements in the same order."""

    def plan(self, parts: Sequence[Part]) -> Any:
        """How to read them; made by one thread."""

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        """Carry out a plan; by several threads at once."""

    def close(self) -> None: ...


def bits(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype in which elements of `dtype` are moved."""
    size = DTYPES[dtype].itemsize
    return np.dtype(f"u{size}") if size in (1, 2, 4, 8) else np.dtype(f"V{size}")


def strided(
    data: memoryview, dtype: np.dtype[Any], start: int, sizes: Shape, strides: Shape
) -> Array:
    flat = np.frombuffer(data, dtype)[start:]
    return as_strided(flat, sizes, [s * dtype.itemsize for s in strides])


class FileStore:
    """Files of ranks, mapped into memory: their pages are the system's to keep or to drop."""

    def __init__(
        self, url: str, arrays: dict[Key, Array], dtypes: dict[str, str],
        maps: Sequence[mmap.mmap] = (),
    ) -> None:  # fmt: skip
        self.url = url
        self._arrays = arrays
        self._maps = maps
        self._lock = threading.Lock()
        self._resident = 0
        self._dtypes = dtypes
        shards: dict[str, dict[tuple[int, int], Shape]] = {}
        for key, array in arrays.items():
            shards.setdefault(key.name, {})[key.tp, key.ep] = tuple(array.shape)
        self.held: Mapping[str, Held] = {
            name: Held(name, dtypes[name], found) for name, found in shards.items()
        }

    def view(self, key: Key, shape: Shape) -> None:
        self._arrays[key] = self._arrays[key].reshape(shape)

    def plan(self, parts: Sequence[Part]) -> Sequence[Part]:
        return parts

    def read(self, plan: Sequence[Part], buffers: Sequence[memoryview]) -> None:
        for part in plan:
            array = self._arrays[part.source]
            where: list[Any] = [part.fixed] * array.ndim
            for size, dim, at, step in zip(part.sizes, part.dims, part.at, part.steps, strict=True):
                where[dim] = slice(at, at + size * step, step)
            taken = array[tuple(where)]
            kept = sorted(part.dims)  # dimensions in the order in which they are left
            taken = taken.transpose([kept.index(dim) for dim in part.dims])
            target = strided(
                buffers[part.buffer], array.dtype, part.start, part.sizes, part.strides
            )
            target[...] = taken
        self._let_go(sum(len(buffer) for buffer in buffers))

    def _let_go(self, nbytes: int) -> None:
        """Unmap pages now and then: they would count as this process's memory to the last."""
        with self._lock:
            self._resident += nbytes
            if self._resident < _RESIDENT:
                return
            self._resident = 0
        for memory in self._maps:
            memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._arrays.clear()


def open_files(paths: Sequence[str | os.PathLike[str]], degrees: Degrees) -> FileStore:
    """The files of all ranks, in Megatron's order: tensor parallelism innermost, then experts'.

    Raises:
        UsageError: there are not as many as ranks, one is missing or of another kind, names,
            dtypes or the steps recorded in them differ between ranks.
    """
    if len(paths) != degrees.ranks:
        raise UsageError(
            f"{len(paths)} files were given for {degrees}",
            remedy=f"pass the {degrees.ranks} files of all ranks, in the order of ranks",
        )
    arrays: dict[Key, Array] = {}
    dtypes: dict[str, str] = {}
    maps: list[mmap.mmap] = []
    names: list[set[str]] = []
    steps: dict[str, Any] = {}
    for number, path in enumerate(paths):
        found, step = _open_file(Path(os.fspath(path)), maps)
        steps[os.fspath(path)] = step
        names.append(set(found))
        for name, (dtype, array) in found.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise UsageError(
                    f"{name} is {dtypes[name]} in one rank's file and {dtype} in another's",
                    remedy="pass files of one and the same step",
                    path=str(path),
                )
            arrays[Key(name, number % degrees.tp, number // degrees.tp)] = array
    if len(set(steps.values())) > 1:
        raise UsageError(
            f"the files are of different steps: {steps}",
            remedy="pass files of one and the same step",
        )
    for path, held in zip(paths, names, strict=True):
        if held != names[0]:
            differ = sorted(held ^ names[0])
            raise UsageError(
                f"the files of the ranks have different names: {differ[:8]}",
                remedy="pass the files of all ranks of one step; pipeline stages are not joined",
                path=str(path),
            )
    return FileStore(os.fspath(paths[0]), arrays, dtypes, maps)


def open_directory(directory: Path) -> FileStore:
    """The weights of a Hugging Face directory: one safetensors file, or those of its index.

    Raises:
        UsageError: there are none.
        CorruptCheckpointError: a file of the index is missing or damaged.
    """
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    arrays: dict[Key, Array] = {}
    dtypes: dict[str, str] = {}
    maps: list[mmap.mmap] = []
    for name in names:
        if not (directory / name).is_file():
            raise UsageError(
                f"{name} is not there",
                remedy="pass a directory with model.safetensors, or an index and all its files",
                path=str(directory),
            )
        for tensor, (dtype, array) in _open_safetensors(directory / name, maps).items():
            arrays[Key(tensor, 0, 0)], dtypes[tensor] = array, dtype
    return FileStore(str(directory), arrays, dtypes, maps)


def _open_file(path: Path, maps: list[mmap.mmap]) -> tuple[dict[str, tuple[str, Array]], Any]:
    """Its tensors, and the training step that it records."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise UsageError(
            f"the file cannot be read: {error.strerror}", remedy="pass paths of rank files",
            path=str(path),
        ) from error  # fmt: skip
    if start[8:9] == b"{":
        return _open_safetensors(path, maps), None
    return _open_torch(path)


def _open_safetensors(path: Path, maps: list[mmap.mmap]) -> dict[str, tuple[str, Array]]:
    codes = {d.code: d.name for d in DTYPES.values() if d.code is not None}
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise _damaged(path, str(error)) from error
    base = 8 + length
    memory: Array = np.zeros(base, np.uint8)
    if size > base:
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        memory = np.frombuffer(maps[-1], np.uint8)
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = codes.get(entry["dtype"], ""), tuple(entry["shape"])
        low, high = entry["data_offsets"]
        if (
            not dtype
            or base + high > size
            or high - low != math.prod(shape) * DTYPES[dtype].itemsize
        ):
            raise _damaged(path, f"{name} lies at {low} to {high} of {size - base} bytes")
        data = memory[base + low : base + high]
        out[name] = (dtype, np.frombuffer(data, bits(dtype)).reshape(shape))
    return out


def _damaged(path: Path, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the file is no whole safetensors file: {what}",
        remedy="pass the file as it was written",
        path=str(path),
    )


def _open_torch(path: Path) -> tuple[dict[str, tuple[str, Array]], Any]:
    import pickle

    import torch

    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(
            f"the file is neither safetensors nor a torch.save file of tensors: {error}",
            remedy="pass files that hold a state dict of tensors and plain values only",
            path=str(path),
        ) from error
    out = {}
    for name, tensor in _tensors(_model_of(loaded, path)).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        code = bits(dtype)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        out[name] = (dtype, flat.view(code).reshape(tuple(tensor.shape)))
    steps = [loaded[key] for key in _STEPS if isinstance(loaded.get(key), int)]
    return out, steps[0] if steps else None


def _model_of(loaded: Any, path: Path) -> Mapping[str, Any]:
    """The model's part of what was saved: under "model", or all of it."""
    for key in ("model", "state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            return _model_of(loaded[key], path)
    if not isinstance(loaded, Mapping):
        raise UsageError(
            f"the file holds a {type(loaded).__name__}", remedy="pass files of state dicts",
            path=str(path),
        )  # fmt: skip
    return loaded


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
