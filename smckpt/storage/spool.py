"""A writer for stores that take only whole files. It gathers the file on this host and sends it at
the end.

The pieces go to a nameless file in the temporary directory (TMPDIR), so that little memory is
needed, or in memory, for a store that is faster than that. An aborted write has sent nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import BinaryIO

from smckpt.storage.base import FileWriter
from smckpt.storage.disk.posix_write import write_all
from smckpt.storage.faults import (
    guarded,
    owner_of,
    refuse_incomplete,
    refuse_outside,
    refuse_size,
    temporary_error,
)


class SpooledWriter(FileWriter):
    """One new file of `size` bytes.

    Args:
        path: the file's path, for errors.
        send: called once with the whole file, open for reading; publishes it under its name, or
            raises and publishes nothing.
        remove: called by `abort` after the file was sent.
        in_memory: gather it in memory.
    """

    def __init__(
        self,
        path: str,
        size: int,
        send: Callable[[BinaryIO], None],
        remove: Callable[[], None],
        *,
        in_memory: bool = False,
    ) -> None:
        refuse_size(size, path)
        self._path, self._size = path, size
        self._send = guarded(send, owner_of(send), "write", path)
        self._remove = guarded(remove, owner_of(remove), "abort", path)
        self._lock = threading.Lock()
        self._written = 0
        self._sent = False
        import tempfile  # imported late, so that `smckpt ls` answers sooner

        try:
            self._file: BinaryIO | None = (
                os.fdopen(os.memfd_create("smckpt"), "w+b")
                if in_memory
                else tempfile.TemporaryFile()  # noqa: SIM115
            )
        except OSError as error:
            raise self._unspooled(error) from error

    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        refuse_outside(offset, data.nbytes, self._size, self._path)
        file = self._file
        assert file is not None
        try:
            write_all(file.fileno(), data.cast("B") if data.format != "B" else data, offset)
        except OSError as error:
            raise self._unspooled(error) from error
        with self._lock:
            self._written += data.nbytes

    def finish(self) -> None:
        file = self._file
        refuse_incomplete(self._written, self._size, self._path)
        assert file is not None
        file.seek(0)
        self._send(file)
        self._sent = True
        self._close()

    def abort(self) -> None:
        self._close()
        if self._sent:
            self._sent = False
            self._remove()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _unspooled(self, error: OSError) -> Exception:
        return temporary_error(error, f"gather {self._path}")
