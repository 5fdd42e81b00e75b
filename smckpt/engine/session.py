"""How ranks meet: through the c10d store, without collectives, safe against stale keys.

torchrun keeps its store across restarts (pytorch #135712), so a key may be left over from a dead
attempt. A session is therefore agreed by fresh nonces before any other key is believed:

1. every member posts a nonce under its index, and waits for `accept/<its nonce>`, a key that no
   earlier attempt can have written;
2. the leader reads each member's nonce, answers `accept/<nonce>` with the session's id (its own
   nonce), and waits for the member's acknowledgement under that id; when none comes it reads the
   nonce anew, for it may have read a stale one;
3. when all have acknowledged, the leader says go.

After that every key of the session stands under its id. Those of a meeting go with its last member.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from smckpt.errors import PeerError, as_checkpoint_error, error_from_json

__all__ = ["Arrival", "Channel", "Session", "Store", "agree", "client_of", "lone_session"]

log = logging.getLogger("smckpt")

# How long the leader first waits for a silent member before it reads its nonce anew; doubled each
# time up to the second figure, since c10d logs a warning on every wait that runs out.
ACK_RETRY_SECONDS = (0.25, 8.0)


class Store(Protocol):
    """The part of a c10d store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def clone(self) -> Store: ...


@dataclass(frozen=True)
class Arrival:
    """One member's message at a meeting point: its index and what it said."""

    member: int
    body: dict[str, Any]


class Channel:
    """JSON messages under a prefix of a store client that belongs to one thread.

    `names` tell a member's index as people know it ("rank 3 on host a").
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def sub(self, name: str) -> Channel:
        return Channel(self._store, f"{self._prefix}/{name}")

    def over(self, store: Store) -> Channel:
        """The same keys over another client."""
        return Channel(store, self._prefix)

    def set(self, key: str, body: dict[str, Any]) -> None:
        _asked(self._store.set, self._key(key), json.dumps(body))

    def peek(self, key: str) -> dict[str, Any] | None:
        """The value if it is there already."""
        if not _asked(self._store.check, [self._key(key)]):
            return None
        return self._decode(_asked(self._store.get, self._key(key)))

    def get(self, key: str, timeout: float) -> dict[str, Any]:
        """Wait for the value; TimeoutError after `timeout` seconds."""
        try:
            self._store.wait([self._key(key)], timedelta(seconds=max(timeout, 0.001)))
        except RuntimeError as error:  # DistStoreError and DistNetworkError are RuntimeErrors
            if _is_timeout(error):
                raise TimeoutError(key) from error
            raise _gone(error) from error
        return self._decode(_asked(self._store.get, self._key(key)))

    def put_once(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Write-once: the value that stands after the call, ours or that of who came first."""
        return self._decode(_asked(self._store.compare_set, self._key(key), "", json.dumps(body)))

    def arrive(self, point: str, member: int, body: dict[str, Any]) -> str:
        """Say something at a meeting point. Who waits there sees messages as they arrive.

        Returns the key of what was said.
        """
        turn = _asked(self._store.add, self._key(f"{point}/turn"), 1)
        message = f"{point}/{turn}"
        self.set(message, {"member": member, "body": body})
        return message

    def arrivals(self, point: str, count: int, deadline: float) -> Iterator[Arrival]:
        """The `count` messages of a meeting point, as they arrive.

        Raises:
            TimeoutError: `deadline` (of `time.monotonic`) passed.
        """
        for turn in range(1, count + 1):
            data = self.get(f"{point}/{turn}", deadline - time.monotonic())
            yield Arrival(data["member"], data["body"])

    def part(self, point: str, message: str, count: int, read_by_all: Sequence[str]) -> None:
        """Leave a meeting point, when its answer stands and was read here: what was said is taken
        back and, by the last of `count`, the keys that all had to read. Else the store, in the
        memory of one process, would keep tens of thousands of keys of each save of a large job.

        A failure is logged only: the answer is known already.
        """
        try:
            self._store.delete_key(self._key(message))
            if self._store.add(self._key(f"{point}/left"), 1) == count:
                for key in (*read_by_all, f"{point}/turn", f"{point}/left"):
                    self._store.delete_key(self._key(key))
        except RuntimeError as error:  # a store that cannot delete, or that is gone
            log.debug("keys of %s stay in the store: %s", point, error)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    @staticmethod
    def _decode(raw: bytes) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(raw)
        return value


@dataclass(frozen=True)
class Session:
    """One life of a set of members that meet.

    id: fresh for each life. member: this process's index of `count`. hosts: host of each member,
    known to the leader (member 0) only. channel: None where a single member needs no store.
    """

    id: str
    member: int
    count: int
    channel: Channel | None
    hosts: tuple[str, ...] = ()

    def over(self, store: Store) -> Session:
        """The same session over a store client of the caller's own."""
        return self if self.channel is None else replace(self, channel=self.channel.over(store))

    def meet(
        self,
        point: str,
        body: dict[str, Any],
        decide: Callable[[dict[int, dict[str, Any]]], dict[str, Any]],
        *,
        timeout: float,
        name: Callable[[int], str],
        then: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        spent: Sequence[str] = (),
    ) -> dict[str, Any]:
        """All members say `body`; the leader decides from all of them; all get the decision.

        `decide` gets the bodies by member; what it raises, and a member that stays away, becomes
        the error that every member raises. `then` may replace the leader's answer
        ({"decision": …} or {"error": …}) before it is told, for a meeting beyond this one. `spent`:
        keys that nobody reads after this meeting.
        """
        after = then or (lambda answer: answer)
        if self.channel is None:
            return _answered(after(self._decided(decide, {0: body})))
        channel = self.channel
        deadline = time.monotonic() + timeout
        message = channel.arrive(point, self.member, body)
        if self.member == 0:
            channel.set(f"{point}/decision", after(self._decide(point, decide, deadline, name)))
        # The leader has `timeout` to gather, to decide, and for a meeting beyond this one.
        patience = 4 * timeout + 5
        try:
            answer = channel.get(f"{point}/decision", patience)
        except PeerError:
            raise  # the store is gone: a TimeoutError too, as in the places below
        except TimeoutError as error:
            raise PeerError(
                f"{name(0)} gave no decision on {point} within {patience:.0f} s",
                remedy="look at that rank's log; raise timeout= if it is merely slow",
            ) from error
        channel.part(point, message, self.count, (f"{point}/decision", *spent))
        return _answered(answer)

    def _decide(
        self,
        point: str,
        decide: Callable[[dict[int, dict[str, Any]]], dict[str, Any]],
        deadline: float,
        name: Callable[[int], str],
    ) -> dict[str, Any]:
        assert self.channel is not None
        bodies: dict[int, dict[str, Any]] = {}
        try:
            for arrival in self.channel.arrivals(point, self.count, deadline):
                if "error" in arrival.body:  # do not wait for the others
                    return {"error": arrival.body["error"]}
                bodies[arrival.member] = arrival.body
        except PeerError as error:
            return {"error": error.to_json()}
        except TimeoutError:
            return {"error": absent(bodies, self.count, name, point).to_json()}
        return self._decided(decide, bodies)

    @staticmethod
    def _decided(
        decide: Callable[[dict[int, dict[str, Any]]], dict[str, Any]],
        bodies: dict[int, dict[str, Any]],
    ) -> dict[str, Any]:
        for body in bodies.values():
            if "error" in body:
                return {"error": body["error"]}
        try:
            return {"decision": decide(bodies)}
        except Exception as error:  # whatever it is: the members wait for an answer
            return {"error": as_checkpoint_error(error).to_json()}


def _answered(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise error_from_json(answer["error"])
    decision: dict[str, Any] = answer["decision"]
    return decision


def absent(bodies: dict[int, Any], count: int, name: Callable[[int], str], what: str) -> PeerError:
    """The error that names who did not come."""
    missing = [name(m) for m in range(count) if m not in bodies]
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return PeerError(
        f"{shown} did not answer in time ({what})",
        remedy="a peer that died or hangs keeps a save from being committed; look at its log",
    )


def client_of(store: Store) -> Store:
    """A connection of its own to the same store: a wait blocks every other user of one."""
    client: Store = _asked(store.clone)
    return client


def lone_session() -> Session:
    """The session of a set with one member: nobody to ask."""
    return Session(uuid.uuid4().hex[:12], 0, 1, None, (socket.gethostname(),))


def agree(
    store: Store,
    prefix: str,
    *,
    member: int,
    count: int,
    timeout: float,
    name: Callable[[int], str],
) -> Session:
    """Agree on a session among `count` members; see the module's text.

    Args:
        store: this thread's own client.
        prefix: the same on all members, and of nobody else.
        member: this process's index; 0 leads.
        timeout: seconds, for all of it.
        name: how errors call member i.

    Raises:
        PeerError: somebody did not come; names them.
    """
    channel = Channel(store, prefix)
    nonce = uuid.uuid4().hex[:12]
    here = {"nonce": nonce, "host": socket.gethostname(), "pid": os.getpid()}
    deadline = time.monotonic() + timeout
    if member == 0:
        hosts = _lead(channel, nonce, count, deadline, name)
        return Session(nonce, 0, count, channel.sub(nonce), hosts)
    channel.set(f"nonce/{member}", here)
    try:
        session = channel.get(f"accept/{nonce}", deadline + 5 - time.monotonic())["session"]
        channel.set(f"{session}/ack/{member}", here)
        answer = channel.get(f"{session}/go", deadline + 5 - time.monotonic())
    except PeerError:
        raise
    except TimeoutError as error:
        raise PeerError(
            f"{name(0)} did not agree on a session within {timeout:.0f} s",
            remedy="all ranks of the group must save or load; look at that rank's log",
        ) from error
    if "error" in answer:
        raise error_from_json(answer["error"])
    return Session(session, member, count, channel.sub(session))


def _lead(
    channel: Channel, session: str, count: int, deadline: float, name: Callable[[int], str]
) -> tuple[str, ...]:
    acks: dict[int, dict[str, Any]] = {}
    accepted: dict[int, str] = {}

    def accept(member: int, posted: dict[str, Any]) -> None:
        if accepted.get(member) != posted["nonce"]:
            accepted[member] = posted["nonce"]
            channel.set(f"accept/{posted['nonce']}", {"session": session})

    def accept_present() -> None:  # who is there need not wait for who is not
        for member in range(1, count):
            if (posted := channel.peek(f"nonce/{member}")) is not None:
                accept(member, posted)

    accept_present()
    patience, most = ACK_RETRY_SECONDS
    for member in range(1, count):
        while member not in acks or acks[member]["nonce"] != accepted[member]:
            left = deadline - time.monotonic()
            if left <= 0:
                accept_present()  # who came after the first look hears of it too
                error = absent({0: None, **acks}, count, name, "agreeing on a session")
                channel.set(f"{session}/go", {"error": error.to_json()})
                raise error
            try:
                accept(member, channel.get(f"nonce/{member}", min(left, patience)))
                acks[member] = channel.get(f"{session}/ack/{member}", min(left, patience))
            except PeerError:  # the store is gone: a TimeoutError too, but nothing to retry
                raise
            except TimeoutError:
                patience = min(2 * patience, most)
    channel.set(f"{session}/go", {})
    return (socket.gethostname(), *(acks[m]["host"] for m in range(1, count)))


def _is_timeout(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "timeout" in text or "timed out" in text


def _asked(ask: Callable[..., Any], *arguments: Any) -> Any:
    """The store's answer; what c10d raises (RuntimeErrors) becomes an error of ours."""
    try:
        return ask(*arguments)
    except RuntimeError as error:
        raise _gone(error) from error


def _gone(error: RuntimeError) -> PeerError:
    return PeerError(
        f"the job's c10d store no longer answers: {_first_line(error)}",
        remedy="the process that hosts the store is gone; restart the job",
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
