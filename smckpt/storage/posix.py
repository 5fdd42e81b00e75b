"""A directory of a POSIX file system: local disk, NFS, FSx for Lustre, FUSE.

Big files are written with O_DIRECT where the file system takes it: the bytes go from the arena to
the device without a copy through the page cache (three to six times the rate of buffered writes +
fsync on a virtual disk). Names appear exclusively, files and directories are fsynced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial

from smckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    UsageError,
)
from smckpt.storage.base import FileInfo, Storage
from smckpt.storage.exclusive import publish
from smckpt.storage.faults import storage_error
from smckpt.storage.posix_write import PosixWriter, sync_directory, unlink, write_all
from smckpt.storage.urls import join_url

__all__ = ["TEMPORARY_SUFFIX", "PosixStorage"]

TEMPORARY_SUFFIX = ".tmp"  # `.<name>.<random>.tmp`: what is to bear the name when it is whole
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp", re.A)
_OPEN_FILES = 64  # kept open for reading
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_READ_AHEAD = 1 << 20  # bytes: a read this large is asked for ahead of its copying
_STRETCH = 256 << 10  # bytes: what somebody looks at while it is in the processor's cache
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # not on macOS
_MAX_VECTOR = 1024  # IOV_MAX of Linux and macOS
# When a directory is not empty, gone, a mount point, or held by rights that rmdir needs alone.
_STAYS = (
    errno.ENOTEMPTY,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EBUSY,
    errno.EACCES,
    errno.EPERM,
)


class PosixStorage:
    """The directory `path`, absolute. Thread-safe; implements `Storage`."""

    def __init__(self, path: str) -> None:
        self.url = os.path.abspath(path)
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()

    @property
    def write_threads(self) -> int:
        return 0

    @property
    def request_bytes(self) -> int:
        return 8 << 20

    @property
    def rereads(self) -> int:
        return 0

    def create_file(self, name: str, size: int, *, replace: bool = False) -> PosixWriter:
        if size < 0:
            raise UsageError(f"a file of {size} bytes", remedy="pass a size >= 0", path=self.url)
        path = self._path(name)
        begun = self._temporary(name) if replace else path
        try:
            fd = self._create(begun)
        except OSError as error:
            raise storage_error(error, path, "create the file") from error
        return PosixWriter(begun, path, size, fd, partial(self._forget, path))

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            self._write_new(path, data)
            sync_directory(self.url)
        except OSError as error:
            raise storage_error(error, path, "write") from error

    def put_exclusive(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        temporary = self._temporary(name)
        try:
            if os.path.lexists(path):
                return False
            self._write_new(temporary, data)
            try:
                created = publish(temporary, path)
            finally:
                with contextlib.suppress(OSError):  # what stays is swept
                    unlink(temporary)
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error(error, path, "create exclusively") from error
        try:
            if created:
                sync_directory(self.url)
        except OSError as error:
            action = "make the new name durable (it is seen already, and power may take it)"
            raise storage_error(error, path, action) from error
        return created

    def try_out(self, name: str) -> str:
        return ""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if length is None:
            length = max(self.size(name) - offset, 0)
        data = bytearray(length)
        self.read_into(name, offset, [memoryview(data)])
        return bytes(data)

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        path = self._path(name)
        wanted = [b if b.format == "B" else b.cast("B") for b in buffers if b.nbytes]
        reading = _Reading(offset, wanted, seen)
        try:
            try:
                complete = reading.run(self._descriptor(path))
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self._forget(path)  # NFS: the server restarted; a fresh descriptor may do
                complete = reading.run(self._descriptor(path))
        except CheckpointError:
            raise  # of `seen`: some of ours are OSErrors, and none may be its own cause
        except OSError as error:
            raise storage_error(error, path, "read") from error
        if not complete:
            raise CorruptCheckpointError(
                f"{name} ends at byte {reading.offset}; "
                f"{offset + sum(b.nbytes for b in wanted)} were needed",
                remedy="the file was cut after it was written: use an older checkpoint",
                path=path,
            )

    def fetch(self, name: str, target: memoryview) -> None:
        self.read_into(name, 0, [target])

    def size(self, name: str) -> int:
        path = self._path(name)
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise storage_error(error, path, "look up the size") from error

    def list_unfinished(self) -> list[str]:
        return sorted({name for _, name in self._unfinished()})

    def discard_unfinished(self, names: Collection[str]) -> None:
        for path, name in self._unfinished() if names else ():
            if name in names:
                try:
                    unlink(path)
                except OSError as error:
                    raise storage_error(error, path, "delete") from error

    def stored_crc64(self, name: str) -> int | None:
        self.size(name)  # raises where there is no such file
        return None

    def list_dirs(self) -> list[str]:
        entries = self._scan()
        try:
            return sorted(entry.name for entry in entries if _may_be_directory(entry))
        except OSError as error:
            raise storage_error(error, self.url, "list the directory") from error

    def list(self, prefix: str = "") -> list[FileInfo]:
        found = []
        for entry in self._scan():
            if entry.name.startswith(prefix):
                try:
                    if entry.is_file():
                        found.append(FileInfo(entry.name, entry.stat().st_size))
                except FileNotFoundError:
                    continue  # deleted between the listing and the look: it is not there
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        continue  # links that lead to nothing, and none of ours
                    raise storage_error(error, entry.path, "look up") from error
        return sorted(found, key=lambda info: info.name)

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._forget(path)
        try:
            unlink(path)
        except NotADirectoryError:
            return  # the directory is a file, so `name` is missing below it
        except OSError as error:
            raise storage_error(error, path, "delete") from error

    def remove_directory(self) -> None:
        try:
            os.rmdir(self.url)
        except OSError as error:
            if error.errno not in _STAYS:
                raise storage_error(error, self.url, "remove the empty directory") from error

    def join(self, name: str) -> Storage:
        if name == ".." or name.startswith("../"):
            raise UsageError(
                f"{name!r} leads out of the directory", remedy="use join_url", path=self.url
            )
        return PosixStorage(join_url(self.url, name))

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _path(self, name: str) -> str:
        # Names come from manifests too, which anyone may have written: none leads elsewhere.
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise UsageError(
                f"{name!r} is no file name", remedy="pass a name without directory", path=self.url
            )
        return os.path.join(self.url, name)

    def _temporary(self, name: str) -> str:
        return self._path(f".{name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")

    def _unfinished(self) -> Sequence[tuple[str, str]]:
        """(path, name) of what is to bear a name later."""
        matches = ((entry.path, _TEMPORARY.fullmatch(entry.name)) for entry in self._scan())
        return [(path, match["name"]) for path, match in matches if match]

    def _scan(self) -> Sequence[os.DirEntry[str]]:
        try:
            with os.scandir(self.url) as entries:
                return [*entries]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, self.url, "list the directory") from error

    def _create(self, path: str) -> int:
        try:
            return os.open(path, _CREATE, 0o666)
        except FileNotFoundError:
            _make_directory(self.url)
            return os.open(path, _CREATE, 0o666)

    def _write_new(self, path: str, data: bytes) -> None:
        fd = self._create(path)
        try:
            try:
                write_all(fd, memoryview(data), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            unlink(path)
            raise

    def _descriptor(self, path: str) -> _Descriptor:
        with self._lock:
            found = self._open.get(path)
            if found is not None:
                self._open.move_to_end(path)
                return found
        opened = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        with self._lock:
            opened = self._open.setdefault(path, opened)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return opened

    def _forget(self, path: str) -> None:
        with self._lock:
            self._open.pop(path, None)


class _Descriptor:
    """A descriptor that closes with its last user: one may be evicted while a thread reads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _Reading:
    """Buffers being filled from `offset` on; what is left can go on with another descriptor."""

    def __init__(
        self,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None,
    ) -> None:
        self.offset = offset
        self._left = list(reversed(buffers))
        self._span = sum(buffer.nbytes for buffer in buffers)
        self._end = offset + self._span
        self._seen = seen
        # What is in the page cache is taken first, without a word to the disk.
        self._flags = _NOWAIT

    def run(self, file: _Descriptor) -> bool:
        """Read up to the end of the buffers, or of the file; whether it was that of the buffers.

        It holds the descriptor, not its number: that may be closed, or another file's, once
        evicted.
        """
        while self._left:
            if self._seen is not None and self._left[-1].nbytes > _STRETCH:
                buffer = self._left.pop()
                taken = self._in_stretches(file, buffer, self._seen)
                if taken < buffer.nbytes:
                    self._left.append(buffer[taken:])
                    return False
                continue
            batch = self._next(_STRETCH if self._seen is not None else self._span)
            count = self._read(file, batch)
            if count == 0:
                return False
            self._take(batch, count)
        return True

    def _in_stretches(
        self, file: _Descriptor, buffer: memoryview, seen: Callable[[memoryview], None]
    ) -> int:
        """Fill one buffer; how many bytes of it. What `_next` and `_take` do, without their cost:
        a load from the page cache spends its time here."""
        at, size = 0, buffer.nbytes
        try:
            while at < size:
                # None reaches over a block's end, so that a checksum takes each as a whole.
                stretch = buffer[at : at + _STRETCH - self.offset % _STRETCH]
                count = self._read(file, [stretch])
                if count == 0:
                    break
                at += count
                self.offset += count
                seen(stretch if count == stretch.nbytes else stretch[:count])
        except OSError:
            self._left.append(buffer[at:])  # another descriptor may go on
            raise
        return at

    def _read(self, file: _Descriptor, batch: Sequence[memoryview]) -> int:
        if self._flags:
            try:
                count = os.preadv(file.fd, batch, self.offset, self._flags)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                    raise
                count = 0
            if count:
                return count
            # Not cached, or the end of the file, or a file system that cannot say.
            self._flags = 0
            self._ask_ahead(file, self._end - self.offset)
        return os.preadv(file.fd, batch, self.offset)

    def _ask_ahead(self, file: _Descriptor, span: int) -> None:
        """For all of the rest at once, not in the kernel's read-ahead steps: cold reads as fast as
        direct ones."""
        if span >= _READ_AHEAD and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fd, self.offset, span, os.POSIX_FADV_WILLNEED)

    def _next(self, limit: int) -> list[memoryview]:
        """The next buffers, together at most `limit` bytes."""
        batch: list[memoryview] = []
        for buffer in self._left[: -_MAX_VECTOR - 1 : -1]:
            batch.append(buffer[:limit])
            limit -= batch[-1].nbytes
            if limit <= 0:
                break
        return batch

    def _take(self, batch: Sequence[memoryview], count: int) -> None:
        """`count` bytes of the batch are filled."""
        self.offset += count
        for buffer in batch:
            taken = min(count, buffer.nbytes)
            if not taken:
                return
            count -= taken
            if self._seen is not None:
                self._seen(buffer[:taken])
            if taken == self._left[-1].nbytes:
                self._left.pop()
            else:
                self._left[-1] = self._left[-1][taken:]


def _may_be_directory(entry: os.DirEntry[str]) -> bool:
    """One that cannot be looked at may be: who opens it hears why, and its neighbours are found.
    A link in a circle, or to where this user may not look, is none."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno != errno.ELOOP and not (
            error.errno == errno.EACCES and entry.is_symlink()
        )


def _make_directory(path: str) -> None:
    """Make `path` and its parents; each new name is durable in its parent."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise NotADirectoryError(errno.ENOTDIR, "a file", directory) from None
        sync_directory(os.path.dirname(directory))
