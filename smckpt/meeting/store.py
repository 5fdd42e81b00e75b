"""Rounds over the job's c10d store, and the agreement before the first round.

torchrun keeps its store across restarts (pytorch #135712), so a dead attempt may have left keys. So
members first agree on a meeting through new nonces, before they trust any other key:

1. Every member posts a nonce under its index, and waits for `accept/<its nonce>`, a key that no
   earlier attempt can have written.
2. The leader reads each member's nonce and answers `accept/<nonce>` with the meeting's id, its own
   nonce. It may have read a stale nonce, so it reads again until the member acknowledges.
3. When all have acknowledged, the leader sets the go key.

After that every key of the meeting is under its id. The last member of a round deletes its keys.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from smckpt.errors import CheckpointError, PeerError, error_from_json
from smckpt.meeting.keys import Keys, Store
from smckpt.meeting.messages import from_json
from smckpt.meeting.pulse import PAUSES, Pulse
from smckpt.meeting.round import Meeting, Round, Said, Transport

__all__ = ["OverStore", "agree"]

_STAGES = 6  # for gathering and deciding, and for two further rounds that gather and decide

Name = Callable[[int], str]


class OverStore(Transport):
    """
    Args:
        keys: of this meeting alone, over this thread's own client.
        name: what errors call a member ("rank 3").
        pulse: signs of life, for rounds without a time limit. None: rounds have timeouts.
    """

    def __init__(
        self, keys: Keys, member: int, count: int, name: Name, pulse: Pulse | None = None
    ) -> None:
        self.keys = keys
        self._member = member
        self._count = count
        self._name = name
        self._pulse = pulse
        self._messages: dict[str, str] = {}  # point → key of this member's message

    def over(self, store: Store) -> OverStore:
        return OverStore(self.keys.over(store), self._member, self._count, self._name, self._pulse)

    def collect(self, held: Round, said: Said) -> Iterator[Said]:
        if said.error is not None and self._pulse is not None:
            self._pulse.fail(said.error)
        self._messages[held.point] = self._arrive(held.point, said)
        return self._arrivals(held) if self._member == held.leader else iter(())

    def share(self, held: Round, answer: Said | None) -> Said:
        key = f"{held.point}/decision"
        message = self._messages.pop(held.point)
        if answer is not None:
            self.keys.set(key, _packed(answer))
        else:
            seconds = _STAGES * (held.timeout or 0) + 5
            data = self._awaited(key, [held.leader], time.monotonic() + seconds)
            if data is None:
                raise PeerError(
                    f"{self._name(held.leader)} gave no decision on {held.point} within "
                    f"{seconds:.0f} s",
                    remedy="look at that rank's log; raise timeout= if it is merely slow",
                )
            answer = self._unpacked(data, held.gives)
        self._part(held, message)
        return answer

    def refuse(self, held: Round, said: Said) -> None:
        if said.error is not None and self._pulse is not None:
            self._pulse.fail(said.error)
        if self._member == held.leader:
            self.keys.set(f"{held.point}/decision", _packed(said))
        else:
            self._arrive(held.point, said)

    def first(self, key: str, value: Any) -> Any:
        return self.keys.first(key, value)

    def leave(self, timeout: float) -> None:
        if self._member:
            self._arrive("bye", Said(self._member))
            return
        until = time.monotonic() + timeout
        for turn in range(1, self._count):
            if self.keys.wait(f"bye/{turn}", until - time.monotonic()) is None:
                return  # a dead member brings nothing

    def _arrive(self, point: str, said: Said) -> str:
        """Post a message; the leader reads messages in the order of arrival. Returns its key."""
        message = f"{point}/{self.keys.count(f'{point}/turn')}"
        self.keys.set(message, _packed(said))
        return message

    def _arrivals(self, held: Round) -> Iterator[Said]:
        away = set(range(self._count))
        until = time.monotonic() + (held.timeout or 0)
        for turn in range(1, self._count + 1):
            data = self._awaited(f"{held.point}/{turn}", sorted(away), until)
            if data is None:
                raise _absent(sorted(away), self._name, held.point)
            said = self._unpacked(data, held.brings)
            away.discard(said.member)
            yield said

    def _awaited(self, key: str, whose: Sequence[int], until: float) -> Any:
        """Wait for a value; None if the time is up. With a pulse there is no time limit, and the
        wait raises PeerError when none of the members `whose` gives signs of life."""
        if self._pulse is not None:
            return self._pulse.wait(self.keys, key, whose)
        return self.keys.wait(key, until - time.monotonic())

    def _part(self, held: Round, message: str) -> None:
        """Delete this member's message; the last member also deletes the keys that all read.
        Otherwise the store, in the memory of one process, would collect tens of thousands of keys
        with each save of a large job."""
        self.keys.drop([message])
        left = f"{held.point}/left"
        try:
            last = self.keys.count(left) == self._count
        except CheckpointError:
            return  # the answer is there already
        if last:
            point = held.point
            self.keys.drop([f"{point}/decision", *held.spent, f"{point}/turn", left])

    def _unpacked(self, data: Any, kind: Any) -> Said:
        who = "a member"
        try:
            member = data["member"]
            if type(member) is not int or not 0 <= member < self._count:
                raise ValueError(f"member is {member!r} of {self._count}")
            who = self._name(member)
            if "error" in data:
                return Said(member, error=error_from_json(data["error"]))
            return Said(member, data["value"] if kind is None else from_json(kind, data["value"]))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise PeerError(
                f"the message of {who} cannot be read: {error}",
                remedy="all ranks must run one version of smckpt",
            ) from error


def _packed(said: Said) -> dict[str, Any]:
    if said.error is not None:
        return {"member": said.member, "error": said.error.to_json()}
    return {"member": said.member, "value": said.value}


def _absent(members: Sequence[int], name: Name, what: str) -> PeerError:
    """The error that names the absent members."""
    shown = ", ".join(map(name, members[:8]))
    shown += f" and {len(members) - 8} more" if len(members) > 8 else ""
    return PeerError(
        f"{shown} did not answer in time ({what})",
        remedy="look at the log of that rank: it died, hangs, or is slow; raise timeout= if it "
        "is merely slow",
    )


def agree(
    store: Store,
    prefix: str,
    *,
    member: int,
    count: int,
    timeout: float,
    name: Name,
    rank: int | None = None,
    silence: float | None = None,
) -> Meeting:
    """Agree on a meeting of `count` members; see the module's text.

    Args:
        store: this thread's own client.
        prefix: the same on all members, and used by nobody else.
        member: this process's index; 0 leads.
        timeout: seconds, for all of it.
        name: how errors call member i.
        rank: see `Meeting`.
        silence: seconds without a sign of life until a member is given up. Rounds then have no time
            limit. None: each round has its `timeout`.

    Raises:
        PeerError: members did not come; names them.
    """
    keys = Keys(store, prefix)
    nonce = uuid.uuid4().hex[:12]
    until = time.monotonic() + timeout
    if member == 0:
        _lead(keys, nonce, count, until, name)
        chosen = nonce
    else:
        chosen = _follow(keys, nonce, member, until, timeout, name)
    own = keys.sub(chosen)
    pulse = None if silence is None else Pulse(own, member, count, name, silence)
    return Meeting(chosen, member, count, OverStore(own, member, count, name, pulse), rank, pulse)


def _follow(keys: Keys, nonce: str, member: int, until: float, timeout: float, name: Name) -> str:
    keys.set(f"nonce/{member}", nonce)
    until += 5  # time for the leader to name the absent members
    chosen = keys.wait(f"accept/{nonce}", until - time.monotonic())
    answer = None
    if chosen is not None:
        keys.set(f"{chosen}/ack/{member}", nonce)
        answer = keys.wait(f"{chosen}/go", until - time.monotonic())
    if answer is None:
        raise PeerError(
            f"{name(0)} did not agree on a session within {timeout:.0f} s",
            remedy="all ranks of the group must save or load; look at that rank's log",
        )
    if "error" in answer:
        raise error_from_json(answer["error"])
    return str(chosen)


def _lead(keys: Keys, chosen: str, count: int, until: float, name: Name) -> None:
    away = dict.fromkeys(range(1, count), "")  # member → its accepted nonce
    pause = PAUSES[0]
    while away:
        late = time.monotonic() >= until
        for member in list(away):
            nonce = keys.peek(f"nonce/{member}")
            if nonce is not None and nonce != away[member]:
                away[member] = nonce
                keys.set(f"accept/{nonce}", chosen)
            if nonce is not None and keys.peek(f"{chosen}/ack/{member}") == nonce:
                del away[member]
        if away and late:
            error = _absent(list(away), name, "agreeing on a session")
            keys.set(f"{chosen}/go", {"error": error.to_json()})
            raise error
        if away:  # c10d logs a warning on every wait that runs out, so none is used
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
    keys.set(f"{chosen}/go", {})
