"""Proves that a script resumes exactly. It runs the script to a commit, kills it and resumes it,
runs it again without a kill, and compares the checkpoints of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.upkeep.compare import Compared
from smckpt.errors import UsageError
from smckpt.run.trials import (
    NOT_DETERMINISTIC,
    RunWatch,
    Script,
    compare_runs,
    difference_text,
    failed,
    refuse_nameless,
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
            text += f"{';' if self.why else ''} {difference_text(self.step, found)}"
        return text

    def to_json(self) -> dict[str, Any]:
        return {
            "exact": self.exact, "killed_at": self.killed_at, "step": self.step, "why": self.why,
            "line": self.line, "comparison": self.comparison.to_json(),
        }  # fmt: skip


@dataclass
class Proving(Script):
    """The three runs of a script.

    Args:
        kill_at: kill at the first commit of this step or a later one; None: at the first commit.
    """

    kill_at: int | None = None

    def prove(self) -> ProofResult:
        """
        Raises:
            UsageError: nothing was proved: a run failed, took too long, or did not commit the steps
                that the comparison needs. The message says which run, and how it ended.
            CheckpointError: a checkpoint cannot be read.
        """
        with self.scratched():
            killed = self.watch("interrupted")
            self.say("run 1 of 3: until a step is committed, then SIGKILL")

            def reached() -> bool:
                if killed.due():
                    refuse_nameless(killed.found)
                    at = self.kill_at
                    killed.killed = any(at is None or step >= at for step in killed.steps)
                return killed.killed

            status = self.run(killed, reached)
            killed.look()
            if not killed.killed:
                if status:
                    raise failed(
                        f"the first run ended with status {status} before it could be killed"
                    )
                self.refuse_end(killed, "the script", status)
                steps = ", ".join(str(one.step) for one in killed.found)
                raise UsageError(
                    f"the script ended before it could be killed; it has committed steps {steps}",
                    remedy="pass a smaller step to --kill-at, or let it train longer",
                )
            self.say(f"killed at the commit of step {killed.last}; run 2 of 3: the same command")
            resumed = self._finished("interrupted", "the resumed run")
            self.say("run 3 of 3: the same command elsewhere, without a kill")
            whole = self._finished("uninterrupted", "the uninterrupted run")
        return _compared(killed, resumed, whole, self.ignore)

    def _finished(self, directory: str, name: str) -> RunWatch:
        watch = self.watch(directory)
        status = self.run(watch, lambda: watch.due() and False)
        watch.look()
        self.refuse_end(watch, name, status)
        return watch


def _compared(
    killed: RunWatch, resumed: RunWatch, whole: RunWatch, ignore: Sequence[str]
) -> ProofResult:
    """Compare the steps that both runs have kept, oldest first, until one differs."""
    at, ours, theirs = killed.last, resumed.steps, whole.steps
    again = [step for step in resumed.fresh_steps if step <= at]
    common = sorted(ours.keys() & theirs.keys())
    if not resumed.fresh_steps:
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
    compared = compare_runs(resumed, whole, ignore)
    assert compared is not None
    step, comparison = compared
    if not comparison.equal and step <= at and not again:
        why = NOT_DETERMINISTIC
    return ProofResult(at, step, comparison, why)
