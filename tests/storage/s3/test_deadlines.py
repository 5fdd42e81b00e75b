"""Bodies that take too long: their connections are cut, by one thread, and no others are."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from smckpt.storage.s3.bodies import NAME, Deadlines
from tests.support.limits import seconds

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made = [socket.socketpair() for _ in range(5)]
    for end in (end for pair in made for end in pair):
        end.settimeout(seconds(30))
    yield made
    for end in (end for pair in made for end in pair):
        end.close()


def is_cut(pair: Pair) -> bool:
    """Whether the first end was; else a byte comes through."""
    pair[1].send(b"x")
    return pair[0].recv(1) == b""


def test_each_connection_is_cut_at_its_own_time_by_the_same_thread(pairs: list[Pair]) -> None:
    deadlines, before = Deadlines(), set(threading.enumerate())
    now = time.monotonic()
    with ExitStack() as bodies:
        for (sock, _), late in zip(pairs, (math.inf, 600, 0.4, 0.1), strict=False):
            bodies.enter_context(deadlines.cut(sock, now + late))
        assert pairs[3][0].recv(1) == b""  # the last to come is the first to be cut
        assert time.monotonic() - now >= 0.1
        assert pairs[2][0].recv(1) == b""
        assert time.monotonic() - now >= 0.4
        # The thread sleeps for ten minutes now: who comes with less wakes it.
        bodies.enter_context(deadlines.cut(pairs[4][0], time.monotonic() + 0.1))
        assert pairs[4][0].recv(1) == b""
        assert not is_cut(pairs[0]) and not is_cut(pairs[1])
        assert [thread.name for thread in set(threading.enumerate()) - before] == [NAME]


def test_a_connection_whose_body_has_come_is_left_to_who_has_it_next(pairs: list[Pair]) -> None:
    deadlines = Deadlines()
    early, late = pairs[0][0], pairs[1][0]
    soon = time.monotonic() + seconds(2)
    with deadlines.cut(early, soon):
        pass
    with deadlines.cut(late, soon + 0.1):
        assert late.recv(1) == b""
    assert not is_cut(pairs[0])


def test_without_a_connection_at_hand_nothing_is_watched() -> None:
    deadlines, before = Deadlines(), set(threading.enumerate())
    with deadlines.cut(None, 0):
        assert set(threading.enumerate()) <= before


class WithSession(socket.socket):
    """As `ssl.SSLSocket`, whose own method drops the session."""

    session = True

    def shutdown(self, how: int) -> None:
        self.session = False
        super().shutdown(how)


def test_a_tls_socket_that_is_cut_keeps_its_session() -> None:
    """Without it, a thread that reads would take the bytes on the wire for the body."""
    one, other = socket.socketpair()
    other.settimeout(seconds(30))
    with other, WithSession(fileno=one.detach()) as cut:
        with Deadlines().cut(cut, time.monotonic()):
            assert other.recv(1) == b""
        assert cut.session
