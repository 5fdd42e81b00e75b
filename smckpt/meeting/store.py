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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from smckpt.decoding import decode
from smckpt.errors import CheckpointError, PeerError, error_from_json, few
from smckpt.meeting.keys import BATCH, Keys, Store
from smckpt.meeting.presence import PAUSES, Presence, Pulse, own_process
from smckpt.meeting.round import Meeting, Message, Round, Transport

_ASKED = 4000  # how many members may ask the store, one process, in a second
_STAGES = 6  # for gathering and deciding, and for two further rounds that gather and decide

Name = Callable[[int], str]
FirstEnd = Callable[[Collection[int]], PeerError | None]


class OverStore(Transport):
    """
    Args:
        keys: of this meeting alone, over this thread's own client.
        name: what errors call a member ("rank 3").
        pulse: signs of life, for rounds without a time limit. None: rounds have timeouts.
        presence: which members are gone; shared by the clients of all threads.
        absent: see `agree`.
    """

    def __init__(
        self,
        keys: Keys,
        member: int,
        count: int,
        name: Name,
        pulse: Pulse | None = None,
        presence: Presence | None = None,
        absent: set[str] | None = None,
    ) -> None:
        self.keys = keys
        self._member = member
        self._count = count
        self._name = name
        self._pulse = pulse
        self.presence = presence or Presence(
            self._answer_for, self._tell_for, name, set() if absent is None else absent
        )
        self._messages: dict[str, str] = {}  # point → key of this member's message

    def over(self, store: Store) -> OverStore:
        keys, presence = self.keys.over(store), self.presence
        return OverStore(keys, self._member, self._count, self._name, self._pulse, presence)

    def collect(self, held: Round, message: Message) -> Iterator[Message]:
        if message.error is not None and self._pulse is not None:
            self._pulse.fail(message.error)
        leads = self._member == held.leader
        self._messages[held.point] = self._arrive(held.point, message)
        if leads:
            self.keys.set(_leads(held), {})
        return self._arrivals(held) if leads else iter(())

    def share(self, held: Round, answer: Message | None) -> Message:
        key = f"{held.point}/decision"
        own_key = self._messages.pop(held.point)
        if answer is not None:
            self.keys.set(key, _packed(answer))
        else:
            try:
                answer = self._heard(held, key)
            except PeerError as error:  # a leader that comes later must not count on this member
                error.moment = held.moment
                self.keys.set(own_key, _packed(Message(self._member, error=error)))
                raise
        self._part(held, own_key)
        return answer

    def _heard(self, held: Round, key: str) -> Message:
        """The leader's answer.

        Raises:
            PeerError: it did not come, or gave none.
        """
        began, patience = time.monotonic(), held.timeout or 0
        data = self._awaited(held, key, [held.leader], began + patience + 1)
        if data is None and self.keys.peek(_leads(held)) is None:
            self.presence.missed([held.leader])
            raise _absent([held.leader], self._name, held.point)
        if data is None:  # it is there, and waits for others or decides
            until = began + _STAGES * patience + 5
            data = self._awaited(held, key, [held.leader], until)
        if data is None:
            self.presence.missed([held.leader])
            raise PeerError(
                f"{self._name(held.leader)} gave no decision on {held.point} within "
                f"{time.monotonic() - began:.0f} s",
                remedy="look at that rank's log; raise timeout= if it is merely slow",
            )
        answer = self._unpacked(data, held.gives)
        if answer.left and answer.error is not None:
            self.presence.note(answer.member, answer.error)
        else:
            self.presence.came(held.leader)
        return answer

    def refuse(self, held: Round, message: Message) -> None:
        if message.error is not None and self._pulse is not None:
            self._pulse.fail(message.error)
        if self._member == held.leader:
            self.keys.set(f"{held.point}/decision", _packed(message))
        else:
            self._arrive(held.point, message)

    def first(self, key: str, value: Any) -> Any:
        return self.keys.first(key, value)

    def drop(self, keys: Sequence[str]) -> None:
        self.keys.drop(keys)

    def announce(self, rounds: Sequence[Round]) -> None:
        error = self.presence.left(self._member)
        for held in rounds:
            if held.leader == self._member:
                self._answer_for(f"{held.point}/decision", self._member, error)
            else:
                self._tell_for(held.point, self._member, error)

    def leave(self, timeout: float) -> None:
        if self._member:
            self.presence.close()
            self._arrive("bye", Message(self._member))
            return
        until, turn, away = time.monotonic() + timeout, 1, set(range(1, self._count))
        pause = PAUSES[0]
        while self.presence.expected(away) and time.monotonic() < until:
            data = self.keys.peek(f"bye/{turn}")
            if data is None:
                time.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
                continue
            away.discard(self._unpacked(data, None).member)
            turn += 1
        self.presence.close()

    def _arrive(self, point: str, message: Message) -> str:
        """Post a message; the leader reads messages in the order of arrival. Returns its key."""
        own_key = f"{point}/{self.keys.count(f'{point}/turn')}"
        self.keys.set(own_key, _packed(message))
        return own_key

    def _arrivals(self, held: Round) -> Iterator[Message]:
        away = set(range(self._count))
        until = time.monotonic() + (held.timeout or 0)
        turn = 1
        ready: list[Any] = []  # arrived and not taken yet, the next one last
        while away:
            if not ready and len(away) >= BATCH:
                turns = range(turn + BATCH - 1, turn - 1, -1)
                ready = self.keys.peek_all([f"{held.point}/{each}" for each in turns])
            data = (
                ready.pop() if ready else self._awaited(held, f"{held.point}/{turn}", away, until)
            )
            if data is None:
                self.presence.missed(away)
                raise _absent(sorted(away), self._name, held.point)
            message = self._unpacked(data, held.brings)
            turn += 1
            if message.left and message.error is not None:
                self.presence.note(message.member, message.error)
            else:
                self.presence.came(message.member)
            if message.member in away:
                away.discard(message.member)
                yield message
            elif not message.left or turn > self._count**2:  # each may post that any other has left
                raise PeerError(
                    f"{self._name(message.member)} brought two messages to one round, {held.point}",
                    remedy="all ranks must run one version of smckpt, and no other program write "
                    "to the job's store",
                )

    def _awaited(self, held: Round, key: str, whose: Collection[int], until: float) -> Any:
        """Wait for a value that one of the members `whose` sets; None if the time is up. The value
        says so if one of them is gone. With a pulse there is no time limit, and the wait raises
        PeerError when none of them gives signs of life."""
        if self._pulse is not None:
            return self._pulse.wait(self.keys, key, sorted(whose))
        gone = self.presence.gone(whose)
        if gone is not None:  # unless the value is there, or another is
            member, error = gone
            return self.keys.first(key, _packed(Message(member, error=error, left=True)))
        with self.presence.waiting(held.point, key, whose, held.leader == self._member):
            return self.keys.wait(key, until - time.monotonic())

    def _answer_for(self, key: str, member: int, error: PeerError) -> None:
        """Set a value in the name of a member that is gone."""
        self.keys.first(key, _packed(Message(member, error=error, left=True)))

    def _tell_for(self, point: str, member: int, error: PeerError) -> None:
        self._arrive(point, Message(member, error=error, left=True))

    def _part(self, held: Round, own_key: str) -> None:
        """Delete this member's message; the last member also deletes the keys that all read.
        Otherwise the store, in the memory of one process, would collect tens of thousands of keys
        with each save of a large job."""
        self.keys.drop([own_key])
        left = f"{held.point}/left"
        try:
            last = self.keys.count(left) == self._count
        except CheckpointError:
            return  # the answer is there already
        if last:
            point = held.point
            self.keys.drop([f"{point}/decision", _leads(held), *held.spent, f"{point}/turn", left])

    def _unpacked(self, data: Any, kind: Any) -> Message:
        who = "a member"
        try:
            member = data["member"]
            if type(member) is not int or not 0 <= member < self._count:
                raise ValueError(f"member is {member!r} of {self._count}")
            who = self._name(member)
            if "error" in data:
                left = data.get("left") is True
                return Message(member, error=error_from_json(data["error"]), left=left)
            return Message(member, data["value"] if kind is None else decode(kind, data["value"]))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise PeerError(
                f"the message of {who} cannot be read: {error}",
                remedy="all ranks must run one version of smckpt",
            ) from error


def _leads(held: Round) -> str:
    """The key by which the others see that the leader has come."""
    return f"{held.point}/leads"


def _packed(message: Message) -> dict[str, Any]:
    if message.error is not None:
        data = {"member": message.member, "error": message.error.to_json()}
        return {**data, "left": True} if message.left else data
    return {"member": message.member, "value": message.value}


def _absent(members: Sequence[int], name: Name, what: str) -> PeerError:
    """The error that names the absent members."""
    return PeerError(
        f"{few(list(map(name, members)), 8)} did not answer in time ({what})",
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
    sideways: Store | None = None,
    first_end: FirstEnd | None = None,
    absent: set[str] | None = None,
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
        sideways: a client on which nobody waits, to answer for members that are gone. None: only
            the members' own words count.
        first_end: what to raise of the first of these members whose program has ended.
        absent: the names, in all meetings of this process, of those that a wait did not see come.
            The end of the program does not wait for them again, unless they come later.

    Raises:
        PeerError: members did not come; names them.
    """
    keys = Keys(store, prefix)
    nonce = uuid.uuid4().hex[:12]
    until = time.monotonic() + timeout
    first_end = first_end or (lambda _: None)
    absent = set() if absent is None else absent
    process = None if sideways is None else own_process()
    if member == 0:
        _present(keys.sub(nonce), member, process)
        _lead(keys, nonce, count, until, name, first_end, absent)
        chosen = nonce
    else:
        chosen = _follow(
            keys,
            nonce,
            member,
            until,
            timeout,
            name,
            process,
            first_end,
            max(PAUSES[1], count / _ASKED),
        )
    own = keys.sub(chosen)
    pulse = None if silence is None else Pulse(own, member, count, name, silence)
    transport = OverStore(own, member, count, name, pulse, absent=absent)
    if process is not None and sideways is not None:
        presence = OverStore(own.over(sideways), member, count, name, absent=absent).presence
        host = process[0]
        # the other members on this host, which have all posted theirs: member, pid, start
        found = (own.peek(f"{host}/{turn + 1}") for turn in range(int(own.peek(f"{host}/turn"))))
        presence.watch({m: (pid, start) for m, pid, start in filter(None, found) if m != member})
        transport = OverStore(own, member, count, name, pulse, presence)
    return Meeting(chosen, member, count, transport, rank, pulse)


def _present(keys: Keys, member: int, process: tuple[str, int, int] | None) -> None:
    """Post this member's process, for the members on its host."""
    if process is not None:
        host, *rest = process
        turn = keys.count(f"{host}/turn")
        keys.set(f"{host}/{turn}", [member, *rest])


def _follow(
    keys: Keys,
    nonce: str,
    member: int,
    until: float,
    timeout: float,
    name: Name,
    process: tuple[str, int, int] | None,
    first_end: FirstEnd,
    slowest: float,
) -> str:
    keys.set(f"nonce/{member}", nonce)
    until += 5  # time for the leader to name the absent members

    def awaited(key: str) -> Any:
        """The leader's value; None if the time is up. c10d logs a warning on every wait that runs
        out, so none is used: the leader may end, or wait long for a member that is late."""
        pause, due = slowest / 20, time.monotonic() + 1
        while (value := keys.peek(key)) is None and time.monotonic() < until:
            if time.monotonic() >= due:
                if (error := first_end([0])) is not None:
                    raise error
                due = time.monotonic() + max(slowest, 1)
            time.sleep(pause)
            pause = min(2 * pause, slowest)
        return value

    chosen, answer = awaited(f"accept/{nonce}"), None
    if chosen is not None:
        _present(keys.sub(chosen), member, process)
        keys.set(f"{chosen}/ack/{member}", nonce)
        answer = awaited(f"{chosen}/go")
    if answer is None:
        raise PeerError(
            f"{name(0)} did not agree on a session within {timeout:.0f} s",
            remedy="all ranks of the group must save or load; look at that rank's log",
        )
    if "error" in answer:
        raise error_from_json(answer["error"])
    return str(chosen)


def _lead(
    keys: Keys,
    chosen: str,
    count: int,
    until: float,
    name: Name,
    first_end: FirstEnd,
    absent: set[str],
) -> None:
    away = dict.fromkeys(range(1, count), "")  # member → its accepted nonce
    pause, due = PAUSES[0], time.monotonic() + 1
    while away:
        late = time.monotonic() >= until
        for member, nonce in keys.peek_each(away, lambda m: f"nonce/{m}"):
            if nonce != away[member]:
                away[member] = nonce
                keys.set(f"accept/{nonce}", chosen)
        known = [member for member, nonce in away.items() if nonce]
        for member, nonce in keys.peek_each(known, lambda m: f"{chosen}/ack/{m}"):
            if nonce == away[member]:
                del away[member]
                absent.discard(name(member))
        error: PeerError | None = None
        if away and time.monotonic() >= due:
            error = first_end(away)
            due = time.monotonic() + 1
        if away and late:
            absent.update(map(name, away))
            error = _absent(list(away), name, "agreeing on a session")
        if error is not None:
            keys.set(f"{chosen}/go", {"error": error.to_json()})
            raise error
        if away:  # c10d logs a warning on every wait that runs out, so none is used
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
    keys.set(f"{chosen}/go", {})
