"""The one round: each member brings a message or an error, one decides, all hear, and all raise or
none."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from smckpt.errors import CheckpointError, as_checkpoint_error
from smckpt.meeting.presence import Pulse

B = TypeVar("B")
D = TypeVar("D")


@dataclass(frozen=True)
class Message:
    """A member's message, or the answer for all: a value or an error, with the member's rank. left:
    whether the error says that the member is gone; then any other may have written it."""

    member: int
    value: Any = None
    error: CheckpointError | None = None
    left: bool = False


@dataclass(frozen=True)
class Round:
    """The description of a round.

    point: its name, the same on all members. leader: the member that decides. timeout: seconds for
    gathering; the others wait for the answer long enough for gathering, deciding and rounds of the
    leader's. None: the transport's own limit. brings, gives: types of the messages; None for plain
    JSON data. spent: keys that nobody reads after this round. moment: of the save that this member
    brings; where it gives the round up, the error that others find says so.
    """

    point: str
    leader: int = 0
    timeout: float | None = None
    brings: type[Any] | None = None
    gives: type[Any] | None = None
    spent: Sequence[str] = ()
    moment: dict[str, Any] | None = None


class Transport:
    """How messages travel in a round. Only the store has `refuse`, `first` and `drop`."""

    def collect(self, held: Round, message: Message) -> Iterator[Message]:
        """Bring a message. On the leader, yield the messages of all members as they arrive; a
        member that stays away ends this with a PeerError."""
        raise NotImplementedError

    def share(self, held: Round, answer: Message | None) -> Message:
        """Give every member the leader's answer, which the leader passes in."""
        raise NotImplementedError

    def refuse(self, held: Round, message: Message) -> None:
        """Bring an error to a round in which this member will not take part; does not wait."""
        raise NotImplementedError

    def first(self, key: str, value: Any) -> Any:
        """The value that the first caller brought."""
        raise NotImplementedError

    def drop(self, keys: Sequence[str]) -> None:
        """Forget these values of `first`, which nobody asks for any more."""
        raise NotImplementedError

    def announce(self, rounds: Sequence[Round]) -> None:
        """Say in these rounds, which this member would hold next, that it has left."""

    def leave(self, timeout: float) -> None:
        """Leave. The leader waits at most `timeout` seconds for the others to leave."""


@dataclass(frozen=True)
class Meeting:
    """Members that hold rounds together, seen from one of them.

    id: of this session of the meeting, new each time and the same on all members. member: this
    process's index of `count`. rank: its global rank, for errors that name none; None takes that of
    the environment. pulse: this member's signs of life, where rounds have no time limit.
    """

    id: str
    member: int
    count: int
    transport: Transport
    rank: int | None = None
    pulse: Pulse | None = None

    def round(
        self,
        point: str,
        bring: Callable[[], B],
        decide: Callable[[Callable[[], dict[int, B]]], D],
        *,
        leader: int = 0,
        timeout: float | None = None,
        brings: type[B] | None = None,
        gives: type[D] | None = None,
        spent: Sequence[str] = (),
        moment: dict[str, Any] | None = None,
    ) -> D:
        """Bring a message, and return the leader's decision on the messages of all.

        Every member raises one error if `bring` raises on a member, if `decide` raises, or if a
        member stays away. The member where it happened raises its own exception. Once a member has
        brought an error, the leader waits for no other.

        Args:
            bring: makes this member's message.
            decide: makes the answer, on the leader alone. It gets a function that returns the
                messages of all by member, or raises a member's error. So a leader can take either
                to a round of leaders before it answers.
            point, leader, timeout, brings, gives, spent, moment: see `Round`.

        Raises:
            CheckpointError: the one error. PeerError: a member stayed away, named.
        """
        held = Round(point, leader, timeout, brings, gives, spent, moment)
        own: Exception | None = None
        try:
            message = Message(self.member, bring())
        except Exception as error:
            own, message = error, Message(self.member, error=as_checkpoint_error(error, self.rank))
        except BaseException as error:  # KeyboardInterrupt and the like: do not wait
            with contextlib.suppress(CheckpointError, NotImplementedError):
                self.refuse(point, as_checkpoint_error(error, self.rank), leader=leader)
            raise
        arriving = self.transport.collect(held, message)
        answer: Message | None = None
        if self.member == leader:
            answer, cause = self._decided(arriving, decide)
            own = cause or own
        try:
            heard = self.transport.share(held, answer)
        except CheckpointError:
            if own is not None:
                raise own from None
            raise
        if heard.error is None:
            decision: D = heard.value
            return decision
        if own is not None and heard.member == self.member:
            raise own
        raise heard.error from own

    def refuse(self, point: str, error: CheckpointError, *, leader: int = 0) -> None:
        """Fail a round for all members without taking part in it; does not wait for them."""
        self.transport.refuse(Round(point, leader), Message(self.member, error=error))

    def first(self, key: str, value: Any) -> Any:
        """A write-once value between rounds: the one that the first caller brought."""
        return self.transport.first(key, value)

    def drop(self, keys: Sequence[str]) -> None:
        """Forget these values of `first`, which nobody asks for any more."""
        self.transport.drop(keys)

    def leave(self, timeout: float) -> None:
        """Leave. Member 0, which may host the store, waits for the others to leave."""
        self.transport.leave(timeout)

    def _decided(
        self,
        arriving: Iterator[Message],
        decide: Callable[[Callable[[], dict[int, B]]], D],
    ) -> tuple[Message, Exception | None]:
        """The leader's answer, and its own exception if it failed itself."""
        failed: Message | None = None

        def brought() -> dict[int, B]:
            nonlocal failed
            messages: dict[int, B] = {}
            for message in arriving:
                if message.error is not None:  # do not wait for the others
                    failed = message
                    raise message.error
                messages[message.member] = message.value
            return messages

        try:
            return Message(self.member, decide(brought)), None
        except Exception as error:  # any exception: the members wait for an answer
            if failed is not None and error is failed.error:
                return failed, None
            return Message(self.member, error=as_checkpoint_error(error, self.rank)), error


class Alone(Transport):
    """A meeting of one member."""

    def collect(self, held: Round, message: Message) -> Iterator[Message]:
        yield message

    def share(self, held: Round, answer: Message | None) -> Message:
        assert answer is not None
        return answer

    def refuse(self, held: Round, message: Message) -> None:
        """Nobody hears it."""

    def first(self, key: str, value: Any) -> Any:
        return value

    def drop(self, keys: Sequence[str]) -> None:
        """No value was kept."""


class OverGroup(Transport):
    """Over a torch process group, with collectives, for callers that run collectives anyway. A
    message may be any Python object. The process group's own timeout bounds each wait."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group

    def collect(self, held: Round, message: Message) -> Iterator[Message]:
        import torch.distributed as dist

        leads = dist.get_rank(self._group) == held.leader
        everyone: list[Any] | None = [None] * dist.get_world_size(self._group) if leads else None
        dist.gather_object(message, everyone, group=self._group, group_dst=held.leader)
        return iter(everyone or ())

    def share(self, held: Round, answer: Message | None) -> Message:
        import torch.distributed as dist

        answers: list[Any] = [answer]
        dist.broadcast_object_list(answers, group=self._group, group_src=held.leader)
        message: Message = answers[0]
        return message


def alone() -> Meeting:
    """The meeting of a single process."""
    return Meeting(uuid.uuid4().hex[:12], 0, 1, Alone())


def over_group(process_group: Any = None) -> Meeting:
    """The meeting of a torch process group; of this process alone without one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return alone()
    count = dist.get_world_size(process_group)
    member = dist.get_rank(process_group)
    return Meeting("group", member, count, OverGroup(process_group), dist.get_rank())
