"""Messages between a trainer and its worker: length-prefixed JSON over a socket pair.

Descriptors are sent beside a message (SCM_RIGHTS). Each side also notices the other's death, so
neither waits for a dead process.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from smckpt.meeting.messages import to_text

__all__ = ["Channel", "PeerGone"]

_LENGTH = struct.Struct(">Q")
_MAX_MESSAGE = 1 << 32  # bytes; a part's objects can be large, but not larger than this


class PeerGone(Exception):
    """The other side closed its end, or died."""


class Channel:
    """One end of the pair. One thread at a time sends and receives.

    Args:
        end: the socket; the channel closes it.
        peer: a pidfd of the other process; None if the system has no pidfds. It is not closed here.
    """

    def __init__(self, end: socket.socket, peer: int | None = None) -> None:
        self._end = end
        self._peer = peer
        end.setblocking(False)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(
        self, message: dict[str, Any], fds: Sequence[int] = (), *, deadline: float | None = None
    ) -> None:
        """Send a message.

        Args:
            message: JSON data, which may contain dataclasses.
            fds: at most one descriptor. The other side gets a copy of it.
            deadline: in `time.monotonic()`; None: wait as long as the other side lives.

        Raises:
            PeerGone: the other side has ended.
            TimeoutError: the deadline passed.
        """
        body = to_text(message).encode()
        data = memoryview(_LENGTH.pack(len(body)) + body)
        while data.nbytes:
            self._wait(select.POLLOUT, deadline)
            try:
                sent = socket.send_fds(self._end, [data], fds) if fds else self._end.send(data)
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerGone(str(error)) from error
            fds = ()  # they were sent with the first byte
            data = data[sent:]

    def receive(self, *, deadline: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """Receive the next message and its descriptors. The caller closes them.

        Raises:
            PeerGone: the other side has ended.
            TimeoutError: the deadline passed.
        """
        fds: list[int] = []
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline, fds))
        if length > _MAX_MESSAGE:
            raise PeerGone(f"a message of {length} bytes is not from smckpt")
        message = json.loads(self._exactly(length, deadline, fds))
        return message, fds

    def close(self) -> None:
        self._end.close()

    def _exactly(self, count: int, deadline: float | None, fds: list[int]) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view.nbytes:
            self._wait(select.POLLIN, deadline)
            try:
                got, received, _, _ = socket.recv_fds(self._end, min(view.nbytes, 1 << 20), 1)
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerGone(str(error)) from error
            fds += received
            if not got:
                raise PeerGone("end of the connection")
            view[: len(got)] = got
            view = view[len(got) :]
        return data

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self._end, event)
        if self._peer is not None:
            poll.register(self._peer, select.POLLIN)
        limit = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
        ready = dict(poll.poll(limit))
        # Messages that the other side sent before it died come first.
        if ready.get(self._end.fileno(), 0):
            return
        if ready:
            raise PeerGone("the process ended")
        raise TimeoutError
