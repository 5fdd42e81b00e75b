"""Tensor parallelism, alone and under FSDP2 and HSDP, with sizes that divide by nothing: what ranks
hold is the truth, bit for bit, and comes back without a collective."""

from __future__ import annotations

import functools
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import smckpt
from smckpt.checkpoint.upkeep.reshard import reshard_checkpoint
from tests.support.collectives import count_collectives
from tests.support.launch import run_ranks
from tests.support.nets import Net, groups_of, step
from tests.support.truth import assembled, differences, snapshot

TWO = ("one unit", "TP", "plain")
FOUR = ("FSDP2 + TP",)
EIGHT = ("HSDP + TP",)


@functools.cache
def mesh(*dims: tuple[str, int]) -> Any:
    names, shape = zip(*dims, strict=True)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def parallel(model: Net, how: str) -> Net:
    if how == "plain":
        return model
    if how == "one unit":
        fully_shard(model, mesh=mesh(("shard", 2)), reshard_after_forward=False)
        return model
    if how == "TP":
        return with_tp(model, mesh(("tp", 2)))
    dims = (("shard", 2), ("tp", 2))
    grid = mesh(*dims) if how == "FSDP2 + TP" else mesh(("replicate", 2), *dims)
    outer = grid["shard"] if how == "FSDP2 + TP" else grid["replicate", "shard"]
    return sharded(with_tp(model, grid["tp"]), outer)


def with_tp(model: Net, grid: Any) -> Net:
    """Columns of 7 and rows of 7 over two ranks: uneven."""
    for block in model.blocks:
        plan = {
            "up": ColwiseParallel(output_layouts=Replicate()),
            "down": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(block, grid, plan)
    return model


def sharded(model: Net, grid: Any, **more: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, mesh=grid, **more)
    fully_shard(model, mesh=grid, **more)
    return model


def build(how: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = parallel(Net(), how)
    return model, torch.optim.AdamW(groups_of(model), lr=1e-2)


def taken(model: Any, optimizer: Any, kind: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def whole(tensor: Any) -> torch.Tensor:
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone()


def truth(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and state tensor under its name, gathered by torch's DTensor."""
    out = {f"model.{n}": whole(v) for n, v in model.state_dict().items()}
    names = {p: n for n, p in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                out[f"optimizer.state.{names[parameter]}.{slot}"] = whole(value)
    return out


def check(how: str, folder: str) -> dict[str, Any]:
    """All that one configuration must show; a list of differences for each."""
    model, optimizer = build(how)
    out: dict[str, Any] = {}
    step(model, optimizer, 2)
    before = snapshot(model, optimizer)
    expected = truth(model, optimizer)
    with count_collectives() as counted:
        local = taken(model, optimizer, smckpt.LOCAL)
        smckpt.async_save(local, checkpoint_id=folder)
        smckpt.maybe_finalize_async_calls()
    out["collectives"] = counted.total
    for kind in (smckpt.LOCAL, smckpt.SHARDED):
        ours = assembled(taken(model, optimizer, kind))
        out[kind.value] = differences(ours, expected)
    out["untouched"] = differences(before, snapshot(model, optimizer))
    step(model, optimizer, 1, seed=7)
    optimizer.param_groups[0].update(lr=9.0, initial_lr=9.0)
    out["moved"] = differences(before, snapshot(model, optimizer))
    with count_collectives() as counted:
        smckpt.load(taken(model, optimizer, smckpt.LOCAL), checkpoint_id=folder)
    out["collectives"] += counted.total
    out["loaded"] = differences(before, snapshot(model, optimizer))
    other, fresh = build(how, seed=3)
    with count_collectives() as counted:
        smckpt.load(taken(other, fresh, smckpt.LOCAL), checkpoint_id=folder)
    out["collectives"] += counted.total
    out["loaded into a fresh one"] = differences(before, snapshot(other, fresh))
    step(model, optimizer, 1, seed=5)
    step(other, fresh, 1, seed=5)
    out["trains on the same"] = differences(truth(other, fresh), truth(model, optimizer))
    return out


def check_all(cases: tuple[str, ...], folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)
    out = {}
    for name in cases:
        try:
            out[name] = check(name, f"{folder}/{name}")
        except Exception:  # told by case; what raises, raises on all ranks
            out[name] = {"raised": traceback.format_exc(), "moved": True, "collectives": 0}
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case → what each rank found. Ranks are started once for all cases of a world size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world, cases in ((2, TWO), (4, FOUR), (8, EIGHT)):
        folder: Path = tmp_path_factory.mktemp(f"meshes-{world}")
        ranks = run_ranks(check_all, world, cases, str(folder), timeout=240)
        found.update({case: [rank[case] for rank in ranks] for case in cases})
    return found


@pytest.mark.parametrize("case", [*TWO, *FOUR, *EIGHT])
def test_state_is_the_truth_and_comes_back_without_a_collective(
    results: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for rank in results[case]:
        assert rank.pop("moved"), "the step must have changed something"
        assert rank.pop("collectives") == 0
        assert {what: found for what, found in rank.items() if found} == {}


def staged(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A stage of a pipeline of two ranks: layers, and their names, that the other one has not."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(seed)
    layer = torch.nn.Linear(5, 3)
    alone = [DeviceMesh("cpu", [each]) for each in (0, 1)]
    fully_shard(layer, mesh=alone[rank])
    model = torch.nn.ModuleDict({f"layer{rank}": layer})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    layer(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def resume_stages(folder: str) -> None:
    for kind in (smckpt.SHARDED, smckpt.LOCAL):
        model, optimizer = staged(1)
        saved = truth(model, optimizer)
        smckpt.save(taken(model, optimizer, kind), checkpoint_id=f"{folder}/{kind}")
        model, optimizer = staged(2)
        assert differences(saved, truth(model, optimizer))
        smckpt.load(taken(model, optimizer, kind), checkpoint_id=f"{folder}/{kind}")
        assert not differences(saved, truth(model, optimizer))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        reshard_checkpoint(f"{folder}/{smckpt.SHARDED}", f"{folder}/resharded", shard=2)
    torch.distributed.barrier()
    model, optimizer = staged(3)
    smckpt.load(taken(model, optimizer, smckpt.SHARDED), checkpoint_id=f"{folder}/resharded")
    assert not differences(saved, truth(model, optimizer))


def test_stages_of_a_pipeline_under_fsdp2_resume(tmp_path: Path) -> None:
    run_ranks(resume_stages, 2, str(tmp_path))
