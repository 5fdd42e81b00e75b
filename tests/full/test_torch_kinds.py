"""Under a member of torch's `StateDictType` an FSDP1 model gives what torch gives, saved by us."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import smckpt
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.storage import open_storage
from tests.support.launch import run_ranks
from tests.support.nets import Block, Frozen, Net, groups_of, step
from tests.support.truth import differences, flat, snapshot

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def build(case: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net: Any = Net()
    if case == "compiled":
        net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    arguments: dict[str, Any] = {}
    if case == "mesh":
        arguments["device_mesh"] = init_device_mesh("cpu", (2,))
    if case == "NO_SHARD":
        arguments["sharding_strategy"] = ShardingStrategy.NO_SHARD
    model = FSDP(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Block, Frozen}),
        use_orig_params=case != "flat",
        device_id=torch.device("cpu"),
        **arguments,
    )
    return model, torch.optim.AdamW(groups_of(model), lr=1e-2)


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By torch's own helper, on every rank."""
    gathered = _gather_state_dict({k: v for k, v in state.items() if isinstance(v, torch.Tensor)})
    return flat({name: value.clone() for name, value in gathered.items()})


def check(case: str, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)
    model, optimizer = build(case)
    if case == "compiled":  # torch cannot run FSDP1 in a compiled module without a compiler
        smckpt.init_optim_state(optimizer)
    else:
        step(model, optimizer)
    out: dict[str, Any] = {}
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            stock, stock_moments = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        with smckpt.sm_state_dict_type(model, kind):
            ours = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            moments = FSDP.optim_state_dict(model, optimizer)
        stock = {name.replace("_orig_mod.", ""): value for name, value in stock.items()}
        out[f"{kind}: other types"] = [
            name for name in stock if type(stock[name]) is not type(ours["model"].get(name))
        ]
        expected = whole(stock)
        out[f"{kind}: other values"] = differences(whole(ours["model"]), expected)
        both = (_gather_state_dict(m["state"]) for m in (stock_moments, moments))
        out[f"{kind}: other moments"] = differences(*(flat(m) for m in both))

        smckpt.save(ours, checkpoint_id=f"{folder}/{kind}")
        before = snapshot(model, optimizer)
        other, fresh = build(case, seed=3)
        smckpt.init_optim_state(fresh)
        with smckpt.sm_state_dict_type(other, kind):
            target = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
            smckpt.load(target, checkpoint_id=f"{folder}/{kind}")
        # FULL makes state for parameters without elements on a rank too; steps leave it alone.
        out[f"{kind}: loaded"] = [
            difference
            for difference in differences(before, snapshot(other, fresh))
            if kind is SHARDED or not difference.startswith("only in theirs")
        ]

        another, _ = build(case, seed=4)
        with smckpt.sm_state_dict_type(another, kind):
            another.load_state_dict(ours["model"])
        with FSDP.state_dict_type(another, kind):
            filled = whole(another.state_dict())
        filled = {name.replace("_orig_mod.", ""): value for name, value in filled.items()}
        out[f"{kind}: another model"] = differences(filled, expected)

        other, fresh = build(case, seed=5)  # what torch's kind saved, our own kinds load
        with smckpt.sm_state_dict_type(other, smckpt.SHARDED):
            target = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
            smckpt.load(target, checkpoint_id=f"{folder}/{kind}")
        out[f"{kind}: loaded as ours"] = differences(before, snapshot(other, fresh))
    return out


def more(folder: str) -> dict[str, Any]:
    """Prefixes, copies in host memory, and a choice of tensors."""
    warnings.simplefilter("ignore", FutureWarning)
    model, _ = build("original")
    other, _ = build("original", seed=3)
    out: dict[str, Any] = {}
    with smckpt.sm_state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        state = model.state_dict(prefix="net.")
        expected = whole(state)
        out["without prefix"] = [name for name in state if not name.startswith("net.")]
        smckpt.save({"model": state}, checkpoint_id=folder)
    with smckpt.sm_state_dict_type(other, SHARDED):
        smckpt.load({"model": other.state_dict(prefix="net.")}, checkpoint_id=folder)
        out["loaded"] = differences(whole(other.state_dict(prefix="net.")), expected)
    chosen, _ = build("original", seed=4)
    before = whole_of(chosen)
    with smckpt.sm_state_dict_type(chosen, SHARDED, only=lambda fqn: fqn.startswith("blocks.0")):
        part = {"model": chosen.state_dict(prefix="net.")}
        smckpt.load(part, checkpoint_id=folder, check_keys_matched=False)
    after = whole_of(chosen)
    for name, value in after.items():
        mine = expected[f"net.{name}"] if name.startswith("blocks.0") else before[name]
        if not torch.equal(value, mine):
            out.setdefault("only", []).append(name)
    with smckpt.sm_state_dict_type(chosen, smckpt.SHARDED):
        try:
            smckpt.load({"model": chosen.state_dict()}, checkpoint_id=folder)
            out["names without the prefix"] = "loaded"
        except smckpt.CheckpointError as error:
            out["said"] = str(error)
    return out


def whole_of(model: Any) -> dict[str, torch.Tensor]:
    with FSDP.state_dict_type(model, FULL):
        return flat({name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("case", ["original", "flat", "mesh", "NO_SHARD", "compiled"])
def test_an_fsdp1_models_state_is_torchs_own_and_comes_back(tmp_path: Path, case: str) -> None:
    for found in run_ranks(check, 2, case, str(tmp_path)):
        assert {what: bad for what, bad in found.items() if bad} == {}
    saved = open_catalogue(open_storage(str(tmp_path / str(SHARDED))))
    rows = [row for row in saved.rows if row.path[0] == "model"]
    assert {row.path[-1] for row in rows if row.geometry.per_rank} == {
        "blocks.0.seen",
        "blocks.1.seen",
    }


def test_a_prefix_copies_in_host_memory_and_a_choice_of_tensors_are_honoured(
    tmp_path: Path,
) -> None:
    for found in run_ranks(more, 2, str(tmp_path)):
        assert "the checkpoint lacks" in found.pop("said")
        assert {what: bad for what, bad in found.items() if bad} == {}
