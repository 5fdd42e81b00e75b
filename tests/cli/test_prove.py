"""`smckpt prove`: under torchrun with a real training, and with a script that only saves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smckpt.run.trials import RunWatch
from tests.support.limits import seconds
from tests.support.main_job import ROOT, environment

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--nproc-per-node", "2"),
)
TRAINING = str(ROOT / "tests" / "support" / "proven_script.py")

# Saves the steps 10 to 40 without torch, and goes on after the newest. In the run that is to be
# killed it waits after step 20 for its death.
SAVES = """
import os, pathlib, signal, sys
from tests.support.saves import Group, hybrid, state_of

root, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
root.mkdir(parents=True, exist_ok=True)
lives = "uninterrupted" in os.environ["SMCKPT_PROVE_ROOT"]
there = [] if mode == "anew" else [int(one.name) for one in root.iterdir()]
for step in range(max(there, default=0) + 10, 50 if mode != "short" or not there else 40, 10):
    seen = pathlib.Path(os.environ["SMCKPT_PROVE_ROOT"] + ".seen")
    waits = step == 20 and not lives and mode != "fast" and not seen.exists()
    if waits:
        seen.touch()  # before the commit, since that is when it is killed
    seed = os.getpid() if mode == "random" else step
    seed += 1 if mode == "drifts" and there and step == 40 else 0
    state = state_of(hybrid((0, 1), 1), seed=seed)
    named = {} if mode != "nameless" else {"step": None}
    Group(root / str(step), (0, 1), session=f"{os.getpid():012x}", state=state).save(
        **{"step": step, **named})
    if waits:
        signal.pause()
"""


def command(
    folder: Path, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "smckpt.cli", "prove", *options, "--", *arguments],
        cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds(150),
    )


def script(folder: Path, mode: str, root: str = "{root}") -> tuple[str, ...]:
    (folder / "saves.py").write_text(SAVES)
    return sys.executable, str(folder / "saves.py"), root, mode


def proved(folder: Path, mode: str, *options: str) -> Any:
    """What --json prints, with the exit status."""
    done = command(folder, *script(folder, mode), options=("--json", *options))
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "status": done.returncode}


# -- a training under torchrun --------------------------------------------------------------------


@pytest.mark.long
def test_a_training_that_resumes_exactly(tmp_path: Path) -> None:
    done = command(tmp_path, *TORCHRUN, TRAINING, "{root}", "nothing")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("exact: killed at step 2 and resumed, the run has saved at step 6 ")
    assert os.listdir(tmp_path) == []


def test_a_training_that_forgets_its_scheduler_and_its_random_numbers(tmp_path: Path) -> None:
    arguments = (*TORCHRUN, TRAINING, "{root}", "scheduler,random")
    done = command(tmp_path, *arguments, options=("--json",))
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["step"] == 4 and "not exact: at step 4" in told["line"]
    names = {one["name"] for one in told["comparison"]["differences"]}
    assert {"scheduler.last_epoch", "manager.random.torch", "model.0.weight"} <= names
    assert any("stay in" in line for line in done.stderr.splitlines())


def test_a_script_that_fails_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys; print('a cause'); sys.exit(7)")
    done = command(tmp_path, *TORCHRUN, "fails.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a cause" in done.stderr and "exitcode  : 7" in done.stderr
    assert "the first run ended with status 1 before it could be killed" in done.stderr


# -- what is told ---------------------------------------------------------------------------------


def test_it_is_killed_at_the_commit_and_goes_on(tmp_path: Path) -> None:
    told = proved(tmp_path, "exact", "--kill-at", "11")
    assert (told["status"], told["exact"], told["killed_at"], told["step"]) == (0, True, 20, 40)
    assert told["comparison"]["ignored"] == []


def test_names_that_do_not_matter_are_left_out_and_said(tmp_path: Path) -> None:
    ignored = ("--ignore", "model.*", "--ignore", "optimizer.step")
    told = proved(tmp_path, "random", "--kill-at", "20", *ignored)
    assert (told["status"], told["exact"], told["step"]) == (0, True, 40)
    assert told["line"].endswith(
        "; not compared: model.bias, model.layers.0.weight, model.layers.1.weight, optimizer.step"
    )


@pytest.mark.parametrize(
    ("mode", "step", "why", "differs"),
    [
        ("drifts", 40, "", True),
        ("random", 10, "the two runs differ before the kill", True),
        ("short", 30, "the last step is 30 with the kill and 40 without it", False),
        ("anew", 40, "it did not resume: after its restart it saved step 10 again", False),
    ],
)
def test_what_is_not_exact_has_its_cause(
    mode: str, step: int, why: str, differs: bool, tmp_path: Path
) -> None:
    told = proved(tmp_path, mode, "--kill-at", "20")
    assert (told["status"], told["exact"], told["step"]) == (1, False, step)
    assert told["why"].startswith(why) and bool(told["why"]) is bool(why)
    assert told["comparison"]["equal"] is not differs
    if differs:
        assert f"at step {step}, optimizer.step of rank 0: " in told["line"]
        assert told["line"].endswith("; also model.bias and 2 more")


@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        ("fast", ("--kill-at", "90"), "ended before it could be killed; it has committed steps 10"),
        ("nameless", (), "records no step"),
        ("exact", ("--timeout", "4", "--kill-at", "30"), "after 4 s the run had not ended"),
    ],
)
def test_what_is_not_proved_is_told(
    mode: str, options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = command(tmp_path, *script(tmp_path, mode), options=options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_script_that_never_commits_or_writes_elsewhere(tmp_path: Path) -> None:
    done = command(tmp_path, sys.executable, "-c", "pass")
    assert done.returncode == 2
    assert "the script ended and has committed nothing below" in done.stderr
    done = command(tmp_path, *script(tmp_path, "fast", "checkpoints"))
    assert done.returncode == 2
    assert f"it has written elsewhere: {tmp_path}/checkpoints/10" in done.stderr
    assert "pass --chdir" in done.stderr


def test_a_script_that_saves_below_its_working_directory(tmp_path: Path) -> None:
    arguments = script(tmp_path, "exact", "checkpoints")
    relative = (arguments[0], "saves.py", *arguments[2:])
    done = command(tmp_path, *relative, options=("--chdir", "--kill-at", "20", "--out", "runs"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "interrupted" / "checkpoints" / "40").is_dir()
    done = command(tmp_path, *relative, options=("--out", "runs"))
    assert done.returncode == 2 and "the directory is not empty" in done.stderr


def test_a_last_save_without_a_step_does_not_hide_the_steps() -> None:
    watch = object.__new__(RunWatch)
    watch.found = [SimpleNamespace(step=10), SimpleNamespace(step=None)]  # type: ignore[list-item]
    assert watch.last == 10


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys, signal
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                         start_new_session=True)
print("runs", os.getpid(), child.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-m", "smckpt.cli", "prove", "--", sys.executable, "-c", code],
        cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        pids = next(line.split()[1:] for line in process.stderr if line.startswith("runs"))
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=seconds(30))
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert "Ended by SIGINT." in said
    for pid in map(int, pids):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
