"""Reads files of others: on a disk they are mapped and let go again, from a store ranges are read.
Memory stays bounded."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
from awscrt import checksums

from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.layout.strided import Box, Copy, elements, execute
from smckpt.storage import Access, Storage
from smckpt.storage.urls import is_local

__all__ = ["ArchiveRecord", "SourceFiles"]

_AT_ONCE = 16  # requests for headers
_OPEN = 128  # files mapped at once; each takes a descriptor
_WINDOW = 16 << 20  # bytes under one step of a checksum, and of a record that is kept whole
_RESIDENT = (
    128 << 20
)  # bytes; after so many, mapped pages are released. So many are kept of a store
_SPARSE = 4  # a range of a store is read in parts if so many times more bytes would be read
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """Bytes of a file, and their CRC-32; None: there is none. path: a path, or the file's URL."""

    path: str
    offset: int
    nbytes: int
    crc: int | None = None

    def part(self, offset: int, nbytes: int, crc: int | None = None) -> ArchiveRecord:
        """
        Raises:
            CorruptCheckpointError: they are not all inside.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CorruptCheckpointError(
                f"bytes {offset} to {offset + nbytes} are wanted, but there are {self.nbytes} from "
                f"byte {self.offset} on",
                remedy="fetch the file again, or use another checkpoint", path=self.path,
            )  # fmt: skip
        return ArchiveRecord(self.path, self.offset + offset, nbytes, crc)


class SourceFiles:
    """Records of files, as bytes. Several threads may ask at once."""

    def __init__(self, access: Access | None = None) -> None:
        self.access = access or Access()
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._stores: dict[str, Storage] = {}
        self._kept: OrderedDict[ArchiveRecord, bytes] = OrderedDict()  # small ones of stores
        self._checked: dict[ArchiveRecord, threading.Lock | None] = {}
        self._lock = threading.Lock()
        self._resident = 0

    def whole(self, path: str) -> ArchiveRecord:
        """All bytes of a file.

        Raises:
            UsageError: it cannot be read, or is no regular file.
            CheckpointNotFoundError: a store has no such file.
        """
        if not is_local(path):
            storage, name = self._store(path)
            return ArchiveRecord(path, 0, storage.size(name))
        if os.path.exists(path) and not os.path.isfile(path):  # to open a pipe would wait for ever
            raise UsageError("this is no regular file", remedy="remove it", path=path)
        try:
            with open(path, "rb") as file:
                return ArchiveRecord(path, 0, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise UsageError(
                f"cannot read the file: {error.strerror}", remedy="pass a path that can be read",
                path=path,
            ) from error  # fmt: skip

    def read(self, record: ArchiveRecord, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a record; nothing is compared.

        Raises:
            CorruptCheckpointError: they are not all inside, or the file has become shorter.
        """
        wanted = record.part(start, (record.nbytes if stop is None else stop) - start)
        if not is_local(record.path):
            storage, name = self._store(record.path)
            return storage.read(name, wanted.offset, wanted.nbytes) if wanted.nbytes else b""
        parts = []
        descriptor = os.open(record.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            at, end = wanted.offset, wanted.offset + wanted.nbytes
            while at < end:
                part = os.pread(descriptor, end - at, at)
                if not part:
                    _shorter(record, at)
                parts.append(part)
                at += len(part)
        finally:
            os.close(descriptor)
        return b"".join(parts)

    def read_each(self, record: ArchiveRecord, starts: Sequence[int], nbytes: int) -> list[bytes]:
        """As many bytes at each of some places of a record. A store is asked for many at once."""

        def read(start: int) -> bytes:
            return self.read(record, start, start + nbytes)

        if is_local(record.path):
            return list(map(read, starts))
        with ThreadPoolExecutor(_AT_ONCE, "smckpt-read") as pool:
            return list(pool.map(read, starts))

    def copy(self, record: ArchiveRecord, copy: Copy, itemsize: int, target: memoryview) -> None:
        """Carry out a copy of elements of a record, whose CRC is compared the first time.

        Raises:
            CorruptCheckpointError: it differs, or the file has become shorter.
        """
        if not copy.numel:
            return
        to = elements(target, itemsize)
        if is_local(record.path):
            memory = self.bytes_of(record)
            execute(copy, elements(memory[: len(memory) // itemsize * itemsize], itemsize), to)
            return
        self.check(record)
        for part in _parts(copy, itemsize):
            low = part.source.start * itemsize
            data = self._range(record, low, low + part.source.extent * itemsize)
            execute(part.from_start(), elements(data, itemsize), to)

    def bytes_of(self, record: ArchiveRecord) -> Array:
        """The bytes of a record on a disk, compared with its CRC the first time.

        Raises:
            CorruptCheckpointError: they differ, or the file has become shorter.
        """
        if not record.nbytes:
            return np.zeros(0, np.uint8)
        self.check(record)
        return np.frombuffer(self._map(record), np.uint8, record.nbytes, record.offset)

    def check(self, record: ArchiveRecord) -> None:
        """Compare the bytes with their CRC, if they have one and it is the first time.

        Raises:
            CorruptCheckpointError: they differ, or the file has become shorter.
        """
        if record.crc is None:
            return
        with self._lock:
            lock = self._checked.setdefault(record, threading.Lock())
        if lock is None:
            return
        with lock:
            if self._checked[record] is None:
                return
            found = self._crc_mapped(record) if is_local(record.path) else self._crc_read(record)
            if found != record.crc:
                raise CorruptCheckpointError(
                    f"bytes {record.offset} to {record.offset + record.nbytes} differ from the "
                    "CRC-32 that torch.save wrote",
                    remedy="fetch the file again, or use another checkpoint", path=record.path,
                )  # fmt: skip
            self._checked[record] = None

    def let_go(self, nbytes: int) -> None:
        """Release mapped pages, after so many bytes were read from them. Otherwise all would count
        as this process's memory."""
        with self._lock:
            self._resident += nbytes
            if self._resident < _RESIDENT:
                return
            self._resident = 0
            maps = list(self._maps.values())
        for mapped in maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """It may be used again afterwards."""
        with self._lock:
            self._maps.clear()  # what is still read keeps its own
            self._kept.clear()
            for storage in self._stores.values():
                storage.close()

    def _store(self, path: str) -> tuple[Storage, str]:
        directory, _, name = path.rpartition("/")
        with self._lock:
            if directory not in self._stores:
                self._stores[directory] = self.access.open(f"{directory}/")
            return self._stores[directory], name

    def _range(self, record: ArchiveRecord, start: int, stop: int) -> bytes | memoryview:
        """Bytes of a record in a store. Small records are kept whole for a while: their tensors
        are read in many parts."""
        if record.nbytes > _WINDOW:
            return self.read(record, start, stop)
        with self._lock:
            data = self._kept.get(record)
            if data is not None:
                self._kept.move_to_end(record)
        if data is None:
            data = self.read(record)
            with self._lock:
                self._kept[record] = data
                while sum(map(len, self._kept.values())) > _RESIDENT:
                    self._kept.popitem(last=False)
        return memoryview(data)[start:stop]

    def _map(self, record: ArchiveRecord) -> mmap.mmap:
        with self._lock:
            mapped = self._maps.get(record.path)
            if mapped is None:
                descriptor = os.open(record.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    size = os.fstat(descriptor).st_size
                    if record.offset + record.nbytes > size:
                        _shorter(record, size)
                    mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
                finally:
                    os.close(descriptor)
                self._maps[record.path] = mapped
                while len(self._maps) > _OPEN:
                    self._maps.popitem(last=False)
            else:
                self._maps.move_to_end(record.path)
        if record.offset + record.nbytes > len(mapped):
            _shorter(record, len(mapped))
        return mapped

    def _crc_mapped(self, record: ArchiveRecord) -> int:
        mapped = self._map(record)
        crc, at, end = 0, record.offset, record.offset + record.nbytes
        with memoryview(mapped) as memory:
            while at < end:
                stop = min(end, at + _WINDOW)
                crc = checksums.crc32(memory[at:stop], crc)
                page = at - at % mmap.PAGESIZE
                if end - at > _WINDOW:
                    mapped.madvise(mmap.MADV_DONTNEED, page, stop - page)
                at = stop
        return crc

    def _crc_read(self, record: ArchiveRecord) -> int:
        crc = 0
        for at in range(0, record.nbytes, _WINDOW):
            stop = min(at + _WINDOW, record.nbytes)
            crc = checksums.crc32(self._range(record, at, stop), crc)
        return crc


def _parts(copy: Copy, itemsize: int) -> Iterator[Copy]:
    """A copy in parts whose source is read at once: none too large, none with much between."""
    extent = copy.source.extent
    if copy.numel == 1 or (
        extent * itemsize <= _WINDOW
        and (extent <= _SPARSE * copy.numel or extent * itemsize <= 1 << 20)
    ):
        yield copy
        return
    strides = [n > 1 and s for n, s in zip(copy.sizes, copy.source.strides, strict=True)]
    dim = max(range(len(strides)), key=strides.__getitem__)
    for low, high in ((0, copy.sizes[dim] // 2), (copy.sizes[dim] // 2, copy.sizes[dim])):
        offsets = tuple(low if d == dim else 0 for d in range(len(strides)))
        sizes = tuple(high - low if d == dim else n for d, n in enumerate(copy.sizes))
        yield from _parts(copy.part(Box(offsets, sizes)), itemsize)


def _shorter(record: ArchiveRecord, size: int) -> NoReturn:
    raise CorruptCheckpointError(
        f"the file has {size} bytes, but {record.offset + record.nbytes} are wanted",
        remedy="fetch it again", path=record.path,
    )  # fmt: skip
