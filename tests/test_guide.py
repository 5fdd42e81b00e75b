"""The programs of the guide and the README run exactly as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from smckpt import find_checkpoints, load, replication_group, save
from tests.support import warm
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.main_job import environment

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: str, heading: str, language: str = "python") -> list[str]:
    """The blocks of code below a heading."""
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def run_in(folder: Path, *command: str) -> str:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**environment(), "OMP_NUM_THREADS": "1", "PATH": beside}
    if command[0] == sys.executable:
        done = warm.run(command, cwd=folder, env=env, timeout=seconds(240))
    else:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds(240)
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_by_torchrun(folder: Path, program: str) -> None:
    (folder / "train.py").write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_in(folder, sys.executable, *torchrun, "train.py")


def test_the_readmes_examples_run(tmp_path: Path) -> None:
    opening = (ROOT / "README.md").read_text().partition("\n## ")[0]
    (plain,) = re.findall(r"```python\n(.*?)```", opening, re.DOTALL)
    (parallel,) = blocks("README.md", "Under torchrun")
    assert len(plain.splitlines()) <= 10
    run_in(tmp_path, sys.executable, "-c", plain)
    run_by_torchrun(tmp_path, parallel)
    steps = {str(one.relative_to(tmp_path)) for one in map(Path, find_checkpoints(tmp_path))}
    assert steps == {"first-checkpoint", "checkpoints/step_10", "checkpoints/step_20"}
    (commands,) = blocks("README.md", "Look", "sh")
    said = run_in(tmp_path, "bash", "-ec", commands)
    assert "checkpoints/step_20" in said and "topology" not in said and "\nok: " in said


def test_the_front_page_shows_what_there_is_and_its_programs_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page)
    assert len(pictures) >= 3 and all((ROOT / "docs" / one).is_file() for one in pictures)
    assert "SageMaker" in page and "(integrations.md)" in page
    plain, managed = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    plain = plain.replace("/tmp/first-checkpoint", str(tmp_path / "first"))
    around = (
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
        "def train_one_step():\n    model(torch.ones(8)).sum().backward()\n    optimizer.step()\n"
    )
    run_in(tmp_path, sys.executable, "-c", plain + around + managed.replace("10_000", "300"))
    found = find_checkpoints(tmp_path / "checkpoints")
    assert [one.step for one in found] == [100, 200, 300]


def test_the_guides_program_trains_saves_and_goes_on(tmp_path: Path) -> None:
    (program,) = blocks("docs/guide.md", "A whole program")
    assert len(program.splitlines()) <= 46
    run_by_torchrun(tmp_path, program)
    found = find_checkpoints(tmp_path / "checkpoints")
    assert [one.step for one in found] == [10, 20, 30, 40, 50]
    for step in (40, 50):  # as if it had been killed after step 30
        for file in (tmp_path / "checkpoints" / f"step_{step}").iterdir():
            file.unlink()
    run_by_torchrun(tmp_path, program)
    found = find_checkpoints(tmp_path / "checkpoints")
    assert [one.step for one in found] == [10, 20, 30, 40, 50]


def hybrid(root: str) -> tuple[str, tuple[int, ...]]:
    """Save and load by the group that the model's own mesh gives."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    group = replication_group(model)
    state = {"model": model, "step": 3, "rank": dist.get_rank()}
    save(state, checkpoint_id=group.directory(root), process_group=group.process_group)
    state["rank"] = None
    load(state, checkpoint_id=group.directory(root), process_group=group.process_group)
    assert state["rank"] == dist.get_rank()
    whole = replication_group(torch.nn.Linear(2, 2))
    assert (whole.process_group, whole.directory(f"{root}/x")) == (None, f"{root}/x")
    return group.name, group.ranks


def test_the_replication_group_and_its_directory_come_from_the_models_mesh(tmp_path: Path) -> None:
    told = run_ranks(hybrid, 4, str(tmp_path / "step_3"))
    assert told == [("dp_shard0", (0, 2)), ("dp_shard1", (1, 3))] * 2
    assert sorted(os.listdir(tmp_path / "step_3"))[:2] == ["dp_shard0", "dp_shard1"]
    (found,) = find_checkpoints(tmp_path)
    assert (found.step, found.groups) == (3, ("dp_shard0", "dp_shard1"))
