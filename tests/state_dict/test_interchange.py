"""SHARDED takes any checkpoint: FSDP1, FSDP2, DDP and one process, whichever wrote it."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import smckpt
from tests.support.launch import run_ranks
from tests.support.nets import Block, Frozen, Net, groups_of, step
from tests.support.truth import assembled, differences

# "one": all parameters in one group, as those of whole flat parameters have to be.
WRITERS = ["fsdp1 one", "fsdp1 original", "fsdp2", "fsdp2 one", "ddp", "ddp one"]
FORMS = ["LOCAL", "SHARDED"]


def one_group(kind: str) -> bool:
    return kind.endswith("one")


def build(kind: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = Net()
    if kind.startswith("fsdp1"):
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block, Frozen}),
            use_orig_params="original" in kind,
            device_id=torch.device("cpu"),
        )
    elif kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind.startswith("ddp"):
        model = DistributedDataParallel(model)
    groups = groups_of(model)
    if one_group(kind):
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    return model, torch.optim.AdamW(groups, lr=1e-2 if seed == 0 else 9.0)


def taken(model: Any, optimizer: Any, kind: Any, **more: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return assembled(taken(model, optimizer, smckpt.SHARDED))


def narrow(kind: str, seed: int) -> tuple[Any, Any]:
    """A model of one element: under FSDP1 one rank has it, and no other has optimizer state."""
    torch.manual_seed(seed)
    model: Any = torch.nn.Linear(1, 1, bias=False)
    model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu")) if kind else (
        DistributedDataParallel(model)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return model, optimizer


def refusal(target: dict[str, Any], path: str) -> str:
    """Why a load into `target` is refused; "" where it is done."""
    try:
        smckpt.load(target, checkpoint_id=path)
    except smckpt.errors.CheckpointError as error:
        return str(error)
    return ""


def narrow_read(folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind in ("", "fsdp1"):
        model, optimizer = narrow(kind, 3)
        target = taken(model, optimizer, smckpt.SHARDED)
        if refused := refusal(target, f"{folder}/narrow"):
            out[f"narrow {kind}"] = refused
            continue
        with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
            optimizer.load_state_dict(target["optimizer"])
        found = whole(model, optimizer)
        if not {"model.weight", "optimizer.state.weight.exp_avg"} <= found.keys():
            out[f"narrow {kind}"] = sorted(found)
    return out


def eager(kind: str, steps: int) -> tuple[Any, Any]:
    """Adagrad, which makes its state at once: a rank without elements counts no steps."""
    model: Any = torch.nn.Linear(1, 1, bias=False)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = FSDP(model, use_orig_params=kind == "original", device_id=torch.device("cpu"))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return model, optimizer


def eager_read(folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for form in FORMS:
        for kind in ("ddp", "flat", "original"):
            model, optimizer = eager(kind, 0)
            target = taken(model, optimizer, smckpt.SHARDED)
            refused = refusal(target, f"{folder}/eager/{form}")
            found = {float(state["step"]) for state in optimizer.state.values()}
            if refused or found != {2.0}:
                out[f"eager {form} {kind}"] = refused or found
    return out


def save_all(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    warnings.simplefilter("ignore")
    smckpt.save(taken(*narrow("fsdp1", 0), smckpt.SHARDED), checkpoint_id=f"{folder}/narrow")
    for form in FORMS:
        state = taken(*eager("original", 2), smckpt.SMStateDictType[form])
        smckpt.save(state, checkpoint_id=f"{folder}/eager/{form}")
    out = {}
    for kind in WRITERS:
        model, optimizer = build(kind, 0)
        step(model, optimizer, 2)
        out[kind] = whole(model, optimizer)
        for form in FORMS:
            state = taken(model, optimizer, smckpt.SMStateDictType[form], step=7)
            smckpt.save(state, checkpoint_id=f"{folder}/{kind}/{form}")
    return out


def read(folder: str, reader: str, expected: dict[str, Any]) -> dict[str, Any]:
    """What differs, by writer and form."""
    out: dict[str, Any] = {}
    for writer in WRITERS:
        if one_group(writer) != one_group(reader) or (
            one_group(reader) and "fsdp1 one" not in (writer, reader)
        ):
            continue  # other groups; or a pair that two groups show as well
        for form in FORMS:
            try:
                model, optimizer = build(reader, 3)
                target = taken(model, optimizer, smckpt.SHARDED, step=0)
                smckpt.load(target, checkpoint_id=f"{folder}/{writer}/{form}")
                found = differences(whole(model, optimizer), expected[writer])
                if target["step"] != 7 or optimizer.param_groups[0]["lr"] != 1e-2:
                    found.append(f"step {target['step']}, {optimizer.param_groups[0]['lr']}")
            except Exception:
                found = [traceback.format_exc()]
            if found:
                out[f"{reader} from {writer} {form}"] = found
    return out


def read_all(folder: str, expected: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    out = {**narrow_read(folder), **eager_read(folder)}
    for reader in WRITERS:
        out.update(read(folder, reader, expected))
    return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("interchange")
    return folder, run_ranks(save_all, 2, str(folder), timeout=200)[0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_kind_reads_what_every_kind_wrote_at_any_world_size(
    saved: tuple[Path, dict[str, Any]], world: int
) -> None:
    folder, expected = saved
    for found in run_ranks(read_all, world, str(folder), expected, timeout=200):
        assert found == {}


def test_one_process_without_a_group_reads_them_too(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = saved
    for reader in ("plain", "plain one"):
        assert read(str(folder), reader, expected) == {}
