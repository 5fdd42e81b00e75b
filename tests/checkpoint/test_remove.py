"""Removing a checkpoint: what its manifests name goes, all else stays."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

import smckpt
from smckpt.checkpoint.commits.contents import contents_of
from smckpt.checkpoint.commits.leases import take_lease
from smckpt.checkpoint.commits.remove import pinned, remove_newest
from smckpt.checkpoint.commits.sweep import sweep
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.format import data_name, parse_name
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.checkpoint.upkeep.verify import verify_checkpoint
from smckpt.errors import (
    CheckpointNotFoundError,
    CheckpointPinnedError,
    CorruptCheckpointError,
    UsageError,
)
from smckpt.storage import Access, open_storage
from smckpt.storage.disk.directory import Directory
from tests.support import synthetic
from tests.support.faults.copies import contents, killed_at
from tests.support.saves import Group, hybrid, state_of
from tests.support.synthetic import Step, kept, on_mesh


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two steps of two groups, in the same directories."""
    mesh = hybrid((0, 1, 2, 3), 2)
    rules = [on_mesh("w", (10, 6), mesh, "R S0"), kept("step")]
    made = synthetic.state(rules, synthetic.whole({"w": (10, 6), "step": ()}))
    saver = Step(tmp_path / "step", {"part0": (0, 2), "part1": (1, 3)}, made)
    for _ in range(2):
        saver.save()
    return tmp_path / "step"


def test_the_newest_goes_the_older_and_what_is_not_ours_stays(two: Path) -> None:
    (two / "part0" / "notes.txt").write_text("not ours")
    everything, newest = contents(two), contents_of(open_storage(str(two)))
    report = remove_newest(newest.storage)
    left = contents(two)
    assert len(left) == len(everything) - report.files
    assert left.items() <= everything.items()
    assert report.left == open_catalogue(open_storage(str(two))).identity != newest.identity
    assert verify_checkpoint(str(two)).ok
    assert remove_newest(open_storage(str(two))).left is None
    assert list(contents(two)) == ["part0/notes.txt"]
    with pytest.raises(CheckpointNotFoundError):
        contents_of(open_storage(str(two)))


def test_nothing_of_its_own_is_left_and_a_lease_stays_while_it_tells_anything(two: Path) -> None:
    assert len(list(two.rglob("epoch-000002.json"))) == 3
    remove_newest(open_storage(str(two)))
    assert {path.name for path in two.rglob("epoch-*")} == {"epoch-000001.json"}
    aside = shutil.copytree(two, two.parent / "aside")
    take_lease(
        Access(), str(two / "part1"), "c" * 12, "host"
    )  # a later run, which has not saved yet
    remove_newest(open_storage(str(two)))
    assert [path.parent.name for path in two.rglob("*.json")] == ["part1"]
    assert not (two / "part0").exists()
    name = data_name("d" * 12 + "-00000000", 0, 0)
    (aside / "part1" / name).write_bytes(b"a save under way")
    take_lease(Access(), str(aside / "part0"), "e" * 12, "host")
    remove_newest(open_storage(str(aside)))
    assert [path.name for path in aside.rglob("epoch-*")] == ["epoch-000002.json"]
    assert list(contents(aside)) == [f"part1/{name}"]


def test_an_empty_directory_goes_with_it_and_no_other(two: Path, tmp_path: Path) -> None:
    for _ in range(2):
        remove_newest(open_storage(str(two)))
    assert not two.exists()
    assert tmp_path.exists()


def test_in_s3_too(two: Path, s3_root: str) -> None:
    copied = copy_checkpoint(str(two), s3_root)
    open_storage(s3_root).put("notes.txt", b"not ours")
    report = remove_newest(open_storage(s3_root))
    assert (report.files, report.left) == (copied.files, None)
    assert list(contents(s3_root)) == ["notes.txt"]
    url = f"{s3_root}/saved"
    Group(url, (0,), state=state_of(hybrid((0,), 1))).save()  # type: ignore[arg-type]
    remove_newest(open_storage(url))
    assert open_storage(url).list() == []


def test_a_removal_killed_at_any_deletion_leaves_a_whole_checkpoint_or_none(
    two: Path, tmp_path: Path
) -> None:
    newest = open_catalogue(open_storage(str(two))).identity
    for moment in itertools.count():
        place = str(shutil.copytree(two, tmp_path / f"killed-{moment}"))
        if not killed_at(moment, lambda at=place: remove_newest(open_storage(at))):
            break
        report = verify_checkpoint(place)
        assert report.ok
        assert (report.identity == newest) == (moment <= 1)  # the mark comes first
        again = remove_newest(open_storage(place))
        assert (again.identity, again.left) == (newest, verify_checkpoint(place).identity)
        assert again.left != newest
    assert moment > 8


def test_what_a_reader_has_pinned_is_not_removed(two: Path) -> None:
    newest = contents_of(open_storage(str(two)))
    with pinned(two):
        before = contents(two)
        with pytest.raises(CheckpointPinnedError, match="pin-"):
            smckpt.remove(two)
        assert contents(two) == before
    assert smckpt.remove(two).identity == newest.identity


def test_what_is_no_checkpoint_is_refused_and_left(two: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data.txt").write_text("mine")
    with pytest.raises(CheckpointNotFoundError):
        contents_of(open_storage(str(tmp_path / "other")))
    with pytest.raises(UsageError, match="one group of a step"):
        contents_of(open_storage(str(two / "part0")))


def test_a_record_that_leads_elsewhere_is_refused(two: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    from smckpt.checkpoint.records.sealed import open_json, seal_json

    for path in two.glob("record-*"):
        body = open_json(path.read_bytes(), str(path))
        for group in body["groups"]:
            group["directory"] = f"../step/{group['directory']}"
        (inner / path.name).write_bytes(seal_json(body))
    with pytest.raises((UsageError, CorruptCheckpointError)):
        contents_of(open_storage(str(inner)))


def _trace(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the files that are removed, and "sync" for a directory that is made durable."""
    done: list[str] = []
    remove, sync = Directory.remove, Directory.sync

    def removed(self: Directory, name: str) -> None:
        parsed = parse_name(name)
        done.append("?" if parsed is None else parsed.kind)
        remove(self, name)

    def synced(self: Directory) -> None:
        done.append("sync")
        sync(self)

    monkeypatch.setattr(Directory, "remove", removed)
    monkeypatch.setattr(Directory, "sync", synced)
    return done


def _assert_durable_in_order(done: list[str], syncs: int) -> None:
    """What names files is durably gone before they go."""
    first = min(at for at, kind in enumerate(done) if kind in ("part", "data", "crc"))
    last = max(at for at, kind in enumerate(done[:first]) if kind in ("record", "manifest"))
    assert done[last + 1 : first].count("sync") >= syncs
    if "record" in done:
        after = done.index("record") + 1
        assert "sync" in done[after : done.index("manifest")]


def test_a_manifest_is_durably_gone_before_its_data(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = contents_of(open_storage(str(two)))
    done = _trace(monkeypatch)
    remove_newest(newest.storage)
    assert done.count("manifest") == 2
    _assert_durable_in_order(done, 2)


def test_a_sweep_makes_the_removal_of_a_manifest_durable_too(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in ("part0", "part1"):
        done = _trace(monkeypatch)
        kept = max(path.name for path in (two / group).glob("manifest-*"))
        assert sweep(Access(), str(two / group), [kept], int(kept.split("-")[1]))
        monkeypatch.undo()
        _assert_durable_in_order(done, 1)
