"""Loads of what an optimizer and a checkpoint both have: other groups, options and optimizers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smckpt
from smckpt.errors import CheckpointError
from tests.support.launch import run_ranks

KINDS = ("object", "LOCAL", "SHARDED", "FULL")
ADAM, SGD = torch.optim.AdamW, torch.optim.SGD


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def groups(model: nn.Module, how: str) -> Any:
    """one group; two: weights, then biases; swapped: biases first; layers: one for each layer."""
    named = dict(model.named_parameters())
    if how == "one":
        return list(named.values())
    words = {"two": ("weight", "bias"), "swapped": ("bias", "weight"), "layers": ("0.", "1.")}[how]
    decay = {"bias": {"weight_decay": 0.0}} if how != "layers" else {}
    return [
        {"params": [p for n, p in named.items() if word in n], **decay.get(word, {})}
        for word in words
    ]


def step(model: nn.Module, optimizer: Any, count: int) -> None:
    for number in range(count):
        torch.manual_seed(number)
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def taken(model: nn.Module, optimizer: Any, kind: str) -> dict[str, Any]:
    if kind == "object":
        return {"model": model, "optimizer": optimizer}
    with smckpt.sm_state_dict_type(model, getattr(smckpt, kind)):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def slots(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}


def loaded(
    folder: Path, kind: str, saved: Any, other: Any, *, steps: int = 0, keys: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], Any]:
    """The slots that were saved, those after the load, and the optimizer, which goes on."""
    before = net(0)
    optimizer = saved(before)
    step(before, optimizer, 2)
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    smckpt.save(taken(before, optimizer, kind), checkpoint_id=folder)
    after = net(1)
    resumed = other(after)
    step(after, resumed, steps)
    smckpt.load(taken(after, resumed, kind), checkpoint_id=folder, check_keys_matched=keys)
    had, has = slots(before, optimizer), slots(after, resumed)
    for name, found in has.items():
        for slot in found.keys() & had[name].keys():
            assert torch.equal(found[slot], had[name][slot]), (kind, name, slot)
    has = {name: {k: v.clone() for k, v in found.items()} for name, found in has.items()}
    step(after, resumed, 1)
    return had, has, resumed


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_matched_by_their_parameters(tmp_path: Path, kind: str) -> None:
    for number, (saved, other) in enumerate(
        [("one", "two"), ("two", "one"), ("two", "swapped"), ("two", "layers"), ("one", "swapped")]
    ):
        had, has, resumed = loaded(
            tmp_path / str(number),
            kind,
            lambda m, how=saved: ADAM(groups(m, how), lr=0.01),
            lambda m, how=other: ADAM(groups(m, how), lr=0.5),
        )
        assert all(has[name].keys() == had[name].keys() for name in had)
        assert {group["lr"] for group in resumed.param_groups} == {0.25}
        decays = [group["weight_decay"] for group in resumed.param_groups]
        assert decays == {"two": [0.01, 0.0], "swapped": [0.0, 0.01]}.get(
            other, [0.01] * len(decays)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_other_groups_are_refused_unless_they_are_asked_for(tmp_path: Path, kind: str) -> None:
    for saved, other in (("one", "two"), ("two", "one")):
        with pytest.raises(CheckpointError, match="check_keys_matched=False|other parameters"):
            loaded(
                tmp_path / saved,
                kind,
                lambda m, how=saved: ADAM(groups(m, how)),
                lambda m, how=other: ADAM(groups(m, how)),
                keys=True,
            )


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_option_is_switched_on_and_off(
    tmp_path: Path, kind: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "smckpt")
    for on in (True, False):
        caplog.clear()
        _, has, resumed = loaded(
            tmp_path / str(on),
            kind,
            lambda m, on=on: ADAM(m.parameters(), amsgrad=not on),
            lambda m, on=on: ADAM(m.parameters(), amsgrad=on),
            steps=steps,
        )
        assert [group["amsgrad"] for group in resumed.param_groups] == [on]
        assert all(("max_exp_avg_sq" in found) is on for found in has.values())
        assert "optimizer.param_groups.0.amsgrad" in caplog.text
        assert ("checkpoint lacks" if on else "target lacks") in caplog.text
        assert "max_exp_avg_sq" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_another_optimizer_takes_what_both_have(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "smckpt")

    def momentum(model: nn.Module) -> Any:
        return SGD(model.parameters(), 0.01, momentum=0.9)

    def adam(model: nn.Module) -> Any:
        return ADAM(model.parameters())

    def adamax(model: nn.Module) -> Any:
        return torch.optim.Adamax(model.parameters())

    for number, (saved, other, common) in enumerate(
        [
            (momentum, adam, set()),
            (adam, momentum, set()),
            (adam, adamax, {"step", "exp_avg"}),
            (momentum, lambda m: SGD(m.parameters(), 0.01), set()),
        ]
    ):
        caplog.clear()
        had, has, resumed = loaded(tmp_path / str(number), kind, saved, other)
        assert all(has[name].keys() & had[name].keys() == common for name in had)
        assert resumed.param_groups[0]["lr"] == 0.25
        assert "not loaded" in caplog.text


def on_fsdp2(folder: str) -> list[str]:
    """On each rank: load into two groups and amsgrad, in each kind."""
    from torch.distributed.fsdp import fully_shard

    def sharded(seed: int, how: str, **options: Any) -> tuple[nn.Module, Any]:
        model = net(seed)
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer)
        fully_shard(model)
        return model, ADAM(groups(model, how), lr=0.01, **options)

    wrong = []
    for kind in ("SHARDED", "FULL", "object"):
        model, optimizer = sharded(0, "one")
        step(model, optimizer, 2)
        smckpt.save(taken(model, optimizer, kind), checkpoint_id=f"{folder}/{kind}")
        had = slots(model, optimizer)
        other, resumed = sharded(1, "two", amsgrad=True)
        smckpt.load(
            taken(other, resumed, kind), checkpoint_id=f"{folder}/{kind}", check_keys_matched=False
        )
        has = slots(other, resumed)
        for name, found in has.items():
            if found.keys() != {*had[name], "max_exp_avg_sq"}:
                wrong.append(f"{kind} {name} {[*found]}")
                continue
            for slot in had[name]:
                one, two = (getattr(v, "_local_tensor", v) for v in (found[slot], had[name][slot]))
                if not torch.equal(one, two):
                    wrong.append(f"{kind} {name} {slot}")
        step(other, resumed, 1)
    return wrong


def test_ranks_match_groups_and_options(tmp_path: Path) -> None:
    assert run_ranks(on_fsdp2, 2, str(tmp_path)) == [[], []]
