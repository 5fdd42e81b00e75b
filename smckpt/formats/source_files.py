"""Reads ranges of files of others, on a disk and in a store. Memory stays bounded. A directory of
theirs is on a disk, in a store, or in an archive of tar."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NoReturn

from awscrt import checksums

from smckpt.calls import in_threads
from smckpt.checkpoint.records.sealed import at_once
from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.layout.strided import Box, Copy, elements, execute
from smckpt.storage import Access, Storage
from smckpt.storage.faults import os_errors_at, replaced
from smckpt.storage.urls import file_url, is_local, join_url

_AT_ONCE = 16  # requests for headers
_WINDOW = 16 << 20  # bytes that a store is asked for at once, and of a record that is kept whole
_STEP = 1 << 20  # bytes that are read from a disk at once: they stay in the processor's cache
_KEPT = 128 << 20  # bytes of small records of stores
_SPARSE = 4  # a range of a store is read in parts if so many times more bytes would be read


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """Bytes of a file, and their CRC-32; None: there is none. path: a path, or the file's URL."""

    path: str
    offset: int
    nbytes: int
    crc: int | None = None

    @property
    def on_disk(self) -> bool:
        return is_local(self.path)

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
        self._stores: dict[str, Storage] = {}
        self._kept: OrderedDict[ArchiveRecord, bytes] = OrderedDict()  # small ones of stores
        self._checked: dict[ArchiveRecord, threading.Lock | None] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # of files on a disk: size, time of change
        self._lock = threading.Lock()
        self._own = threading.local()

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
                self._compare(path, file.fileno())
                return ArchiveRecord(path, 0, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise UsageError(
                f"cannot read the file: {error.strerror}", remedy="pass a path that can be read",
                path=path,
            ) from error  # fmt: skip

    def read(self, record: ArchiveRecord, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a record; nothing is compared. A file on a disk is read too, not
        mapped: where another program cuts it short meanwhile, or its disk fails, a map would kill
        the process (SIGBUS).

        Raises:
            CorruptCheckpointError: they are not all inside, or the file has become shorter.
            StorageError: they cannot be read.
        """
        wanted = record.part(start, (record.nbytes if stop is None else stop) - start)
        if not record.on_disk:
            storage, name = self._store(record.path)
            return storage.read(name, wanted.offset, wanted.nbytes) if wanted.nbytes else b""
        data = bytearray(wanted.nbytes)
        with self._opened(record) as fill:
            fill(start, memoryview(data))
        return bytes(data)

    def read_each(self, record: ArchiveRecord, starts: Sequence[int], nbytes: int) -> list[bytes]:
        """As many bytes at each of some places of a record. A store is asked for many at once."""

        def read(start: int) -> bytes:
            return self.read(record, start, start + nbytes)

        if record.on_disk:  # the file is opened once for all
            with self._opened(record) as fill:
                found = [bytearray(record.part(start, nbytes).nbytes) for start in starts]
                for start, data in zip(starts, found, strict=True):
                    fill(start, memoryview(data))
            return list(map(bytes, found))
        return in_threads(read, starts, _AT_ONCE, "smckpt-read")

    def copy(
        self,
        record: ArchiveRecord,
        copy: Copy,
        itemsize: int,
        target: memoryview,
        *,
        sample: bool = False,
    ) -> None:
        """Carry out a copy of elements of a record, whose CRC is compared the first time. sample:
        nothing more than the elements is read, and nothing compared.

        Raises:
            CorruptCheckpointError: it differs, or the file has become shorter.
        """
        if not copy.numel:
            return
        to = elements(target, itemsize)
        if not sample:
            self.check(record)
        if not record.on_disk:
            fetch = self.read if sample else self._range
            for part in _parts(copy, itemsize, _WINDOW):
                low = part.source.start * itemsize
                data = fetch(record, low, low + part.source.extent * itemsize)
                execute(part.from_start(), elements(data, itemsize), to)
            return
        source, there = copy.source, copy.target
        with self._opened(record) as fill:
            if source.strides == there.strides and source.extent == source.numel:
                low, nbytes = there.start * itemsize, copy.numel * itemsize
                fill(source.start * itemsize, target[low : low + nbytes])
                return
            for part in _parts(copy, itemsize, _STEP):
                data = self._buffer(part.source.extent * itemsize)
                fill(part.source.start * itemsize, data)
                execute(part.from_start(), elements(data, itemsize), to)

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
            found = 0
            if record.on_disk:
                with self._opened(record) as fill:
                    for low in range(0, record.nbytes, _STEP):
                        data = self._buffer(min(_STEP, record.nbytes - low))
                        fill(low, data)
                        found = checksums.crc32(data, found)
            else:
                for low in range(0, record.nbytes, _WINDOW):
                    high = min(low + _WINDOW, record.nbytes)
                    found = checksums.crc32(self._range(record, low, high), found)
            if found != record.crc:
                raise CorruptCheckpointError(
                    f"bytes {record.offset} to {record.offset + record.nbytes} differ from the "
                    "CRC-32 that torch.save wrote",
                    remedy="fetch the file again, or use another checkpoint", path=record.path,
                )  # fmt: skip
            self._checked[record] = None

    def close(self) -> None:
        """It may be used again afterwards."""
        with self._lock:
            self._kept.clear()
            self._seen.clear()
            for storage in self._stores.values():
                storage.close()
            self._stores.clear()

    def _store(self, path: str) -> tuple[Storage, str]:
        directory, _, name = path.rpartition("/")
        with self._lock:
            if directory not in self._stores:
                self._stores[directory] = self.access.open(f"{directory}/").of_one_version()
            return self._stores[directory], name

    @contextmanager
    def _opened(self, record: ArchiveRecord) -> Iterator[Callable[[int, memoryview], None]]:
        """A function that fills memory with the bytes of a record on a disk from `start` on.

        Raises:
            CorruptCheckpointError: the file is another one than at the first read, or shorter.
            StorageError: it cannot be read.
        """
        with (
            os_errors_at(record.path, "read"),
            open(record.path, "rb", buffering=0, opener=at_once) as file,
        ):
            self._compare(record.path, file.fileno())

            def fill(start: int, memory: memoryview) -> None:
                record.part(start, len(memory))
                done = 0
                while done < len(memory):
                    at = record.offset + start + done
                    got = os.preadv(file.fileno(), [memory[done:]], at)
                    if not got:
                        _shorter(record, os.fstat(file.fileno()).st_size)
                    done += got

            yield fill
            self._compare(record.path, file.fileno())

    def _compare(self, path: str, fd: int) -> None:
        """A file that is replaced or written between two reads would give tensors of both."""
        found = os.fstat(fd)  # not its inode, which some file systems make anew
        now = found.st_size, found.st_mtime_ns
        before = self._seen.setdefault(path, now)
        if before != now:
            if before[0] == now[0]:
                raise replaced(path)
            raise CorruptCheckpointError(
                f"the file has {now[0]} bytes, but had {before[0]} when its reading began",
                remedy="read it when nothing writes to it any more", path=path,
            )  # fmt: skip

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory of this thread, for what is read from a disk."""
        if len(getattr(self._own, "buffer", b"")) < nbytes:
            self._own.buffer = bytearray(nbytes)
        return memoryview(self._own.buffer)[:nbytes]

    def _range(self, record: ArchiveRecord, start: int, stop: int) -> bytes | memoryview:
        """Bytes of a store's record. Small ones are kept whole for a while: their tensors are read
        in many parts."""
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
                while sum(map(len, self._kept.values())) > _KEPT:
                    self._kept.popitem(last=False)
        return memoryview(data)[start:stop]


def _parts(copy: Copy, itemsize: int, window: int) -> Iterator[Copy]:
    """A copy in parts whose source is read at once: none too large, none with much between."""
    extent = copy.source.extent
    if copy.numel == 1 or (
        extent * itemsize <= window
        and (extent <= _SPARSE * copy.numel or extent * itemsize <= 1 << 20)
    ):
        yield copy
        return
    strides = [n > 1 and s for n, s in zip(copy.sizes, copy.source.strides, strict=True)]
    dim = max(range(len(strides)), key=strides.__getitem__)
    for low, high in ((0, copy.sizes[dim] // 2), (copy.sizes[dim] // 2, copy.sizes[dim])):
        offsets = tuple(low if d == dim else 0 for d in range(len(strides)))
        sizes = tuple(high - low if d == dim else n for d, n in enumerate(copy.sizes))
        yield from _parts(copy.part(Box(offsets, sizes)), itemsize, window)


def _shorter(record: ArchiveRecord, size: int) -> NoReturn:
    raise CorruptCheckpointError(
        f"the file has {size} bytes, but {record.offset + record.nbytes} are wanted",
        remedy="fetch it again", path=record.path,
    )  # fmt: skip


_START = 512  # bytes: a block of tar
_TAR_AT_ONCE = 1 << 20  # bytes; a name, and what else a header says, is shorter
_MEMBERS = 200_000
_GLOBAL = 64  # headers for all members; tar goes through them again for each member
_GZIP = b"\x1f\x8b"


class Folder:
    """A directory, and how to read its files.

    Args:
        packed: the files of an archive, by their paths in it. None: it is a directory at `url`.
        within: the path in the archive; "" or with a slash at its end.
    """

    def __init__(
        self, source: SourceFiles, url: str, packed: Mapping[str, ArchiveRecord] | None = None,
        within: str = "",
    ) -> None:  # fmt: skip
        self.source = source
        self.url = url
        self._packed = packed
        self._within = within

    @cached_property
    def files(self) -> Mapping[str, ArchiveRecord]:
        """The regular files directly in it, by name, sorted."""
        if self._packed is not None:
            below = self._below
            found = {name: self._packed[self._within + name] for name in below if "/" not in name}
        else:
            found = {
                info.name: ArchiveRecord(file_url(self.url, info.name), 0, info.size)
                for info in self.source.access.open(self.url).list()
            }
        return MappingProxyType(found)

    @cached_property
    def folders(self) -> Sequence[str]:
        """The names of the directories in it, sorted."""
        if self._packed is not None:
            return sorted({name.partition("/")[0] for name in self._below if "/" in name})
        return self.source.access.open(self.url).list_dirs()

    @property
    def packed(self) -> bool:
        """Whether it is in an archive."""
        return self._packed is not None

    @property
    def name(self) -> str:
        return f"{self.url}/{self._within}".rstrip("/").rpartition("/")[2]

    def at(self, name: str) -> Folder:
        """A directory in it, which need not exist."""
        if self._packed is not None:
            return Folder(self.source, self.url, self._packed, f"{self._within}{name}/")
        return Folder(self.source, join_url(self.url, name))

    def find(self, path: str) -> ArchiveRecord | None:
        """A file in it or below it; None: there is none."""
        *above, name = path.split("/")
        folder = self
        for part in above:
            folder = folder.at(part)
        return folder.files.get(name)

    def read(self, name: str, most: int) -> bytes:
        """A small file in it.

        Raises:
            CorruptCheckpointError: it is larger.
        """
        record = self.files[name]
        if record.nbytes > most:
            raise CorruptCheckpointError(
                f"{name} has {record.nbytes} bytes, more than {most}",
                remedy="fetch the file again, or use another checkpoint", path=self.url,
            )  # fmt: skip
        return self.source.read(record)

    @cached_property
    def _below(self) -> list[str]:
        """The paths of all files below it."""
        assert self._packed is not None
        start = len(self._within)
        return sorted(path[start:] for path in self._packed if path.startswith(self._within))


# -- archives --------------------------------------------------------------------------------------


def is_tar(source: SourceFiles, record: ArchiveRecord) -> bool:
    """
    Raises:
        UsageError: it is an archive that was compressed, so nothing in it can be read alone.
    """
    start = source.read(record, 0, min(_START, record.nbytes))
    if start.startswith(_GZIP):
        name = record.path.rpartition("/")[2]
        raise UsageError(
            "this file is compressed by gzip, as older NeMo writes .nemo; to find a tensor in it, "
            "all that stands before has to be unpacked",
            remedy=f"unpack it once (gzip -dc {name} > {name}.tar), and pass {name}.tar",
            path=record.path,
        )
    return start[257:262] == b"ustar"


def open_tar(source: SourceFiles, record: ArchiveRecord) -> Folder:
    """The directory that an archive holds. Only its headers are read. Links, pipes and the like are
    left out.

    Raises:
        CorruptCheckpointError: it is damaged, or a path in it leads out of it.
    """
    found: dict[str, ArchiveRecord] = {}
    try:
        with tarfile.open(fileobj=HeadersFile(source, record, _TAR_AT_ONCE), mode="r:") as archive:
            for number, member in enumerate(archive):
                if number >= _MEMBERS or len(archive.pax_headers) > _GLOBAL:
                    what = f"{_MEMBERS} members" if number >= _MEMBERS else f"{_GLOBAL} headers"
                    _bad(record, f"it has more than {what}")
                if not member.isreg() or member.issparse():
                    continue
                parts = [part for part in member.name.split("/") if part != "."]
                if not parts or {"", ".."} & {*parts} or "\0" in member.name:
                    _bad(record, f"its member {member.name!r} is outside of it")
                path = "/".join(parts)
                if path in found:
                    _bad(record, f"it has {path} twice")
                end = member.offset_data + member.size
                if member.size < 0 or end > record.nbytes:
                    _bad(record, f"{path} ends at byte {end} of {record.nbytes}")
                found[path] = record.part(member.offset_data, member.size)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        _bad(record, str(error))
    return Folder(source, record.path, found)


class HeadersFile(io.RawIOBase):
    """What `tarfile` and `zipfile` read from: a file whose headers alone are read.

    Args:
        most: bytes at once.
        tail: bytes at the end that are read first.
    """

    def __init__(
        self, source: SourceFiles, record: ArchiveRecord, most: int, tail: int = 0
    ) -> None:  # fmt: skip
        self._source, self._record, self._most = source, record, most
        self._at = 0
        start = max(record.nbytes - tail, 0) if tail else 0
        # from which byte on; a store answers slowly
        self._block = (start, source.read(record, start) if tail else b"")

    def read(self, size: int = -1) -> bytes:
        size = max(self._record.nbytes - self._at, 0) if size < 0 else size
        if size > self._most:
            raise ValueError(f"a header of {size} bytes")
        start, data = self._block
        stop = min(self._at + size, self._record.nbytes)
        if not start <= self._at <= stop <= start + len(data):
            start = min(self._at, self._record.nbytes)
            end = min(start + max(size, 64 << 10), self._record.nbytes)
            data = self._source.read(self._record, start, end)
            self._block = start, data
        found = data[self._at - start : max(stop - start, 0)] if stop > self._at else b""
        self._at += len(found)
        return found

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        self._at = at + (self._record.nbytes if whence == io.SEEK_END else 0)
        if self._at < 0:
            raise OSError(f"there is no byte {self._at}")
        return self._at

    def tell(self) -> int:
        return self._at


def _bad(record: ArchiveRecord, what: str) -> NoReturn:
    raise CorruptCheckpointError(
        f"this is no whole archive of tar: {what}",
        remedy="fetch the file again, from a source that you trust", path=record.path,
    )  # fmt: skip
