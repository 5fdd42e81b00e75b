"""Proves that a script resumes exactly. It runs the script to a commit, kills it and resumes it,
runs it again without a kill, and compares the checkpoints of both."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from smckpt.checkpoint.compare import Compared, compare_checkpoints
from smckpt.checkpoint.discover import FoundCheckpoint, find_checkpoints
from smckpt.errors import CheckpointError, CheckpointNotFoundError, UsageError
from smckpt.run import ending
from smckpt.storage.urls import is_local, join_url, local_path

__all__ = ["PLACEHOLDER", "VARIABLE", "ProofResult", "Proving"]

PLACEHOLDER = "{root}"
VARIABLE = "SMCKPT_PROVE_ROOT"
_SHARE = 10  # at most one part in this many of the time is spent looking
_HOW = (
    f"write {PLACEHOLDER} into the command where it names the directory of checkpoints, let the "
    f"script read {VARIABLE}, or pass --chdir if it saves below its working directory"
)


@dataclass(frozen=True)
class ProofResult:
    """The outcome.

    Args:
        killed_at: the newest step that was committed when the run was killed.
        step: the step whose checkpoints were compared: the last of both runs, or the first in
            which they differ.
        comparison: of the resumed run (A) with the uninterrupted one (B).
        why: what is wrong besides the differences, or "".
    """

    killed_at: int
    step: int
    comparison: Compared
    why: str

    @property
    def exact(self) -> bool:
        return self.comparison.equal and not self.why

    @property
    def line(self) -> str:
        found = self.comparison
        if self.exact:
            return (
                f"exact: killed at step {self.killed_at} and resumed, the run has saved at step "
                f"{self.step} what the uninterrupted run has: {found.tensors} tensors and "
                f"{found.values} values are equal"
            ) + (f"; not compared: {', '.join(found.ignored)}" if found.ignored else "")
        text = f"not exact: {self.why}" if self.why else "not exact:"
        if not found.equal:
            first = found.differences[0]
            whose = f" of {first.holder}" if first.holder else ""
            text += f"{';' if self.why else ''} at step {self.step}, {first.name}{whose}: "
            text += f"{first.text} (A resumed, B uninterrupted)"
            names = dict.fromkeys(one.name for one in found.differences)
            # show one per-rank tensor and one shared tensor too
            kinds = {(one.what == "bits", bool(one.holder)): one.name
                     for one in reversed(found.differences)}  # fmt: skip
            others = [name for name in kinds.values() if name != first.name]
            more = len(names) - 1 - len(others)
            text += f"; also {', '.join(others[::-1])}" if others else ""
            text += f" and {more} more" if more else ""
        return text

    def to_json(self) -> dict[str, Any]:
        return {
            "exact": self.exact, "killed_at": self.killed_at, "step": self.step, "why": self.why,
            "line": self.line, "comparison": self.comparison.to_json(),
        }  # fmt: skip


@dataclass
class Proving:
    """The three runs of a script below `root`, an empty directory or URL.

    Args:
        command: the script's command. `{root}` in it becomes the directory of a run.
        kill_at: kill at the first commit of this step or a later one; None: at the first commit.
        chdir: run it in the directory of its run, with paths of existing files made absolute.
        timeout: seconds for each run.
        ignore: globs of names that are not compared.
        say: called with a line at the start of each run, and for warnings.
    """

    root: str
    command: Sequence[str]
    kill_at: int | None
    chdir: bool
    timeout: float
    ignore: Sequence[str]
    say: Callable[[str], None]
    _scratch: str = field(default="", init=False)

    def prove(self) -> ProofResult:
        """
        Raises:
            UsageError: nothing was proved: a run failed, took too long, or did not commit the steps
                that the comparison needs. The message says which run, and how it ended.
            CheckpointError: a checkpoint cannot be read.
        """
        with tempfile.TemporaryDirectory(
            prefix="smckpt-prove-", ignore_cleanup_errors=True
        ) as self._scratch:
            killed = self._watch("interrupted")
            self.say("run 1 of 3: until a step is committed, then SIGKILL")
            status = self._run(killed, self._reached)
            killed.look()
            if not killed.killed:
                self._refuse_end(killed, status)
            before = killed.newest
            self.say(f"killed at the commit of step {before.step}; run 2 of 3: the same command")
            resumed = self._watch("interrupted")
            self._finish(resumed, "the resumed run")
            self.say("run 3 of 3: the same command elsewhere, without a kill")
            whole = self._watch("uninterrupted")
            self._finish(whole, "the uninterrupted run")
        return _compared(killed, resumed, whole, self.ignore)

    def _watch(self, name: str) -> _Watch:
        root = join_url(self.root, name)
        if is_local(root):
            Path(local_path(root)).mkdir(parents=True, exist_ok=True)
        return _Watch(root, self.timeout, self.say)

    def _reached(self, watch: _Watch) -> bool:
        steps = [one.step for one in watch.found if one.step is not None]
        if watch.found and not steps:
            raise UsageError(
                f"{watch.found[-1]} records no step, so steps of two runs cannot be matched",
                remedy="pass step= to the save, or put a whole number 'step' into the state",
            )
        watch.killed = any(self.kill_at is None or step >= self.kill_at for step in steps)
        return watch.killed

    def _run(self, watch: _Watch, reached: Callable[[_Watch], bool]) -> int:
        root = local_path(watch.root) if is_local(watch.root) else watch.root.rstrip("/")
        command = [part.replace(PLACEHOLDER, root) for part in self.command]
        if self.chdir:
            command = [os.path.abspath(part) if os.path.exists(part) else part for part in command]

        def until() -> bool:
            return watch.due() and reached(watch)

        try:
            return ending.run(
                command,
                environment={**os.environ, VARIABLE: root, "TMPDIR": self._scratch},
                directory=Path(root) if self.chdir else None,
                stdout=2,  # only the verdict goes to stdout
                until=until,
            )
        except OSError as error:
            raise UsageError(
                f"the command cannot be started: {error.strerror}", path=command[0],
                remedy="write the command after --, as in a shell",
            ) from error  # fmt: skip

    def _finish(self, watch: _Watch, name: str) -> None:
        status = self._run(watch, lambda _: False)
        watch.look()
        if status:
            raise UsageError(
                f"{name} ended with status {status}",
                remedy="its output is above: the command must end with status 0 by itself",
            )
        if not watch.found:
            watch.refuse_elsewhere(f"{name} ended and has committed nothing below {watch.root}")

    def _refuse_end(self, watch: _Watch, status: int) -> NoReturn:
        if status:
            raise UsageError(
                f"the first run ended with status {status} before it could be killed",
                remedy="its output is above: the command must end with status 0 by itself",
            )
        if not watch.found:
            watch.refuse_elsewhere(f"the script ended and has committed nothing below {watch.root}")
        steps = ", ".join(str(one.step) for one in watch.found)
        raise UsageError(
            f"the script ended before it could be killed; it has committed steps {steps}",
            remedy="pass a smaller step to --kill-at, or let it train longer",
        )


class _Watch:
    """The commits of a run, found from names below its root."""

    def __init__(self, root: str, timeout: float, say: Callable[[str], None]) -> None:
        self.root = root
        self.killed = False
        self.found: list[FoundCheckpoint] = find_checkpoints(root)
        self.before = {(one.path, one.identity) for one in self.found}
        self.fresh: dict[tuple[str, str], FoundCheckpoint] = {}
        self._say = say
        self._timeout = timeout
        self._began = time.monotonic()
        self._clock = time.time_ns()
        self._next = self._next_there = 0.0
        self._warned = False

    @property
    def newest(self) -> FoundCheckpoint:
        return max(
            (one for one in self.found if one.step is not None), key=lambda one: one.step or 0
        )

    def due(self) -> bool:
        """Look again if the last look was long enough ago. Returns whether it looked.

        Raises:
            UsageError: the run's time is over.
        """
        began = time.monotonic()
        if began - self._began > self._timeout:
            what = f"after {self._timeout:g} s the run had not ended"
            if not self.fresh:
                self.refuse_elsewhere(f"{what} and had committed nothing below {self.root}")
            raise UsageError(what, remedy="pass a longer --timeout, or train fewer steps")
        if began < self._next:
            return False
        self.look()
        self._next = began + _SHARE * (time.monotonic() - began)
        if not self.fresh and not self._warned and began >= self._next_there:
            self._warn_elsewhere()
            now = time.monotonic()
            self._next_there = now + max(1.0, _SHARE * (now - began))
        return True

    def look(self) -> None:
        self.found = find_checkpoints(self.root)
        for one in self.found:
            if (one.path, one.identity) not in self.before:
                self.fresh[one.path, one.identity] = one

    def _warn_elsewhere(self) -> None:
        there = self._elsewhere()
        if there is not None:
            self._warned = True
            self._say(f"{there} was committed, and nothing yet below {self.root}; {_HOW}")

    def _elsewhere(self) -> FoundCheckpoint | None:
        """A checkpoint that was committed meanwhile below the working directory, but not below the
        root."""
        here = os.getcwd()
        try:
            found = find_checkpoints(here, depth=2)
        except CheckpointError:
            return None
        own = local_path(self.root) if is_local(self.root) else ""
        for one in found:
            outside = not own or not Path(one.path).is_relative_to(Path(own).parent)
            if one.committed_at > self._clock and outside:
                return one
        return None

    def refuse_elsewhere(self, what: str) -> NoReturn:
        there = self._elsewhere()
        if there is not None:
            what += f"; it has written elsewhere: {there}"
        raise CheckpointNotFoundError(what, remedy=_HOW)


def _compared(killed: _Watch, resumed: _Watch, whole: _Watch, ignore: Sequence[str]) -> ProofResult:
    """Compare the steps that both runs have kept, oldest first, until one differs."""
    at = killed.newest.step
    assert at is not None
    fresh = [one.step for one in resumed.fresh.values() if one.step is not None]
    again = sorted(step for step in fresh if step <= at)
    later = [step for step in fresh if step > at]
    ours = {one.step: one for one in resumed.found if one.step is not None}
    theirs = {one.step: one for one in whole.found if one.step is not None}
    common = sorted(ours.keys() & theirs.keys())
    if not again and not later:
        raise UsageError(
            f"after its restart the run has committed no step later than {at}, at which it was "
            "killed",
            remedy="pass a smaller step to --kill-at, or train longer",
        )
    if not common or common[-1] <= at:
        raise UsageError(
            f"the runs have no step after {at} in common: the resumed run has kept "
            f"{sorted(ours)}, and the uninterrupted run {sorted(theirs)}",
            remedy="save at fixed steps and not by time, and keep the last step",
        )
    why = ""
    if again:
        why = f"it did not resume: after its restart it saved step {again[0]} again"
    elif max(ours) != max(theirs):
        why = f"the last step is {max(ours)} with the kill and {max(theirs)} without it"
    for step in common:
        comparison = compare_checkpoints(ours[step], theirs[step], ignore=ignore)
        if not comparison.equal:
            break
    if not comparison.equal and step <= at and not again:
        why = "the two runs differ before the kill, so the script is not deterministic "
        why += "(seed every generator, or pass names that do not matter to --ignore)"
    return ProofResult(at, step, comparison, why)
