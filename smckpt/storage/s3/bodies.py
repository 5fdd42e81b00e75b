"""Bodies of requests and answers, which move between the caller's memory and the connection."""

from __future__ import annotations

import io
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from smckpt.storage.s3.deadlines import deadlines
from smckpt.storage.s3.faults import BadBody

__all__ = ["Body", "Filling", "split"]

_SEND = 2 << 20  # bytes given to the socket at once; it must take them within its timeout
_STRETCH = 1 << 20  # bytes read from the answer at once; then `seen` gets them


class Body:
    """A request's body: a file over memory. `read` gives slices of that memory, longer than it was
    asked for. `readinto`, which signing uses, copies.

    seconds: how long the body may take after its first byte was asked for.
    """

    def __init__(self, data: memoryview, seconds: float) -> None:
        self._data = data
        self._at = 0
        self._seconds = seconds
        self._ends: float | None = None

    def __len__(self) -> int:
        return len(self._data)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> memoryview | bytes:
        if self._ends is None:
            self._ends = time.monotonic() + self._seconds
        if time.monotonic() > self._ends:
            raise BadBody(f"the body was not sent within {self._seconds:g} s")
        # Clients ask for a few KiB at a time. A longer slice reaches `sendall` in one call.
        piece = self._data[self._at : self._at + max(_SEND, size or 0)]
        self._at += len(piece)
        return piece if len(piece) else b""

    def readinto(self, buffer: Any) -> int:
        """Copy as much as fits `buffer`, or as is left."""
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def split(
    buffers: Sequence[memoryview], offset: int, limit: int
) -> list[tuple[int, list[memoryview]]]:
    """Split into requests (offset, buffers) of at most `limit` bytes each, which together fill
    `buffers`."""
    out: list[tuple[int, list[memoryview]]] = []
    room = 0
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            if room == 0:
                out.append((offset, []))
                room = limit
            piece = buffer[at : at + room]
            out[-1][1].append(piece)
            at, offset, room = at + len(piece), offset + len(piece), room - len(piece)
    return out


class Filling:
    """Memory that the bodies of answers fill. If a body breaks off, the next one goes on from
    `done`, so no whole stretch is asked for twice. `seen` gets each stretch while it is in the
    processor's cache.

    seconds: how long all bodies together may take, without the pauses between them. After that the
        current body is given up. A socket's timeout alone does not end a body that trickles.
    """

    def __init__(
        self,
        buffers: Sequence[memoryview],
        seconds: float,
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._ahead = deque(
            buffer[at : at + _STRETCH]
            for buffer in buffers
            for at in range(0, len(buffer), _STRETCH)
        )
        self._seen = seen
        self._seconds = seconds
        self._spent = self._ends = 0.0
        self.done = 0

    def take(self, body: Any) -> None:
        """Fill the rest of the memory with the whole body of the answer (botocore's).

        Raises:
            BadBody: the body ended early, broke off or trickled. The connection is dropped.
        """
        try:
            with self._in_time(body):
                while self._ahead:
                    self._take(body, self._ahead[0])
                    self._ahead.popleft()
                # To the end: botocore checks it, and the connection can be reused.
                _read(body, None)
        except BaseException:
            body.close()
            raise

    def _take(self, body: Any, stretch: memoryview) -> None:
        if time.monotonic() >= self._ends:
            raise BadBody("the time limit for the answer's body is over")
        data = _read(body, len(stretch))
        if len(data) < len(stretch):
            raise BadBody("the answer's body ended early")
        stretch[:] = data
        self.done += len(data)
        if self._seen is not None:
            self._seen(stretch)

    @contextmanager
    def _in_time(self, body: Any) -> Iterator[None]:
        """Cut the connection when the time is over. If the socket cannot be found, `_take` checks
        the clock between stretches."""
        began = time.monotonic()
        self._ends = began + self._seconds - self._spent
        try:
            with deadlines().cut(_socket_of(body), self._ends):
                yield
        except BadBody as error:
            if time.monotonic() < self._ends:
                raise
            late = f"the answer's body did not arrive within {self._seconds:g} s"
            raise BadBody(late) from error
        finally:
            self._spent += time.monotonic() - began


def _read(body: Any, count: int | None) -> bytes:
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    try:
        data: bytes = body.read(count)
    except (BotoCoreError, HTTPError, OSError, ValueError, AttributeError) as error:
        raise BadBody(f"the answer's body broke off: {error}") from error
    return data


def _socket_of(body: Any) -> socket.socket | None:
    """The socket that a body comes from, found as botocore's set_socket_timeout finds it."""
    found = body
    for name in ("_raw_stream", "_fp", "fp", "raw", "_sock"):
        found = getattr(found, name, None)
    return found if isinstance(found, socket.socket) else None
