"""When a step is saved: by time, by the rule of Young and Daly, and the same on all ranks."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smckpt import CheckpointManager, Signals, find_checkpoints
from smckpt.engine.saving.job import Timings
from smckpt.errors import PeerError
from smckpt.manager import schedule
from smckpt.manager.record import History
from smckpt.manager.schedule import Schedule, choose
from smckpt.meeting.group import Membership, group_of
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.main_job import ROOT


def test_the_rule_is_that_of_young_and_daly() -> None:
    run = History(418, 419 * 11135 - 86400)  # a failure in 11,135 s
    assert choose(0.5, 30, run).seconds == pytest.approx((2 * 0.5 * 11135) ** 0.5, rel=0.01)
    exact = choose(600, 30, run).seconds  # Daly's higher order
    assert exact == pytest.approx(3655.5 * (1 + 0.16414 / 3 + 0.026943 / 9), rel=1e-3)
    assert choose(5e4, 30, run).seconds == 11135
    assert "418 in the" in choose(0.5, 30, run).why
    # without failures one a day is assumed, and what the run survives lengthens it
    assert choose(1, 2, History()).seconds == pytest.approx((2 * 86400) ** 0.5, rel=0.01)
    assert choose(1, 2, History(0, 9 * 86400)).seconds == pytest.approx(
        (20 * 86400) ** 0.5, rel=0.01
    )


def test_no_save_begins_before_the_last_one_has_ended() -> None:
    assert choose(0.5, 700, History()).seconds == 700


class Clock:
    """Seconds that a test counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        fake = SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep)
        monkeypatch.setattr(schedule, "time", fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def scheduled(interval: Any) -> Schedule:
    group = group_of(None)
    assert group is not None
    return Schedule(Membership(group, "test"), interval, 60.0)


def dues(told: Schedule, clock: Clock, steps: range, step_seconds: float) -> list[int]:
    due = []
    for step in steps:
        clock.now += step_seconds
        if told.is_due(step):
            told.saved(step)
            due.append(step)
    return due


@pytest.mark.parametrize("step_seconds", [0.001, 0.25, 4.0, 25.0])
def test_a_step_is_saved_when_the_time_has_come(clock: Clock, step_seconds: float) -> None:
    told = scheduled(datetime.timedelta(seconds=10))
    count = max(8, int(60 / step_seconds))
    due = dues(told, clock, range(1, count), step_seconds)
    gaps = [(b - a) * step_seconds for a, b in itertools.pairwise(due)]
    assert len(due) >= 4
    assert all(10 - 1e-6 <= gap < 10 + 2 * step_seconds for gap in gaps), gaps


def test_a_loop_that_does_not_ask_at_each_step_saves_too(clock: Clock) -> None:
    told = scheduled(datetime.timedelta(seconds=10))
    due = dues(told, clock, range(7, 700, 7), 7.0)
    assert 40 < len(due) < 60


def test_a_thread_that_fails_ends_the_wait_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    told = scheduled(datetime.timedelta(seconds=5))

    def broken(*_: object) -> None:
        raise RuntimeError("not one of ours")

    monkeypatch.setattr(told._membership, "meeting", broken)
    told._serve()
    with pytest.raises(RuntimeError, match="not one of ours"):
        told._wait(3)


def test_a_save_by_hand_counts(clock: Clock) -> None:
    told = scheduled(datetime.timedelta(seconds=100))
    assert dues(told, clock, range(1, 80), 1.0) == []
    told.saved(79)
    assert dues(told, clock, range(80, 170), 1.0) == []
    assert dues(told, clock, range(170, 190), 1.0)


def test_auto_measures_once_and_then_keeps_to_the_rule(clock: Clock, caplog: Any) -> None:
    caplog.set_level("INFO", logger="smckpt")
    told = scheduled("auto")
    (first,) = dues(told, clock, range(1, 100), 1.0)
    assert 60 <= first <= 63
    told.measured(Timings(1.0, 0.0, 1.0, 4.0, 5.0, 1))
    chosen = told.chosen()
    assert chosen is not None and chosen["seconds"] == pytest.approx((2 * 86400) ** 0.5, rel=0.02)
    (line,) = [one.message for one in caplog.records if "auto" in one.message]
    assert "416 s" in line and "holds training up for 1 s" in line
    (second,) = dues(told, clock, range(100, 600), 1.0)
    assert abs(second - first - chosen["seconds"]) < 5
    told.measured(Timings(1.01, 0.0, 1.0, 4.0, 5.0, 1))
    assert len([one for one in caplog.records if "auto" in one.message]) == 1  # as good as before


def run_with(root: Path, interval: Any, end: str = "") -> dict[str, Any]:
    """One attempt that saves one step more; what that step says of the run."""
    state = {"model": torch.nn.Linear(2, 2)}
    with CheckpointManager(root, interval=interval, signals=Signals(("SIGUSR1",), 600)) as manager:
        step = manager.restore(into=state) + 1
        if end:
            manager.should_save(step)
            os.kill(os.getpid(), signal.SIGUSR1)
            deadline = time.monotonic() + seconds(60)
            while not manager.should_save(step):
                assert time.monotonic() < deadline, "the notice was not heard"
                step += 1
                time.sleep(0.01)
            with pytest.raises(SystemExit):
                manager.save(step, state)
        else:
            manager.save(step, state).wait()
    mark: dict[str, Any] = find_checkpoints(root)[-1].metadata["manager"]
    return mark


def test_the_failures_of_a_run_stand_in_its_manifests(tmp_path: Path) -> None:
    first = run_with(tmp_path, "auto")
    second = run_with(tmp_path, "auto")
    third = run_with(tmp_path, None, end="SIGUSR1")  # by a notice: nothing was lost
    fourth = run_with(tmp_path, "auto")
    fifth = run_with(tmp_path, "auto")
    marks = [first, second, third, fourth, fifth]
    assert [one["failures"] for one in marks] == [0, 1, 2, 2, 3]
    assert [one["ended"] for one in marks] == [None, None, "SIGUSR1", None, None]
    assert first["seconds"] <= third["seconds"] <= fifth["seconds"]


def test_status_tells_what_was_chosen(tmp_path: Path, clock: Clock) -> None:
    state = {"model": torch.nn.Linear(2, 2)}
    with CheckpointManager(tmp_path, interval="auto") as manager:
        for step in (1, 2):
            clock.now += 40
            manager.save(step, state).wait()
    code = "import sys; sys.modules['torch'] = None; from smckpt.cli import main; main()"

    def status(*more: str) -> str:
        call = [sys.executable, "-c", code, "status", str(tmp_path), *more]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=seconds(60))
        return done.stdout

    assert 'interval="auto" is' in status() and "holds training up for" in status()
    assert json.loads(status("--json"))["run"]["failures"] == 0


# -- ranks ---------------------------------------------------------------------------------------


def run_by_the_clock(root: str) -> tuple[list[int], list[int], int, str]:
    import torch.distributed as dist

    rank = dist.get_rank()
    state = {"model": torch.nn.Linear(2, 2)}
    told: list[list[int]] = []
    manager = CheckpointManager(root, interval=datetime.timedelta(seconds=0.4), timeout=seconds(60))
    waits: list[int] = []  # the steps at which this rank waited for a decision
    wait = manager._schedule._wait
    manager._schedule._wait = lambda step: (waits.append(step), wait(step))  # type: ignore
    for _ in range(2):  # the second time from a step in the midst
        due: list[int] = []
        step = manager.restore(into=state)
        while len(due) < 3:
            step += 1
            if manager.should_save(step):
                due.append(step)
                manager.save(step, state).wait()
            time.sleep((0.004, 0.006, 0.001)[rank])  # rank 2 would be ahead of rank 0
        told.append(due)
    error = ""
    if rank == 1:
        manager._schedule._timeout = 0.5
        try:
            manager.should_save(10**9)
        except PeerError as raised:
            error = str(raised)
    manager.close()
    return told[0], told[1], len(waits), error


def test_ranks_of_different_speed_save_the_same_steps(tmp_path: Path) -> None:
    answers = run_ranks(run_by_the_clock, 3, str(tmp_path))
    assert len({tuple(first) for first, *_ in answers}) == 1, answers
    assert len({tuple(second) for _, second, *_ in answers}) == 1, answers
    first, second, *_ = answers[0]
    assert first[-1] < second[0]
    assert [one.step for one in find_checkpoints(tmp_path)] == [*first, *second]
    assert answers[0][2] == 0  # the rank that decides waits for nobody
    assert "rank 0 has not come near step 1000000000" in answers[1][3]
