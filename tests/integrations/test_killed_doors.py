"""Runs through a door that are killed at random moments, again and again, and each time started
anew by the same command: they go on after the last committed step, and end with the bits of a run
that was not killed. FSDP2 on two ranks, on disk, in S3 and through the Multi-Storage Client."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from smckpt.run import ending
from smckpt.run.moments import Moments
from tests.support import child
from tests.support.frameworks.door_loops import newest
from tests.support.limits import seconds
from tests.support.main_job import ROOT, environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SCRIPT = str(ROOT / "tests" / "support" / "frameworks" / "door_loops.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RUN = {"dcp": "dcp", "smp": "sagemaker", "nvrx": "nvrx", "nvrx_torch": "nvrx"}  # loop → door
KILLS = 3


def launched(place: str, loop: str, stop_at: int | None = None) -> tuple[Moments, list[Any]]:
    """Run a loop by its launcher, to its end or until all of its processes are killed at a moment.
    Returns what its ranks told then."""
    name = loop.partition("-")[0]
    door = ("-m", "smckpt.run", "--for", RUN[name]) if name in RUN else ()
    command = [sys.executable, *TORCHRUN, *door, SCRIPT, place, loop]
    deadline = time.monotonic() + seconds(240)
    with tempfile.TemporaryFile() as output, Moments(place, stop_at) as moments:

        def until() -> bool:
            assert time.monotonic() < deadline, "the run has not ended"
            return moments.reached()

        status = ending.run(
            moments.wrap(command), environment={**environment(), "OMP_NUM_THREADS": "1"},
            stdout=output.fileno(), stderr=output.fileno(),
            inherited=[moments.inherited], until=until,
        )  # fmt: skip
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert moments.stopped or status == 0, text[-4000:]
    told = child.told(subprocess.CompletedProcess(command, status, text))
    return moments, sorted(told, key=lambda rank: int(rank["rank"]))


@pytest.mark.parametrize(
    ("loop", "where"),
    [
        *((loop, where) for where in ("disk", "s3")
          for loop in ("dcp", "dcp_calls", "smp", "smp-fsdp1", "nvrx", "nvrx_torch")),
        *((loop, "msc") for loop in ("manager", "dcp", "smp", "nvrx")),
    ],
)  # fmt: skip
def test_a_run_killed_at_random_moments_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
    loop: str, where: str,
) -> None:  # fmt: skip
    root = str(tmp_path) if where == "disk" else request.getfixturevalue(f"{where}_root")
    if where == "msc":  # what is sent to its port counts; smckpt itself asks no variable there
        monkeypatch.setenv("SMCKPT_S3_ENDPOINT", request.getfixturevalue("s3_server").endpoint)
    name = loop.partition("-")[0]
    for place in ("killed", "straight"):
        (tmp_path / place).mkdir()
    counted, straight = launched(f"{root}/straight", loop)
    assert len(straight) == 2 and straight[0]["digest"] != straight[1]["digest"]
    seed = int(os.environ.get("SMCKPT_KILL_SEED") or secrets.randbits(32))
    drawn, place, before = random.Random(seed), f"{root}/killed", []
    while len(before) < KILLS or (not any(before) and len(before) < 4 * KILLS):
        moment = drawn.randint(1, counted.count // 2)
        moments, told = launched(place, loop, moment)
        if not moments.stopped:
            break
        assert not told
        before.append(newest(place, name))
        print(f"\n{loop}, {where}, seed {seed}: killed at moment {moment} of {counted.count}, "
              f"before {moments.stopped}; step {before[-1]} is committed", flush=True)  # fmt: skip
    else:
        _, told = launched(place, loop)
    assert any(before), "no kill came after the first commit"
    for rank, whole in zip(told, straight, strict=True):
        assert rank.pop("began") >= before[-1] and whole.pop("began") == 0
        assert rank == whole
