"""Places where a checkpoint cannot be: full, read-only, not shared, too little memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smckpt
from smckpt import errors
from smckpt.engine.saving.commit import Committer
from tests.support import child
from tests.support.faults import refuse
from tests.support.launch import run_ranks
from tests.support.limits import seconds

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    command(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)])
    yield place
    command(["umount", "-l", str(place)])


def command(words: list[str]) -> None:
    subprocess.run(words, check=True, timeout=seconds(30))


def value_at(place: Path, numel: int) -> float:
    target = {"a": torch.zeros(numel)}
    smckpt.load(target, checkpoint_id=place)
    return float(target["a"][-1])


@root_only
def test_a_full_disk_fails_the_save_and_keeps_the_checkpoint_before(small_disk: Path) -> None:
    smckpt.save({"a": torch.full((1000,), 1.0)}, checkpoint_id=small_disk / "c")
    with pytest.raises(errors.SaveFailedError, match="space") as caught:
        smckpt.save({"a": torch.full((4 << 20,), 2.0)}, checkpoint_id=small_disk / "c")
    assert isinstance(caught.value.__cause__, errors.StorageError)
    assert str(small_disk) in str(caught.value)
    assert value_at(small_disk / "c", 1000) == 1
    # What the failed save wrote is gone, so the next one fits.
    smckpt.save({"a": torch.full((1000,), 3.0)}, checkpoint_id=small_disk / "c")
    assert value_at(small_disk / "c", 1000) == 3


@root_only
def test_a_read_only_file_system_fails_the_save_with_the_path(small_disk: Path) -> None:
    smckpt.save({"a": torch.ones(10)}, checkpoint_id=small_disk / "c")
    command(["mount", "-o", "remount,ro", str(small_disk)])
    with pytest.raises(errors.SaveFailedError, match="read-only"):
        smckpt.save({"a": torch.ones(10)}, checkpoint_id=small_disk / "c")
    assert value_at(small_disk / "c", 10) == 1


@pytest.mark.skipif(not refuse.available(), reason="no seccomp filter for this platform")
def test_a_mount_that_cannot_create_exclusively_commits_nothing_and_says_so(tmp_path: Path) -> None:
    out = child.run(
        """
        import errno, sys
        import torch, smckpt
        from tests.support.faults import refuse
        place = sys.argv[1]
        refuse.refuse({"link": errno.EPERM, "linkat": errno.EPERM, "renameat2": errno.EINVAL})
        smckpt.save({"a": torch.ones(10)}, checkpoint_id=place)  # under a guard file
        refuse.refuse({"rename": errno.ENOSYS, "renameat": errno.ENOSYS})
        anew = smckpt.SaveOptions(queue="with a new worker")
        try:
            smckpt.save({"a": torch.zeros(10)}, checkpoint_id=place, options=anew)
        except smckpt.SaveFailedError as error:
            print(type(error.__cause__).__name__, error)
        """,
        str(tmp_path),
        timeout=100,
    )
    assert out.startswith("StorageError")
    assert "cannot create exclusively" in out and "save to another file system" in out
    assert len(list(tmp_path.glob("manifest-*"))) == 1
    assert value_at(tmp_path, 10) == 1


def one_host_sees_another_directory(folder: str) -> tuple[list[str], list[str]]:
    """What two saves tell; the data files that this host has."""
    if dist.get_rank() == 1:  # a host of its own: another file system is mounted there
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNS
        command(["mount", "--make-rprivate", "/"])
        command(["mount", "-t", "tmpfs", "none", folder])
    found = []
    for step in (1, 2):
        try:
            smckpt.save({"a": torch.ones(10)}, checkpoint_id=f"{folder}/{step}")
            found.append("committed")
        except errors.SaveFailedError as error:
            found.append(str(error))
    return found, [str(path) for path in Path(folder).rglob("data-*")]


@root_only
def test_a_path_that_is_not_shared_is_refused_on_all_hosts_and_the_blind_one_writes_nothing(
    tmp_path: Path,
) -> None:
    (seeing, _), (blind, files) = run_ranks(one_host_sees_another_directory, 2, str(tmp_path))
    for text in seeing + blind:
        assert "not shared" in text
        assert os.uname().nodename in text
    assert not files
    assert not list(tmp_path.rglob("manifest-*"))


def looks(folder: str, first: str) -> list[str]:
    """What saves below two directories tell; rank 1 does not see the first one at first."""
    look, looked = Committer._look, []

    def late(self: Any, *arguments: Any, create: bool, **more: Any) -> Any:
        seen = look(self, *arguments, create=create, **more)
        looked.append(create)
        if create or looked.count(False) > 2:
            return seen
        if first == "is blind, and the step is deleted" and looked.count(False) == 2:
            shutil.rmtree(f"{folder}/one/1")
        if first == "fails":
            raise errors.StorageError("an input or output error", remedy="look at the mount")
        return False

    Committer._look = late  # type: ignore[method-assign]
    found = []
    for directory in ("one/1", "one/2", "two/1", "one/3"):
        try:
            smckpt.save({"a": torch.ones(10)}, checkpoint_id=f"{folder}/{directory}")
            found.append("committed")
        except errors.SaveFailedError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("first", ["fails", "is blind", "is blind, and the step is deleted"])
def test_a_host_looks_again_in_each_save_until_it_sees_the_directory(
    tmp_path: Path, first: str
) -> None:
    for found in run_ranks(looks, 2, str(tmp_path), first):
        for number, text in enumerate(found[:2], 1):
            assert ("input or output" if first == "fails" else "not shared") in text
            assert first == "fails" or f"{tmp_path}/one/{number}" in text
        assert found[2:] == ["committed"] * 2


def test_arenas_that_do_not_fit_the_memory_of_the_host_are_refused_with_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    with pytest.raises(errors.MemoryBudgetError, match="1000000|1,000,000"):
        smckpt.save(
            {"a": torch.ones(4 << 20)},
            checkpoint_id=tmp_path,
            options=smckpt.SaveOptions(queue="greedy"),
        )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    smckpt.save(
        {"a": torch.ones(4 << 20)},
        checkpoint_id=tmp_path,
        options=smckpt.SaveOptions(queue="greedy"),
    )


# -- later runs and zombies -------------------------------------------------------------------


def test_a_zombie_of_an_earlier_run_cannot_commit_over_a_later_one(tmp_path: Path) -> None:
    """Two runs of one job on one directory: the queue that took its lease first is fenced."""

    def save(run: str, value: float) -> Any:
        return smckpt.save(
            {"a": torch.full((1000,), value)},
            checkpoint_id=tmp_path,
            options=smckpt.SaveOptions(queue=run),
        )

    save("zombie", 1.0)
    save("successor", 2.0)
    with pytest.raises(errors.SaveFailedError, match="later"):
        save("zombie", 3.0)
    assert value_at(tmp_path, 1000) == 2
    save("successor", 4.0)
    assert value_at(tmp_path, 1000) == 4
