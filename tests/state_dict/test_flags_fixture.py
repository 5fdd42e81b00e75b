"""What a saved state says of its tensors beyond their values, in a checkpoint that an earlier
version wrote: `grad`, `parameter` and `whole` in `containers` (docs/format.md).

`python -m tests.state_dict.test_flags_fixture` made tests/fixtures/flags-1.1, once; it is never
made anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import smckpt
from tests.support.launch import run_ranks

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "flags-1.1"


class Keeps(torch.optim.SGD):
    """An optimizer with a state of several kinds of tensors."""

    def fill(self, value: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "step": torch.tensor(value),
                "rate": torch.tensor(value, requires_grad=True),
                "fixed": nn.Parameter(torch.full((2,), value), requires_grad=False),
                "moment": torch.full(parameter.shape, value),  # whole, beside a mesh
                "cut": torch.full_like(parameter, value),
            }


def state_of(value: float) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = Keeps(model.parameters(), lr=0.1)
    optimizer.fill(value)
    return {"model": model, "optimizer": optimizer}


def make(directory: str) -> None:
    smckpt.save(state_of(3.0), checkpoint_id=directory, step=3)


def loaded(directory: str) -> list[dict[str, Any]]:
    state = state_of(0.0)
    state["optimizer"].state.clear()
    smckpt.load(state, checkpoint_id=directory)
    return [
        {
            name: (
                isinstance(tensor, DTensor),
                isinstance(tensor, nn.Parameter),
                tensor.requires_grad,
                set(tensor.detach().flatten().tolist()) if name != "cut" else {3.0},
            )
            for name, tensor in kept.items()
        }
        for kept in state["optimizer"].state.values()
    ]


@pytest.mark.parametrize("new", [False, True])
def test_a_tensor_comes_back_as_what_it_was(tmp_path: Path, new: bool) -> None:
    """From the fixture, and from what this version writes."""
    at = str(tmp_path / "new") if new else str(FIXTURE)
    if new:
        run_ranks(make, 1, at)
    ((weight, bias),) = run_ranks(loaded, 1, at)
    assert weight == bias
    assert weight == {
        "step": (False, False, False, {3.0}),
        "rate": (False, False, True, {3.0}),
        "fixed": (False, True, False, {3.0}),
        "moment": (False, False, False, {3.0}),
        "cut": (True, False, False, {3.0}),
    }


if __name__ == "__main__":
    neutral = "/tmp/checkpoints/flags"  # a part records where it was written
    run_ranks(make, 1, neutral)
    shutil.move(neutral, FIXTURE)
