"""Enums, dataclasses, named tuples, deques and dates come back as what they were, or are refused
when they are saved."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import logging
import pickle
import subprocess
import sys
import zoneinfo
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import smckpt
from smckpt.checkpoint.records.objects import decode_object, encode_object
from smckpt.errors import CheckpointError, StateError
from smckpt.layout.containers import made_again
from smckpt.state_dict import register_value_class
from tests.state_dict.test_own_state import KINDS, Base, begins, made, taken
from tests.support import process_state
from tests.support.limits import seconds


class Phase(enum.Enum):
    COLD = 1
    WARM = 2


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Statistics:
    mean: Any
    count: int = 0
    phase: Phase = Phase.WARM
    late: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        raise AssertionError("a load calls no constructor")


@dataclasses.dataclass(slots=True)
class Window:
    parts: Any
    size: int = 3


class Plain:
    """No dataclass: its attributes are what it is."""

    def __init__(self, basis: Any) -> None:
        self.basis = basis


def statistics(mean: Any, count: int = 0, phase: Phase = Phase.WARM) -> Statistics:
    found = object.__new__(Statistics)
    for name, value in {"mean": mean, "count": count, "phase": phase, "late": 5}.items():
        object.__setattr__(found, name, value)
    return found


DATES = [
    datetime.datetime(2026, 3, 4, 5, 6, 7, 8),
    datetime.datetime(2026, 3, 4, tzinfo=datetime.timezone.utc),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.time(1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3), "X")),
    datetime.date(2026, 3, 4),
    datetime.timezone.utc,
]
ENUMS: list[Any] = [Phase.WARM, Bits.A | Bits.B, Bits.B, {Phase.COLD: {Phase.WARM}}]
BY_NAME: list[Any] = [
    Pair(1, [Phase.COLD]),
    statistics((1.5, None), 3),
    Window({"a": Pair(1, 2)}),
    {Phase.COLD: {Phase.WARM}, "k": (Window(1),)},
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Plain):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple, deque)):
        bounds = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return bounds and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture
def registered() -> Iterator[None]:
    before = process_state.registered()
    for kind in (Phase, Bits, Pair, Statistics, Window, Plain):
        register_value_class(kind)
    yield
    process_state.restore_registered(before)


def forgotten() -> None:
    """As in another process."""
    others = {**process_state.registered(), "smckpt.layout.containers": {}}
    process_state.restore_registered(others)


def test_values_of_python_s_library_and_enums_need_no_registration() -> None:
    for value in [*DATES, deque([1, (2,)], 4), deque(), {"at": DATES}, *ENUMS]:
        back = decode_object(encode_object(value))
        assert same(back, value), value
        assert not isinstance(value, datetime.datetime) or back.fold == value.fold


def test_values_of_classes_that_are_not_registered_are_refused_when_they_are_saved(
    tmp_path: Path,
) -> None:
    for value in [*BY_NAME, Plain([1])]:
        for state in (
            {"deep": [{"value": value}], "t": torch.ones(1)},
            {"param_groups": [{"params": [], "value": value}], "state": {}},
            {"value": value},
        ):
            with pytest.raises(StateError, match=r"register_value_class|add_safe_globals"):
                smckpt.save(state, checkpoint_id=tmp_path)

    class Local(enum.Enum):
        ONE = 1

    with pytest.raises(StateError, match="Local at e cannot be stored.*register_value_class"):
        smckpt.save({"e": Local.ONE}, checkpoint_id=tmp_path)
    with pytest.raises(StateError, match="Statistics at s cannot be stored.*register_value_class"):
        smckpt.save({"s": statistics(torch.ones(1))}, checkpoint_id=tmp_path)


def test_a_checkpoint_of_registered_values_names_what_a_load_lacks(registered: None) -> None:
    stored = [encode_object(value) for value in BY_NAME]
    forgotten()
    for each in stored:
        with pytest.raises(StateError, match="there is a .*register_value_class"):
            made_again(decode_object(each), "there")


def test_values_are_made_of_registered_classes(registered: None) -> None:
    for value in [*ENUMS, *BY_NAME, Plain([1])]:
        assert same(decode_object(encode_object(value)), value)


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        ({"~": "enum", "v": ["{}.Phase", "HOT"]}, "no member"),
        ({"~": "enum", "v": ["{}.Pair", "WARM"]}, "no member"),
        ({"~": "named", "v": ["{}.Pair", [["left", 1]]]}, "other fields"),
        ({"~": "named", "v": ["{}.Phase", [["left", 1]]]}, "other fields"),
        ({"~": "data", "v": ["{}.Window", [["parts", 1]]]}, "other attributes"),
        ({"~": "data", "v": ["{}.Window", [["parts", 1], ["size", 2], ["x", 3]]]}, "attributes"),
        ({"~": "data", "v": [5, []]}, "cannot be decoded"),
        ({"~": "data", "v": ["x", [[1, 2]]]}, "cannot be decoded"),
        ({"~": "deque", "v": [-1, []]}, "cannot be decoded"),
        ({"~": "datetime", "v": ["datetime", "2026", 0, []]}, "cannot be decoded"),
        ({"~": "datetime", "v": ["tzinfo", ["zone", "../../etc/passwd"]]}, "cannot be decoded"),
    ],
)
def test_values_that_do_not_fit_their_class_are_errors(
    registered: None, stored: Any, why: str
) -> None:
    value = stored["v"]
    if isinstance(value[0], str):
        value = [value[0].replace("{}", __name__), *value[1:]]
    with pytest.raises(CheckpointError, match=why):
        decode_object({**stored, "v": value})


CASES: dict[str, Any] = {
    "member": begins(m=torch.ones_like, e=lambda _: Phase.WARM),
    "date": begins(m=torch.ones_like, e=lambda _: DATES),
    "queue": begins(m=lambda p: deque([torch.ones_like(p), p.detach().clone()], 5)),
    "numbers": begins(m=lambda _: deque([1, 2], 5)),
    "pair": begins(m=lambda p: Pair(torch.ones_like(p), {"a": [torch.ones(2), 7]})),
    "pair of numbers": begins(m=lambda _: Pair(1, 2)),
    "frozen": begins(m=lambda p: statistics(torch.ones_like(p))),
    "with slots": begins(m=lambda p: Window([torch.ones_like(p), torch.ones(3)], 9)),
    "plain": begins(m=lambda p: Plain([torch.ones_like(p)])),
    "counts": begins(m=torch.ones_like, e=lambda _: Counter("aab")),
    "keys": begins(
        m=lambda p: {0.9: torch.ones_like(p), (1, 2): torch.ones(1), None: 3, True: torch.ones(2)}
    ),
}
FREE = ("member", "date", "queue", "numbers", "counts", "keys")


def stepped(case: str, seed: int, steps: int) -> tuple[Any, Any]:
    model, optimizer = made(CASES[case], seed)
    for _ in range(steps):
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_optimizer_keeps_comes_back(tmp_path: Path, registered: None, kind: str) -> None:
    saved = {case: stepped(case, 0, 2) for case in CASES}
    smckpt.save({case: taken(*pair, kind) for case, pair in saved.items()}, checkpoint_id=tmp_path)
    for steps in (0, 3) if kind != "dict" else (3,):
        fresh = {case: stepped(case, 1, steps) for case in CASES}
        target = {case: taken(*pair, kind) for case, pair in fresh.items()}
        smckpt.load(target, checkpoint_id=tmp_path)
        for case, (_, optimizer) in fresh.items():
            mine = list(optimizer.state.values())
            assert same(mine, list(saved[case][1].state.values())), (case, steps)


@pytest.mark.parametrize("case", [case for case in CASES if case not in FREE])
def test_what_a_new_optimizer_could_not_make_is_refused_when_it_is_saved(
    tmp_path: Path, case: str
) -> None:
    for kind in ("object", "SHARDED"):
        with pytest.raises(StateError, match="register_value_class|add_safe_globals"):
            smckpt.save(taken(*stepped(case, 0, 1), kind), checkpoint_id=tmp_path)


class InGroups(Base):
    """An enum among the options, as a new optimizer has it too."""

    def __init__(self, parameters: Any, phase: Phase = Phase.COLD) -> None:
        super().__init__(parameters, phase=phase)


def test_options_of_a_group_need_no_registration(tmp_path: Path) -> None:
    for kind in KINDS:
        model, optimizer = made(lambda p: InGroups(p, Phase.WARM), 0)
        optimizer.step()
        smckpt.save(taken(model, optimizer, kind), checkpoint_id=tmp_path / kind)
        other, fresh = made(InGroups, 1)
        fresh.step()
        smckpt.load(taken(other, fresh, kind), checkpoint_id=tmp_path / kind)
        assert fresh.param_groups[0]["phase"] is Phase.WARM


def test_a_tuple_of_an_unknown_class_among_the_options_is_refused_when_it_is_saved(
    tmp_path: Path,
) -> None:
    """A new optimizer would get a plain tuple."""
    for kind in KINDS:
        model, optimizer = made(InGroups, 0)
        optimizer.step()
        optimizer.param_groups[0]["pair"] = Pair(torch.ones(2), 1)
        with pytest.raises(StateError, match="register_value_class"):
            smckpt.save(taken(model, optimizer, kind), checkpoint_id=tmp_path / kind)


def test_options_that_torch_does_not_compare_come_back(tmp_path: Path) -> None:
    for kind in KINDS:
        model, optimizer = made(InGroups, 0)
        optimizer.step()
        scale = torch.full((2,), 0.5).to(torch.float8_e4m3fn)
        optimizer.param_groups[0]["scale"] = scale
        smckpt.save(taken(model, optimizer, kind), checkpoint_id=tmp_path / kind)
        other, fresh = made(InGroups, 1)
        fresh.step()
        fresh.param_groups[0]["scale"] = torch.zeros_like(scale)
        smckpt.load(taken(other, fresh, kind), checkpoint_id=tmp_path / kind)
        assert fresh.param_groups[0]["scale"].tolist() == [0.5, 0.5]


def state(number: int) -> dict[str, Any]:
    return {
        "frozen": statistics(torch.full((2,), number), number, Phase(number)),
        "member": Phase(number),
        "pair": Pair(torch.full((1,), number), number),
        "queue": deque([torch.full((1,), number), number]),
        "deep": [{"window": Window(number)}],
        "at": datetime.date(2026, 1, number),
        "odd": {(1, 2): torch.full((1,), number), "w": {None: number}},
    }


def test_a_state_of_such_values_fills_the_target(tmp_path: Path, registered: None) -> None:
    smckpt.save(state(2), checkpoint_id=tmp_path)
    target = state(1)
    frozen, pair = target["frozen"].mean, target["pair"].left
    smckpt.load(target, checkpoint_id=tmp_path)
    assert same(target, state(2))
    assert target["frozen"].mean is frozen and target["pair"].left is pair
    target = state(1) | {"member": None}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["member"] is Phase.WARM
    assert same(smckpt.load(checkpoint_id=tmp_path), state(2))


def test_a_load_without_a_target_gives_names_tuples_and_dicts_of_other_classes(
    tmp_path: Path, registered: None, caplog: pytest.LogCaptureFixture
) -> None:
    smckpt.save(state(2), checkpoint_id=tmp_path)
    forgotten()
    caplog.set_level(logging.WARNING, "smckpt")
    whole: Any = smckpt.load(checkpoint_id=tmp_path)
    assert whole["member"] is Phase.WARM and whole["pair"] == (torch.tensor([2]), 2)
    assert whole["odd"].keys() == {(1, 2), "w"} and whole["frozen"]["count"] == 2
    assert whole["deep"] == [{"window": {"parts": 2, "size": 3}}]
    assert "register_value_class" in caplog.text


def test_a_checkpoint_imports_nothing(tmp_path: Path, registered: None) -> None:
    smckpt.save({"m": Phase.WARM, "w": Window(1), "t": torch.ones(1)}, checkpoint_id=tmp_path)
    script = (
        "import sys, smckpt\n"
        f"found = smckpt.load(checkpoint_id={str(tmp_path)!r})\n"
        "assert found['m'] == 'WARM' and found['w'] == {'parts': 1, 'size': 3}, found\n"
        f"assert {__name__!r} not in sys.modules\n"
        "try:\n"
        f"    smckpt.load({{'m': 0, 'w': 0, 't': found['t']}}, checkpoint_id={str(tmp_path)!r})\n"
        "except smckpt.errors.StateError as error:\n"
        "    assert 'register_value_class' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=seconds(60))


def test_such_values_do_not_carry_code(registered: None) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("never",))

    with pytest.raises(StateError):
        encode_object(Window(Evil()))
    assert pickle.dumps(Window(1))  # the class itself could
