"""The launchers of examples/launchers, as far as a machine without their services can run them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import smckpt
from tests.support.launch import free_port
from tests.support.limits import seconds
from tests.support.main_job import ROOT

LAUNCHERS = ROOT / "examples" / "launchers"

# What Slurm does for one node: starts each task with its variables, passes a signal on to all of
# them, and returns the highest status.
SRUN = f"""#!{sys.executable}
import os, pathlib, signal, subprocess, sys
command = sys.argv[next(n for n, word in enumerate(sys.argv) if n and word[0] != "-"):]
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
tasks = [
    subprocess.Popen(
        command,
        env=dict(os.environ, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGUSR1}}),
    )
    for rank in range(int(os.environ["SLURM_NTASKS"]))
]
def passed_on(number, frame):
    for task in tasks:
        task.send_signal(number)
signal.signal(signal.SIGUSR1, passed_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGUSR1}})
pathlib.Path("srun.arguments").write_text(" ".join(sys.argv[1:]))
pathlib.Path("srun.pid").write_text(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
case "$1" in
  show) echo 127.0.0.1 ;;
  requeue) echo "$2" >> requeued ;;
esac
"""


@pytest.fixture
def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class Sbatch:
    """A folder from which the job was submitted, with the commands of a cluster in the path."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "train.py").symlink_to(LAUNCHERS / "train.py")
        self.environment = {
            **environment,
            "PATH": f"{folder / 'bin'}:{environment['PATH']}",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": str(free_port() - 20000),  # slurm.sbatch makes the port of it
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
        }
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        (self.folder / "srun.pid").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            ["bash", str(LAUNCHERS / "slurm.sbatch"), *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def signal_the_step(self) -> None:
        os.kill(int((self.folder / "srun.pid").read_text()), signal.SIGUSR1)


@pytest.fixture
def sbatch(tmp_path: Path, environment: dict[str, str]) -> Iterator[Sbatch]:
    batch = Sbatch(tmp_path, environment)
    yield batch
    if batch.process is not None and batch.process.poll() is None:
        os.killpg(batch.process.pid, signal.SIGKILL)


def first_commit(root: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + seconds(120)
    while not root.exists() or smckpt.latest_checkpoint(root) is None:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "nothing was committed"
        time.sleep(0.1)


def newest(root: Path) -> int:
    found = smckpt.latest_checkpoint(root)
    assert found is not None and found.step is not None
    return found.step


def test_a_slurm_job_saves_before_its_time_is_over_is_queued_again_and_goes_on(
    sbatch: Sbatch, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    first = sbatch.start(str(root), "1000000")
    first_commit(root, first)
    sbatch.signal_the_step()
    said = first.communicate(timeout=seconds(120))[0]
    assert first.returncode == 143, said
    assert (tmp_path / "requeued").read_text().split() == [sbatch.environment["SLURM_JOB_ID"]]
    last = newest(root)
    second = sbatch.start(str(root), str(last + 5))
    said = second.communicate(timeout=seconds(120))[0]
    assert second.returncode == 0, said
    # both ranks print to one pipe, so a line may end after the other's: "… at step 25rank 0 …"
    assert len(re.findall(rf"begins at step {last}(?!\d)", said)) == 2, said
    assert len((tmp_path / "requeued").read_text().split()) == 1  # an end is an end


def test_a_slurm_job_that_fails_is_not_queued_again(sbatch: Sbatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    job = sbatch.start(str(tmp_path / "run"))
    said = job.communicate(timeout=seconds(60))[0]
    assert job.returncode == 7, said
    assert not (tmp_path / "requeued").exists()


def test_slurm_warns_before_the_manager_has_to_be_done() -> None:
    text = (LAUNCHERS / "slurm.sbatch").read_text()
    warned, grace = (
        int(re.search(pattern, text)[1])  # type: ignore[index]
        for pattern in (r"--signal=USR1@(\d+)", r"GRACE=(\d+)")
    )
    assert warned > grace


def pod() -> dict[str, Any]:
    job = yaml.safe_load((LAUNCHERS / "kubernetes.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    spec = replicas["Master"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def of_systemd() -> list[str]:
    lines = (LAUNCHERS / "keeper.service").read_text().splitlines()
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    return start.partition("/usr/bin/env ")[2].split()


def of_the_daemon_set() -> list[str]:
    spec = yaml.safe_load((LAUNCHERS / "keeper.yaml").read_text())["spec"]["template"]["spec"]
    command = spec["containers"][0]["command"]
    assert isinstance(command, list)
    return command


@pytest.mark.parametrize("command", [of_systemd(), of_the_daemon_set()])
def test_the_keepers_command_runs_until_it_is_told_to_end(
    command: list[str], environment: dict[str, str]
) -> None:
    hosts = {"${HOST_IP}": "127.0.0.1", "$(HOST_IP)": "127.0.0.1", "train": f"l{os.getpid()}"}
    with subprocess.Popen(
        [hosts.get(word, word) for word in command],
        env=environment, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert re.match(r"keeper l\d+ at 127.0.0.1:\d+, 512.0 GiB", process.stdout.readline())
            process.terminate()
            assert process.wait(seconds(20)) == 0
        finally:
            process.kill()


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        cwd=LAUNCHERS,
        capture_output=True,
        text=True,
        timeout=seconds(120),
    )


@pytest.mark.long
def test_the_pods_command_trains_with_the_operators_variables(
    environment: dict[str, str], tmp_path: Path
) -> None:
    port = str(free_port())
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given |= {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}
    (container,) = pod()["containers"]
    command = [re.sub(r"\$\((\w+)\)", lambda m: given[m[1]], part) for part in container["command"]]
    assert command[-1] == "/shared/run"
    done = run([*command[:-1], str(tmp_path / "run"), "12"], {**environment, **given})
    assert done.returncode == 0, done.stderr
    assert newest(tmp_path / "run") == 10


def test_a_pod_has_longer_than_torchrun_gives_its_ranks() -> None:
    assert pod()["terminationGracePeriodSeconds"] > 30


def sagemaker(hosts: list[str]) -> dict[str, str]:
    return {
        "SM_HOSTS": json.dumps(hosts),
        "SM_CURRENT_HOST": hosts[0],
        "SM_NUM_GPUS": "0",
        "SM_NUM_CPUS": "2",
    }


def test_sagemakers_entry_point_becomes_torchrun(
    environment: dict[str, str], tmp_path: Path
) -> None:
    entry = [sys.executable, str(LAUNCHERS / "sagemaker_entry.py")]
    options = ["--root", str(tmp_path / "run"), "--steps", "12"]
    given = {**environment, **sagemaker(["localhost"]), "PET_MASTER_PORT": str(free_port())}
    done = run([*entry, *options], given)
    assert done.returncode == 0, done.stderr
    assert newest(tmp_path / "run") == 10


def test_hosts_that_do_not_share_a_directory_are_told_so(environment: dict[str, str]) -> None:
    entry = [sys.executable, str(LAUNCHERS / "sagemaker_entry.py")]
    done = run(entry, {**environment, **sagemaker(["algo-1", "algo-2"])})
    assert done.returncode == 1
    assert "2 hosts do not share /opt/ml/checkpoints" in done.stderr
    assert "Traceback" not in done.stderr
