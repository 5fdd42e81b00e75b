"""The program of docs/manager.md, as printed, on four processes under torchrun.

One run is left alone. The other is ended by SIGTERM, goes on, is killed, goes on to its end, loses
its newest checkpoint and goes on again: every loss has to be the same in every bit. Each time a new
launcher starts it: torchrun's own restarts meet the addresses of the dead in its store.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from smckpt import find_checkpoints
from tests.manager.torchrun import Run, printed_program, train


@dataclass(frozen=True)
class Story:
    """What the runs said, and the steps that were there after each."""

    folder: Path
    ended: Run
    killed: Run
    again: Run
    mended: Run
    damaged: str
    steps: dict[str, list[int | None]]


def steps(folder: Path) -> list[int | None]:
    return [one.step for one in find_checkpoints(folder / "checkpoints")]


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(whole_folder: Path) -> Run:
    return train(whole_folder)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    seen = {}
    folder = tmp_path_factory.mktemp("story")
    ended = train(folder, hit=(signal.SIGTERM, 1, 17))
    seen["ended"] = steps(folder)
    (folder / "hit").unlink()
    killed = train(folder, hit=(signal.SIGKILL, 2, 15))
    again = train(folder)
    seen["killed"] = steps(folder)
    (data, *_) = sorted((folder / "checkpoints" / "50").rglob("data-*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(content)
    mended = train(folder)
    seen["mended"] = steps(folder)
    return Story(folder, ended, killed, again, mended, data.name, seen)


def test_it_is_short() -> None:  # and exact: tests/test_proven_programs.py
    assert len(printed_program().splitlines()) <= 48


def test_it_says_what_it_saves_and_records_the_loss_of_the_job(
    whole_folder: Path, whole: Run
) -> None:
    assert whole.status == 0 and len(whole.losses) == 4 * 50, whole.said
    for step in range(10, 51, 10):
        assert whole.said.count(f"committed step {step}: ") == 2, whole.said  # by each group
    assert "warn" not in whole.said.lower()
    found = find_checkpoints(whole_folder / "checkpoints")
    for one in found:
        ranks = [float(whole.losses[rank, one.step or 0]) for rank in range(4)]
        assert one.metadata["metrics"]["loss"] == pytest.approx(sum(ranks) / 4)
        assert max(ranks) - min(ranks) > 1e-3
    assert len(found) == 2


@pytest.mark.long
def test_sigterm_on_one_rank_ends_all_after_one_step_that_is_saved(story: Story) -> None:
    said = story.ended.said
    assert story.ended.status == 1, said  # torchrun's own
    assert "exitcode  : 143" in said
    (last,) = {step for step in story.steps["ended"] if step != 10}
    assert last is not None and 17 <= last <= 20
    assert f"step {last} is committed, the last" in said
    for rank in range(4):  # none went further
        assert max(step for of, step in story.ended.losses if of == rank) in (last - 1, last)


@pytest.mark.long
def test_killed_it_goes_on(story: Story) -> None:
    assert story.killed.status == 1
    assert story.again.status == 0, story.again.said
    assert story.steps["killed"] == [40, 50]
    assert (story.folder / "hit").exists()


@pytest.mark.long
def test_with_a_bad_newest_checkpoint_it_goes_on_from_the_one_before(story: Story) -> None:
    assert story.mended.status == 0, story.mended.said
    (line,) = (line for line in story.mended.said.splitlines() if "restored step 40" in line)
    assert "lost: step 50" in line and story.damaged in line
    assert {step for _, step in story.mended.losses} == set(range(41, 51))
    assert story.steps["mended"] == [40, 50]


@pytest.mark.long
def test_all_of_it_is_exact(whole: Run, story: Story) -> None:
    assert whole.status == 0 and len(whole.losses) == 4 * 50, whole.said
    for run in (story.ended, story.killed, story.again, story.mended):
        assert run.losses
        assert run.losses.items() <= whole.losses.items()
    assert {**story.ended.losses, **story.killed.losses, **story.again.losses}.keys() >= {
        (rank, step) for rank in range(4) for step in (1, 16, 21, 50)
    }
