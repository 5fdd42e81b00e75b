"""The page's program under torchrun, as printed, with a signal at a given step of a given rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import warm
from tests.support.limits import seconds
from tests.support.main_job import ROOT, environment

__all__ = ["Run", "printed_program", "train"]

# Python imports it at its start, so the program itself stays as it is printed.
HOOK = """
import os, sys
if os.environ.get("RANK") == os.environ.get("HIT_RANK") and "train.py" in " ".join(sys.orig_argv):
    import pathlib
    from torch.optim.optimizer import register_optimizer_step_post_hook
    hit, steps = pathlib.Path(os.environ["HIT_ONCE"]), []

    def stepped(*_):
        steps.append(1)
        if len(steps) == int(os.environ["HIT_STEP"]) and not hit.exists():
            hit.touch()
            os.kill(os.getpid(), int(os.environ["HIT_SIGNAL"]))

    register_optimizer_step_post_hook(stepped)
"""


@dataclass(frozen=True)
class Run:
    """What a run printed, and how it ended."""

    status: int
    said: str

    @property
    def losses(self) -> dict[tuple[int, int], str]:
        """(rank, step) → loss; of the last attempt that had the step."""
        lines = re.findall(r"rank (\d+), step (\d+), loss (\d+\.\d+)", self.said)
        return {(int(rank), int(step)): loss for rank, step, loss in lines}


def printed_program() -> str:
    page = (ROOT / "docs" / "manager.md").read_text()
    match = re.search(r"## A whole program\n.*?```python\n(.*?)```", page, re.DOTALL)
    assert match is not None
    return match[1]


def train(
    folder: Path,
    *,
    hit: tuple[signal.Signals, int, int] | None = None,
    timeout: float = 240,
) -> Run:
    """Run the program in `folder`.

    Args:
        hit: a signal, the rank that sends it to itself, and after how many of its steps. Once in
            the life of the folder.
    """
    (folder / "train.py").write_text(printed_program())
    hooks = folder / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "sitecustomize.py").write_text(HOOK)
    env = {**environment(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""  # the program takes a device for each rank if there is one
    if hit is not None:
        number, rank, step = hit
        env |= {"HIT_SIGNAL": str(int(number)), "HIT_RANK": str(rank), "HIT_STEP": str(step)}
        env |= {
            "HIT_ONCE": str(folder / "hit"),
            "PYTHONPATH": f"{hooks}{os.pathsep}{env['PYTHONPATH']}",
        }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [sys.executable, *torchrun, "train.py"]
    if hit is None:
        ended = warm.run(command, cwd=folder, env=env, timeout=seconds(timeout))
        return Run(ended.returncode, ended.stdout + ended.stderr)
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds(timeout),
    )
    return Run(done.returncode, done.stdout)
