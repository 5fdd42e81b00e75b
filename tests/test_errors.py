"""How an error reads."""

from __future__ import annotations

import pytest

from smckpt.errors import StorageError, UsageError, error_from_json


def test_colours_of_others_texts_are_left_out() -> None:
    error = StorageError("torch says \x1b[31;1mno\x1b[0m \x1b[2K", remedy="ask again")
    assert error.message == "torch says no "
    assert "\x1b" not in str(error) and "\x1b" not in str(error_from_json(error.to_json()))


@pytest.mark.parametrize(
    ("message", "between"), [("world_size 4", "world_size 4. What"), ("why?", "why? What")]
)
def test_what_to_do_is_a_sentence_of_its_own(message: str, between: str) -> None:
    assert f"{between} to do: pass 2" in str(UsageError(message, remedy="pass 2"))
