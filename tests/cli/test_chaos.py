"""`smckpt chaos`: scripts that resume, and scripts that do not, killed in the middle of saves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smckpt.run.chaos import _spread
from tests.support.limits import seconds, within
from tests.support.main_job import ROOT, environment
from tests.support.s3 import BUCKET

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--nproc-per-node", "2"),
)
TRAINING = str(ROOT / "tests" / "support" / "proven_script.py")

# Saves the steps 1 to 3 without torch, and goes on after the newest. Most modes are wrong ways.
SAVES = """
import json, os, pathlib, signal, sys
from smckpt import find_checkpoints
from smckpt.checkpoint.records.format import parse_name
from tests.support.saves import Group, hybrid, state_of

root, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
root.mkdir(parents=True, exist_ok=True)
there = [one.step for one in find_checkpoints(root)]
began = {"anew": 0, "older": max([0, *there][:-1], default=0)}.get(mode, max(there, default=0))
if mode == "hangs" and there:
    signal.pause()
notes = root / "notes.json"
if mode == "torn" and notes.exists():
    json.loads(notes.read_text())
for step in range(began + 1, 4):
    seed = step + (100 if mode == "drifts" and there and step == 3 else 0)
    state = state_of(hybrid((0, 1), 1), seed=seed)
    Group(root / str(step), (0, 1), session=f"{os.getpid():012x}", state=state).save(step=step)
    if mode == "torn":
        with open(notes, "w", buffering=1) as file:
            for line in ("[", '"a"', "]"):
                print(line, file=file)
"""

# A script that saves as people do who have no such package, and its result with smckpt.
TORCH_SAVE = """
import os, pathlib, sys, torch, smckpt

root = pathlib.Path(sys.argv[1])
root.mkdir(parents=True, exist_ok=True)
torch.manual_seed(1)
model = torch.nn.Linear(64, 64)
file = root / "last.pt"
step = 0
if file.exists():
    there = torch.load(file)
    model.load_state_dict(there["model"])
    step = there["step"]
while step < 3:
    model(torch.ones(1, 64)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
            parameter.grad = None
    step += 1
    torch.save({"model": model.state_dict(), "step": step}, file)
smckpt.save({"model": model, "step": step}, checkpoint_id=str(root / "end"))
"""


def command(
    folder: Path, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "smckpt.cli", "chaos", *options, "--", *arguments],
        cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds(3000),
    )


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "status": done.returncode}


def chaos(folder: Path, mode: str, *options: str, code: str = SAVES) -> Any:
    (folder / "saves.py").write_text(code)
    script = (sys.executable, str(folder / "saves.py"), "{root}", mode)
    return told(command(folder, *script, options=("--json", *options)))


def test_the_first_the_last_and_moments_between_are_chosen() -> None:
    assert _spread(10, 4) == [1, 4, 7, 10]
    assert _spread(3, 20) == [1, 2, 3]
    assert _spread(9, 1) == [5]
    assert _spread(1000, 20)[::19] == [1, 1000]


def test_a_script_that_resumes_is_exact_and_leaves_nothing(tmp_path: Path) -> None:
    found = chaos(tmp_path, "right", "--moments", "3")
    assert (found["status"], found["exact"], found["counts"]) == (0, True, {"exact": 3})
    assert found["moments"] > 100 and found["step"] == 3
    assert [one["moment"] for one in found["resumes"]][::2] == [1, found["moments"]]
    assert [one["committed"] for one in found["resumes"]][::2] == [None, 3]
    assert os.listdir(tmp_path) == ["saves.py"]


# The middle moment is in the second of three steps.
WRONG = [
    ("drifts", "not exact", "at step 3, optimizer.step of rank 0"),
    ("anew", "did not resume", "step 1 was committed, and after its restart it saved 1 again"),
    ("hangs", "hung", "after 5 s the run had not ended"),
]


@pytest.mark.parametrize(
    ("mode", "outcome", "why"),
    [WRONG[0], *(pytest.param(*one, marks=pytest.mark.long) for one in WRONG[1:])],
)
def test_a_script_that_resumes_wrongly_is_told(
    mode: str, outcome: str, why: str, tmp_path: Path
) -> None:
    limit = ("--timeout", "5") if mode == "hangs" else ()
    found = chaos(tmp_path, mode, "--moments", "1", "--out", "runs", *limit)
    assert (found["status"], found["counts"]) == (1, {outcome: 1})
    assert found["resumes"][0]["committed"] == 1
    assert why in found["resumes"][0]["why"]
    assert sorted(os.listdir(tmp_path / "runs"))[1:] == ["uninterrupted"]


@pytest.mark.long
def test_a_script_that_takes_an_older_step_is_told(tmp_path: Path) -> None:
    found = chaos(tmp_path, "older", "--moments", "6")
    assert found["status"] == 1 and found["counts"]["lost a step"] >= 1
    lost = [one for one in found["resumes"] if one["outcome"] == "lost a step"]
    assert all(one["committed"] >= 2 for one in lost)


@pytest.mark.parametrize(
    "options", [("--moments", "2"), pytest.param(("--all",), marks=pytest.mark.long)]
)
@pytest.mark.timeout(1800)
def test_a_file_that_is_not_written_atomically_is_told(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """The last moment is that of the last line of such a file."""
    found = chaos(tmp_path, "torn", *options)
    assert found["status"] == 1
    crashed = [one for one in found["resumes"] if one["outcome"] == "crashed"]
    assert found["counts"]["crashed"] == len(crashed) >= 1
    assert crashed[-1]["call"] == "write notes.json"
    assert "JSONDecodeError" in crashed[-1]["why"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_torch_save_over_the_last_file_is_told(tmp_path: Path) -> None:
    found = chaos(tmp_path, "", "--moments", "12", code=TORCH_SAVE)
    assert found["status"] == 1 and found["counts"]["crashed"] >= 1
    crashed = [one for one in found["resumes"] if one["outcome"] == "crashed"]
    assert {one["call"].split()[-1] for one in crashed} <= {"last.pt", "end"}


def test_what_cannot_be_judged_is_told(tmp_path: Path) -> None:
    done = command(tmp_path, sys.executable, "-c", "print('a cause'); raise SystemExit(7)")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a cause" in done.stderr and "run ended with status 7" in done.stderr
    done = command(tmp_path, sys.executable, "-S", "-c", "pass")
    assert done.returncode == 2 and "has committed nothing below" in done.stderr


def all_exact(found: Any, moments: int) -> bool:
    """Whether each resume was exact. Two ranks do not make as many calls in each run, so the last
    moment may not be reached."""
    not_reached = [one for one in found["resumes"] if one["outcome"] == "not reached"]
    assert all(one["moment"] == found["moments"] for one in not_reached)
    return bool(found["counts"]["exact"] + len(not_reached) == moments)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("keeps", ["", "1"], ids=["all are kept", "one is kept"])
def test_a_training_under_torchrun_with_the_manager(tmp_path: Path, keeps: str) -> None:
    arguments = (*TORCHRUN, TRAINING, "{root}", "nothing", *filter(None, [keeps]))
    found = told(command(tmp_path, *arguments, options=("--json", "--moments", "8")))
    assert found["status"] == 0 and all_exact(found, 8), found


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_training_that_saves_to_s3(tmp_path: Path, s3_root: str) -> None:
    arguments = (*TORCHRUN, TRAINING, "{root}", "nothing", "1")
    options = ("--json", "--moments", "6", "--out", f"{s3_root}/runs")
    found = told(command(tmp_path, *arguments, options=options))
    assert found["status"] == 0 and all_exact(found, 6), found
    calls = [one["call"] for one in found["resumes"]]
    assert any(f" /{BUCKET}/" in call for call in calls), calls


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys, signal
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                         start_new_session=True)
with open(sys.argv[1], "w") as pipe:
    print(os.getpid(), child.pid, file=pipe)
signal.pause()
"""
    pipe = tmp_path / "pids"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [sys.executable, "-m", "smckpt.cli", "chaos", "--", sys.executable, "-c", code, str(pipe)],
        cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            with within(seconds(60)):
                pids = pipe.read_text().split()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=seconds(30))
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert "Ended by SIGINT." in said
    for pid in map(int, pids):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
