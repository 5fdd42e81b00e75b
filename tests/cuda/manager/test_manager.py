"""A run on a CUDA device under the manager: the next process goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smckpt
from tests.support.launch import run_ranks
from tests.support.on_cuda import needs_cuda
from tests.support.truth import differences, snapshot

pytestmark = needs_cuda


def train(folder: str, device: str, last: int) -> tuple[int, dict[str, torch.Tensor]]:
    """The step from which it went on, and what it came to; with random numbers of the device."""
    if device == "cuda":
        torch.cuda.set_device(0)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(32, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 32)]
    model: Any = torch.nn.Sequential(*layers).to(device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    with smckpt.CheckpointManager(folder, interval=4, keep_last_n=2) as manager:
        began = step = manager.restore(into=state)
        while step < last:
            batch = torch.randn(16, 32, device=device)
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if manager.should_save(step):
                manager.save(step, state)
    found = {name: tensor.cpu() for name, tensor in snapshot(model, optimizer).items()}
    return began, found | {"drawn": torch.rand(5, device=device).cpu()}


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, backend: str) -> None:
    ((none, straight),) = run_ranks(
        train, 1, str(tmp_path / "straight"), "cuda", 11, backend=backend
    )
    run = str(tmp_path / "run")
    run_ranks(train, 1, run, "cuda", 9, backend=backend)
    ((began, resumed),) = run_ranks(train, 1, run, "cuda", 11, backend=backend)
    assert (none, began) == (0, 8)
    assert differences(resumed, straight) == []


def test_a_run_on_the_device_goes_on_on_the_cpu_and_back(tmp_path: Path) -> None:
    run = str(tmp_path)
    run_ranks(train, 1, run, "cuda", 4, backend="nccl")
    ((began, _),) = run_ranks(train, 1, run, "cpu", 8, backend="gloo")
    ((again, _),) = run_ranks(train, 1, run, "cuda", 9, backend="nccl")
    assert (began, again) == (4, 8)
