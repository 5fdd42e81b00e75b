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
