"""Attempts that ended before they committed anything are failures of the run too."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import smckpt
from smckpt.checkpoint.records.format import ATTEMPTS, probe_name
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.cli.app import app
from smckpt.integrations.replaced import keep_last, run_directory
from smckpt.manager.manager import CheckpointManager
from smckpt.manager.record import mark_of
from smckpt.storage import open_storage
from tests.support.launch import run_ranks


def begun(root: str, **more: Any) -> tuple[CheckpointManager, int, dict[str, Any]]:
    """An attempt that has ended its first step, and noted itself."""
    state = {"model": torch.nn.Linear(2, 2)}
    manager = CheckpointManager(root, signals=(), **more)
    step = manager.restore(into=state) + 1
    manager.should_save(step)
    for thread in threading.enumerate():
        if thread.name == "smckpt-attempt":
            thread.join()
    if dist.is_initialized():
        dist.barrier()
    return manager, step, state


def killed(root: str, saves: bool) -> None:
    manager, step, state = begun(root, interval="auto")
    if saves:
        manager.save(step, state).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def status(root: str) -> tuple[int, str]:
    shown = [CliRunner().invoke(app, ["status", root, *more]) for more in (["--json"], [])]
    run = json.loads(shown[0].output)["run"]
    return 0 if run is None else run["failures"], shown[1].output


@pytest.mark.parametrize("store", ["disk", pytest.param("s3", marks=pytest.mark.long)])
def test_each_killed_attempt_is_counted(
    tmp_path: Path, request: pytest.FixtureRequest, store: str
) -> None:
    root = str(tmp_path / "run") if store == "disk" else request.getfixturevalue("s3_root")
    kills, last = 0, 0
    lives = [(2, False), (1, True), (1, False)]
    for world, saves in lives if store == "disk" else [*lives, *lives[::-1]]:
        run_ranks(killed, world, root, saves, killed=tuple(range(world)))
        kills += 1
        failures, text = status(root)
        # whether one that has committed goes on, nobody can see from its files
        assert failures == kills - saves, (kills, text)
        assert f"{failures} failure" in text
        assert len([*smckpt.find_checkpoints(root)]) == (last := last + saves)
    manager, step, state = begun(root, interval="auto")
    assert status(root)[0] == kills, "this attempt is alive"
    with manager:
        assert manager._schedule.history().failures == kills
        manager.save(step, state).wait()
    newest = smckpt.find_checkpoints(root)[-1]
    assert newest.metadata["manager"]["failures"] == kills
    assert status(root)[0] == kills
    assert ATTEMPTS not in open_storage(root).names()


def test_the_file_goes_with_its_step_and_with_the_first_commit(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, signals=()) as manager:
        manager.save(1, {"model": torch.nn.Linear(2, 2)}).wait()
    one = tmp_path / "1"
    first, *_ = begun(str(tmp_path))
    before = {path.name for path in one.iterdir()}
    assert ATTEMPTS in before and smckpt.verify_checkpoint(one).ok
    copy_checkpoint(one, tmp_path / "copies" / "1")
    assert {path.name for path in (tmp_path / "copies" / "1").iterdir()} <= before - {ATTEMPTS}
    second, step, state = begun(str(tmp_path), keep_last_n=1)
    body = json.loads((one / ATTEMPTS).read_text())["body"]
    assert body["count"] == 2 and len([*tmp_path.rglob(ATTEMPTS)]) == 1
    with first, second:
        second.save(step, state).wait()
    assert [path.name for path in tmp_path.iterdir() if path.name != "copies"] == ["2"]
    begun(str(tmp_path))[0].close()
    assert (tmp_path / "2" / ATTEMPTS).exists()
    smckpt.remove(tmp_path / "2")
    assert not (tmp_path / "2").exists()


def test_what_an_attempt_left_that_was_killed_as_it_committed_the_first_step_goes_too(
    tmp_path: Path,
) -> None:
    manager, step, state = begun(str(tmp_path))
    left = (tmp_path / ATTEMPTS).read_bytes()
    with manager:
        manager.save(step, state).wait()
    (tmp_path / ATTEMPTS).write_bytes(left)
    manager, step, state = begun(str(tmp_path), keep_last_n=1)
    with manager:
        assert (step, status(str(tmp_path))[0]) == (2, 1)
        manager.save(step, state).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


@pytest.mark.parametrize("what", ["a directory", "damaged", "of another commit"])
def test_a_file_that_cannot_be_used_costs_the_count_alone(tmp_path: Path, what: str) -> None:
    with CheckpointManager(tmp_path, signals=()) as manager:
        manager.save(1, {"model": torch.nn.Linear(2, 2)}).wait()
    place = tmp_path / "1" / ATTEMPTS
    if what == "a directory":
        place.mkdir()
    else:
        begun(str(tmp_path))[0].close()
        data = place.read_bytes()
        place.write_bytes(data[:-9] if what == "damaged" else data)
    if what == "of another commit":
        with CheckpointManager(tmp_path, signals=()) as manager:
            manager._retention.run = mark_of(smckpt.find_checkpoints(tmp_path)[0]) or ""
            manager.save(1, {"model": torch.nn.Linear(2, 2)}).wait()
        place.write_bytes(data)
    manager, step, state = begun(str(tmp_path))
    with manager:
        assert manager._schedule.history().failures == 1
        manager.save(step, state).wait()
    assert status(str(tmp_path))[0] == 1


# -- what a killed save has left in a step that is never saved again -------------------------------


def tried(root: str, *ways: str) -> None:
    for number, way in enumerate(ways):
        open_storage(root).join(way).put(probe_name(f"{number:012x}"), b"{}")


def test_doors_of_frameworks_remove_what_a_killed_save_tried(tmp_path: Path) -> None:
    tried(str(tmp_path), "step-2", "step-4", "step-9", "elsewhere", "step-3")
    (tmp_path / "step-3" / "data").touch()
    keep_last(run_directory(str(tmp_path), "step-{step}", {}), 1, 6)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["elsewhere", "step-3", "step-9"]
