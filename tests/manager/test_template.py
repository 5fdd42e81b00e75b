"""Names of steps' directories."""

from __future__ import annotations

import pytest

from smckpt.errors import UsageError
from smckpt.manager.template import Template


@pytest.mark.parametrize(
    ("layout", "numbers", "place"),
    [
        ("{step}", (30, None), "30"),
        ("step_{step:08d}", (30, None), "step_00000030"),
        ("epoch-{epoch}/step-{step}", (7, 2), "epoch-2/step-7"),
        ("{step}.final", (123456789, None), "123456789.final"),
    ],
)
def test_a_place_is_written_and_read_back(
    layout: str, numbers: tuple[int, int | None], place: str
) -> None:
    template = Template(layout)
    assert template.place(*numbers) == place
    assert template.step_of(place) == numbers[0]
    assert template.depth == place.count("/") + 1


@pytest.mark.parametrize(
    "place", ["step_30", "030", "30 ", "30.old", "x/30", "-1", "３０", "", "30\n"]
)
def test_what_is_not_written_so_is_no_step(place: str) -> None:
    assert Template("{step}").step_of(place) is None


def test_zeros_are_as_many_as_the_template_says() -> None:
    assert Template("{step:04d}").step_of("12345") == 12345
    assert Template("{step:04d}").step_of("012345") is None


@pytest.mark.parametrize(
    "layout",
    ["", "latest", "{step}{epoch}", "{step}1", "{step}/../x", "/{step}", "{step}/", "{rank}/{step}",
     "{step}-{step}", "{step:d}", "{step", "a{step}\0"],
)  # fmt: skip
def test_a_layout_that_does_not_tell_steps_apart_is_refused(layout: str) -> None:
    with pytest.raises(UsageError, match="layout is"):
        Template(layout)


@pytest.mark.parametrize(("step", "epoch"), [(-1, 1), (1, None), (True, 1), (1.0, 1)])
def test_a_number_that_is_missing_or_none_is_refused(step: int, epoch: int | None) -> None:
    with pytest.raises(UsageError, match="and the layout"):
        Template("{epoch}/{step}").place(step, epoch)
