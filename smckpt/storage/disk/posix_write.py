"""New files of a file system: written in pieces, and small ones created exclusively."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from smckpt.errors import CheckpointError, StorageError
from smckpt.storage.base import DIRECT_UNIT, FileWriter
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.linux import fallocate, rename_exclusive
from smckpt.storage.faults import refuse_incomplete, refuse_outside, storage_error

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


GUARD_SUFFIX = ".guard"
_NO_LINK = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
_GUARD_WAIT = 5.0  # seconds; a holder needs one rename


def publish(directory: Directory, temporary: str, final: str) -> bool:
    """Move the durable file `temporary` to `final`, unless `final` exists. Both are names in a
    directory.

    Returns:
        True: `final` is now this file, and `temporary` may or may not remain. False: `final`
            existed before.

    Raises:
        StorageError: another process holds the guard, or died and left it.
        OSError: the file system refused.
    """
    linked = link_exclusive(directory, temporary, final)
    if linked is None:
        linked = rename_exclusive(directory.fd, temporary, final)
    return _rename_guarded(directory, temporary, final) if linked is None else linked


def link_exclusive(directory: Directory, temporary: str, final: str) -> bool | None:
    """True or False as `publish`; None if there are no hard links."""
    fd = directory.fd
    try:
        os.link(temporary, final, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost. Then the existing name is our own.
        mine, theirs = directory.status(temporary), directory.status(final)
        return mine is not None and theirs is not None and os.path.samestat(mine, theirs)
    except OSError as error:
        if error.errno in _NO_LINK:
            return None
        raise
    return True


def _rename_guarded(directory: Directory, temporary: str, final: str) -> bool:
    guard = f".{final}{GUARD_SUFFIX}"
    deadline = time.monotonic() + _GUARD_WAIT
    while directory.status(final) is None:
        try:
            os.close(directory.create(guard))
        except FileExistsError:
            if time.monotonic() > deadline:
                raise _stuck(directory, guard, final) from None
            time.sleep(0.02)  # such mounts have no event to wait for
            continue
        try:
            if directory.status(final) is not None:
                return False
            directory.rename(temporary, final)
        finally:
            directory.remove(guard)
        return True
    return False


def _stuck(directory: Directory, guard: str, final: str) -> StorageError:
    return StorageError(
        "another process is creating this file, or died while it created it (this mount has "
        "neither hard links nor exclusive renames, so a guard file replaces them)",
        remedy=f"if no other job writes here, delete {os.path.join(directory.path, guard)}",
        path=os.path.join(directory.path, final),
    )
