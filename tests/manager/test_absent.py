"""Ranks that come late, or not at all: the others name them in time, and go on with them later."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smckpt
from smckpt import CheckpointManager, errors
from tests.support.launch import run_ranks
from tests.support.limits import seconds

TIMEOUT = 1.0


def called(call: str, root: str, manager: CheckpointManager) -> str:
    """ "", or the error of the call on this rank."""
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    try:
        if call == "load":
            target = {"a": torch.zeros(4)}
            smckpt.load(
                target,
                checkpoint_id=f"{root}/plain",
                options=smckpt.LoadOptions(timeout=seconds(TIMEOUT)),
            )
        elif call == "restore":
            manager.restore(into=state)
        elif call == "save":
            manager.save(7, state).wait(seconds(60))
        else:
            manager.all()
    except errors.CheckpointError as error:
        return f"{error}, from {type(error.__cause__).__name__}"
    return ""


def one_comes_late(root: str, call: str, known: bool) -> tuple[str, float, str]:
    """The error of the call for which rank 1 comes too late, the seconds until it came, and the
    error of the same call, for which all come.

    Args:
        known: the ranks have met before.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    smckpt.save({"a": torch.ones(4)}, checkpoint_id=f"{root}/plain")
    manager = CheckpointManager(root, timeout=seconds(TIMEOUT), signals=())
    if known:
        assert manager.all() == []
        smckpt.load({"a": torch.zeros(4)}, checkpoint_id=f"{root}/plain")
    dist.barrier()
    if rank == 1:
        store.wait(["given up 0", "given up 2"])
    began = time.monotonic()
    said = called(call, root, manager)
    took = time.monotonic() - began
    store.set(f"given up {rank}", "yes")
    dist.barrier()
    again = called(call, root, manager)
    dist.barrier()
    manager._end(0)  # a failure of a save is told above
    return said, took, again


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "call", ["save", *(pytest.param(c, marks=pytest.mark.long) for c in ("load", "restore", "all"))]
)
def test_a_late_rank_is_named_in_time_and_hears_of_it(
    tmp_path: Path, call: str, known: bool
) -> None:
    zero, one, two = run_ranks(one_comes_late, 3, str(tmp_path), call, known)
    assert "rank 1 did not answer in time" in zero[0], zero
    assert "rank 1" in two[0] or "rank 0" in two[0], two
    assert one[0], "the late rank went on alone"
    assert max(zero[1], two[1]) < seconds(60)
    assert zero[2] == one[2] == two[2] == "", (zero, one, two)


class Choosy:
    """Takes back no state on rank 1."""

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise LookupError("no such user")


def an_object_refuses(folder: str) -> tuple[str, str]:
    with smckpt.CheckpointManager(folder, signals=(), timeout=60) as manager:
        manager.save(1, {"object": Choosy()}).wait()
        try:
            manager.restore(into={"object": Choosy()})
        except Exception as error:
            return type(error).__name__, "".join(traceback.format_exception(error))
    return "", ""


def test_the_error_of_an_object_that_refuses_its_state_keeps_its_traceback(
    tmp_path: Path,
) -> None:
    (other, text), (kind, trace) = run_ranks(an_object_refuses, 2, str(tmp_path))
    assert kind == "LookupError" and 'raise LookupError("no such user")' in trace
    assert other == "CheckpointError" and "rank 1" in text and "no such user" in text
