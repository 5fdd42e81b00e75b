"""The example of Ray Train: a worker is killed, and the run ends as if it had not been. On disk
and in S3.

Ray is in no environment of ./dev, because of its size. docs/doors/ray.md says how to run this.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from tests.support.limits import seconds

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_train.py"
STEPS = 150
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: smckpt[ray]"
    ),
]


def started(storage: str, steps: int) -> subprocess.Popen[str]:
    """The example, in a process group of its own; Ray's processes keep to the loopback."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_NODE_IP_ADDRESS": "127.0.0.1",
    }
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), storage, "run", str(steps)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def workers_of(session: int) -> list[int]:
    """The training workers that descend from a process."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            names[int(entry.name)] = (entry / "cmdline").read_text()
            parents[int(entry.name)] = int(status[1])
        except OSError:  # it has ended
            continue

    def below(pid: int) -> bool:
        while pid in parents and pid != session:
            pid = parents[pid]
        return pid == session

    return sorted(p for p, name in names.items() if "RayTrainWorker" in name and below(p))


def newest(storage: str) -> int:
    found = smckpt.latest_checkpoint(f"{storage}/run/steps")
    return 0 if found is None else int(found.step or 0)


def final(storage: str) -> dict[str, Any]:
    state = smckpt.load(checkpoint_id=f"{storage}/run/steps/{STEPS}")
    assert state is not None
    return dict(state)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_a_worker_that_is_killed_is_replaced_and_the_run_ends_with_the_same_bits(
    where: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path) if where == "disk" else request.getfixturevalue("s3_root")
    if where == "s3":  # Ray keeps its own notes there too, through pyarrow
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["SMCKPT_S3_ENDPOINT"])
        monkeypatch.setenv("AWS_REGION", os.environ["SMCKPT_S3_REGION"])
    whole = started(f"{root}/whole", STEPS)
    said, _ = whole.communicate(timeout=seconds(300))
    assert whole.returncode == 0, said[-4000:]
    hurt = started(f"{root}/hurt", STEPS)
    deadline = time.monotonic() + seconds(200)
    while newest(f"{root}/hurt") < 20:
        assert time.monotonic() < deadline and hurt.poll() is None
        time.sleep(0.05)  # the condition is another process's file
    victim = workers_of(hurt.pid)[0]
    os.kill(victim, signal.SIGKILL)
    assert newest(f"{root}/hurt") < STEPS, "it was killed while it trained"
    said, _ = hurt.communicate(timeout=seconds(300))
    assert hurt.returncode == 0, said[-4000:]
    begun = {int(step) for step in re.findall(r"begins at step (\d+)", said)}
    assert 0 in begun and max(begun) >= 20, begun
    parts = final(f"{root}/whole"), final(f"{root}/hurt")
    for key in ("model", "optimizer"):
        assert equal(parts[0][key], parts[1][key]), key
