"""An optimizer object gets each parameter's own state, in whatever order it has its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smckpt
from smckpt.errors import KeysMismatchError
from tests.support.launch import run_ranks

ADAM = torch.optim.AdamW


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def named(model: nn.Module, names: str) -> list[nn.Parameter]:
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in names.split()]


def adam(model: nn.Module, *groups: str) -> Any:
    """With a group for each text of names."""
    return ADAM([{"params": named(model, names)} for names in groups], lr=0.01)


def step(model: nn.Module, optimizer: Any, count: int = 1) -> None:
    for number in range(count):
        torch.manual_seed(number)
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def slots(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {
        f"{name}.{slot}": value.clone()
        for name, p in model.named_parameters()
        for slot, value in optimizer.state.get(p, {}).items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def saved(folder: Path, *groups: str, top: str = "model") -> tuple[nn.Module, Any]:
    model = net(0)
    optimizer = adam(model, *groups)
    step(model, optimizer, 2)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.25 + number
    smckpt.save({top: model, "optimizer": optimizer}, checkpoint_id=folder)
    return model, optimizer


WEIGHTS, BIASES = "0.weight 1.weight", "0.bias 1.bias"


@pytest.mark.parametrize("stepped", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("top", ["model", "net"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([f"{WEIGHTS} {BIASES}"], [f"{BIASES} {WEIGHTS}"]),
        ([WEIGHTS, BIASES], ["1.weight 0.weight", BIASES]),
        ([WEIGHTS, BIASES], [BIASES, WEIGHTS]),
    ],
    ids=["one group", "in a group", "groups"],
)
def test_state_goes_by_the_names_of_parameters(
    tmp_path: Path, before: list[str], after: list[str], top: str, stepped: int
) -> None:
    model, optimizer = saved(tmp_path, *before, top=top)
    other = net(1)
    resumed = adam(other, *after)
    step(other, resumed, stepped)
    target = {"model": other, "optimizer": resumed}
    if top != "model":
        target = {"optimizer": resumed, "parts": [other]}  # a name that the checkpoint lacks
        smckpt.load(target, checkpoint_id=tmp_path, check_keys_matched=False)
        other.load_state_dict(model.state_dict())
    else:
        smckpt.load(target, checkpoint_id=tmp_path)
    assert same(slots(other, resumed), slots(model, optimizer))
    rates = {n: g["lr"] for g in resumed.param_groups for n, p in other.named_parameters()
             for each in g["params"] if each is p}  # fmt: skip
    assert rates == {n: 0.25 + bool(len(before) > 1 and "bias" in n) for n in rates}
    step(model, optimizer)
    step(other, resumed)
    assert same(slots(other, resumed), slots(model, optimizer))
    numbers = [p for group in resumed.state_dict()["param_groups"] for p in group["params"]]
    assert numbers == [0, 1, 2, 3]


class Counting(ADAM):
    """Its own methods know what it adds."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 5}


def test_what_cannot_be_matched_is_refused_before_anything_changes(tmp_path: Path) -> None:
    saved(tmp_path, f"{WEIGHTS} {BIASES}")
    saved(tmp_path / "two", WEIGHTS, BIASES)
    saved(tmp_path / "few", WEIGHTS)
    own = net(0)
    counting = Counting(named(own, f"{WEIGHTS} {BIASES}"))
    step(own, counting)
    smckpt.save({"model": own, "optimizer": counting}, checkpoint_id=tmp_path / "own")
    for folder, make, words in (
        ("own", lambda m: Counting(named(m, f"{BIASES} {WEIGHTS}")), "stand in another order"),
        ("two", lambda m: adam(m, f"0.weight {BIASES}", "1.weight"), "group 0 of optimizer has"),
        ("few", lambda m: adam(m, "1.weight 1.bias"), "no state of 'model.1.bias', parameter 1"),
    ):
        model = net(1)
        optimizer = make(model)
        step(model, optimizer)
        had = {**slots(model, optimizer), **model.state_dict()}
        had = {name: value.clone() for name, value in had.items()}
        with pytest.raises(KeysMismatchError, match=words):
            smckpt.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / folder)
        assert same({**slots(model, optimizer), **model.state_dict()}, had)


def test_a_load_of_what_both_have_goes_by_names_too(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, WEIGHTS)
    other = net(1)
    resumed = adam(other, "0.bias 1.weight 0.weight")
    target = {"model": other, "optimizer": resumed}
    smckpt.load(target, checkpoint_id=tmp_path, check_keys_matched=False)
    assert same(slots(other, resumed), slots(model, optimizer))


def test_a_block_that_numbers_parameters_refuses_another_order(tmp_path: Path) -> None:
    """There the numbers are in the user's own dict."""
    saved(tmp_path, f"{WEIGHTS} {BIASES}")
    other = net(1)
    for names, words in (
        (f"{BIASES} {WEIGHTS}", "stand in another order"),
        (f"{WEIGHTS} {BIASES}", "names"),  # a block's tensors have names, an object's numbers
    ):
        resumed = adam(other, names)
        with smckpt.sm_state_dict_type(other, smckpt.LOCAL):
            target = {"model": other.state_dict(), "optimizer": resumed.state_dict()}
        with pytest.raises(KeysMismatchError, match=words):
            smckpt.load(target, checkpoint_id=tmp_path)
        assert not resumed.state


def each_rank_has_an_order(folder: str) -> bool:
    import torch.distributed as dist

    orders = [f"{WEIGHTS} {BIASES}", f"{BIASES} {WEIGHTS}"]
    model, other = net(0), net(1)
    optimizer = adam(model, orders[dist.get_rank()])
    step(model, optimizer, 2)
    smckpt.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    resumed = adam(other, orders[0])
    smckpt.load({"model": other, "optimizer": resumed}, checkpoint_id=folder)
    return same(slots(other, resumed), slots(model, optimizer))


def test_a_rank_knows_its_own_order(tmp_path: Path) -> None:
    assert run_ranks(each_rank_has_an_order, 2, str(tmp_path)) == [True, True]


NUMBERS = {"0.weight": 1, "1.weight": 2, "0.bias": 3, "1.bias": 4}


class Counted(torch.optim.Optimizer):
    """Keeps of each parameter a number alone, which is no tensor."""

    def __init__(self, model: nn.Module, names: str) -> None:
        super().__init__(named(model, names), {"lr": 0.1})

    def count(self, names: str) -> Counted:
        for parameter, name in zip(self.param_groups[0]["params"], names.split(), strict=True):
            self.state[parameter]["count"] = [NUMBERS[name]]
        return self


FORMS: list[Any] = ["object", smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("after", FORMS)
@pytest.mark.parametrize("before", FORMS)
def test_values_without_a_tensor_go_by_the_names_of_parameters_too(
    tmp_path: Path, before: Any, after: Any, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def state(form: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        if form == "object":
            return {"model": model, "optimizer": optimizer}
        with smckpt.sm_state_dict_type(model, form):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    model, other, order = net(0), net(1), f"{WEIGHTS} {BIASES}"
    smckpt.save(state(before, model, Counted(model, order).count(order)), checkpoint_id=tmp_path)
    resumed = Counted(other, f"{BIASES} {WEIGHTS}")
    target = state(after, other, resumed)
    try:
        smckpt.load(target, checkpoint_id=tmp_path, check_keys_matched=strict)
    except KeysMismatchError:  # the dict of a block has numbers of its own
        assert strict and (after == smckpt.LOCAL or "object" in (before, after))
        return
    if after != "object":
        resumed.load_state_dict(target["optimizer"])
    found = {n: resumed.state.get(p, {}).get("count") for n, p in other.named_parameters()}
    if "no such parameters" in caplog.text:  # it numbers what was saved by names
        assert not strict and after == "object" and not any(found.values())
    else:
        assert found == {name: [number] for name, number in NUMBERS.items()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_order_of_parameters_without_a_state_is_free(tmp_path: Path, kind: Any) -> None:
    """Rates go to the groups by the names of their parameters."""

    def state(names: str, *rates: float) -> dict[str, Any]:
        model = net(0)
        weights, biases = (
            [p for n, p in model.named_parameters() if e in n] for e in names.split()
        )
        groups = [
            {"params": some, "lr": rate}
            for some, rate in zip((weights, biases), rates, strict=True)
        ]
        with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
            return {"model": model.state_dict(), "optimizer": kind(groups).state_dict()}

    smckpt.save(state("weight bias", 0.1, 0.2), checkpoint_id=tmp_path)
    target = state("bias weight", 0.5, 0.6)
    smckpt.load(target, checkpoint_id=tmp_path)
    assert [group["lr"] for group in target["optimizer"]["param_groups"]] == [0.2, 0.1]
