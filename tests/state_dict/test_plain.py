"""DDP, plain modules and a world of one; what comes back without `load_state_dict`."""

from __future__ import annotations

import copy
import io
import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import smckpt
from smckpt import errors
from tests.state_dict.test_initial import OPTIMIZERS, build
from tests.support.collectives import count_collectives
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.nets import Net, groups_of, step
from tests.support.truth import differences, snapshot

KINDS = [smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL]


def taken(model: Any, optimizer: Any, kind: Any = smckpt.LOCAL, **more: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def disturbed(name: str) -> tuple[Net, torch.optim.Optimizer]:
    """The same kind of model and optimizer, with other numbers everywhere."""
    model, optimizer = build(name)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    for group in optimizer.param_groups:
        group.update({key: 0.77 for key in ("weight_decay", "initial_lr") if key in group})
    model.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED], ids=lambda k: k.value)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_world_of_one_resumes_every_optimizer_bit_for_bit(
    tmp_path: Path, name: str, kind: Any
) -> None:
    model, optimizer = build(name)
    step(model, optimizer, 2)
    before = snapshot(model, optimizer)
    with count_collectives() as counted:
        smckpt.save(taken(model, optimizer, kind), checkpoint_id=tmp_path / "c")
        other, fresh = disturbed(name)
        assert differences(before, snapshot(other, fresh))
        smckpt.load(taken(other, fresh, kind), checkpoint_id=tmp_path / "c")
    assert counted.total == 0
    assert differences(snapshot(other, fresh), before) == []
    step(model, optimizer, 1, seed=5)
    step(other, fresh, 1, seed=5)
    assert differences(snapshot(other, fresh), snapshot(model, optimizer)) == []


@pytest.mark.parametrize("how", ["in the context", "outside", "not at all"])
def test_what_is_no_tensor_comes_back_whether_or_not_load_state_dict_is_called(
    tmp_path: Path, how: str
) -> None:
    model, optimizer = build("Adam")
    step(model, optimizer, 2)
    before = snapshot(model, optimizer)
    saved = taken(model, optimizer, step=7, scale=0.5, names=["a", None])
    smckpt.save(saved, checkpoint_id=tmp_path / "c")
    other, fresh = disturbed("Adam")
    target = taken(other, fresh, step=0, scale=0.0, names=[])
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    if how == "in the context":
        with smckpt.sm_state_dict_type(other, smckpt.LOCAL):
            other.load_state_dict(target["model"])
            fresh.load_state_dict(target["optimizer"])
    elif how == "outside":
        other.load_state_dict(target["model"])
        fresh.load_state_dict(target["optimizer"])
    assert (target["step"], target["scale"], target["names"]) == (7, 0.5, ["a", None])
    assert differences(snapshot(other, fresh), before) == []


def test_a_copy_of_the_model_made_inside_the_context_is_an_ordinary_model() -> None:
    model, file = Net(), io.BytesIO()
    with smckpt.sm_state_dict_type(model, smckpt.FULL):
        torch.save(model, file)
        copies = [copy.deepcopy(model)]
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    for twin in copies:
        with torch.no_grad():
            twin.head.weight.add_(1)
        mine = twin.state_dict(keep_vars=True)  # which the block's own refuses
        assert torch.equal(mine["head.weight"], model.head.weight + 1)
        assert twin.load_state_dict(model.state_dict()).missing_keys == []


def test_blocks_that_end_in_another_order_than_they_began_leave_nothing_behind() -> None:
    model, optimizer = build("Adam")
    step(model, optimizer)
    first, second = (smckpt.sm_state_dict_type(model, k) for k in (smckpt.LOCAL, smckpt.SHARDED))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "embedding.weight" in optimizer.state_dict()["state"]  # the second's
    second.__exit__(None, None, None)
    assert 0 in optimizer.state_dict()["state"]
    assert "head.weight" in model.state_dict(keep_vars=True)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL], ids=lambda k: k.value)
def test_threads_in_blocks_of_their_own_models_get_each_their_own(kind: Any) -> None:
    pairs, meet = [build("Adam") for _ in range(2)], threading.Barrier(2, timeout=seconds(60))
    for pair in pairs:
        step(*pair)

    def taken(number: int) -> list[Any]:
        model, optimizer = pairs[number]
        with smckpt.sm_state_dict_type(model, kind):
            meet.wait()  # both blocks are open
            mine = model.state_dict(), optimizer.state_dict()
            meet.wait()
        meet.wait()  # both have ended
        found = [mine[0]["embedding.weight"], model.state_dict()["embedding.weight"]]
        states = mine[1]["state"], optimizer.state_dict()["state"]
        keys = [0 if kind is smckpt.LOCAL else "embedding.weight", 0]
        return found + [s[key]["exp_avg"] for s, key in zip(states, keys, strict=True)]

    with ThreadPoolExecutor(2) as pool:
        for number, values in enumerate(pool.map(taken, range(2))):
            live = pairs[number][0].embedding.weight
            moment = pairs[number][1].state[live]["exp_avg"]
            for value, own in zip(values, (live, live, moment, moment), strict=True):
                assert torch.equal(value, own)


class Tallying(torch.nn.Linear):
    """A layer that keeps what is no tensor, as Transformer Engine's do."""

    calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "also": torch.tensor([self.calls])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"] if state["calls"] == state["also"].item() else -1


@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED], ids=lambda k: k.value)
def test_modules_get_their_extra_state_back(tmp_path: Path, kind: Any) -> None:
    model, other = (torch.nn.Sequential(Tallying(2, 2), Tallying(2, 2)) for _ in range(2))
    model[0].calls, model[1].calls = 3, 5
    with smckpt.sm_state_dict_type(model, kind):
        smckpt.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    with smckpt.sm_state_dict_type(other, kind):
        target = {"model": other.state_dict()}
        smckpt.load(target, checkpoint_id=tmp_path)
        other.load_state_dict(target["model"])
    assert [layer.calls for layer in other] == [3, 5]


def ddp(seed: int, optimizer: str) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(Net())
    kinds = {"AdamW": torch.optim.AdamW, "Adafactor": torch.optim.Adafactor}
    groups = groups_of(model)
    if optimizer == "Adafactor":
        groups[1].pop("betas")
    return model, kinds[optimizer](groups, lr=1e-2)


def ddp_comes_back(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    out: dict[str, Any] = {}
    for name in ("AdamW", "Adafactor"):
        model, optimizer = ddp(0, name)
        step(model, optimizer, 2)
        before = snapshot(model, optimizer)
        with count_collectives() as counted:
            smckpt.save(taken(model, optimizer), checkpoint_id=f"{folder}/{name}")
        other, fresh = ddp(3, name)
        with count_collectives() as again:
            smckpt.load(taken(other, fresh), checkpoint_id=f"{folder}/{name}")
        out[f"{name} loaded"] = differences(snapshot(other, fresh), before)
        out[f"{name} collectives"] = counted.total + again.total
        step(model, optimizer, 1, seed=5)
        step(other, fresh, 1, seed=5)
        out[f"{name} next"] = differences(snapshot(other, fresh), snapshot(model, optimizer))
    return {what: found for what, found in out.items() if found}


def test_ddp_comes_back_bit_for_bit_without_a_collective(tmp_path: Path) -> None:
    assert run_ranks(ddp_comes_back, 2, str(tmp_path)) == [{}, {}]


def compiled_comes_back(folder: str) -> list[Any]:
    def made(seed: int) -> tuple[Any, Any]:
        model, optimizer = ddp(seed, "AdamW")
        step(model, optimizer, 2, seed=seed)
        return torch.compile(model, backend="eager"), optimizer

    out: list[Any] = []
    for number, (saved, loaded) in enumerate(itertools.product(KINDS, KINDS)):
        (model, optimizer), (other, fresh) = made(0), made(number + 1)
        smckpt.save(taken(model, optimizer, saved), checkpoint_id=f"{folder}/{number}")
        smckpt.load(taken(other, fresh, loaded), checkpoint_id=f"{folder}/{number}")
        out += differences(snapshot(other, fresh), snapshot(model, optimizer))
    plain = Net()
    target = {"model": plain.state_dict()}
    smckpt.load(target, checkpoint_id=f"{folder}/0", check_keys_matched=False)
    out += differences(snapshot(plain, fresh), snapshot(model._orig_mod.module, optimizer))
    return out


def test_a_compiled_ddp_model_is_saved_and_loaded_as_the_one_inside(tmp_path: Path) -> None:
    assert run_ranks(compiled_comes_back, 2, str(tmp_path)) == [[], []]


def full_state_that_lacks_a_name() -> str:
    model, _ = ddp(0, "AdamW")
    with smckpt.sm_state_dict_type(model, smckpt.FULL):
        state = model.state_dict()
        state.pop("head.weight", None)
        with pytest.raises(errors.KeysMismatchError, match=r"head\.weight") as raised:
            model.load_state_dict(state)
    return str(raised.value)


def test_full_state_that_lacks_a_name_is_refused_on_every_rank_and_none_waits() -> None:
    first, second = run_ranks(full_state_that_lacks_a_name, 2, timeout=60)
    assert "head.weight" in first and first == second


def full_state_that_one_rank_cannot_take() -> str:
    def refuse(*_: Any) -> None:
        raise ValueError("not here")

    model, _ = ddp(0, "AdamW")
    if dist.get_rank() == 1:
        model.register_load_state_dict_pre_hook(refuse)
    with smckpt.sm_state_dict_type(model, smckpt.FULL):
        state = model.state_dict()
        with pytest.raises(Exception, match="not here") as raised:
            model.load_state_dict(state)
    return str(raised.value)


def test_full_state_that_one_rank_cannot_take_is_refused_on_every_rank() -> None:
    first, second = run_ranks(full_state_that_one_rank_cannot_take, 2, timeout=60)
    assert "rank 1" in first
    assert second == "not here"
