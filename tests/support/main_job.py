"""Run the examples as a user does, and read what the main job logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.limits import seconds

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--steps", "12", "--save-every", "3", "--hidden", "32", "--batch", "2")


@dataclass(frozen=True)
class Outcome:
    """A finished main job."""

    directory: Path
    status: int
    output: str

    @property
    def events(self) -> list[dict[str, Any]]:
        text = (self.directory / "log.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def of(self, event: str, **values: Any) -> list[dict[str, Any]]:
        wanted = {"event": event, **values}
        return [row for row in self.events if wanted.items() <= row.items()]

    def losses(self, phase: str) -> dict[int, list[str]]:
        """By step, each rank's loss as a hexadecimal float; of the last attempt that had it."""
        return {row["step"]: row["losses"] for row in self.of("step", phase=phase)}


def environment() -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    # where smckpt is not installed, the checkout is
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**inherited, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def run_main_job(directory: Path, *options: str, timeout: float = 280) -> Outcome:
    return run_example("train.py", directory, *options, timeout=timeout)


def run_example(script: str, directory: Path, *options: str, timeout: float) -> Outcome:
    """Run to the end, or for `timeout` seconds; with everything that it started, then."""
    command = [sys.executable, str(ROOT / "examples" / script), "--out", str(directory)]
    with subprocess.Popen(
        [*command, *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds(timeout))
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            output, _ = process.communicate(timeout=seconds(30))
            raise AssertionError(f"not finished after {timeout} s:\n{output}") from None
    return Outcome(directory, process.returncode, output)
