"""`smckpt prove` and `smckpt chaos` on scripts that save through the door of a framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import seconds
from tests.support.main_job import ROOT, environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
SCRIPT = str(ROOT / "tests" / "support" / "frameworks" / "proven_doors.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Lightning gives the file of the last step another name where the killed run left half of one, and
# counts an epoch anew that it resumes at its end.
IGNORED = {
    "lightning": (
        *("--ignore", "lightning.callbacks"),
        *("--ignore", "lightning.loops.fit_loop.epoch_progress.*"),
    )
}


def told(folder: Path, door: str, command: str, *options: str) -> Any:
    options = ("--json", *options, *IGNORED.get(door.partition("-")[0], ()))
    launched = (sys.executable, *(TORCHRUN if "-" in door else ()), SCRIPT, "{root}", door)
    done = subprocess.run(
        [sys.executable, "-m", "smckpt.cli", command, *options, "--", *launched],
        cwd=folder, env={**environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        errors="replace", timeout=seconds(1200),
    )  # fmt: skip
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "status": done.returncode}


@pytest.mark.parametrize(
    "door",
    [
        *("trainer", "lightning", "accelerate", "dcp"),
        *("trainer-fsdp2", "lightning-fsdp2", "accelerate-fsdp2", "dcp-fsdp2"),
    ],
)
def test_a_resume_through_a_door_is_proved(door: str, tmp_path: Path) -> None:
    found = told(tmp_path, door, "prove")
    assert found["status"] == 0, found["line"]
    assert found["line"].startswith("exact: killed at step")


@pytest.mark.parametrize(
    "door", ["trainer", "lightning", "accelerate", "dcp", "trainer-fsdp2", "dcp-fsdp2"]
)
def test_a_run_through_a_door_survives_kills_in_its_saves(door: str, tmp_path: Path) -> None:
    found = told(tmp_path, door, "chaos", "--moments", "6")
    assert found["status"] == 0, found
    assert set(found["counts"]) <= {"exact", "not reached"} and found["counts"]["exact"] >= 5
