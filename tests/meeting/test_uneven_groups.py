"""Ranks that are members of different numbers of process groups save and load all the same.

Megatron's embedding groups are such, and so is that of a script with `dist.new_group([0, 1])`.
torch's `new_group(use_local_synchronization=True)` puts the number of a rank's groups into the new
group's name, so such ranks would wait for each other for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import smckpt
from smckpt.errors import UsageError
from tests.support.launch import ROOT, run_ranks


def uneven() -> Any:
    """After each `next`, the ranks are in other groups, and in a replication group or among all
    ranks in different numbers of them."""
    # torch counts the groups that a rank has made since 2.14, and its `new_group` hangs after this
    if dist.get_rank() < 2 and torch.__version__ < "2.14":  # so far in equally many groups
        dist.new_group([0, 1], use_local_synchronization=True)
    yield "a group that its members alone made"
    dist.new_group([0, 1])  # on all ranks, as torch wants it
    yield "an extra group"
    dist.new_group([0, 3])
    yield "two extra groups"


def hybrid() -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh)
    return model, mesh


def weights(model: torch.nn.Module) -> list[float]:
    local: Any = next(model.parameters())
    values: list[float] = local.to_local().flatten().tolist()
    return values


def by_manager(root: str) -> None:
    model, _ = hybrid()
    before = weights(model)
    with smckpt.CheckpointManager(root, interval=1, signals=()) as manager:
        manager.save(1, {"model": model})
    torch.nn.init.zeros_(model.weight)
    with smckpt.CheckpointManager(root, interval=1, signals=()) as manager:
        manager.restore(into={"model": model})
    assert weights(model) == before


def by_replication_group(root: str) -> None:
    model, mesh = hybrid()
    before = weights(model)
    group = smckpt.replication_group(model)
    own = {"checkpoint_id": group.directory(root), "process_group": group.process_group}
    smckpt.async_save({"model": model}, **own)
    smckpt.maybe_finalize_async_calls(blocking=True, process_group=group.process_group)
    torch.nn.init.zeros_(model.weight)
    smckpt.load({"model": model}, **own)
    assert weights(model) == before
    # a torch group of the same ranks is the same group
    torch.nn.init.zeros_(model.weight)
    real = mesh["dp_replicate"].get_group()
    assert smckpt.get_global_ranks(real) == smckpt.get_global_ranks(group.process_group)
    smckpt.load({"model": model}, checkpoint_id=own["checkpoint_id"], process_group=real)
    assert weights(model) == before


def by_smp(root: str) -> None:
    import smckpt.integrations.sagemaker as tsm
    from smckpt.integrations.sagemaker.state_handler import state

    tsm.init({"hybrid_shard_degree": 2})
    sums = {}
    for dim in ("rep", "fsdp", "tp", "world"):
        mine = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(mine, group=getattr(state, f"{dim}_process_group"))
        sums[dim] = mine.item()
    rank = dist.get_rank()
    assert sums == {
        "rep": [4.0, 6.0][rank % 2],
        "fsdp": [3.0, 7.0][rank // 2],
        "tp": rank + 1.0,
        "world": 10.0,
    }
    state.reset()


def by_planner(root: str) -> None:
    values = {"a": torch.arange(8.0) + dist.get_rank() // 4}
    smckpt.save(values, checkpoint_id=root, planner=DefaultSavePlanner())
    target = {"a": torch.zeros(8)}
    smckpt.load(target, checkpoint_id=root, planner=DefaultLoadPlanner())
    assert torch.equal(target["a"], values["a"])
    # and by the ranks of a replication group, over which DCP's collectives cannot run as it is
    model, _ = hybrid()
    group = smckpt.replication_group(model)
    own: dict[str, Any] = {
        "checkpoint_id": group.directory(f"{root}/groups"),
        "process_group": group.process_group,
    }
    kept = {"a": torch.full((4,), float(group.ranks[0]))}
    smckpt.save(kept, planner=DefaultSavePlanner(), **own)
    target = {"a": torch.zeros(4)}
    smckpt.load(target, planner=DefaultLoadPlanner(), **own)
    assert torch.equal(target["a"], kept["a"])


def by_dcp_door(root: str) -> None:
    from smckpt.integrations.dcp import calls

    group = smckpt.replication_group(hybrid()[0])
    for planner in (None, DefaultSavePlanner()):
        place = f"{group.directory(root)}/{planner is None}"
        kept = {"a": torch.full((4,), float(group.ranks[0]))}
        calls.save(kept, checkpoint_id=place, planner=planner, process_group=group.process_group)
        target = {"a": torch.zeros(4)}
        calls.load(target, checkpoint_id=place, process_group=group.process_group)
        assert torch.equal(target["a"], kept["a"])


def in_each(root: str, use: Callable[[str], None]) -> list[str]:
    done = []
    for number, groups in enumerate(uneven()):
        use(f"{root}/{number}")
        done.append(groups)
    dist.barrier()  # rank 0 hosts the store, and has no part in the last save of the other group
    return done


@pytest.mark.parametrize("use", [by_manager, by_replication_group, by_smp, by_planner, by_dcp_door])
def test_ranks_in_different_numbers_of_groups_save_and_load(
    tmp_path: Path, use: Callable[[str], None]
) -> None:
    done = run_ranks(in_each, 4, str(tmp_path), use, timeout=60)
    assert [len(each) for each in done] == [3] * 4


def in_a_new_job(_: str) -> str:
    group = smckpt.replication_group(hybrid()[0]).process_group
    assert group is not None and dist.get_world_size(group) == group.size() == 2
    from smckpt.integrations.nvrx.async_ckpt.state_dict_saver import save_state_dict_async_plan

    with pytest.raises(UsageError, match="this call runs collectives"):
        save_state_dict_async_plan({}, None, process_group=group)  # type: ignore[arg-type]
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("again", store),
        rank=int(__import__("os").environ["RANK"]),
        world_size=4,
    )
    with pytest.raises(UsageError, match="that the job has destroyed") as raised:
        smckpt.save({}, checkpoint_id="/nowhere", process_group=group)
    return str(raised.value)


def test_the_ranks_of_a_group_are_refused_where_they_mean_nothing(tmp_path: Path) -> None:
    assert all("replication_group" in each for each in run_ranks(in_a_new_job, 4, str(tmp_path)))


def test_no_module_makes_a_group_that_its_members_alone_count() -> None:
    call = re.compile(r"new_group\([^)]*use_local_synchronization|new_subgroups")
    found = [str(path) for path in (ROOT / "smckpt").rglob("*.py") if call.search(path.read_text())]
    assert found == []
