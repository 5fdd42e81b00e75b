"""Ranks that wait for a rank that has not come: who has ended, and what an earlier life left."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from smckpt.meeting.presence import Lives
from tests.support import warm
from tests.support.limits import seconds

ROOT = Path(__file__).resolve().parents[2]

RANK = """
import os, sys, time, torch.distributed as dist
from smckpt.errors import CheckpointError
from smckpt.meeting.group import Group, Membership
port, rank, late, timeout, ending = sys.argv[1:]
store = dist.TCPStore("127.0.0.1", int(port), None, False)
member = Membership(Group((0, 1), int(rank), 2, store), "p")
print("ready", flush=True)
time.sleep(float(late))
member.connect()
if ending == "over":
    member.post_end()
print("posted", flush=True)
if ending != "meets":
    sys.stdin.read()  # until it is killed
try:
    member.meeting(float(timeout))
    print("met", flush=True)
    member.leave(float(timeout))
except CheckpointError as error:
    print(error, flush=True)
"""


@pytest.fixture
def store() -> dist.TCPStore:
    """A store that outlives its ranks."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@contextmanager
def life(
    store: Any, rank: int, ending: str, *, late: float = 0, timeout: float = 20
) -> Iterator[warm.Piped]:
    """A rank's process that has imported everything."""
    arguments = map(str, (store.port, rank, late, seconds(timeout), ending))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RESTART_COUNT": "0"}
    child = warm.Piped([sys.executable, "-c", RANK, *arguments], env=environment)
    try:
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.wait(timeout=seconds(60))
        child.close()


def posted(child: warm.Piped) -> None:
    """Wait until it has posted its process."""
    assert child.stdout.readline() == "posted\n"


def kill(child: warm.Piped) -> None:
    posted(child)
    child.kill()
    child.wait(timeout=seconds(60))


def heard(child: warm.Piped) -> str:
    """What it prints after it has posted its process, until it ends."""
    posted(child)
    child.wait(timeout=seconds(100))
    return child.stdout.read()


@pytest.mark.parametrize("ending", ["killed", "over"])
def test_a_rank_that_starts_again_on_a_kept_store_is_not_gone(store: Any, ending: str) -> None:
    """torchrun counts no attempt when hosts come or go, and keeps its store."""
    for rank in (0, 1):
        with life(store, rank, ending) as earlier:
            kill(earlier)
    with life(store, 0, "meets") as first, life(store, 1, "meets", late=3) as second:
        assert [heard(first), heard(second)] == ["met\n"] * 2


def test_the_end_of_an_earlier_life_does_not_name_a_rank_that_never_comes(store: Any) -> None:
    with life(store, 1, "killed") as earlier:
        kill(earlier)
    with life(store, 0, "meets", timeout=2) as first:
        assert "rank 1 did not answer in time" in heard(first)


@pytest.mark.parametrize("ending", ["killed", "over"])
def test_an_end_before_the_other_rank_waits_is_named(store: Any, ending: str) -> None:
    with life(store, 0, "meets", late=3) as waits, life(store, 1, ending) as ends:
        kill(ends)
        assert "rank 1 " + ("is gone" if ending == "killed" else "has left") in heard(waits)


def test_a_rank_that_was_seen_alive_is_gone_although_it_began_long_before(store: Any) -> None:
    with life(store, 1, "killed") as ends:
        posted(ends)
        with life(store, 0, "meets") as waits:
            threading.Event().wait(3)  # it looks each second
            ends.kill()
            assert "rank 1 is gone" in heard(waits)


class Counted(dist.TCPStore):
    """A client that keeps what it has asked for, in its order."""

    def __init__(self, store: Any) -> None:
        super().__init__("127.0.0.1", store.port, None, False)
        self.asked: list[str] = []

    def check(self, keys: Any) -> bool:
        self.asked.append(f"check {keys[0]}")
        return super().check(keys)

    def get(self, key: str) -> bytes:
        self.asked.append(f"get {key}")
        return super().get(key)

    def multi_get(self, keys: Any) -> list[bytes]:
        self.asked.append(f"get {keys[0]}")
        return super().multi_get(keys)


def test_a_look_at_many_ranks_asks_the_store_seldom(store: Any) -> None:
    lives = Lives(client := Counted(store))
    for rank in range(640):
        lives.post(rank)
    assert lives.first_end(range(640)) is None
    assert len(client.asked) == 20
