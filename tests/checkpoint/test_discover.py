"""Finding checkpoints: the newest complete step, whatever else lies beside it."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import smckpt
from smckpt.checkpoint.commits.discover import FoundCheckpoint, _as_text, find_checkpoints, latest
from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
from smckpt.cli.app import app
from smckpt.errors import StorageError
from smckpt.storage import open_storage
from tests.support import synthetic
from tests.support.faults.failing import failing
from tests.support.launch import run_ranks
from tests.support.saves import Group, hybrid, state_of
from tests.support.synthetic import Step, flip

MESH = hybrid((0, 1, 2, 3), 2)
GROUPS = {"part0": (0, 2), "part1": (1, 3)}


def single(directory: Path, step: int | None, session: str = "a" * 12) -> Path:
    synthetic.save(directory, (0,), state_of(hybrid((0,), 1)), session=session, step=step)
    return directory


def test_nothing_is_found_in_an_empty_root(tmp_path: Path) -> None:
    assert latest(open_storage(str(tmp_path))) is None


def test_the_highest_step_is_the_latest_whatever_was_written_last(tmp_path: Path) -> None:
    single(tmp_path / "step_30", 30)
    single(tmp_path / "step_4", 4)
    assert [found.step for found in find_checkpoints(str(tmp_path))] == [4, 30]
    assert latest(open_storage(str(tmp_path))).path == str(tmp_path / "step_30")


def test_where_one_has_no_step_the_time_of_the_commit_decides(tmp_path: Path) -> None:
    single(tmp_path / "b", 30)
    single(tmp_path / "a", None)
    assert latest(open_storage(str(tmp_path))).path == str(tmp_path / "a")


def at_times(
    root: Path, saves: list[tuple[str, str, int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves without a step: (directory, session, number, hours by the clock from now)."""
    now = time.time_ns()
    for name, session, number, hours in saves:
        monkeypatch.setattr(time, "time_ns", lambda h=hours: now + int(h * 3600e9))
        made = state_of(hybrid((0,), 1))
        numbers = itertools.count(number)
        Group(root / name, (0,), session=session * 12, state=made, numbers=numbers).save(step=None)
    monkeypatch.setattr(time, "time_ns", lambda: now)


def test_saves_of_one_session_are_in_order_though_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_times(tmp_path, [("x", "a", 0, -1), ("y", "a", 1, -2), ("z", "a", 2, -3)], monkeypatch)
    assert [found.path[-1] for found in find_checkpoints(tmp_path)] == ["x", "y", "z"]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (("b", "a", 0, 1), ("a", "b", 0, -1), "in the future"),
        (("step_10", "a", 0, -1), ("step_20", "b", 0, -2), "higher number"),
        (("step_9", "a", 0, -1), ("step_20", "b", 0, -2), "higher number"),
        (("step_10", "a", 0, -2), ("step_20", "b", 0, -1), None),
        (("b", "a", 0, -1), ("a", "b", 0, -2), None),
    ],
)
def test_an_order_of_sessions_that_no_clock_can_vouch_for_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    first: tuple[str, str, int, float],
    second: tuple[str, str, int, float],
    what: str | None,
) -> None:
    at_times(tmp_path, [first, second], monkeypatch)
    latest(open_storage(tmp_path))
    if what is None:
        assert not caplog.messages
    else:
        (warning,) = caplog.messages
        assert what in warning and "step=" in warning and first[0] in warning


def test_what_is_found_is_a_path_in_every_use(tmp_path: Path) -> None:
    place = single(tmp_path / "step_30", 30)
    found = latest(open_storage(tmp_path))
    assert isinstance(found, smckpt.FoundCheckpoint) and found.step == 30
    assert str(found) == f"{found}" == os.fspath(found) == found.path == str(place)
    assert found == str(place) and json.loads(json.dumps(found)) == str(place)
    assert Path(found) == place and os.path.join(found, "x") == str(place / "x")
    with open(found / "notes.txt", "w") as notes:
        notes.write("kept")
    assert (place / "notes.txt").read_text() == "kept"
    assert found / Path("part0") == str(place / "part0")
    assert repr(found) == f"FoundCheckpoint({str(place)!r}, step=30)"
    again = pickle.loads(pickle.dumps(found))
    assert again.to_json() == found.to_json() and again == found
    run_ranks(save_to_what_was_found, 1, str(tmp_path))
    assert [one.step for one in find_checkpoints(tmp_path)] == [32]
    assert os.listdir(tmp_path) == ["step_30"]


def save_to_what_was_found(root: str) -> None:
    smckpt.save({"step": 31}, checkpoint_id=smckpt.latest_checkpoint(root), step=31)
    assert smckpt.latest_checkpoint(root).step == 31
    smckpt.save({"step": 32}, checkpoint_id=f"{smckpt.latest_checkpoint(root)}", step=32)


def test_in_s3_too(s3_root: str) -> None:
    run_ranks(find_and_use_in_s3, 1, s3_root)


def find_and_use_in_s3(root: str) -> None:
    place, target = f"{root}/step_7", {"weights": np.zeros(3, np.float32)}
    smckpt.save({"weights": np.ones(3, np.float32)}, checkpoint_id=place)
    found = smckpt.latest_checkpoint(root)
    assert str(found) == f"{found}" == found.path == place
    assert found / "part0" == f"{place}/part0"
    smckpt.load(target, checkpoint_id=f"{found}")
    assert target["weights"].tolist() == [1, 1, 1]
    smckpt.save(target, checkpoint_id=f"{found}", step=9)
    assert [one.step for one in find_checkpoints(root)] == [9]


def test_the_text_of_a_folder_without_a_name_still_leads_to_it() -> None:
    assert _as_text("s3://b/run/step_7/") == "s3://b/run/step_7"
    assert _as_text("s3://b/run//") == "s3://b/run//"  # one slash less is another place


def test_of_one_place_the_newest_commit_is_found(tmp_path: Path) -> None:
    group = synthetic.save(tmp_path / "c", (0,), state_of(hybrid((0,), 1)))
    again = group.save()
    (found,) = find_checkpoints(str(tmp_path))
    assert (found.identity, found.number) == (again["manifest"], 1)


def test_a_step_of_several_groups_is_one_with_all_its_bytes(tmp_path: Path) -> None:
    Step(tmp_path / "s", GROUPS, state_of(MESH)).save()
    (found,) = find_checkpoints(str(tmp_path))
    assert found.path == str(tmp_path / "s") and found.groups == ("part0", "part1")
    data = (tmp_path / "s").rglob("data-*.safetensors")
    assert found.nbytes == sum(path.stat().st_size for path in data)
    assert FoundCheckpoint.from_json(found.to_json()).to_json() == found.to_json()


def test_a_group_s_directory_that_is_the_root_is_found_by_itself(tmp_path: Path) -> None:
    Step(tmp_path / "s", GROUPS, state_of(MESH)).save()
    (found,) = find_checkpoints(str(tmp_path / "s" / "part1"))
    assert found.groups in ((".",), ("",))


def test_unfinished_half_written_and_foreign_directories_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = single(tmp_path / "step_1", 1)
    Step(tmp_path / "step_2", GROUPS, state_of(MESH)).save(commit=False)  # manifests, no record
    Group(tmp_path / "step_3", (0,)).write(0)  # parts, no manifest
    (tmp_path / "step_4").mkdir()
    foreign = tmp_path / "step_5"
    foreign.mkdir()
    for name in (".metadata", "manifest-1.json", "manifest.json", "record-000001.json", "__0_0"):
        (foreign / name).write_text("{}")
    (tmp_path / "manifest-000009-00000009-aaaaaaaaaaaa.json.tmp").write_text("{")
    (tmp_path / "step_6").write_text("a file")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    found = {f.path for f in find_checkpoints(str(tmp_path)) if "loop" not in f.path}
    assert found == {str(good)}
    assert latest(open_storage(str(tmp_path))).step == 1
    assert "step_2" not in caplog.text  # a step cut short is no damage


def test_a_damaged_commit_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    single(tmp_path / "step_1", 1)
    manifest = next(single(tmp_path / "step_2", 2).glob("manifest-*"))
    flip(manifest, manifest.stat().st_size // 2)
    with caplog.at_level(logging.WARNING, "smckpt"):
        assert latest(open_storage(str(tmp_path))).step == 1
    assert str(manifest) in caplog.text


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("what", ["the directory", "its manifest"])
def test_an_older_step_is_the_latest_where_only_the_newest_cannot_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
    code: int,
) -> None:
    single(tmp_path / "step_1", 1)
    newest = single(tmp_path / "step_2", 2)
    call = "scandir" if what == "the directory" else "open"
    real = getattr(os, call)

    def failing(path: Any, *rest: Any) -> Any:
        if str(path).startswith(str(newest)):
            raise OSError(code, os.strerror(code), path)
        return real(path, *rest)

    with monkeypatch.context() as faulty:
        faulty.setattr(os, call, failing)
        if code == errno.EMFILE:  # of this process: any step would fail
            with pytest.raises(StorageError, match="step_2"):
                latest(open_storage(str(tmp_path)))
        else:
            assert latest(open_storage(str(tmp_path))).step == 1
            assert "step_2" in caplog.text
        assert [found.step for found in find_checkpoints(str(tmp_path))] == [1]
    assert latest(open_storage(str(tmp_path))).step == 2


@pytest.mark.parametrize(
    "name", ["\u00b2", "step-\u00b2", "\u0664", "\uff14", "\U0001d7d2", "9" * 255]
)
def test_digits_of_other_scripts_beside_the_steps_are_no_obstacle(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    for command in ("ls", "doctor", "status"):
        done = CliRunner().invoke(app, [command, str(tmp_path)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    made = single(tmp_path / "4", 4)
    assert [Path(one) for one in find_checkpoints(str(tmp_path))] == [made]


def test_a_directory_that_is_closed_to_this_user_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single(tmp_path / "step_1", 1)
    (tmp_path / "lost+found").mkdir()
    real = os.scandir

    def guarded(path: str) -> Any:
        if path.endswith("lost+found"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert latest(open_storage(str(tmp_path))).step == 1


def test_a_root_that_cannot_be_read_is_no_empty_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        latest(open_storage(str(tmp_path / "file")))


def test_only_so_many_levels_below_the_root_are_looked_at(tmp_path: Path) -> None:
    single(tmp_path / "a" / "b", 1)
    assert len(find_checkpoints(str(tmp_path), depth=2)) == 1
    assert find_checkpoints(str(tmp_path), depth=1) == []


@pytest.mark.parametrize("above", ["", "linked"])
def test_a_link_beside_a_step_is_no_other_checkpoint(tmp_path: Path, above: str) -> None:
    root = tmp_path / "runs"
    for step in (1, 2):
        Group(root / str(step), (0, 1), session=f"{step:012x}").save(step=step)
    (root / "latest").symlink_to("2")
    (root / "1st").symlink_to(root / "1")
    Group(tmp_path / "elsewhere", (0, 1), session="e" * 12).save(step=3)
    (root / "archived").symlink_to(tmp_path / "elsewhere")
    if above:
        (tmp_path / above).symlink_to(root)
        root = tmp_path / above
    found = find_checkpoints(root)
    assert [Path(one).name for one in found] == ["1", "2", "archived"]


def test_a_listing_that_fails_for_a_moment_costs_no_checkpoint(tmp_path: Path) -> None:
    single(tmp_path / "1", 1)
    with failing("scandir", errno.EIO, tmp_path / "1", times=1) as met:
        assert [found.step for found in find_checkpoints(str(tmp_path))] == [1]
    assert met


def test_the_newest_step_of_a_run_is_found_without_a_look_at_the_others(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        single(tmp_path / f"step-{step}", step)
    next((tmp_path / "step-3").glob("manifest-*")).write_bytes(b"damaged")
    with failing("open", errno.EIO, tmp_path / "step-1") as met:
        found = RunDirectory(open_storage(str(tmp_path)), Template("step-{step}")).newest()
    assert found is not None and found.step == 2 and not met
