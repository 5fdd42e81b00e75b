"""FSDP2: LOCAL and SHARDED state is what torch gathers, and comes back bit for bit."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import keystr, tree_leaves_with_path

import smckpt
from smckpt.checkpoint.upkeep.reshard import reshard_checkpoint
from smckpt.state_dict.tensors import dtensor_parts
from tests.support.collectives import count_collectives
from tests.support.launch import run_ranks
from tests.support.nets import Net, groups_of, step
from tests.support.truth import assembled, differences, flat, snapshot

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "AdamW amsgrad": functools.partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2),
    "SGD momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}  # Adafactor is not here: in torch 2.13 its own step raises on sharded DTensors
TWO = {f"1-D {name}": ("1-D", name) for name in OPTIMIZERS} | {
    kind: (kind, "AdamW")
    for kind in ("replicated", "mixed", "offload", "stateless", "apart", "narrow")
}
FOUR = {
    f"{kind} {optimizer}": (kind, optimizer)
    for kind in ("HSDP", "FSDP+TP")
    for optimizer in ("AdamW", "SGD momentum")
}


@functools.cache
def mesh_of(kind: str) -> Any:
    if kind == "HSDP":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "FSDP+TP":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    if kind == "replicated":
        return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))


def build(kind: str, optimizer: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """Seven and eleven rows divide by nothing; TP wants even rows, so its model is wider; of one
    row some ranks have nothing."""
    torch.manual_seed(seed)
    tensor_parallel = kind == "FSDP+TP"
    width = {"FSDP+TP": 8, "narrow": 1}.get(kind, 6)
    model = Net(width, shared=kind not in ("apart", "FSDP+TP"))
    mesh = mesh_of(kind)
    more: dict[str, Any] = {}
    if tensor_parallel:
        plan = {
            "frozen": ColwiseParallel(output_layouts=Replicate()),
            "blocks.0.down": RowwiseParallel(input_layouts=Replicate()),
            "head": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["shard"]
    if kind == "mixed":
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if kind == "offload":
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **more)
    fully_shard(model.frozen, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)
    groups = groups_of(model)
    if kind == "stateless":  # a parameter that is in the optimizer and never gets a gradient
        model.register_parameter("idle", nn.Parameter(torch.randn(3)))
        groups[0]["params"].append(model.idle)
    return model, OPTIMIZERS[optimizer](groups)


def taken(model: Any, optimizer: Any, kind: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def truth(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Gathered tensor by tensor with torch's own `full_tensor`."""
    names = {p: name for name, p in model.named_parameters()}
    state = {names[p]: slots for p, slots in optimizer.state.items()}
    return flat({"model": model.state_dict(), "optimizer": {"state": state}})


def check(case: tuple[str, str], folder: str) -> dict[str, Any]:
    """All that one configuration must show; a list of differences for each."""
    model, optimizer = build(*case)
    out: dict[str, Any] = {}
    step(model, optimizer, 2)
    before, expected = snapshot(model, optimizer), truth(model, optimizer)
    for kind in (smckpt.LOCAL, smckpt.SHARDED):
        out[kind.value] = differences(assembled(taken(model, optimizer, kind)), expected)
    with torch.no_grad():  # leaves the modules with unsharded parameters
        model(torch.zeros(2, 3, dtype=torch.long))
    again = assembled(taken(model, optimizer, smckpt.LOCAL))
    forward = differences(again, expected)  # its buffers count the forwards
    out["after a forward alone"] = [what for what in forward if ".seen" not in what]
    before, expected = snapshot(model, optimizer), truth(model, optimizer)
    with count_collectives() as counted:
        smckpt.async_save(taken(model, optimizer, smckpt.LOCAL), checkpoint_id=folder)
        smckpt.maybe_finalize_async_calls()
    out["untouched"] = differences(before, snapshot(model, optimizer))
    step(model, optimizer, 1, seed=5)
    after = snapshot(model, optimizer)
    out["moved"] = differences(before, after)
    for initialised in (True, False):
        other, fresh = build(*case, seed=3)
        with count_collectives() as more:
            if initialised:
                smckpt.init_optim_state(fresh)
            smckpt.load(taken(other, fresh, smckpt.LOCAL), checkpoint_id=folder)
        counted.calls.update(more.calls)
        out[f"loaded, initialised={initialised}"] = differences(snapshot(other, fresh), before)
        step(other, fresh, 1, seed=5)
        out[f"next step, initialised={initialised}"] = differences(snapshot(other, fresh), after)
    out["collectives"] = dict(counted.calls)
    return out


def check_all(cases: dict[str, tuple[str, str]], folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", FutureWarning)
    out = {}
    for name, case in cases.items():
        try:
            out[name] = check(case, f"{folder}/{name}")
        except Exception:  # told by case; what raises, raises on all ranks
            out[name] = {"raised": traceback.format_exc(), "moved": True}
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case → what each rank found. Ranks are started once for all cases of a world size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world, cases in ((2, TWO), (4, FOUR)):
        folder = tmp_path_factory.mktemp(f"fsdp2-{world}")
        ranks = run_ranks(check_all, world, cases, str(folder), timeout=240)
        found.update({case: [rank[case] for rank in ranks] for case in cases})
    return found


@pytest.mark.parametrize("case", [*TWO, *FOUR])
def test_local_state_is_what_torch_gathers_comes_back_and_trains_on_without_a_collective(
    results: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for rank in results[case]:
        assert rank.pop("moved"), "the step must have changed something"
        assert {what: found for what, found in rank.items() if found} == {}


class OfItsPart(torch.optim.Optimizer):
    """One that keeps of each parameter copies that its mesh divides otherwise, the mean of all of
    it, as a DTensor, and a sum over the
    elements of its own rank, or of all ranks."""

    def __init__(self, parameters: Any, alike: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.alike = alike

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            _, mesh, _, _ = dtensor_parts(parameter)
            mean = parameter.full_tensor().mean()
            own = parameter.full_tensor() if self.alike else parameter.to_local()
            rows = parameter.detach().reshape(len(parameter), -1)
            self.state[parameter] = {
                "rows": rows.mean(1, keepdim=True),
                "all": [parameter.detach().redistribute(mesh, [Replicate()])],
                "last": parameter.detach().redistribute(mesh, [Shard(parameter.dim() - 1)]),
                "mean": DTensor.from_local(mean, mesh, [Replicate()]),
                "own": own.sum().reshape(1, 1),
            }


def of_its_part(folder: str, kind: str, alike: bool) -> list[str]:
    def made(seed: int) -> tuple[nn.Module, OfItsPart]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 6)
        fully_shard(model)
        return model, OfItsPart(model.parameters(), alike)

    def taken(model: nn.Module, optimizer: OfItsPart) -> dict[str, Any]:
        if kind == "object":
            return {"model": model, "optimizer": optimizer}
        with smckpt.sm_state_dict_type(model, getattr(smckpt, kind)):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if kind != "FULL":  # tensors of the parameters' names, and whole
            mesh = [dtensor_parts(each)[1] for each in model.parameters()]
            average = zip(mesh, model.named_parameters(), strict=True)
            state["ema"] = {n: p.detach().redistribute(m, [Replicate()]) for m, (n, p) in average}
        return state

    model, optimizer = made(0)
    optimizer.step()
    try:
        smckpt.save(taken(model, optimizer), checkpoint_id=folder)
    except smckpt.errors.CheckpointError as error:
        return [str(error)]
    other, fresh = made(1)
    smckpt.load(taken(other, fresh), checkpoint_id=folder)
    wrong = []
    for (mine, was), now in zip(optimizer.state.items(), fresh.state.values(), strict=True):
        shape = list(mine.shape)
        (was["all"],), (now["all"],) = was["all"], now["all"]
        for name in ("rows", "all", "last", "mean"):
            placed = [str(t.placements) for t in (was[name], now[name])]
            wrong += [f"{name} of {shape}: {placed}"] * (len({*placed}) > 1)
            same = torch.equal(local(was[name]), local(now[name]))
            wrong += [f"values of {name} of {shape}"] * (not same)
        wrong += [f"{name} of {shape}" for name in was if type(was[name]) is not type(now[name])]
        wrong += [f"mean of {shape}"] * (not torch.equal(local(was["mean"]), local(now["mean"])))
        wrong += [f"own of {shape}"] * (not torch.equal(was["own"], now["own"]))
    return wrong


class Pending(torch.optim.Optimizer):
    """One that keeps what torch has not computed yet: norms and sums that ranks have parts of. Its
    step needs what it kept before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if state:
                parameter.mul_(0.9 + 0.01 * float(state["norm"].full_tensor()))
            state["norm"] = parameter.norm()
            state["more"] = [parameter.max(), {"sums": parameter.sum(0, keepdim=True)}]
            state["turned"] = DTensor.from_local(  # shaped like its parameter, in another order
                parameter.to_local()
                .clone()
                .repeat(parameter.device_mesh.size(), 1)
                .t()
                .contiguous()
                .t(),
                parameter.device_mesh,
                [Partial()],
            )
            state["mean"] = DTensor.from_local(
                parameter.to_local().mean(), parameter.device_mesh, [Partial("avg")]
            )
            self.param_groups[0]["least"] = parameter.min()


def of_pending(folder: str, kind: str, steps: int) -> list[str]:
    def made(seed: int, steps: int, ranks: int = 2) -> tuple[nn.Module, Pending]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 6)
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = Pending(model.parameters())
        for _ in range(steps):
            optimizer.step()
        return model, optimizer

    def everything(optimizer: Pending) -> list[Any]:
        kept = [*optimizer.state.values(), {**optimizer.param_groups[0]}]
        placed = [
            (
                keystr(at),
                *map(str, getattr(each, "placements", ())),
                isinstance(each, torch.Tensor) and each.stride(),
                local(each),
            )
            for at, each in tree_leaves_with_path(kept)
        ]
        return sorted(placed, key=lambda found: found[0])

    def taken(model: nn.Module, optimizer: Pending) -> dict[str, Any]:
        if kind == "object":
            return {"model": model, "optimizer": optimizer}
        with smckpt.sm_state_dict_type(model, getattr(smckpt, kind)):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, optimizer = made(0, 2)
    if kind == "FULL":
        with pytest.raises(smckpt.errors.StateError, match="placements.*SHARDED"):
            smckpt.save(taken(model, optimizer), checkpoint_id=folder)
        return []
    smckpt.save(taken(model, optimizer), checkpoint_id=folder)
    stock = copy.deepcopy(optimizer.state_dict())
    (expected, other), (loaded, fresh) = made(1, steps), made(1, steps)
    expected.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(stock)
    found = taken(loaded, fresh)
    smckpt.load(found, checkpoint_id=folder)
    if kind != "object":
        with smckpt.sm_state_dict_type(loaded, getattr(smckpt, kind)):
            loaded.load_state_dict(found["model"])
            fresh.load_state_dict(found["optimizer"])
    wrong = []
    for _ in range(2):
        mine, theirs = everything(fresh), everything(other)
        if repr(mine) != repr(theirs) or len(mine) != 14:
            wrong.append(f"{mine}, by torch {theirs}")
        for one, two in zip(loaded.parameters(), expected.parameters(), strict=True):
            wrong += ["a parameter"] * (not torch.equal(local(one), local(two)))
        fresh.step()
        other.step()
    return wrong


def local(tensor: Any) -> Any:
    return dtensor_parts(tensor)[0] if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("kind", ["object", "LOCAL", "SHARDED"])
def test_an_optimizer_gets_its_own_tensors_back_as_their_class(tmp_path: Path, kind: str) -> None:
    assert run_ranks(of_its_part, 2, str(tmp_path), kind, False) == [[], []]


@pytest.mark.parametrize("alike", [False, True])
def test_full_refuses_what_an_optimizer_keeps_of_each_rank(tmp_path: Path, alike: bool) -> None:
    for found in run_ranks(of_its_part, 2, str(tmp_path), "FULL", alike):
        if alike:
            assert not found
        else:
            assert len(found) == 1 and "'weight.own' of OfItsPart" in found[0]
            assert "SHARDED" in found[0]


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", ["object", "LOCAL", "SHARDED", "FULL"])
def test_what_torch_has_not_computed_yet_comes_back_or_is_refused(
    tmp_path: Path, kind: str, steps: int
) -> None:
    assert run_ranks(of_pending, 2, str(tmp_path), kind, steps) == [[], []]


def on_one_rank(folder: str) -> str:
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    state = {"model": model, "optimizer": Pending(model.parameters())}
    with pytest.raises(smckpt.errors.CheckpointError) as raised:
        smckpt.load(state, checkpoint_id=folder)
    return str(raised.value)


def test_other_ranks_get_none_of_it(tmp_path: Path) -> None:
    assert run_ranks(of_pending, 2, str(tmp_path), "object", 0) == [[], []]
    (error,) = run_ranks(on_one_rank, 1, str(tmp_path))
    assert "norm" in error and "mesh" in error and "Replicate" in error
    with pytest.raises(smckpt.errors.UsageError, match="norm.*mesh"):
        reshard_checkpoint(tmp_path, tmp_path / "one", shard=1)


class Kept(torch.optim.Optimizer):
    """One that keeps what it is given."""

    def __init__(self, parameters: Any, slots: dict[str, Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(slots)

    def step(self, closure: Any = None) -> None: ...


def slots_of(case: str, rank: int) -> dict[str, Any]:
    by_case: dict[str, dict[str, Any]] = {
        "a number": {"slot": rank},
        "an array": {"slot": np.ones(2) * rank},
        "in a list": {"slot": [torch.ones(2) * rank]},
        "a shape": {"slot": torch.zeros(rank, 3)},
        "on one rank": {"slot": 1.0} if rank else {},
        "only rank 0's": {"slot": torch.tensor(float(rank == 0))},
        "conjugated": {"slot": torch.ones(2, dtype=torch.complex64).conj()},
        "not a number": {"slot": math.nan},
    }
    return {**by_case[case], "step": 3}


def taken_full(case: str, world: int) -> str:
    rank = dist.get_rank()
    sizes, names = ((2, 2), ("replicate", "shard")) if world == 4 else ((2,), ("shard",))
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    optimizer = Kept(model.parameters(), slots_of(case, rank))
    try:
        with smckpt.sm_state_dict_type(model, smckpt.FULL):
            optimizer.state_dict()
    except smckpt.errors.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "world"),
    [("a number", 2), ("an array", 2), ("in a list", 2), ("a shape", 2), ("on one rank", 2),
     ("only rank 0's", 4), ("on one rank", 4)],
)  # fmt: skip
def test_full_refuses_on_all_ranks_whatever_each_keeps_of_its_own(case: str, world: int) -> None:
    """Ranks of one row of a mesh may be alike, and must hear of another row's."""
    for found in run_ranks(taken_full, world, case, world):
        assert "FULL does not gather 'weight.slot" in found and "Kept" in found, found


@pytest.mark.parametrize("case", ["conjugated", "not a number"])
def test_full_gathers_what_ranks_have_alike(case: str) -> None:
    assert run_ranks(taken_full, 2, case, 2) == ["", ""]


def copied_state(folder: str) -> dict[tuple[str, str], list[str]]:
    """The optimizer's state, as it is or as copies under the keys alone, on either side."""
    forms: dict[str, Callable[[Any], Any]] = {
        "own": lambda state: state,
        "copies": lambda state: {
            **state,
            "state": {
                key: {slot: value.clone() for slot, value in slots.items()}
                for key, slots in state["state"].items()
            },
        },
    }
    off = smckpt.SaveOptions(alarms=smckpt.Alarms(unchanged="off"))
    found = {}
    model, optimizer = build("1-D", "AdamW")
    step(model, optimizer, 2)
    for saved, loaded in itertools.product(forms, forms):
        state = taken(model, optimizer, smckpt.LOCAL)
        state["optimizer"] = forms[saved](state["optimizer"])
        smckpt.save(state, checkpoint_id=f"{folder}/{saved}-{loaded}", options=off)
        other, second = build("1-D", "AdamW", seed=3)
        smckpt.init_optim_state(second)
        state = taken(other, second, smckpt.LOCAL)
        state["optimizer"] = forms[loaded](state["optimizer"])
        smckpt.load(state, checkpoint_id=f"{folder}/{saved}-{loaded}")
        with smckpt.sm_state_dict_type(other, smckpt.LOCAL):
            second.load_state_dict(state["optimizer"])
        found[saved, loaded] = differences(snapshot(other, second), snapshot(model, optimizer))
    return found


def test_copies_of_an_optimizers_sharded_state_go_by_their_keys(tmp_path: Path) -> None:
    for rank in run_ranks(copied_state, 2, str(tmp_path)):
        assert rank == {case: [] for case in rank}
