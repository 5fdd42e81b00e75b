"""Cutting connections whose bodies take too long: one thread for all of a process.

A thread for each body would cost as much as the request that it guards.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

__all__ = ["NAME", "Deadlines", "deadlines"]

NAME = "smckpt-s3-deadlines"  # of the thread


class Deadlines:
    """Sockets, each with the time at which it is cut. Thread-safe. The thread starts with the
    first of them, sleeps while there is none, and does not hold up the process's end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[object, tuple[float, socket.socket]] = {}
        self._wakes = math.inf  # when the thread looks again by itself
        self._thread: threading.Thread | None = None

    @contextmanager
    def cut(self, sock: socket.socket | None, ends: float) -> Iterator[None]:
        """Cut `sock` if the block has not ended by the time `ends` of the monotonic clock. After
        the block it is never cut: someone else may have it by then."""
        if sock is None:
            yield
            return
        mark = object()
        self._add(mark, ends, sock)
        try:
            yield
        finally:
            with self._changed:
                self._running.pop(mark, None)  # no need to wake the thread for that

    def _add(self, mark: object, ends: float, sock: socket.socket) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name=NAME, daemon=True)
                thread.start()
                self._thread = thread
            self._running[mark] = (ends, sock)
            if ends < self._wakes:
                self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for mark, (ends, sock) in tuple(self._running.items()):
                    if ends <= now:
                        del self._running[mark]
                        _shut(sock)
                left = (ends for ends, _ in self._running.values())
                self._wakes = min(left, default=math.inf)
                pause = min(self._wakes - now, threading.TIMEOUT_MAX)
                self._changed.wait(pause if self._running else None)


def deadlines() -> Deadlines:
    """Those of this process: threads do not survive a fork."""
    return _deadlines(os.getpid())


@lru_cache(maxsize=1)
def _deadlines(pid: int) -> Deadlines:
    return Deadlines()


def _shut(sock: socket.socket) -> None:
    """End what waits for its bytes. Not by the method of TLS sockets, which forgets the session
    that another thread is reading from."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
