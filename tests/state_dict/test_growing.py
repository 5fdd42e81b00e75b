"""State that a new object or module has not yet: what its own `load_state_dict` takes, it gets."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict, deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import smckpt
from smckpt import errors
from tests.support.launch import run_ranks

KINDS = (None, smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL)


class Kept:
    """An object that gives what it has, and takes whatever it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = copy.deepcopy(value)


T = torch.arange(3.0)
STATES = {
    "a first tensor": ({}, {"shadow": T}),
    "None before": ({"best": None}, {"best": {"w": T, "at": 3}}),
    "None after": ({"best": {"w": T}}, {"best": None}),
    "a longer tensor": ({"seen": torch.zeros(0)}, {"seen": T}),
    "another dtype": ({"seen": T}, {"seen": T.long()}),
    "a list that grows": ({"all": []}, {"all": [T, 5, T + 1], "n": 2}),
    "a list that shrinks": ({"all": [T, T]}, {"all": [torch.ones(2)]}),
    "keys by number": ({"by": {}}, {"by": {1: T, 2: 5}, 3: T}),
    "keys that are tuples": ({}, {("a", 1): T}),
    "a number that becomes a tensor": ({"ema": 0.0}, {"ema": torch.tensor(2.0)}),
    "a tensor that becomes a number": ({"ema": torch.tensor(2.0)}, {"ema": 0.5}),
    "a deque": ({"last": deque(maxlen=4)}, {"last": deque([1, T], maxlen=4)}),
    "an array": ({"a": np.zeros(0)}, {"a": np.arange(4.0)}),
    "the keys of an optimizer, one by one": ({"state": {}}, {"state": {"x": T}, "param_groups": 2}),
    "a list alone that grows": ([1], [1, T, [5, {"deep": T}]]),
    "a list alone that shrinks": ([T, T], [torch.ones(2)]),
    "an empty list": ([T], []),
    "bytes in a list": ([b"x"], [b"y", b"z"]),
    "numbers in lists": ([[1], [2]], [[1, 2], [2], [T]]),
    "None first": (None, {"w": T, "at": [3, T]}),
    "None first, numbers later": (None, {"at": 3}),
    "None later": ({"w": T, "at": 3}, None),
    "None of a tensor": (T, None),
    "a tensor of None": (None, T),
    "a tensor of a number": (7, T.long()),
    "a longer tensor alone": (torch.zeros(1), T),
    "an array alone": (np.zeros(0), np.arange(4)),
    "a number of a dict": ({"w": T}, 0.5),
    "a dict of a list": ([T], {"w": T}),
    "a list of a dict": ({"w": T}, [T, 1]),
    "a tuple": ((), (T, (1, T))),
    "a deque alone": (deque(maxlen=3), deque([T, 1], maxlen=3)),
    "a list with another object": ([Kept([]), 1], [Kept([T]), 2]),
    "a list with others alike": ([Kept([0 * T]), Kept(0 * T), 1], [Kept([T]), Kept(T), 2]),
    "others in a dict": ({"a": Kept([]), "b": Kept(0 * T)}, {"a": Kept([T, 1]), "b": Kept(T)}),
    "others in a tuple in a dict": ({"a": (Kept([]), [Kept(7)])}, {"a": (Kept([T]), [Kept(T)])}),
    "three deep": ([Kept([Kept([None]), 0])], [Kept([Kept([T]), 1])]),
    "an ordered dict": (OrderedDict(), OrderedDict(b=T, a={"deep": [T]})),
    "another object inside": (
        {"inner": Kept({}), "list": [Kept({"n": 0})], "own": None},
        {"inner": Kept({"t": T}), "list": [Kept({"n": 1, "t": [T]})], "own": T},
    ),
}


def plain(value: Any) -> Any:
    """For a comparison: tensors and arrays as lists, with their dtypes; objects by their states."""
    if isinstance(value, Kept):
        return "Kept", plain(value.value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [plain(child) for child in value]
    return value


WRAPS: tuple[Any, ...] = (
    lambda o: {"o": o},
    lambda o: {"x": [{"o": o}], "step": 1},
    lambda o: {"x": ([3, o], deque([o, 1])), "m": T},
)


@pytest.mark.parametrize("name", STATES)
def test_an_object_gets_exactly_the_state_that_was_saved(tmp_path: Path, name: str) -> None:
    fresh, saved = copy.deepcopy(STATES[name])
    for at, wrap in enumerate(WRAPS):
        target = Kept(copy.deepcopy(fresh))
        smckpt.save(wrap(Kept(copy.deepcopy(saved))), checkpoint_id=tmp_path / str(at))
        smckpt.load(wrap(target), checkpoint_id=tmp_path / str(at))
        assert plain(target.value) == plain(saved)


def test_an_object_keeps_its_state_where_a_load_fails(tmp_path: Path) -> None:
    smckpt.save({"o": Kept({"t": T}), "n": 1}, checkpoint_id=tmp_path)
    target = Kept({"old": 1})
    with pytest.raises(errors.KeysMismatchError, match="other"):
        smckpt.load({"o": target, "n": {"other": T}}, checkpoint_id=tmp_path)
    assert target.value == {"old": 1}


class Queue(nn.Linear):
    """A buffer that grows with each step, and is made as long as the saved one before a load."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("queue", torch.zeros(0, 3))
        self.register_load_state_dict_pre_hook(self.make_room)

    @staticmethod
    def make_room(module: Any, state: Any, prefix: str, *_: Any) -> None:
        module.queue = torch.empty_like(state[f"{prefix}queue"])

    def train_on(self) -> None:
        self.queue = torch.randn(4, 3)


class First(nn.Linear):
    """A buffer that is None before the first step."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mean", None)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.mean = torch.empty_like(state[f"{prefix}mean"])
        super()._load_from_state_dict(state, prefix, *rest)

    def train_on(self) -> None:
        self.mean = torch.randn(5)


class Collecting(nn.Linear):
    """A list of tensors in its state dict, as metrics have it."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.all: list[torch.Tensor] = []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}all"] = self.all

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.all = [tensor.clone() for tensor in state.pop(f"{prefix}all")]
        super()._load_from_state_dict(state, prefix, *rest)

    def train_on(self) -> None:
        self.all = [torch.randn(2), torch.randn(3)]


class Calibrated(nn.Linear):
    """Extra state that is None at first, and a dict of tensors and numbers later."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.found: Any = None

    def get_extra_state(self) -> Any:
        return self.found

    def set_extra_state(self, state: Any) -> None:
        self.found = copy.deepcopy(state)

    def train_on(self) -> None:
        self.found = {"scales": [torch.randn(2), 3], "steps": (1, "x"), "by": {1: torch.ones(1)}}


class Whole(Queue):
    """The same by a `load_state_dict` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._load_state_dict_pre_hooks.clear()

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.queue = torch.empty_like(state["queue"])
        return super().load_state_dict(state, strict, assign)


MODULES = (Queue, First, Collecting, Calibrated)


def save_and_load(make: Any, kind: Any, path: str, wrap: str = "plain") -> tuple[Any, Any]:
    """The state of a model that trained, and of a new one after a load of it."""

    def state(model: nn.Module) -> dict[str, Any]:
        with nullcontext() if kind is None else smckpt.sm_state_dict_type(model, kind):
            return {"model": model if kind is None else model.state_dict()}

    def model() -> tuple[nn.Module, nn.Module]:
        inside = make()
        if wrap == "DDP":
            return inside, nn.parallel.DistributedDataParallel(nn.Sequential(inside))
        if wrap == "FSDP2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(inside)
        return inside, inside if make is Whole else nn.Sequential(nn.Linear(3, 3), inside)

    torch.manual_seed(7 if wrap == "FSDP2" else torch.initial_seed() % 1000)
    (trained, whole), (_, fresh) = model(), model()
    trained.train_on()  # type: ignore[operator]
    smckpt.save(state(whole), checkpoint_id=path)
    smckpt.load(state(fresh), checkpoint_id=path)

    def local(value: Any) -> Any:
        return plain(value.to_local() if hasattr(value, "to_local") else value)

    return tuple({k: local(v) for k, v in m.state_dict().items()} for m in (whole, fresh))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [*MODULES, Whole])
def test_a_module_reads_what_has_grown_by_its_own_code(
    tmp_path: Path, make: Any, kind: Any
) -> None:
    saved, loaded = save_and_load(make, kind, str(tmp_path))
    assert loaded == saved


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("wrap", ["DDP", "FSDP2"])
def test_each_rank_gets_its_own_that_has_grown(tmp_path: Path, kind: Any, wrap: str) -> None:
    for found in run_ranks(of_all_modules, 2, kind, str(tmp_path), wrap, timeout=120):
        for saved, loaded in found:
            assert loaded == saved


def of_all_modules(kind: Any, path: str, wrap: str) -> list[tuple[Any, Any]]:
    return [save_and_load(make, kind, f"{path}/{make.__name__}", wrap) for make in MODULES]


def test_a_parameter_of_another_size_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    smckpt.save({"model": nn.Sequential(Queue(), nn.Linear(3, 3))}, checkpoint_id=tmp_path)
    target = nn.Sequential(Queue(), nn.Linear(3, 4))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(errors.TensorMismatchError, match=r"1\.weight"):
        smckpt.load({"model": target}, checkpoint_id=tmp_path)
    assert plain(target.state_dict()) == plain(before)


def test_a_manager_restores_exactly_the_state_that_was_saved(tmp_path: Path) -> None:
    def state(of: int) -> tuple[dict[str, Any], dict[str, Kept]]:
        made, held = {}, {}
        for name, pair in STATES.items():
            for at, wrap in enumerate(WRAPS):
                one = held[f"{name} {at}"] = Kept(copy.deepcopy(pair[of]))
                made[f"{name} {at}"] = wrap(one)
        return made, held

    with smckpt.CheckpointManager(tmp_path, signals=()) as manager:
        saved, expected = state(1)
        manager.save(1, saved).wait()
    with smckpt.CheckpointManager(tmp_path, signals=()) as manager:
        fresh, found = state(0)
        assert manager.restore(into=fresh) == 1
    assert {name: plain(one.value) for name, one in found.items()} == {
        name: plain(one.value) for name, one in expected.items()
    }


def one_rank_finds_the_newest_damaged(folder: str) -> tuple[int, Any]:
    kept = Kept({"all": [T]})
    with smckpt.CheckpointManager(folder, signals=()) as manager:
        for step in (1, 2):
            kept.value = {"all": [T] * step, "rank": dist.get_rank()}
            manager.save(step, {"o": kept, "own": torch.full((4,), float(dist.get_rank()))}).wait()
        dist.barrier()
        if dist.get_rank() == 1:
            (data,) = Path(folder, "2").glob("data-*-r00001-0.safetensors")
            with data.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\xff")
        dist.barrier()
        other = Kept({})
        return manager.restore(into={"o": other, "own": torch.zeros(4)}), plain(other.value)


def test_objects_have_the_state_of_the_step_that_all_ranks_take(tmp_path: Path) -> None:
    told = run_ranks(one_rank_finds_the_newest_damaged, 2, str(tmp_path))
    assert told == [(1, plain({"all": [T], "rank": rank})) for rank in (0, 1)]
