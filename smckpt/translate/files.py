"""The files of an export: target tensors are laid out in them, and the directory becomes a model.

The directory is checked for files that were there before. Weights are written first and made
durable. The index, or the name model.safetensors, makes them loadable and comes last. An export
that is killed leaves files that nothing loads, and on a disk a record of their names, by which the
next one removes them. Only a `ChunkSource` (`stream`) knows the sources of
a range of a target.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Protocol

from msgspec import Meta

from smckpt.checkpoint.commits.part import SummedFile
from smckpt.checkpoint.records.files import read_file
from smckpt.checkpoint.records.sealed import FORMAT_VERSION, seal_json
from smckpt.errors import StorageError, UsageError
from smckpt.formats.names import INDEX, SINGLE
from smckpt.layout.entries import DTYPES
from smckpt.layout.mesh import Shape
from smckpt.storage import FileWriter, Storage
from smckpt.storage.disk.posix import PosixStorage
from smckpt.storage.faults import name_taken
from smckpt.storage.urls import file_url, is_local, local_path
from smckpt.translate.config import TEMPLATES

__all__ = [
    "ALIGNMENT",
    "Chunk",
    "Output",
    "OutputFile",
    "Range",
    "Target",
    "aligned",
    "arrange",
    "is_quantized",
    "nbytes_of",
]


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
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for target in self.ordered:
            end = at + nbytes_of(target)
            table[target.name] = {
                "dtype": DTYPES[target.dtype].code,
                "shape": list(target.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(table, separators=(",", ":")).encode()
        padded = -(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8
        return padded.to_bytes(8, "little") + text.ljust(padded)

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
BEGUN = ".export-files.json"  # on a disk, while an export into an empty directory is under way
MADE_BY_CONVERTER = re.compile(r"\.gguf\.[0-9a-f]{12}\.unfinished", re.A)


@dataclass(frozen=True)
class _Begun:
    """The files of such an export, before the first is written; one may be in `TEMPLATES`."""

    files: tuple[Annotated[str, Meta(pattern=rf"^({TEMPLATES}/)?(?!\.{{1,2}}\Z)[^/\\\0]+\Z")], ...]


# Weights in any form that from_pretrained or a server loads, and what tells of them. Where
# from_pretrained finds an adapter's config, it loads that adapter, whatever else is there; where
# vLLM finds ModelOpt's or GPTQ's settings, it takes the weights for quantized.
_WEIGHTS = re.compile(
    r"(model|adapter_model|pytorch_model|tf_model|flax_model|consolidated)[^/]*"
    r"\.(safetensors|bin|h5|msgpack|pth|gguf|unfinished)(\.index\.json)?$"
    r"|(adapter_config|hf_quant_config|quantize_config|params)\.json$"
)


class Output:
    """The directory `storage`, which is empty (or overwritten) and becomes a whole model."""

    def __init__(self, storage: Storage, files: Sequence[OutputFile]) -> None:
        self.storage = storage
        self.url = url = storage.url
        # a single file loads by itself, so it has another name until it is whole
        self._hidden = is_local(url) and len(files) == 1
        self._files = tuple(files)
        self._guard = threading.Lock()
        self._open: dict[str, SummedFile] = {}
        self._chunks: dict[str, int] = {}
        self._made: list[str] = []
        self._folders: dict[str, Storage] = {}
        self._nested: list[tuple[Storage, str]] = []
        self._new = is_local(url) and not os.path.exists(local_path(url))
        self._small: list[tuple[str, bytes, str]] | None = None  # until the record has their names
        self._lock: int | None = None  # of the record, by each process of the export

    def prepare(self, *, overwrite: bool) -> None:
        """Refuse a directory that is not empty, or remove the old model from it.

        Raises:
            UsageError: it is not empty and `overwrite` is False.
            StorageError: there is too little space, or the directory cannot be used.
        """
        self.at(TEMPLATES).refuse_links()  # before anything is removed
        if isinstance(self.storage, PosixStorage):
            self.storage.remove_dead(MADE_BY_CONVERTER)
            self._remove_begun(self.storage, overwrite=overwrite)
        present = self.present(overwrite)
        # The index first: after that no mixture of two models can be loaded.
        for name in sorted(filter(_WEIGHTS.match, present), key=lambda n: not n.endswith(".json")):
            self.storage.delete(name)
        if self.storage.folder is not None:  # of an export that was killed
            for files in (self.storage, self.at(TEMPLATES)):
                files.discard_unfinished(files.list_unfinished())
        self.check_space()
        if isinstance(self.storage, PosixStorage) and not self._there():
            self._small = []

    def begin(self, *further: str) -> None:
        """Record the names of all files that are to be written, then write the small ones.

        Args:
            further: names that come later.
        """
        small, self._small = self._small, None
        if small is None:
            return
        names = {f"{folder}/{name}" if folder else name for name, _, folder in small}
        weights = {name for file in self._files for name in (file.name, self._stored(file))}
        weights |= {INDEX} if len(self._files) > 1 else set()
        body = {"format": list(FORMAT_VERSION), "files": sorted({*names, *weights, *further})}
        if not self.storage.put_exclusive(BEGUN, seal_json(body)):
            raise self._another()
        self._made.append(BEGUN)
        self._join()
        for name, data, folder in small:
            self.put(name, data, folder)

    def _join(self) -> None:
        """Hold the record of this export, if there is one, so that no other takes it for that of a
        killed one."""
        if self._lock is None and isinstance(self.storage, PosixStorage):
            self._lock = self.storage.lock(BEGUN, shared=True)

    def _remove_begun(self, storage: PosixStorage, *, overwrite: bool) -> None:
        """Remove what an export left that was killed. If something else is there, then only with
        `overwrite`, and that stays."""
        storage.discard_unfinished([BEGUN])
        if BEGUN not in storage.names():
            return
        lock = storage.lock(BEGUN)
        if lock is None:
            raise self._another()
        try:
            remedy = f"remove {BEGUN}, if no export to this directory is under way"
            listed = read_file(_Begun, storage, BEGUN, remedy=remedy).files
            inside = [name.partition("/")[2] for name in listed if "/" in name]
            names = [name for name in listed if "/" not in name]
            templates = self.at(TEMPLATES)
            storage.discard_unfinished(names)
            templates.discard_unfinished(inside)
            if not overwrite and (others := self._there() - {*listed, BEGUN, TEMPLATES}):
                raise self._not_empty(others)
            templates.delete_many(inside)
            templates.remove_directory()  # it stays if files of others are there
            storage.delete_many(names)
            storage.sync()
            storage.delete(BEGUN)
        finally:
            os.close(lock)

    def writer(self, file: OutputFile, chunks: int) -> FileWriter:
        """The writer of `file`. The first call makes it and writes the header."""
        with self._guard:
            if file.name not in self._open:
                self._join()
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
        with self._guard:
            self._chunks[file.name] -= 1
            if self._chunks[file.name]:
                return
        self._finish(file)

    def put(self, name: str, data: bytes, folder: str = "") -> None:
        """Write a small file, in the directory or a folder of it. It may replace an old one, which
        only `overwrite` allows."""
        if self._small is not None:
            self._small.append((name, data, folder))
            return
        storage = self.at(folder) if folder else self.storage
        # at once: a card that a kill leaves empty would be taken for one of the user's
        storage.overwrite(name, data)
        if folder:
            self._nested.append((storage, name))
        else:
            self._made.append(name)

    def at(self, folder: str) -> Storage:
        """A folder of the directory."""
        if folder not in self._folders:
            self._folders[folder] = self.storage.join(folder)
        return self._folders[folder]

    def refuse_absent(self) -> None:
        """
        Raises:
            StorageError: files that other processes wrote are missing here.
        """
        sizes = {info.name: info.size for info in self.storage.list()}
        absent = [f.name for f in self._files if sizes.get(self._stored(f)) != f.size]
        if absent:
            raise StorageError(
                f"this process does not see {len(absent)} files that other processes wrote: "
                f"{absent[:8]}",
                remedy="pass an out_dir on a file system that all hosts share, or in S3",
                path=self.url,
            )

    def publish(self, index: bytes | None) -> None:
        """Make the model loadable: write the index, or give a single file its name."""
        if index is not None:
            # not `put`, which shows a name before its bytes
            if not self.storage.put_exclusive(INDEX, index):
                raise name_taken(file_url(self.url, INDEX))
            return
        if not self._hidden:
            return
        for file in self._files:
            self.storage.rename(self._stored(file), file.name)

    def abandon(self) -> None:
        """Remove the written files, as far as the store allows."""
        with ExitStack() as each:  # go on after one that cannot be removed
            for name in self._made:
                each.callback(self.storage.delete, name)
            for storage, name in self._nested:  # a folder goes if it is empty then
                each.callback(storage.remove_directory)
                each.callback(storage.delete, name)
            for writer in self._open.values():
                each.callback(writer.abort)
        self._leave()
        if self._new and self._made:
            self.storage.remove_directory()  # it stays if files of others are there

    def finish(self) -> None:
        """End it: the directory is a model, and all is there that belongs to it."""
        if BEGUN in self._made:
            self.storage.delete(BEGUN)
        self._leave()

    def _leave(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def close(self) -> None:
        for storage in (self.storage, *self._folders.values()):
            storage.close()

    def present(self, overwrite: bool) -> list[str]:
        present = [f.name for f in self.storage.list()]
        if not overwrite and (present or self.storage.list_dirs()):
            raise self._not_empty(self._there())
        return present

    def _there(self) -> set[str]:
        """What is in the directory, and in the one for templates."""
        folders = self.storage.list_dirs()
        inside = self.at(TEMPLATES).names(all_kinds=True) if TEMPLATES in folders else ()
        found = {*self.storage.names(all_kinds=True), *folders}
        return found | {f"{TEMPLATES}/{name}" for name in inside}

    def _not_empty(self, names: Collection[str]) -> UsageError:
        return UsageError(
            f"the directory is not empty: {', '.join(sorted(names)[:8])}",
            remedy="choose another out_dir, or pass options with overwrite=True to replace the "
            "model there",
            path=self.url,
        )

    def _another(self) -> UsageError:
        return UsageError(
            "another export writes to this directory, or did, where the file system has no locks "
            "that tell",
            remedy=f"wait for it; if none is under way, remove {BEGUN} and the files that it names",
            path=self.url,
        )

    def check_space(self) -> None:
        if not is_local(self.url):
            return
        there = local_path(self.url)
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


def aligned(size: int) -> memoryview:
    """`size` bytes of page-aligned memory, which direct writes need. It is freed with its last
    view."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]
