"""Runs a test file of others in a process of its own, and gives each test's outcome. As a plugin of
pytest there, it writes them to the file SMCKPT_TORCH_REPORT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.limits import seconds


def outcomes_of(
    file: Path, environment: Mapping[str, str], only: str | None, limit: float
) -> dict[str, str]:
    """The outcome of each test of a file, which lies in a directory of its own: "passed", "skipped"
    or the last line of its error."""
    report = file.with_name("report.json")
    command = [sys.executable, "-m", "pytest", "-q", str(file), "--rootdir", str(file.parent)]
    command += ["-p", __name__, "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["-k", only] if only else []
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment, "SMCKPT_TORCH_REPORT": str(report)},
            cwd=file.parent, capture_output=True, text=True, timeout=seconds(limit), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"(file)": "timed out"}
    if log := os.environ.get("SMCKPT_TORCH_LOG"):
        Path(log).write_text(done.stdout + done.stderr)
    if not report.exists() or report.read_text() == "{}":
        return {"(file)": (done.stdout + done.stderr)[-2000:]}
    outcomes: dict[str, str] = json.loads(report.read_text())
    return outcomes


_SEEN: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.partition("::")[2]
    if report.skipped:
        _SEEN[name] = "skipped"
    elif report.failed:
        lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("E ")] or lines
        errors = [line for line in told if "Error:" in line or "Exception:" in line]
        _SEEN[name] = (errors or told)[-1].lstrip("E ").strip()
    elif report.when == "call":
        _SEEN[name] = "passed"


def pytest_sessionfinish() -> None:
    with open(os.environ["SMCKPT_TORCH_REPORT"], "w") as file:
        json.dump(_SEEN, file)
