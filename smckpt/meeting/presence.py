"""Members that have left a meeting, or whose process is gone.

A member that leaves says so in the rounds that it would hold next. A process that is killed says
nothing, but its system knows of its end. So a thread of each member waits for the end of the other
members' processes on the same host, without asking anybody. It answers, in their name, the rounds
in which somebody waits for them: here, and through the store on other hosts. A process that is
stopped, or slow, has not ended.

Before the ranks have met, each posts its process in the job's store (`Lives`), for those that wait
for it to come.

Signs of life, for rounds without a time limit.

A member reports its progress about once a second. The others give it up after `timeout` seconds
without a report, however long the whole round takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smckpt.decoding import decode
from smckpt.errors import CheckpointError, PeerError, error_from_json
from smckpt.meeting.keys import Keys, Store


class Presence:
    """
    Args:
        answer: sets the value of a key, if it has none, to a member's departure.
        tell: brings a member's departure to a round that another process leads.
        name: what errors call a member.
        absent: see `agree`.
    """

    def __init__(
        self,
        answer: Callable[[str, int, PeerError], None],
        tell: Callable[[str, int, PeerError], None],
        name: Callable[[int], str],
        absent: set[str],
    ) -> None:
        self._answer = answer
        self._tell = tell
        self._name = name
        self._absent = absent
        self._lock = threading.Lock()
        self._gone: dict[int, PeerError] = {}
        self._seen: set[int] = set()  # those whose end this process has seen
        self._waits: dict[str, tuple[str, frozenset[int], bool]] = {}
        self._stop: int | None = None  # ends the thread

    def gone(self, members: Any) -> tuple[int, PeerError] | None:
        """The first of these members that is gone, and the error that says so."""
        for member in sorted(set(members) & self._gone.keys()):
            return member, self._gone[member]
        return None

    def expected(self, members: Iterable[int]) -> set[int]:
        """Those that an end waits for: not gone, and no wait for them was in vain."""
        absent = self._gone.keys() | {one for one in members if self._name(one) in self._absent}
        return set(members) - absent

    def missed(self, members: Iterable[int]) -> None:
        """They did not come in time."""
        self._absent.update(map(self._name, members))

    def came(self, member: int) -> None:
        self._absent.discard(self._name(member))

    def note(self, member: int, error: CheckpointError) -> None:
        """Another member says that this one has left."""
        ours = PeerError(error.message, remedy=error.remedy, rank=error.rank, host=error.host)
        self._gone.setdefault(member, ours)

    def left(self, member: int) -> PeerError:
        return PeerError(
            f"{self._name(member)} has left: it closed its manager or its process group, or its "
            "program ended",
            remedy="all ranks make the same saves, loads and calls of a manager; find out why that "
            "rank makes fewer",
        )

    @contextlib.contextmanager
    def waiting(self, point: str, key: str, whose: Any, leads: bool) -> Iterator[None]:
        """While the block waits for `key`, which one of the members `whose` will set."""
        with self._lock:
            self._waits[point] = key, frozenset(whose), leads
            seen = {member: self._gone[member] for member in self._seen}
        try:
            for member, error in seen.items():  # it may have ended a moment ago
                self._settle(point, key, frozenset(whose), leads, member, error)
            yield
        finally:
            with self._lock:
                self._waits.pop(point, None)

    def watch(self, peers: Mapping[int, tuple[int, int]]) -> None:
        """Wait, in a thread, for the end of these processes: member → pid and start."""
        ends: dict[int, int] = {}
        for member, (pid, start) in peers.items():
            fd = _opened(pid, start)
            if fd is not None:
                ends[fd] = member
        if not ends:
            return
        read, self._stop = os.pipe2(os.O_CLOEXEC)
        threading.Thread(
            target=self._serve, args=(ends, read), name="smckpt-presence", daemon=True
        ).start()

    def close(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            os.close(stop)  # the thread reads the end of the pipe

    def _serve(self, ends: dict[int, int], read: int) -> None:
        poll = select.poll()
        for fd in (*ends, read):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        try:
            while ends:
                for fd, _ in poll.poll():
                    if fd == read:
                        return
                    poll.unregister(fd)
                    os.close(fd)
                    self._ended(ends.pop(fd))
        finally:
            for fd in (*ends, read):
                os.close(fd)

    def _ended(self, member: int) -> None:
        error = _gone(self._name(member))
        with self._lock:
            error = self._gone.setdefault(member, error)
            self._seen.add(member)
            waits = list(self._waits.items())
        for point, (key, whose, leads) in waits:
            self._settle(point, key, whose, leads, member, error)

    def _settle(
        self,
        point: str,
        key: str,
        whose: frozenset[int],
        leads: bool,
        member: int,
        error: PeerError,
    ) -> None:
        with contextlib.suppress(CheckpointError):  # the store is gone: the wait itself hears so
            if member in whose:
                self._answer(key, member, error)
            elif not leads:
                self._tell(point, member, error)


@dataclass(frozen=True)
class Life:
    """What a rank posts of itself. process: `own_process`. posted: when, by the clock of its host.
    over: its program has ended."""

    process: tuple[str, int, int] | None
    posted: float
    over: bool = False


class Lives:
    """Each rank's process, or that its program has ended, in this attempt of torchrun.

    The store may hold those of killed ranks that are just starting again: torchrun keeps it, and
    counts no attempt when hosts come or go. So an end counts only of a life that was posted after
    this process began, or that this process has seen. The end of an earlier one says nothing.
    """

    def __init__(self, store: Store) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self._keys = Keys(store, f"smckpt/lives/{attempt}")
        self._own = own_process()
        self._began = began(self._own and self._own[2]) or 0.0  # 0: untold
        self._seen: set[int] = set()  # ranks that were alive at an earlier look

    def post(self, rank: int, *, over: bool = False) -> None:
        """Post this process, over an earlier life of its rank."""
        self._keys.set(str(rank), Life(self._own, time.time(), over))

    def first_end(self, ranks: Iterable[int]) -> PeerError | None:
        """What to raise of the first of these ranks that has ended."""
        for rank, data in self._keys.peek_each(ranks, str):
            try:
                life = decode(Life, data)
            except ValueError as error:
                raise PeerError(
                    f"what rank {rank} posts of its process cannot be read: {error}",
                    remedy="all ranks must run one version of smckpt",
                ) from error
            if not (life.over or has_ended(life.process, self._own)):
                self._seen.add(rank)
            elif life.posted >= self._began or rank in self._seen:
                if not life.over:
                    return _gone(f"rank {rank}")
                return PeerError(
                    f"rank {rank} has left: its program has ended",
                    remedy="all ranks make the same saves and loads; look at its log",
                )
        return None


def _gone(name: str) -> PeerError:
    """What to raise of a member whose process on this host has ended."""
    return PeerError(
        f"{name} is gone: its process on host {socket.gethostname()} has ended",
        remedy="look at its log, and at the kernel's (dmesg) for a process that was killed for "
        "memory; then restart the job",
    )


def own_process() -> tuple[str, int, int] | None:
    """This process: a name of the system that can see it, its pid and when it began. None where the
    system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    started = start_of(os.getpid())
    name = hashlib.sha256(f"{boot}{space}".encode()).hexdigest()[:16]
    return None if started is None else (name, os.getpid(), started)


def has_ended(process: tuple[str, int, int] | None, own: tuple[str, int, int] | None) -> bool:
    """Whether this system, which could see a process, sees it no more. own: `own_process`."""
    if process is None or own is None or own[0] != process[0]:
        return False
    return start_of(process[1]) != process[2]


def began(start: int | None) -> float | None:
    """When a process began, by this host's clock; None if that is not known. start: `start_of`."""
    if start is None:
        return None
    try:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    return time.time() - age


def start_of(pid: int) -> int | None:
    """When the process began, in the system's ticks; None if it has ended, though its parent may
    not know yet."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(numbers[18])
    except (OSError, ValueError, IndexError):
        return None


def _opened(pid: int, start: int) -> int | None:
    """A descriptor that can be read once the process has ended; None if it cannot be watched."""
    if pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return None
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if start_of(pid) != start:
        os.close(fd)
        return None
    return fd


PAUSES = (0.01, 0.2)  # seconds between two looks for a value: at first, at most
_BEAT = 1.0  # seconds between two signs of life


class Pulse:
    """
    Args:
        keys: of the meeting.
        name: what errors call a member.
        timeout: seconds without a sign of life until a member is given up.
    """

    def __init__(
        self, keys: Keys, member: int, count: int, name: Callable[[int], str], timeout: float
    ) -> None:
        self._keys = keys
        self._member = member
        self._count = count
        self._name = name
        self._timeout = timeout
        # on member 0: called with the progress of all
        self.tell: Callable[[int], None] | None = None
        self._own = 0
        self._waits = 0
        self._due = 0.0  # the time of the next sign of life
        self._signs: dict[str, int] = {}  # the others' progress, as last seen

    def beat(self, done: int) -> None:
        """Report this member's progress, at most once a second.

        Raises:
            CheckpointError: another member has failed.
        """
        self._own = done
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _BEAT
            self._keys.set(f"beat/{self._member}", done)
            self._refuse_failed()
            if self._member == 0:
                self._look(range(1, self._count))
        self._show()

    def fail(self, error: CheckpointError) -> None:
        """Make all members raise this at their next sign of life."""
        self._keys.first("failed", {"error": error.to_json()})

    def wait(self, keys: Keys, key: str, whose: Sequence[int]) -> Any:
        """Wait for a value while any of the members `whose` gives signs of life.

        Raises:
            PeerError: none of them gives a sign any more.
            CheckpointError: a member has failed with it.
        """
        last, pause = time.monotonic(), PAUSES[0]
        while True:
            found = keys.peek(key)  # c10d logs a warning on every wait that runs out
            if found is not None:
                return found
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
            if time.monotonic() >= self._due:
                self._refuse_failed()  # a failure outside this round
                self._waits += 1  # a sign of life for members that wait for this one
                keys.set(f"waits/{self._member}", self._waits)
                if self._look(whose):
                    last = time.monotonic()
                self._due = time.monotonic() + _BEAT
                self._show()
            if time.monotonic() - last > self._timeout:
                names = ", ".join(map(self._name, whose[:8]))
                raise PeerError(
                    f"{names} gave no sign of life for {self._timeout:.0f} s",
                    remedy="look at its log; raise timeout= if its storage is merely slow",
                )

    def _show(self) -> None:
        if self.tell is not None:
            others = sum(n for key, n in self._signs.items() if key.startswith("beat/"))
            self.tell(self._own + others)

    def _look(self, members: Sequence[int]) -> bool:
        """Whether one of these has made progress."""
        moved = False
        for key in (f"{kind}/{member}" for member in members for kind in ("beat", "waits")):
            found = self._keys.peek(key)
            if found is not None and self._signs.get(key) != found:
                self._signs[key] = found
                moved = True
        return moved

    def _refuse_failed(self) -> None:
        failed = self._keys.peek("failed")
        if failed is not None:
            raise error_from_json(failed["error"])
