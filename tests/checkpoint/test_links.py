"""Links, pipes and devices under names of a checkpoint: nothing follows, waits or deletes there."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import smckpt
from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.contents import contents_of, what_is_missing
from smckpt.checkpoint.commits.discover import find_checkpoints
from smckpt.checkpoint.commits.remove import remove_newest
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.upkeep.repair import RepairReport, repair_checkpoint
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import CheckpointError, CorruptCheckpointError, UsageError
from smckpt.manager.doctor import examine
from smckpt.storage import Access
from smckpt.storage.budget import Spread
from smckpt.storage.disk import directory
from tests.support.faults.copies import contents
from tests.support.limits import seconds, within
from tests.support.saves import Group, hybrid, state_of
from tests.support.synthetic import Step

GROUPS = {"deep/part0": (0, 2), "part1": (1, 3)}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    Step(tmp_path / "run", GROUPS, state_of(hybrid((0, 1, 2, 3), 2))).save()
    return tmp_path / "run"


@pytest.mark.parametrize("link", ["part1", "deep"])
def test_a_removal_follows_no_link_to_somebody_else_s_checkpoint(step: Path, link: str) -> None:
    theirs = step.parent / "theirs"
    (step / link).rename(theirs)
    (step / link).symlink_to(theirs)
    before = contents(step.parent)
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        remove_newest(Access().open(str(step)))
    assert contents(step.parent) == before


def test_the_directory_that_is_named_may_be_a_link(step: Path) -> None:
    link = step.parent / "latest"
    link.symlink_to(step)
    remove_newest(Access().open(str(link)))
    assert not list(step.rglob("*-*"))


def test_a_removal_follows_no_link_under_the_name_of_a_prefix(tmp_path: Path) -> None:
    spread = Spread(1, 2)
    Group(tmp_path / "here" / "run", (0, 1), spread=spread).save()
    (tmp_path / "here" / "00-smckpt").rename(tmp_path / "theirs")
    (tmp_path / "here" / "00-smckpt").symlink_to(tmp_path / "theirs")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="symbolic link"):
        remove_newest(Access().open(str(tmp_path / "here" / "run")))
    assert contents(tmp_path) == before


def test_a_copy_writes_through_no_link(step: Path, tmp_path: Path) -> None:
    theirs, target = tmp_path / "theirs", tmp_path / "copy"
    theirs.mkdir()
    target.mkdir()
    (target / "part1").symlink_to(theirs)
    with pytest.raises(UsageError, match="symbolic link"):
        copy_checkpoint(str(step), str(target))
    assert not list(theirs.iterdir())


def test_every_verb_that_writes_or_deletes_holds_it(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_bytes(b"theirs")
    (tmp_path / "theirs" / f".file.{'0' * 16}.tmp").write_bytes(b"theirs")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "sub").symlink_to(tmp_path / "theirs")
    there = Access().open(str(tmp_path / "run")).join("sub")
    verbs: list[Callable[[], object]] = [
        lambda: there.delete("file"),
        lambda: there.discard_unfinished(["file"]),
        lambda: there.put("new", b""),
        lambda: there.put_exclusive("new", b""),
        lambda: there.create_file("file", 1, replace=True),
        lambda: there.remove_directory(),
        lambda: there.join("deeper").put("new", b""),
    ]
    before = contents(tmp_path)
    for verb in verbs:
        with pytest.raises(UsageError, match="symbolic link"):
            verb()
    assert contents(tmp_path) == before and there.read("file") == b"theirs"


# -- reads ---------------------------------------------------------------------------------------


def readers(root: Path) -> dict[str, Callable[[], object]]:
    """Everything that reads a whole checkpoint; each raises, or returns what it found wrong."""
    here = Access().open(str(root))

    return {
        "load": lambda: smckpt.load(None, checkpoint_id=str(root)) and "",
        "verify": lambda: [(p.path, p.what) for p in verify_checkpoint(str(root)).problems],
        "quick": lambda: [
            (p.path, p.what) for p in verify_checkpoint(str(root), quick=True).problems
        ],
        "sizes": lambda: what_is_missing(here),
        "copy": lambda: copy_checkpoint(str(root), str(root.parent / "copied")) and "",
        "repair": lambda: repaired(repair_checkpoint(str(root), dry_run=True)),
    }


def repaired(report: RepairReport) -> str:
    found = [one.path for one in (*report.left, *report.mended)]
    return " ".join([*found, report.committed or str(report.commits or "")])


@pytest.fixture(params=["openat2", "one by one"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one by one":
        monkeypatch.setattr(directory, "open_beneath", lambda *_: None)


def refusal(read: Callable[[], object]) -> str:
    try:
        return str(read() or "")
    except CheckpointError as error:
        assert error.remedy
        return str(error)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("what", ["record-*", "deep", "deep/part0", "part1", *(
    f"part1/{name}" for name in ("manifest-*", "part-*", "*.crc", "*.safetensors")
)])  # fmt: skip
def test_below_a_checkpoint_nothing_is_read_through_a_link(step: Path, what: str) -> None:
    assert [refusal(read) for read in readers(step).values()] == [""] * 6
    shutil.rmtree(step.parent / "copied")
    path = next(step.glob(what))
    theirs = step.parent / "theirs"
    path.rename(theirs)  # the very same bytes
    path.symlink_to(theirs)
    for reader, read in readers(step).items():
        found = refusal(read)
        if (reader, path.name[:4]) in (("load", "part"), ("repair", "reco")):
            continue  # a load of one process reads one part; a record can be made anew
        assert path.name in found, (reader, found)
        assert "link" in found or reader in ("sizes", "repair"), (reader, found)
    assert not list((step.parent / "copied").rglob("record-*"))  # so no copy counts
    if what in ("deep", "part1"):  # a group alone, from the step's directory on
        group = next(p for p in (step / what, step / what / "part0") if any(p.glob("part-*")))
        assert "link" in refusal(lambda: open_catalogue(Access().open(str(group))))


def test_the_user_s_links_to_a_checkpoint_are_followed(step: Path, tmp_path: Path) -> None:
    """The root may be a link, and a step in it: `latest`, or one that was moved to another disk."""
    (tmp_path / "archive").mkdir()
    Group(tmp_path / "archive" / "old", (0, 1)).save(step=1)
    root = tmp_path / "runs" / "it"
    root.mkdir(parents=True)
    step.rename(root / "step-20")
    (root / "latest").symlink_to("step-20")
    (root / "step-1").symlink_to(tmp_path / "archive" / "old")
    (tmp_path / "link").symlink_to(root)
    for run in (root, tmp_path / "link"):
        found = find_checkpoints(str(run))
        assert {one.rpartition("/")[2] for one in found} == {"step-1", "step-20"}
        for place in (*map(Path, found), run / "latest"):
            assert [refusal(read) for read in readers(place).values()] == [""] * 6
            shutil.rmtree(place.parent / "copied")
        assert {"step-1", "step-20"} <= {one.place for one in examine(Access().open(str(run)), 2)}


# -- what is no file -----------------------------------------------------------------------------


def a_socket(path: Path) -> None:
    where = os.getcwd()
    os.chdir(path.parent)  # its path may be longer than sockets take
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(where)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "pipe": lambda path: os.mkfifo(path),
    "socket": a_socket,
    "directory": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/ptmx"),
}


@pytest.mark.parametrize("what", INSTEAD)
@pytest.mark.parametrize("name", ["part-*", "*.crc", "*.safetensors", "manifest-*"])
def test_what_is_no_file_is_refused_at_once(step: Path, what: str, name: str) -> None:
    whole = shutil.copytree(step, step.parent / "whole")
    path = next((step / "part1").glob(name))
    path.unlink()
    INSTEAD[what](path)
    with within(seconds(30)):
        report = verify_checkpoint(str(step))
        assert not report.ok
        assert any(path.name in problem.path for problem in report.problems), report.problems
        with pytest.raises(CheckpointError) as caught:
            copy_checkpoint(str(step), str(step.parent / "copy"))
        assert caught.value.path and caught.value.remedy
        if name == "manifest-*":
            with pytest.raises(CheckpointError):
                choose_commit(Access().open(str(step)))
    target = step.parent / "target"  # nor is it taken for what a copy left, where it shall go
    shutil.copytree(whole, target)
    there = target / "part1" / path.name
    there.unlink()
    INSTEAD[what](there)
    with within(seconds(30)):
        try:
            copy_checkpoint(str(whole), str(target))
        except CheckpointError as error:
            assert error.path and error.remedy


@pytest.mark.parametrize("what", INSTEAD)
def test_a_read_that_asks_no_size_refuses_it_too(tmp_path: Path, what: str) -> None:
    INSTEAD[what](tmp_path / "file")
    with within(seconds(30)), pytest.raises(CheckpointError) as caught:
        Access().open(str(tmp_path)).read("file", 0, 8)
    assert caught.value.path == str(tmp_path / "file")


NO_COMMIT: dict[str, Callable[[Path], object]] = {
    **INSTEAD,
    "link that leads nowhere": lambda path: path.symlink_to("nowhere"),
    "link in a circle": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("what", NO_COMMIT)
@pytest.mark.parametrize("kind", ["record", "manifest"])
def test_no_older_commit_is_taken_where_something_else_has_the_newest_name(
    tmp_path: Path, kind: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    made = state_of(hybrid((0, 1, 2, 3), 2))
    saves = Step(run, GROUPS, made) if kind == "record" else Group(run, (0, 1, 2, 3), state=made)
    saves.save()
    saves.save()
    *_, newest = sorted(run.glob(f"{kind}-*"))
    newest.unlink()
    NO_COMMIT[what](newest)
    here = Access().open(str(run))
    with within(seconds(30)):
        for choose in (lambda: choose_commit(here), lambda: contents_of(here)):
            with pytest.raises(CheckpointError) as caught:
                choose()
            assert caught.value.path == str(newest) and caught.value.remedy
        assert find_checkpoints(str(tmp_path)) == [] and newest.name in caplog.text
