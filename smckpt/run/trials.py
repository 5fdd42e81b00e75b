"""Runs of a user's command, each below a directory of its own, and what they have committed there:
what `smckpt prove` and `smckpt chaos` share."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from smckpt.checkpoint.commits.discover import FoundCheckpoint, find_checkpoints
from smckpt.checkpoint.upkeep.compare import Compared, compare_checkpoints
from smckpt.errors import CheckpointError, CheckpointNotFoundError, UsageError
from smckpt.run import ending
from smckpt.storage.urls import disk_path, join_url

PLACEHOLDER = "{root}"
VARIABLE = "SMCKPT_PROVE_ROOT"
_SHARE = 10  # at most one part in this many of the time is spent looking
_HOW = (
    f"write {PLACEHOLDER} into the command where it names the directory of checkpoints, let the "
    f"script read {VARIABLE}, or pass --chdir if it saves below its working directory"
)
NOT_DETERMINISTIC = (
    "the two runs differ before the kill, so the script is not deterministic "
    "(seed every generator, or pass names that do not matter to --ignore)"
)


class TookTooLong(UsageError):
    """A run's time is over."""


@dataclass
class Script:
    """The runs of a user's command below `root`, an empty directory or URL.

    Args:
        command: `{root}` in it becomes the directory of a run.
        chdir: run it in the directory of its run, with paths of existing files made absolute.
        timeout: seconds for each run; None: an hour.
        ignore: globs of names that are not compared.
        say: called with a line about each run, and for warnings.
    """

    root: str
    command: Sequence[str]
    chdir: bool
    timeout: float | None
    ignore: Sequence[str]
    say: Callable[[str], None]
    scratch: str = field(default="", init=False)  # where the runs make temporary files
    limit: float = field(default=3600.0, init=False)

    def __post_init__(self) -> None:
        self.limit = self.limit if self.timeout is None else self.timeout

    @contextmanager
    def scratched(self) -> Iterator[None]:
        """While the block runs, the runs have a directory for temporary files."""
        with tempfile.TemporaryDirectory(prefix="smckpt-", ignore_cleanup_errors=True) as made:
            self.scratch = made
            yield

    def watch(self, name: str) -> RunWatch:
        """Begin to watch the directory of a run, for at most `limit` seconds."""
        root = join_url(self.root, name)
        if (path := disk_path(root)) is not None:
            Path(path).mkdir(parents=True, exist_ok=True)
        return RunWatch(root, self.limit, self.say)

    def run(
        self,
        watch: RunWatch,
        until: Callable[[], bool],
        *,
        wrap: Callable[[list[str]], list[str]] = list,
        inherited: Collection[int] = (),
        output: int = 2,
    ) -> int:
        """Run the command, and return its status.

        Args:
            until: called again and again; when it returns True or raises, all processes are killed.
            wrap: gives the command that runs the command.
            inherited: descriptors that it gets.
            output: where its output goes; only the verdict goes to stdout.
        """
        root = watch.command_root
        command = [part.replace(PLACEHOLDER, root) for part in self.command]
        if self.chdir:
            command = [os.path.abspath(part) if os.path.exists(part) else part for part in command]
        try:
            return ending.run(
                wrap(command),
                environment={**os.environ, VARIABLE: root, "TMPDIR": self.scratch},
                directory=Path(root) if self.chdir else None,
                stdout=output,
                stderr=output,
                inherited=inherited,
                until=until,
            )
        except OSError as error:
            raise UsageError(
                f"the command cannot be started: {error.strerror}", path=command[0],
                remedy="write the command after --, as in a shell",
            ) from error  # fmt: skip

    @staticmethod
    def refuse_end(watch: RunWatch, name: str, status: int) -> None:
        """
        Raises:
            UsageError: a run that should have ended well has failed, or committed nothing.
        """
        if status:
            raise failed(f"{name} ended with status {status}")
        if not watch.found:
            watch.refuse_elsewhere(f"{name} ended and has committed nothing below {watch.root}")


def failed(what: str) -> UsageError:
    """The error for a run that ended as it should not."""
    return UsageError(
        what, remedy="its output is above: the command must end with status 0 by itself"
    )


def refuse_nameless(found: Sequence[FoundCheckpoint]) -> None:
    """
    Raises:
        UsageError: there are checkpoints, and none of them records a step.
    """
    if found and all(one.step is None for one in found):
        raise UsageError(
            f"{found[-1]} records no step, so steps of two runs cannot be matched",
            remedy="pass step= to the save, or put a whole number 'step' into the state",
        )


def compare_runs(
    ours: RunWatch, theirs: RunWatch, ignore: Sequence[str]
) -> tuple[int, Compared] | None:
    """Compare the steps that both runs have kept, oldest first, until one differs. Returns that
    step, or the last; None: they have none in common. The runs' directories may stand in texts."""
    a, b = ours.steps, theirs.steps
    moved = ours.command_root, theirs.command_root
    last = None
    for step in sorted(a.keys() & b.keys()):
        last = step, compare_checkpoints(a[step], b[step], ignore=ignore, moved=moved)
        if not last[1].equal:
            break
    return last


def difference_text(step: int, found: Compared) -> str:
    """Where two runs differ first, and the names of the other differences."""
    first = found.differences[0]
    whose = f" of {first.holder}" if first.holder else ""
    text = f"at step {step}, {first.name}{whose}: {first.text} (A resumed, B uninterrupted)"
    names = dict.fromkeys(one.name for one in found.differences)
    # show one per-rank tensor and one shared tensor too
    kinds = {(one.what == "bits", bool(one.holder)): one.name
             for one in reversed(found.differences)}  # fmt: skip
    others = [name for name in kinds.values() if name != first.name]
    more = len(names) - 1 - len(others)
    text += f"; also {', '.join(others[::-1])}" if others else ""
    return text + (f" and {more} more" if more else "")


class RunWatch:
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
    def command_root(self) -> str:
        """The root as the command is told it."""
        return disk_path(self.root) or self.root.rstrip("/")

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def steps(self) -> dict[int, FoundCheckpoint]:
        """The commits that record their step."""
        return {one.step: one for one in self.found if one.step is not None}

    @property
    def fresh_steps(self) -> list[int]:
        """The steps that were committed since the watch began, ascending."""
        return sorted(one.step for one in self.fresh.values() if one.step is not None)

    @property
    def last(self) -> int:
        return max(self.steps)

    def due(self) -> bool:
        """Look again if the last look was long enough ago. Returns whether it looked.

        Raises:
            UsageError: the run's time is over.
        """
        began = time.monotonic()
        self.refuse_late()
        if began < self._next:
            return False
        self.look()
        self._next = began + _SHARE * (time.monotonic() - began)
        if not self.fresh and not self._warned and began >= self._next_there:
            if (there := self._elsewhere()) is not None:
                self._warned = True
                self._say(f"{there} was committed, and nothing yet below {self.root}; {_HOW}")
            now = time.monotonic()
            self._next_there = now + max(1.0, _SHARE * (now - began))
        return True

    def refuse_late(self) -> None:
        """
        Raises:
            UsageError: the run's time is over.
        """
        if self.elapsed <= self._timeout:
            return
        what = f"after {self._timeout:g} s the run had not ended"
        if self.fresh:
            raise TookTooLong(what, remedy="pass a longer --timeout, or train fewer steps")
        what += f" and had committed nothing below {self.root}"
        raise TookTooLong(
            what + self._elsewhere_text(), remedy=f"pass a longer --timeout, or {_HOW}"
        )

    def look(self) -> None:
        self.found = find_checkpoints(self.root)
        for one in self.found:
            if (one.path, one.identity) not in self.before:
                self.fresh[one.path, one.identity] = one

    def _elsewhere(self) -> FoundCheckpoint | None:
        """A checkpoint that was committed meanwhile below the working directory, but not below the
        root."""
        here = os.getcwd()
        try:
            found = find_checkpoints(here, depth=2)
        except CheckpointError:
            return None
        own = disk_path(self.root)
        for one in found:
            outside = own is None or not Path(one.path).is_relative_to(Path(own).parent)
            if one.committed_at > self._clock and outside:
                return one
        return None

    def refuse_elsewhere(self, what: str) -> NoReturn:
        raise CheckpointNotFoundError(what + self._elsewhere_text(), remedy=_HOW)

    def _elsewhere_text(self) -> str:
        there = self._elsewhere()
        return "" if there is None else f"; it has written elsewhere: {there}"
