"""Kills a script at the calls of its saves and resumes it: what `smckpt chaos` does.

The script runs once without a kill, which counts the moments. Then, for each chosen moment, it runs
until that moment, is killed, and runs again to its end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from smckpt.errors import CheckpointError, UsageError
from smckpt.run.moments import Moments
from smckpt.run.trials import (
    NOT_DETERMINISTIC,
    RunWatch,
    Script,
    TookTooLong,
    compare_runs,
    difference_text,
    failed,
    refuse_nameless,
)
from smckpt.storage import Access, Storage
from smckpt.storage.urls import disk_path

EXACT, LOST, WRONG = "exact", "lost a step", "not exact"
ANEW, CRASHED, HUNG, MISSED = "did not resume", "crashed", "hung", "not reached"
CLASSES = (EXACT, LOST, WRONG, ANEW, CRASHED, HUNG, MISSED)
_SLOWER = 10  # a resume may take so many times as long as the uninterrupted run
_LEAST = 60.0  # seconds that a resume may take in any case
_TAIL = 8  # lines of the output of a run that failed


@dataclass(frozen=True)
class Resume:
    """A kill and its resume.

    Args:
        moment: counted from 1.
        call: the call before which all processes were killed.
        committed: the newest step that was committed then.
        outcome: one of `CLASSES`.
        why: what is wrong, or "".
    """

    moment: int
    call: str
    committed: int | None
    outcome: str
    why: str = ""


@dataclass(frozen=True)
class ChaosResult:
    """The outcome.

    Args:
        moments: how many the uninterrupted run had.
        step: its last step.
        resumes: in the order of their moments.
    """

    moments: int
    step: int
    resumes: tuple[Resume, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Outcome → how many resumes had it, in the order of `CLASSES`."""
        found = Counter(one.outcome for one in self.resumes)
        return {outcome: found[outcome] for outcome in CLASSES if found[outcome]}

    @property
    def killed(self) -> int:
        return sum(one.outcome != MISSED for one in self.resumes)

    @property
    def exact(self) -> bool:
        return self.counts.get(EXACT, 0) == self.killed > 0

    @property
    def lines(self) -> list[str]:
        """One for each outcome, with its first example, and one about all."""
        found = []
        for outcome, count in self.counts.items():
            text = f"{count:6}  {outcome}"
            if outcome not in (EXACT, MISSED):
                first = next(one for one in self.resumes if one.outcome == outcome)
                text += f": moment {first.moment}, before {first.call}: {first.why}"
            found.append(text)
        what = f"killed at {self.killed} of {self.moments} moments"
        if self.exact:
            end = f"the run has each time ended at step {self.step} with the uninterrupted state"
            return [*found, f"exact: {what}, {end}"]
        return [*found, f"not exact: {what}, {self.counts.get(EXACT, 0)} resumes are exact"]

    def to_json(self) -> dict[str, Any]:
        return {
            "exact": self.exact, "moments": self.moments, "killed": self.killed,
            "step": self.step, "counts": self.counts, "line": self.lines[-1],
            "resumes": [asdict(one) for one in self.resumes],
        }  # fmt: skip


@dataclass
class Chaos(Script):
    """The runs of a script, of which the first is not killed. If no time is given, the others have
    ten times as long as that took.

    Args:
        moments: at how many it is killed, evenly spread; None: at all.

    whole: what the uninterrupted run has committed.
    """

    moments: int | None = None
    whole: RunWatch = field(init=False)

    def trials(self) -> ChaosResult:
        """
        Raises:
            UsageError: nothing was found out: the kernel cannot count moments, the uninterrupted
                run failed, committed nothing or had no moment, or a run failed before its kill.
            CheckpointError: a checkpoint of the uninterrupted run cannot be read.
        """
        with self.scratched():
            self.say("the uninterrupted run, which counts the moments")
            count = self._uninterrupted()
            chosen = _spread(count, count if self.moments is None else self.moments)
            self.say(f"{count} moments; killed at {len(chosen)} of them")
            resumes = []
            for number, moment in enumerate(chosen, 1):
                one = self._killed_at(moment)
                resumes.append(one)
                why = f": {one.why}" if one.why else ""
                moment_text = f"moment {moment}" + (f", before {one.call}" if one.call else "")
                self.say(f"{number} of {len(chosen)}, {moment_text}: {one.outcome}{why}")
        if all(one.outcome == MISSED for one in resumes):
            raise UsageError(
                "no run had as many moments as the uninterrupted one",
                remedy="make the script do the same in each run",
            )
        return ChaosResult(count, self.whole.last, tuple(resumes))

    def _uninterrupted(self) -> int:
        """Returns how many moments it had."""
        self.whole = self.watch("uninterrupted")
        with self._output("uninterrupted") as log, Moments(self.whole.root) as moments:
            status = self._start(self.whole, moments, log, lambda: self.whole.due() and False)
            if status:
                self.say(_tail(log))
        self.whole.look()
        self.refuse_end(self.whole, "the uninterrupted run", status)
        refuse_nameless(self.whole.found)
        if not moments.count:
            raise UsageError(
                "the run has committed steps, and no call of it was seen",
                remedy="if it saves to S3, let SMCKPT_S3_ENDPOINT name the endpoint",
                path=self.whole.root,
            )
        if self.timeout is None:
            self.limit = max(_LEAST, _SLOWER * self.whole.elapsed)
        return moments.count

    def _killed_at(self, moment: int) -> Resume:
        name = f"killed-{moment:06}"
        call = self._kill(name, moment)
        if not call:
            return Resume(moment, "", None, MISSED)
        resumed = self.watch(name)
        committed = max(resumed.steps, default=None)
        outcome, why = self._resumed(name, resumed, committed)
        if outcome == EXACT and (path := disk_path(resumed.root)) is not None:
            shutil.rmtree(path, ignore_errors=True)
        elif outcome == EXACT:
            with contextlib.suppress(CheckpointError):  # what stays costs space only
                _empty(Access().open(resumed.root))
        return Resume(moment, call, committed, outcome, why)

    def _kill(self, name: str, moment: int) -> str:
        """Run until the moment. Returns the call before which it was killed, or ""."""
        watch = self.watch(name)
        store = Access().open(watch.root)
        if store.list() or store.list_dirs():  # it would be deleted after the run
            raise UsageError(
                "there is something here already", remedy="pass a new --out", path=watch.root
            )
        with self._output(name) as log, Moments(watch.root, moment) as moments:

            def until() -> bool:
                watch.refuse_late()
                return moments.reached()

            status = self._start(watch, moments, log, until)
            if status and not moments.stopped:
                self.say(_tail(log))
                raise failed(
                    f"the run that was to be killed at moment {moment} ended with status {status} "
                    "before it"
                )
        return moments.stopped

    def _resumed(self, name: str, watch: RunWatch, committed: int | None) -> tuple[str, str]:
        with self._output(name) as log:
            try:
                status = self.run(watch, lambda: watch.due() and False, output=log)
            except TookTooLong as late:
                return HUNG, late.message
            if status:
                return CRASHED, f"status {status}; its last lines: {_tail(log)}"
        watch.look()
        why = ""
        for again in watch.fresh_steps[:1]:
            if committed is not None and again <= committed:
                why = (
                    f"step {committed} was committed, and after its restart it saved {again} again"
                )
                if again <= self.whole.fresh_steps[0]:
                    return ANEW, why
        last = max(watch.steps, default=None)
        if last != self.whole.last:
            return WRONG, f"its last step is {last} and not {self.whole.last}"
        try:
            compared = compare_runs(watch, self.whole, self.ignore)
        except CheckpointError as error:
            return WRONG, error.message
        assert compared is not None
        step, found = compared
        if not found.equal:
            text = difference_text(step, found)
            if committed is not None and step <= committed and not why:
                text = f"{NOT_DETERMINISTIC}; {text}"
            return WRONG, text
        return (LOST, why) if why else (EXACT, "")

    def _start(self, watch: RunWatch, moments: Moments, log: int, until: Callable[[], bool]) -> int:
        return self.run(watch, until, wrap=moments.wrap, inherited=[moments.inherited], output=log)

    @contextlib.contextmanager
    def _output(self, name: str) -> Iterator[int]:
        """A file for the output of a run. A resume follows its kill."""
        path = os.path.join(self.scratch, f"{name}.log")
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            yield fd
        finally:
            os.close(fd)


def _spread(count: int, wanted: int) -> list[int]:
    """Moments, the first and the last among them."""
    if wanted >= count:
        return list(range(1, count + 1))
    if wanted == 1:
        return [(count + 1) // 2]
    return [1 + round(index * (count - 1) / (wanted - 1)) for index in range(wanted)]


def _tail(log: int) -> str:
    """The last lines of a run's output."""
    size = os.fstat(log).st_size
    text = os.pread(log, 1 << 14, max(size - (1 << 14), 0)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL:])


def _empty(store: Storage) -> None:
    store.discard_unfinished(store.list_unfinished())
    store.delete_many(store.names())
    for name in store.list_dirs():
        _empty(store.join(name))
