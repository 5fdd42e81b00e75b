"""A notice that the job must end: one rank receives a signal, and all ranks agree on a last step.

A signal handler may only set a flag. Each rank has a thread that watches its own flag, and looks in
the job's store for a notice of another rank. When the thread finds either, it brings the step that
its rank has passed to a round. From then on the rank's loop waits for the decision at its next
step. The last step is the first one after the furthest that any rank has passed. So no rank is
beyond it, no rank waits for another's training, and a rank inside a collective still answers. If a
rank does not answer, no further step can be saved, and the others end at once. When the grace time
is over, each rank ends, whatever it is waiting for.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from smckpt.calls import end_process, undisturbed, while_alive
from smckpt.errors import UsageError
from smckpt.manager.schedule import LEAVE_SECONDS, POLL_SECONDS, RANKS_A_SECOND
from smckpt.meeting.group import Membership
from smckpt.meeting.round import Meeting
from smckpt.meeting.store import OverStore

log = logging.getLogger("smckpt")

GRACE = {"SIGTERM": 25.0}  # torchrun and Kubernetes kill 30 seconds after it
_SAVE_FACTOR = 1.5  # a last save may take so many times as long as the one before
LONG_GRACE = 110.0  # SageMaker gives two minutes; with Slurm the user chooses the time


@dataclass(frozen=True)
class Signals:
    """Signals that ask a job to end, and how it ends.

    Args:
        names: the signals, such as "SIGTERM". Without any, no handler is installed.
        grace: seconds from the signal until the process ends, whatever it is doing. After
            `CheckpointManager.close` it holds in the exit handlers alone. None: 25 after SIGTERM
            (torchrun and Kubernetes kill 30 s after it), 110 after any other signal.
        exit_status: exit status of a process that ends after a signal.
    """

    names: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    grace: float | None = None
    exit_status: int = 143

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not all(
            name in signal.Signals.__members__ for name in self.names
        ):
            raise UsageError(
                f"signals is {self.names!r}",
                remedy='give their names in a tuple, such as ("SIGTERM", "SIGUSR1")',
            )
        if self.grace is not None and not self.grace > 0:
            raise UsageError(f"grace is {self.grace!r}", remedy="give seconds above 0")
        if type(self.exit_status) is not int or not 0 <= self.exit_status < 256:
            raise UsageError(f"exit_status is {self.exit_status!r}", remedy="give 0 to 255")
        object.__setattr__(self, "names", tuple(self.names))


def signals_of(given: Signals | Sequence[str]) -> Signals:
    return given if isinstance(given, Signals) else Signals(given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Notice:
    """A signal that a rank received. grace: seconds from the signal until the process ends."""

    signal: str
    rank: int
    host: str
    grace: float


class Watch:
    """This rank's flag, its thread, and the decision of the ranks.

    Args:
        timeout: seconds for the round of the ranks.
    """

    def __init__(self, membership: Membership, signals: Signals, timeout: float) -> None:
        self._membership = membership
        self._grace, self._status = signals.grace, signals.exit_status
        self._timeout = timeout
        self._flag: str | None = None  # set by the handler
        self.notice: Notice | None = None
        self.save_seconds: float | None = None  # of this run's last save, until its commit
        self._lock = threading.Lock()
        self._passed = -1
        self._holds = False
        self._after: int | None = None  # the decision
        self._decided = threading.Event()
        self._ended = threading.Event()
        self._saved = False
        self._deaf = False
        self._before: dict[int, Any] = {}
        self._held = threading.local()  # during a fork: the signals that its thread had blocked
        self._pipe: tuple[int, ...] = ()
        self._thread: threading.Thread | None = None
        self._holder: threading.Thread | None = None
        self._until = 0.0  # when the grace time ends; 0 before a signal
        self._begun = threading.Event()  # the grace time; or the watch is closed
        self._pid = os.getpid()
        world = membership.group.world_size
        self._pause = max(POLL_SECONDS, world / RANKS_A_SECOND)
        if not signals.names:
            return
        self._install([signal.Signals[name] for name in signals.names])
        os.register_at_fork(
            before=while_alive(self.hold_signals),
            after_in_parent=while_alive(self.release_signals),
            after_in_child=while_alive(self.forget),
        )
        self._thread = threading.Thread(target=self._serve, name="smckpt-notice", daemon=True)
        self._thread.start()
        # In Python 3.12 exit handlers start no thread, and a signal may come in them.
        self._holder = threading.Thread(target=self._hold_grace, name="smckpt-grace", daemon=True)
        self._holder.start()
        # a program that ends with the thread in a call of torch's store may be aborted
        atexit.register(while_alive(self.close))

    # -- the training thread ---------------------------------------------------------------------

    def is_last(self, step: int) -> bool:
        """Whether the job ends after `step`, which this rank's loop has reached. After a notice
        this waits for the decision of the ranks.
        """
        with self._lock:
            if not self._holds:
                self._passed = max(self._passed, step)
                return False
        if step > self._passed:  # until the thread decides, gives up or ends the process
            self._decided.wait()
        return self._after is not None and step > self._after

    def leave_saved(self, step: int) -> NoReturn:
        """End this rank, because the last step is committed.

        Raises:
            SystemExit: always.
        """
        self._saved = True
        if self._membership.group.index == 0:
            log.warning("step %d is committed, the last: exit status %d", step, self._status)
        raise SystemExit(self._status)

    def close(self) -> None:
        """Restore the earlier signal handlers. The program may go on; the grace time holds again in
        its exit handlers. In these nothing is closed after a signal, so that the time holds on."""
        exiting = not threading.main_thread().is_alive()
        if exiting and (self._flag is not None or self.notice is not None):
            return
        self._ended.set()
        main = threading.current_thread() is threading.main_thread()
        if main:
            self._restore()
        if self._pipe:
            os.write(self._pipe[1], b"\0")  # the thread waits for it
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)
            if main and not self._thread.is_alive():
                for end in self._pipe:
                    os.close(end)
                self._pipe = ()
        self._begun.set()
        if self._holder is not None and not (self._until or self._flag):
            self._holder.join(LEAVE_SECONDS)

    def _start_grace(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._begun.set()

    def _hold_grace(self) -> None:
        """End the process when the grace time is over. If the manager is closed before, the program
        may go on. Its exit handlers get what is left of the time, or as much again."""
        self._begun.wait()
        if not (self._until or self._flag):
            return  # closed without a signal
        if self._ended.wait(max(self._until - time.monotonic(), 0)):
            threading.main_thread().join()
            left = self._until - time.monotonic()
            time.sleep(left if left > 0 else self._grace_after(self._flag or ""))
        self._end("the time is over")

    def _grace_after(self, name: str) -> float:
        """The seconds after a signal."""
        return GRACE.get(name, LONG_GRACE) if self._grace is None else self._grace

    # -- the signal ------------------------------------------------------------------------------

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pipe:
            signal.set_wakeup_fd(-1)
        self._before = {}

    # A signal to a forked child (such as a data loader's worker) is the child's own. Through the
    # pipe, which it shares with its parent, the parent would take it for one to itself, and the
    # child would not end. So signals wait until the child has forgotten the watch.

    def hold_signals(self) -> None:
        self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(self._before))

    def release_signals(self) -> None:
        mask = getattr(self._held, "mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def forget(self) -> None:
        self._restore()
        for end in self._pipe:
            os.close(end)
        self._pipe, self._thread, self._holder = (), None, None
        self.release_signals()

    def _install(self, numbers: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning("the manager receives no signals: it was made outside the main thread")
            return
        for number in numbers:
            self._before[number] = signal.signal(number, self._heard)
        # A Python handler waits for the main thread, which may be in a collective that never ends.
        # The interpreter itself writes to the pipe at once.
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        others = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if others != -1:  # an event loop uses this descriptor and needs the signals more
            signal.set_wakeup_fd(others)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._deaf:  # no thread would decide, so the signal has its default effect
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._flag = signal.Signals(number).name
        self._holds = True  # without the lock, which the interrupted code may hold
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    # -- the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            notice = self._first_notice()
            if notice is not None and not self._ended.is_set():
                self._obey(notice)
        except Exception as error:  # any exception: a training thread may wait for this one
            self._deaf = True
            if self._ended.is_set():
                return
            if self._flag is not None or self.notice is not None:
                self._end(f"the ranks cannot agree on a last step: {error}")
            log.warning("this rank no longer learns of signals on other ranks: %s", error)
        finally:
            self._deaf = self._after is None
            self._decided.set()

    def _first_notice(self) -> Notice | None:
        """The first notice that any rank received."""
        meeting = self._membership.meeting(self._timeout)
        while not self._ended.is_set():
            if not self._pipe:
                self._ended.wait(self._pause)
            elif self._flag is None and select.select(self._pipe[:1], (), (), self._pause)[0]:
                for number in os.read(self._pipe[0], 64):
                    if number in self._before:
                        self._flag = signal.Signals(number).name
            mine: dict[str, Any] | None = None
            if self._flag is not None:
                grace = self._grace_after(self._flag)
                rank = self._membership.group.rank
                mine = vars(Notice(self._flag, rank, socket.gethostname(), grace))
            first = _earliest_notice(meeting, mine)
            if first is not None:
                return Notice(**first)
        return None

    def _obey(self, notice: Notice) -> None:
        self.notice = notice
        self._start_grace(notice.grace)
        undisturbed(
            log.log,
            logging.WARNING if self._membership.group.index == 0 else logging.INFO,
            "%s came to rank %d on %s: the ranks agree on a last step, save it and end with exit "
            "status %d within %.0f s",
            notice.signal,
            notice.rank,
            notice.host,
            self._status,
            notice.grace,
        )

        def hold() -> int:
            """Make this rank's loop wait at its next step; returns the step it has passed."""
            with self._lock:
                self._holds = True
                return self._passed

        meeting = self._membership.meeting(self._timeout)
        self._after = meeting.round(
            "last",
            hold,
            lambda brought: max(brought().values()),
            timeout=self._patience(notice.grace),
        )

    def _patience(self, grace: float) -> float:
        """How many seconds the ranks may take to agree: what the save leaves of the time."""
        if self.save_seconds is None:
            return grace / 3
        if self.save_seconds > grace and self._membership.group.index == 0:
            undisturbed(
                log.warning,
                "the run's last save took %.3g s until its commit, and %.3g s are left: the next "
                "run may have to restore an older step. Pass signals=Signals(grace=) if your "
                "scheduler gives more time",
                self.save_seconds,
                grace,
            )
        return max(grace - max(_SAVE_FACTOR * self.save_seconds, grace / 3), grace / 10)

    def _end(self, why: str) -> None:
        if not self._saved:
            undisturbed(
                log.error,
                "%s. The newest committed step is what the next run restores; exit status %d",
                why,
                self._status,
            )
        end_process(self._status)


def _earliest_notice(meeting: Meeting, mine: dict[str, Any] | None) -> dict[str, Any] | None:
    """The notice that came first: an earlier one, else `mine`."""
    transport = meeting.transport
    if mine is not None:
        first: dict[str, Any] = meeting.first("notice", mine)
        return first
    return transport.keys.peek("notice") if isinstance(transport, OverStore) else None
