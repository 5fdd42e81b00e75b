"""Bounded waits for the bodies of answers and for the providers of credentials.

A socket's timeout bounds only the wait for the next byte. To end a body that trickles, its
connection is cut. One thread does that for all bodies of a process, because a thread for each body
would cost as much as a small request.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar

from smckpt.storage.s3.faults import Unanswered

__all__ = ["NAME", "Deadlines", "deadlines", "in_time", "refresh_in_time"]

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
        while self._cut_late():
            time.sleep(_LOOK)

    def _cut_late(self) -> bool:
        """Cut the sockets that are late. Returns whether any were watched."""
        with self._lock:
            now = time.monotonic()
            for _, sock in (each for each in self._running.values() if each[0] <= now):
                with suppress(OSError):
                    # The method of TLS sockets would drop the session from which another thread
                    # reads.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
            self._watched = bool(self._running)
            return self._watched


def deadlines() -> Deadlines:
    """The deadlines of this process. Threads do not survive a fork."""
    return _deadlines(os.getpid())


@lru_cache(maxsize=1)
def _deadlines(pid: int) -> Deadlines:
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
