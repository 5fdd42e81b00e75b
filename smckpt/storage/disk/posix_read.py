"""Reads of a file of a POSIX file system: from the page cache first, then with the disk asked for
the whole rest at once."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence

from smckpt.errors import CorruptCheckpointError
from smckpt.storage.disk.directory import Directory

_READ_AHEAD = 1 << 20  # bytes; for a read this large the kernel is asked to read ahead
# Bytes, a multiple of a block. With fewer, many threads wait for the interpreter, not for bytes;
# more leave the processor's cache before their checksum is taken.
STRETCH = 4 << 20
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # not on macOS
_MAX_VECTOR = 1024  # IOV_MAX of Linux and macOS


def open_file(path: str, directory: Directory | None = None, *, links: bool = False) -> int:
    """Open a regular file and refuse anything else: to open or read a pipe or a device may never
    end.

    Args:
        directory: the open directory that the file is in. Without it, links on the path to the file
            are followed.
        links: the file itself may be a link too.
    """
    try:
        if directory is None:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(path, flags if links else flags | os.O_NOFOLLOW)
        else:
            fd = directory.open_file(os.path.basename(path))
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a missing device
            raise not_a_file(path) from error
        if error.errno == errno.ELOOP and not links and os.path.islink(path):
            raise is_a_link(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise not_a_file(path)
    return fd


def is_a_link(path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "a symbolic link has the name of a file; it is not followed here",
        remedy="put the file itself there, or remove the link",
        path=path,
    )


def not_a_file(path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "a directory, pipe, socket or device has the name of a file",
        remedy="find out what made it; use an older checkpoint",
        path=path,
    )


class Descriptor:
    """A descriptor that is closed after its last user, because it may be evicted while a thread
    reads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Reading:
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

    def run(self, file: Descriptor) -> bool:
        """Read up to the end of the buffers or of the file. Returns whether the buffers are full.

        It holds the descriptor object, not the number: after an eviction the number may be closed,
        or belong to another file.
        """
        while self._left:
            if self._seen is not None and self._left[-1].nbytes > STRETCH:
                buffer = self._left.pop()
                taken = self._in_stretches(file, buffer, self._seen)
                if taken < buffer.nbytes:
                    self._left.append(buffer[taken:])
                    return False
                continue
            batch = self._next(STRETCH if self._seen is not None else self._span)
            count = self._read(file, batch)
            if count == 0:
                return False
            self._take(batch, count)
        return True

    def _in_stretches(
        self, file: Descriptor, buffer: memoryview, seen: Callable[[memoryview], None]
    ) -> int:
        """Fill one buffer and return how many bytes were filled. It does the work of `_next` and
        `_take` more cheaply, because a load from the page cache spends its time here."""
        at, size = 0, buffer.nbytes
        try:
            while at < size:
                # Stretches end at blocks, so that their checksums need no second look.
                stretch = buffer[at : at + STRETCH - self.offset % STRETCH]
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

    def _read(self, file: Descriptor, batch: Sequence[memoryview]) -> int:
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
            # Ask the kernel for the whole rest at once, instead of its read-ahead steps. Cold reads
            # are then as fast as direct reads.
            span = self._end - self.offset
            if span >= _READ_AHEAD and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fd, self.offset, span, os.POSIX_FADV_WILLNEED)
        return os.preadv(file.fd, batch, self.offset)

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
