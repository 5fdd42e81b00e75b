"""Work is bounded by what is read: small files that ask for endless work, through every reader.

Each reader runs in a process with limits of the processor's time and of memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults.bombs import BOMBS, PROCESSOR, READERS
from tests.support.limits import seconds

SAMPLE = (
    "boxes in 12 dimensions", "metadata: one list of parts", "archive of one endless shape",
)  # fmt: skip


@pytest.mark.parametrize("names", [SAMPLE, pytest.param((*BOMBS,), marks=pytest.mark.long)])
def test_no_small_file_holds_a_reader_up(tmp_path: Path, names: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.support.faults.bombs", str(tmp_path), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds(30 + 10 * len(names))
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(names) * len(READERS), done.stderr[-2000:]
    wrong = [one for one in found if one["code"] or one["seconds"] > seconds(PROCESSOR) / 2]
    assert not wrong, (wrong, done.stderr[-2000:])
