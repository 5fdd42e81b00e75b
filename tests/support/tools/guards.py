"""Take guards out of the code, one at a time, and see whether their tests fail: `./dev guards`.

A test shows something only if it fails without its guard. Each line of `GUARDS` names a guard of
docs/evidence/guards.md, the change that takes it out, and the tests that have to fail then. The
changes are made in a copy of the tree. It takes about an hour; words after the command choose
guards.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.support.limits import seconds  # noqa: E402
from tests.support.tools.guard_list import GUARDS, Guard  # noqa: E402

LIMIT = 400  # seconds for a test; a wait that never ends is red too


@dataclass(frozen=True)
class Outcome:
    """red: a test failed without the guard. said: the last line of pytest."""

    red: bool
    said: str
    took: float


def copy_of_the_tree(to: Path) -> None:
    """All files that git knows, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=seconds(60),
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def without(guard: Guard, tree: Path) -> Outcome:
    """Run the guard's tests in a copy of the tree without it, and put it back."""
    changed = {}
    try:
        for path, old, new in guard.changes:
            text = (tree / path).read_text()
            changed.setdefault(path, text)
            if text.count(old) != 1:
                return Outcome(False, f"the text occurs {text.count(old)} times in {path}", 0)
            (tree / path).write_text(text.replace(old, new))
        return tested(guard.tests, tree)
    finally:
        for path, text in changed.items():
            (tree / path).write_text(text)


def tested(tests: Sequence[str], tree: Path) -> Outcome:
    pytest = shlex.split(os.environ.get("SMCKPT_PYTEST", f"{sys.executable} -m pytest -q"))
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    more = ["-x", "-m", "long or not long", "-p", "no:cacheprovider", f"--timeout={LIMIT}"]
    began = time.monotonic()
    with subprocess.Popen(
        [*pytest, *more, *tests], cwd=tree, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as running:  # fmt: skip
        try:
            told, _ = running.communicate(timeout=2 * LIMIT)
        except subprocess.TimeoutExpired:  # without the guard its end waits for ever too
            return Outcome(True, f"did not end within {2 * LIMIT} s", time.monotonic() - began)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    lines = [line for line in told.splitlines() if line.strip()]
    took = time.monotonic() - began
    return Outcome(running.returncode == 1, lines[-1] if lines else "", took)


def main(words: Sequence[str]) -> int:
    chosen = [guard for guard in GUARDS if not words or any(w in guard.called for w in words)]
    left = []
    with tempfile.TemporaryDirectory(prefix="smckpt-guards-") as folder:
        copy_of_the_tree(Path(folder))
        for guard in chosen:
            outcome = without(guard, Path(folder))
            said = f"{guard.called}  ({outcome.said}; {outcome.took:.0f} s)"
            print("red     " if outcome.red else "NOT RED ", said, flush=True)
            if not outcome.red:
                left.append(guard)
    print(f"{len(chosen) - len(left)} of {len(chosen)} guards were missed by a test")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
