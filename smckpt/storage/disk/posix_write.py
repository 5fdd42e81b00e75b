"""One new file of a POSIX file system, written piecewise, with O_DIRECT if that works."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from smckpt.errors import CheckpointError, StorageError
from smckpt.storage.base import DIRECT_UNIT, FileWriter
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.linux import fallocate
from smckpt.storage.faults import refuse_incomplete, refuse_outside, storage_error

__all__ = ["PosixWriter", "write_all"]

_DIRECT = getattr(os, "O_DIRECT", 0)


class PosixWriter(FileWriter):
    """One new file.

    Args:
        directory: where it is; the writer closes it.
        begun: its name until it is finished. name: its name after that.
        fd: the new file.
        again: opens the directory once more.
        done: called when the file has its name.
    """

    def __init__(
        self,
        directory: Directory,
        begun: str,
        name: str,
        size: int,
        fd: int,
        again: Callable[[], Directory],
        done: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._begun = begun
        self._name = name
        self._path = os.path.join(directory.path, name)
        self._again = again
        self._done = done
        self._size = size
        self._lock = threading.Lock()
        self._written = 0
        self._fds = [fd]  # the buffered descriptor comes first: it takes odd ends and fsync
        self._direct: int | None = None
        try:
            fallocate(fd, size)
            self._direct = self._open_direct()
        except CheckpointError:
            self.abort()
            raise
        except FileNotFoundError as error:
            self.abort()
            raise self._taken_over() from error
        except OSError as error:
            self.abort()
            raise storage_error(error, self._path, f"reserve {size:,} bytes") from error

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT works here, as far as we know yet."""
        return self._direct is not None

    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        refuse_outside(offset, data.nbytes, self._size, self._path)
        try:
            done = self._write_direct(offset, data)
            write_all(self._fds[0], data[done:], offset + done)
        except OSError as error:
            raise storage_error(error, self._path, f"write at byte {offset}") from error
        with self._lock:
            self._written += data.nbytes

    def finish(self) -> None:
        refuse_incomplete(self._written, self._size, self._path)
        try:
            os.fsync(self._fds[0])
            self._close()
            if self._begun != self._name:
                self._directory.rename(self._begun, self._name)
                self._begun = self._name
                self._done()
            # a descriptor outlives its directory, and syncs what nobody can reach
            os.stat(self._name, dir_fd=self._directory.fd, follow_symlinks=False)
            self._directory.sync()
            self._directory.close()  # an export keeps its writers
        except FileNotFoundError as error:
            raise self._taken_over() from error
        except OSError as error:
            raise storage_error(error, self._path, "make the file durable") from error

    def abort(self) -> None:
        try:
            self._close()
            if self._directory.fd >= 0:
                self._directory.remove(self._begun)
            else:
                with self._again() as directory:
                    directory.remove(self._begun)
        except FileNotFoundError:
            return  # the directory is gone
        except OSError as error:
            raise storage_error(error, self._path, "remove the unfinished file") from error

    def _taken_over(self) -> StorageError:
        above = os.path.dirname(self._path)
        if not os.path.isdir(above):
            return StorageError(
                f"the directory was removed while {os.path.basename(self._path)} was written",
                remedy="see who deletes directories here, and save again",
                path=above,
            )
        return StorageError(
            "the file was removed before it was finished: another copy to this directory took over",
            remedy="run one copy to a directory at a time; the other copy goes on",
            path=self._path,
        )

    def _open_direct(self) -> int | None:
        if not _DIRECT or self._size < DIRECT_UNIT:
            return None
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | _DIRECT
        try:
            fd = os.open(self._begun, flags, dir_fd=self._directory.fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # tmpfs before 6.6, some FUSE
                return None
            if error.errno == errno.ELOOP:
                raise self._taken_over() from error
            raise
        self._fds.append(fd)
        if not os.path.samestat(os.fstat(fd), os.fstat(self._fds[0])):
            raise self._taken_over()
        return fd

    def _write_direct(self, offset: int, data: memoryview) -> int:
        """Write all whole blocks with O_DIRECT, or none. Returns the number of bytes written."""
        fd, whole = self._direct, data.nbytes - data.nbytes % DIRECT_UNIT
        if fd is None or not whole or offset % DIRECT_UNIT:
            return 0
        done = 0
        while done < whole:
            try:
                done += os.pwrite(fd, data[done:whole], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Memory or offset is not aligned as this device needs: write buffered from here on.
                self._direct = None
                break
        return done

    def _close(self) -> None:
        with self._lock:
            fds, self._fds, self._direct = self._fds, [], None
        first: OSError | None = None
        for fd in reversed(fds):
            try:
                os.close(fd)  # NFS reports a full disk when a file is closed
            except OSError as error:
                first = first or error
        if first is not None:
            raise first


def write_all(fd: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
