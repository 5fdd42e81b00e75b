"""FSDP2, tensor parallelism, DDP and plain modules: what ranks hold is the truth, bit for bit, and
comes back without a collective, whatever the optimizer."""

from __future__ import annotations

import functools
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import smckpt
from tests.support.collectives import count_collectives
from tests.support.launch import run_ranks
from tests.support.nets import Net, groups_of, step
from tests.support.truth import assembled, differences, snapshot

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=False),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "Adam amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(_without_betas(groups), lr=1e-2),
    "SGD momentum": lambda groups: torch.optim.SGD(_without_betas(groups), lr=1e-2, momentum=0.9),
    "Adafactor": lambda groups: torch.optim.Adafactor(_without_betas(groups), lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(_without_betas(groups), lr=1e-3, centered=True),
}

# Case → (how it is parallel, optimizer).
TWO = {
    "FSDP2": ("fsdp2", "AdamW"),
    "FSDP2 mixed precision": ("mixed", "AdamW"),
    "FSDP2 one unit": ("one unit", "AdamW"),
    "TP": ("tp", "AdamW"),
    "DDP": ("ddp", "AdamW"),
    "plain": ("plain", "AdamW"),
    **{
        f"FSDP2, {name}": ("fsdp2", name)
        for name in OPTIMIZERS
        if name not in ("AdamW", "Adafactor")  # torch's Adafactor does not run on DTensors
    },
    "DDP, SGD momentum": ("ddp", "SGD momentum"),
    "DDP, Adafactor": ("ddp", "Adafactor"),
}
FOUR = {
    "HSDP": ("hsdp", "AdamW"),
    "FSDP2 + TP": ("fsdp2 + tp", "AdamW"),
    "HSDP, SGD momentum": ("hsdp", "SGD momentum"),
}
EIGHT = {"HSDP + TP": ("hsdp + tp", "AdamW")}


def _without_betas(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "betas"} for group in groups]


@functools.cache
def mesh(*dims: tuple[str, int]) -> Any:
    names, shape = zip(*dims, strict=True)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def parallel(model: Net, how: str) -> nn.Module:
    if how == "plain":
        return model
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "tp":
        return with_tp(model, mesh(("tp", 2)))
    if how == "hsdp + tp":
        grid = mesh(("replicate", 2), ("shard", 2), ("tp", 2))
        return sharded(with_tp(model, grid["tp"]), grid["replicate", "shard"])
    if how == "fsdp2 + tp":
        grid = mesh(("shard", 2), ("tp", 2))
        return sharded(with_tp(model, grid["tp"]), grid["shard"])
    if how == "hsdp":
        return sharded(model, mesh(("replicate", 2), ("shard", 2)))
    more: dict[str, Any] = {}
    if how == "mixed":
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if how == "one unit":
        fully_shard(model, mesh=mesh(("shard", 2)), reshard_after_forward=False)
        return model
    if how == "offload":
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    return sharded(model, mesh(("shard", 2)), **more)


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


def build(how: str, optimizer: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = parallel(Net(), how)
    return model, OPTIMIZERS[optimizer](groups_of(model))


def taken(model: Any, optimizer: Any, kind: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def whole(tensor: Any) -> torch.Tensor:
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone()


def truth(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and state tensor under its name, gathered by torch's DTensor."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    lead = "module." if bare is not model else ""
    out = {f"model.{lead}{n}": whole(v) for n, v in bare.state_dict().items()}
    names = {p: f"{lead}{n}" for n, p in bare.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                out[f"optimizer.state.{names[parameter]}.{slot}"] = whole(value)
    return out


def check(case: tuple[str, str], folder: str) -> dict[str, Any]:
    """All that one configuration must show; a list of differences for each."""
    model, optimizer = build(*case)
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
        out[kind.value] = differences(bare_names(ours), bare_names(expected))
    out["untouched"] = differences(before, snapshot(model, optimizer))
    step(model, optimizer, 1, seed=7)
    optimizer.param_groups[0].update(lr=9.0, initial_lr=9.0)
    out["moved"] = differences(before, snapshot(model, optimizer))
    with count_collectives() as counted:
        smckpt.load(taken(model, optimizer, smckpt.LOCAL), checkpoint_id=folder)
    out["collectives"] += counted.total
    out["loaded"] = differences(before, snapshot(model, optimizer))
    other, fresh = build(*case, seed=3)
    with count_collectives() as counted:
        smckpt.load(taken(other, fresh, smckpt.LOCAL), checkpoint_id=folder)
    out["collectives"] += counted.total
    out["loaded into a fresh one"] = differences(before, snapshot(other, fresh))
    step(model, optimizer, 1, seed=5)
    step(other, fresh, 1, seed=5)
    out["trains on the same"] = differences(truth(other, fresh), truth(model, optimizer))
    return out


def bare_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("module.", ""): value for name, value in tensors.items()}


def check_all(cases: dict[str, tuple[str, str]], folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)
    out = {}
    for name, case in cases.items():
        try:
            out[name] = check(case, f"{folder}/{name}")
        except Exception:  # told by case; what raises, raises on all ranks
            out[name] = {"raised": traceback.format_exc(), "moved": True, "collectives": 0}
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case → what each rank found. Ranks are started once for all cases of a world size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world, cases in ((2, TWO), (4, FOUR), (8, EIGHT)):
        folder: Path = tmp_path_factory.mktemp(f"fsdp2-{world}")
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


def neutral(_: str) -> dict[str, Any]:
    """What `init_optim_state` changes, by optimizer and kind of model; nothing, and it is enough
    for a step to be what it would have been."""
    out = {}
    for how in ("plain", "fsdp2", "ddp"):
        for name in OPTIMIZERS:
            if (how, name) == ("fsdp2", "Adafactor"):
                continue  # torch's does not run on DTensors
            model, optimizer = build(how, name)
            other, untouched = build(how, name)
            before, random = snapshot(model, optimizer), torch.get_rng_state()
            smckpt.init_optim_state(optimizer)
            after = snapshot(model, optimizer)
            made = {key for key in after if key.startswith("state ")}
            wrong = differences(before, {k: v for k, v in after.items() if k not in made})
            wrong += [] if torch.equal(random, torch.get_rng_state()) else ["the RNG moved"]
            lazy = name.startswith("SGD")  # whose momentum is the first gradient
            wrong += [] if made or lazy else ["no state was made"]
            again = snapshot(model, optimizer)
            smckpt.init_optim_state(optimizer)
            wrong += differences(again, snapshot(model, optimizer))
            step(model, optimizer, 1)
            step(other, untouched, 1)
            wrong += differences(snapshot(other, untouched), snapshot(model, optimizer))
            out[f"{how}, {name}"] = wrong
    return out


def test_init_optim_state_makes_state_and_changes_nothing_else(tmp_path: Path) -> None:
    for rank in run_ranks(neutral, 2, str(tmp_path), timeout=240):
        assert {case: wrong for case, wrong in rank.items() if wrong} == {}
