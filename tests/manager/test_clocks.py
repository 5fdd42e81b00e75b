"""Clocks that are wrong: between runs, between hosts, during a run. None of them decides alone.

Each process has a clock of its own that is off (`tests.support.faults.clocks`), its worker too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smckpt
from smckpt import CheckpointManager, errors, find_checkpoints
from tests.support.faults import clocks
from tests.support.launch import run_ranks
from tests.support.limits import seconds

HOUR = 3600.0
DAY = 24 * HOUR


def run(root: str, offs: tuple[float, ...], steps: int, keep: int | None) -> tuple[int, list[Any]]:
    """Go on for some steps, on ranks whose clocks are off by `offs` seconds; the step that was
    restored, and the steps that are there at the end."""
    clocks.shift(offs[dist.get_rank()])
    state: dict[str, Any] = {"model": torch.nn.Linear(4, 4), "value": 0}
    with CheckpointManager(root, keep_last_n=keep, timeout=seconds(60)) as manager:
        began = manager.restore(into=state)
        assert state["value"] == began
        for step in range(began + 1, began + steps + 1):
            state["value"] = step
            manager.save(step, state).wait()
    return began, [one.step for one in find_checkpoints(root)]


def test_each_run_goes_on_from_the_newest_step_whatever_clocks_say(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert run_ranks(run, 1, root, (DAY,), 3, 2) == [(0, [2, 3])]  # a day ahead
    ((began, steps),) = run_ranks(run, 1, root, (0,), 2, 2)
    assert began == 3 and set(steps) >= {4, 5}
    ((began, steps),) = run_ranks(run, 1, root, (-DAY,), 2, 2)  # a day behind
    assert began == 5 and set(steps) >= {6, 7}
    ((began, steps),) = run_ranks(run, 1, root, (2 * DAY,), 2, 2)
    assert (began, steps) == (7, [8, 9])  # newer by step and by time: the others are gone


@pytest.mark.long
def test_hosts_of_one_job_may_differ_by_a_day(tmp_path: Path) -> None:
    for offs in ((DAY, 0), (0, DAY)):
        root = str(tmp_path / str(offs[0]))
        assert run_ranks(run, 2, root, offs, 3, 1)[0] == (0, [3])
        assert run_ranks(run, 2, root, offs[::-1], 2, 1)[0][0] == 3


def set_back(root: str) -> tuple[list[Any], list[Any]]:
    """The clock goes back by a day while the run goes on; the steps after each save then, and those
    of the saves to one directory."""
    state: dict[str, Any] = {"model": torch.nn.Linear(4, 4), "value": 0}
    steps, values = [], []
    with CheckpointManager(f"{root}/run", keep_last_n=1) as manager:
        for step in range(1, 5):
            manager.save(step, state).wait()
            if step == 2:
                _restart_the_worker(DAY)
    steps = [one.step for one in find_checkpoints(f"{root}/run")]
    for value in (1.0, 2.0, 3.0):
        smckpt.save({"a": torch.full((4,), value)}, checkpoint_id=f"{root}/one")
        target = {"a": torch.zeros(4)}
        smckpt.load(target, checkpoint_id=f"{root}/one")
        values.append(float(target["a"][0]))
        clocks.shift(-DAY)
        _restart_the_worker(0, "default")
    return steps, values


def _restart_the_worker(back: float, queue: str = "manager") -> None:
    """The next worker starts with this process's clock."""
    from smckpt.engine import api

    if back:
        clocks.shift(-back)
    for one in api._RUNTIME.queues(None, queue):
        one._worker._discard()  # type: ignore[attr-defined]


def test_a_clock_that_is_set_back_during_a_run_loses_no_step(tmp_path: Path) -> None:
    ((steps, values),) = run_ranks(set_back, 1, str(tmp_path))
    assert steps[-1] == 4 and values == [1.0, 2.0, 3.0]


def one_save(place: str, off: float, value: float) -> str:
    clocks.shift(off)
    try:
        smckpt.save({"a": torch.full((4,), value)}, checkpoint_id=place)
    except errors.SaveFailedError as error:
        return str(error)
    target = {"a": torch.zeros(4)}
    smckpt.load(target, checkpoint_id=place)
    assert float(target["a"][0]) == value
    return ""


@pytest.mark.long
def test_of_saves_to_one_directory_the_last_counts_and_not_the_latest_clock(
    tmp_path: Path,
) -> None:
    for value, off in enumerate((DAY, 0, -DAY, HOUR, 30), 1):
        assert run_ranks(one_save, 1, str(tmp_path), off, float(value)) == [""]
    assert len(list(tmp_path.glob("manifest-*"))) == 1


# -- pins ------------------------------------------------------------------------------------------


def reads_while_it_is_deleted(root: str, off: float) -> tuple[str, str]:
    """Rank 1 pins step 1 with a clock that is off, and reads it after rank 0's run has deleted what
    it may; what the reader got, and the steps that were left."""
    rank = dist.get_rank()
    alone = dist.new_group([0]), dist.new_group([1])
    place = os.path.join(root, "1")
    if rank == 0:
        _save_alone(root, 1, None)
    dist.barrier()
    if rank == 0:
        dist.barrier()  # it is pinned
        _save_alone(root, 2, 1)
        dist.barrier()
        return "", ""
    clocks.shift(off)
    with smckpt.pinned(place, seconds=HOUR / 2):
        dist.barrier()
        dist.barrier()
        target = {"a": torch.zeros(4)}
        try:
            smckpt.load(target, checkpoint_id=place, process_group=alone[1])
        except errors.CheckpointError as error:
            return type(error).__name__, " ".join(sorted(os.listdir(root)))
    return str(target["a"].tolist()), " ".join(sorted(os.listdir(root)))


def _save_alone(root: str, step: int, keep: int | None) -> None:
    """By rank 0 alone, with the manager's own rules for what is deleted."""
    from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
    from smckpt.manager.retention import Retention, policies_of
    from smckpt.storage import open_storage

    smckpt.save(
        {"a": torch.full((4,), float(step))}, checkpoint_id=f"{root}/{step}", step=step,
        process_group=dist.new_group([0], use_local_synchronization=True),
        options=smckpt.SaveOptions(groups=[[0]]),
    )  # fmt: skip
    run = RunDirectory(open_storage(root), Template("{step}"))
    Retention(run, policies_of(keep, ()), None).tidy(str(step))


@pytest.mark.long
@pytest.mark.parametrize(
    ("off", "got", "left"),
    [
        (0, "[1.0, 1.0, 1.0, 1.0]", "1 2"),
        (-50, "[1.0, 1.0, 1.0, 1.0]", "1 2"),
        (DAY, "[1.0, 1.0, 1.0, 1.0]", "1 2"),  # it holds for longer
        (-DAY, "CheckpointNotFoundError", "2"),  # over before it began: told, and nothing else read
    ],
)
def test_a_pin_of_a_host_with_another_clock(
    tmp_path: Path, off: float, got: str, left: str
) -> None:
    assert run_ranks(reads_while_it_is_deleted, 2, str(tmp_path), off)[1] == (got, left)
