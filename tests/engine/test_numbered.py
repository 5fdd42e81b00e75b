"""A LOCAL checkpoint of two ranks in a target without a context, in one process and on three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import smckpt
from smckpt.errors import KeysMismatchError
from tests.support.launch import run_ranks


def stepped(shard: bool = False, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    if shard:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: str) -> None:
    model, optimizer = stepped(shard=True)
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        state = {"model": model.state_dict(), "parts": {"optimizer": optimizer.state_dict()}}
    smckpt.save(state, checkpoint_id=folder)


def loaded(folder: str) -> None:
    known, its = stepped()
    model, optimizer = stepped(seed=1)
    smckpt.load({"model": model.state_dict()}, checkpoint_id=folder)
    assert all(map(torch.equal, model.state_dict().values(), known.state_dict().values()))
    targets: list[Any] = [optimizer, optimizer.state_dict(), torch.optim.AdamW(model.parameters())]
    for target in targets:
        with pytest.raises(KeysMismatchError, match="by the names of its parameters.*SHARDED"):
            smckpt.load({"parts": {"optimizer": target}}, checkpoint_id=folder)
    with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
        state = {"model": model.state_dict(), "parts": {"optimizer": optimizer.state_dict()}}
    smckpt.load(state, checkpoint_id=folder)
    for one, other in zip(optimizer.state.values(), its.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], other["exp_avg"])


def test_an_optimizer_by_numbers_is_refused_and_one_by_names_filled(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    run_ranks(save, 2, folder)
    loaded(folder)
    run_ranks(loaded, 3, folder)
