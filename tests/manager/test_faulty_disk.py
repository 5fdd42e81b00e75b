"""The disk fails in a save or deletion of a manager: older steps stay, and it goes on later."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smckpt import CheckpointManager, errors, find_checkpoints, verify_checkpoint
from tests.support.faults import kernel
from tests.support.faults.kernel import Kernel
from tests.support.launch import run_ranks
from tests.support.limits import seconds

DELETES = ("unlink", "unlinkat")


def steps(root: str) -> list[Any]:
    """The steps, all of which are whole."""
    found = find_checkpoints(root)
    assert all(verify_checkpoint(one).ok for one in found)
    return [one.step for one in found]


def a_disk_fails(root: str) -> list[Any]:
    """The errors of three saves during which the disk of rank 1 fails, and what was there after
    each; then the steps while deletions fail on rank 0, and once they work again."""
    disk = Kernel("fallocate", "pwrite64", "fsync", *DELETES)
    rank, told = dist.get_rank(), []
    state: dict[str, Any] = {"model": torch.nn.Linear(300, 300)}
    manager = CheckpointManager(root, keep_last_n=1, timeout=seconds(60), signals=())
    manager.save(1, state).wait()
    faults = ((errno.ENOSPC, "fallocate"), (errno.EDQUOT, "pwrite64"), (errno.EIO, "fsync"))
    for step, (code, call) in enumerate(faults, 2):
        if rank == 1:
            disk.fail(code, call)
        dist.barrier()
        try:
            manager.save(step, state).wait()
        except errors.SaveFailedError as error:
            told.append((str(error), steps(root)))
        dist.barrier()
        disk.heal()
        dist.barrier()
    for code in (errno.EIO, errno.EROFS):
        if rank == 0:
            disk.fail(code, *DELETES)
        for step in (10 + code, 11 + code):
            manager.save(step, state).wait()
            _tidied(manager)
            dist.barrier()
        told.append(steps(root))
        dist.barrier()
        disk.heal()
        manager.save(12 + code, state).wait()
        _tidied(manager)
        dist.barrier()
        told.append(steps(root))
        dist.barrier()
    manager.close()
    return told


def _tidied(manager: CheckpointManager) -> None:
    """Wait until the keeper has done what the last commit gave it to do."""
    keeper = manager._retention
    if keeper._thread is None:
        return
    deadline = time.monotonic() + seconds(60)
    keeper._inbox.put(None)
    keeper._thread.join(seconds(60))
    assert not keeper._thread.is_alive() and time.monotonic() < deadline
    assert keeper._inbox.empty(), "the thread died before"
    keeper._thread = None


@pytest.mark.skipif(not kernel.available(), reason="no seccomp notifications for this platform")
def test_a_disk_that_fails_loses_no_step_and_what_was_not_deleted_goes_later(
    tmp_path: Path,
) -> None:
    root = str(tmp_path / "run")
    for full, quota, broken, eio, after_eio, read_only, after in run_ranks(a_disk_fails, 2, root):
        for (said, there), words in zip(
            (full, quota, broken), ("disk is full", "quota is used up", "input/output"), strict=True
        ):
            assert "rank 1" in said and words in said
            assert there == [1]
        assert eio == [1, 15, 16] and after_eio == [17]
        assert read_only == [17, 40, 41] and after == [42]
    left = {path.name: path for path in (tmp_path / "run").iterdir()}
    # Of saves that failed: what rank 0 wrote, and a probe, should rank 1 not see what it writes
    assert set(left) == {"2", "3", "4", "42"}
    names = [path.name for step in "234" for path in left[step].iterdir()]
    assert all("-r00000" in name or name.startswith("probe-") for name in names)
