"""What a load makes for an object, a dict or nobody is what `torch.save` and `torch.load` give."""

from __future__ import annotations

import io
import random
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smckpt
from smckpt import errors


class Kept:
    """An object that gives what it has, and keeps whatever it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


T = torch.arange(6.0).reshape(2, 3)
IMAGE = torch.arange(120.0).reshape(2, 3, 4, 5)

TENSORS: dict[str, Callable[[], Any]] = {
    "a parameter": lambda: nn.Parameter(T.clone()),
    "a frozen parameter": lambda: nn.Parameter(T.clone(), requires_grad=False),
    "parameters in containers": lambda: {"l": [nn.Parameter(T.clone()), (nn.Parameter(T + 1), T)]},
    "a tensor that wants a gradient": lambda: {"w": T.clone().requires_grad_()},
    "a result of gradients": lambda: [T.clone().requires_grad_() * 2],
    "buffers": lambda: {"b": nn.Buffer(T.clone()), "c": nn.Buffer(T + 1, persistent=False)},
    "channels last": lambda: IMAGE.to(memory_format=torch.channels_last),
    "a parameter with channels last": lambda: [
        nn.Parameter(IMAGE.to(memory_format=torch.channels_last))
    ],
    "a transposed tensor": lambda: {"t": T.clone().t()},
    "an array in another order": lambda: {"a": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
    "an expanded tensor": lambda: torch.arange(3.0).expand(4, 3),
    "expanded ones inside": lambda: [nn.Parameter(torch.ones(3, 1).expand(3, 2)), 1],
    "an array": lambda: np.arange(6.0).reshape(2, 3),
}


def described(value: Any) -> Any:
    """For a comparison: values with their bits, classes and all that is kept beside them."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        kept = type(value), isinstance(value, nn.Buffer), getattr(value, "persistent", None)
        return *kept, value.requires_grad, value.dtype, tuple(value.shape), value.stride(), raw
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.strides, value.tobytes()
    if isinstance(value, nn.ParameterDict):
        return nn.ParameterDict, [(key, described(child)) for key, child in value.items()]
    if isinstance(value, nn.ParameterList):
        return nn.ParameterList, [described(child) for child in value]
    if isinstance(value, Mapping):
        return type(value), [(key, described(child)) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(child) for child in value]
    return type(value), repr(value)


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def emptied(value: Any) -> Any:
    """A value of the same structure, with other numbers in its tensors."""
    for tensor in torch.utils._pytree.tree_leaves(value):
        if isinstance(tensor, torch.Tensor):
            own = [slice(None) if step else slice(1) for step in tensor.stride()]
            tensor.data[tuple(own)] = 0
        elif isinstance(tensor, np.ndarray):
            tensor[...] = 0
    return value


TARGETS: dict[str, Callable[[Any], Any]] = {
    "a new object": lambda _: Kept({}),
    "an object with None": lambda _: Kept(None),
    "an object of that structure": lambda make: Kept(emptied(make())),
}


CONTAINERS: dict[str, Callable[[], Any]] = {
    "an ordered dict": lambda: OrderedDict(b=T.clone(), a=1, c=T + 1),
    "a value before a tensor": lambda: {"z": 1, "b": T.clone(), "a": 2, 3: {"y": 0, "x": T + 1}},
    "dicts with a default": lambda: {"a": defaultdict(OrderedDict, {"w": T.clone()}),
                                     "b": defaultdict(deque, {"n": 1}), "c": defaultdict(int)},
    "a dict with a default": lambda: defaultdict(list, {"a": [T.clone()]}),
    "a counter": lambda: Counter({"b": 2, "a": 1}),
    "a counter of tensors": lambda: {"c": Counter({"b": T.clone(), "a": 1})},
    "empty containers": lambda: {"a": {}, "b": [], "d": T.clone(), "e": (), "f": OrderedDict()},
    "keys of many kinds": lambda: {None: 1, True: T.clone(), (1, "a"): 2, 5: T + 1, "5x": ""},
    "names in no order": lambda: {"a.b": T.clone(), "a": {"c": 1}, "": T + 1, "é": 2, "\n": T + 2},
    "random states": lambda: {"py": random.Random(3).getstate(), "torch": torch.get_rng_state()},
}  # fmt: skip
LISTS: dict[str, Callable[[], Any]] = {
    "a list of parameters": lambda: nn.ParameterList([T.clone(), nn.Parameter(T + 1, False)]),
    "lists of parameters inside": lambda: {
        "l": [nn.ParameterList([T.clone()])],
        "d": nn.ParameterDict({"x": T.clone(), "a": nn.Parameter(T + 1, False)}),
    },
    "an empty list of parameters": lambda: {"l": nn.ParameterList(), "n": 3},
    "an empty one inside, before a tensor": lambda: {
        "d": deque([(nn.ParameterList(), 1)]),
        "o": OrderedDict(l=nn.ParameterList(), t=T.clone()),
        None: {"p": nn.ParameterDict({"a": T.clone()})},
    },
    "a dict of parameters in an order": lambda: nn.ParameterDict(OrderedDict(z=T, a=T + 1)),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_new_object_gets_lists_of_parameters(tmp_path: Path, name: str) -> None:
    smckpt.save({"o": Kept(LISTS[name]())}, checkpoint_id=tmp_path)
    for fresh in ({}, None, {"l": 1}, nn.ParameterList([T]), nn.ParameterDict({"x": T})):
        kept = Kept(fresh)
        smckpt.load({"o": kept}, checkpoint_id=tmp_path)
        assert described(kept.value) == described(by_torch(LISTS[name]()))


@pytest.mark.parametrize("saved", [{"a": 1, "x": T}, OrderedDict(x=T), [T, 1], {}, 5], ids=str)
def test_an_object_that_gave_parameters_gets_what_was_saved(tmp_path: Path, saved: Any) -> None:
    smckpt.save({"o": Kept(saved)}, checkpoint_id=tmp_path)
    kept = Kept(nn.ParameterDict({"x": torch.zeros(2, 3)}))
    smckpt.load({"o": kept}, checkpoint_id=tmp_path)
    assert described(kept.value) == described(saved)


class Listed(list):  # type: ignore[type-arg]
    pass


class Odd(torch.Tensor):
    pass


class Own(nn.Parameter):
    pass


def with_a_buffer() -> nn.ParameterList:
    made = nn.ParameterList([T])
    made.register_buffer("mean", T)
    return made


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "value",
    [
        UserDict(a=T), ChainMap({"a": T}), Listed([T]), {"x": Pair(1, T)}, [T.as_subclass(Odd)],
        defaultdict(torch.Tensor, {"a": T}), nn.Linear(2, 2),
        {"d": nn.ParameterDict({"a": T, "b": 3})}, [nn.ParameterList([T, 5])],
        [nn.ParameterList([Own(T)])], [with_a_buffer()],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_no_load_could_make_is_refused_at_the_save(tmp_path: Path, value: Any) -> None:
    with pytest.raises(errors.StateError, match=r"^.*\bo.* is a .*so a load could not make it"):
        smckpt.save({"o": Kept(value)}, checkpoint_id=tmp_path)


ARRAYS: dict[str, Callable[[], Any]] = {
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "array by columns": lambda: np.arange(6.0).reshape(2, 3).T,
    "tensor in another order": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded tensor": lambda: torch.ones(2, 1).expand(2, 3),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_object_inside_another_gets_its_array_as_it_was(tmp_path: Path, name: str) -> None:
    smckpt.save({"o": Kept({"i": Kept(ARRAYS[name]())})}, checkpoint_id=tmp_path)
    for held in (ARRAYS[name](), None):
        kept = Kept({"i": Kept(held)})
        smckpt.load({"o": kept}, checkpoint_id=tmp_path)
        assert described(kept.value["i"].value) == described(ARRAYS[name]())
    whole = smckpt.load(checkpoint_id=tmp_path)
    assert described(whole["o"]["i"]) == described(ARRAYS[name]())


def test_an_object_below_a_key_that_is_no_text_is_filled(tmp_path: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        inner = Kept({"v": number, "t": T * number})
        return {"o": Kept({1.5: {"m": inner, "t": T * number}})}

    smckpt.save(state(3), checkpoint_id=tmp_path)
    target = state(0)
    smckpt.load(target, checkpoint_id=tmp_path)
    inner = target["o"].value[1.5]["m"].value
    assert inner["v"] == 3 and torch.equal(inner["t"], T * 3)


def test_an_object_that_the_target_has_not_is_named(tmp_path: Path) -> None:
    smckpt.save({"o": Kept({"net": nn.Linear(2, 2), "n": 1})}, checkpoint_id=tmp_path)
    target = Kept({"net": nn.Linear(2, 2)})
    smckpt.load({"o": target}, checkpoint_id=tmp_path)
    assert type(target.value["net"]) is nn.Linear and target.value["n"] == 1
    fresh = Kept({})
    with pytest.raises(errors.StateError, match=r"o\.net was saved by .*torch.nn.*Linear"):
        smckpt.load({"o": fresh}, checkpoint_id=tmp_path)
    assert fresh.value == {}


@pytest.mark.parametrize("name", [*TENSORS, *CONTAINERS])
def test_a_load_gives_what_torch_gives(tmp_path: Path, name: str) -> None:
    make = {**TENSORS, **CONTAINERS}[name]
    expected = described(by_torch(make()))
    smckpt.save({"x": [{"o": Kept(make())}]}, checkpoint_id=tmp_path / "one")
    for target in TARGETS.values():
        kept = target(make)
        smckpt.load({"x": [{"o": kept}]}, checkpoint_id=tmp_path / "one")
        assert described(kept.value) == expected
    with smckpt.CheckpointManager(tmp_path / "run", signals=()) as manager:
        manager.save(1, {"o": Kept(make())}).wait()
        fresh = Kept({})
        manager.restore(into={"o": fresh})
    assert described(fresh.value) == expected
    smckpt.save({"value": make(), "n": 1}, checkpoint_id=tmp_path / "value")
    loaded = smckpt.load(checkpoint_id=tmp_path / "value")
    assert described(loaded["value"]) == expected
    filled = {"value": emptied(make()), "n": 0}
    smckpt.load(filled, checkpoint_id=tmp_path / "value")
    assert described(filled["value"]) == expected


class Broadcast(nn.Linear):
    """A buffer whose rows are one."""

    def __init__(self, value: float) -> None:
        super().__init__(3, 3)
        self.register_buffer("row", torch.full((3,), value).expand(2, 3))


@pytest.mark.parametrize("kind", [None, smckpt.LOCAL, smckpt.SHARDED])
def test_an_expanded_buffer_is_filled(tmp_path: Path, kind: Any) -> None:
    trained, other = Broadcast(4.0), Broadcast(0.0)
    for call, model in ((smckpt.save, trained), (smckpt.load, other)):
        with nullcontext() if kind is None else smckpt.sm_state_dict_type(model, kind):
            call({"model": model if kind is None else model.state_dict()}, checkpoint_id=tmp_path)
    assert torch.equal(other.row, trained.row) and other.row.stride() == (0, 1)


@pytest.mark.parametrize("kind", [None, smckpt.LOCAL, smckpt.SHARDED])
def test_an_expanded_tensor_of_a_group_is_filled(tmp_path: Path, kind: Any) -> None:
    def made(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        rates = torch.full((2,), value).expand(3, 2)
        return model, torch.optim.SGD([{"params": [*model.parameters()], "rates": rates}], 0.1)

    trained, other = made(4.0), made(0.0)
    for call, (model, optimizer) in ((smckpt.save, trained), (smckpt.load, other)):
        state: dict[str, Any] = {"optimizer": optimizer, "model": model}
        with nullcontext() if kind is None else smckpt.sm_state_dict_type(model, kind):
            if kind is not None:
                state = {"optimizer": optimizer.state_dict()}
            call(state, checkpoint_id=tmp_path)
            if kind is not None and call is smckpt.load:
                optimizer.load_state_dict(state["optimizer"])
    rates = other[1].param_groups[0]["rates"]
    assert rates.tolist() == [[4.0, 4.0]] * 3 and rates.stride() == (0, 1)
