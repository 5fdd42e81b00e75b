"""Each wrapper and kind of state on a CUDA device: saved while training goes on, and resumed."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import smckpt
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.nets import Block, Frozen, Net, groups_of
from tests.support.on_cuda import moved, needs_cuda, taken
from tests.support.truth import differences, snapshot

pytestmark = needs_cuda

WRAPPERS = ["plain", "ddp", "fsdp2", "fsdp2 offload", "fsdp1", "fsdp1 original", "fsdp1 offload"]
KINDS = ["LOCAL", "SHARDED", "FULL"]
CASES = [f"{wrapper}, {kind}" for wrapper in WRAPPERS for kind in KINDS]
# torch gives FULL state back to parameters and buffers on one device only
REFUSED = [f"{wrapper}, FULL" for wrapper in WRAPPERS if "offload" in wrapper]


def build(wrapper: str, device: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = Net()
    offload = "offload" in wrapper
    if wrapper.startswith("fsdp1"):
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block, Frozen}),
            use_orig_params="original" in wrapper,
            device_id=torch.device(device, 0 if device == "cuda" else None),
            cpu_offload=CPUOffload(offload_params=True) if offload else None,
        )
    elif wrapper.startswith("fsdp2"):
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
        policy = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
        if offload:
            for buffer in model.buffers():
                buffer.data = buffer.data.to(device)
    else:
        model = model.to(device)
        model = DistributedDataParallel(model) if wrapper == "ddp" else model
    groups = groups_of(model)
    if wrapper in ("fsdp1", "fsdp1 offload"):
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    arguments: dict[str, Any] = {"foreach": True} if offload else {"fused": device == "cuda"}
    return model, torch.optim.AdamW(groups, lr=1e-2 if seed == 0 else 9.0, **arguments)


def resumed(case: str, device: str, path: str) -> dict[str, Any]:
    """What differs, by what it should be."""
    wrapper, kind = case.split(", ")
    kind = getattr(smckpt, kind)
    model, optimizer = build(wrapper, device, 0)
    moved(model, optimizer, device, 3)
    saved = snapshot(model, optimizer)
    handle = smckpt.async_save(taken(model, optimizer, kind), checkpoint_id=path)
    moved(model, optimizer, device, 3, seed=1)
    assert handle is not None
    handle.wait(seconds(120))
    straight = snapshot(model, optimizer)
    fresh, its = build(wrapper, device, 1)
    moved(fresh, its, device, 1)
    target = taken(fresh, its, kind)
    smckpt.load(target, checkpoint_id=path)
    found = {"loaded": differences(snapshot(fresh, its), saved)}
    moved(fresh, its, device, 3, seed=1)
    found["trained on"] = differences(snapshot(fresh, its), straight)
    found["moved"] = [] if differences(saved, straight) else ["nothing"]
    return {what: bad for what, bad in found.items() if bad}


def resumed_all(cases: list[str], device: str, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)
    if device == "cuda":
        torch.cuda.set_device(0)
    out: dict[str, Any] = {}
    for case in cases:
        try:
            out[case] = resumed(case, device, f"{folder}/{case.replace(', ', '-')}")
        except Exception:
            out[case] = traceback.format_exc()
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one process of a job by NCCL alone."""
    folder = str(tmp_path_factory.mktemp("alone"))
    (found,) = run_ranks(resumed_all, 1, CASES, "cuda", folder, backend="nccl", timeout=240)
    return dict(found)


@pytest.mark.parametrize("case", CASES)
def test_one_rank_by_nccl_goes_on_bit_for_bit(alone: dict[str, Any], case: str) -> None:
    if case in REFUSED:
        assert "ValueError: Multiple devices found" in alone[case]
    else:
        assert alone[case] == {}


# FULL is left out: FSDP2 by gloo crashed on one device (torch 2.11; the cause is not known)
TWO = [
    f"{wrapper}, {kind}"
    for wrapper in ("ddp", "fsdp2", "fsdp1 original")
    for kind in ("LOCAL", "SHARDED")
]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two ranks on one device: NCCL refuses that, gloo moves the device's tensors."""
    folder = str(tmp_path_factory.mktemp("together"))
    return run_ranks(resumed_all, 2, TWO, "cuda", folder, backend="gloo", timeout=240)


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_on_one_device_by_gloo_go_on_bit_for_bit(
    together: list[dict[str, Any]], case: str
) -> None:
    assert [rank[case] for rank in together] == [{}, {}]
