"""The files of an export: target tensors are laid out in them, and the directory becomes a model.

The directory is checked for files that were there before. Weights are written first and made
durable. The index, or the name model.safetensors, makes them loadable and comes last. An export
that is killed leaves files that nothing loads; on a disk, where it replaces no model, it leaves
them where the next one finds and removes them (`hidden`). Only a `ChunkSource` (`stream`) knows the
sources of a range of a target.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from smckpt.checkpoint.commits.part import SummedFile
from smckpt.errors import StorageError, UsageError
from smckpt.formats.names import INDEX, SINGLE
from smckpt.layout.entries import DTYPES
from smckpt.layout.image import METADATA, safetensors_header
from smckpt.layout.mesh import Shape
from smckpt.storage import FileWriter, Storage
from smckpt.storage.faults import name_taken
from smckpt.storage.urls import disk_path, file_url, local_path, normal_url
from smckpt.translate import hidden
from smckpt.translate.beside import TEMPLATES

ALIGNMENT = 4096  # bytes; data and chunks start at multiples of it, which direct writes need


class Target(Protocol):
    """A tensor of the export."""

    @property
    def name(self) -> str:
        """The name in the file."""

    @property
    def dtype(self) -> str:
        """The dtype in the file: a name in `DTYPES` with a safetensors code."""

    @property
    def shape(self) -> Shape: ...

    @property
    def source_dtype(self) -> str:
        """The dtype of the elements that are read."""


def is_quantized(target: Target) -> bool:
    """Whether a tensor holds quantized weights, or parts of them."""
    return target.dtype in ("int8", "uint8", "int32") or target.dtype.startswith("float8")


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a target, at byte `offset` of a chunk."""

    target: Target
    start: int
    stop: int
    offset: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.target.dtype].itemsize

    @property
    def source_bytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.target.source_dtype].itemsize

    @property
    def casts(self) -> bool:
        return self.target.dtype != self.target.source_dtype


@dataclass(frozen=True)
class Chunk:
    """Bytes [offset, offset + length) of a file and the ranges that fill them, without a gap."""

    offset: int
    length: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class OutputFile:
    """One safetensors file: targets ordered so that each is aligned to its element size."""

    name: str
    targets: tuple[Target, ...]

    @cached_property
    def ordered(self) -> tuple[Target, ...]:
        return tuple(sorted(self.targets, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name)))

    @cached_property
    def header(self) -> bytes:
        """The header, padded so that the data starts at a multiple of `ALIGNMENT`."""
        if any(target.name == METADATA for target in self.targets):
            raise UsageError(
                f"a tensor has the name {METADATA!r}, under which a safetensors file has its own "
                "metadata",
                remedy="give it another name, or leave it out",
            )
        tensors = (
            (t.name, DTYPES[t.dtype].code or "", t.shape, nbytes_of(t)) for t in self.ordered
        )
        return safetensors_header(tensors, {"format": "pt"}, ALIGNMENT)

    @cached_property
    def data_bytes(self) -> int:
        return sum(map(nbytes_of, self.targets))

    @property
    def size(self) -> int:
        return len(self.header) + self.data_bytes

    def chunks(self, length: int) -> Iterator[Chunk]:
        """The data in chunks of `length` bytes, a multiple of `ALIGNMENT`. The first chunk is
        shorter, so that the others begin at multiples of `length` in the file; the last may be
        shorter too.

        No element is split, because chunks start at multiples of every element size.
        """
        ranges: list[Range] = []
        base, filled = len(self.header), 0
        room = length - base % length
        for target in self.ordered:
            itemsize = DTYPES[target.dtype].itemsize
            start, numel = 0, math.prod(target.shape)
            while start < numel:
                stop = min(numel, start + (room - filled) // itemsize)
                ranges.append(Range(target, start, stop, filled))
                filled += (stop - start) * itemsize
                start = stop
                if filled == room:
                    yield Chunk(base, filled, tuple(ranges))
                    base, filled, ranges, room = base + filled, 0, [], length
        if filled:
            yield Chunk(base, filled, tuple(ranges))


def arrange(targets: Sequence[Target], max_bytes: int) -> tuple[OutputFile, ...]:
    """The targets in files of at most `max_bytes` of data each, in their order.

    A larger tensor has a file of its own. A single file is called model.safetensors. Several files
    are numbered as by `save_pretrained`.

    Raises:
        UsageError: a target's dtype has no code in safetensors.
    """
    batches: list[list[Target]] = [[]]
    room = max_bytes
    for target in targets:
        if DTYPES[target.dtype].code is None:
            raise UsageError(
                f"{target.name} has dtype {target.dtype}, which safetensors files cannot hold",
                remedy="leave that tensor out of the model's state, or keep it in another dtype",
            )
        need = nbytes_of(target)
        if need > room and batches[-1]:
            batches.append([])
            room = max_bytes
        batches[-1].append(target)
        room -= need
    count = len(batches)
    if count == 1:
        return (OutputFile(SINGLE, tuple(batches[0])),)
    return tuple(
        OutputFile(f"model-{number:05d}-of-{count:05d}.safetensors", tuple(batch))
        for number, batch in enumerate(batches, 1)
    )


def nbytes_of(target: Target) -> int:
    return math.prod(target.shape) * DTYPES[target.dtype].itemsize


UNFINISHED = ".unfinished"

# Weights in any form that from_pretrained or a server loads, and what tells of them. Where
# from_pretrained finds an adapter's config, it loads that adapter, whatever else is there; where
# vLLM finds ModelOpt's or GPTQ's settings, it takes the weights for quantized.
_WEIGHTS = re.compile(
    r"(model|adapter_model|pytorch_model|tf_model|flax_model|consolidated)[^/]*"
    r"\.(safetensors|bin|h5|msgpack|pth|gguf|unfinished)(\.index\.json)?$"
    r"|(adapter_config|hf_quant_config|quantize_config|params)\.json$"
)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_FILE = re.compile(r"\.[A-Za-z]+$")  # the end of a file's name, not of a step's directory


class Output:
    """The directory `storage`, which is empty (or overwritten) and becomes a whole model."""

    def __init__(self, storage: Storage, files: Sequence[OutputFile]) -> None:
        self.storage = storage
        self.url, self._path = storage.url, disk_path(storage.url)
        # a single file loads by itself, so it has another name until it is whole
        self._hidden = self._path is not None and len(files) == 1
        self._files = tuple(files)
        self._lock = threading.Lock()
        self._open: dict[str, SummedFile] = {}
        self._chunks: dict[str, int] = {}
        self._made: list[str] = []
        self._folders: dict[str, Storage] = {}
        self._nested: list[tuple[Storage, str]] = []
        self._new = self._path is not None and not os.path.exists(self._path)
        # in which the files are made; "": in the directory itself
        self.folder = ""
        self._leads = False

    def prepare(self, *, overwrite: bool) -> list[str]:
        """Refuse a directory that is not empty, or remove the old model from it. Returns notes.

        Raises:
            UsageError: it is not empty and `overwrite` is False.
            StorageError: there is too little space, or the directory cannot be used.
        """
        left = [] if self._path is None else hidden.clear(self._path)
        present = self.present(overwrite)
        self.at(TEMPLATES).refuse_links()  # before anything is removed
        # The index first: after that no mixture of two models can be loaded.
        for name in sorted(filter(_WEIGHTS.match, present), key=lambda n: not n.endswith(".json")):
            self.storage.delete(name)
        if self.storage.folder is not None:  # of an export that was killed
            for files in (self.storage, self.at(TEMPLATES)):
                files.discard_unfinished(files.list_unfinished())
        self.check_space()
        if self._path is not None and not overwrite:
            # pipes, sockets and dangling links, which a user may have put there
            odd = self.storage.names(all_kinds=True)
            self._refuse_taken(*filter(_WEIGHTS.match, odd))
            self._leads = True
            self.enter(hidden.begin(self._path))
        return [
            f"{self.url} holds {name}, of an export that still runs or was killed: if none runs, "
            "remove it"
            for name in left
        ]

    def enter(self, folder: str) -> None:
        """Make the files in a hidden directory, from which `publish` shows them."""
        if folder and not self.folder:
            self.folder, self._hidden = folder, False
            self._folders[""] = self.storage  # `close` closes it
            self.storage = self.storage.join(folder)
            self._folders.pop(TEMPLATES, None)

    def writer(self, file: OutputFile, chunks: int) -> FileWriter:
        """The writer of `file`. The first call makes it and writes the header."""
        with self._lock:
            if file.name not in self._open:
                name = self._stored(file)
                writer = self.begun(file, name)
                self._open[file.name] = writer
                self._chunks[file.name] = chunks
                self._made.append(name)
                memory = aligned(len(file.header))
                memory[:] = file.header
                writer.write_at(0, memory)
                if chunks == 0:
                    self._finish(file)
            return self._open[file.name]

    def chunk_done(self, file: OutputFile) -> None:
        """Count a finished chunk. The last one makes the file durable."""
        with self._lock:
            self._chunks[file.name] -= 1
            if self._chunks[file.name]:
                return
        self._finish(file)

    def put(self, name: str, data: bytes, folder: str = "") -> None:
        """Write a small file, in the directory or a folder of it. It may replace an old one, which
        only `overwrite` allows."""
        storage = self.at(folder) if folder else self.storage
        self._refuse_taken(*filter(self.has_beside, [folder or name]))
        # at once: a card that a kill leaves empty would be taken for one of the user's
        storage.overwrite(name, data)
        if folder:
            self._nested.append((storage, name))
        else:
            self._made.append(name)

    def has_beside(self, name: str) -> bool:
        """Whether something has a name in the directory while the files are made in a hidden one.
        It is not of this export."""
        return bool(self.folder) and name in self._folders[""].names(name, all_kinds=True)

    def at(self, folder: str) -> Storage:
        """A folder of the directory."""
        if folder not in self._folders:
            self._folders[folder] = self.storage.join(folder)
        return self._folders[folder]

    def refuse_absent(self) -> None:
        """
        Raises:
            StorageError: files that this process or others wrote are missing here.
        """
        sizes = {info.name: info.size for info in self.storage.list()}
        absent = [f.name for f in self._files if sizes.get(self._stored(f)) != f.size]
        if absent:
            raise StorageError(
                f"this process does not see {len(absent)} files that were written: {absent[:8]}",
                remedy="pass an out_dir on a file system that all hosts share, or in S3, and from "
                "which nobody removes files meanwhile",
                path=self.url,
            )

    def publish(self, index: bytes | None) -> None:
        """Make the model loadable: write the index, or give a single file its name."""
        if index is not None:
            # not `put`, which shows a name before its bytes
            if not self.storage.put_exclusive(INDEX, index):
                raise name_taken(file_url(self.url, INDEX))
        elif self._hidden:
            for file in self._files:
                self.storage.rename(self._stored(file), file.name)
        if self.folder:
            last = self._files[0].name if index is None else INDEX
            hidden.show(local_path(self.url), self.folder, last, _WEIGHTS.match)

    def abandon(self) -> None:
        """Remove the written files, as far as the store allows."""
        with ExitStack() as each:  # go on after one that cannot be removed
            for name in () if self._leads else self._made:
                each.callback(self.storage.delete, name)
            for storage, name in () if self._leads else self._nested:
                each.callback(storage.remove_directory)  # it goes if it is empty then
                each.callback(storage.delete, name)
            for writer in self._open.values():
                each.callback(writer.abort)
            if self._leads:  # first
                each.callback(hidden.discard, local_path(self.url), self.folder)
        if self.folder and not self._leads:
            self.storage.remove_directory()  # if the first process has gone before
        if self._new and (self._made or self._leads):
            self._folders.get("", self.storage).remove_directory()  # it stays if it is not empty

    def close(self) -> None:
        for storage in (self.storage, *self._folders.values()):
            storage.close()

    def present(self, overwrite: bool) -> list[str]:
        present = [f.name for f in self.storage.list()]
        folders = [name for name in self.storage.list_dirs() if not hidden.is_hidden(name)]
        if (present or folders) and not overwrite:
            ours = f".safetensors{UNFINISHED}"
            half = next((name for name in present if name.endswith(ours)), None)
            if half is None and not {INDEX, SINGLE} & {*present}:  # in a store, under its name
                half = next(filter(_SHARD.fullmatch, present), None)
            raise UsageError(
                "the directory is not empty"
                + (
                    "" if half is None else f": an export that was killed or still runs left {half}"
                ),
                remedy="choose another out_dir, or pass options with overwrite=True to replace "
                + ("the model there" if half is None else "what is there, if none runs"),
                path=self.url,
            )
        return present

    def _refuse_taken(self, *names: str) -> None:
        if names:  # early: `hidden.show` would refuse them when all is made
            raise UsageError(
                f"the directory already holds {list(names[:8])}, names of a model's files",
                remedy="remove it, or choose another out_dir",
                path=self.url,
            )

    def check_space(self) -> None:
        if (there := self._path) is None:
            return
        while not os.path.isdir(there):
            there = os.path.dirname(there)
        need = sum(file.size for file in self._files)
        free = shutil.disk_usage(there).free
        if free < need:
            raise StorageError(
                f"the model needs {need:,} bytes, but only {free:,} are free",
                remedy="free space, or choose an out_dir on another disk",
                path=self.url,
            )

    def checksum_of(self, file: OutputFile) -> str:
        """The CRC-64/NVME of a file that this process wrote, in hexadecimal."""
        return self._open[file.name].crc64

    def begun(self, file: OutputFile, name: str) -> SummedFile:
        return SummedFile(self.storage.create_file(name, file.size), file.size)

    def _finish(self, file: OutputFile) -> None:
        self._open[file.name].finish()

    def _stored(self, file: OutputFile) -> str:
        """The present name of a file. A file that can be loaded by itself has another name until
        the end. An object always appears whole."""
        return file.name + UNFINISHED if self._hidden else file.name


def refuse_into_source(
    out_dir: str | os.PathLike[str], *files: str | os.PathLike[str], **given: Any
) -> None:
    """Raise UsageError if `out_dir` contains files of ranks or of another argument. They would be
    lost when an old model, or the rest of a failed export, is removed."""
    url = os.fspath(out_dir)
    there = _urls(url)[0]
    reserved_paths = [(reserved, "a rank's file") for path in files for reserved in _urls(path)[1:]]
    for name, value in given.items():
        if isinstance(value, (str, os.PathLike)):
            reserved_paths += [(reserved, f"{name}=") for reserved in _urls(value)]
    for reserved, what in reserved_paths:
        if reserved == there:
            raise UsageError(
                f"out_dir is the directory of {what}, which a failed export would delete",
                remedy="choose another out_dir",
                path=url,
            )


def _urls(path: str | os.PathLike[str]) -> list[str]:
    """A path, and the directory that it is in if it is a file. In a store its name tells that."""
    url = os.fspath(path)
    if (path_there := disk_path(url)) is not None:
        found = os.path.realpath(path_there)
        return [found, os.path.dirname(found)] if os.path.isfile(found) else [found]
    found = normal_url(url)
    parent, _, name = found.rstrip("/").rpartition("/")
    return [found, f"{parent}/"] if _FILE.search(name) else [found]


def aligned(size: int) -> memoryview:
    """`size` bytes of page-aligned memory, which direct writes need. It is freed with its last
    view."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]
