"""Retention: the rule that keeps committed steps, and the thread that deletes the others."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from smckpt.checkpoint.commits.contents import what_is_missing
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.run_directory import RunDirectory
from smckpt.errors import CheckpointError, UsageError
from smckpt.manager.keeping.rivals import Rivals
from smckpt.manager.record import mark_of

__all__ = ["Best", "Keep", "Retention"]

log = logging.getLogger("smckpt")

Whole = Callable[[FoundCheckpoint], bool]


@dataclass(frozen=True)
class Best:
    """The n checkpoints with the lowest ("min") or highest ("max") value of a metric."""

    metric: str
    mode: str
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or self.mode not in ("min", "max"):
            raise UsageError(
                f"keep_best is {(self.metric, self.mode, self.count)!r}",
                remedy='give (metric, "min" or "max", how many), such as ("loss", "min", 3)',
            )
        _refuse_count("keep_best", self.count, 1)

    def ranked(self, found: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Those that have the metric, best first; of two equal ones the newer first."""
        sign = 1.0 if self.mode == "min" else -1.0
        scored = []
        for one in found:
            metrics = one.metadata.get("metrics")
            value = metrics.get(self.metric) if isinstance(metrics, dict) else None
            if isinstance(value, (int, float)) and math.isfinite(value):
                scored.append((sign * value, -(one.step or 0), one))
        return [one for *_, one in sorted(scored, key=lambda each: each[:2])]


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a run stay; see `CheckpointManager`."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.last is not None:
            _refuse_count("keep_last_n", self.last, 0)
        if self.every is not None:
            _refuse_count("keep_every", self.every, 1)
            if self.last is None:
                raise UsageError(
                    "keep_every has no effect without keep_last_n: all checkpoints are kept",
                    remedy="give keep_last_n= too, or leave keep_every out",
                )

    def kept(self, found: Sequence[FoundCheckpoint], whole: Whole) -> set[str]:
        """The paths of the checkpoints to keep. Only whole ones count; one that is not whole stays
        if it lies between those that count.

        "Newest" is taken both by step and by time. So after a run resumed from an older step, its
        new checkpoints stay as well as those it saved before.
        """
        if self.last is None:
            return {one.path for one in found}
        by_step = sorted(found, key=lambda one: (one.step or 0, one.committed_at))
        by_time = sorted(found, key=lambda one: one.committed_at)
        stay: set[str] = set()
        for order in (by_step, by_time):
            stay |= _first(order[::-1], max(self.last, 1), whole)
        if self.every is not None:
            stay |= {one.path for one in found if (one.step or 0) % self.every == 0}
        if self.best is not None:
            stay |= _first(self.best.ranked(found), self.best.count, whole)
        return stay


def _first(found: Sequence[FoundCheckpoint], count: int, whole: Whole) -> set[str]:
    """The first `count` that are whole, and all others before the last of them."""
    stay: set[str] = set()
    for one in found:
        if count == 0:
            break
        stay.add(one.path)
        count -= whole(one)
    return stay


def _refuse_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise UsageError(f"{name} is {value!r}", remedy=f"give a whole number from {least}")


class Retention:
    """Deletes the checkpoints that the rule does not keep, in a thread of its own, on one rank.

    It runs after each commit of this run and at no other time, so this run has committed the newest
    checkpoint. A deletion that fails is tried again after the next commit.

    Args:
        run: the run whose checkpoints it may delete. None: all runs.
        rivals: other jobs; once a later one saves here, nothing is deleted.
    """

    def __init__(
        self, steps: RunDirectory, keep: Keep, run: str | None, rivals: Rivals | None = None
    ) -> None:
        self.run = run
        self._rivals = rivals
        self._steps = steps
        self._keep = keep
        self._inbox: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finished = False  # the deletions that were cut short
        self._ending = False  # nobody waits any more, and the process may end

    def nbytes(self) -> int:
        """The size of the steps that this run has saved."""
        return sum(found.nbytes for found in self._steps.all() if mark_of(found) == self.run)

    def committed(self, subpath: str) -> None:
        """This run has committed a checkpoint there. Returns at once."""
        if self._thread is None:
            self._ending = False
            self._thread = threading.Thread(
                target=self._serve, name="smckpt-retention", daemon=True
            )
            self._thread.start()
        self._inbox.put(subpath)

    def close(self, timeout: float) -> None:
        """Wait for the deletions, for at most `timeout` seconds. The next run does the rest."""
        if self._thread is None:
            return
        self._inbox.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._ending = True
            log.warning("old checkpoints are not all deleted yet: the next run deletes the rest")
        self._thread = None

    def _serve(self) -> None:
        ended = False
        while not ended and not self._ending:
            waiting = [self._inbox.get()]
            while not self._inbox.empty():
                waiting.append(self._inbox.get())
            ended = None in waiting
            subpaths = [subpath for subpath in waiting if subpath is not None]
            try:
                for subpath in subpaths:
                    self._steps.changed(subpath)
                looks = [self._rivals is None or self._rivals.look(subpath) for subpath in subpaths]
                if looks and all(looks):  # an earlier one may be deleted already
                    self.tidy(subpaths[-1])
            except CheckpointError as error:
                log.warning("old checkpoints stay for now: %s", error)
            except Exception:  # if the thread died, the disk would fill silently
                if self._ending or not threading.main_thread().is_alive():
                    return  # at its exit Python starts no more threads; the next run goes on
                log.exception("old checkpoints stay for now")

    def tidy(self, newest: str) -> list[FoundCheckpoint]:
        """Delete the checkpoints that the rule does not keep; returns those deleted.

        Args:
            newest: the directory of the newest commit, relative to the root.
        """
        gone = [one for one in self.doomed(newest) if self.remove(one)]
        if not self._finished and self._keep.last is not None:
            self._finished = self._steps.finish()
        return gone

    def doomed(self, newest: str | None = None) -> list[FoundCheckpoint]:
        """The checkpoints that the rule does not keep, oldest first; none where the newest is not
        whole.

        Args:
            newest: the directory that must be whole. None: that of the newest step.
        """
        if self._keep.last is None:
            return []
        found = [one for one in self._steps.all() if self.run in (None, mark_of(one))]
        subpaths = {self._steps.subpath_of(one): one for one in found}
        one = subpaths.get(newest) if newest is not None else (found[-1] if found else None)
        if one is None:
            log.warning("old checkpoints stay: the newest one is not found")
            return []
        checked: dict[str, bool] = {}

        def whole(one: FoundCheckpoint) -> bool:
            if one.path not in checked:
                checked[one.path] = self._whole(one)
            return checked[one.path]

        if not whole(one):
            return []  # `whole` has logged why
        # The newest commit stays, also where its step and its clock make it look like an old one:
        # the run went back to an older step, and the clock was set back.
        stay = self._keep.kept(found, whole) | {one.path}
        return [one for one in found if one.path not in stay]

    def _whole(self, one: FoundCheckpoint) -> bool:
        """Whether every file that the checkpoint names is there, in its full size."""
        try:
            missing = what_is_missing(
                self._steps.root.join(self._steps.subpath_of(one)), one.identity
            )
        except CheckpointError as error:
            missing = str(error)
        if missing:
            log.warning("%s is not whole and does not count as kept: %s", one, missing)
        return not missing

    def remove(self, one: FoundCheckpoint) -> bool:
        """Delete it unless a reader has pinned it; returns whether it was deleted."""
        try:
            return self._steps.remove(one)
        except CheckpointError as error:
            log.warning("%s stays for now: %s", one, error)
            self._finished = False
            return False
