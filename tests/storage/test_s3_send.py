"""Bodies over plain HTTP: the pages go to the kernel as they are, where that is safe."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from smckpt.storage.budget import Share
from smckpt.storage.s3_client import Requests
from smckpt.storage.s3_config import S3Config
from smckpt.storage.s3_faults import BadBody
from smckpt.storage.s3_read import fill
from smckpt.storage.s3_send import _Pipe
from smckpt.storage.s3_write import Body

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="calls of Linux")

CHECKED = {"x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def connection_to(listening: socket.socket, timeout: float = 20) -> Any:
    """One of those that our boto3 client makes."""
    port = listening.getsockname()[1]
    config = S3Config(region="us-east-1", endpoint=f"http://127.0.0.1:{port}")
    session = Requests(config, "bucket", Share()).client._endpoint.http_session
    kind = session._pool_classes_by_scheme["http"].ConnectionCls
    return kind("127.0.0.1", port, timeout=timeout)


def put(connection: Any, data: memoryview, headers: dict[str, str]) -> None:
    connection.request("PUT", "/", Body(data, 60), {"Content-Length": str(len(data)), **headers})


def body_of(sock: socket.socket, size: int) -> bytes:
    with sock.makefile("rb") as stream:
        while stream.readline() != b"\r\n":
            pass
        return stream.read(size)


def open_pipes() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith("pipe:")}


@pytest.mark.parametrize(("checked", "shows"), [(True, b"later"), (False, b"first")])
def test_only_pages_whose_checksum_the_request_names_are_handed_over(
    listening: socket.socket, checked: bool, shows: bytes
) -> None:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 << 20)  # takes all, unread
    memory = bytearray(512 << 10)
    memory[:5] = b"first"
    connection = connection_to(listening)
    put(connection, memoryview(memory), CHECKED if checked else {})
    far, _ = listening.accept()
    memory[:5] = b"later"
    with far:
        assert body_of(far, len(memory))[:5] == shows
    connection.close()


def test_a_body_arrives_whole_whatever_its_address_and_however_slow_the_far_end(
    listening: socket.socket,
) -> None:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)  # always full
    data = memoryview(os.urandom((5 << 20) + 4321))[1:]
    found: list[bytes] = []

    def receive() -> None:
        far, _ = listening.accept()
        with far:
            found.append(body_of(far, len(data)))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    connection = connection_to(listening)
    put(connection, data, CHECKED)
    thread.join(60)
    assert found == [data]
    connection.close()


def test_a_far_end_that_stops_reading_is_given_up_and_leaves_no_descriptors(
    listening: socket.socket,
) -> None:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    connection = connection_to(listening, timeout=0.2)
    before = open_pipes()
    with pytest.raises(TimeoutError):
        put(connection, memoryview(bytes(16 << 20)), CHECKED)
    connection.close()
    assert open_pipes() <= before


def test_a_far_end_that_takes_a_mib_too_slowly_is_given_up_though_it_takes_some() -> None:
    here, there = socket.socketpair()
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.01):
            there.recv(8 << 10)

    with here, there, contextlib.closing(_Pipe()) as pipe:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        here.settimeout(0.3)
        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        with pytest.raises(TimeoutError):
            pipe.send(memoryview(bytes(1 << 20)), here)
        over.set()
        thread.join(10)


class Distant(socket.socket):
    """A connection whose far end is `away` microseconds away, as the kernel tells it."""

    away = 0

    def getsockopt(self, *args: Any) -> Any:
        found = super().getsockopt(*args)
        if args[:2] == (socket.IPPROTO_TCP, socket.TCP_INFO):
            assert 0 < struct.unpack_from("=I", found, 148)[0] < 10_000  # it is what we take it for
            found = found[:148] + struct.pack("=I", self.away)
        return found


@pytest.mark.parametrize(("away", "bounded"), [(30, True), (500, True), (501, False), (0, False)])
def test_little_is_on_its_way_to_a_near_far_end_and_as_much_as_the_system_says_to_a_distant_one(
    listening: socket.socket, away: int, bounded: bool
) -> None:
    connection = connection_to(listening)
    connection.connect()
    sock = connection.sock = Distant(fileno=connection.sock.detach())
    sock.settimeout(20)
    sock.away = away
    reading = threading.Thread(target=lambda: body_of(listening.accept()[0], 8 << 20), daemon=True)
    reading.start()
    put(connection, memoryview(bytes(8 << 20)), CHECKED)
    reading.join(20)
    assert not reading.is_alive()
    # The system doubles what is asked for, and lets a buffer that nobody bounds grow.
    assert (sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 768 << 10) == bounded
    connection.close()


def test_memory_that_cannot_be_read_is_told_as_such() -> None:
    here, there = socket.socketpair()
    hidden = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    with here, there, contextlib.closing(_Pipe()) as pipe, pytest.raises(OSError, match="address"):
        pipe.send(memoryview(hidden), here)


def test_an_answer_that_breaks_off_is_one_to_try_again_whatever_broke_it() -> None:
    class Reset:
        def read(self, size: int) -> bytes:
            raise ConnectionResetError("reset by peer")

        def close(self) -> None: ...

    with pytest.raises(BadBody, match="broke off: reset by peer"):
        fill(Reset(), [memoryview(bytearray(4))], 5, directly=False)
