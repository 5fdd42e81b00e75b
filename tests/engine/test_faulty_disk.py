"""A disk that is full, fails, is remounted or hangs in the middle of a save, and then works again.

The kernel refuses the real calls of the real processes (`tests.support.faults.kernel`); where a
test may mount, a small file system of its own is full or read-only.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smckpt
from smckpt import errors
from tests.support.faults import kernel
from tests.support.faults.kernel import HANG, Kernel
from tests.support.launch import run_ranks
from tests.support.limits import seconds

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
needs_filter = pytest.mark.skipif(
    not kernel.available(), reason="no seccomp notifications for this platform"
)
SIZE = 1 << 18  # elements of a rank: 1 MiB

# What the kernel says at which call of a save, and what the error says of it.
FAULTS = [
    (errno.ENOSPC, "fallocate", "disk is full"),
    (errno.ENOSPC, "pwrite64", "disk is full"),
    (errno.EDQUOT, "pwrite64", "disk quota is used up"),
    (errno.EIO, "pwrite64", "input/output error"),
    (errno.EIO, "fsync", "input/output error"),
    (errno.EROFS, "pwrite64", "read-only"),
    (errno.EIO, "linkat", "input/output error"),
    (errno.EROFS, "link", "read-only"),
]


def state(step: int) -> dict[str, Any]:
    return {"a": torch.full((SIZE,), float(step + 100 * dist.get_rank())), "step": step}


def begun(place: str, step: int, timeout: float = 60) -> smckpt.SaveHandle:
    options = smckpt.SaveOptions(timeout=seconds(timeout))
    handle = smckpt.async_save(state(step), checkpoint_id=place, step=step, options=options)
    assert handle is not None
    return handle


def ended(handle: smckpt.SaveHandle) -> str:
    """ "", or the error."""
    try:
        handle.wait(seconds(60))
    except errors.SaveFailedError as error:
        assert isinstance(error.__cause__, errors.CheckpointError)
        return str(error)
    return ""


def saved(place: str, step: int, timeout: float = 60) -> str:
    return ended(begun(place, step, timeout))


def loaded(place: str) -> int:
    """The step that loads; every element of it is that step's."""
    target = {"a": torch.zeros(SIZE), "step": -1}
    smckpt.load(target, checkpoint_id=place)
    step: int = target["step"]  # type: ignore[assignment]
    assert bool((target["a"] == step + 100 * dist.get_rank()).all())
    return step


def a_disk_fails(folder: str) -> list[tuple[str, int, str, int]]:
    """For each fault, on rank 1 and then on the coordinator: the error, what loads while the disk
    fails, the error of the next save, and what loads then."""
    disk = Kernel("fallocate", "pwrite64", "fsync", "link", "linkat", "renameat2")
    told = []
    place, step = f"{folder}/run", 0
    assert saved(place, step) == ""
    for code, call, _ in FAULTS:
        # the worker of rank 1 links nothing: only a coordinator creates names exclusively
        at = 0 if call.startswith("link") else 1
        if dist.get_rank() == at:
            disk.fail(code, "link", "linkat", "renameat2") if at == 0 else disk.fail(code, call)
        dist.barrier()
        said, during = saved(place, step + 1), loaded(place)
        dist.barrier()
        disk.heal()
        dist.barrier()
        again = saved(place, step + 2)
        told.append((said, during - step, again, loaded(place) - step))
        step += 2
    return told


@pytest.mark.long
@needs_filter
def test_whatever_call_fails_all_ranks_hear_it_and_the_next_save_works(tmp_path: Path) -> None:
    zero, one = run_ranks(a_disk_fails, 2, str(tmp_path))
    for (_, call, words), ours, theirs in zip(FAULTS, zero, one, strict=True):
        for said, during, again, after in (ours, theirs):
            assert words in said and str(tmp_path) in said, (call, said)
            assert (during, again, after) == (0, "", 2), call
        where = "rank 0" if call.startswith("link") else "rank 1"
        assert where in theirs[0] and where in ours[0]
    assert smckpt.verify_checkpoint(tmp_path / "run").ok
    left = {path.name.split("-")[0] for path in (tmp_path / "run").iterdir()}
    assert left == {"data", "part", "manifest", "epoch"}, "nothing else is left"
    assert len(list((tmp_path / "run").glob("data-*.safetensors"))) == 2


# -- a disk that hangs -----------------------------------------------------------------------------


def a_disk_hangs(folder: str) -> tuple[bool, str, float, list[str], int]:
    """While rank 1's worker hangs in a system call: did both train on; the error of the save, the
    seconds until it came; the errors of later saves, and what loads in the end."""
    disk = Kernel("fallocate")
    place = f"{folder}/run"
    assert saved(place, 0) == ""
    if dist.get_rank() == 1:
        disk.fail(HANG, "fallocate")
    dist.barrier()
    began = time.monotonic()
    handle = begun(place, 1, timeout=1)
    for _ in range(100):  # training goes on: steps with collectives
        dist.all_reduce(torch.ones(4))
    trained = not handle.done()
    said, took = ended(handle), time.monotonic() - began
    later = [saved(place, 2, timeout=1)]
    dist.barrier()
    disk.heal()
    dist.barrier()
    later.append(saved(place, 3))
    return trained, said, took, later, loaded(place)


@needs_filter
def test_a_worker_that_hangs_in_a_system_call_holds_no_training_up_and_is_named(
    tmp_path: Path,
) -> None:
    for trained, said, took, later, step in run_ranks(a_disk_hangs, 2, str(tmp_path)):
        assert trained
        for text in (said, later[0]):
            assert "rank 1" in text and "did not answer" in text, text
        assert took < seconds(60)
        assert later[1] == "" and step == 3
    assert smckpt.verify_checkpoint(tmp_path / "run").ok


# -- real file systems -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "none", str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=seconds(30))


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, timeout=seconds(30))


def a_real_disk(place: str) -> list[str]:
    """A save that finds the disk full on one rank; one during which it is remounted read-only; and
    one after each."""
    rank, told = dist.get_rank(), [saved(place, 0)]
    filler = f"{place}/../filler"
    if rank == 0:
        with open(filler, "wb") as file:  # room for one of the two ranks
            free = os.statvfs(place)
            file.write(bytes(free.f_bavail * free.f_frsize - SIZE * 4 - (64 << 10)))
    dist.barrier()
    told.append(saved(place, 1))
    dist.barrier()
    if rank == 0:
        os.unlink(filler)
    dist.barrier()
    told.append(saved(place, 2))
    handle = None
    if rank == 0:
        before, deadline = set(os.listdir(place)), time.monotonic() + seconds(60)
        handle = begun(place, 3)
        while not any("part-" in name for name in set(os.listdir(place)) - before):
            assert time.monotonic() < deadline  # until this rank has written its part
        mount("-o", "remount,ro", os.path.dirname(place))
    dist.barrier()
    told.append(ended(handle or begun(place, 3)))
    told.append(str(loaded(place)))
    dist.barrier()
    if rank == 0:
        mount("-o", "remount,rw", os.path.dirname(place))
    dist.barrier()
    told.append(saved(place, 4))
    told.append(str(loaded(place)))
    return told


@root_only
def test_a_disk_that_is_full_or_read_only_in_mid_save_fails_all_ranks_and_loses_nothing(
    small_disk: Path,
) -> None:
    for first, full, freed, read_only, during, again, after in run_ranks(
        a_real_disk, 2, str(small_disk / "run")
    ):
        assert (first, freed, again) == ("", "", "")
        assert "disk is full" in full and "rank" in full
        assert "rank 1" in read_only and "read-only" in read_only
        assert (during, after) == ("2", "4")
    assert smckpt.verify_checkpoint(small_disk / "run").ok
    assert len(list((small_disk / "run").glob("data-*.safetensors"))) == 2
