"""Bodies of requests and answers, which move between the caller's memory and the connection.

Waits for them, and for the providers of credentials, are bounded. A socket's timeout bounds only
the wait for the next byte. To end a body that trickles, its connection is cut. One thread does that
for all bodies of a process, because a thread for each body would cost as much as a small request.
"""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar

from smckpt.storage.s3.faults import BadBody, Unanswered

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
        found = body  # goes to its socket as botocore's set_socket_timeout does
        for name in ("_raw_stream", "_fp", "fp", "raw", "_sock"):
            found = getattr(found, name, None)
        sock = found if isinstance(found, socket.socket) else None
        try:
            with _deadlines(os.getpid()).cut(sock, self._ends):
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


Result = TypeVar("Result")

NAME = "smckpt-s3-deadlines"  # the thread's name
_LOOK = 0.25  # seconds between two looks at the clock


class Deadlines:
    """Sockets, each with the time at which it is cut, a little later at most. Thread-safe. There is
    a thread while there are sockets. It does not delay the end of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, tuple[float, socket.socket]] = {}
        self._watched = False

    @contextmanager
    def cut(self, sock: socket.socket | None, ends: float) -> Iterator[None]:
        """Cut `sock` if the block has not ended by the time `ends` of the monotonic clock. After
        the block the socket is never cut, because another request may use it."""
        if sock is None:
            yield
            return
        mark = object()
        with self._lock:
            self._running[mark] = (ends, sock)
            if not self._watched:
                threading.Thread(target=self._watch, name=NAME, daemon=True).start()
                self._watched = True
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(mark, None)

    def _watch(self) -> None:
        """Cut the sockets that are late, while there are any."""
        while True:
            with self._lock:
                now = time.monotonic()
                for _, sock in (each for each in self._running.values() if each[0] <= now):
                    with suppress(OSError):
                        # The method of TLS sockets would drop the session from which another thread
                        # reads.
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)
                self._watched = bool(self._running)
                if not self._watched:
                    return
            time.sleep(_LOOK)


@lru_cache(maxsize=1)
def _deadlines(pid: int) -> Deadlines:
    """The deadlines of this process. Threads do not survive a fork."""
    return Deadlines()


def in_time(call: Callable[[], Result], seconds: float, allowed: float | None = None) -> Result:
    """Call `call()` in a thread of its own. If it takes longer than `seconds`, the thread is left
    behind.

    Args:
        allowed: the seconds that the error names; None: `seconds`.

    Raises:
        Unanswered: the call has not ended after `seconds`.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="smckpt-s3-credentials", daemon=True)
    thread.start()
    thread.join(max(seconds, 0))
    if errors:
        raise errors[0]
    if not results:
        raise Unanswered(seconds if allowed is None else allowed)
    return results[0]


def refresh_in_time(client: Any, seconds: float) -> None:
    """Make a client renew credentials that are due before it signs with them, within `seconds`.
    botocore alone would wait without limit for the program that provides them."""

    def refresh(request_signer: Any, **_: Any) -> None:
        credentials = getattr(request_signer, "_credentials", None)
        due = getattr(credentials, "refresh_needed", None)  # fixed credentials lack the method
        if callable(due) and due():
            in_time(credentials.get_frozen_credentials, seconds)  # type: ignore[union-attr]

    client.meta.events.register("before-sign.s3", refresh, unique_id="smckpt-credentials")
