"""`init_optim_state` makes state and leaves everything else bit for bit as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import smckpt
from tests.support.nets import Net, groups_of, step
from tests.support.truth import differences, same_bits, snapshot

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adam": (torch.optim.Adam, {}),
    "Adam, rate in a tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "SGD Nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
}


def build(name: str) -> tuple[Net, torch.optim.Optimizer]:
    """Groups with weight decay and rates of their own, and gradients that are already there."""
    torch.manual_seed(0)
    model = Net()
    kind, arguments = OPTIMIZERS[name]
    groups = groups_of(model)
    groups[1].pop("betas")
    groups[1].pop("lr")
    if name == "Rprop":
        groups[0].pop("weight_decay")
    optimizer = kind(groups, **{"lr": 1e-2, **arguments})
    model(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_but_the_state_changes_and_the_first_steps_are_the_same(name: str) -> None:
    model, optimizer = build(name)
    before, generator = snapshot(model, optimizer), torch.get_rng_state()
    smckpt.init_optim_state(optimizer)
    after = snapshot(model, optimizer)
    assert differences({k: after[k] for k in before}, before) == []
    assert all(key.startswith("state") for key in after.keys() - before.keys())
    assert same_bits(torch.get_rng_state(), generator)
    assert all(not value.any() for key, value in after.items() if key.endswith(" step"))
    smckpt.init_optim_state(optimizer)
    assert differences(snapshot(model, optimizer), after) == []
    untouched, stock = build(name)
    step(model, optimizer, 2)
    step(untouched, stock, 2)
    assert differences(snapshot(model, optimizer), snapshot(untouched, stock)) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_was_moved_stays(name: str) -> None:
    model, optimizer = build(name)
    step(model, optimizer, 2)
    before = snapshot(model, optimizer)
    smckpt.init_optim_state(optimizer)
    assert differences(snapshot(model, optimizer), before) == []


def test_a_gradient_of_negative_zero_keeps_its_sign_in_the_momentum() -> None:
    weight = torch.nn.Parameter(torch.tensor([0.0, -0.0, 1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    smckpt.init_optim_state(optimizer)
    weight.grad = torch.tensor([-0.0, 0.0, 2.0])
    optimizer.step()
    assert same_bits(optimizer.state[weight]["momentum_buffer"], weight.grad)


class Stranger(torch.optim.Optimizer):
    """Makes its state inside its step, where it cannot be had without one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        raise AssertionError("a step was taken")


def test_an_optimizer_that_makes_its_state_in_its_step_is_refused_by_name() -> None:
    optimizer = Stranger(Net().parameters())
    with pytest.raises(smckpt.errors.UsageError, match=r"Stranger.*_init_group"):
        smckpt.init_optim_state(optimizer)
    assert not optimizer.state
