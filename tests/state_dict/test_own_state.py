"""What an optimizer says is its state is saved and comes back, into a fresh optimizer too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import smckpt
from smckpt.errors import StateError
from tests.support.launch import run_ranks
from tests.support.optimizers.people import net, step

KINDS = ("object", "dict", "LOCAL", "SHARDED", "FULL")


class Base(torch.optim.Optimizer):
    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.begin(self.state[parameter], parameter)
                self.go_on(group, self.state[parameter], parameter)
                parameter.sub_(0.01)

    def begin(self, slots: Any, parameter: torch.Tensor) -> None:
        slots["m"] = torch.zeros_like(parameter)

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None: ...


class Pair(NamedTuple):
    left: Any
    right: Any


def begins(**what: Callable[[torch.Tensor], Any]) -> type[Base]:
    class Made(Base):
        def begin(self, slots: Any, parameter: torch.Tensor) -> None:
            slots.update({name: make(parameter) for name, make in what.items()})

    return Made


class Counts(Base):
    def begin(self, slots: Any, parameter: torch.Tensor) -> None:
        slots["n"] = 0

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        slots["n"] += 1


class History(Base):
    """A list that grows, of tensors that two slots share."""

    def begin(self, slots: Any, parameter: torch.Tensor) -> None:
        slots["all"] = []

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        slots["last"] = parameter.clone()
        slots["all"] = [*slots["all"], slots["last"], None, len(slots["all"])]


class InGroups(Base):
    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        group["d"] = torch.tensor(3.0)
        group["many"] = [torch.ones(2), 5]


class Ungrouped(Base):
    """A tensor at first, which becomes a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, d=torch.tensor(1.0))

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        group["d"] = 2.0


class OfNone(Base):
    """State under keys that are no parameters."""

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        self.state["tensor"] = torch.tensor([4.0])
        self.state["number"] = 7  # type: ignore[assignment]
        self.state["nested"] = {"ema": [0.5, torch.ones(3)]}
        self.state[7] = torch.ones(2)  # more than there are parameters
        self.state["ema", 1] = {"deep": [torch.ones(2), 3]}  # type: ignore[index]


class ByGroup(Base):
    """State by the numbers of the groups, which are numbers of parameters too."""

    def begin(self, slots: Any, parameter: torch.Tensor) -> None: ...

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        held = self.state[0]
        held["n"] = held.get("n", 0) + 1
        held["ema"] = held.get("ema", torch.zeros(2)) + 1


class Alone(Base):
    """A parameter's state is one tensor, and no dict."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            held = self.state[parameter]
            held = held if isinstance(held, torch.Tensor) else torch.ones_like(parameter)
            self.state[parameter] = held * 0.9 + parameter  # type: ignore[assignment]


class Listed(Base):
    """It keeps a parameter's tensor in a list of its own and among the options too."""

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        slots["m"].add_(1)
        self.state["all"] = {"m": [slots["m"], 3]}
        group["first"] = slots["m"]


class Total(Base):
    """Adds a key to its dict, in a new dict."""

    total = 0

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        self.total += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total, "far": {"deep": torch.ones(2)}}

    def load_state_dict(self, state_dict: Any) -> None:
        state_dict = dict(state_dict)
        self.total = state_dict.pop("total")
        assert torch.equal(state_dict.pop("far")["deep"], torch.ones(2))
        super().load_state_dict(state_dict)


class Hooked(Base):
    """Adds a key by torch's hooks."""

    total = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    def go_on(self, group: Any, slots: Any, parameter: torch.Tensor) -> None:
        self.total += 1

    @staticmethod
    def _add(self: Any, state_dict: Any) -> None:
        state_dict["total"] = self.total

    @staticmethod
    def _take(self: Any, state_dict: Any) -> None:
        self.total = state_dict.pop("total")


class Outer(torch.optim.Optimizer):
    """A wrapper that keeps a counter of its own beside the state of the optimizer inside."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside, self.total = inside, 0

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inside.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inside.state

    def step(self, closure: Any = None) -> None:
        self.total += 1
        self.inside.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inside.state_dict(), "total": self.total}

    def load_state_dict(self, state_dict: Any) -> None:
        self.total = state_dict["total"]
        self.inside.load_state_dict({k: v for k, v in state_dict.items() if k != "total"})


class Around(torch.optim.Optimizer):
    """Has the dicts of optimizers inside below keys of its own dict, beside a counter."""

    def __init__(self, inside: Any) -> None:
        self.inside, self.total = inside, 0

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for each in self.inside.values() for group in each.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {k: v for each in self.inside.values() for k, v in each.state.items()}

    def step(self, closure: Any = None) -> None:
        self.total += 1
        for each in self.inside.values():
            each.step()

    def state_dict(self) -> dict[str, Any]:
        inside = [each.state_dict() for each in self.inside.values()]
        return {"inside": inside[0] if len(inside) == 1 else inside, "total": self.total}

    def load_state_dict(self, state_dict: Any) -> None:
        given, self.total = state_dict["inside"], state_dict["total"]
        for each, one in zip(
            self.inside.values(), given if isinstance(given, list) else [given], strict=True
        ):
            each.load_state_dict(one)


class Apart(Around):
    """Takes the dict inside apart, as Lookahead does."""

    def state_dict(self) -> dict[str, Any]:
        given = self.inside[0].state_dict()
        groups = given["param_groups"]
        return {"fast": given["state"], "total": self.total, "param_groups": groups}

    def load_state_dict(self, state_dict: Any) -> None:
        self.total, groups = state_dict["total"], state_dict["param_groups"]
        self.inside[0].load_state_dict({"state": state_dict["fast"], "param_groups": groups})


def both(parameters: Any) -> Around:
    return Around({0: Counts(parameters), 1: Base(parameters)})


class OfBoth(Base):
    def step(self, closure: Any = None) -> None:
        self.state["table"].setdefault("t", torch.ones(3))
        super().step()

    def begin(self, slots: Any, parameter: torch.Tensor) -> None:
        slots["t"] = self.state["table"]["t"]


def ones(*shape: int, **how: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: torch.ones(shape, **how)


CASES: dict[str, Any] = {
    "rows and columns": begins(r=lambda p: torch.ones(p.shape[0]), c=lambda p: p.sum(-1)),
    "a matrix of each side": begins(q=lambda p: [torch.eye(n) for n in p.shape]),
    "a tuple": begins(m=lambda p: (torch.ones_like(p), 5, torch.ones(2))),
    "a named tuple": begins(m=lambda p: (torch.ones_like(p), {"deep": [torch.ones(1)]})),
    "a dict": begins(m=lambda p: {"a": torch.ones_like(p), "b": 3, 4: torch.ones(2)}),
    "codes": begins(code=lambda p: p.new_ones(p.shape, dtype=torch.uint8), most=ones(2)),
    "a history": begins(h=lambda p: torch.ones(4, *p.shape)),
    "one element": begins(w=ones(1), empty=ones(0)),
    "other values": begins(m=torch.ones_like, none=lambda _: None, text=lambda _: "x"),
    "sizes": begins(m=torch.ones_like, shape=lambda p: p.shape, none=lambda _: []),
    "arrays of NumPy": begins(
        m=lambda p: [np.arange(4.0), p.detach().numpy() + 1], n=lambda p: np.ones(2)
    ),
    "one number for all": begins(m=lambda p: torch.ones(1).expand(p.shape), n=lambda _: 1),
    "float64": begins(m=lambda p: torch.ones_like(p, dtype=torch.float64)),
    "numbers only": Counts,
    "a growing list": History,
    "tensors in groups": InGroups,
    "a number in groups": Ungrouped,
    "of no parameter": OfNone,
    "of no parameter and of one": OfBoth,
    "by the number of a group": ByGroup,
    "a tensor alone": Alone,
    "listed": Listed,
    "a key of its own": Total,
    "hooks": Hooked,
    "a wrapper": lambda parameters: Outer(torch.optim.SGD(parameters, 0.1, momentum=0.9)),
    "a wrapper in another": lambda parameters: Around({0: Around({0: Counts(parameters)})}),
    "a wrapper that adds a key in another": lambda parameters: Around({0: Outer(Base(parameters))}),
    "two in a wrapper": lambda parameters: both([*parameters]),
    "a wrapper that takes the dict apart": lambda parameters: Apart({0: Base(parameters)}),
}
WRAPPERS = [case for case in CASES if "wrapper" in case]
APART = WRAPPERS[-1]


def everything(optimizer: Any) -> Any:
    given = optimizer.state_dict()
    return copy.deepcopy({**given, "total": getattr(optimizer, "total", None)})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def taken(model: nn.Module, optimizer: Any, kind: str) -> dict[str, Any]:
    if kind == "object":
        return {"model": model, "optimizer": optimizer}
    if kind == "dict":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with smckpt.sm_state_dict_type(model, getattr(smckpt, kind)):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def made(build: Any, seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3, bias=False).to(dtype)
    return model, build(model.parameters())


def resumed(folder: Path, cases: Any, kind: str, steps: int, dtype: torch.dtype) -> list[str]:
    """The cases that differ after a save of all of them and a load into others."""
    saved = {case: made(CASES[case], 0, dtype) for case in cases}
    for _, optimizer in saved.values():
        for _ in range(2):
            optimizer.step()
        if dtype is not torch.float32:  # state that torch's own load would round
            for slots in (s for s in optimizer.state.values() if isinstance(s, dict) and "m" in s):
                slots |= {"m": slots["m"].float() + 1 / 3}
    wanted = {case: everything(optimizer) for case, (_, optimizer) in saved.items()}
    state = {case: taken(*pair, kind) for case, pair in saved.items()}
    smckpt.save(state, checkpoint_id=folder)
    del saved, state, optimizer
    others = {case: made(CASES[case], 1, dtype) for case in cases}
    for number, (_, optimizer) in enumerate(others.values()):
        optimizer.param_groups[0]["lr"] = 0.5 + number
        for _ in range(steps):
            optimizer.step()
    smckpt.load({case: taken(*pair, kind) for case, pair in others.items()}, checkpoint_id=folder)
    found = [case for case in cases if not same(everything(others[case][1]), wanted[case])]
    for _, optimizer in others.values():
        optimizer.step()
    return found


@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "stepped"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_an_optimizers_state_comes_back(tmp_path: Path, kind: str, steps: int) -> None:
    if kind == "dict" and not steps:  # no state in it leads to its optimizer
        with pytest.raises(StateError, match=r"call init_optim_state\(optimizer\) first"):
            resumed(tmp_path, CASES, kind, steps, torch.float32)
        return
    # nothing leads from a wrapper's dict outside of a block to its optimizer
    left = WRAPPERS if kind == "dict" else [] if kind == "object" else [APART]
    cases = [case for case in CASES if case not in left]
    assert resumed(tmp_path, cases, kind, steps, torch.float32) == []


@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED", "FULL"])
def test_groups_without_their_state_beside_them_are_refused_in_a_block(
    tmp_path: Path, kind: str
) -> None:
    with pytest.raises(StateError, match="inside Apart, but not its state beside them"):
        resumed(tmp_path, [APART], kind, 0, torch.float32)


ROUNDED = ("a key of its own", "hooks", "other values", "sizes", "of no parameter")


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_not_rounded_to_the_parameters_dtype(tmp_path: Path, kind: str) -> None:
    assert resumed(tmp_path, ROUNDED, kind, 3 if kind == "dict" else 0, torch.bfloat16) == []


def test_lbfgs_comes_back_with_another_history(tmp_path: Path) -> None:
    def trained(seed: int, steps: int) -> tuple[nn.Module, Any]:
        model = net(seed)
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, history_size=5)
        for number in range(steps):
            step(model, optimizer, number)
        return model, optimizer

    for kind in ("object", "LOCAL", "SHARDED"):
        model, optimizer = trained(0, 3)
        smckpt.save(taken(model, optimizer, kind), checkpoint_id=tmp_path / kind)
        for steps in (0, 1, 5):
            other, resumed = trained(1, steps)
            smckpt.load(taken(other, resumed, kind), checkpoint_id=tmp_path / kind)
            assert same(everything(resumed), everything(optimizer))


class Holds:
    """An object with the pair of methods, and no optimizer of torch's."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)


def other_states(folder: str, kind: str, held: bool, touched: bool, alone: bool) -> Any:
    """The slots of each parameter that one rank loads, beside those that it should have. Rank 1
    alone trains the last parameter; `alone`: rank 0 saves its optimizer for all."""
    rank = dist.get_rank()

    def trained(steps: int) -> tuple[nn.Module, Any]:
        model = net(rank if steps else 5)
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(steps):
            step(model, optimizer, number)
        if steps and not rank and not alone:
            del optimizer.state[list(model.parameters())[-1]]
        for parameter in model.parameters() if touched else ():
            optimizer.state[parameter]  # makes an empty dict
        return model, optimizer

    def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        if kind == "object":
            return {"model": model, "optimizer": Holds(optimizer) if held else optimizer}
        with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def slots(optimizer: Any) -> dict[int, Any]:
        found = optimizer.state_dict()["state"].items()
        return {n: {k: float(v.sum()) for k, v in own.items()} for n, own in found}

    one, two = trained(2), trained(0)
    smckpt.save({} if alone and rank else state(*one), checkpoint_id=folder)
    smckpt.load(state(*two), checkpoint_id=folder)
    return slots(one[1]), slots(two[1])


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize(("kind", "held"), [("object", 0), ("object", 1), ("LOCAL", 0)])
def test_a_rank_without_state_of_a_parameter_gets_none_of_another_rank(
    tmp_path: Path, kind: str, held: bool, touched: bool
) -> None:
    """Its next step would begin with the other rank's moments, of another shape under FSDP1."""
    for saved, loaded in run_ranks(other_states, 2, str(tmp_path), kind, held, touched, False):
        assert loaded == saved


@pytest.mark.parametrize("held", [False, True])
def test_one_rank_may_save_an_optimizer_for_all(tmp_path: Path, held: bool) -> None:
    (saved, first), (_, other) = run_ranks(
        other_states, 2, str(tmp_path), "object", held, False, True
    )
    assert first == other == saved


class Keeper:
    """A program's own object, which gives its optimizer's dict within one of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


class Counted(torch.optim.AdamW):
    """An optimizer whose own dict has more in it, and which keeps a value before its tensors."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        loss = super().step(closure)
        for parameter, slots in self.state.items():
            self.state[parameter] = {"seen": self.count, **slots} | {"seen": self.count}
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("block", ["LOCAL", "SHARDED", "FULL"])
def test_a_block_leaves_no_names_for_later_saves_outside(tmp_path: Path, block: str) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "object": lambda optimizer: optimizer,
        "dict": lambda optimizer: optimizer.state_dict(),
        "own object": Keeper,
        "list": lambda optimizer: {"of": [optimizer]},
    }
    for build in (torch.optim.AdamW, Counted):
        for how, put in ways.items():
            model, optimizer = made(build, 0)
            step(model, optimizer, 0)
            with smckpt.sm_state_dict_type(model, getattr(smckpt, block)):
                optimizer.state_dict()
            folder = tmp_path / f"{build.__name__} {how}"
            smckpt.save({"model": model, "optimizer": put(optimizer)}, checkpoint_id=folder)
            other, resumed = made(build, 1)
            if how == "dict":  # one without state leads to no optimizer
                step(other, resumed, 1)
            smckpt.load({"model": other, "optimizer": put(resumed)}, checkpoint_id=folder)
            assert same(resumed.state_dict(), optimizer.state_dict()), how
            slots, again = (one.state_dict()["state"][0] for one in (optimizer, resumed))
            assert [*slots] == [*again], how
            whole = smckpt.load(checkpoint_id=folder)["optimizer"]
            if how in ("object", "dict"):
                assert [*whole["state"]] == [*optimizer.state_dict()["state"]], how
            for one in ((model, optimizer), (other, resumed)):
                step(*one, 2)
            assert same(model.state_dict(), other.state_dict()), how
