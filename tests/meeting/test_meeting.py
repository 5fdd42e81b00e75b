"""Rounds over a real c10d TCPStore (members are threads with a client each) and a process group."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from smckpt.engine.load_rounds import Rounds
from smckpt.errors import (
    CheckpointError,
    CheckpointReplacedError,
    JobStoreError,
    PeerError,
    StateError,
)
from smckpt.meeting import keys as keys_module
from smckpt.meeting.group import Group, Membership
from smckpt.meeting.keys import Clients, Keys, _sockets, client_of
from smckpt.meeting.round import Meeting, Message, Round, alone, over_group
from smckpt.meeting.store import OverStore, agree
from tests.support.launch import run_ranks
from tests.support.limits import seconds


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
        thread.join(seconds(60))
    return [results[m] for m in range(count)]


def join(member: int, client: Any, count: int = 3, timeout: float = 10) -> Meeting:
    timeout = seconds(timeout)
    return agree(client, "p", member=member, count=count, timeout=timeout, name=name)


def nothing() -> None:
    return None


def heard(brought: Callable[[], Any]) -> None:
    """Decides nothing, when all are there."""
    brought()


def failing(error: Exception) -> Callable[[], Any]:
    def bring() -> Any:
        raise error

    return bring


def test_members_agree_on_one_fresh_meeting(server: Any) -> None:
    meetings = together(server, 3, join, {})
    assert len({m.id for m in meetings}) == 1
    assert [m.member for m in meetings] == [0, 1, 2]


def test_a_stale_nonce_of_an_earlier_attempt_is_not_mistaken_for_a_member(server: Any) -> None:
    first = together(server, 3, join, {})
    # The same store, as torchrun keeps it; member 1 comes after the leader has read its old nonce.
    second = together(server, 3, join, {1: 0.8})
    assert len({m.id for m in second}) == 1
    assert second[0].id != first[0].id


def test_a_member_that_stays_away_is_named_on_every_rank(server: Any) -> None:
    def act(member: int, client: Any) -> Meeting | None:
        return None if member == 1 else join(member, client, timeout=1.5)

    results = together(server, 3, act, {2: 0.5})  # also who comes after the leader has looked
    for member in (0, 2):
        assert isinstance(results[member], PeerError)
        assert "rank 1 did not" in str(results[member])


def test_c10d_logs_no_wait_that_ran_out_while_a_member_is_late(server: Any, capfd: Any) -> None:
    together(server, 3, join, {2: 1.0})
    assert "timed out" not in capfd.readouterr().err


@dataclass(frozen=True)
class Part:
    rank: int
    names: tuple[str, ...]
    sizes: dict[int, int]
    beside: Part | None = None


def test_messages_are_dataclasses_on_both_ends_whoever_leads(server: Any) -> None:
    def act(member: int, client: Any) -> Part:
        def decide(brought: Callable[[], dict[int, Part]]) -> Part:
            parts = brought()
            return Part(9, tuple(n for m in sorted(parts) for n in parts[m].names), {}, parts[1])

        mine = Part(member, (f"a{member}", "b"), {member: 7})
        return join(member, client).round(
            "m", lambda: mine, decide, leader=2, timeout=seconds(10), brings=Part, gives=Part
        )

    names = ("a0", "b", "a1", "b", "a2", "b")
    wanted = Part(9, names, {}, Part(1, ("a1", "b"), {1: 7}))
    assert together(server, 3, act, {}) == [wanted] * 3


@pytest.mark.parametrize("other", [{"other": 1}, {**vars(Part(0, (), {})), "other": 1}])
def test_a_message_of_another_version_is_an_error_on_all(server: Any, other: Any) -> None:
    def act(member: int, client: Any) -> None:
        said = other if member == 1 else Part(0, (), {})
        join(member, client).round("m", lambda: said, heard, timeout=seconds(10), brings=Part)

    for error in together(server, 3, act, {}):
        assert isinstance(error, PeerError) and "rank 1" in str(error)
        assert "one version" in error.remedy


def test_rounds_leave_no_keys_in_the_store_also_for_who_comes_late_or_fails(server: Any) -> None:
    def act(member: int, client: Any) -> int:
        meeting = join(member, client)
        meeting.round("first", nothing, heard, timeout=seconds(10))
        before = server.num_keys()
        meeting.first("chosen", member)
        for turn in range(3):
            spent = ("chosen",) if turn == 0 else ()
            meeting.round(f"m/{turn}", nothing, heard, timeout=seconds(10), spent=spent)
        late = nothing if member else failing(StateError("disk is on fire"))
        with pytest.raises(StateError):  # the leader does not wait for the others then
            meeting.round("failed", late, heard, timeout=seconds(10))
        return int(before)

    before = together(server, 3, act, {2: 0.3})
    assert server.num_keys() <= min(before), server.list_keys()


class Asking:
    """A client of a store that counts its requests."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.requests += 1
            return ask(*arguments)

        return counted


def leader_of(server: Any, arrived: dict[int, Message], count: int) -> tuple[OverStore, Asking]:
    """Member 0, where these members' messages to the round "m" are in the store already."""
    client = Asking(dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30)))
    for member, message in arrived.items():
        OverStore(Keys(client, "p"), member, count, name).collect(Round("m", leader=0), message)
    client.requests = 0
    return OverStore(Keys(client, "p"), 0, count, name), client


def test_a_leader_reads_many_messages_with_few_requests(server: Any) -> None:
    count = 1000
    leader, client = leader_of(server, {m: Message(m, f"of {m}") for m in range(1, count)}, count)
    found = list(leader.collect(Round("m", timeout=seconds(10)), Message(0, "of 0")))
    assert {each.member: each.value for each in found} == {m: f"of {m}" for m in range(count)}
    assert client.requests < count / 5


def test_a_leader_of_many_takes_an_error_before_it_waits_for_the_silent(server: Any) -> None:
    arrived = {m: Message(m, m) for m in range(1, 150)}
    arrived[140] = Message(140, error=StateError("disk is on fire"))
    leader, _ = leader_of(server, arrived, 1000)
    taken = leader.collect(Round("m", timeout=seconds(1)), Message(0, 0))
    seen = [next(each for each in taken if each.error is not None or each.member == 149)]
    assert seen[0].member == 140
    with pytest.raises(PeerError, match="rank 150, rank 151"):
        list(taken)


def test_a_member_of_many_that_brings_two_messages_is_named(server: Any) -> None:
    leader, client = leader_of(server, {m: Message(m, m) for m in range(1, 100)}, 1000)
    OverStore(Keys(client, "p"), 7, 1000, name).collect(Round("m", leader=0), Message(7, 7))
    with pytest.raises(PeerError, match="rank 7 brought two messages"):
        list(leader.collect(Round("m", timeout=seconds(10)), Message(0, 0)))


def test_who_leaves_waits_for_a_member_that_was_late_and_came_later(server: Any) -> None:
    missed, left = threading.Event(), list[int]()

    def act(member: int, client: Any) -> None:
        meeting, patience = join(member, client, count=2), seconds(20)
        if member == 1:
            missed.wait(patience)
        with pytest.raises(PeerError, match="rank 1 did not answer in time"):
            meeting.round("m/0", nothing, heard, timeout=0.1 if member == 0 else patience)
        missed.set()
        meeting.round("m/1", nothing, heard, timeout=patience)
        if member == 1:
            threading.Event().wait(0.5)
            left.append(1)
        meeting.leave(patience)
        left.append(0)

    assert together(server, 2, act, {})[0] is None
    assert left[0] == 1


def test_one_members_error_reaches_all_without_waiting_for_a_silent_one(server: Any) -> None:
    own = StateError("disk is on fire", rank=2)

    def act(member: int, client: Any) -> Any:
        meeting = join(member, client)
        if member == 1:
            threading.Event().wait(2)  # never arrives at the round
            return None
        bring = failing(own) if member == 2 else nothing
        return meeting.round("m", bring, heard, timeout=seconds(30))

    began = time.monotonic()
    results = together(server, 3, act, {})
    assert time.monotonic() - began < seconds(20)
    assert results[2] is own  # with its own traceback
    assert isinstance(results[0], StateError)
    assert results[0].rank == 2
    assert "disk is on fire" in str(results[0])


def test_all_raise_one_error_also_who_failed_otherwise(server: Any) -> None:
    def act(member: int, client: Any) -> None:
        join(member, client).round(
            "m", failing(StateError(f"cause {member}")), heard, timeout=seconds(10)
        )

    results = together(server, 3, act, {})
    assert len({error.message for error in results}) == 1
    others = [error for error in results if error.__cause__ is not None]
    assert len(others) == 2
    assert {e.__cause__.message for e in others} | {results[0].message} == {
        "cause 0", "cause 1", "cause 2"
    }  # fmt: skip


def test_what_the_leader_raises_while_deciding_is_raised_by_all(server: Any) -> None:
    def act(member: int, client: Any) -> Any:
        def decide(_: Any) -> None:
            raise StateError("no", remedy="yes", path="/p")

        join(member, client).round("m", nothing, decide, timeout=seconds(10))

    results = together(server, 3, act, {})
    assert all(isinstance(r, StateError) and r.path == "/p" for r in results)


@pytest.mark.parametrize("away", [0, 1])
def test_a_member_that_makes_a_call_alone_hears_of_it_within_its_timeout(
    server: Any, away: int
) -> None:
    """The others may come to a round as late as its leader waits for them, and no later."""

    def act(member: int, client: Any) -> float:
        meeting = join(member, client, count=2)
        if member == away:
            return 0.0
        began = time.monotonic()
        with pytest.raises(PeerError, match=f"rank {away} did not answer in time"):
            meeting.round("alone", nothing, heard, timeout=1.5)
        return time.monotonic() - began

    assert max(together(server, 2, act, {})) < seconds(4)


def test_a_leader_that_has_come_is_given_time_to_decide(server: Any) -> None:
    def act(member: int, client: Any) -> Any:
        def decide(brought: Callable[[], Any]) -> str:
            brought()
            threading.Event().wait(4.0)
            return "decided"

        return join(member, client, count=2).round("slow", nothing, decide, timeout=1.5)

    assert together(server, 2, act, {}) == ["decided"] * 2


def test_an_interrupted_member_goes_at_once_and_the_others_hear_of_it(server: Any) -> None:
    def act(member: int, client: Any) -> str:
        bring = failing(KeyboardInterrupt("Ctrl-C")) if member == 1 else nothing  # type: ignore
        try:
            join(member, client).round("m", bring, heard, timeout=seconds(30))
        except KeyboardInterrupt:
            return "gone"
        return "never"

    began = time.monotonic()
    results = together(server, 3, act, {})
    assert time.monotonic() - began < seconds(20)
    assert results[1] == "gone"
    assert "KeyboardInterrupt" in str(results[0]) and "KeyboardInterrupt" in str(results[2])


def test_a_refused_round_fails_for_who_comes_to_it_later(server: Any) -> None:
    def act(member: int, client: Any) -> None:
        meeting = join(member, client)
        for point, refuses in (("led", 0), ("brought", 1)):
            if member == refuses:
                meeting.refuse(point, StateError(point))
            else:
                with pytest.raises(StateError, match=point):
                    meeting.round(point, nothing, heard, timeout=seconds(10))

    assert together(server, 3, act, {2: 0.3}) == [None] * 3


def test_leaders_of_several_meetings_meet_before_they_answer(server: Any) -> None:
    """Two meetings of two; the answer of both is made by the first's leader from all four."""

    def act(member: int, client: Any) -> int:
        group, place = divmod(member, 2)
        mine = agree(client, f"g{group}", member=place, count=2, timeout=seconds(20), name=name)

        def decide(brought: Callable[[], dict[int, int]]) -> int:
            step = agree(client, "s", member=group, count=2, timeout=seconds(20), name=name)
            ours = lambda: sum(brought().values())  # noqa: E731
            return step.round("m", ours, lambda sums: sum(sums().values()), timeout=seconds(20))

        return mine.round("m", lambda: 10**member, decide, timeout=seconds(20))

    assert together(server, 4, act, {}) == [1111] * 4


def test_write_once_gives_everyone_the_first_value(server: Any) -> None:
    values = together(server, 3, lambda m, client: join(m, client).first("choice", m), {})
    assert len(set(values)) == 1


def test_a_store_that_is_gone_is_no_silent_peer() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5))
    keys = Keys(client, "p")
    assert keys.wait("never", 0.01) is None
    del server
    with pytest.raises(JobStoreError, match="no longer answers") as raised:
        for _ in range(100):
            keys.set("k", 1)
            time.sleep(0.1)
    assert not isinstance(raised.value, TimeoutError)


def test_no_thread_waits_to_connect_to_a_store_that_is_gone() -> None:
    """torch tries again until the store's timeout, which is minutes."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30))
    store = dist.PrefixStore("outer", dist.PrefixStore("inner", client))
    client_of(store).set("k", "v")
    del server
    with pytest.raises(JobStoreError, match="refuses connections"):
        for _ in range(100):
            client_of(store)
            time.sleep(0.1)


def test_no_thread_goes_on_to_connect_when_the_store_goes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", servers[0].port, None, False, timedelta(seconds=20))
    look = keys_module._refuse_ended

    def last_look(store: Any) -> None:
        look(store)
        servers.clear()

    monkeypatch.setattr(keys_module, "_refuse_ended", last_look)
    monkeypatch.setattr(keys_module, "_LOOK_SECONDS", 0.1)
    with pytest.raises(JobStoreError, match="refuses connections"):
        client_of(client)


def test_a_connection_beside_another_is_tried_over_that_one() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30))
    unused = client_of(client)
    client_of(client, unused).set("k", "v")
    del server
    with pytest.raises(JobStoreError, match="no longer answers"):
        for _ in range(100):
            client_of(client, unused)
            time.sleep(0.1)


def test_a_spare_connection_that_was_cut_is_made_anew() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30))
    clients, before = Clients(store), _sockets()
    cut = clients.unused()
    for fd in _sockets() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as made:
            made.shutdown(socket.SHUT_RDWR)
    clients.own().set("k", "v")
    assert clients.unused() is not cut and clients.unused().get("k") == b"v"


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
            meeting = members[rank].meeting(90)
            meeting.round(f"{point}/{turn}", nothing, heard, timeout=seconds(90))

    def all_meetings(rank: int) -> None:
        meet(rank, "group")
        step = members[rank].of_step(((0,), (1,)), rank, 90)
        step.round("step", nothing, heard, timeout=seconds(90))

    first = [threading.Thread(target=all_meetings, args=(rank,)) for rank in (0, 1)]
    for thread in first:
        thread.start()
    for thread in first:
        thread.join(seconds(60))
    assert [store.clones for store in stores] == [2, 2]  # the thread's, and one to take leave

    keys = members[0].meeting(90).transport.keys
    waiting = threading.Thread(target=keys.wait, args=("released", 90))
    waiting.start()
    others = [threading.Thread(target=meet, args=(rank, "others")) for rank in (0, 1)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(seconds(60))
    assert not any(thread.is_alive() for thread in others)
    assert waiting.is_alive()
    members[1].meeting(90).transport.keys.set("released", {})
    waiting.join(seconds(60))
    assert [store.clones for store in stores] == [4, 4]
    left = [threading.Thread(target=member.leave, args=(90,)) for member in members]
    for thread in left:
        thread.start()
    for thread in left:
        thread.join(seconds(60))
    assert not any(thread.is_alive() for thread in left)


def test_a_lone_member_decides_by_itself() -> None:
    meeting = alone()
    assert meeting.round("m", lambda: 1, lambda brought: brought()[0] + 1) == 2
    own = ValueError("x")
    with pytest.raises(ValueError) as raised:
        meeting.round("m", failing(own), heard)
    assert raised.value is own


@pytest.mark.parametrize("swept", [(0,), (1,), (2,), (0, 3)])
def test_all_members_of_all_groups_load_again_or_none_does(
    server: Any, swept: tuple[int, ...]
) -> None:
    """Two groups of two: some see their files replaced, the others fail for causes of their own,
    or not at all."""

    def act(member: int, client: Any) -> None:
        group, place = divmod(member, 2)
        mine = agree(client, f"g{group}", member=place, count=2, timeout=seconds(20), name=name)
        step = None
        if place == 0:
            step = agree(client, "s", member=group, count=2, timeout=seconds(20), name=name)
        bring: Callable[[], None] = nothing
        if member in swept:
            bring = failing(CheckpointReplacedError("replaced"))
        elif member in (0, 1):
            bring = failing(StateError("another cause"))
        rounds = Rounds(mine, step, "load/0", "load/0", "call/0", name, 20)
        rounds.hold("read", bring, lambda _: None)

    raised = together(server, 4, act, {})
    assert all(isinstance(error, CheckpointError) for error in raised)
    assert len({isinstance(error, CheckpointReplacedError) for error in raised}) == 1


def over_a_process_group() -> dict[str, Any]:
    rank, told = dist.get_rank(), {}
    meeting = over_group()
    told["sum"] = meeting.round(
        "m", lambda: {rank}, lambda sets: sorted(set().union(*sets().values()))
    )
    part = over_group(dist.new_group([1, 2]))
    if rank:
        told["part"] = part.round("m", lambda: rank, lambda ranks: list(ranks().values()))
    for who, bring, decide in (
        ("one", failing(StateError("mine")) if rank == 1 else nothing, heard),
        ("decides", nothing, lambda _: failing(MemoryError("first"))()),
    ):
        try:
            meeting.round(who, bring, decide)
        except Exception as error:
            told[who] = f"{type(error).__name__} {error}"
    return told


def test_rounds_over_a_process_group_are_the_same(tmp_path: Any) -> None:
    ranks = run_ranks(over_a_process_group, 3)
    for rank, told in enumerate(ranks):
        assert told["sum"] == [0, 1, 2]
        assert told.get("part") == (None if rank == 0 else [1, 2])
        assert "StateError" in told["one"] and "rank 1" in told["one"]
        assert "first" in told["decides"]
        assert (told["decides"] == "MemoryError first") == (rank == 0)
