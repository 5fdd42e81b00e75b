"""Where the tensors of a source lie: bare files of ranks, or a checkpoint.

A store answers what it holds, and copies strided boxes of it into memory.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from smckpt.checkpoint.headers import read_header
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.translate.degrees import Degrees
from smckpt.translate.pieces import Held, Key

__all__ = ["FileStore", "Part", "Store", "bits", "open_directory", "open_files", "weight_map"]

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
        UsageError: there are not as many as ranks, one is missing, given twice or of another kind,
            they are not in the order of their numbers; names, dtypes or the steps recorded in them
            differ between ranks.
    """
    if len(paths) != degrees.ranks:
        raise UsageError(
            f"{len(paths)} files were given for {degrees}",
            remedy=f"pass the {degrees.ranks} files of all ranks, in the order of ranks",
        )
    _refuse_order([os.fspath(path) for path in paths])
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


def _refuse_order(paths: list[str]) -> None:
    """Nothing in the files tells which rank's one is: rank10 before rank2, as a shell sorts them,
    would make a model of the right shapes."""
    seen = set()
    for path in paths:
        with suppress(OSError):  # told when it is opened
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                raise UsageError(
                    "the file is given for two ranks", remedy="pass each rank's own", path=path
                )
            seen.add((status.st_dev, status.st_ino))
    parts = [re.split(r"(\d+)", path) for path in paths]
    if len({(len(part), *part[::2]) for part in parts}) > 1:
        return
    numbers = [tuple(map(int, part[1::2])) for part in parts]
    differ = [n for n in zip(*numbers, strict=True) if len(set(n)) > 1]
    if len(differ) == 1 and list(differ[0]) != sorted(differ[0]):
        order = ", ".join(map(str, differ[0][:16]))
        raise UsageError(
            f"the numbers in the files' names are in the order {order}",
            remedy="pass them in the order of ranks (ls -v sorts numbers)",
        )


def open_directory(directory: Path) -> FileStore:
    """The weights of a Hugging Face directory: one safetensors file, or those of its index.

    Raises:
        UsageError: there are none.
        CorruptCheckpointError: the index or a file of it is damaged, or a tensor is in two files.
    """
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(weight_map(index).values()))
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
            if tensor in dtypes:
                raise CorruptCheckpointError(
                    f"{tensor} is in {name} and in another file of the index",
                    remedy="remove what is left of another model", path=str(directory),
                )  # fmt: skip
            arrays[Key(tensor, 0, 0)], dtypes[tensor] = array, dtype
    return FileStore(str(directory), arrays, dtypes, maps)


def weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text())["weight_map"]
        if all(isinstance(name, str) for name in found.values()):
            return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CorruptCheckpointError(
        "the index has no weight_map of names and files", remedy="fetch the directory anew",
        path=str(index),
    )  # fmt: skip


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
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            header = read_header(lambda a, b: os.pread(file.fileno(), b - a, a), size, str(path))
        except CorruptCheckpointError as error:
            error.remedy = "pass the file as it was written"
            raise
        memory: Array = np.zeros(0, np.uint8)
        if size > header.data_start:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            memory = np.frombuffer(maps[-1], np.uint8)
    out = {}
    for name, entry in header.entries.items():
        if entry.elements is not None:
            raise UsageError(
                f"{name} is a part of a rank's array: the file is one of a checkpoint's",
                remedy="export the checkpoint's directory",
                path=str(path),
            )
        dtype = codes[entry.code]
        data = memory[entry.offset : entry.offset + entry.nbytes]
        out[name] = (dtype, np.frombuffer(data, bits(dtype)).reshape(entry.shape))
    return out


def _open_torch(path: Path) -> tuple[dict[str, tuple[str, Array]], Any]:
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of whatever kind, from the depths of torch, zip and pickle
        raise UsageError(
            f"the file is neither safetensors nor a torch.save file of tensors: {error}",
            remedy="pass files that hold a state dict of tensors and plain values only",
            path=str(path),
        ) from error
    out = {}
    for name, tensor in _tensors(_model_of(loaded, path)).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            raise UsageError(
                f"{name} is a {tensor.layout} {tensor.dtype} tensor on {tensor.device.type}",
                remedy="save dense tensors with their values", path=str(path),
            )  # fmt: skip
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
