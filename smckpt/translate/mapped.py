"""Files that are mapped while they are read, and let go again: memory stays bounded."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from typing import Any, TypeAlias

import numpy as np
from awscrt import checksums

from smckpt.errors import CorruptCheckpointError
from smckpt.translate.torch_archive import ArchiveRecord

__all__ = ["MappedFiles"]

_OPEN = 128  # files mapped at once; each takes a descriptor
_WINDOW = 16 << 20  # bytes under one step of a checksum
_RESIDENT = 128 << 20  # bytes; after so many, mapped pages are released
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class MappedFiles:
    """Records of files, as bytes. Several threads may ask at once."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._checked: dict[tuple[str, int], threading.Lock | None] = {}
        self._lock = threading.Lock()
        self._resident = 0

    def bytes_of(self, record: ArchiveRecord) -> Array:
        """The bytes of a record, compared with its CRC the first time.

        Raises:
            CorruptCheckpointError: they differ, or the file has become shorter.
        """
        if not record.nbytes:
            return np.zeros(0, np.uint8)
        mapped = self._map(record)
        if record.crc is not None:
            self._check(record, mapped)
        return np.frombuffer(mapped, np.uint8, record.nbytes, record.offset)

    def let_go(self, nbytes: int) -> None:
        """Release mapped pages, after so many bytes were read from them."""
        with self._lock:
            self._resident += nbytes
            if self._resident < _RESIDENT:
                return
            self._resident = 0
            maps = list(self._maps.values())
        for mapped in maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        with self._lock:
            self._maps.clear()  # what is still read keeps its own

    def _map(self, record: ArchiveRecord) -> mmap.mmap:
        with self._lock:
            mapped = self._maps.get(record.path)
            if mapped is None:
                descriptor = os.open(record.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    size = os.fstat(descriptor).st_size
                    if record.offset + record.nbytes > size:
                        raise CorruptCheckpointError(
                            f"the file has {size} bytes, but {record.offset + record.nbytes} are "
                            "wanted",
                            remedy="fetch it again", path=record.path,
                        )  # fmt: skip
                    mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
                finally:
                    os.close(descriptor)
                self._maps[record.path] = mapped
                while len(self._maps) > _OPEN:
                    self._maps.popitem(last=False)
            else:
                self._maps.move_to_end(record.path)
            return mapped

    def _check(self, record: ArchiveRecord, mapped: mmap.mmap) -> None:
        key = record.path, record.offset
        with self._lock:
            lock = self._checked.setdefault(key, threading.Lock())
        if lock is None:
            return
        with lock:
            if self._checked[key] is None:
                return
            crc, at, end = 0, record.offset, record.offset + record.nbytes
            with memoryview(mapped) as memory:
                while at < end:
                    stop = min(end, at + _WINDOW)
                    crc = checksums.crc32(memory[at:stop], crc)
                    page = at - at % mmap.PAGESIZE
                    if end - at > _WINDOW:
                        mapped.madvise(mmap.MADV_DONTNEED, page, stop - page)
                    at = stop
            if crc != record.crc:
                raise CorruptCheckpointError(
                    f"bytes {record.offset} to {end} differ from the CRC-32 that torch.save wrote",
                    remedy="fetch the file again, or use another checkpoint", path=record.path,
                )  # fmt: skip
            self._checked[key] = None
