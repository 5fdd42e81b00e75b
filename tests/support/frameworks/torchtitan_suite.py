"""Runs torchtitan's own tests of its checkpoint manager with smckpt's class in its place.

    python -m tests.support.frameworks.torchtitan_suite CHECKOUT [--way class counted] [--only …]

CHECKOUT is a checkout of pytorch/torchtitan; its file is read there and is not part of this
project. The tests run in a temporary directory: as they are (`stock`), with
`SmckptCheckpointManager` under the name `CheckpointManager` (`class`), and so that in addition
smckpt's saves and loads call `dcp.save` and `dcp.load` (`counted`), which most of the tests replace
and count. Run it with an interpreter that has torchtitan 0.3 and pytest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.frameworks.torch_suite_report import outcomes_of

ROOT = Path(__file__).resolve().parents[3]
FILE = Path("tests", "unit_tests", "test_checkpoint.py")
WAYS = ("stock", "class", "counted")
_PRELUDE = "import tests.support.frameworks.torchtitan_suite as _suite; _suite.prepare()\n"


def prepare() -> None:
    """Put smckpt's class in the place of torchtitan's, in the way that SMCKPT_TITAN_WAY says."""
    way = os.environ["SMCKPT_TITAN_WAY"]
    if way == "stock":
        return
    from torchtitan.components import checkpointer
    from torchtitan.components.checkpointer import dcp

    from smckpt.integrations import torchtitan

    checkpointer.CheckpointManager = torchtitan.SmckptCheckpointManager
    dcp.CheckpointManager = torchtitan.SmckptCheckpointManager
    if way == "counted":
        torchtitan.smckpt.async_save = _counted_save
        torchtitan.smckpt.load = _counted_load


def _counted_save(
    state: dict[str, Any],
    *,
    checkpoint_id: str,
    on_commit: Callable[[Any], None] | None,
    step: int | None,
) -> Any:
    import torch.distributed.checkpoint as dcp

    class Done:
        def result(self) -> None:
            pass

    saved = dcp.save(state, checkpoint_id=checkpoint_id)
    if on_commit is not None:
        on_commit(saved)
    return Done()


def _counted_load(target: dict[str, Any], *, checkpoint_id: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(target, checkpoint_id=checkpoint_id)


def run(checkout: Path, way: str, only: str | None = None) -> dict[str, str]:
    """The outcome of each test: "passed", "skipped" or the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, FILE.name)
        copy.write_text(_PRELUDE + (checkout / FILE).read_text())
        environment = {"PYTHONPATH": str(ROOT), "SMCKPT_TITAN_WAY": way}
        return outcomes_of(copy, environment, only, 400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--way", nargs="+", choices=WAYS[1:], default=WAYS[1:])
    parser.add_argument("--only")
    chosen = parser.parse_args()
    stock = run(chosen.checkout, "stock", chosen.only)
    wanted = {test for test, outcome in stock.items() if outcome == "passed"}
    print(f"stock: {len(wanted)} of {len(stock)} pass here", flush=True)
    failed: set[str] = set(wanted)
    for way in chosen.way:
        outcomes = run(chosen.checkout, way, chosen.only)
        passed = {test for test in wanted if outcomes.get(test) == "passed"}
        failed -= passed
        print(f"{way}: {len(passed)} of {len(wanted)}", flush=True)
        for test in sorted(wanted - passed):
            print(f"    {test}: {outcomes.get(test, 'absent')[:300]}", flush=True)
    print(f"one way or the other: {len(wanted - failed)} of {len(wanted)}", flush=True)


if __name__ == "__main__":
    main()
