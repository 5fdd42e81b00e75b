"""`smckpt ls`, `doctor`, `status`, `browse` and `prove` of a run with steps in memory."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import smckpt
from smckpt import CheckpointManager, Memory
from smckpt.manager.memory import SERVICE
from smckpt.storage import open_storage
from tests.cli import test_prove
from tests.cli.test_runs import command, told
from tests.support.faults.hosts import keeper_service
from tests.support.limits import seconds

KEEPER = re.compile(r"keeper of \S+: holds [\d.]+ \w+ of 64.0 MiB")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A run with steps 1 and 4 on disk and 3 and 5 in memory, and where those are."""
    root = tmp_path / "run"
    with CheckpointManager(
        str(root), interval=4, memory=Memory(1, replicas=0, budget=64 << 20), signals=(),
        random=False,
    ) as manager:  # fmt: skip
        state = {"w": torch.ones(1000)}
        manager.restore(into=state)
        for step in (1, 2, 3, 4, 5):
            assert manager.should_save(step)
            manager.save(step, state).wait()
        yield root, manager._memory.root


def test_the_verbs_take_the_steps_in_memory_too(run: tuple[Path, str], tmp_path: Path) -> None:
    root, memory = run
    listed = command("ls", root).stdout.splitlines()[3:]
    assert [line.split()[0] for line in listed] == [f"{memory}/5", "4", f"{memory}/3"]
    found = told(command("doctor", root, "--json"))
    assert found["restorable"] == f"{memory}/5"
    assert [one["place"] for one in found["steps"]] == [f"{memory}/5", "4", f"{memory}/3"]
    shown = command("status", root).stdout
    assert shown.startswith("3 steps (2 in memory), ")
    assert f"the newest is {memory}/5, committed " in shown
    assert re.search(r"the run has trained for \d:\d\d:\d\d, with 0 failures", shown), shown
    assert KEEPER.search(shown)
    page = tmp_path / "page.html"
    done = command("browse", root, "--out", page, "--verify")
    assert done.returncode == 0, done.stderr
    assert f'"place":"{memory}/5"' in page.read_text()


def test_they_take_the_keepers_themselves(run: tuple[Path, str], tmp_path: Path) -> None:
    _, memory = run
    listed = command("ls", memory).stdout.splitlines()[3:]
    assert [line.split()[0] for line in listed] == ["5", "3"]
    assert command("doctor", memory, "--read").stdout == "restorable: 5, step 5\n"
    assert KEEPER.search(command("status", memory).stdout)
    done = command("browse", memory, "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr


def test_a_step_that_lost_a_file_with_its_host_is_cut(run: tuple[Path, str]) -> None:
    root, memory = run
    step = open_storage(f"{memory}/5")
    step.delete(step.names("data-")[0])
    done = command("doctor", root)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{memory}/5: cut: ")
    assert "a restore takes the next older step" in done.stdout
    assert "restorable: 4, step 4" in done.stdout


def test_steps_in_memory_that_cannot_be_seen_from_here_are_named(tmp_path: Path) -> None:
    job = """
import sys, torch
import smckpt
from smckpt import CheckpointManager, Memory
state = {"w": torch.ones(10)}
with CheckpointManager(sys.argv[1], interval=1, memory=Memory(1, replicas=0)) as manager:
    manager.restore(into=state)
    manager.save(1, state)
"""
    done = subprocess.run(  # its keeper ends with it
        [sys.executable, "-c", job, str(tmp_path)], capture_output=True, timeout=seconds(60)
    )
    assert done.returncode == 0, done.stderr
    why = rf"the keeper of job \S+ on {socket.gethostname()} does not answer"
    assert re.search(f"the steps in memory cannot be seen from here: .*{why}",
                     command("ls", tmp_path).stdout)  # fmt: skip
    for verb in ("doctor", "status"):
        done = command(verb, tmp_path)
        assert done.returncode == 0
        assert re.search(rf"keeper://\S+: away: .*{why}", done.stdout)


@pytest.mark.parametrize("verb", ["ls", "doctor", "status"])
@pytest.mark.parametrize(
    "named",
    ["keeper://", "hyperpod://localhost/x", "hyperpod://127.0.0.1:1/job-1/odd/path"],
)
def test_an_address_of_memory_that_makes_no_sense_costs_the_steps_of_disk_nothing(
    tmp_path: Path, verb: str, named: str
) -> None:
    options = smckpt.SaveOptions(metadata={"manager": {"memory": named}})
    smckpt.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "1", step=1, options=options)
    done = command(verb, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search("cannot be seen from here|away", done.stdout), done.stdout


# Its first run stops `smckpt prove`, which would kill it when step 20 is on disk, until step 25 is
# in memory. Then it waits for its death.
PROVEN = """
import os, pathlib, random, signal, sys, numpy, torch
import smckpt
from smckpt import CheckpointManager, Memory
for seed in (random.seed, numpy.random.seed, torch.manual_seed):
    seed(0)
state = {"w": torch.ones(1000), "steps": 0}
seen = pathlib.Path(sys.argv[1] + ".seen")
dies = "uninterrupted" not in sys.argv[1] and not seen.exists()
with CheckpointManager(sys.argv[1], interval=20, memory=Memory(1), signals=()) as manager:
    step = manager.restore(into=state)
    print("began at", step, flush=True)
    while step < 60:
        step += 1
        state["w"].mul_(1.01).add_(torch.rand(1000))
        state["steps"] += 1
        if dies and step == 20:
            seen.touch()
            os.kill(os.getppid(), signal.SIGSTOP)
        if manager.should_save(step):
            manager.save(step, state).wait()
        if dies and step == 25:
            os.kill(os.getppid(), signal.SIGCONT)
            signal.pause()
"""


@pytest.fixture
def service() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with keeper_service() as started:
        yield started


def test_a_run_that_resumes_from_memory_is_proved(
    tmp_path: Path, service: tuple[str, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVICE, service[0])
    (tmp_path / "train.py").write_text(PROVEN)
    done = test_prove.command(
        tmp_path, sys.executable, "train.py", "{root}", options=("--kill-at", "20")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exact: killed at step 20 and resumed, ")
    assert re.findall(r"began at (\d+)", done.stderr) == ["0", "25", "0"]
