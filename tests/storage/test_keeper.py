"""Files in a keeper's memory: the store's contract, its budget, its secret and its copies."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MemoryBudgetError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage, open_storage
from smckpt.storage.memory import keeper as keeper_module
from smckpt.storage.memory import store as memory_store
from smckpt.storage.memory import wire
from smckpt.storage.memory.keeper import Keeper, listening
from smckpt.storage.memory.store import asked_locally
from smckpt.storage.memory.wire import Peer, call, is_known, local_name, receive, send
from smckpt.storage.urls import parent_url
from tests.support.limits import seconds


class Running:
    """A keeper in a thread of this process."""

    def __init__(self, job: str, budget: int = 1 << 26, address: str = "127.0.0.1") -> None:
        self.job, self.keeper = job, Keeper(budget, address)
        local = listening(job)
        assert local is not None
        self.local = local
        end, self._end = os.pipe()
        self._ends = end
        self.thread = threading.Thread(target=self.keeper.serve, args=(local, [end]))
        self.thread.start()

    @property
    def peer(self) -> Peer:
        return Peer(self.job, *self.keeper.address, self.keeper.secret)

    def stop(self) -> None:
        os.write(self._end, b"e")
        self.thread.join(seconds(20))
        self.local.close()
        os.close(self._end)
        os.close(self._ends)


@pytest.fixture
def job(tmp_path: Path) -> str:
    return f"t{os.getpid()}{tmp_path.name}".replace("_", "").replace("[", "").replace("]", "")


@pytest.fixture
def running(job: str) -> Iterator[Running]:
    made = Running(job)
    yield made
    made.stop()


@pytest.fixture
def store(running: Running) -> Storage:
    return open_storage(f"keeper://{running.job}/run/1")


def test_a_file_is_there_when_it_is_finished(store: Storage) -> None:
    writer = store.create_file("data", 10)
    writer.write_at(5, memoryview(b"world"))
    assert store.list() == []
    writer.write_at(0, memoryview(b"hello"))
    writer.finish()
    assert [(one.name, one.size) for one in store.list()] == [("data", 10)]
    assert (store.read("data"), store.size("data")) == (b"helloworld", 10)
    assert (store.read("data", 5, 3), store.names("d"), store.names("x")) == (b"wor", ["data"], [])
    with pytest.raises(StorageError, match="exists"):
        writer = store.create_file("data", 0)
        writer.finish()
    store.overwrite("data", b"other")
    assert store.read("data") == b"other"
    with pytest.raises(CorruptCheckpointError):
        store.read("data", 3, 3)
    store.delete("data")
    with pytest.raises(CheckpointNotFoundError):
        store.read("data")


def test_what_is_given_up_leaves_nothing(running: Running, store: Storage) -> None:
    writer = store.create_file("data", 1000)
    writer.write_at(0, memoryview(bytes(10)))
    with pytest.raises(UsageError):
        writer.write_at(999, memoryview(bytes(10)))
    with pytest.raises(Exception, match="10 of 1,?000"):
        writer.finish()
    writer.abort()
    done = store.create_file("data", 0)
    done.finish()
    done.abort()
    assert store.list() == []


def test_directories_are_those_of_their_files(store: Storage) -> None:
    store.join("part0").put("a", b"1")
    above = store.at(parent_url(store.url))
    above.join("2").put("b", b"")
    assert (list(above.list_dirs()), list(store.list_dirs())) == (["1", "2"], ["part0"])
    assert list(above.at(parent_url(above.url)).list_dirs()) == ["run"]
    store.join("part0").delete("a")
    assert list(above.list_dirs()) == ["2"]


def test_of_all_that_create_a_name_one_succeeds(store: Storage) -> None:
    made: list[bool] = []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait(seconds(20))
        made.append(store.put_exclusive("lease", str(number).encode()))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.count(True) == 1


def test_the_budget_is_held_and_given_back(running: Running, store: Storage) -> None:
    big = store.create_file("big", (1 << 26) - 10)
    with pytest.raises(MemoryBudgetError, match="keeper of"):
        store.create_file("more", 100)
    big.abort()
    with pytest.raises(MemoryBudgetError, match="more do not fit"):
        store.create_file("huge", 1 << 40)
    for _ in range(100):
        store.overwrite("name", bytes(1 << 20))
    assert asked_locally(running.job, {"do": "hello"})["held"] == 2 << 20  # and for the next


def test_a_step_is_saved_loaded_and_verified_there_as_anywhere(running: Running) -> None:
    at = f"keeper://{running.job}/run/4"
    smckpt.save({"w": torch.arange(1000.0), "n": 4}, checkpoint_id=at, step=4)
    into: dict[str, Any] = {"w": torch.zeros(1000), "n": 0}
    smckpt.load(into, checkpoint_id=at)
    assert torch.equal(into["w"], torch.arange(1000.0)) and into["n"] == 4
    assert verify_checkpoint(at).ok
    newest = smckpt.latest_checkpoint(f"keeper://{running.job}/run")
    assert newest is not None and newest.step == 4
    smckpt.remove(at)
    assert smckpt.find_checkpoints(f"keeper://{running.job}/run") == []
    assert asked_locally(running.job, {"do": "hello"})["held"] == 0


def test_without_a_keeper_the_error_names_the_job_and_the_host(job: str) -> None:
    with pytest.raises(StorageError, match=f"keeper of job {job} on {socket.gethostname()}"):
        open_storage(f"keeper://{job}/run").list()


def test_who_does_not_know_the_secret_is_answered_nothing(running: Running, store: Storage) -> None:
    store.put("a", b"1")
    forged = Peer("x", *running.keeper.address, "f" * 64)
    with pytest.raises(ConnectionError), call(forged):
        raise AssertionError
    with socket.create_connection(running.keeper.address, 5) as raw:
        raw.settimeout(seconds(5))
        assert set(receive(raw)) == {"challenge"}
        send(raw, {"do": "list", "directory": "run/1"})
        assert raw.recv(1) == b""


@pytest.mark.parametrize("asks", [True, False], ids=["who asks", "who answers"])
def test_neither_side_waits_before_it_sends_what_is_small(asks: bool) -> None:
    """A header would hold the bytes behind it up until the other side's receipt, 40 ms later."""
    secret, answered = "a" * 64, []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            made, _ = door.accept()
            with made:
                assert is_known(made, secret)
                answered.append(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        thread = threading.Thread(target=answer)
        thread.start()
        with call(Peer("x", *door.getsockname(), secret)) as made:
            asked = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        thread.join(seconds(20))
    assert ([asked] if asks else answered) == [1]


def test_a_server_that_does_not_know_the_secret_is_not_believed(running: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            made, _ = listener.accept()
            with made:
                send(made, {"challenge": "0" * 32})
                receive(made)
                send(made, {"proof": "0" * 64})

        thread = threading.Thread(target=answer)
        thread.start()
        pretender = Peer("x", *listener.getsockname(), running.keeper.secret)
        with pytest.raises(ConnectionError, match="no keeper of this job"), call(pretender):
            raise AssertionError
        thread.join()


@pytest.mark.parametrize(
    "request_", [{"do": "hello"}, {"do": "create", "size": 1}, {"do": "peers"}, {"do": 7}, {}]
)
def test_other_hosts_may_not_ask_for_what_is_this_hosts(
    running: Running, request_: dict[str, Any]
) -> None:
    with call(running.peer) as to:
        send(to, request_)
        assert receive(to)["error"][0] == errno.EINVAL


@pytest.mark.parametrize(
    "request_",
    [b'{"do": "finish"}', b'{"do": "join", "peers": [], "replicas": 1}', b"[" * 100_000,
     b'{"do": "create", "size": Infinity}', b'{"do": "silent", "peer": 1e999}',
     b'{"do": "join", "peers": 3}', b'{"do": {}}', b'{"do": 1' + b"0" * 5000 + b"}"],
    ids=lambda request_: request_[:30].decode(),
)  # fmt: skip
def test_what_is_no_request_costs_its_own_connection_alone(
    running: Running, store: Storage, request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the keeper's thread, and the memory of a file under way was taken for ever."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
        to.settimeout(seconds(20))
        to.connect(local_name(running.job))
        send(to, {"do": "create", "size": 1000})
        os.close(socket.recv_fds(to, 1, 1)[1][0])
        for text in (request_, b'{"do": "hello"}'):
            with contextlib.suppress(OSError):
                to.sendall(len(text).to_bytes(4, "big") + text)
                receive(to)
    until = time.monotonic() + seconds(20)
    while running.keeper._held and time.monotonic() < until:
        store.list()
    assert not running.keeper._held and not raised


@pytest.mark.skipif(os.getuid() != 0, reason="takes the rights of root")
def test_the_socket_of_another_user_is_no_keeper(job: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as theirs:
        os.seteuid(65534)
        try:
            theirs.bind(local_name(job))
            theirs.listen(1)
        finally:
            os.seteuid(0)
        with pytest.raises(StorageError, match="another user listens"):
            open_storage(f"keeper://{job}/run").list()


def joined(running: Sequence[Running], *others: Peer) -> None:
    """Let keepers know of each other; each file gets one copy."""
    peers = [*(one.peer for one in running), *others]
    for one in running:
        known = [each.to_json() for each in peers]
        asked_locally(one.job, {"do": "join", "peers": known, "replicas": 1})


@pytest.fixture
def three(job: str) -> Iterator[list[Running]]:
    made = [Running(f"{job}{letter}") for letter in "abc"]
    joined(made)
    yield made
    for one in made:
        one.stop()


def test_the_same_keepers_decide_who_creates_a_name_whoever_asks(job: str) -> None:
    """Of six, two hosts would have three of five each, if each asked five of its own."""
    made = [Running(f"{job}{letter}") for letter in "abcdef"]
    joined(made)
    for one in made:
        assert open_storage(f"keeper://{one.job}/run/1").put_exclusive(one.job, b"1")
    holders = [held(one) for one in made]
    for one in made:
        one.stop()
    assert holders == [6, 6, 6, 6, 6, 0]


def in_domains(running: Sequence[Running], *domains: str) -> None:
    peers = [
        replace(one.peer, domain=domain).to_json()
        for one, domain in zip(running, domains, strict=True)
    ]
    for one in running:
        asked_locally(one.job, {"do": "join", "peers": peers, "replicas": 1})


def write(store: Storage, name: str, data: bytes) -> None:
    writer = store.create_file(name, len(data))
    writer.write_at(0, memoryview(data))
    writer.finish()


def held(running: Running) -> int:
    return int(asked_locally(running.job, {"do": "hello"})["held"])


def test_a_file_whose_copy_went_with_its_host_is_copied_again(three: list[Running]) -> None:
    first, _, third = three
    store = open_storage(f"keeper://{first.job}/run/1")
    write(store, "data", bytes(1000))
    assert [held(one) for one in three] == [1000, 1000, 0]
    joined([first, third])  # the second host is gone
    asked_locally(first.job, {"do": "heal"})
    asked_locally(third.job, {"do": "heal"})
    until = time.monotonic() + seconds(20)
    while held(third) != 1000:
        assert time.monotonic() < until
        time.sleep(0.01)
    joined([third])
    assert open_storage(f"keeper://{third.job}/run/1").read("data") == bytes(1000)


def test_copies_go_to_another_domain_first(three: list[Running]) -> None:
    first, second, third = three
    store = open_storage(f"keeper://{first.job}/run/1")
    in_domains(three, "rack1", "rack1", "rack2")
    write(store, "data", bytes(1000))
    assert [held(one) for one in three] == [1000, 0, 1000]
    joined([first])
    store.delete("data")
    write(store, "other", bytes(10))  # without a copy
    in_domains([first, second, third], "rack1", "rack1", "rack2")
    asked_locally(first.job, {"do": "heal"})
    until = time.monotonic() + seconds(20)
    while held(third) != 1010:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert held(second) == 0
    in_domains([first, second], "rack1", "rack1")  # there is no other one
    write(store, "third", bytes(1))
    assert held(second) == 1


def test_ranks_that_ask_together_have_a_file_copied_once(
    three: list[Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, third = three
    write(open_storage(f"keeper://{first.job}/run/1"), "data", bytes(1000))
    joined([first, third])
    asked, copies, copied = threading.Event(), [], threading.Event()

    def copy(peer: Peer, *rest: Any) -> None:
        copies.append(peer)
        assert asked.wait(seconds(20))
        copied.set()

    monkeypatch.setattr(keeper_module, "_copy", copy)
    for _ in range(8):
        asked_locally(first.job, {"do": "heal"})
    others = [one for one in threading.enumerate() if "_heal" in one.name]
    asked.set()
    assert copied.wait(seconds(20))
    for one in others:
        one.join(seconds(20))
    assert copies == [third.peer]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Peer | str]:
    """The connections that stores make, by keeper."""
    made = list[Peer | str]()

    def counted(to: Peer | str) -> socket.socket:
        made.append(to)
        return call(to)

    monkeypatch.setattr(memory_store, "call", counted)
    return made


def test_requests_share_a_connection_to_each_keeper(
    three: list[Running], calls: list[Peer | str]
) -> None:
    first, second, _ = three
    write(open_storage(f"keeper://{second.job}/run/1"), "data", bytes(range(256)) * 64)
    joined([first, second])
    calls.clear()
    above = open_storage(f"keeper://{first.job}/run")
    for at in range(20):
        store = above.join("1")
        assert (store.read("data", at, 5), store.names()) == (bytes(range(at, at + 5)), ["data"])
    # the one of this host is asked while the other one is
    assert calls.count(second.peer) == 1 and calls.count(local_name(first.job)) <= 2
    for _, idle in store._calls._idle[second.peer]:  # type: ignore[attr-defined]
        idle.shutdown(socket.SHUT_RD)  # as when the keeper has closed it
    assert store.read("data", 7, 2) == bytes((7, 8))
    assert calls.count(second.peer) == 2
    store.close()


def test_a_load_from_this_hosts_keeper_takes_few_connections(
    running: Running, calls: list[Peer | str]
) -> None:
    at = f"keeper://{running.job}/run/4"
    smckpt.save({"w": torch.arange(1000.0)}, checkpoint_id=at, step=4)
    calls.clear()
    smckpt.load({"w": torch.zeros(1000)}, checkpoint_id=at)
    assert len(calls) <= 4


def test_a_keeper_that_hangs_costs_one_wait(
    three: list[Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "ANSWER", 0.5)
    first, _, third = three
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # it never answers
        joined([first], Peer("hangs", *hangs.getsockname(), "0" * 64), third.peer)
        store = open_storage(f"keeper://{first.job}/run/1")
        for number in range(5):
            write(store, f"f{number}", bytes(10))
            assert len(store.list()) == number + 1
        assert held(third) == 50
        calls = 0
        hangs.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                hangs.accept()[0].close()
                calls += 1
        assert calls == 1


@contextlib.contextmanager
def link(peer: Peer, ends_after: int) -> Iterator[Peer]:
    """A keeper behind a link that breaks off in the middle of an answer of so many bytes."""

    def carry(source: socket.socket, to: socket.socket, most: float) -> None:
        with contextlib.suppress(OSError):
            while most > 0 and (data := source.recv(1 << 16)):
                to.sendall(data)
                most -= len(data)
            for end in (source, to):
                end.shutdown(socket.SHUT_RDWR)

    def serve(door: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                made = door.accept()[0]
                behind = socket.create_connection((peer.address, peer.port))
                for ends in ((made, behind, math.inf), (behind, made, ends_after)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=serve, args=(door,))
        thread.start()
        yield replace(peer, port=door.getsockname()[1])
        door.shutdown(socket.SHUT_RDWR)
        thread.join(seconds(20))


def test_a_load_goes_on_from_another_copy_where_a_keeper_breaks_off(three: list[Running]) -> None:
    first, second, third = three
    at = f"keeper://{first.job}/run/4"
    saved = torch.rand(5 << 18)  # 5 MiB
    smckpt.save({"w": saved}, checkpoint_id=at, step=4)
    assert held(second) > 5 << 20 > held(third)
    with link(first.peer, 5 << 19) as breaks:
        joined([third], breaks, second.peer)
        loaded = {"w": torch.zeros(5 << 18)}
        smckpt.load(loaded, checkpoint_id=at.replace(first.job, third.job))
    assert loaded["w"].equal(saved)


def test_no_descriptor_is_left_open_by_reads(running: Running, store: Storage) -> None:
    for number in range(50):
        store.put(f"f{number}", b"1")
    before = len(os.listdir("/proc/self/fd"))
    kept = [store.read(f"f{number}") for number in range(50)]
    assert kept == [b"1"] * 50
    assert (
        len(os.listdir("/proc/self/fd")) <= before + 2
    )  # a thread of the keeper may be at its end


def written(store: Storage, name: str, data: bytes) -> int:
    """Write a file; the number of the memory that holds it."""
    file = store.create_file(name, len(data))
    assert isinstance(file, memory_store._KeptWriter)
    number = os.fstat(file._fd).st_ino
    file.write_at(0, memoryview(data))
    file.finish()
    return number


def test_a_file_takes_the_memory_of_one_that_was_deleted(running: Running, store: Storage) -> None:
    one, two, three = (bytes([n]) * (2 << 20) for n in range(3))
    first = written(store, "1", one)
    written(store, "2", two)
    assert (store.size("1"), held(running)) == (2 << 20, 4 << 20)
    store.delete("1")
    assert held(running) == 4 << 20  # as much stays as files of this size are left
    assert written(store, "3", three) == first
    assert (store.read("2"), store.read("3"), held(running)) == (two, three, 4 << 20)
    with pytest.raises(CheckpointNotFoundError):
        store.read("1")
    store.delete_many(["2", "3"])
    assert held(running) == 0


def test_memory_of_a_deleted_file_is_freed_where_a_file_of_another_size_needs_it(
    running: Running, store: Storage
) -> None:
    for name in "12":
        written(store, name, bytes(20 << 20))
    store.delete("1")
    written(store, "3", bytes(30 << 20))
    assert held(running) == 50 << 20
    with pytest.raises(MemoryBudgetError, match="holds 52428800 of 67108864 bytes"):
        store.create_file("4", 20 << 20)


def test_nobody_waits_while_memory_is_freed(
    running: Running, store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, close = list[bool](), os.close

    def closing(fd: int) -> None:
        if os.fstat(fd).st_size >= 20 << 20:
            waits.append(running.keeper._lock.locked())
        close(fd)

    monkeypatch.setattr(os, "close", closing)
    for name in "12":
        written(store, name, bytes(20 << 20))
    store.delete("1")
    written(store, "3", bytes(30 << 20))  # needs the memory of the first
    store.delete_many(["2", "3"])
    assert len(waits) >= 3 and not any(waits)


def test_a_file_waits_for_memory_that_is_being_freed(
    running: Running, store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, waits, close = threading.Event(), threading.Event(), os.close

    def closing(fd: int) -> None:
        if os.fstat(fd).st_size == 40 << 20:
            begun.set()
            waits.wait(seconds(60))
        close(fd)

    def waiting(*arguments: Any) -> bool:
        waits.set()
        return wait_for(*arguments)

    wait_for = running.keeper._freed.wait_for
    monkeypatch.setattr(running.keeper._freed, "wait_for", waiting)
    monkeypatch.setattr(os, "close", closing)
    written(store, "1", bytes(40 << 20))
    begun.clear()  # set where this process closed its own descriptor
    waits.clear()
    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(store.delete, "1")
        assert begun.wait(seconds(60))
        try:
            written(store, "2", bytes(41 << 20))
        finally:
            waits.set()
        deleted.result(seconds(60))
    assert held(running) == 41 << 20


@pytest.mark.parametrize("how", ["from this host", "by a copy to another"])
def test_who_reads_a_file_that_is_deleted_reads_what_it_held(
    how: str, running: Running, store: Storage
) -> None:
    old, new = b"o" * (9 << 20), b"n" * (9 << 20)
    written(store, "1", old)
    written(store, "2", old)
    reader = open_storage(store.url)
    if how == "from this host":
        assert bytes(reader.read("1", 0, 1)) == b"o"  # a large file's descriptor stays open
        store.delete("1")
        written(store, "3", new)
        assert reader.read("1") == old
    else:
        with call(running.peer) as to:
            asked = {"do": "read", "directory": "run/1", "name": "1", "offset": 0}
            send(to, {**asked, "length": 9 << 20})
            assert wire.reply_of(to) == {"size": 9 << 20}
            store.delete("1")  # most of it is still to be sent
            written(store, "3", new)
            data = bytearray(9 << 20)
            wire.fill(to, memoryview(data))
        assert data == old
    reader.close()
