"""Objects with a `state_dict` and a `load_state_dict` of their own form: containers of others, and
models whose methods take or return something else than torch's."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import smckpt
from tests.support.launch import run_ranks
from tests.support.truth import differences, snapshot

KINDS = [None, smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL]


class ByName(dict[str, Any]):
    def state_dict(self) -> dict[str, Any]:
        return {f"the {name}": one.state_dict() for name, one in self.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self.items():
            one.load_state_dict(state[f"the {name}"])


class InOrder(list[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {"all": [one.state_dict() for one in self]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, given in zip(self, state["all"], strict=True):
            one.load_state_dict(given)


class Two(NamedTuple):
    first: Any
    second: Any

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first.load_state_dict(state["first"])
        self.second.load_state_dict(state["second"])


class Slotted:
    __slots__ = ("both",)

    def __init__(self, *both: Any) -> None:
        self.both = both

    def state_dict(self) -> dict[str, Any]:
        return {"both": [one.state_dict() for one in self.both]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, given in zip(self.both, state["both"], strict=True):
            one.load_state_dict(given)


class Seen(UserDict[str, Any]):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": dict(self.data)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.update(state["seen"])


@dataclasses.dataclass
class Progress:
    step: int
    losses: torch.Tensor

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.step, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.losses = state["at"], state["losses"].clone()


def trained(form: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    both = [
        torch.optim.AdamW(model[0].parameters(), lr=0.1 + seed),
        torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
    ]
    for _ in range(seed):
        model(torch.ones(3)).sum().backward()
        for optimizer in both:
            optimizer.step()
    forms = {
        "dict": ByName(zip("ab", both, strict=True)),
        "list": InOrder(both),
        "tuple": Two(*both),
        "slots": Slotted(*both),
    }
    more = {
        "seen": Seen(shards=seed, mask=torch.ones(2) * seed),
        "progress": Progress(seed, torch.rand(3)),
    }
    return model, {"optimizers": forms[form], **more}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@pytest.mark.parametrize("form", ["dict", "list", "tuple", "slots"])
@pytest.mark.parametrize("manager", [False, True], ids=["save", "manager"])
def test_a_container_with_both_methods_gives_and_takes_its_own_state(
    tmp_path: Path, form: str, manager: bool
) -> None:
    (model, objects), (other, others) = trained(form, 2), trained(form, 1)
    if manager:
        with smckpt.CheckpointManager(tmp_path) as saver:
            saver.save(1, {"model": model, **objects})
        with smckpt.CheckpointManager(tmp_path) as saver:
            assert saver.restore({"model": other, **others}) == 1
    else:
        smckpt.save({"model": model, **objects}, checkpoint_id=tmp_path)
        smckpt.load({"model": other, **others}, checkpoint_id=tmp_path)
    for name, value in objects.items():
        assert type(others[name]) is type(value)
        assert alike(value.state_dict(), others[name].state_dict()), name


class Strict(nn.Linear):
    """A method of the signature that torch had before `assign`."""

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(state, strict)


class Silent(nn.Linear):
    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        super().load_state_dict(state_dict)


class Renamed(nn.Linear):
    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {f"of.{name}": value for name, value in super().state_dict(*args, **named).items()}

    def load_state_dict(self, given: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({n.removeprefix("of."): v for n, v in given.items()}, strict)


class Noted(nn.Linear):
    """Extra state that is None in one of the two, as before a first step."""

    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def of_own_methods(folder: Path) -> None:
    for made in (Strict, Silent, Renamed, Noted):
        for number, kind in enumerate(KINDS):
            for note in ("seen", None) if made is Noted else (None,):
                model, other = made(2, 2), made(2, 2)
                if made is Noted:
                    model.note, other.note = note, None if note else "other"
                optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, other)]
                model(torch.ones(2)).sum().backward()
                optimizers[0].step()
                directory = folder / f"{made.__name__}-{number}-{note}"
                for m, optimizer, call in zip(
                    (model, other), optimizers, (smckpt.save, smckpt.load), strict=True
                ):
                    with nullcontext() if kind is None else smckpt.sm_state_dict_type(m, kind):
                        state: Any = {"model": m, "optimizer": optimizer}
                        if kind is not None:
                            state = {name: each.state_dict() for name, each in state.items()}
                        call(state, checkpoint_id=directory)
                        if kind is not None and call is smckpt.load:
                            m.load_state_dict(state["model"])
                            optimizer.load_state_dict(state["optimizer"])
                assert torch.equal(model.weight, other.weight), (made, kind)
                assert alike(*(optimizer.state_dict() for optimizer in optimizers)), (made, kind)
                assert made is not Noted or other.note == note, kind


def on_a_rank(folder: str) -> None:
    of_own_methods(Path(folder))


def test_a_model_whose_methods_are_not_torchs_loads_what_it_saved(tmp_path: Path) -> None:
    of_own_methods(tmp_path)


def test_so_does_it_in_a_job(tmp_path: Path) -> None:
    run_ranks(on_a_rank, 1, str(tmp_path))


def twice(groups: Any) -> Any:
    return [{**group, "lr": 2 * group["lr"]} for group in groups]


class Lifting(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] *= 2


class Setting(torch.optim.SGD):
    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["made"] = group.get("made", 0) + 1


def hooked_before(optimizer: Any) -> None:
    optimizer.register_load_state_dict_pre_hook(
        lambda optimizer, state: {**state, "param_groups": twice(state["param_groups"])}
    )


def hooked_after(optimizer: Any) -> None:
    def lift(optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 2

    optimizer.register_load_state_dict_post_hook(lift)


LISTENING = {
    "a hook before": (torch.optim.Adam, hooked_before),
    "a hook after": (torch.optim.SGD, hooked_after),
    "load_state_dict": (Lifting, lambda _: None),
    "__setstate__": (Setting, lambda _: None),
}


def groups_after_a_load(what: str, kind: Any, how: str, wrap: Any, path: str) -> tuple[Any, Any]:
    """Of stock's pair and of ours, of an optimizer that does something in each load."""
    made, prepare = LISTENING[what]

    def pair(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = wrap(nn.Linear(4, 4))
        optimizer = made(model.parameters(), lr=0.25)
        prepare(optimizer)
        return model, optimizer

    def block(model: Any) -> Any:
        return nullcontext() if kind is None else smckpt.sm_state_dict_type(model, kind)

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        if kind is None:
            return {"model": model, "optimizer": optimizer}
        with block(model):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    trained, stock, fresh = pair(0), pair(1), pair(2)
    trained[0](torch.ones(4)).sum().backward()
    trained[1].step()
    stock[1].load_state_dict(trained[1].state_dict())
    smckpt.save(state(*trained), checkpoint_id=path)
    target = state(*fresh)
    smckpt.load(target, checkpoint_id=path)
    if how == "again":
        with block(fresh[0]):
            fresh[1].load_state_dict(target["optimizer"])
    return tuple(
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        for _, optimizer in (stock, fresh)
    )


@pytest.mark.parametrize("how", ["load alone", "again"])
@pytest.mark.parametrize("kind", [None, smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL])
@pytest.mark.parametrize("what", list(LISTENING))
def test_what_an_optimizer_does_in_each_load_is_done(
    tmp_path: Path, what: str, kind: Any, how: str
) -> None:
    """By `smckpt.load`, and by `load_state_dict` in the block after it, as by stock."""
    if kind is None and how == "again":
        return
    stock, ours = groups_after_a_load(what, kind, how, lambda model: model, str(tmp_path))
    if how == "again" and what == "__setstate__":  # it has been called twice
        assert [group.pop("made") for group in (*stock, *ours)] == [1, 2]
    assert ours == stock


class Renaming(torch.optim.AdamW):
    """Gives the state of each parameter under another key, as a hook may, too."""

    def state_dict(self) -> dict[str, Any]:
        return renamed(self, super().state_dict())

    def load_state_dict(self, given: Any) -> None:
        super().load_state_dict(named_back(self, given))


def renamed(_: Any, given: Any) -> Any:
    state = {f"p{key}": slots for key, slots in given["state"].items()}
    return {**given, "state": state}


def named_back(_: Any, given: Any) -> Any:
    state = {int(key[1:]): slots for key, slots in given["state"].items()}
    return {**given, "state": state}


def by_name(hooks: bool, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = (torch.optim.AdamW if hooks else Renaming)(model.parameters(), 0.1)
    if hooks:
        optimizer.register_state_dict_post_hook(renamed)
        optimizer.register_load_state_dict_pre_hook(named_back)
    for _ in range(steps):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        model.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("hooks", [False, True], ids=["a class", "hooks"])
@pytest.mark.parametrize("kind", [None, smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL])
def test_other_keys_for_parameters_come_back_or_are_refused_at_the_save(
    tmp_path: Path, kind: Any, hooks: bool
) -> None:
    model, optimizer = by_name(hooks, 0, 2)
    if kind is not None:
        with smckpt.sm_state_dict_type(model, kind):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with pytest.raises(smckpt.errors.StateError, match="keys of its own.*optimizer itself"):
            smckpt.save(state, checkpoint_id=tmp_path)
        return
    smckpt.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    for steps in (0, 1):
        other, fresh = by_name(hooks, 1, steps)
        smckpt.load({"model": other, "optimizer": fresh}, checkpoint_id=tmp_path)
        assert not differences(snapshot(other, fresh), snapshot(model, optimizer))


def test_hooks_of_saving_alone_cost_a_load_no_copies_of_the_state(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_state_dict_post_hook(lambda optimizer, state: None)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    before = optimizer.state
    with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state is before, "torch's load_state_dict makes another"


def fully(model: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


@pytest.mark.parametrize("what", ["a hook before", "__setstate__"])
def test_what_an_optimizer_does_in_each_load_is_done_under_fsdp2(tmp_path: Path, what: str) -> None:
    for kind in (smckpt.SHARDED, smckpt.FULL):
        path = str(tmp_path / kind.value)
        arguments = (what, kind, "load alone", fully, path)
        for stock, ours in run_ranks(groups_after_a_load, 2, *arguments, timeout=60):
            assert ours == stock
