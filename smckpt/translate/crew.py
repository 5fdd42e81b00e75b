"""Several processes that carry out one export: who writes which files, and where they meet.

They meet through the job's store, as saves do: no collectives, and what one process raises every
process raises. Each says now and then how many bytes it has written, so one that was killed is
missed when `timeout` seconds pass without a byte of it, however long the whole takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from smckpt.engine.groups import group_of, ranks_digest
from smckpt.engine.session import Channel, Session, Store, agree, lone_session
from smckpt.errors import CheckpointError, PeerError, StateError, UsageError, error_from_json

__all__ = ["Crew", "crew_of", "crew_of_environment", "shares"]

_BEAT = 1.0  # seconds between two signs of life
_PAUSE = (0.01, 0.2)  # seconds between two looks for what is waited for: at first, at most
_LEAVE = 10.0  # seconds that the first waits for the others' good-byes: it may host the store

Body = dict[str, Any]


class Crew:
    """The processes of an export, seen from one of them; a single one needs no store.

    Args:
        ranks: the members, as errors call them.
        timeout: see the module's text.
    """

    def __init__(self, session: Session, ranks: Sequence[int], timeout: float) -> None:
        self.member = session.member
        self.count = session.count
        self.tell: Callable[[int], None] | None = None  # the first's: bytes written by all
        self._channel = session.channel
        self._ranks = ranks
        self._timeout = timeout
        self._own = 0  # bytes written here
        self._waits = 0
        self._due = 0.0  # when the next sign of life is
        self._signs: dict[str, int] = {}  # the others', as last seen

    @property
    def leads(self) -> bool:
        return self.member == 0

    def meet(
        self, point: str, act: Callable[[], Body], decide: Callable[[dict[int, Body]], Body]
    ) -> Body:
        """All `act`; the first decides from what they return; all get its decision.

        Raises:
            CheckpointError: what any of them raised; a PeerError where one stays away.
        """
        if self._channel is None:
            return decide({0: act()})
        with _answering():
            return self._met(self._channel, point, act, decide)

    def _met(
        self, channel: Channel, point: str, act: Callable[[], Body],
        decide: Callable[[dict[int, Body]], Body],
    ) -> Body:  # fmt: skip
        failure: BaseException | None = None
        try:
            body = act()
        except BaseException as error:  # told to the others, then raised
            failure, body = error, {"error": _told(error).to_json()}
            channel.put_once("failed", body)
            if not isinstance(error, Exception):  # KeyboardInterrupt and the like: go at once
                raise
        channel.arrive(point, self.member, body)
        if failure is not None and not self.leads:
            raise failure
        if self.leads:
            channel.set(f"{point}/decision", self._decided(channel, point, decide))
        answer = self._awaited(channel, f"{point}/decision", [0])
        if failure is not None:
            raise failure
        if "error" in answer:
            raise error_from_json(answer["error"])
        decision: Body = answer["decision"]
        return decision

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What is raised inside, and outside of a meeting, the others raise too."""
        try:
            yield
        except BaseException as error:
            if self._channel is not None:
                with suppress(RuntimeError):  # the store is gone with who hosts it
                    self._channel.put_once("failed", {"error": _told(error).to_json()})
            raise

    def beat(self, done: int) -> None:
        """Give a sign of life: how many bytes are written here. Not more than one a second.

        Raises:
            CheckpointError: another process has failed.
        """
        self._own = done
        if self._channel is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + _BEAT
            self._channel.set(f"beat/{self.member}", {"sign": done})
            _refuse_failed(self._channel)
            if self.leads:
                self._look(self._channel, range(1, self.count))
        self._show()

    def close(self) -> None:
        """Say good-bye; the first goes last."""
        channel = self._channel
        if channel is None:
            return
        try:
            if not self.leads:
                channel.arrive("bye", self.member, {})
                return
            for _ in channel.arrivals("bye", self.count - 1, time.monotonic() + _LEAVE):
                pass
        except (TimeoutError, RuntimeError):
            return  # who died says nothing

    def _show(self) -> None:
        if self.tell is not None:
            others = sum(n for key, n in self._signs.items() if key.startswith("beat/"))
            self.tell(self._own + others)

    def _decided(
        self, channel: Channel, point: str, decide: Callable[[dict[int, Body]], Body]
    ) -> Body:
        """The first's answer. It waits no longer for the others when one has failed."""
        try:
            bodies: dict[int, Body] = {}
            for turn in range(1, self.count + 1):
                away = [m for m in range(self.count) if m not in bodies]
                told = self._awaited(channel, f"{point}/{turn}", away)
                if "error" in told["body"]:
                    return {"error": told["body"]["error"]}
                bodies[told["member"]] = told["body"]
            return {"decision": decide(bodies)}
        except Exception as error:
            answer = {"error": _told(error).to_json()}
            channel.put_once("failed", answer)
            return answer

    def _awaited(self, channel: Channel, key: str, whose: Sequence[int]) -> Body:
        """A value, for as long as one of those that it is of gives signs of life."""
        last, pause = time.monotonic(), _PAUSE[0]
        while True:
            found = channel.peek(key)  # c10d logs a warning on every wait that runs out
            if found is not None:
                return found
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE[1])
            if time.monotonic() >= self._due:
                _refuse_failed(channel)  # elsewhere, and not told at this meeting
                self._waits += 1  # for those that wait for this one
                channel.set(f"waits/{self.member}", {"sign": self._waits})
                if self._look(channel, whose):
                    last = time.monotonic()
                self._due = time.monotonic() + _BEAT
                self._show()
            if time.monotonic() - last > self._timeout:
                names = ", ".join(f"rank {self._ranks[m]}" for m in whose[:8])
                raise PeerError(
                    f"{names} gave no sign of life for {self._timeout:.0f} s",
                    remedy="look at its log; raise timeout= if its storage is merely slow",
                )

    def _look(self, channel: Channel, members: Sequence[int]) -> bool:
        """Whether one of these has come further."""
        moved = False
        for key in (f"{kind}/{member}" for member in members for kind in ("beat", "waits")):
            found = channel.peek(key)
            if found is not None and self._signs.get(key) != found["sign"]:
                self._signs[key] = found["sign"]
                moved = True
        return moved


def crew_of(process_group: Any, timeout: float) -> Crew:
    """The members of a process group, all of which export together; this process alone for None.

    Raises:
        UsageError: this process is no member.
        PeerError: somebody did not come.
    """
    if process_group is None:
        return _alone()
    if isinstance(process_group, Crew):
        return process_group
    group = group_of(process_group)
    if group is None:
        raise UsageError(
            "this process is no member of process_group",
            remedy="call export_hf on its members alone",
        )
    return _agreed(group.store, group.index, group.ranks, timeout)


def crew_of_environment(timeout: float) -> Crew | None:
    """The processes that torchrun started, if it started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return _agreed(store, rank, range(world), timeout)


def _alone() -> Crew:
    return Crew(lone_session(), (0,), 0.0)


def _agreed(store: Store | None, member: int, ranks: Sequence[int], timeout: float) -> Crew:
    if len(ranks) == 1 or store is None:
        return _alone()
    session = agree(
        store.clone(), f"smckpt/export/{ranks_digest([ranks])}", member=member, count=len(ranks),
        timeout=timeout, name=lambda m: f"rank {ranks[m]}",
    )  # fmt: skip
    return Crew(session, ranks, timeout)


def shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Numbers of files for each of `count` processes: the largest first, to who has the least."""
    out: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = load.index(min(load))
        out[least].append(number)
        load[least] += sizes[number]
    return [sorted(numbers) for numbers in out]


@contextmanager
def _answering() -> Iterator[None]:
    """A store that does not answer as an error of ours."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__name__.startswith("Dist"):
            raise
        raise PeerError(
            f"the job's store no longer answers: {str(error).splitlines()[0]}",
            remedy="the process that hosts it, mostly the first, is gone: look at its log",
        ) from error


def _refuse_failed(channel: Channel) -> None:
    failed = channel.peek("failed")
    if failed is not None:
        raise error_from_json(failed["error"])


def _told(error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return StateError(f"{type(error).__name__}: {error}", remedy="see that process's log")
