"""The scripts of SMP's documentation, with the imports changed and, but for one call, no more."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from smckpt import (
    DistributedFileSystemReader,
    ParallelState,
    get_global_ranks,
    init_optim_state,
    load,
    maybe_finalize_async_calls,
)
from tests.support.frameworks import smp_document
from tests.support.launch import run_ranks

Trained = tuple[FSDP, torch.optim.Optimizer]


def build(seed: int) -> Trained:
    """FSDP 2 × 2 replicas, a frozen layer among others."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 3))
    model = FSDP(
        net,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def step(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    model(torch.full((2, 8), 1.0 + dist.get_rank())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def documented(state: ParallelState) -> dict[str, Any]:
    """The documentation's functions, with their imports changed as docs/sagemaker.md says."""
    source = Path(smp_document.__file__).read_text()
    for gone in (r"import torch\.sagemaker as tsm", r"from torch\.sagemaker import state"):
        source = re.sub(rf"\n +{gone}", "", source)
    source = re.sub(r"from torch\.sagemaker\.[\w.]+ import", "from smckpt import", source)
    assert "torch.sagemaker" not in source
    names: dict[str, Any] = {"__name__": "changed", "state": state}
    exec(compile(source, smp_document.__file__, "exec"), names)
    return names


def load_sharded(model: FSDP, optimizer: Any, state: ParallelState, load_dir: str) -> None:
    """As the documentation has it, but for the optimizer."""
    reader = DistributedFileSystemReader(
        os.path.join(load_dir, f"tp{state.tp_rank}_ep{state.ep_rank}")
    )
    process_group = model.process_group
    coordinator_rank = min(get_global_ranks(process_group))
    # The documentation loads the optimizer with torch's `load_sharded_optimizer_state_dict`, which
    # in torch 2.13 cuts it over the world where replicas exist, whatever reader it is given.
    init_optim_state(optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
        }
        load(
            state_dict,
            storage_reader=reader,
            process_group=process_group,
            coordinator_rank=coordinator_rank,
        )
        model.load_state_dict(state_dict["model"])
        flattened = FSDP.optim_state_dict_to_load(model, optimizer, state_dict["optimizer"])
        optimizer.load_state_dict(flattened)


def whole(model: FSDP, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def save_and_resume(folder: str, save: Any, load_back: Any) -> dict[str, bool]:
    """Two saves under one checkpoint_id with training between and after; then a new model."""
    model, optimizer = build(0)
    for _ in range(2):
        step(model, optimizer)
        save(model, optimizer, folder)
    expected = whole(model, optimizer)
    step(model, optimizer)  # while the save is under way
    maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    other, its_optimizer = build(1)
    load_back(other, its_optimizer, folder)
    found = whole(other, its_optimizer)
    step(other, its_optimizer)
    return {
        "model": same(found[0], expected[0]),
        "optimizer": same(found[1], expected[1]),
        "goes on alike": same(whole(other, its_optimizer), whole(model, optimizer)),
    }


def local_and_sharded(folder: str) -> dict[str, dict[str, bool]]:
    state = ParallelState(dist.get_world_size(), hybrid_shard_degree=2)
    page = documented(state)
    return {
        "local": save_and_resume(f"{folder}/local", page["save_local"], page["load_local"]),
        "sharded": save_and_resume(
            f"{folder}/sharded",
            page["save_sharded"],
            lambda model, optimizer, where: load_sharded(model, optimizer, state, where),
        ),
    }


def test_smps_scripts_save_and_resume_exactly(tmp_path: Path) -> None:
    for results in run_ranks(local_and_sharded, 4, str(tmp_path)):
        for kind, result in results.items():
            assert all(result.values()), (kind, result)
