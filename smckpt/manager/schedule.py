"""Decides which steps to save: each n-th, or one in an interval of seconds, given or computed from
measurements.

Clocks of hosts differ, so rank 0 decides by its own, and ahead of time: at step 100 it has already
announced, through the job's store, which steps up to 120 to save. A thread of each other rank reads
that. So a rank waits only if it is further ahead of rank 0.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import math
import statistics
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from smckpt.calls import while_alive
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.engine.saving.job import Timings
from smckpt.errors import PeerError, UsageError
from smckpt.manager.record import History, RunAttempt, history_of
from smckpt.meeting.group import Membership
from smckpt.meeting.keys import Keys
from smckpt.meeting.store import OverStore
from smckpt.storage import Storage

log = logging.getLogger("smckpt")

Interval = int | datetime.timedelta | Literal["auto"]

FIRST_SECONDS = 60.0  # until the first save of "auto", which measures
ASSUMED_SECONDS = 86400.0  # "auto" adds one assumed failure a day
POLL_SECONDS = 0.5
EAGER_SECONDS = 0.01  # between looks while a rank waits
RANKS_A_SECOND = 4000  # how many ranks may ask the store, which is one process
LOOKS_AHEAD = 6  # how often each rank reads the store between a decision and its step
FEWEST = 2  # steps ahead, however long they take
MEASURED = 5  # the median of this many saves counts
KEPT = 4  # past saves in a plan; ranks are at most two apart, since saves wait for each other
LEAVE_SECONDS = 5.0  # how long `close` waits for the thread, which may be in a call to the store


@dataclass(frozen=True)
class ChosenInterval:
    """seconds: from one save to the next. why: the reason, as text."""

    seconds: float
    why: str


def choose(stall: float, write: float, history: History) -> ChosenInterval:
    """Young's and Daly's rule. It gives the time between saves for which the least time is lost to
    blocked training and to failures together.

    Args:
        stall: seconds for which a save blocks training.
        write: seconds until a save is committed; the next one begins after that.
        history: of the run. One assumed failure a day is added.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    2006, equation 37; there the stall comes on top of it.
    """
    stall = max(stall, 1e-3)
    between = (ASSUMED_SECONDS + history.seconds) / (1 + history.failures)
    if stall < 2 * between:
        root = math.sqrt(stall / (2 * between))
        best = math.sqrt(2 * stall * between) * (1 + root / 3 + root * root / 9)
    else:
        best = between
    why = (
        f"a save holds training up for {stall:.3g} s and is committed after {write:.3g} s; one "
        f"failure in {between / 3600:.3g} h ({history.failures} in the {history.seconds / 3600:.3g}"
        " h of this run, and one assumed a day before it)"
    )
    return ChosenInterval(max(best, write), why)


@dataclass(frozen=True)
class Plan:
    """Rank 0's decision. generation: counts restores. settled: the last step that it covers.
    saves: the last few steps to save."""

    generation: int = 0
    settled: int = -1
    saves: tuple[int, ...] = ()


class Schedule:
    """Tells for each step whether to save it; the same on all ranks.

    Args:
        interval: see `CheckpointManager`.
        timeout: seconds that a rank waits for rank 0 to come near its step.
        of_run: the schedule that has the history of the run, where this is a second one.
    """

    def __init__(
        self,
        membership: Membership,
        interval: Interval | None,
        timeout: float,
        of_run: Schedule | None = None,
    ) -> None:
        self._membership = membership
        self._of_run = of_run
        self._named = "schedule" if of_run is None else "schedule-memory"
        self._every = refused(interval)
        self._auto = interval == "auto"
        self._timeout = timeout
        group = membership.group
        self._decides = group.index == 0
        self._began = time.monotonic()
        self._history = History()
        self._plan = Plan()
        self._asked = -1  # the step of the last `is_due`
        self._news = threading.Condition()
        self._waits = False
        self._error: Exception | None = None
        self._ended = False
        crowd = group.world_size / RANKS_A_SECOND
        self._pause, self._eager = max(POLL_SECONDS, crowd), max(EAGER_SECONDS, crowd)
        # rank 0's
        self._attempt = RunAttempt()
        self._passed: tuple[int, float] | None = None  # a step, and when
        self._step_seconds = 0.0
        self._since: float | None = None  # when the last save was, or will be
        self._measured: list[Timings] = []
        self._choice: ChosenInterval | None = None
        self._logged = math.inf
        self._alone = len(group.ranks) == 1
        self._thread: threading.Thread | None = None

    # -- the training thread ---------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether to save `step`.

        Raises:
            PeerError: rank 0 does not come near this step. JobStoreError: the store is gone.
        """
        self._attempt.note()
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return step % self._every == 0
        if self._thread is None and not self._alone:
            self._thread = threading.Thread(target=self._serve, name="smckpt-schedule", daemon=True)
            self._thread.start()
            atexit.register(while_alive(self.close))  # see `Watch`
        if self._decides:
            self._decide(step, self._every)
        elif step > self._plan.settled:
            self._wait(step)
        asked, self._asked = self._asked, step
        return any(asked < save <= step or save == step for save in self._plan.saves)

    def saved(self, step: int) -> None:
        """Record that a save of this step has begun, planned or not."""
        self._attempt.note()
        with self._news:
            if self._decides and all(save <= step for save in self._plan.saves):
                self._since = time.monotonic()

    def measured(self, timings: Timings) -> None:
        """Take the measurements of a committed save."""
        self._attempt.committed()
        if not (self._auto and self._decides):
            return
        with self._news:
            self._measured = [*self._measured, timings][-MEASURED:]
            stall = statistics.median(each.blocked - each.waited for each in self._measured)
            write = statistics.median(each.committed for each in self._measured)
            chosen = self._choice = choose(stall, write, self.history())
            self._every = chosen.seconds
            if 0.8 < chosen.seconds / self._logged < 1.25:
                return
            self._logged = chosen.seconds
        of = "" if self._of_run is None else "memory: "
        log.info('%sinterval="auto" is now %.3g s: %s', of, chosen.seconds, chosen.why)

    def goes_on(self, root: Storage, found: FoundCheckpoint | None) -> None:
        """Take the history of the run from the checkpoint that it goes on from, if this attempt has
        not trained yet. found: None: the run begins. Rank 0's history is recorded."""
        if self._plan.generation or self._asked >= 0 or self._since is not None:
            return
        self._history = History() if found is None else history_of(found)
        if self._decides:
            step = root if found is None else root.at(found.path)
            failed = self._attempt.began(root, step, "" if found is None else found.identity)
            self._history = replace(self._history, failures=self._history.failures + failed)

    def restored(self, step: int) -> None:
        """Start again from this step, on all ranks."""
        with self._news:
            self._plan = Plan(self._plan.generation + 1, step)
            self._asked = step
            self._passed = self._since = None
            self._news.notify_all()

    def history(self) -> History:
        """The history of the run until now."""
        if self._of_run is not None:
            return self._of_run.history()
        run = self._history
        return History(run.failures, run.seconds + time.monotonic() - self._began)

    def chosen(self) -> dict[str, Any] | None:
        """The interval that "auto" has chosen, for the manifest."""
        return None if self._choice is None else asdict(self._choice)

    def close(self) -> None:
        with self._news:
            self._ended = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)

    def _decide(self, step: int, seconds: float) -> None:
        """Decide for the steps that ranks may reach before they read the next decision."""
        with self._news:
            if self._error is not None:
                raise self._error
            now = time.monotonic()
            if self._passed is not None and step > self._passed[0]:
                took = max(now - self._passed[1], 1e-6) / (step - self._passed[0])
                known = self._step_seconds
                self._step_seconds = 0.8 * known + 0.2 * took if known else took
            self._passed = step, now
            if self._since is None:
                self._since = now
            ahead = FEWEST
            if self._step_seconds:
                ahead = max(FEWEST, math.ceil(LOOKS_AHEAD * self._pause / self._step_seconds))
            until = step + ahead
            if until - self._plan.settled < max(1, ahead // 2):
                return
            saves = [save for save in self._plan.saves if save <= step][-KEPT:]
            saves += [save for save in self._plan.saves if save > step]
            settled = self._plan.settled
            while True:
                left = self._since + seconds - now
                if left > 0 and not self._step_seconds:
                    break  # the duration of a step is not known yet
                at = settled + 1
                if left > 0:
                    at = max(at, step + math.ceil(left / self._step_seconds))
                if at > until:
                    break
                saves.append(at)
                settled = at
                self._since = now + (at - step) * self._step_seconds
            self._plan = Plan(self._plan.generation, until, tuple(saves))
            self._news.notify_all()

    def _wait(self, step: int) -> None:
        until = time.monotonic() + self._timeout
        with self._news:
            self._waits = True
            self._news.notify_all()
            try:
                while step > self._plan.settled and not self._ended:
                    if self._error is not None:
                        raise self._error
                    left = until - time.monotonic()
                    if left <= 0:
                        raise PeerError(
                            f"{self._membership.rank_name(0)} has not come near step {step} within "
                            f"{self._timeout:.0f} s; its clock decides which steps are saved",
                            remedy="look at its log; raise timeout= if it is merely slow",
                        )
                    self._news.wait(min(left, 1.0))
            finally:
                self._waits = False

    # -- the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            transport = self._membership.meeting(self._timeout).transport
            assert isinstance(transport, OverStore)
            (self._tell if self._decides else self._listen)(transport.keys)
        except Exception as error:  # any exception: the training thread waits for this one
            with self._news:
                self._error = error
                self._news.notify_all()

    def _tell(self, keys: Keys) -> None:
        adopted: Plan | None = None
        while not self._ended:
            plan = self._plan
            if plan != adopted and plan.settled >= 0:
                keys.set(f"{self._named}/{plan.generation}", asdict(plan))
                adopted = plan
            with self._news:
                if self._plan == plan and not self._ended:
                    self._news.wait()

    def _listen(self, keys: Keys) -> None:
        while not self._ended:
            adopted = keys.peek(f"{self._named}/{self._plan.generation}")
            with self._news:
                if adopted is not None and adopted["generation"] == self._plan.generation:
                    self._plan = Plan(
                        adopted["generation"], adopted["settled"], tuple(adopted["saves"])
                    )
                    self._news.notify_all()
                if not self._waits:
                    self._news.wait(self._pause)
            if self._waits:
                time.sleep(self._eager)


def refused(interval: object) -> int | float | None:
    """Steps as an integer, seconds as a float.

    Raises:
        UsageError: it is none of those that `CheckpointManager` takes.
    """
    if interval is None or (type(interval) is int and interval >= 1):
        return interval
    if isinstance(interval, datetime.timedelta) and interval.total_seconds() > 0:
        return interval.total_seconds()
    if interval == "auto":
        return FIRST_SECONDS
    raise UsageError(
        f"interval is {interval!r}",
        remedy='give a whole number of steps from 1, a datetime.timedelta, or "auto"',
    )
