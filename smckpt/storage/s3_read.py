"""Ranged reads from the socket into the caller's memory."""

from __future__ import annotations

import io
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from smckpt.storage.s3_deadlines import deadlines
from smckpt.storage.s3_faults import BadBody

__all__ = ["Filling", "fill", "reads_below", "split"]

_STRETCH = 1 << 20  # bytes read from the socket at once, and looked at before the next


def split(
    buffers: Sequence[memoryview], offset: int, limit: int
) -> list[tuple[int, list[memoryview]]]:
    """Requests (offset, buffers) of at most `limit` bytes each, which together fill `buffers`."""
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
    """Memory that an answer's body fills. Where one breaks off, the next goes on from `done`: no
    byte is asked for twice, and `seen` may look at each stretch while it is in the cache.

    seconds: that bodies may take together, pauses between them aside; then the one under way is
        given up: one that trickles never leaves a socket without a byte for as long as its timeout.
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
        self._inside = 0  # bytes of the first of them that are filled
        self._seen = seen
        self._seconds = seconds
        self._spent = self._ends = 0.0
        self.done = 0

    def take(self, body: Any, *, directly: bool = True) -> None:
        """The answer's body, all of it, into the memory that is left.

        Args:
            directly: from below the body, where that is as we know it.

        Raises:
            BadBody: it ended early, broke off or trickled; the connection is dropped.
        """
        raw = _plain(body) if directly else None
        reader = _Copying(body) if raw is None else raw._fp
        try:
            with self._in_time(raw):
                self._take(reader)
            if raw is None:
                try:
                    body.read()  # meets the end, where botocore looks at checksums
                except _breaks() as error:
                    raise _broke_off(error) from error
        except BaseException:
            body.close()
            raise
        if raw is not None:
            raw.release_conn()

    @contextmanager
    def _in_time(self, raw: Any) -> Iterator[None]:
        """Cut the connection when the time is over; where it is not at hand, `_take` looks at the
        clock between stretches."""
        began = time.monotonic()
        self._ends = began + self._seconds - self._spent
        try:
            with deadlines().cut(_socket_of(raw), self._ends):
                yield
        except BadBody:
            self._refuse_late()
            raise
        finally:
            self._spent += time.monotonic() - began

    def _refuse_late(self) -> None:
        if time.monotonic() >= self._ends:
            raise BadBody(f"the answer's body had not come after {self._seconds:g} s")

    def _take(self, reader: Any) -> None:
        # Between two stretches as little is done as can be: the caches are full of data, so that
        # what is done there costs several times what it costs elsewhere.
        readinto, seen, ahead, broken = reader.readinto, self._seen, self._ahead, _breaks()
        while ahead:
            if time.monotonic() >= self._ends:
                self._refuse_late()
            stretch = ahead[0]
            try:
                count = readinto(stretch[self._inside :] if self._inside else stretch)
            except broken as error:
                raise _broke_off(error) from error
            if not count:
                raise BadBody("the answer's body ended early")
            self.done += count
            self._inside += count
            if self._inside < len(stretch):
                continue
            ahead.popleft()
            self._inside = 0
            if seen is not None:
                seen(stretch)


class _Copying:
    """A body by its `read` alone: before 1.39 botocore's had no `readinto`."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def readinto(self, target: memoryview) -> int:
        data = self._body.read(len(target))
        target[: len(data)] = data
        return len(data)


@lru_cache(maxsize=1)
def _breaks() -> tuple[type[Exception], ...]:
    """What reading a body raises where the answer or the connection breaks off."""
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    return BotoCoreError, HTTPError, OSError, ValueError, AttributeError


def _broke_off(error: Exception) -> BadBody:
    return BadBody(f"the answer's body broke off: {error}")


def fill(
    body: Any, buffers: Sequence[memoryview], seconds: float, *, directly: bool = True
) -> None:
    """The answer's body, all of it, into `buffers`; as `Filling.take`."""
    Filling(buffers, seconds).take(body, directly=directly)


def reads_below() -> bool:
    """Whether an ordinary body of this botocore is read from below."""
    from botocore.response import StreamingBody
    from urllib3 import HTTPResponse

    response = HTTPResponse(_Ordinary(), preload_content=False)
    return _plain(StreamingBody(response, 0)) is not None


class _Ordinary(io.BytesIO):
    """What http.client gives, of no bytes."""

    chunked = False


def _socket_of(raw: Any) -> socket.socket | None:
    """The socket that a body comes from, by the way that botocore's set_socket_timeout goes."""
    below = getattr(getattr(raw, "_fp", None), "fp", None)
    sock = getattr(getattr(below, "raw", None), "_sock", None)
    return sock if isinstance(sock, socket.socket) else None


def _plain(body: Any) -> Any:
    """The HTTP response below the body, if its bytes come as they are and it reads into memory.

    urllib3 gives a copy of what it read; the response below it reads from the socket to where the
    bytes belong. What lies below is private: anything unexpected falls back to the public way.
    """
    raw = getattr(body, "_raw_stream", None)
    below = getattr(raw, "_fp", None)
    headers = getattr(raw, "headers", {})
    plain = (
        callable(getattr(below, "readinto", None))
        and callable(getattr(raw, "release_conn", None))
        and not getattr(below, "chunked", True)
        and "content-encoding" not in {key.lower() for key in headers}
        and getattr(raw, "_fp_bytes_read", 0) == 0
    )
    return raw if plain else None
