"""Tensors that hold other tensors and facts beside them: nothing of one is lost."""

from __future__ import annotations

import enum
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import smckpt
from smckpt import errors
from smckpt.state_dict import register_tensor_class
from tests.support.launch import run_ranks
from tests.support.limits import seconds


class Holding(torch.Tensor):
    """Holds tensors under `names`, and a context. Only what is inside may be read."""

    names: tuple[str, ...] = ("data_",)

    @staticmethod
    def __new__(cls, context: Any, shape: Any = None, **inner: torch.Tensor | None) -> Any:
        first = next(iter(inner.values()))
        assert first is not None
        out = torch.Tensor._make_wrapper_subclass(
            cls, first.shape if shape is None else shape, dtype=torch.float32
        )
        out.context = context
        for name in cls.names:
            setattr(out, name, inner.get(name))
        return out

    def __tensor_flatten__(self) -> Any:
        return [n for n in self.names if getattr(self, n) is not None], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, shape: Any, stride: Any) -> Any:
        return cls(context, shape, **inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            held = args[0]
            return cls(held.context, held.shape, **{n: getattr(held, n) for n in cls.names})
        raise AssertionError(f"{func} ran: only what is inside is to be read")


class Factor(Holding):
    """Its values are its data times a number."""


class Scaled(Holding):
    names = ("data_", "scale")


class Packed(Holding):
    """Four bits a value, a scale for each block, and a table that all share."""

    names = ("codes", "scale", "table", "zero")


class Nested(Holding):
    names = ("inner", "more")


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclass(frozen=True)
class Options:
    bits: int
    mode: Mode


MAKE: dict[str, Callable[[float], Holding]] = {
    "a number in the context": lambda x: Factor(2.5, data_=torch.full((3,), x)),
    "a dict as the context": lambda x: Factor(
        {"factor": 2.5, "dtype": torch.float16, "block": (1, 3)}, data_=torch.full((3,), x)
    ),
    "a scalar beside the data": lambda x: Scaled(
        None, data_=torch.full((3,), x), scale=torch.tensor(x)
    ),
    "two of the same shape": lambda x: Scaled(
        None, data_=torch.full((3,), x), scale=torch.full((3,), x)
    ),
    "packed": lambda x: Packed(
        [True, torch.Size([4, 4])],
        (4, 4),
        codes=torch.full((8,), int(x), dtype=torch.uint8),
        scale=torch.full((2,), x, dtype=torch.bfloat16),
        table=torch.full((16,), x),
        zero=None,
    ),
    "nested": lambda x: Nested(
        None,
        inner=Scaled(3, data_=torch.full((3,), x), scale=torch.tensor(x)),
        more=torch.full((2,), x),
    ),
    "an enum and a dataclass": lambda x: Factor(
        [Options(4, Mode.FAST), Mode.SLOW], data_=torch.full((3,), x)
    ),
}


def inside(tensor: Any) -> dict[str, Any]:
    names, context = tensor.__tensor_flatten__()
    held = {n: getattr(tensor, n) for n in names}
    return {
        "class": type(tensor),
        "context": context,
        "shape": tensor.shape,
        **{n: inside(t) if isinstance(t, Holding) else t.tolist() for n, t in held.items()},
    }


@pytest.mark.parametrize("kind", MAKE)
def test_all_parts_of_a_tensor_come_back(tmp_path: Path, kind: str) -> None:
    saved, live = MAKE[kind](7.0), MAKE[kind](1.0)
    smckpt.save({"model": {"w": saved, "b": torch.ones(2)}}, checkpoint_id=tmp_path)
    assert inside(saved) != inside(live)
    target = {"model": {"w": live, "b": torch.zeros(2)}}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["model"]["w"] is live
    assert inside(live) == inside(MAKE[kind](7.0))


@pytest.mark.parametrize("kind", MAKE)
def test_a_registered_class_is_made_by_a_load_without_a_target(tmp_path: Path, kind: str) -> None:
    for each in (Factor, Scaled, Packed, Nested):
        register_tensor_class(each)
    smckpt.save({"w": [MAKE[kind](7.0)], "step": 3}, checkpoint_id=tmp_path)
    loaded = smckpt.load(checkpoint_id=tmp_path)
    assert loaded is not None and loaded["step"] == 3
    if kind == "an enum and a dataclass":  # only code could make its context
        assert loaded["w"][0]["data_"].tolist() == [7.0] * 3
        assert "Options(bits=4" in str(loaded["w"][0]["__tensor__"])
    else:
        assert inside(loaded["w"][0]) == inside(MAKE[kind](7.0))


class Unknown(Scaled):
    pass


def test_a_class_that_is_not_on_the_list_is_not_imported_and_stays_a_dict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Unknown(2.5, data_=torch.ones(3), scale=torch.tensor(4.0))
    monkeypatch.setattr(Unknown, "__module__", "never_imported")
    smckpt.save({"w": saved}, checkpoint_id=tmp_path)
    with caplog.at_level(logging.WARNING, "smckpt"):
        loaded = smckpt.load(checkpoint_id=tmp_path)
    assert loaded is not None
    assert loaded["w"]["data_"].tolist() == [1.0] * 3 and loaded["w"]["scale"].item() == 4.0
    assert "w is a never_imported.Unknown" in caplog.text
    assert "register_tensor_class" in caplog.text and "never_imported" not in sys.modules


@pytest.mark.parametrize(
    ("live", "word"),
    [
        (lambda: Factor(2.0, data_=torch.ones(3)), "context 2.5"),
        (lambda: Unknown(2.5, data_=torch.ones(3)), "class .*Factor"),
        (lambda: Factor(2.5, (1, 3), data_=torch.ones(3)), "shape"),
    ],
    ids=["context", "class", "shape"],
)
def test_a_live_tensor_of_another_meaning_is_refused_before_it_is_filled(
    tmp_path: Path, live: Callable[[], Holding], word: str
) -> None:
    smckpt.save({"w": Factor(2.5, data_=torch.full((3,), 7.0))}, checkpoint_id=tmp_path)
    target = live()
    with pytest.raises(errors.TensorMismatchError, match=f"^.*w was saved with the {word}"):
        smckpt.load({"w": target}, checkpoint_id=tmp_path)
    assert target.data_.tolist() == [1.0] * 3


def test_a_plain_tensor_does_not_take_the_place_of_one_with_parts(tmp_path: Path) -> None:
    smckpt.save({"w": MAKE["packed"](7.0)}, checkpoint_id=tmp_path)
    with pytest.raises(errors.KeysMismatchError, match=r"w\.codes"):
        smckpt.load({"w": torch.ones(4, 4)}, checkpoint_id=tmp_path)
    smckpt.save({"w": torch.ones(4, 4)}, checkpoint_id=tmp_path)
    with pytest.raises(errors.KeysMismatchError, match=r"w\.codes"):
        smckpt.load({"w": MAKE["packed"](7.0)}, checkpoint_id=tmp_path)


class Broken(Holding):
    def __tensor_flatten__(self) -> Any:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (lambda: Factor(object(), data_=torch.ones(3)), "w has a builtins.object in the context"),
        (lambda: Factor([print.__call__], data_=torch.ones(3)), "w has a .* in the context"),
        (lambda: Factor({"t": torch.ones(2)}, data_=torch.ones(3)), "w has a torch.Tensor in the"),
        (lambda: Broken(None, data_=torch.ones(3)), "w is a .*Broken, which does not say.*today"),
    ],
    ids=["object", "function", "tensor", "broken"],
)
def test_what_cannot_be_restored_is_refused_at_the_save(
    tmp_path: Path, tensor: Callable[[], Holding], word: str
) -> None:
    with pytest.raises(errors.StateError, match=word):
        smckpt.save({"w": tensor()}, checkpoint_id=tmp_path)
    assert not list(tmp_path.glob("manifest*"))


@pytest.mark.parametrize(
    "below", [lambda value: {"__tensor__": value},
              lambda value: {"model": {"w": torch.ones(2), "__tensor__": value}}]
)  # fmt: skip
@pytest.mark.parametrize("value", [5, {"v": 3}, {"class": "torch:Tensor"}, [1]])
def test_a_users_value_under_the_key_of_ours_is_refused_at_the_save(
    tmp_path: Path, below: Any, value: Any
) -> None:
    """No load gave it back: it was left as it was, in silence, or ended in an AttributeError."""
    with pytest.raises(errors.StateError, match="'__tensor__'"):
        smckpt.save(below(value), checkpoint_id=str(tmp_path / "no"))
    inside = {"model": {"__tensor__": value, "w": 1}, "t": {"__tensor__": torch.arange(3.0)}}
    smckpt.save(inside, checkpoint_id=str(tmp_path / "ck"))  # one value, or a tensor
    target = {"model": {"__tensor__": None, "w": 0}, "t": {"__tensor__": torch.zeros(3)}}
    smckpt.load(target, checkpoint_id=str(tmp_path / "ck"))
    assert target["model"] == inside["model"]
    assert torch.equal(target["t"]["__tensor__"], torch.arange(3.0))


def test_an_export_refuses_weights_in_parts_by_name(tmp_path: Path) -> None:
    model = {"head.weight": MAKE["packed"](7.0), "norm.weight": torch.ones(2)}
    smckpt.save({"model": model}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(errors.UsageError, match=r"model\.head\.weight is a .*Packed"):
        smckpt.export_hf(tmp_path / "saved", tmp_path / "out")
    smckpt.save({"model": {"norm.weight": torch.ones(2)}, "a": model}, checkpoint_id=tmp_path / "b")
    smckpt.export_hf(tmp_path / "b", tmp_path / "out")


def test_the_commands_read_it(tmp_path: Path) -> None:
    for name, value in (("a", 7.0), ("b", 8.0)):
        smckpt.save({"w": MAKE["packed"](value)}, checkpoint_id=tmp_path / name)
    for arguments, status, word in (
        (["verify", tmp_path / "a"], 0, "ok: 3 tensors"),
        (["show", tmp_path / "a"], 0, "test_parts.Packed"),
        (["diff", tmp_path / "a", tmp_path / "b"], 1, "w.codes"),
    ):
        command = [sys.executable, "-m", "smckpt", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
        assert done.returncode == status and word in done.stdout, done


# -- optimizers ------------------------------------------------------------------------------------


class LowBit(torch.optim.Optimizer):
    """SGD with a momentum of one scale and codes of eight bits; it has no `_init_group`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["momentum"] = self._room(p)
                state["step"] += 1
                held, mine = state["momentum"], p
                grad = p.grad
                if isinstance(p, DTensor):
                    held, mine, grad = held._local_tensor, p._local_tensor, grad._local_tensor
                value = held.codes.reshape(mine.shape).float() * held.scale * 0.9 + grad
                held.scale.copy_(value.abs().max() / 127 if value.numel() else 0)
                held.codes.copy_((value / held.scale).round().to(torch.int8).reshape(-1))
                mine.sub_(group["lr"] * value)

    def _room(self, p: torch.Tensor) -> torch.Tensor:
        local = p._local_tensor if isinstance(p, DTensor) else p
        made: torch.Tensor = Codes(
            {"signed": True},
            local.shape,
            codes=torch.zeros(local.numel(), dtype=torch.int8),
            scale=torch.ones(()),
        )
        if isinstance(p, DTensor):
            return DTensor.from_local(made, p.device_mesh, p.placements, run_check=False)
        return made


class Codes(Holding):
    names = ("codes", "scale")


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "own":
        return LowBit(model.parameters())
    low = pytest.importorskip("torchao.optim")
    made: torch.optim.Optimizer = getattr(low, kind)(model.parameters(), lr=1e-3)
    return made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(2):
        model(torch.randn(3, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))


def state(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if form == "object":
        return {"model": model, "optimizer": optimizer}
    with smckpt.sm_state_dict_type(model, getattr(smckpt, form)):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED", "FULL"])
@pytest.mark.parametrize("kind", ["own", "AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_low_bit_optimizer_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, form: str, fresh: bool
) -> None:
    register_tensor_class(Codes)
    model = net(0)
    optimizer = optimizer_of(model, kind)
    train(model, optimizer, 1)
    smckpt.save(state(form, model, optimizer), checkpoint_id=tmp_path)
    resumed = net(5)
    its = optimizer_of(resumed, kind)
    if not fresh:
        train(resumed, its, 3)
    smckpt.load(state(form, resumed, its), checkpoint_id=tmp_path)
    train(model, optimizer, 2)
    train(resumed, its, 2)
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [name for name in MAKE if name != "an enum and a dataclass"])
@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
def test_a_new_optimizer_gets_every_tensor_that_holds_others(
    tmp_path: Path, form: str, kind: str
) -> None:
    for each in (Factor, Scaled, Packed, Nested):
        register_tensor_class(each)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight]["held"] = MAKE[kind](5.0)
    smckpt.save(state(form, model, optimizer), checkpoint_id=tmp_path)
    other = nn.Linear(3, 1, bias=False)
    fresh = torch.optim.SGD(other.parameters(), 0.1)
    smckpt.load(state(form, other, fresh), checkpoint_id=tmp_path)
    held = fresh.state[other.weight]["held"]
    assert repr(inside(held)) == repr(inside(MAKE[kind](5.0)))


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("an enum and a dataclass", "options that only code can make"), ("unknown", "not registered")],
)
def test_what_no_load_could_make_for_a_new_optimizer_is_refused_at_the_save(
    tmp_path: Path, form: str, kind: str, reason: str
) -> None:
    class Unknown(Factor):
        pass

    for each in (Factor, Scaled, Packed, Nested):
        register_tensor_class(each)
    held = Unknown(2.5, data_=torch.ones(3)) if kind == "unknown" else MAKE[kind](5.0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight]["held"] = held
    with pytest.raises(errors.StateError, match=reason):
        smckpt.save(state(form, model, optimizer), checkpoint_id=tmp_path)
    assert smckpt.find_checkpoints(tmp_path) == []


class Kept(torch.Tensor):
    """Has values of its own, and an attribute of which the class tells nothing."""

    @staticmethod
    def __new__(cls, factor: float) -> Any:
        made = torch.Tensor._make_subclass(cls, torch.ones(3))
        made.factor = factor
        return made


class Slotted(torch.Tensor):
    __slots__ = ("factor",)

    @staticmethod
    def __new__(cls, factor: float) -> Any:
        made = torch.Tensor._make_subclass(cls, torch.ones(3))
        made.factor = factor
        return made


def holding(where: str, value: torch.Tensor) -> dict[str, Any]:
    """A state with the tensor in that place."""
    if where in ("object", "LOCAL", "SHARDED", "FULL", "group"):
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if where == "group":
            optimizer.param_groups[0]["held"] = value
            return state("object", model, optimizer)
        optimizer.state[model.weight]["held"] = value
        return state(where, model, optimizer)
    return {
        "top": {"held": value},
        "nested": {"a": {"held": value}},
        "list": {"a": [1, (value, "held")]},
    }[where]


PLACES = ["top", "nested", "list", "object", "LOCAL", "SHARDED", "FULL", "group"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", [Kept, Slotted])
def test_a_tensor_with_attributes_that_its_class_does_not_tell_is_refused_at_the_save(
    tmp_path: Path, kind: type, where: str
) -> None:
    with pytest.raises(errors.StateError, match=f"a .*{kind.__name__} with attr.*factor"):
        smckpt.save(holding(where, kind(2.5)), checkpoint_id=tmp_path)
    assert smckpt.find_checkpoints(tmp_path) == []


@pytest.mark.parametrize("where", [where for where in PLACES if where != "FULL"])
def test_a_warning_names_a_plain_tensor_whose_attributes_are_not_saved_once(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = torch.ones(3)
    value.factor = 2.5  # type: ignore[attr-defined]
    held, options = holding(where, value), smckpt.SaveOptions(queue=where)
    with caplog.at_level(logging.WARNING, "smckpt"):
        for step in ("a", "b"):
            smckpt.save(held, checkpoint_id=tmp_path / step, options=options)
    lines = [r.message for r in caplog.records if "are not saved" in r.message]
    assert len(lines) == 1 and "(factor)" in lines[0]


class Giving:
    """An object that gives what it is given, which a load makes for a new one."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def state_dict(self) -> Any:
        return self.given

    def load_state_dict(self, given: Any) -> None:
        self.given = given


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
@pytest.mark.parametrize("where", ["an object", "object", "LOCAL", "SHARDED"])
def test_so_does_it_of_a_parameter_that_a_load_makes(
    tmp_path: Path, where: str, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    value = kind(torch.ones(3))
    value.factor = 2.5
    held = {"o": Giving({"v": value})} if where == "an object" else holding(where, value)
    with caplog.at_level(logging.WARNING, "smckpt"):
        options = smckpt.SaveOptions(queue=where + kind.__name__)
        smckpt.save(held, checkpoint_id=tmp_path, options=options)
    lines = [r.message for r in caplog.records if "are not saved" in r.message]
    assert len(lines) == 1 and "(factor)" in lines[0]


@pytest.mark.parametrize("where", ["an object", "object", "LOCAL", "SHARDED"])
@pytest.mark.parametrize("how", ["one", "view", "beside", "crossed", "columns"])
def test_a_warning_names_tensors_that_share_memory_once(
    tmp_path: Path, where: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = torch.arange(6.0)
    first, other = {
        "one": (whole, whole),
        "view": (whole.view(2, 3), whole[4:]),
        "beside": (whole[:3], whole[3:]),
        "crossed": (whole[::2], whole[1:5]),
        "columns": (whole.view(2, 3)[:, 0], whole.view(2, 3)[:, 1]),
    }[how]
    given: Any = {"first": first, "list": [other]}
    if where == "an object":
        held: Any = {"o": Giving(given)}
    else:
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.state[model.weight].update(given)
        held = state(where, model, optimizer)
    options = smckpt.SaveOptions(queue=f"{where} {how}")
    with caplog.at_level(logging.WARNING, "smckpt"):
        for step in ("a", "b"):
            smckpt.save(held, checkpoint_id=tmp_path / step, options=options)
    lines = [r.message for r in caplog.records if "share memory" in r.message]
    assert len(lines) == (how not in ("beside", "columns"))
    assert all("first" in line and "list.0" in line for line in lines)


def test_a_block_and_its_models_ties_are_no_such_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    own = {"weight": model[0].weight, "again": model[1].weight}
    with caplog.at_level(logging.WARNING, "smckpt"):
        for form in ("object", "LOCAL", "SHARDED"):
            held = {**state(form, model, optimizer), "own": own}
            smckpt.save(held, checkpoint_id=tmp_path / form)
    assert "share memory" not in caplog.text


def test_what_frameworks_note_on_parameters_and_state_is_no_attribute_of_a_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    marks = {"tensor_model_parallel": True, "partition_dim": 0, "sequence_parallel": False}
    marks |= {"allreduce": True, "main_grad": torch.ones(1), "_fsdp_flattened": True}
    marks |= {
        "_has_been_cloned": True,
        "_is_hf_initialized": True,
        "_dynamo_static_input_type": "guarded",
    }
    for tensor in (*model.parameters(), *optimizer.state[model.weight].values()):
        vars(tensor).update(marks)
    model.weight.any_name = 1  # type: ignore[assignment]
    model.register_buffer("buffer", Kept(2.5))
    for form in ("object", "LOCAL", "SHARDED", "FULL"):
        held = state(form, model, optimizer)
        held["own"] = [model.weight, nn.Buffer(Kept(2.5))]
        with caplog.at_level(logging.WARNING, "smckpt"):
            smckpt.save(held, checkpoint_id=tmp_path / form)
    assert "attributes" not in caplog.text


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
def test_weights_that_torchao_quantised_come_back(tmp_path: Path, form: str, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def quantised(seed: int) -> nn.Module:
        model = net(seed)
        quantization.quantize_(model, getattr(quantization, name)())
        return model

    def of(model: nn.Module) -> dict[str, Any]:
        if form == "object":
            return {"model": model}
        with smckpt.sm_state_dict_type(model, getattr(smckpt, form)):
            return {"model": model.state_dict()}

    model, other = quantised(0), quantised(1)
    smckpt.save(of(model), checkpoint_id=tmp_path)
    smckpt.load(of(other), checkpoint_id=tmp_path)
    x = torch.randn(2, 64)
    assert torch.equal(model(x), other(x))


# -- sharded ---------------------------------------------------------------------------------------


def sharded(folder: str, low_bit: str) -> dict[str, Any]:
    register_tensor_class(Codes)
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(seed)
        fully_shard(model, mesh=mesh)
        return model, optimizer_of(model, low_bit)

    told: dict[str, Any] = {}
    for form in ("object", "LOCAL", "SHARDED"):
        model, optimizer = made(0)
        train(model, optimizer, 1)
        smckpt.save(state(form, model, optimizer), checkpoint_id=f"{folder}/{form}")
        resumed, its = made(5)
        smckpt.load(state(form, resumed, its), checkpoint_id=f"{folder}/{form}")
        train(model, optimizer, 2)
        train(resumed, its, 2)
        told[form] = all(
            torch.equal(a._local_tensor, b._local_tensor)  # type: ignore[attr-defined]
            for a, b in zip(resumed.parameters(), model.parameters(), strict=True)
        )
    with smckpt.sm_state_dict_type(model, smckpt.FULL):
        try:
            told["FULL"] = optimizer.state_dict()
        except errors.StateError as error:
            told["FULL"] = str(error)
    return told


@pytest.mark.parametrize("form", ["object", "LOCAL", "SHARDED"])
def test_sharded_low_bit_state_comes_back_on_the_same_mesh(two: Any, form: str) -> None:
    assert [told[form] for told in two[1]] == [True, True]


def test_ranks_refuse_to_gather_low_bit_state_by_name(two: Any) -> None:
    assert all(
        re.search("momentum is a .*Codes, whose parts FULL", told["FULL"]) for told in two[1]
    )


def test_sharded_low_bit_state_is_refused_on_another_mesh(two: Any) -> None:
    register_tensor_class(Codes)
    model = net(5)
    optimizer = LowBit(model.parameters())
    train(model, optimizer, 1)
    before = optimizer.state[next(model.parameters())]["momentum"].codes.clone()
    with pytest.raises(errors.CheckpointError, match="momentum.*mesh"):
        smckpt.load(state("SHARDED", model, optimizer), checkpoint_id=f"{two[0]}/SHARDED")
    assert torch.equal(optimizer.state[next(model.parameters())]["momentum"].codes, before)


def test_a_load_of_it_without_a_target_says_so(two: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "smckpt"):
        loaded = smckpt.load(checkpoint_id=f"{two[0]}/SHARDED")
    assert loaded is not None
    assert "of which each rank holds its own part" in caplog.text


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("two"))
    return folder, run_ranks(sharded, 2, folder, "own", timeout=200)
