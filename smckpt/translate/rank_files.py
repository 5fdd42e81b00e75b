"""Readers of a source's tensors: files of ranks, or a checkpoint.

A reader says what it holds, and copies blocks of it into memory.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from smckpt.checkpoint.headers import read_header
from smckpt.checkpoint.strict_json import read_json
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import elements, execute
from smckpt.translate.compile import Block
from smckpt.translate.degrees import Degrees
from smckpt.translate.names import unwrapped
from smckpt.translate.pieces import RankTensors, TensorKey
from smckpt.translate.targets import INDEX, INDEX_BIN, SINGLE, SINGLE_BIN
from smckpt.translate.torch_files import open_torch

__all__ = [
    "RankFiles",
    "TensorReader",
    "bits",
    "open_directory",
    "open_files",
    "open_stages",
    "weight_files",
]

_RESIDENT = 128 << 20  # bytes; after so many, mapped pages are released
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_Unmaps: TypeAlias = list[Callable[[], object]]


class TensorReader(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def held(self) -> Mapping[str, RankTensors]: ...

    def plan(self, blocks: Sequence[Block]) -> Any:
        """Plan how to read the blocks. One thread calls it."""

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        """Carry out a plan. Several threads may call it at once."""

    def close(self) -> None: ...


def bits(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that is used to move elements of `dtype`."""
    size = DTYPES[dtype].itemsize
    return np.dtype(f"u{size}") if size in (1, 2, 4, 8) else np.dtype(f"V{size}")


class RankFiles:
    """Files of ranks, mapped into memory. The system keeps or drops their pages."""

    def __init__(
        self, url: str, arrays: dict[TensorKey, Array], dtypes: dict[str, str],
        let_go: Sequence[Callable[[], object]] = (),
    ) -> None:  # fmt: skip
        self.url = url
        self._arrays = arrays
        self._unmaps = let_go
        self._lock = threading.Lock()
        self._resident = 0
        self._dtypes = dtypes
        shards: dict[str, dict[tuple[int, int], Shape]] = {}
        for key, array in arrays.items():
            shards.setdefault(key.name, {})[key.tp, key.ep] = tuple(array.shape)
        self.held: Mapping[str, RankTensors] = {
            name: RankTensors(name, dtypes[name], found) for name, found in shards.items()
        }

    def renamed(self, names: Mapping[str, str]) -> RankFiles:
        """The tensors of these names under other names: old → new."""
        arrays = {
            key._replace(name=names[key.name]): array
            for key, array in self._arrays.items()
            if key.name in names
        }
        dtypes = {new: self._dtypes[old] for old, new in names.items()}
        return RankFiles(self.url, arrays, dtypes, self._unmaps)

    def plan(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return blocks

    def read(self, plan: Sequence[Block], buffers: Sequence[memoryview]) -> None:
        for block in plan:
            array = self._arrays[block.source]
            execute(block.copy, array, elements(buffers[block.buffer], array.itemsize))
        self._let_go(sum(len(buffer) for buffer in buffers))

    def _let_go(self, nbytes: int) -> None:
        """Release mapped pages from time to time. Otherwise all would count as this process's
        memory."""
        with self._lock:
            self._resident += nbytes
            if self._resident < _RESIDENT:
                return
            self._resident = 0
        for let_go in self._unmaps:
            let_go()

    def close(self) -> None:
        self._arrays.clear()


def open_files(paths: Sequence[str | os.PathLike[str]], degrees: Degrees) -> RankFiles:
    """Open the files of all ranks, in Megatron's order: tensor-parallel ranks innermost, then
    expert-parallel ones.

    Raises:
        UsageError: the number of files is not the number of ranks; a file is missing, given twice
            or of another kind; the files are not in the order of their numbers; names, dtypes or
            recorded steps differ between ranks.
    """
    if len(paths) != degrees.ranks:
        raise UsageError(
            f"{len(paths)} files were passed for {degrees}",
            remedy=f"pass the {degrees.ranks} files of all ranks, in the order of ranks",
        )
    _refuse_order([os.fspath(path) for path in paths])
    arrays: dict[TensorKey, Array] = {}
    dtypes: dict[str, str] = {}
    maps: _Unmaps = []
    names: list[set[str]] = []
    steps: dict[str, Any] = {}
    for number, path in enumerate(paths):
        found, step = _open_file(Path(os.fspath(path)), maps)
        steps[os.fspath(path)] = step
        names.append(set(found))
        for name, (dtype, array) in found.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise UsageError(
                    f"{name} is {dtypes[name]} in one rank's file, but {dtype} in another's",
                    remedy="pass files of one and the same step",
                    path=str(path),
                )
            arrays[TensorKey(name, number % degrees.tp, number // degrees.tp)] = array
    if len(set(steps.values())) > 1:
        raise UsageError(
            f"the files belong to different steps: {steps}",
            remedy="pass files of one and the same step",
        )
    for path, held in zip(paths, names, strict=True):
        if held != names[0]:
            differ = sorted(held ^ names[0])
            raise UsageError(
                f"the files of the ranks have different names: {differ[:8]}",
                remedy="pass the files of all ranks of one step, and pp= if they are of pipeline "
                "stages",
                path=str(path),
            )
    reader = RankFiles(os.fspath(paths[0]), arrays, dtypes, maps)
    return reader.renamed(
        {name: clean for clean, name in unwrapped({n: n for n in dtypes}).items()}
    )


def open_stages(
    paths: Sequence[str | os.PathLike[str]], degrees: Degrees, pp: int
) -> list[RankFiles]:
    """Open the files of all ranks of `pp` pipeline stages, each as by `open_files`. Pipeline-
    parallel ranks are outermost.

    Raises:
        UsageError: as `open_files`.
    """
    each = degrees.ranks
    if len(paths) != each * pp:
        raise UsageError(
            f"{len(paths)} files were passed for {degrees}, pp={pp}",
            remedy=f"pass the {each * pp} files of all ranks, in the order of ranks",
        )
    _refuse_order([os.fspath(path) for path in paths])
    return [open_files(paths[at : at + each], degrees) for at in range(0, len(paths), each)]


def _refuse_order(paths: list[str]) -> None:
    """Refuse files in the wrong order. Nothing in a file says its rank: rank10 before rank2, as a
    shell sorts them, would give a wrong model with the right shapes."""
    seen = set()
    for path in paths:
        with suppress(OSError):  # the error is raised when it is opened
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                raise UsageError(
                    "the file is passed for two ranks",
                    remedy="pass each rank's own file",
                    path=path,
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


def open_directory(directory: Path, *, exact: bool = False) -> RankFiles:
    """Open the weights of a Hugging Face directory: one file, or those of its index; safetensors,
    or else what `torch.save` wrote.

    Args:
        exact: the index must name every tensor with its file.

    Raises:
        UsageError: there are no weights.
        CorruptCheckpointError: the index or a file of it is damaged, or a tensor is in two files.
    """
    single, index = _weights_of(directory)
    where = _weight_map(index) if index.is_file() else {}
    arrays: dict[TensorKey, Array] = {}
    dtypes: dict[str, str] = {}
    maps: _Unmaps = []
    for name in sorted(set(where.values())) or [single]:
        if not (directory / name).is_file():
            raise UsageError(
                f"{name} is missing", remedy=f"pass a directory with all files of its {index.name}",
                path=str(directory),
            )  # fmt: skip
        for tensor, (dtype, array) in _open_file(directory / name, maps)[0].items():
            if tensor in dtypes:
                raise CorruptCheckpointError(
                    f"{tensor} is in {name} and in another file of the index",
                    remedy="remove the files of another model", path=str(directory),
                )  # fmt: skip
            if exact and where and where.get(tensor) != name:
                raise CorruptCheckpointError(
                    f"{tensor} is in {name}, but the index says {where.get(tensor)}",
                    remedy="export it again", path=str(index),
                )  # fmt: skip
            arrays[TensorKey(tensor, 0, 0)], dtypes[tensor] = array, dtype
    if exact and (lost := sorted(where.keys() - dtypes.keys())):
        raise CorruptCheckpointError(
            f"the index names {lost[:8]}, but no file has them", remedy="export it again",
            path=str(index),
        )  # fmt: skip
    return RankFiles(str(directory), arrays, dtypes, maps)


def weight_files(directory: Path) -> list[Path]:
    """The files of weights of a Hugging Face directory, safetensors before torch's; [] without any.

    Raises:
        CorruptCheckpointError: an index is damaged, or a file that it names is missing.
    """
    for index, single in ((INDEX, SINGLE), (INDEX_BIN, SINGLE_BIN)):
        if (directory / index).is_file():
            names = sorted(set(_weight_map(directory / index).values()))
        elif (directory / single).is_file():
            names = [single]
        else:
            continue
        for name in names:
            if not (directory / name).is_file():
                raise CorruptCheckpointError(
                    f"{name} is missing, which {index} names",
                    remedy="download the directory again", path=str(directory),
                )  # fmt: skip
        return [directory / name for name in names]
    return []


def _weights_of(directory: Path) -> tuple[str, Path]:
    """The name of a single file of weights, and the path of an index, of the first kind that the
    directory has. transformers prefers safetensors too."""
    kinds = ((SINGLE, INDEX), (SINGLE_BIN, INDEX_BIN))
    for single, index in kinds:
        if any((directory / name).is_file() for name in (single, index)):
            return single, directory / index
    raise UsageError(
        f"the directory has none of {', '.join(name for kind in kinds for name in kind)}",
        remedy="pass the directory that export_hf or save_pretrained wrote",
        path=str(directory),
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → file beside the index.

    Raises:
        CorruptCheckpointError: the index has no such map, or names a file that is not beside it.
    """
    try:
        found = dict(read_json(index)["weight_map"])
    except (ValueError, KeyError, TypeError):
        found = {"": None}
    if not all(isinstance(name, str) for name in found.values()):
        raise CorruptCheckpointError(
            "the index has no weight_map of names and files", remedy="download the directory again",
            path=str(index),
        )  # fmt: skip
    for name in found.values():
        if name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name):
            raise CorruptCheckpointError(
                f"the index names the file {name!r}, which is not beside it",
                remedy="download the directory again, from a source that you trust",
                path=str(index),
            )
    return found


def _open_file(path: Path, maps: _Unmaps) -> tuple[dict[str, tuple[str, Array]], Any]:
    """The file's tensors, and the training step that it records."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise UsageError(
            f"cannot read the file: {error.strerror}", remedy="pass paths of rank files",
            path=str(path),
        ) from error  # fmt: skip
    if start[8:9] == b"{":
        return _open_safetensors(path, maps), None
    opened = open_torch(path)
    maps.append(opened.let_go)
    return opened.tensors, opened.step


def _open_safetensors(path: Path, maps: _Unmaps) -> dict[str, tuple[str, Array]]:
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
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            maps.append(partial(mapped.madvise, mmap.MADV_DONTNEED))
            memory = np.frombuffer(mapped, np.uint8)
    out = {}
    for name, entry in header.slots.items():
        if entry.part:
            raise UsageError(
                f"{name} is a part of a rank's array, so the file belongs to a checkpoint",
                remedy="export the checkpoint's directory",
                path=str(path),
            )
        dtype = codes[entry.code]
        data = memory[entry.offset : entry.offset + entry.nbytes]
        out[name] = (dtype, np.frombuffer(data, bits(dtype)).reshape(entry.shape))
    return out
