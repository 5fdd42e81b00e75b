"""Messages are read by the types of their fields."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from smckpt.decoding import decode
from smckpt.meeting.keys import to_text


@dataclass(frozen=True)
class Held:
    name: str
    size: int


@dataclass(frozen=True)
class Plan:
    rank: int
    seconds: float
    held: tuple[Held, ...]
    by_rank: dict[int, str] = field(default_factory=dict)
    remark: str | None = None


PLAN = Plan(3, 0.5, (Held("a", 1),), {4: "b"}, None)


def test_a_message_is_read_as_it_was_written():
    assert decode(Plan, json.loads(to_text(PLAN))) == PLAN


@pytest.mark.parametrize(
    ("key", "value", "at"),
    [
        ("rank", "3", r"\$.rank"),
        ("rank", True, r"\$.rank"),
        ("rank", 3.0, r"\$.rank"),
        ("rank", {}, r"\$.rank"),
        ("seconds", "0.5", r"\$.seconds"),
        ("held", {"name": "a", "size": 1}, r"\$.held"),
        ("held", [{"name": 1, "size": 1}], r"\$.held\[0\].name"),
        ("held", [{"name": "a"}], r"\$.held\[0\]"),
        ("by_rank", {"four": "b"}, r"\$.by_rank"),
        ("remark", 1, r"\$.remark"),
        ("other", 1, "no field 'other'"),
        ("held", [{"name": "a", "size": 1, "other": 2}], "no field 'other'"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_field(key, value, at):
    with pytest.raises(ValueError, match=at):
        decode(Plan, {**json.loads(to_text(PLAN)), key: value})
