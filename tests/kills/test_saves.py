"""Saves, and a run with retention, killed at every call and at every message to the store.

The whole: `.venv/bin/python -m pytest -m long -s tests/kills`, which prints the counts. CI runs a
sample.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import smckpt
from smckpt import CheckpointManager, find_checkpoints, verify_checkpoint
from smckpt.checkpoint.upkeep.compare import compare_checkpoints
from smckpt.storage import open_storage
from tests.support.faults.kills import SAMPLE_OR_ALL, everything, forked, fresh, killed_everywhere
from tests.support.process_state import end_saves

WHERE = pytest.mark.parametrize("where", ["disk", pytest.param("s3", marks=pytest.mark.long)])
LAST = 4


def state(step: int) -> dict[str, object]:
    return {"a": torch.full((3000,), float(step)), "b": torch.arange(7) + step, "step": step}


def two_saves(place: str) -> None:
    for step in (1, 2):
        smckpt.save(state(step), checkpoint_id=place, step=step)
    end_saves()


def another_save(place: str) -> None:
    smckpt.save(state(9), checkpoint_id=place, step=9)
    target = state(0)
    smckpt.load(target, checkpoint_id=place)
    assert torch.equal(target["a"], state(9)["a"]) and target["step"] == 9  # type: ignore[arg-type]
    end_saves()  # what it supersedes is deleted after its commit


def a_run(place: str, last: int = LAST - 1) -> None:
    """It goes on where it was, to a last step, and keeps one step."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    live = {"model": model, "optimizer": optimizer}
    with CheckpointManager(place, interval=1, keep_last_n=1) as manager:
        step = manager.restore(into=live)
        while step < last:
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if manager.should_save(step):
                manager.save(step, live)


def trace(name: str) -> bool:
    return name.startswith((".", "probe-"))


def to_the_end(place: str) -> None:
    a_run(place, LAST)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What torch and smckpt import late is imported here once, and not in each of the children."""
    import boto3  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters()).step()


@pytest.fixture
def root(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3_root") if where == "s3" else str(tmp_path)


@WHERE
@SAMPLE_OR_ALL
def test_a_save_killed_anywhere_leaves_the_old_or_the_new_one_and_the_next_save_goes_on(
    root: str, only: int | None
) -> None:
    def judge(place: str) -> str:
        found = find_checkpoints(place)
        answer = str(found[0].step) if found else "nothing"
        if found:
            assert verify_checkpoint(place).ok
        forked(another_save, place)
        (whole,) = find_checkpoints(place)
        assert whole.step == 9 and verify_checkpoint(place).ok
        if "://" in place:  # uploads; on disk a lease that got no name may stay
            assert open_storage(place).list_unfinished() == []
        data = sorted(name for name in everything(place) if name.startswith("data-"))
        assert len(data) == 2, data  # of the last save, and its checksums
        return answer

    found = killed_everywhere(lambda: fresh(root), two_saves, judge, only)
    if only is None:
        assert found.keys() <= {"nothing", "1", "2", "not reached"} and len(found) >= 3


@WHERE
@SAMPLE_OR_ALL
def test_a_run_with_retention_killed_anywhere_resumes_exactly_and_keeps_one_step(
    root: str, only: int | None
) -> None:
    whole = fresh(root)
    forked(to_the_end, whole)
    kinds = sorted(way.partition("-")[0] for way in everything(whole))

    def judge(place: str) -> str:
        steps = [one.step for one in find_checkpoints(place)]
        for one in find_checkpoints(place):
            assert verify_checkpoint(one).ok
        # one step further, since it is a commit after which older steps are deleted
        forked(to_the_end, place)
        # the files of one checkpoint; an empty directory may stay, a file that got no name, or
        # that with which a session that was killed tried the store out
        left = [way for way in everything(place) if not trace(way.rpartition("/")[2])]
        assert {way.partition("/")[0] for way in left} == {str(LAST)}
        assert sorted(way.partition("-")[0] for way in left) == kinds
        if "://" in place:  # uploads
            assert open_storage(f"{place}/{LAST}").list_unfinished() == []
        compared = compare_checkpoints(f"{place}/{LAST}", f"{whole}/{LAST}")
        assert compared.equal, compared.differences
        return f"exact from step {max(steps, default=0)}"

    found: Counter[str] = killed_everywhere(lambda: fresh(root), a_run, judge, only, least=60)
    if only is None:
        assert {f"exact from step {step}" for step in range(LAST)} <= found.keys()
