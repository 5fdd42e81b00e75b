"""States that are put together in ways which could lose a value without a word."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import lr_scheduler as schedules
from torch.utils._pytree import tree_leaves

import smckpt
from smckpt import errors
from smckpt.layout.geometry import MeshGeometry
from smckpt.layout.mesh import Mesh, Placement
from smckpt.state_dict.select import Selector
from smckpt.state_dict.tags import Tag, set_tag
from tests.support.truth import differences, snapshot


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ({"a.b": 1, "a": {"b": 2, "w": torch.ones(1)}}, "a.b"),
        ({"a": {"1": 1, 1: 2, "w": torch.ones(1)}}, "a.1"),
        ({"a": {frozenset([1]): 5, "w": torch.ones(1)}}, "frozenset"),
        ({"a": {(1, 2): torch.ones(1), "(3, 4)": 5}}, "tuple"),
        ({"a": {float("nan"): torch.ones(1)}}, "float"),
        ({True: 5, "w": torch.ones(1)}, "bool"),
        ({"__metadata__": torch.ones(1), "w": torch.ones(1)}, "__metadata__"),
    ],
    ids=[
        "dotted",
        "number and text",
        "a set",
        "text like a tuple",
        "not a number",
        "at the top",
        "of a header",
    ],
)
def test_keys_by_which_a_value_would_not_be_found_again_are_refused_when_saved(
    tmp_path: Path, state: dict[Any, Any], word: str
) -> None:
    with pytest.raises(errors.StateError, match=word):
        smckpt.save(state, checkpoint_id=tmp_path)


def test_a_value_without_tensors_may_have_any_keys(tmp_path: Path) -> None:
    value = {None: 5, True: 6, (1, 2): {"deep": 7}}
    smckpt.save({"w": torch.ones(1), "value": value}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(1), "value": {}}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["value"] == value


def optimizers_in_a_list(rates: tuple[float, float]) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizers = [
        torch.optim.AdamW([p], lr=lr) for p, lr in zip(model.parameters(), rates, strict=True)
    ]
    for optimizer in optimizers:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return optimizers, model


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED, None])
def test_optimizers_in_a_list_get_their_hyperparameters_back(
    tmp_path: Path, form: Any, kind: Any
) -> None:
    def taken(optimizers: list[Any], model: Any) -> dict[str, Any]:
        if kind is None:
            return {"all": form(o.state_dict() for o in optimizers)}
        with smckpt.sm_state_dict_type(model, kind):
            return {"all": form(o.state_dict() for o in optimizers)}

    smckpt.save(taken(*optimizers_in_a_list((0.1, 0.2))), checkpoint_id=tmp_path)
    others, model = optimizers_in_a_list((8.0, 9.0))
    smckpt.load(taken(others, model), checkpoint_id=tmp_path)
    assert [o.param_groups[0]["lr"] for o in others] == [0.1, 0.2]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda k: k.__name__)
def test_an_optimizer_without_state_gets_everything_back_outside_the_context(
    tmp_path: Path, kind: Any
) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    smckpt.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    fresh = kind(nn.Linear(3, 2).parameters(), lr=9.0)
    smckpt.load({"optimizer": fresh}, checkpoint_id=tmp_path)
    assert fresh.param_groups[0]["lr"] == 0.1
    saved, loaded = (list(o.state.values()) for o in (optimizer, fresh))
    assert len(saved) == len(loaded)
    for before, after in zip(saved, loaded, strict=True):
        assert all(torch.equal(before[slot], after[slot]) for slot in before)


def test_outside_the_context_an_optimizer_is_known_that_has_stepped_or_was_initialised(
    tmp_path: Path,
) -> None:
    def made(rate: float, steps: int) -> torch.optim.Optimizer:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        return optimizer

    smckpt.save({"optimizer": made(0.1, 2).state_dict()}, checkpoint_id=tmp_path)
    unknown = {"optimizer": made(9.0, 0).state_dict()}
    with pytest.raises(errors.StateError, match="put the optimizer itself into the state"):
        smckpt.load(unknown, checkpoint_id=tmp_path)
    stepped, initialised = made(9.0, 1), made(9.0, 0)
    smckpt.init_optim_state(initialised)
    for optimizer in (stepped, initialised):
        smckpt.load({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert [slots["step"].item() for slots in optimizer.state.values()] == [2, 2]


class Wrapped(torch.optim.Optimizer):
    """Shows what the optimizer inside has, as accelerate's `AcceleratedOptimizer` does."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside

    def __getattribute__(self, name: str) -> Any:
        if name in ("inside", "__class__", "__dict__"):
            return super().__getattribute__(name)
        return getattr(self.inside, name)


def test_an_optimizer_in_a_wrapper_is_one_optimizer_and_gets_its_state_outside_the_context(
    tmp_path: Path,
) -> None:
    def made(steps: int) -> tuple[nn.Module, Wrapped]:
        torch.manual_seed(steps)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, Wrapped(optimizer)

    (model, trained), (other, fresh) = made(2), made(0)
    for net, optimizer in ((model, trained), (other, fresh)):
        state = {"model": net.state_dict(), "optimizer": optimizer}
        if optimizer is trained:
            smckpt.save(state, checkpoint_id=tmp_path)
        else:
            smckpt.load(state, checkpoint_id=tmp_path)
    model.zero_grad()
    assert not differences(snapshot(other, fresh.inside), snapshot(model, trained.inside))


class Named(torch.optim.AdamW):
    """Gives its state by the parameters' names, as optimizers do that torch's
    `get_optimizer_state_dict` was put into."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        super().__init__(model.parameters(), lr=rate)

    def state_dict(self) -> dict[str, Any]:
        smckpt.init_optim_state(self)
        return self._renamed(super().state_dict(), self.names.__getitem__)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(self._renamed(state_dict, self.names.index))

    def _renamed(self, given: Any, name: Any) -> dict[str, Any]:
        return {
            "state": {name(key): slots for key, slots in given["state"].items()},
            "param_groups": [
                {**group, "params": [name(key) for key in group["params"]]}
                for group in given["param_groups"]
            ],
        }


def test_an_optimizer_that_gives_names_of_its_own_takes_them_back_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(rate: float, steps: int) -> tuple[nn.Module, Named]:
        torch.manual_seed(steps)
        model = nn.Linear(3, 2)
        optimizer = Named(model, rate)
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        model.zero_grad()
        return model, optimizer

    (model, trained), (other, fresh) = made(0.1, 2), made(9.0, 0)
    smckpt.save({"model": model, "optimizer": trained}, checkpoint_id=tmp_path)
    smckpt.load({"model": other, "optimizer": fresh}, checkpoint_id=tmp_path)
    assert not differences(snapshot(other, fresh), snapshot(model, trained))
    assert fresh.param_groups[0]["lr"] == 0.1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_where_the_optimizer_is_not_known_the_log_says_that_none_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1).state_dict()}
    smckpt.save(state, checkpoint_id=tmp_path)
    with caplog.at_level(logging.WARNING, "smckpt"):
        smckpt.load(state, checkpoint_id=tmp_path)
    assert "Call its load_state_dict" in caplog.text


class Counted:
    """Round an optimizer, and none itself. It adds what it has from the first step on."""

    def __init__(self, inside: torch.optim.Optimizer, nested: bool) -> None:
        self.inside, self.nested = inside, nested
        self.count, self.slow = 0, None

    def step(self) -> None:
        self.inside.step()
        self.count += 1
        self.slow = torch.full((2,), float(self.count))

    def state_dict(self) -> dict[str, Any]:
        inner = self.inside.state_dict()
        added = {"count": self.count, "slow": self.slow}
        return {"inner": {**inner, **added}} if self.nested else {**inner, **added}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        given = dict(given["inner"] if self.nested else given)
        self.count, self.slow = given.pop("count"), given.pop("slow")
        self.inside.load_state_dict(given)


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED", "FULL"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_what_is_no_optimizer_may_add_keys_to_the_dict_of_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, nested: bool, steps: int
) -> None:
    def made(seed: int, steps: int) -> tuple[nn.Module, Counted]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        optimizer = Counted(torch.optim.AdamW(model.parameters(), 0.1), nested)
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            model.zero_grad()
        return model, optimizer

    def taken(model: nn.Module, optimizer: Counted) -> dict[str, Any]:
        if form == "object":
            return {"model": model, "optimizer": optimizer}
        with smckpt.sm_state_dict_type(model, getattr(smckpt, form)):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, optimizer = made(0, 3)
    smckpt.save(taken(model, optimizer), checkpoint_id=tmp_path)
    other, fresh = made(1, steps)
    state = taken(other, fresh)
    with caplog.at_level(logging.WARNING, logger="smckpt"):
        smckpt.load(state, checkpoint_id=tmp_path)
    if form != "object":  # only the object knows what they are, and a warning says so
        assert "count, slow of an optimizer were loaded into the dict only" in caplog.text
        inner = state["optimizer"]["inner"] if nested else state["optimizer"]
        fresh.count, fresh.slow = inner["count"], inner["slow"]
    assert fresh.count == 3 and fresh.slow is not None and fresh.slow.tolist() == [3.0, 3.0]
    assert not differences(snapshot(other, fresh.inside), snapshot(model, optimizer.inside))


def sparse(seed: int, rate: float) -> tuple[Any, Any]:
    """An optimizer that counts its steps in a plain number, and makes its state in its step."""
    torch.manual_seed(seed)
    model = nn.Embedding(7, 3, sparse=True)
    return model, torch.optim.SparseAdam(model.parameters(), lr=rate)


def step_of_sparse(model: Any, optimizer: Any) -> None:
    model(torch.tensor([1, 2, 5])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_fresh_optimizer_gets_plain_numbers_of_its_state_too_whatever_the_kinds(
    tmp_path: Path,
) -> None:
    kinds = {"local": smckpt.LOCAL, "sharded": smckpt.SHARDED}

    def taken(kind: Any, model: Any, optimizer: Any) -> dict[str, Any]:
        with smckpt.sm_state_dict_type(model, kind):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, optimizer = sparse(0, 0.1)
    for _ in range(3):
        step_of_sparse(model, optimizer)
    for name, kind in kinds.items():
        smckpt.save(taken(kind, model, optimizer), checkpoint_id=tmp_path / name)
    expected = snapshot(model, optimizer)
    for name in kinds:
        for kind in kinds.values():
            other, fresh = sparse(1, 9.0)
            smckpt.load(taken(kind, other, fresh), checkpoint_id=tmp_path / name)
            assert differences(snapshot(other, fresh), expected) == []
            assert fresh.state[other.weight]["step"] == 3
    step_of_sparse(model, optimizer)
    step_of_sparse(other, fresh)
    assert differences(snapshot(other, fresh), snapshot(model, optimizer)) == []


class Cast(torch.Tensor):
    """A tensor that holds another and something derived from it, as float8 weights do."""

    inner: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor) -> Any:
        out = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        out.inner, out.scale = inner, scale
        return out

    def __tensor_flatten__(self) -> Any:
        return ["inner", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran: only what is inside is to be read")


def test_tensors_inside_others_are_saved_and_filled(tmp_path: Path) -> None:
    inner, scale = torch.arange(3.0), torch.full((), 4.0)
    state = {"cast": Cast(inner, scale), "sent": AsyncCollectiveTensor(torch.ones(2))}
    smckpt.save(state, checkpoint_id=tmp_path)
    inner.zero_()
    scale.zero_()
    smckpt.load(state, checkpoint_id=tmp_path)
    assert inner.tolist() == [0, 1, 2] and scale.item() == 4


class Alone(Cast):
    """Holds one tensor with its own values, and nothing beside it."""

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None


def test_a_tensor_with_nothing_beside_it_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    smckpt.save({"w": Alone(torch.arange(3.0), torch.ones(()))}, checkpoint_id=tmp_path)
    plain = torch.zeros(3)
    smckpt.load({"w": plain}, checkpoint_id=tmp_path)
    assert plain.tolist() == [0, 1, 2]


def test_a_dict_that_holds_itself_is_refused_by_name(tmp_path: Path) -> None:
    endless: dict[str, Any] = {"w": torch.ones(1)}
    endless["self"] = endless
    with pytest.raises(errors.StateError, match="holds itself"):
        smckpt.save(endless, checkpoint_id=tmp_path)


def test_a_tensor_on_the_meta_device_is_not_saved_also_in_the_place_of_one_with_data(
    tmp_path: Path,
) -> None:
    state = {"w": torch.ones(3)}
    smckpt.save(state, checkpoint_id=tmp_path)
    smckpt.load(state, checkpoint_id=tmp_path)
    empty = {"w": torch.empty(3, device="meta")}  # a load gives it memory
    smckpt.load(empty, checkpoint_id=tmp_path)
    assert torch.equal(empty["w"], state["w"])
    with pytest.raises(errors.CheckpointError, match="meta device"):
        smckpt.save({"w": torch.empty(3, device="meta")}, checkpoint_id=tmp_path)


def test_fresh_optimizers_beside_each_other_get_each_its_own_state(tmp_path: Path) -> None:
    def state(trained: bool) -> tuple[dict[str, Any], list[torch.optim.Optimizer]]:
        model = nn.Linear(3, 2)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(model.parameters()),
        ]
        if trained:
            model(torch.ones(1, 3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
            first, second = (optimizer.state_dict() for optimizer in optimizers)
            both = {"model": model.state_dict(), "all": {"first": first, "second": second}}
            return both, optimizers

    smckpt.save(state(trained=True)[0], checkpoint_id=tmp_path)
    target, fresh = state(trained=False)
    smckpt.load(target, checkpoint_id=tmp_path)
    slots = [{name for held in o.state.values() for name in held} for o in fresh]
    assert slots == [{"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}]


def test_state_of_another_dtype_than_was_saved_is_taken_in_that_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    def state(dtype: torch.dtype) -> tuple[dict[str, Any], torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        smckpt.init_optim_state(optimizer)
        for slots in optimizer.state.values():
            slots["exp_avg"] = torch.full_like(slots["exp_avg"], 1 / 3, dtype=dtype)
        with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, optimizer

    smckpt.save(state(torch.float32)[0], checkpoint_id=tmp_path)
    target, optimizer = state(torch.bfloat16)
    smckpt.load(target, checkpoint_id=tmp_path)
    for slots in optimizer.state.values():
        assert slots["exp_avg"].equal(torch.full_like(slots["exp_avg"], 1 / 3, dtype=torch.float32))


def test_tensors_of_one_name_and_shape_may_be_placed_otherwise() -> None:
    """Two models in one state dict: one is sharded, the other copied."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        placed = [Shard(0), Replicate(), Shard(1), Shard(0)]
        state = {str(i): {"w": DTensor.from_local(torch.ones(2, 2), mesh, [place])}
                 for i, place in enumerate(placed)}  # fmt: skip
        rules = [entry.geometry for entry in Selector(0).select(state).entries]
    finally:
        dist.destroy_process_group()
    assert [str(p) for rule in rules for p in rule.placements] == ["S0", "R", "S1", "S0"]


class Counting:
    """Has a state dict, without a tensor in it, and in that another object of its kind."""

    def __init__(self, count: int, inner: Counting | None = None) -> None:
        self.count = count
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "below": {"inner": self.inner} if self.inner else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert type(state) is dict
        assert not self.inner or state["below"]["inner"] is self.inner


def counting(first: int) -> tuple[list[Counting], dict[str, Any]]:
    inner = Counting(first)
    objects = [inner, *(Counting(first + i, inner if i == 1 else None) for i in range(1, 5))]
    _, outer, of_a_dict, of_a_tuple, of_a_list = objects
    state = {
        "outer": outer,
        "training": {"scheduler": of_a_dict, "step": first},
        "pair": (of_a_tuple, first, [of_a_list]),
    }
    return objects, state


def test_objects_with_a_state_dict_get_it_back_wherever_they_stand(tmp_path: Path) -> None:
    smckpt.save(counting(10)[1], checkpoint_id=tmp_path)
    objects, state = counting(50)
    smckpt.load(state, checkpoint_id=tmp_path)
    assert [each.count for each in objects] == [10, 11, 12, 13, 14]
    assert state["training"] == {"scheduler": objects[2], "step": 10}
    assert state["pair"] == (objects[3], 10, [objects[4]])


def test_tensors_that_are_one_in_the_target_and_were_two_are_refused_by_name(
    tmp_path: Path,
) -> None:
    for count in (2, 200_000):  # read at once, and in different blocks
        smckpt.save({"a": torch.ones(count), "b": torch.zeros(count)}, checkpoint_id=tmp_path)
        one = torch.ones(count)
        with pytest.raises(errors.StateError, match="'b' and 'a' share their memory"):
            smckpt.load({"a": one, "b": one}, checkpoint_id=tmp_path)


def test_rates_in_tensors_are_one_or_several_as_they_were_when_saved(tmp_path: Path) -> None:
    """SequentialLR's list of the last rates is that of the schedule it has come to."""

    def trained(steps: int, shared: bool) -> tuple[dict[str, Any], Any, Any]:
        model, rate = nn.Linear(3, 2), torch.tensor(0.1)
        rates = (rate, rate if shared else torch.tensor(0.3))
        groups = [{"params": [p], "lr": r} for p, r in zip(model.parameters(), rates, strict=True)]
        optimizer = torch.optim.AdamW(groups)
        parts = [schedules.ConstantLR(optimizer, 0.1, 2), schedules.ExponentialLR(optimizer, 0.9)]
        schedule = schedules.SequentialLR(optimizer, parts, [2])
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            schedule.step()
        return {"optimizer": optimizer, "schedule": schedule}, optimizer, schedule

    state, optimizer, schedule = trained(3, shared=False)
    smckpt.save(state, checkpoint_id=tmp_path)
    target, fresh, other = trained(0, shared=True)
    smckpt.load(target, checkpoint_id=tmp_path)
    for _ in range(2):
        assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups]
        assert other.state_dict() == schedule.state_dict()
        schedule.step()
        other.step()


def test_what_the_checkpoint_lacks_keeps_its_values_also_where_it_is_not_contiguous(
    tmp_path: Path,
) -> None:
    smckpt.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    target = {"a": torch.zeros(3), "b": torch.full((70, 50), 7.0).t()}
    smckpt.load(target, checkpoint_id=tmp_path, check_keys_matched=False)
    assert target["a"].tolist() == [1, 1, 1]
    assert bool((target["b"] == 7).all())


def test_views_that_conjugate_or_negate_what_they_share_come_back(tmp_path: Path) -> None:
    def state(base: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {"conjugated": base.conj(), "negated": torch._neg_view(base), "turned": base.t()}
        return {"base": base, **views}

    base = torch.randn(3, 4, dtype=torch.complex64)
    smckpt.save(state(base), checkpoint_id=tmp_path)
    target = state(torch.zeros(3, 4, dtype=torch.complex64))
    smckpt.load(target, checkpoint_id=tmp_path)
    assert all(torch.equal(target[name], value) for name, value in state(base).items())


def trained(order: str, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of layers alike, of which the optimizer has those in `order`, in that order."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in sorted(order)})
    optimizer = torch.optim.AdamW([model[name].weight for name in order])
    sum(layer(torch.randn(3)).square().sum() for layer in model.values()).backward()
    optimizer.step()
    return model, optimizer


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: smckpt.SMStateDictType
) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("order", ["ba", "axb"])
def test_an_optimizer_with_other_numbers_for_its_parameters_gets_nobody_elses_state(
    tmp_path: Path, order: str
) -> None:
    model, optimizer = trained("ab", seed=0)
    smckpt.save(state_of(model, optimizer, smckpt.LOCAL), checkpoint_id=tmp_path)
    others, its = trained(order, seed=1)
    before = copy.deepcopy(its.state_dict()["state"])
    partly = order != "ba"
    target = state_of(others, its, smckpt.LOCAL)
    with pytest.raises(
        errors.KeysMismatchError, match=r"is the state of \['b.*SHARDED|lacks \['model.x"
    ):
        smckpt.load(target, checkpoint_id=tmp_path)
    assert str(before) == str(its.state_dict()["state"])
    for kind in (smckpt.LOCAL, smckpt.SHARDED) if partly else (smckpt.SHARDED,):
        target = state_of(others, its, kind)
        numbers = [*target["optimizer"]["state"]]
        smckpt.load(target, checkpoint_id=tmp_path, check_keys_matched=not partly)
        assert [*target["optimizer"]["state"]] == numbers
        for name in "ab":
            mine, theirs = (m[name].weight for m in (model, others))
            assert torch.equal(its.state[theirs]["exp_avg"], optimizer.state[mine]["exp_avg"])
            its.state[theirs]["exp_avg"].zero_()
        if partly:
            number = order.index("x")
            assert str(its.state_dict()["state"][number]) == str(before[number])


def test_an_array_that_is_not_what_its_placement_says_is_refused_and_not_misplaced() -> None:
    mesh = Mesh(("s",), (2,), (0, 1))
    rule = MeshGeometry("w", (9, 2), mesh, (Placement("shard", 0),))
    tensor = torch.zeros(4, 2)
    set_tag(tensor, Tag("LOCAL", ("w",), rule, ()))
    with pytest.raises(errors.StateError, match=r"\[4, 2\].*rank 0 holds \[5, 2\]"):
        Selector(0).select({"w": tensor})


class GradKeeper(torch.optim.Optimizer):
    """Keeps tensors that ask for gradients, as learned rates and meta-learners do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = {
                "rate": torch.tensor(0.5, requires_grad=True),
                "like": torch.randn(p.shape, requires_grad=True),
                "turned": torch.randn(3, 2).t().requires_grad_(),
                "known": nn.Parameter(torch.randn(3)),
                "fixed": nn.Parameter(torch.randn(2), requires_grad=False),
                "inside": [torch.ones(2, requires_grad=True), torch.ones(2)],
                "number": torch.tensor(3),
            }


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED", "FULL", "no target"])
def test_a_fresh_optimizer_gets_state_that_asks_for_gradients(tmp_path: Path, form: str) -> None:
    """torch's own pair keeps what the tensors are to autograd."""

    def run() -> tuple[nn.Module, GradKeeper]:
        model = nn.Linear(3, 2)
        return model, GradKeeper(model.parameters())

    def put(do: Any, model: nn.Module, optimizer: GradKeeper) -> None:
        if form in ("LOCAL", "SHARDED", "FULL"):
            with smckpt.sm_state_dict_type(model, getattr(smckpt, form)):
                do({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        else:
            own = optimizer if form == "object" else optimizer.state_dict()
            do({"model": model, "optimizer": own})

    model, optimizer = run()
    optimizer.step()
    put(lambda state: smckpt.save(state, checkpoint_id=tmp_path), model, optimizer)
    again = run()
    if form == "no target":
        again[1].load_state_dict(smckpt.load(checkpoint_id=tmp_path)["optimizer"])
    else:
        put(lambda state: smckpt.load(state, checkpoint_id=tmp_path), *again)
    live = form != "no target"  # the order in memory is of live optimizers alone
    kept = [
        [(type(t), t.requires_grad, t.is_leaf, live and t.stride(), t.tolist()) for t in leaves]
        for each in (optimizer, again[1])
        for leaves in [tree_leaves(each.state_dict()["state"])]
    ]
    assert kept[1] == kept[0]


def test_arrays_of_numpy_stay_arrays_however_they_lie_in_memory(tmp_path: Path) -> None:
    rows = np.arange(24.0).reshape(2, 3, 4)
    arrays = {"columns": np.asfortranarray(rows[0]), "turned": rows.transpose(2, 0, 1)}
    arrays |= {"part": rows[:, ::2], "none": np.zeros((0, 2)), "one": np.array(3.0)}
    # of dtypes that torch has not
    arrays |= {"text": np.array([["a"], ["bc"]]), "no text": np.array([], "S3")}
    arrays |= {"day": np.array(["2026-01-02"], "M8[D]"), "days": np.array(3, "m8[D]")}
    kept = Kept(arrays)
    smckpt.save({"state": arrays, "kept": kept}, checkpoint_id=tmp_path)
    loaded: Any = smckpt.load(checkpoint_id=tmp_path)
    again = {"kept": Kept({}), "state": {name: np.zeros_like(a) for name, a in arrays.items()}}
    smckpt.load(again, checkpoint_id=tmp_path, check_keys_matched=False)
    for found in (loaded["state"], loaded["kept"], again["state"]):
        assert {name: (type(a), a.tolist()) for name, a in found.items()} == {
            name: (np.ndarray, a.tolist()) for name, a in arrays.items()
        }


class Kept:
    """An object with arrays in its state."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def state_dict(self) -> dict[str, Any]:
        return self.arrays

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.arrays = state_dict


def test_a_module_whose_parameters_have_no_shape_yet_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(errors.StateError, match=r"m\.0\.weight has no shape"):
        smckpt.save({"m": model}, checkpoint_id=tmp_path)
    model(torch.ones(1, 2))
    smckpt.save({"m": model}, checkpoint_id=tmp_path)
    with pytest.raises(errors.StateError, match=r"m\.0\.weight has no shape"):
        smckpt.load({"m": nn.Sequential(nn.LazyLinear(3))}, checkpoint_id=tmp_path)
