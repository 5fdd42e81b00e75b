"""DCP's file system over smckpt's stores: s3://, msc:// and all others."""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.storage import Storage, open_storage


def is_url(location: Any) -> bool:
    return isinstance(location, (str, os.PathLike)) and "://" in os.fspath(location)


class UrlFileSystem(FileSystemBase):
    """A file is written beside, and appears when it is complete. An exception leaves nothing."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        location, name = self._file(path)
        if mode == "rb":
            yield io.BytesIO(location.read(name))
        elif mode == "wb":
            with tempfile.TemporaryFile() as written:
                yield _Open(written)
                written.flush()
                send_file(location, name, written.fileno())
        else:
            raise UsageError(f"mode={mode!r} is not honoured", remedy='pass "rb" or "wb"')

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        location, name = self._file(new_path)
        there, old = self._file(path)
        location.overwrite(name, there.read(old))
        there.delete(old)

    def init_path(self, path: Any) -> str:
        location: str = os.fspath(path)
        return location

    def mkdir(self, path: Any) -> None:
        """Stores make what a file needs."""

    def exists(self, path: Any) -> bool:
        location, name = self._file(path)
        try:
            location.size(name)
        except CheckpointNotFoundError:
            return False
        return True

    def rm_file(self, path: Any) -> None:
        location, name = self._file(path)
        location.delete(name)

    def _file(self, path: Any) -> tuple[Storage, str]:
        above, _, name = os.fspath(path).rpartition("/")
        return open_storage(above).with_links(), name

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return is_url(checkpoint_id)


class _Open(io.RawIOBase):
    """DCP closes its stream before it leaves the block; the file is sent after that."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        written: int = self._file.write(data)
        return written

    def tell(self) -> int:
        location: int = self._file.tell()
        return location

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation  # nothing to make durable here


def send_file(storage: Storage, name: str, fd: int) -> None:
    """Write a file of this host to a store, in place of one that has the name."""
    if not os.fstat(fd).st_size:  # it cannot be mapped
        storage.overwrite(name, b"")
        return
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
        storage.overwrite(name, data)
