"""Whole files by s3transfer, which copies them and asks nothing of boto3 but its public methods.

It sends what replaces a file (it knows no `If-None-Match`, so it commits nothing) and fetches files
that are wanted whole. The classic manager, not the one over CRT: each call is made in the thread
that asks for it, so that its requests keep the pace and the tries of the action under way.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from smckpt.storage.s3_faults import BadBody

__all__ = ["Cursor", "MemoryFile", "TooLongError", "receive_file", "send_file"]

_WHOLE = 5 << 30  # bytes; S3 takes that much in one request
_STRETCH = 1 << 20
_MAKING = threading.Lock()


class TooLongError(Exception):
    """An object has more bytes than were asked for."""


class Cursor:
    """A place in memory, moved as in a file, and by reading copies from there."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As much as `buffer` holds, or is left."""
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


class MemoryFile(Cursor, io.RawIOBase):
    """A file over memory, of its length for good. Reads copy, and give no more than asked for."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(data)
        self.end = 0  # of what was written

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        after = self._at + len(piece)
        if after > len(self._data):
            raise TooLongError
        self._data[self._at : after] = piece
        self._at = after
        self.end = max(self.end, after)
        return len(piece)


class _Ended:
    """A subscriber to one transfer, of `size` bytes. Its work is done in the thread that asks for
    it; a result that is not there by then would be waited for without end."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._said = False

    def on_queued(self, future: Any, **_: Any) -> None:
        future.meta.provide_transfer_size(self._size)  # older ones ask the store for it

    def on_done(self, future: Any, **_: Any) -> None:
        self._said = True

    def result(self, future: Any) -> None:
        from s3transfer import exceptions

        if not self._said:
            raise BadBody("s3transfer did not come to an end")
        # It raises the client's errors as they are, but for those of an answer's body.
        older_lack = ("S3DownloadFailedError", "S3ValidationError")
        wrong = tuple(getattr(exceptions, n) for n in older_lack if hasattr(exceptions, n))
        try:
            future.result()
        except exceptions.RetriesExceededError as error:
            raise BadBody(f"the answer's body broke off: {error.last_exception}") from error
        except wrong as error:
            raise BadBody(str(error)) from error


def send_file(client: Any, fields: Mapping[str, Any], key: str, data: memoryview) -> None:
    """One PUT of all of `data`, whatever has the name.

    Args:
        fields: of the request, with its bucket and its checksum.

    Raises:
        BotoCoreError, ClientError: as the client's own.
    """
    more = dict(fields)
    bucket = more.pop("Bucket")
    ended = _Ended(len(data))
    ended.result(_manager(client).upload(MemoryFile(data), bucket, key, more, [ended]))


def receive_file(client: Any, fields: Mapping[str, Any], key: str, target: memoryview) -> int:
    """Fill `target` with an object. Returns how many bytes that has, which may be fewer.

    Raises:
        TooLongError: it has more.
        BadBody: the body broke off, or is not what was asked for.
        BotoCoreError, ClientError: as the client's own.
    """
    more = dict(fields)
    bucket = more.pop("Bucket")
    file = MemoryFile(target)
    ended = _Ended(len(target))
    ended.result(_manager(client).download(bucket, key, file, more, [ended]))
    return file.end


def _manager(client: Any) -> Any:
    with _MAKING:  # it puts its hooks into the client
        return _manager_of(client)


@lru_cache(maxsize=8)
def _manager_of(client: Any) -> Any:
    from s3transfer.futures import NonThreadedExecutor
    from s3transfer.manager import TransferConfig, TransferManager

    config = TransferConfig(
        multipart_threshold=_WHOLE + 1,
        multipart_chunksize=_WHOLE,
        num_download_attempts=1,  # `Requests` tries again, with pauses
        io_chunksize=_STRETCH,
    )
    return TransferManager(client, config, executor_cls=NonThreadedExecutor)
