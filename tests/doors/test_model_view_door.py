"""A wrapper of models that smckpt does not know comes in through `register_model_view`: this file
is the package of that wrapper, and uses public names alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smckpt
from smckpt.layout.geometry import MeshGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.state_dict import ModelView, register_model_view
from tests.support.launch import run_ranks

ROWS = 6


class Rows(nn.Module):
    """A linear layer of which each rank keeps some rows, as plain tensors below `_cut`."""

    def __init__(self, whole: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        self._cut = nn.Linear(whole.in_features, ROWS // ranks)
        self.ranks = ranks
        for name, tensor in whole.named_parameters():
            mine = tensor.detach().chunk(ranks)[rank]
            setattr(self._cut, name, nn.Parameter(mine.clone()))

    def forward(self, x: torch.Tensor) -> Any:
        return self._cut(x)


class RowsView(ModelView):
    components = (*ModelView.components, "_cut")

    @classmethod
    def sees(cls, model: nn.Module) -> bool:
        return isinstance(model, Rows)

    def geometry(self, fqn: str, tensor: torch.Tensor) -> MeshGeometry | None:
        ranks = self.model.ranks
        if ranks == 1:
            return None
        mesh = Mesh(("rows",), (ranks,), tuple(range(ranks)))
        return MeshGeometry(fqn, (ROWS, *tensor.shape[1:]), mesh, (Placement("shard", 0),))


def trained(rank: int, ranks: int, seed: int, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Rows(nn.Linear(4, ROWS), rank, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def taken(model: Any, optimizer: torch.optim.Optimizer, kind: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors(state: dict[str, Any], rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Of this rank, or of `rank` out of `ranks` if the state is that of one process."""
    named = {f"model.{name}": value for name, value in state["model"].items()}
    for name, slots in state["optimizer"]["state"].items():
        named |= {f"{name}.{slot}": value for slot, value in slots.items()}
    return {n: (v.chunk(ranks)[rank] if v.dim() else v).clone() for n, v in named.items()}


def job(folder: str) -> list[str]:
    """What a save of two ranks gives back to other models; names of what differs."""
    register_model_view("rows", RowsView)
    rank, bad = dist.get_rank(), []
    model, optimizer = trained(rank, 2, seed=1)
    local = taken(model, optimizer, smckpt.LOCAL)
    if sorted(local["model"]) != ["bias", "weight"]:
        bad.append(f"names {list(local['model'])}")
    expected = tensors(taken(model, optimizer, smckpt.SHARDED))
    smckpt.save(local, checkpoint_id=folder)
    for kind in (smckpt.LOCAL, smckpt.SHARDED):
        target = taken(*trained(rank, 2, seed=2, steps=0), kind)
        smckpt.load(target, checkpoint_id=folder)
        found = tensors(target)
        if kind is smckpt.SHARDED:
            bad += [n for n in expected if not torch.equal(found[n], expected[n])]
        else:
            bad += [n for n in ("weight", "bias") if not torch.equal(
                target["model"][n], expected[f"model.{n}"])]  # fmt: skip
    whole = taken(*trained(0, 1, seed=3, steps=0), smckpt.SHARDED)
    smckpt.load(whole, checkpoint_id=folder)  # each rank the whole: another mesh
    found = tensors(whole, rank, 2)
    bad += [f"whole {n}" for n in expected if not torch.equal(found[n], expected[n])]
    try:
        with smckpt.sm_state_dict_type(model, smckpt.FULL):
            model.state_dict()
        bad.append("FULL")
    except smckpt.UsageError as error:
        if "cut by a wrapper" not in str(error):
            bad.append(str(error))
    return bad


def test_a_wrapper_that_cuts_tensors_is_saved_and_loaded_on_any_mesh(tmp_path: Path) -> None:
    assert run_ranks(job, 2, str(tmp_path)) == [[], []]


def test_what_is_no_view_is_refused_and_a_name_is_taken_once() -> None:
    for view in (object, Rows, RowsView(Rows(nn.Linear(4, ROWS), 0, 1))):
        with pytest.raises(smckpt.UsageError, match="ModelView"):
            register_model_view("none", view)  # type: ignore[arg-type]
    with pytest.raises(smckpt.UsageError, match="already"):
        register_model_view("fsdp1", RowsView)
