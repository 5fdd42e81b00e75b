"""FSDP1: what ranks hold, taken without torch's hooks, is what torch gathers, bit for bit."""

from __future__ import annotations

import functools
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import smckpt
from tests.support.collectives import count_collectives
from tests.support.launch import run_ranks
from tests.support.nets import Block, Frozen, Net, groups_of, step
from tests.support.truth import assembled, differences, flat, snapshot

TWO = {
    f"{strategy}{' original' if original else ''}{more}": (strategy, original, more.strip())
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for original in (False, True)
    for more in ("", " mixed" if strategy == "FULL_SHARD" else "")
}
FOUR = {
    f"HYBRID_SHARD{' original' if original else ''} {grid}": ("HYBRID_SHARD", original, grid)
    for original in (False, True)
    for grid in ("groups", "mesh")
}


@functools.cache
def grid(kind: str) -> Any:
    """Four ranks as 2 × 2: (shard group, replication group), or a device mesh."""
    if kind == "mesh":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return rows[dist.get_rank() // 2], columns[dist.get_rank() % 2]


def build(strategy: str, original: bool, more: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    arguments: dict[str, Any] = {}
    if more == "mixed":
        arguments["mixed_precision"] = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    if more == "offload":
        arguments["cpu_offload"] = CPUOffload(offload_params=True)
    if more == "groups":
        arguments["process_group"] = grid("groups")
    if more == "mesh":
        arguments["device_mesh"] = grid("mesh")
    model = FSDP(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({Block, Frozen}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        device_id=torch.device("cpu"),
        **arguments,
    )
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    return model, optimizer


def taken(model: Any, optimizer: Any, kind: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def truth(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """By torch's own gathering; slot by slot, for with use_orig_params it gathers all slots of a
    unit into one buffer and hands out views of it, so that each has the bits of the last."""
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    ):
        out = flat(model.state_dict(), "model")
        stock = optimizer.state_dict()
        for wanted in ("step", "exp_avg", "exp_avg_sq"):
            state = {
                key: {slot: value for slot, value in slots.items() if slot == wanted}
                for key, slots in stock["state"].items()
            }
            part = FSDP.optim_state_dict(model, optimizer, {**stock, "state": state})
            out |= flat(part["state"], "optimizer.state")
    return out


def check(case: tuple[str, bool, str], folder: str) -> dict[str, Any]:
    """All that one configuration must show; a list of differences for each."""
    model, optimizer = build(*case)
    out: dict[str, Any] = {}
    before_first_forward = taken(model, optimizer, smckpt.LOCAL)
    out["before the first forward"] = differences(
        assembled({"model": before_first_forward["model"]}), flat(truth_of_model(model), "model")
    )
    step(model, optimizer, 2)
    before = snapshot(model, optimizer)
    expected = truth(model, optimizer)
    with count_collectives() as counted:
        local = taken(model, optimizer, smckpt.LOCAL)
    out["collectives"] = counted.total
    for kind in (smckpt.LOCAL, smckpt.SHARDED):
        out[kind.value] = differences(assembled(taken(model, optimizer, kind)), expected)
    with smckpt.sm_state_dict_type(model, StateDictType.FULL_STATE_DICT):  # torch's member
        everywhere = flat(dict(model.state_dict()), "model")
    out["torch's FULL"] = differences(everywhere, flat(truth_of_model(model), "model"))
    out["untouched"] = differences(before, snapshot(model, optimizer))
    with count_collectives() as counted:
        smckpt.save(local, checkpoint_id=folder)
    step(model, optimizer, 1, seed=7)
    optimizer.param_groups[0].update(lr=9.0, initial_lr=9.0)
    out["moved"] = differences(before, snapshot(model, optimizer))
    with count_collectives() as again:
        smckpt.load(taken(model, optimizer, smckpt.LOCAL), checkpoint_id=folder)
    out["loaded"] = differences(before, snapshot(model, optimizer))
    out["collectives"] += counted.total + again.total
    out["gathered after the load"] = differences(truth(model, optimizer), expected)
    other, fresh = build(*case, seed=3)
    smckpt.init_optim_state(fresh)
    smckpt.load(taken(other, fresh, smckpt.LOCAL), checkpoint_id=folder)
    out["loaded into a fresh one"] = differences(truth(other, fresh), expected)
    step(model, optimizer, 1, seed=5)
    step(other, fresh, 1, seed=5)
    out["trains on the same"] = differences(truth(other, fresh), truth(model, optimizer))
    return out


def truth_of_model(model: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
    ):
        return dict(model.state_dict())


def check_all(cases: dict[str, tuple[str, bool, str]], folder: str) -> dict[str, Any]:
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
    for world, cases in ((2, TWO), (4, FOUR)):
        folder: Path = tmp_path_factory.mktemp(f"fsdp1-{world}")
        ranks = run_ranks(check_all, world, cases, str(folder), timeout=240)
        found.update({case: [rank[case] for rank in ranks] for case in cases})
    return found


@pytest.mark.parametrize("case", [*TWO, *FOUR])
def test_local_and_sharded_state_is_what_torch_gathers_and_comes_back(
    results: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for rank in results[case]:
        assert rank.pop("moved"), "the step must have changed something"
        assert rank.pop("collectives") == 0
        assert {what: found for what, found in rank.items() if found} == {}


def offloaded(folder: str) -> dict[str, Any]:
    """torch pins offloaded shards at the first forward, which needs an accelerator: none is run."""
    out = {}
    for original in (False, True):
        plain, _ = build("FULL_SHARD", original, "")
        expected = flat(truth_of_model(plain), "model")
        model, optimizer = build("FULL_SHARD", original, "offload")
        smckpt.init_optim_state(optimizer)
        local = taken(model, optimizer, smckpt.LOCAL)
        out[f"taken {original}"] = differences(assembled({"model": local["model"]}), expected)
        smckpt.save(local, checkpoint_id=f"{folder}/{original}")
        before = snapshot(model, optimizer)
        other, fresh = build("FULL_SHARD", original, "offload", seed=4)
        out[f"moved {original}"] = not differences(before, snapshot(other, fresh))
        smckpt.load(taken(other, fresh, smckpt.LOCAL), checkpoint_id=f"{folder}/{original}")
        out[f"loaded {original}"] = differences(before, snapshot(other, fresh))
    return out


def refusals(_: str) -> dict[str, str]:
    """What FSDP1 itself does not shard rightly, or what no piece describes, is refused by name."""
    said = {}
    torch.manual_seed(0)
    apart = FSDP(
        Net(frozen=False),
        auto_wrap_policy=ModuleWrapPolicy({Block, torch.nn.Linear}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    convolution = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    last = FSDP(convolution, use_orig_params=True, device_id=torch.device("cpu"))
    for name, model in {"shared by two units": apart, "channels last": last}.items():
        try:
            with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
                model.state_dict()
        except smckpt.StateError as error:
            said[name] = str(error)
    return said


def small_things(folder: str) -> Any:
    warnings.simplefilter("ignore", FutureWarning)
    return offloaded(folder), refusals(folder)


def test_offloaded_shards_come_back_and_what_cannot_be_described_is_refused_by_name(
    tmp_path: Path,
) -> None:
    for found, said in run_ranks(small_things, 2, str(tmp_path)):
        assert {what: bad for what, bad in found.items() if bad} == {}
        assert "embedding.weight" in said["shared by two units"]
        assert "contiguous" in said["channels last"] and "weight" in said["channels last"]


class Gapped(nn.Module):
    """A parameter without elements, one of fewer elements than ranks, and two others."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Linear(3, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.body(given) * self.scale + self.none.sum()


GAPPED: dict[str, Any] = {
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "first": lambda p: torch.optim.Adagrad(p, lr=0.1),  # its state is made with it
}
WHERE = ("in the unit", "left out", "whole")


def without_elements(folder: str, where: str, kind: str) -> dict[str, list[str]]:
    """For each optimizer what differs after a load and after two more steps."""

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        for parameter in model.parameters():  # as code does that wants a gradient of each
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    def started(seed: int, make: Any) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        inner = Gapped()
        out = [inner.none] if where == "left out" else None
        strategy = ShardingStrategy.NO_SHARD if where == "whole" else ShardingStrategy.FULL_SHARD
        model = FSDP(
            inner,
            sharding_strategy=strategy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
            ignored_states=out,
        )
        return model, make(model.parameters())

    def seen(model: Any, optimizer: Any) -> dict[str, Any]:
        numbers = optimizer.state_dict()["state"]
        return flat({"model": dict(model.named_parameters()), "state": numbers}, "")

    found: dict[str, list[str]] = {}
    for name, make in GAPPED.items():
        one, two = started(0, make), started(1, make)
        train(*one)
        smckpt.save(taken(*one, getattr(smckpt, kind)), checkpoint_id=f"{folder}/{name}")
        smckpt.load(taken(*two, getattr(smckpt, kind)), checkpoint_id=f"{folder}/{name}")
        found[name] = differences(seen(*two), seen(*one))
        for _ in range(2):
            train(*one)
            train(*two)
        found[name] += differences(seen(*two), seen(*one))
    return found


@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED", "FULL"])
@pytest.mark.parametrize("where", WHERE)
def test_state_of_parameters_without_elements_comes_back(
    tmp_path: Path, where: str, kind: str
) -> None:
    """Of those that no rank has elements of, and of those that another rank has."""
    exact: dict[str, list[str]] = {name: [] for name in GAPPED}
    assert run_ranks(without_elements, 3, str(tmp_path), where, kind) == [exact] * 3


def without_state(folder: str) -> str:
    model = FSDP(Gapped(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()  # `none` has no gradient, so no state
    smckpt.save(taken(model, optimizer, smckpt.SHARDED), checkpoint_id=folder)
    smckpt.load(taken(model, optimizer, smckpt.SHARDED), checkpoint_id=folder)
    with pytest.raises(smckpt.errors.UsageError) as caught:
        taken(model, optimizer, smckpt.FULL)
    return str(caught.value)


def with_a_slot_of_some(_: str) -> str:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = FSDP(inner, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if name.endswith("0.weight"):
            optimizer.state[parameter]["later"] = torch.zeros_like(parameter)
    with pytest.raises(smckpt.errors.UsageError) as caught:
        taken(model, optimizer, smckpt.FULL)
    return str(caught.value)


def test_full_refuses_a_slot_that_some_parameters_of_a_unit_have(tmp_path: Path) -> None:
    for message in run_ranks(with_a_slot_of_some, 2, str(tmp_path)):
        assert "some parameters have no 'later' of AdamW" in message and "SHARDED" in message


def test_full_state_that_torch_does_not_gather_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for message in run_ranks(without_state, 3, str(tmp_path)):
        assert "none is not in the optimizer state" in message and "SHARDED" in message
