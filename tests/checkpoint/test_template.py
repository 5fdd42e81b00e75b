"""Names of steps' directories."""

from __future__ import annotations

import pytest

from smckpt.checkpoint.commits.run_directory import Template
from smckpt.errors import UsageError


@pytest.mark.parametrize(
    ("layout", "numbers", "place"),
    [
        ("{step}", (30, None), "30"),
        ("step_{step:08d}", (30, None), "step_00000030"),
        ("epoch-{epoch}/step-{step}", (7, 2), "epoch-2/step-7"),
        ("{step}.final", (123456789, None), "123456789.final"),
        ("step-{step}", (100, None), "step-100"),  # torchtitan's
        ("llama_v2-{step}steps", (100, None), "llama_v2-100steps"),  # SMP's published example
    ],
)
def test_a_place_is_written_and_read_back(
    layout: str, numbers: tuple[int, int | None], place: str
) -> None:
    template = Template(layout)
    assert template.subpath(*numbers) == place
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
     "{step}-{step}", "{step:d}", "{step", "a{step}\0", "{tp}", "tp{tp}_{step}", "tp{tp}/{step}",
     "{step}/{tp}{ep}", "{step}/tp{tp}_{tp}", "{step}/tp{tp}/fsdp{fsdp}", "{step}/tp{tp}_{cp}"],
)  # fmt: skip
def test_a_template_that_does_not_tell_steps_apart_is_refused(layout: str) -> None:
    with pytest.raises(UsageError, match="steps. directories is"):
        Template(layout)


@pytest.mark.parametrize(("step", "epoch"), [(-1, 1), (1, None), (True, 1), (1.0, 1)])
def test_a_number_that_is_missing_or_none_is_refused(step: int, epoch: int | None) -> None:
    with pytest.raises(UsageError, match="and the template"):
        Template("{epoch}/{step}").subpath(step, epoch)


def test_the_last_directory_may_name_the_groups_of_a_step() -> None:
    """As SMP's documentation names them."""
    template = Template("epoch{epoch}/{step}/tp{tp}_ep{ep}_fsdp{fsdp}")
    assert (template.depth, template.subpath(7, 1)) == (2, "epoch1/7")
    assert template.step_of("epoch1/7") == 7
    assert template.group_of({"tp": 1, "fsdp": 12}) == "tp1_ep0_fsdp12"
    assert Template("{step}").group == ""


def test_a_layout_by_which_two_groups_would_meet_is_refused() -> None:
    with pytest.raises(UsageError, match=r"differ in \['fsdp', 'replicas of mine'\] too"):
        Template("{step}/tp{tp}").group_of({"tp": 0, "fsdp": 1, "replicas of mine": 0})
