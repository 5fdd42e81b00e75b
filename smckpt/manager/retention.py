"""Retention: the policies that keep committed steps, and the thread that deletes the others. And
other jobs that save below the same root at the same time.

Each manager has a claim, which is in the manifests of its steps: a generation, above those that it
finds when it begins, and a random name. A generation is the time at which it began, in milliseconds
since 1970, or one more than the highest that it finds: steps in memory may be away with their host
when the next manager begins. So of two that save at the same time, both know which claim
is the higher one. The job with the lower claim is the older one, or a process that outlived a
restart: it saves no more, and says so. It learns of the other from steps that have come since.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from smckpt.calls import started, undisturbed
from smckpt.checkpoint.commits.discover import FoundCheckpoint, found_at
from smckpt.checkpoint.commits.run_directory import RetentionPolicy, RunDirectory, Whole
from smckpt.errors import CheckpointError, StorageError, UsageError
from smckpt.manager.record import claim_of, mark_of

log = logging.getLogger("smckpt")

_LOOKS_BACK = 16  # steps whose generation counts at the start: those of the latest manager


@dataclass(frozen=True)
class Newest:
    """Keeps the newest steps.

    "Newest" is taken both by step and by time. So after a run resumed from an older step, its new
    checkpoints stay as well as those it saved before.
    """

    count: int

    def __post_init__(self) -> None:
        refuse_count("Newest", self.count, 1)

    def kept(self, steps: Sequence[FoundCheckpoint], whole: Whole) -> list[FoundCheckpoint]:
        by_step = sorted(steps, key=lambda one: (one.step or 0, one.committed_at))
        by_time = sorted(steps, key=lambda one: one.committed_at)
        return [
            one
            for order in (by_step, by_time)
            for one in first_whole(order[::-1], self.count, whole)
        ]


@dataclass(frozen=True)
class Every:
    """Keeps the steps that are multiples of a number."""

    steps: int

    def __post_init__(self) -> None:
        refuse_count("Every", self.steps, 1)

    def kept(self, steps: Sequence[FoundCheckpoint], _: Whole) -> list[FoundCheckpoint]:
        return [one for one in steps if (one.step or 0) % self.steps == 0]


@dataclass(frozen=True)
class Best:
    """Keeps the steps with the lowest ("min") or highest ("max") values of a metric, one of the
    `metrics` that `CheckpointManager.save` was given."""

    metric: str
    count: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or self.mode not in ("min", "max"):
            raise UsageError(
                f"the policy is {self!r}",
                remedy='give the metric, how many, and "min" or "max", such as Best("loss", 3)',
            )
        refuse_count("Best", self.count, 1)

    def kept(self, steps: Sequence[FoundCheckpoint], whole: Whole) -> list[FoundCheckpoint]:
        return first_whole(self.ranked(steps), self.count, whole)

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


def first_whole(
    found: Sequence[FoundCheckpoint], count: int, whole: Whole
) -> list[FoundCheckpoint]:
    """The first `count` that are whole, and all others before the last of them."""
    stay = []
    for one in found:
        if count == 0:
            break
        stay.append(one)
        count -= whole(one)
    return stay


def refuse_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise UsageError(f"{name} is {value!r}", remedy=f"give a whole number from {least}")


def policies_of(
    keep_last_n: int | None, keep: Iterable[RetentionPolicy]
) -> tuple[RetentionPolicy, ...]:
    """The policies of a manager's arguments. Without any, all steps stay.

    Raises:
        UsageError: an argument is no policy, or has no effect.
    """
    given: tuple[object, ...] = tuple(keep) if isinstance(keep, Iterable) else (None,)
    for one in given:
        if isinstance(one, type) or not callable(getattr(one, "kept", None)):
            raise UsageError(
                f"keep is {keep!r}",
                remedy='give policies in a tuple, such as (Every(1000), Best("loss", 3))',
            )
    if keep_last_n is not None:
        refuse_count("keep_last_n", keep_last_n, 0)
        return (Newest(max(keep_last_n, 1)), *keep)  # no rule deletes the newest
    if given:
        raise UsageError(
            "keep has no effect without keep_last_n: all checkpoints are kept",
            remedy="give keep_last_n= too (0 for the newest alone), or leave keep out",
        )
    return ()


@dataclass(frozen=True, order=True)
class Claim:
    """generation: above those of all managers that saved here before. name: of this manager."""

    generation: int
    name: str


class Rivals:
    """What rank 0 knows of them. The training thread calls `refuse`, retention `look`."""

    def __init__(self, steps: RunDirectory) -> None:
        self._steps = steps
        self._claim: Claim | None = None
        self._before: frozenset[str] = frozenset()  # directories of the steps when we began
        self._others: dict[str, str] = {}  # directory → the run that saved there since
        self._ours: frozenset[str] = frozenset()  # directories of our steps that are still there
        self._last: str | None = None  # that of our last step
        self._over: StorageError | None = None

    def claim(self) -> dict[str, Any] | None:
        """For the manifests."""
        return None if self._claim is None else asdict(self._claim)

    def refuse_older(self) -> None:
        """
        Raises:
            StorageError: a later job saves below this root; or its store fails.
        """
        if self._claim is None:
            subpaths = [subpath for _, subpath in self._steps.directories()]
            self._before = frozenset(subpaths)
            latest = [found for one in subpaths[:_LOOKS_BACK] if (found := self._found(one))]
            found_before = max((claim_of(found)[0] for found in latest), default=0)
            generation = max(found_before + 1, time.time_ns() // 1_000_000)
            self._claim = Claim(generation, secrets.token_hex(6))
        if self._over is not None:
            raise self._over

    def refuse(self, subpath: str, run: str) -> None:
        """Refuse a save to this directory, if another job has the root, or another run the step.

        Raises:
            StorageError: a later job saves below this root.
            UsageError: a step of another run is there; it would be lost.
        """
        self.refuse_older()
        owner = self._others.get(subpath)
        if subpath in self._before and subpath not in self._ours:
            found = self._found(subpath)
            owner = None if found is None else mark_of(found)
        if owner not in (None, run):
            raise UsageError(
                f"a step of another run ({owner}) is there, which this save would replace",
                remedy="restore it first, then this run goes on from it; or give this run a root "
                "of its own",
                path=self._steps.root.join(subpath).url,
            )

    def look(self, subpath: str) -> bool:
        """After a commit of ours: whether this job may go on saving and deleting here. Without a
        claim it cannot know, and deletes nothing; its next save claims.

        Raises:
            StorageError: the store fails to list the root.
        """
        again = [] if self._last is None else [self._last]  # who saves to the same is found there
        present = [other for _, other in self._steps.directories()]
        self._last = subpath
        self._ours = self._ours.intersection(present) | {subpath}
        self._others = {
            other: run for other, run in self._others.items() if other in {*present, subpath}
        }
        if self._claim is None:
            return False
        fresh = [other for other in present if other not in self._before]
        known = {*self._ours, *self._others}
        for other in [*again, subpath, *(other for other in fresh if other not in known)]:
            if (found := self._found(other)) is None:
                continue
            claim = Claim(*claim_of(found))
            if not claim.name or claim == self._claim:
                continue
            if other not in self._others:
                log.warning(
                    "another job saves below %s too: step %s is not of this one. Give each a root "
                    "of its own",
                    self._steps.root.url,
                    found.step,
                )
            self._others[other] = mark_of(found) or ""
            if claim > self._claim:
                self._over = StorageError(
                    f"a later job has saved step {found.step} below this root: this one saves no "
                    "more here",
                    remedy="end the older of the two jobs; give each its own root if both are "
                    "meant to run",
                    path=found.path,
                )
        return self._over is None

    def _found(self, subpath: str) -> FoundCheckpoint | None:
        try:
            return found_at(self._steps.root.join(subpath))
        except CheckpointError:  # damaged, or deleted meanwhile: it tells nothing
            return None


class Retention:
    """Deletes the checkpoints that no policy keeps, in a thread of its own, on one rank.

    It runs after each commit of this run and at no other time, so this run has committed the newest
    checkpoint. A deletion that fails is tried again after the next commit.

    Args:
        run: the run whose checkpoints it may delete. None: all runs.
        rivals: other jobs; once a later one saves here, nothing is deleted.
    """

    def __init__(
        self,
        steps: RunDirectory,
        policies: Sequence[RetentionPolicy],
        run: str | None,
        rivals: Rivals | None = None,
    ) -> None:
        self.run = run
        self._rivals = rivals
        self._steps = steps
        self._policies = policies
        self._inbox: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending = False  # nobody waits any more, and the process may end

    def nbytes(self) -> int:
        """The size of the steps that this run has saved."""
        return sum(found.nbytes for found in self._steps.all() if mark_of(found) == self.run)

    def committed(self, subpath: str) -> None:
        """This run has committed a checkpoint there. Returns at once."""
        if self._thread is None:
            self._ending = False
            thread = threading.Thread(target=self._serve, name="smckpt-retention", daemon=True)
            if not started(thread):
                return  # the next run does the rest
            self._thread = thread
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
                undisturbed(log.warning, "old checkpoints stay for now: %s", error)
            except Exception:  # if the thread died, the disk would fill silently
                if self._ending or not threading.main_thread().is_alive():
                    return  # at its exit Python starts no more threads; the next run goes on
                undisturbed(log.exception, "old checkpoints stay for now")

    def tidy(self, newest: str) -> list[FoundCheckpoint]:
        """Delete the checkpoints that no policy keeps; returns those deleted.

        Args:
            newest: the directory of the newest commit, relative to the root.
        """
        return self._steps.keep(
            self._policies, newest, lambda one: self.run in (None, mark_of(one))
        )
