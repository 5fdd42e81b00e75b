"""The commands that a trainer sends to its worker, and the answers.

A command names a function of `smckpt.checkpoint.commits.commit`, or one of the worker itself. Its
fields are the function's arguments.

Messages between a trainer and its worker: length-prefixed JSON over a socket pair.

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
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from smckpt.checkpoint.records.format import GroupManifest
from smckpt.meeting.keys import to_text

A = TypeVar("A")


class Command(Generic[A]):
    """function: the name in the message. answer: the type of the worker's answer, an `A`."""

    function: ClassVar[str]
    answer: ClassVar[Any] = None


@dataclass(frozen=True)
class Attach(Command[None]):
    """Map an arena of `size` bytes under the number `id`. Its descriptor comes with the message."""

    function = "attach"
    id: int
    size: int


@dataclass(frozen=True)
class Detach(Command[None]):
    """Unmap an arena."""

    function = "detach"
    id: int


@dataclass(frozen=True)
class Exit(Command[None]):
    """End the worker. There is no answer."""

    function = "exit"


@dataclass(frozen=True)
class ArenaFile:
    """Where the bytes of a file are in the arena."""

    arena_offset: int
    size: int


@dataclass(frozen=True)
class Watched:
    """Bytes [start, stop) of file number `file`, whose checksum the trainer wants. dtype: that of
    the elements whose NaN and infinite ones are counted; "" counts none."""

    file: int
    start: int
    stop: int
    dtype: str = ""


@dataclass(frozen=True)
class PartWritten:
    """part: the record's name. crc64: of the record, in hex. bytes: of the data files. checksums,
    nonfinite: of each `Watched`. retries: how many requests to the store were sent again; None if
    the store does not count."""

    part: str
    crc64: str
    bytes: int
    checksums: tuple[int, ...] = ()
    nonfinite: tuple[int, ...] = ()
    retries: int | None = None


@dataclass(frozen=True)
class WritePart(Command[PartWritten]):
    """attempt: of this save, which is in every file's name. files: where they are in the arena.
    part: the record without "files". watched: by file and place, without overlaps. arena: its
    number; None if there are no files."""

    function = "write_part"
    answer = PartWritten
    directory: str
    attempt: str
    rank: int
    arena: int | None
    files: tuple[ArenaFile, ...]
    part: dict[str, Any]
    watched: tuple[Watched, ...] = ()


@dataclass(frozen=True)
class Probed:
    """remark: for the user."""

    seen: bool
    remark: str | None = None


@dataclass(frozen=True)
class Probe(Command[Probed]):
    function = "probe"
    answer = Probed
    directory: str
    session: str
    create: bool
    leave: bool = True


@dataclass(frozen=True)
class LeaseTaken:
    """remark: for the user."""

    fencing_token: int
    remark: str | None = None


@dataclass(frozen=True)
class TakeLease(Command[LeaseTaken]):
    function = "take_lease"
    answer = LeaseTaken
    directory: str
    session: str
    host: str
    groups: tuple[str, ...]
    ranks: tuple[int, ...]
    since: int


@dataclass(frozen=True)
class Published:
    """bytes: of all data files."""

    manifest: str
    crc64: str
    bytes: int


@dataclass(frozen=True)
class PublishManifest(Command[Published]):
    function = "publish_manifest"
    answer = Published
    directory: str
    attempt: str
    fencing_token: int
    ranks: tuple[int, ...]
    parts: dict[str, dict[str, str]]
    record: str | None


@dataclass(frozen=True)
class PublishRecord(Command[str]):
    """The answer is the record's name."""

    function = "publish_record"
    answer = str
    directory: str
    session: str
    number: int
    fencing_token: int
    groups: tuple[GroupManifest, ...]


@dataclass(frozen=True)
class Sweep(Command[int]):
    """The answer is how many files were deleted."""

    function = "sweep"
    answer = int
    directory: str
    keep: tuple[str, ...]
    fencing_token: int
    record_directory: str | None = None
    keep_records: tuple[str, ...] = ()


def commands() -> dict[str, type[Command[Any]]]:
    """Every command that has an answer, by its function's name."""
    kinds: tuple[type[Command[Any]], ...] = (
        Attach, Detach, WritePart, Probe, TakeLease, PublishManifest, PublishRecord, Sweep,
    )  # fmt: skip
    return {kind.function: kind for kind in kinds}


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
