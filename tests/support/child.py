"""Run a piece of Python in a process of its own, with the checkout on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.limits import seconds

ROOT = Path(__file__).resolve().parents[2]


def command(code: str, *arguments: str) -> list[str]:
    """The command line that runs `code`; it may import smckpt and tests.support."""
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    return [sys.executable, "-c", path + textwrap.dedent(code), *arguments]


def run(code: str, *arguments: str, timeout: float = 60, **environment: str) -> str:
    """Run `code` to its end and return what it printed; a failure shows its traceback."""
    done = subprocess.run(
        command(code, *arguments),
        capture_output=True,
        text=True,
        timeout=seconds(timeout),
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def script(
    path: Path,
    *arguments: str,
    ranks: int = 1,
    python: str = sys.executable,
    by: tuple[str, ...] = (),
    torchrun: bool = False,
    forked: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, under torchrun where it has several ranks or `torchrun`.

    Args:
        by: what runs it, such as `-m smckpt.run`.
        forked: from a process that has torch; False for a test of the interpreter's start or end.
    """
    launcher = [python]
    if ranks > 1 or torchrun:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [*launcher, *by, str(path), *arguments]
    if forked:
        return warm.run(command, timeout=seconds(240), env=environment)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds(240), env=environment, check=False
    )


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What each rank of a script has told: `told {…}`. Ranks share the output, so it may follow
    something else in a line; each rank writes it as one text."""
    found, at, mark = [], 0, "told {"
    while (at := done.stdout.find(mark, at)) >= 0:
        value, at = json.JSONDecoder().raw_decode(done.stdout, at + len(mark) - 1)
        found.append(value)
    return found


def killed_and_resumed(
    path: Path, out: Path | str, how: str, die: tuple[str, ...], **where: Any
) -> list[dict[str, Any]]:
    """Run a script until it kills itself, then again until it has resumed; what its ranks told."""
    died = script(path, str(out), how, *die, **where)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    done = script(path, str(out), how, "resume", **where)
    assert done.returncode == 0, done.stderr[-4000:]
    return told(done)
