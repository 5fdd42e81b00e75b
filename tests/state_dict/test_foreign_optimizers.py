"""An optimizer that is not in the state is never changed, and one of another model answers as if
smckpt were not there."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smckpt
from smckpt import errors
from tests.support.limits import seconds

ROOT = Path(__file__).parents[2]


def described(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.optimizers.untouched", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds(300),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_save_and_a_load_of_the_model_change_no_optimizer(tmp_path: Path) -> None:
    with_us, without = described(str(tmp_path)), described()
    assert len(without) > 15
    different = {name for name, what in without.items() if with_us[name] != what}
    assert different == set()


class Around(torch.optim.Optimizer):
    """A wrapper that never called `Optimizer.__init__`."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside, self.defaults = inside, inside.defaults
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._patch_step_function()

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inside.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inside.state

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inside.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inside.load_state_dict(state_dict)


def trained(seed: int, wrap: Any = lambda optimizer: optimizer) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


WRAPS = [lambda optimizer: optimizer, Around]
KINDS = [smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL]


@pytest.mark.parametrize("wrap", WRAPS, ids=["bare", "wrapped"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.value)
def test_an_optimizer_of_another_model_or_of_none_gives_torchs_own_dict_in_a_block(
    kind: Any, wrap: Any
) -> None:
    (model, _), (_, other) = trained(0), trained(1, wrap)
    alone = trained(2, wrap)[1]
    wants = [copy.deepcopy(each.state_dict()) for each in (other, alone)]
    with smckpt.sm_state_dict_type(model, kind):
        for each, want in zip((other, alone), wants, strict=True):
            given = each.state_dict()
            assert [type(v) for v in (given, *given.values())] == [dict, dict, list]
            assert same(given, want)
            each.load_state_dict(given)
            assert same(each.state_dict(), want)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.value)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_in_nested_blocks_each_optimizer_is_its_models(
    kind: Any, order: tuple[int, int], tmp_path: Path
) -> None:
    def state(both: Any) -> dict[str, Any]:
        outer, inner = (both[number][0] for number in order)
        with smckpt.sm_state_dict_type(outer, kind), smckpt.sm_state_dict_type(inner, kind):
            return {
                f"{name}{n}": each.state_dict()
                for n, pair in enumerate(both)
                for name, each in zip(("model", "optimizer"), pair, strict=True)
            }

    both = [trained(0), trained(1)]
    smckpt.save(state(both), checkpoint_id=tmp_path)
    fresh = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        fresh.append((model, torch.optim.AdamW(model.parameters(), lr=9.0)))
    smckpt.load(state(fresh), checkpoint_id=tmp_path)
    for (model, optimizer), (now, resumed) in zip(both, fresh, strict=True):
        assert same(now.state_dict(), model.state_dict())
        assert same(resumed.state_dict(), optimizer.state_dict())


def test_a_shared_parameter_belongs_to_the_block_whose_model_has_all_of_the_optimizer() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(3, 3)
    one, two = nn.Sequential(shared, nn.Linear(3, 2)), nn.Sequential(nn.Linear(2, 3), shared)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (one, two)]
    for model, optimizer, size in zip((one, two), optimizers, (3, 2), strict=True):
        model(torch.ones(size)).sum().backward()
        optimizer.step()
    with (
        smckpt.sm_state_dict_type(one, smckpt.SHARDED),
        smckpt.sm_state_dict_type(two, smckpt.SHARDED),
    ):
        names = [set(o.state_dict()["state"]) for o in optimizers]
    assert names == [{n for n, _ in m.named_parameters()} for m in (one, two)]


def test_an_optimizer_that_trains_more_than_the_model_is_refused_by_name() -> None:
    one, two = nn.Linear(3, 2), nn.Linear(2, 3)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1, momentum=0.9)
    two(one(torch.ones(3))).sum().backward()
    optimizer.step()
    with (
        smckpt.sm_state_dict_type(one, smckpt.SHARDED),
        pytest.raises(errors.StateError, match="parameter 2 of the optimizer is not"),
    ):
        optimizer.state_dict()


def test_blocks_that_end_in_any_order_give_torch_its_methods_back() -> None:
    kind = torch.optim.Optimizer
    before = kind.state_dict, kind.load_state_dict
    model = nn.Linear(2, 2)
    blocks = [smckpt.sm_state_dict_type(model, smckpt.LOCAL) for _ in range(3)]
    for block in blocks:
        block.__enter__()
    for number in (1, 0, 2):
        blocks[number].__exit__(None, None, None)
    assert (kind.state_dict, kind.load_state_dict) == before


def test_a_copy_of_a_dict_from_outside_a_block_never_fills_the_optimizer(tmp_path: Path) -> None:
    _, saved = trained(0)
    smckpt.save({"optimizer": saved.state_dict()}, checkpoint_id=tmp_path)
    _, live = trained(1)
    before = copy.deepcopy(live.state_dict())
    target = {"optimizer": copy.deepcopy(live.state_dict())}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert same(live.state_dict(), before)
    assert same(target["optimizer"]["state"], saved.state_dict()["state"])


@pytest.mark.parametrize("own", [True, False], ids=["own", "of an optimizer that is gone"])
def test_a_dict_without_state_leads_to_no_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    """Its groups hold numbers alone, which a twin has too."""

    def made() -> Any:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
        optimizer.step()
        return optimizer

    smckpt.save({"optimizer": made().state_dict()}, checkpoint_id=tmp_path)
    live = made()
    live.param_groups[0]["lr"] = 5.0
    target = live.state_dict() if own else copy.deepcopy(live.state_dict())
    smckpt.load({"optimizer": target}, checkpoint_id=tmp_path)
    assert "its optimizer is not known" in caplog.text
    assert live.param_groups[0]["lr"] == 5.0 and target["param_groups"][0]["lr"] == 1e-3


def test_one_dict_from_outside_a_block_serves_several_loads(tmp_path: Path) -> None:
    dicts = []
    for number in (0, 1):
        _, saved = trained(number)
        smckpt.save({"optimizer": saved.state_dict()}, checkpoint_id=tmp_path / str(number))
        dicts.append(copy.deepcopy(saved.state_dict()))
    _, live = trained(3)
    target = {"optimizer": live.state_dict()}
    live.param_groups[0]["lr"] = 7.0
    for number, want in enumerate(dicts):
        smckpt.load(target, checkpoint_id=tmp_path / str(number))
        assert same(live.state_dict(), want)
        assert same(target["optimizer"], want)
        assert type(target["optimizer"]["param_groups"]) is list
