"""A pytest plugin of `torch_suite`: writes each test's outcome to the file SMCKPT_TORCH_REPORT."""

from __future__ import annotations

import json
import os
from typing import Any

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
