"""What `nvrx_suite` runs on each rank: pytest, with the outcomes in a file. A script of its own: it
imports nothing of `tests`, which are NVRx's here."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any


class Outcomes:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("::")[2]
        if report.skipped:
            self.seen[name] = "skipped"
        elif report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.seen[name] = (lines or [str(report.longrepr)])[0].lstrip("E ").strip()
        elif report.when == "call":
            self.seen[name] = "passed"


def fsdp_on_the_cpu() -> None:
    """FSDP1 wants to be told."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    its_init = FullyShardedDataParallel.__init__

    @functools.wraps(its_init)
    def on_the_cpu(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        its_init(self, *args, **{"device_id": torch.device("cpu"), **kwargs})

    FullyShardedDataParallel.__init__ = on_the_cpu


def main() -> None:
    import pytest

    scratch, *arguments = sys.argv[1:]
    fsdp_on_the_cpu()
    outcomes, rank = Outcomes(), os.environ["RANK"]
    pytest.main(
        ["-q", "-p", "no:cacheprovider", "--rootdir", scratch, "-c", os.devnull,
         f"--basetemp={scratch}/pytest-{rank}", *arguments], [outcomes],
    )  # fmt: skip
    Path(scratch, f"rank-{rank}.json").write_text(json.dumps(outcomes.seen))


if __name__ == "__main__":
    main()
