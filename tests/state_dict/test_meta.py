"""Loads into models on the meta device: what was one parameter stays one, nothing stays empty."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import smckpt
from smckpt import errors
from tests.support.launch import run_ranks
from tests.support.truth import differences, snapshot


class Tied(nn.Module):
    """Two names of one parameter, in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"embedding": nn.Embedding(6, 4)})
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.inner["embedding"].weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner["embedding"](x) * self.frozen)
        return out


class Buffers(Tied):
    """One buffer in two modules, and a buffer that is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.arange(4.0)
        self.register_buffer("scale", shared)
        self.head.register_buffer("scale", shared)
        self.register_buffer("part", shared[1:3])


class Views(Tied):
    """Two parameters that are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(2, 4)
        self.first, self.second = nn.Parameter(memory[0]), nn.Parameter(memory[1])


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tied() for _ in range(3))
        for block in self.blocks:
            block.inner = self.blocks[0].inner
            block.head.weight = block.inner["embedding"].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


MODELS: list[Callable[[], nn.Module]] = [Tied, Buffers, Views, Deep]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def ties(*models: nn.Module) -> list[list[int]]:
    """For each name of a tensor, which others are the same object, and which share its memory."""
    tensors = [
        tensor
        for model in models
        for named in (model.named_parameters, model.named_buffers)
        for _, tensor in named(remove_duplicate=False)
    ]
    assert not any(tensor.is_meta for tensor in tensors)
    return [
        [
            number
            for number, other in enumerate(tensors)
            if other is one or other.untyped_storage()._cdata == one.untyped_storage()._cdata
        ]
        + [-number for number, other in enumerate(tensors) if other is one]
        for one in tensors
    ]


def taken(form: str, **models: nn.Module) -> dict[str, Any]:
    if form == "object":
        return dict(models)
    state = {}
    for name, model in models.items():
        with smckpt.sm_state_dict_type(model, getattr(smckpt, form)):
            state[name] = model.state_dict()
    return state


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        cross_entropy(model(torch.arange(6)), torch.arange(6)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
@pytest.mark.parametrize("make", MODELS)
def test_a_model_on_the_meta_device_keeps_its_ties_and_trains_as_the_saved_one(
    tmp_path: Path, make: Callable[[], nn.Module], form: str
) -> None:
    torch.manual_seed(0)
    model = make()
    smckpt.save(taken(form, model=model), checkpoint_id=tmp_path)
    empty = on_meta(make)
    needs = [p.requires_grad for p in empty.parameters()]
    kinds = [type(p) for p in empty.parameters()]
    smckpt.load(taken(form, model=empty), checkpoint_id=tmp_path)
    assert ties(empty) == ties(model)
    assert [p.requires_grad for p in empty.parameters()] == needs
    assert [type(p) for p in empty.parameters()] == kinds
    for one in (model, empty):
        train(one, torch.optim.AdamW(one.parameters(), lr=0.1))
    assert not differences(snapshot(empty), snapshot(model))


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
def test_an_optimizer_that_was_made_before_the_load_trains_the_loaded_model(
    tmp_path: Path, form: str
) -> None:
    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if form == "object":
            return {"a": optimizer, "model": model}  # taken before the model
        with smckpt.sm_state_dict_type(model, getattr(smckpt, form)):
            return {"a": optimizer.state_dict(), "model": model.state_dict()}

    torch.manual_seed(0)
    model = Buffers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    smckpt.save(state(model, optimizer), checkpoint_id=tmp_path)
    empty = on_meta(Buffers)
    its = torch.optim.AdamW(empty.parameters(), lr=0.3)
    smckpt.load(state(empty, its), checkpoint_id=tmp_path)
    train(model, optimizer)
    train(empty, its)
    assert not differences(snapshot(empty, its), snapshot(model, optimizer))


def test_state_of_an_optimizer_on_the_meta_device_gets_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    smckpt.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    empty = on_meta(Tied)
    its = torch.optim.Adam(empty.parameters(), lr=0.1)
    smckpt.init_optim_state(its)
    smckpt.load({"model": empty, "optimizer": its}, checkpoint_id=tmp_path)
    train(model, optimizer)
    train(empty, its)
    assert not differences(snapshot(empty, its), snapshot(model, optimizer))


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
def test_two_models_that_share_a_parameter_share_it_after_a_load(tmp_path: Path, form: str) -> None:
    def two() -> tuple[nn.Module, nn.Module]:
        first, second = Tied(), Tied()
        second.inner = first.inner
        second.head.weight = first.head.weight
        return first, second

    first, second = two()
    smckpt.save(taken(form, a=first, b=second), checkpoint_id=tmp_path)
    with torch.device("meta"):
        third, fourth = two()
    held = third.head.weight
    smckpt.load(taken(form, a=third, b=fourth), checkpoint_id=tmp_path)
    assert ties(third, fourth) == ties(first, second)
    assert held is fourth.inner["embedding"].weight and not held.is_meta
    assert not differences(snapshot(third), snapshot(first))
    assert not differences(snapshot(fourth), snapshot(second))


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("saved", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
def test_what_no_checkpoint_holds_is_named(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    smckpt.save(taken(form, model=Partly()), checkpoint_id=tmp_path)
    empty = on_meta(Partly)
    with caplog.at_level(logging.WARNING, "smckpt"):
        smckpt.load(taken(form, model=empty), checkpoint_id=tmp_path)
    assert [n for n, t in (*empty.named_parameters(), *empty.named_buffers()) if t.is_meta] == [
        "table"
    ]
    assert "1 tensors of the model are still on the meta device" in caplog.text
    assert "lacks them: table." in caplog.text


@pytest.mark.parametrize("renamed", [None, {"linear": "old"}])
@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
def test_what_the_checkpoint_lacks_stays_empty_and_is_named(
    tmp_path: Path, form: str, renamed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    full = Partly().state_dict()
    del full["linear.bias"]
    if renamed:
        full["old.weight"] = full.pop("linear.weight")
    smckpt.save({"model": full}, checkpoint_id=tmp_path)
    empty = on_meta(Partly)
    target = taken(form, model=empty)
    with caplog.at_level(logging.WARNING, "smckpt"):
        smckpt.load(
            target,
            checkpoint_id=tmp_path,
            check_keys_matched=False,
            options=smckpt.LoadOptions(renamed=renamed),
        )
    assert empty.linear.bias.is_meta and isinstance(empty.linear.bias, nn.Parameter)
    weight = "old.weight" if renamed else "linear.weight"
    assert torch.equal(empty.linear.weight, full[weight])
    assert "lacks them: linear.bias, table." in caplog.text
    if form != "object":
        assert target["model"]["linear.bias"].is_meta


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
def test_a_load_that_fails_leaves_the_model_on_the_meta_device(tmp_path: Path, form: str) -> None:
    smckpt.save({"model": nn.Linear(9, 9)}, checkpoint_id=tmp_path)
    empty = on_meta(Tied)
    before = list(empty.named_parameters(remove_duplicate=False))
    with pytest.raises(errors.CheckpointError):
        smckpt.load(taken(form, model=empty), checkpoint_id=tmp_path)
    after = list(empty.named_parameters(remove_duplicate=False))
    assert [(n, id(p)) for n, p in after] == [(n, id(p)) for n, p in before]
    assert all(p.is_meta and isinstance(p, nn.Parameter) for _, p in after)


def test_attributes_of_a_parameter_stay(tmp_path: Path) -> None:
    smckpt.save({"model": Tied()}, checkpoint_id=tmp_path)
    empty = on_meta(Tied)
    empty.frozen.sequence_parallel = True  # type: ignore[attr-defined]
    smckpt.load({"model": empty}, checkpoint_id=tmp_path)
    assert empty.frozen.sequence_parallel and not empty.frozen.is_meta  # type: ignore[attr-defined]


def test_a_parameter_that_cannot_get_memory_is_refused_by_name(tmp_path: Path) -> None:
    smckpt.save({"model": Tied()}, checkpoint_id=tmp_path)
    empty = on_meta(Tied)
    watched = weakref.ref(empty.frozen)
    with pytest.raises(errors.StateError, match=r"frozen is on the meta device.*weakref"):
        smckpt.load({"model": empty}, checkpoint_id=tmp_path)
    assert watched() is empty.frozen and all(p.is_meta for p in empty.parameters())


def test_full_state_of_a_model_on_the_meta_device_is_refused_by_name() -> None:
    empty = on_meta(Tied)
    with (
        smckpt.sm_state_dict_type(empty, smckpt.FULL),
        pytest.raises(errors.StateError, match="frozen and 1 other tensors .* meta device"),
    ):
        empty.state_dict()


def test_tied_tensors_of_a_plain_dict_share_their_memory(tmp_path: Path) -> None:
    smckpt.save({"model": Buffers().state_dict()}, checkpoint_id=tmp_path)
    target = {"model": on_meta(Buffers).state_dict()}
    smckpt.load(target, checkpoint_id=tmp_path)
    state = target["model"]
    assert state["head.weight"].data_ptr() == state["inner.embedding.weight"].data_ptr()
    assert state["part"].data_ptr() == state["scale"].data_ptr() + 4


# -- FSDP2 and tensor parallel -----------------------------------------------------------------


CASES = [(wrap, form) for wrap in ("fsdp2", "tp") for form in ("object", "LOCAL", "SHARDED")]


def of_two(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))

    def sharded(make: Callable[[], nn.Module], wrap: str) -> nn.Module:
        model = make()
        if wrap == "tp":
            return parallelize_module(model, mesh, {"side": ColwiseParallel()})
        fully_shard(model, mesh=mesh)
        return model

    def state(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if form == "object":
            return {"model": model, "optimizer": optimizer}
        with smckpt.sm_state_dict_type(model, getattr(smckpt, form)):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    told: dict[str, Any] = {}
    for wrap, form in CASES:
        torch.manual_seed(0)
        model = sharded(Uneven, wrap)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer)
        smckpt.save(state(form, model, optimizer), checkpoint_id=f"{folder}/{wrap}{form}")
        empty = sharded(lambda: on_meta(Uneven), wrap)
        assert all(p.is_meta for p in empty.parameters())
        its = torch.optim.AdamW(empty.parameters(), lr=0.3)
        smckpt.load(state(form, empty, its), checkpoint_id=f"{folder}/{wrap}{form}")
        tied = empty.head.weight is empty.inner["embedding"].weight
        train(model, optimizer)
        train(empty, its)
        told[wrap + form] = tied, differences(snapshot(empty, its), snapshot(model, optimizer))
    dist.barrier()
    return told


class Uneven(Tied):
    """Its odd sizes are padded by FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn(5, 3))
        self.side = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.side(self.inner["embedding"](x)).sum()
        return super().forward(x) * self.more.square().sum() + side


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(of_two, 2, str(tmp_path_factory.mktemp("two")), timeout=200)


@pytest.mark.parametrize(("wrap", "form"), CASES)
def test_a_sharded_model_on_the_meta_device_trains_as_the_saved_one(
    two: Any, wrap: str, form: str
) -> None:
    assert [told[wrap + form] for told in two] == [(True, [])] * 2
