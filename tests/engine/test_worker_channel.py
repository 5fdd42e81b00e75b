"""A conversation ends when the other side does, not when its descriptors happen to be closed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from smckpt.engine.background.commands import Channel, PeerGone
from tests.support.limits import seconds


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def test_a_dead_peer_is_noticed_while_somebody_else_holds_its_end(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with subprocess.Popen(["sleep", "60"]) as peer:
        pidfd = os.pidfd_open(peer.pid)
        channel = Channel(pair[0], pidfd)
        Channel(pair[1]).send({"last": "words"})
        peer.send_signal(signal.SIGKILL)
        peer.wait()
        assert channel.receive(deadline=time.monotonic() + seconds(10)) == ({"last": "words"}, [])
        began = time.monotonic()
        with pytest.raises(PeerGone, match="process ended"):
            channel.receive(deadline=began + 60)
        assert time.monotonic() - began < seconds(20)
        os.close(pidfd)


def test_a_deadline_ends_sending_and_receiving(pair: tuple[socket.socket, socket.socket]) -> None:
    channel = Channel(pair[0])
    with pytest.raises(TimeoutError):
        channel.receive(deadline=time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        channel.send({"big": "x" * (10 << 20)}, deadline=time.monotonic() + 0.05)


def test_a_message_cut_short_and_one_that_is_none_of_ours_end_the_conversation(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[1].sendall(b"\xff" * 8)
    with pytest.raises(PeerGone, match="not from smckpt"):
        Channel(pair[0]).receive()
    pair[1].sendall((100).to_bytes(8, "big") + b'{"half":')
    pair[1].close()
    with pytest.raises(PeerGone, match="end of the connection"):
        Channel(pair[0]).receive()


def test_a_descriptor_arrives_with_its_message(pair: tuple[socket.socket, socket.socket]) -> None:
    read, write = os.pipe()
    Channel(pair[0]).send({"n": 1}, [read])
    message, (fd,) = Channel(pair[1]).receive(deadline=time.monotonic() + seconds(5))
    os.write(write, b"through")
    assert message == {"n": 1} and os.read(fd, 10) == b"through"
    for each in (read, write, fd):
        os.close(each)
