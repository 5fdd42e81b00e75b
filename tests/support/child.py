"""Run a piece of Python in a process of its own, with the checkout on its path."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

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
