"""A directory of a POSIX file system: local disk, NFS, FSx for Lustre, FUSE.

Large files are written with O_DIRECT if the file system supports it. The bytes go from the arena to
the device without a copy through the page cache (on a virtual disk three to six times the rate of
buffered writes + fsync). Names are created exclusively. Files and directories are fsynced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from smckpt.errors import CheckpointError, CorruptCheckpointError, UsageError
from smckpt.storage.base import Access, FileInfo, Storage, refuse_size, too_short
from smckpt.storage.exclusive import publish
from smckpt.storage.faults import storage_error
from smckpt.storage.posix_write import PosixWriter, sync_directory, unlink, write_all
from smckpt.storage.urls import normal_url

__all__ = ["TEMPORARY_SUFFIX", "PosixStorage"]

TEMPORARY_SUFFIX = ".tmp"  # `.<name>.<random>.tmp` becomes `<name>` when it is whole
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp", re.A)
_OPEN_FILES = 64  # how many files stay open for reading
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_READ_AHEAD = 1 << 20  # bytes; for a read this large the kernel is asked to read ahead
_STRETCH = 256 << 10  # bytes; `seen` gets this much while it is in the processor's cache
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # not on macOS
_MAX_VECTOR = 1024  # IOV_MAX of Linux and macOS
# rmdir failed because the directory is not empty, is gone, is a mount point, or its rights forbid
# it.
_STAYS = (
    errno.ENOTEMPTY,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EBUSY,
    errno.EACCES,
    errno.EPERM,
)


class PosixStorage(Storage):
    """The directory `path`. Thread-safe.

    Args:
        folder: where the directory is, if `path` is a URL that does not say it.
    """

    is_file_system = True

    def __init__(
        self, path: str, access: Access | None = None, *, folder: str | None = None
    ) -> None:
        super().__init__(path, access)
        self._folder = self.url if folder is None else normal_url(folder)
        self._root = self._folder  # as the user named it; below it, others may have put links
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()

    def create_file(self, name: str, size: int, *, replace: bool = False) -> PosixWriter:
        refuse_size(size, self._folder)
        self.refuse_links()
        path = self._path(name)
        begun = self._temporary(name) if replace else path
        try:
            fd = self._create(begun)
        except OSError as error:
            raise storage_error(error, path, "create the file") from error
        return PosixWriter(begun, path, size, fd, partial(self._forget, path))

    def put(self, name: str, data: bytes) -> None:
        self.refuse_links()
        path = self._path(name)
        try:
            self._write_new(path, data)
            sync_directory(self._folder)
        except OSError as error:
            raise storage_error(error, path, "write") from error

    def put_exclusive(self, name: str, data: bytes) -> bool:
        self.refuse_links()
        path = self._path(name)
        temporary = self._temporary(name)
        try:
            if os.path.lexists(path):
                return False
            self._write_new(temporary, data)
            try:
                created = publish(temporary, path)
            finally:
                with contextlib.suppress(OSError):  # a later sweep removes the rest
                    unlink(temporary)
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error(error, path, "create exclusively") from error
        try:
            if created:
                sync_directory(self._folder)
        except OSError as error:
            action = "make the new name durable (it is visible, but a power failure may remove it)"
            raise storage_error(error, path, action) from error
        return created

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
                self._forget(path)  # NFS: the server restarted, and a new descriptor may work
                complete = reading.run(self._descriptor(path))
        except CheckpointError:
            raise  # from `seen`: some of our errors are OSErrors; none may be its own cause
        except OSError as error:
            raise storage_error(error, path, "read") from error
        if not complete:
            needed = offset + sum(b.nbytes for b in wanted)
            raise too_short(name, reading.offset, needed, path)

    def size(self, name: str) -> int:
        path = self._path(name)
        try:
            found = os.stat(path)
        except OSError as error:
            raise storage_error(error, path, "look up the size") from error
        if not stat.S_ISREG(found.st_mode):
            raise _no_file(path)
        return found.st_size

    def list_unfinished(self) -> list[str]:
        return sorted({name for _, name in self._unfinished()})

    def discard_unfinished(self, names: Collection[str]) -> None:
        for path, name in self._unfinished() if names else ():
            if name in names:
                self._delete(path)

    def list_dirs(self) -> list[str]:
        entries = self._scan()
        try:
            return sorted(entry.name for entry in entries if _may_be_directory(entry))
        except OSError as error:
            raise storage_error(error, self._folder, "list the directory") from error

    def list(self, prefix: str = "") -> list[FileInfo]:
        found = []
        for entry in self._scan():
            if entry.name.startswith(prefix):
                try:
                    if entry.is_file():
                        found.append(FileInfo(entry.name, entry.stat().st_size))
                except FileNotFoundError:
                    continue  # deleted after it was listed
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        continue  # a link that leads to nothing is not one of our files
                    raise storage_error(error, entry.path, "look up") from error
        return sorted(found, key=lambda info: info.name)

    def names(self, *prefixes: str, all_kinds: bool = False) -> Sequence[str]:
        named = [entry for entry in self._scan() if entry.name.startswith(prefixes or "")]
        return sorted(entry.name for entry in named if all_kinds or _is_file(entry))

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._forget(path)
        self._delete(path)

    def _delete(self, path: str) -> None:
        try:
            with self._directory() as fd:
                os.unlink(os.path.basename(path), dir_fd=fd)
        except (FileNotFoundError, NotADirectoryError):
            return  # it is missing, or its parent is a file
        except OSError as error:
            raise storage_error(error, path, "delete") from error

    def remove_directory(self) -> None:
        self.refuse_links()
        try:
            os.rmdir(self._folder)
        except OSError as error:
            if error.errno not in _STAYS:
                raise storage_error(error, self._folder, "remove the empty directory") from error

    def join(self, name: str) -> Storage:
        joined = super().join(name)
        if isinstance(joined, PosixStorage):
            joined._root = self._root
        return joined

    def refuse_links(self) -> None:
        if self._folder == self._root:
            return
        try:
            with self._directory():
                return
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing is there, so no link can lead elsewhere
        except OSError as error:
            raise storage_error(error, self._folder, "open the directory") from error

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        """A descriptor of this directory. No link may be between the root and it. Otherwise anybody
        who can write there could redirect our deletions to another place."""
        fd = os.open(self._root, _DIRECTORY)
        try:
            way = os.path.relpath(self._folder, self._root)
            for part in () if way == "." else way.split(os.sep):
                try:
                    deeper = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                except OSError:
                    if stat.S_ISLNK(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode):
                        raise UsageError(
                            f"{part!r} below {self._root} is a symbolic link; smckpt does not "
                            "write or delete where a link leads",
                            remedy="if you mean the directory behind the link, pass its real path",
                            path=self._folder,
                        ) from None
                    raise
                os.close(fd)
                fd = deeper
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _path(self, name: str) -> str:
        self.refuse_name(name)
        return os.path.join(self._folder, name)

    def _temporary(self, name: str) -> str:
        return self._path(f".{name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")

    def _unfinished(self) -> Sequence[tuple[str, str]]:
        """(path, name) of each temporary file and the name that it was to get."""
        matches = ((entry.path, _TEMPORARY.fullmatch(entry.name)) for entry in self._scan())
        return [(path, match["name"]) for path, match in matches if match]

    def _scan(self) -> Sequence[os.DirEntry[str]]:
        try:
            with os.scandir(self._folder) as entries:
                return [*entries]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(error, self._folder, "list the directory") from error

    def _create(self, path: str) -> int:
        try:
            return os.open(path, _CREATE, 0o666)
        except FileNotFoundError:
            _make_directory(self._folder)
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
        opened = _Descriptor(_open_file(path))
        with self._lock:
            opened = self._open.setdefault(path, opened)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return opened

    def _forget(self, path: str) -> None:
        with self._lock:
            self._open.pop(path, None)


def _open_file(path: str) -> int:
    """Open a regular file and refuse anything else: to open or read a pipe or a device may never
    end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a missing device
            raise _no_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_file(path)
    return fd


def _no_file(path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "a directory, pipe, socket or device has the name of a file",
        remedy="find out what made it; use an older checkpoint",
        path=path,
    )


class _Descriptor:
    """A descriptor that is closed after its last user, because it may be evicted while a thread
    reads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _Reading:
    """Buffers that are filled from `offset` on. Another descriptor can go on with the rest."""

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
        # First take the bytes in the page cache, without a request to the disk.
        self._flags = _NOWAIT

    def run(self, file: _Descriptor) -> bool:
        """Read up to the end of the buffers or of the file. Returns whether the buffers are full.

        It holds the descriptor object, not the number: after an eviction the number may be closed,
        or belong to another file.
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
        """Fill one buffer and return how many bytes were filled. It does the work of `_next` and
        `_take` more cheaply, because a load from the page cache spends its time here."""
        at, size = 0, buffer.nbytes
        try:
            while at < size:
                # No stretch crosses a block's end, so each goes whole into one checksum.
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
            # Not cached, or the end of the file, or the file system cannot tell.
            self._flags = 0
            self._ask_ahead(file, self._end - self.offset)
        return os.preadv(file.fd, batch, self.offset)

    def _ask_ahead(self, file: _Descriptor, span: int) -> None:
        """Ask the kernel for the whole rest at once, instead of its read-ahead steps. Cold reads
        are then as fast as direct reads."""
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
        """Note that `count` bytes of the batch are filled."""
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


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # links in a circle; entries that cannot be looked at
        return False


def _may_be_directory(entry: os.DirEntry[str]) -> bool:
    """Whether the entry may be a directory. An entry that cannot be looked at counts as one: the
    call that opens it raises the reason, and its neighbours are still found. A link that loops, or
    leads where this user has no rights, is not a directory."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno != errno.ELOOP and not (
            error.errno == errno.EACCES and entry.is_symlink()
        )


def _make_directory(path: str) -> None:
    """Make `path` and its parents. Each new name is durable in its parent."""
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
