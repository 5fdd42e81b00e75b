"""Sessions over a real c10d TCPStore; members are threads with a client each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from smckpt.engine.groups import Group, Partition
from smckpt.engine.membership import Membership
from smckpt.engine.session import Session, agree, lone_session
from smckpt.engine.stages import Guard, Step
from smckpt.errors import CheckpointError, CheckpointReplacedError, PeerError, StateError


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def name(member: int) -> str:
    return f"rank {member}"


def together(
    server: Any, count: int, act: Callable[[int, Any], Any], late: dict[int, float]
) -> Any:
    """Run `act(member, client)` on `count` threads; what each returned or raised."""
    results: dict[int, Any] = {}

    def run(member: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30))
        if member in late:
            threading.Event().wait(late[member])
        try:
            results[member] = act(member, client)
        except CheckpointError as error:
            results[member] = error

    threads = [threading.Thread(target=run, args=(m,)) for m in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[m] for m in range(count)]


def join(member: int, client: Any, count: int = 3, timeout: float = 10) -> Session:
    return agree(client, "p", member=member, count=count, timeout=timeout, name=name)


def test_members_agree_on_one_fresh_session_and_the_leader_knows_the_hosts(server: Any) -> None:
    sessions = together(server, 3, join, {})
    assert len({s.id for s in sessions}) == 1
    assert len(sessions[0].hosts) == 3
    assert [s.member for s in sessions] == [0, 1, 2]


def test_a_stale_nonce_of_an_earlier_attempt_is_not_mistaken_for_a_member(server: Any) -> None:
    first = together(server, 3, join, {})
    # The same store, as torchrun keeps it; member 1 comes after the leader has read its old nonce.
    second = together(server, 3, join, {1: 0.8})
    assert len({s.id for s in second}) == 1
    assert second[0].id != first[0].id


def test_a_member_that_stays_away_is_named_on_every_rank(server: Any) -> None:
    def act(member: int, client: Any) -> Session | None:
        return None if member == 1 else join(member, client, timeout=1.5)

    results = together(server, 3, act, {2: 0.5})  # also who comes after the leader has looked
    for member in (0, 2):
        assert isinstance(results[member], PeerError)
    assert "rank 1" in str(results[0])
    assert "rank 1" in str(results[2])


def test_a_meeting_gives_all_members_the_leaders_decision(server: Any) -> None:
    def act(member: int, client: Any) -> Any:
        def decide(bodies: dict[int, Any]) -> dict[str, Any]:
            return {"sum": sum(b["v"] for b in bodies.values())}

        return join(member, client).meet("m", {"v": member}, decide, timeout=10, name=name)

    assert together(server, 3, act, {}) == [{"sum": 3}] * 3


def test_meetings_leave_no_keys_in_the_store_also_for_who_comes_late_or_fails(server: Any) -> None:
    def act(member: int, client: Any) -> int:
        session = join(member, client)
        session.meet("first", {}, lambda _: {}, timeout=10, name=name)
        before = server.num_keys()
        assert session.channel is not None
        session.channel.put_once("chosen", {"member": member})
        for turn in range(3):
            spent = ("chosen",) if turn == 0 else ()
            session.meet(f"m/{turn}", {}, lambda _: {}, timeout=10, name=name, spent=spent)
        late = {} if member else {"error": StateError("disk is on fire").to_json()}
        with pytest.raises(StateError):  # the leader does not wait for the others then
            session.meet("failed", late, lambda _: {}, timeout=10, name=name)
        return int(before)

    before = together(server, 3, act, {2: 0.3})
    assert server.num_keys() <= min(before), server.list_keys()


def test_one_members_error_reaches_all_without_waiting_for_a_silent_one(server: Any) -> None:
    def act(member: int, client: Any) -> Any:
        session = join(member, client)
        body = {"error": StateError("disk is on fire", rank=2).to_json()} if member == 2 else {}
        if member == 1:
            session.channel.get("m/decision", 30)  # never arrives at the meeting
            return None
        return session.meet("m", body, lambda _: {}, timeout=30, name=name)

    began = time.monotonic()
    results = together(server, 3, act, {})
    assert time.monotonic() - began < 20
    for member in (0, 2):
        assert isinstance(results[member], StateError)
        assert results[member].rank == 2
        assert "disk is on fire" in str(results[member])


def test_what_the_leader_raises_while_deciding_is_raised_by_all(server: Any) -> None:
    def act(member: int, client: Any) -> Any:
        def decide(_: Any) -> dict[str, Any]:
            raise StateError("no", remedy="yes", path="/p")

        return join(member, client).meet("m", {}, decide, timeout=10, name=name)

    results = together(server, 3, act, {})
    assert all(isinstance(r, StateError) and r.path == "/p" for r in results)


def test_write_once_gives_everyone_the_first_value(server: Any) -> None:
    def act(member: int, client: Any) -> Any:
        session = join(member, client)
        return session.channel.put_once("choice", {"by": member})["by"]

    assert len(set(together(server, 3, act, {}))) == 1


class Counted(dist.TCPStore):
    """A client that counts the connections made from it."""

    clones = 0

    def clone(self) -> Any:
        self.clones += 1
        return super().clone()


def test_a_thread_keeps_its_connection_and_waits_on_nobody_elses(server: Any) -> None:
    stores = [Counted("127.0.0.1", server.port, None, False) for _ in range(2)]
    members = [Membership(Group((0, 1), rank, 2, store), "p") for rank, store in enumerate(stores)]

    def meet(rank: int, point: str) -> None:
        for turn in range(3):
            session = members[rank].session(90)
            session.meet(f"{point}/{turn}", {}, lambda _: {}, timeout=90, name=name)

    def all_meetings(rank: int) -> None:
        meet(rank, "group")
        step = members[rank].step_session(Partition(((0,), (1,)), rank), 90)
        step.meet("step", {}, lambda _: {}, timeout=90, name=name)

    first = [threading.Thread(target=all_meetings, args=(rank,)) for rank in (0, 1)]
    for thread in first:
        thread.start()
    for thread in first:
        thread.join(60)
    assert [store.clones for store in stores] == [2, 2]  # the thread's, and one to take leave

    channel = members[0].session(90).channel
    waiting = threading.Thread(target=channel.get, args=("released", 90))
    waiting.start()
    others = [threading.Thread(target=meet, args=(rank, "others")) for rank in (0, 1)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(60)
    assert not any(thread.is_alive() for thread in others)
    assert waiting.is_alive()
    members[1].session(90).channel.set("released", {})
    waiting.join(60)
    assert [store.clones for store in stores] == [4, 4]
    left = [threading.Thread(target=member.leave, args=(90,)) for member in members]
    for thread in left:
        thread.start()
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


def test_a_lone_member_decides_by_itself() -> None:
    session = lone_session()
    assert session.meet("m", {"v": 1}, lambda b: {"got": b[0]["v"]}, timeout=1, name=name) == {
        "got": 1
    }
    with pytest.raises(StateError):
        session.meet("m", {"error": StateError("x").to_json()}, lambda b: {}, timeout=1, name=name)


@pytest.mark.parametrize("swept", [(0,), (1,), (2,), (0, 3)])
def test_all_members_of_all_groups_load_again_or_none_does(
    server: Any, swept: tuple[int, ...]
) -> None:
    """Two groups of two: some see their files replaced, the others fail for causes of their own,
    or not at all."""

    def act(member: int, client: Any) -> None:
        group, place = divmod(member, 2)
        mine = agree(client, f"g{group}", member=place, count=2, timeout=20, name=name)
        step = None
        if place == 0:
            step = Step(agree(client, "s", member=group, count=2, timeout=20, name=name), "load/0")
        with Guard(mine, "load/0", 20, name, step).stage("read"):
            if member in swept:
                raise CheckpointReplacedError("replaced")
            if member in (0, 1):
                raise StateError("another cause")

    raised = together(server, 4, act, {})
    assert all(isinstance(error, CheckpointError) for error in raised)
    assert len({isinstance(error, CheckpointReplacedError) for error in raised}) == 1
