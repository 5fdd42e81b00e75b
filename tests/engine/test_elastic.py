"""Another number of replicas, a group that is too wide, optimizer state that comes later.

Three launches for all: four ranks (two replicas of two shards), two (one replica), four again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import smckpt
from tests.engine.test_ranks import full, model_on, replication_group, same, taken
from tests.support.launch import run_ranks


def hsdp(replicas: int) -> Any:
    return init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))


def save_step(model: Any, optimizer: Any, mesh: Any, folder: str, step: int) -> None:
    shard = mesh["shard"].get_local_rank()
    smckpt.save(
        taken(model, optimizer, smckpt.LOCAL, step=step, rank=dist.get_rank()),
        checkpoint_id=f"{folder}/run/fsdp{shard}",
        process_group=replication_group(mesh),
        step=step,
    )


def resumed(mesh: Any, folder: str, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """A model of other values, filled from the groups' directories."""
    model, optimizer = model_on(mesh, seed)
    target = taken(model, optimizer, smckpt.LOCAL, step=-1, rank=-1)
    smckpt.load(
        target,
        checkpoint_id=f"{folder}/run/fsdp{mesh['shard'].get_local_rank()}",
        process_group=replication_group(mesh),
    )
    return model, optimizer, target


def train(model: Any, optimizer: Any) -> None:
    model(torch.full((4, 8), 0.5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def newest(folder: str) -> tuple[int | None, str]:
    found = smckpt.latest_checkpoint(folder)
    assert found is not None
    return found.step, os.path.relpath(found.path, folder)


def too_wide(folder: str, mesh: Any, group: Any) -> tuple[bool, dict[str, torch.Tensor]]:
    """One directory for all ranks of a hybrid-sharded state: saved, and loaded into another."""
    model, optimizer = model_on(mesh, seed=11)
    state = taken(model, optimizer, smckpt.LOCAL, rank=dist.get_rank())
    smckpt.save(state, checkpoint_id=folder, process_group=group)
    other, fresh = model_on(mesh, seed=12)
    target = taken(other, fresh, smckpt.LOCAL, rank=-1)
    smckpt.load(target, checkpoint_id=folder, process_group=group)
    saved = full(model, optimizer)
    return same(full(other, fresh), saved) and target["rank"] == dist.get_rank(), saved


def four(folder: str) -> dict[str, Any]:
    mesh = hsdp(2)
    model, optimizer = model_on(mesh)
    save_step(model, optimizer, mesh, folder, 1)
    return {
        "saved": full(model, optimizer),
        "wide": [
            too_wide(f"{folder}/none", mesh, None),
            too_wide(f"{folder}/world", mesh, dist.group.WORLD),
        ],
    }


def two(folder: str) -> dict[str, Any]:
    mesh = hsdp(1)
    model, optimizer, target = resumed(mesh, folder, seed=1)
    loaded = full(model, optimizer)
    train(model, optimizer)
    save_step(model, optimizer, mesh, folder, 2)
    return {
        "loaded": loaded,
        "told": (target["step"], target["rank"]),
        "saved": full(model, optimizer),
        "newest": newest(folder),
        "late": late_optimizer_state(f"{folder}/late"),
        "wide": loaded_plain(f"{folder}/none"),
        "anew": made_anew(f"{folder}/anew"),
    }


def made_anew(folder: str) -> bool:
    """The process group is destroyed and made anew, with the ranks the other way round: as an
    elastic restart within the processes may do."""
    for life in range(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        model, optimizer = model_on(mesh, seed=20 + life)
        rank = dist.get_rank()
        smckpt.save(taken(model, optimizer, smckpt.LOCAL, rank=rank), checkpoint_id=folder)
        if not life:
            dist.destroy_process_group()
            store = dist.FileStore(f"{folder}/store", 2)
            dist.init_process_group("gloo", store=store, rank=1 - rank, world_size=2)
    other, fresh = model_on(mesh, seed=22)
    target = taken(other, fresh, smckpt.LOCAL, rank=-1)
    smckpt.load(target, checkpoint_id=folder)
    return same(full(other, fresh), full(model, optimizer)) and target["rank"] == dist.get_rank()


def four_again(folder: str) -> dict[str, Any]:
    mesh = hsdp(2)
    model, optimizer, target = resumed(mesh, folder, seed=2)
    loaded = full(model, optimizer)
    train(model, optimizer)
    save_step(model, optimizer, mesh, folder, 3)
    return {
        "loaded": loaded,
        "told": (target["step"], target["rank"]),
        "newest": newest(folder),
    }


def loaded_plain(folder: str) -> dict[str, torch.Tensor]:
    """What the too wide group saved, on two ranks of another mesh, under SHARDED."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, optimizer = model_on(mesh, seed=5)
    target = taken(model, optimizer, smckpt.SHARDED, rank=-1)
    smckpt.load(target, checkpoint_id=folder)
    return full(model, optimizer)


def late_optimizer_state(folder: str) -> dict[str, Any]:
    """Saved before the first step, when the optimizer has nothing; and after it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, _ = model_on(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    smckpt.save(
        taken(model, optimizer, smckpt.LOCAL),
        checkpoint_id=folder,
        options=smckpt.SaveOptions(queue="late"),
    )
    other, fresh = model_on(mesh, seed=3)
    fresh = torch.optim.AdamW(other.parameters(), lr=1.0)
    smckpt.load(taken(other, fresh, smckpt.LOCAL), checkpoint_id=folder)
    before = same(full(other, fresh), full(model, optimizer)) and not fresh.state
    train(model, optimizer)
    smckpt.save(
        taken(model, optimizer, smckpt.LOCAL),
        checkpoint_id=folder,
        options=smckpt.SaveOptions(queue="late"),
    )
    smckpt.load(taken(other, fresh, smckpt.LOCAL), checkpoint_id=folder)
    return {
        "before": before,
        "after": same(full(other, fresh), full(model, optimizer)),
        "states": len(fresh.state),
        "lr": fresh.param_groups[0]["lr"],
    }


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("elastic")
    return [run_ranks(life, n, str(folder)) for life, n in ((four, 4), (two, 2), (four_again, 4))]


def test_one_replica_resumes_what_two_saved_and_its_next_save_is_the_newest(lives: Any) -> None:
    first, second, _ = lives
    for rank, life in enumerate(second):
        assert same(life["loaded"], first[0]["saved"])
        assert life["told"] == (1, rank)
        assert life["newest"] == (2, "run")


def test_two_replicas_resume_what_one_saved_and_their_next_save_is_the_newest(lives: Any) -> None:
    _, second, third = lives
    for rank, life in enumerate(third):
        assert same(life["loaded"], second[0]["saved"])
        assert not same(life["loaded"], lives[0][0]["saved"])
        assert life["told"] == (2, rank % 2)  # replica i takes what replica i mod 1 kept
        assert life["newest"] == (3, "run")


def test_a_group_that_is_too_wide_mixes_nothing_and_drops_nothing(lives: Any) -> None:
    for life in lives[0]:
        assert [good for good, _ in life["wide"]] == [True, True]
    for life in lives[1]:  # on another mesh
        assert same(life["wide"], lives[0][0]["wide"][0][1])


def test_a_process_group_made_anew_with_other_ranks_mixes_nothing(lives: Any) -> None:
    assert [life["anew"] for life in lives[1]] == [True, True]


def test_optimizer_state_that_appears_later_is_saved_and_loads_exactly(lives: Any) -> None:
    for life in lives[1]:
        assert life["late"] == {"before": True, "after": True, "states": 4, "lr": 1e-2}
