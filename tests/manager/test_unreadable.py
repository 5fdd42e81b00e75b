"""A step that the store cannot read costs itself: older steps are restored, the others are tidied,
every command goes on. A store that cannot be read at all is no empty one."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from smckpt import (
    CheckpointManager,
    StorageError,
    errors,
    find_checkpoints,
    latest_checkpoint,
    verify_checkpoint,
)
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
from smckpt.cli.app import app
from smckpt.manager.doctor import examine
from smckpt.storage import Storage, open_storage
from tests.support.faults.failing import failing
from tests.support.launch import run_ranks
from tests.support.limits import seconds

FILES = ("manifest-*", "part-*", "data-*.safetensors", "data-*.crc")


def state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((5,), float(value))}, "n": int(value)}


def manager(root: Path | str, **options: Any) -> CheckpointManager:
    options = {"keep_last_n": None, "timeout": seconds(60), **options}
    return CheckpointManager(str(root), random=False, signals=(), **options)


def saved(root: Path | str, *steps: int, **options: Any) -> None:
    with manager(root, **options) as ours:
        for step in steps:
            ours.save(step, state(step)).wait()


def restored(root: Path | str, **options: Any) -> tuple[int, float, int]:
    into = state()
    with manager(root, **options) as ours:
        step = ours.restore(into)
    return step, float(into["model"]["w"][0]), into["n"]


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("open", errno.EIO), ("preadv", errno.EIO), ("preadv", errno.ESTALE),
        ("open", errno.EACCES), ("open", errno.ELOOP), ("open", errno.EUCLEAN),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_costs_its_step(
    tmp_path: Path, what: str, call: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    (target,) = (tmp_path / "2").glob(what)
    with caplog.at_level(logging.WARNING, "smckpt"), failing(call, code, target) as met:
        assert restored(tmp_path) == (1, 1.0, 1)
    assert met
    lost = [r.getMessage() for r in caplog.records if "restored step 1" in r.getMessage()]
    assert len(lost) == 1 and str(target) in lost[0] and "lost: step 2" in lost[0]


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("made", ["loop", "directory", "pipe", "socket's parent"])
def test_what_stands_in_the_place_of_a_file_costs_its_step(
    tmp_path: Path, what: str, made: str
) -> None:
    saved(tmp_path, 1, 2)
    (target,) = (tmp_path / "2").glob(what)
    target.unlink()
    if made == "loop":
        target.symlink_to(target.name)
    elif made == "directory":
        target.mkdir()
    elif made == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(tmp_path / "1" / next((tmp_path / "1").iterdir()).name / "below")
    assert restored(tmp_path) == (1, 1.0, 1)


@pytest.mark.parametrize("made", ["file", "loop", "dangling"])
def test_what_stands_in_the_place_of_a_step_costs_that_step_and_the_log_says_so(
    tmp_path: Path, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1)
    step = tmp_path / "2"
    if made == "file":
        step.write_text("")
    else:
        step.symlink_to("2" if made == "loop" else "nowhere")
    with caplog.at_level(logging.WARNING, "smckpt"):
        assert restored(tmp_path) == (1, 1.0, 1)
    assert "lost: step 2" in caplog.text


def test_a_read_that_fails_once_loses_no_step(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for what in FILES:
        (target,) = (tmp_path / "2").glob(what)
        with failing("preadv", errno.EIO, target, times=1) as met:
            assert restored(tmp_path) == (2, 2.0, 2), what
        assert met, what
        with failing("preadv", errno.EIO, target, times=1):
            newest = latest_checkpoint(tmp_path)
            assert newest is not None and newest.step == 2, what


@pytest.mark.parametrize(
    ("call", "code"), [("open", errno.EMFILE), ("open", errno.ETIMEDOUT), ("preadv", errno.ENOMEM)]
)
def test_a_fault_of_the_process_or_the_whole_store_costs_no_step(
    tmp_path: Path, call: str, code: int
) -> None:
    saved(tmp_path, 1, 2)
    for what in FILES:
        (target,) = (tmp_path / "2").glob(what)
        with failing(call, code, target) as met, pytest.raises(StorageError):
            restored(tmp_path)
        assert met, what
        assert restored(tmp_path) == (2, 2.0, 2)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ELOOP])
def test_a_store_that_reads_no_step_is_no_empty_store(tmp_path: Path, code: int) -> None:
    saved(tmp_path, 1, 2)
    for call in ("scandir", "open"):
        with failing(call, code, tmp_path), pytest.raises(StorageError):
            restored(tmp_path)
        with failing(call, code, tmp_path), pytest.raises(StorageError):
            latest_checkpoint(tmp_path)
        with (
            failing(call, code, tmp_path),
            pytest.raises(StorageError),
            manager(tmp_path) as ours,
        ):
            ours.latest()
    assert restored(tmp_path) == (2, 2.0, 2)


def test_a_directory_of_steps_that_cannot_be_listed_costs_what_is_below_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(f"{tmp_path}/{{epoch}}/{{step}}") as ours:
        for epoch, step in ((1, 1), (2, 2)):
            ours.save(step, state(step), epoch=epoch).wait()
    with (
        caplog.at_level(logging.WARNING, "smckpt"),
        failing("scandir", errno.EIO, tmp_path / "2"),
    ):
        assert restored(f"{tmp_path}/{{epoch}}/{{step}}") == (1, 1.0, 1)
    assert "lost: what is below 2" in caplog.text


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "scandir"])
def test_retention_goes_on_beside_a_step_that_cannot_be_read(
    tmp_path: Path, call: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1)
    (manifest,) = (tmp_path / "1").glob("manifest-*")
    where = manifest if call == "open" else tmp_path / "1"
    with (
        caplog.at_level(logging.WARNING, "smckpt"),
        failing(call, code, where),
        manager(tmp_path, keep_last_n=1) as ours,
    ):
        for step in (2, 3, 4, 5):
            ours.save(step, state(step)).wait()
        _tidied(ours)
        assert [one.step for one in ours.all()] == [5]
        assert [one.step for one in ours.all()] == [5]
    assert sorted(os.listdir(tmp_path)) == ["1", "5"]
    passed = [r.getMessage() for r in caplog.records if "passed over" in r.getMessage()]
    assert len(passed) == 1 and "step 1" in passed[0] and str(where) in passed[0]
    assert all(verify_checkpoint(one).ok for one in find_checkpoints(tmp_path))


def test_the_only_step_that_can_be_read_is_never_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with manager(tmp_path, keep_last_n=1) as ours:
        ours.save(2, state(2)).wait()
        _tidied(ours)
        with contextlib.ExitStack() as faults:
            for step in (3, 4):
                faults.enter_context(failing("open", errno.EIO, tmp_path / str(step)))
            for step in (3, 4):
                with contextlib.suppress(errors.SaveFailedError):
                    ours.save(step, state(step)).wait()
            _tidied(ours)
            assert "2" in os.listdir(tmp_path)
    assert verify_checkpoint(tmp_path / "2").ok


def _tidied(ours: CheckpointManager) -> None:
    """Wait until the keeper has done what the last commit gave it to do."""
    keeper = ours._retention
    if keeper._thread is not None:
        keeper._inbox.put(None)
        keeper._thread.join(seconds(60))
        assert not keeper._thread.is_alive()
        keeper._thread = None


@pytest.mark.parametrize("call", ["open", "scandir"])
def test_every_command_goes_on_beside_a_step_that_cannot_be_read(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2, 3)
    (manifest,) = (tmp_path / "2").glob("manifest-*")
    where = manifest if call == "open" else tmp_path / "2"
    with failing(call, errno.EIO, where):
        assert [one.step for one in find_checkpoints(tmp_path)] == [1, 3]
        newest = latest_checkpoint(tmp_path)
        assert newest is not None and newest.step == 3
        told = {one.place: one for one in examine(open_storage(str(tmp_path)))}
        assert {place: one.state for place, one in told.items()} == {
            "1": "whole", "2": "damaged", "3": "whole",
        }  # fmt: skip
        assert str(where) in told["2"].why
        for command in ("ls", "doctor", "status"):
            done = CliRunner().invoke(app, [command, str(tmp_path), "--json"])
            assert done.exit_code in (0, 1) and json.loads(done.stdout), (command, done)
        done = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep-last", "1", "--yes"])
        assert done.exit_code == 0, done.output
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]


def a_rank_that_cannot_read(root: str, what: str, code: int) -> Any:
    """What each of two ranks restores while rank 1 cannot read a file of the newest step."""
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 4)
    ours = CheckpointManager(root, keep_last_n=None, timeout=seconds(60), signals=())
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        ours.save(step, {"model": model}).wait()
    with contextlib.ExitStack() as faults:
        for target in Path(root, "2").glob(what) if rank == 1 else ():
            faults.enter_context(failing("open", code, target))
        try:
            step = ours.restore({"model": model})
        except errors.CheckpointError as error:
            return type(error).__name__
    value = float(model.weight[0, 0])
    ours.close()
    return step, value


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_all_ranks_take_the_older_step_where_one_rank_cannot_read(
    tmp_path: Path, what: str, code: int
) -> None:
    # rank 0 reads the manifests for all, so rank 1 does without them
    taken = (2, 2.0) if what == "manifest-*" else (1, 1.0)
    assert run_ranks(a_rank_that_cannot_read, 2, str(tmp_path), what, code) == [taken] * 2


def test_no_rank_takes_an_older_step_where_one_rank_has_no_descriptors(tmp_path: Path) -> None:
    told = run_ranks(a_rank_that_cannot_read, 2, str(tmp_path), "part-*", errno.EMFILE)
    assert told == ["StorageError"] * 2


def test_a_save_that_begins_while_steps_are_listed_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    root = open_storage(tmp_path)
    real = type(root).names

    def names(self: Storage, *prefixes: str, **kinds: bool) -> Sequence[str]:
        (tmp_path / "2").mkdir(exist_ok=True)  # after the directories were listed
        return real(self, *prefixes, **kinds)

    monkeypatch.setattr(type(root), "names", names)
    found = [*RunDirectory(root, Template("{step}")).newest_first()]
    assert [one.step for one in found] == [1] and isinstance(found[0], FoundCheckpoint)
