"""Two jobs save below one root at the same time: no step is mixed or lost; the older is told."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from smckpt import CheckpointManager, Memory, errors, find_checkpoints, load, verify_checkpoint
from smckpt.manager.retention import Rivals
from tests.support.launch import run_ranks
from tests.support.limits import seconds

SIZE = 1 << 16
TURNS = 30


def state(job: int, step: int) -> dict[str, Any]:
    return {"a": torch.full((SIZE,), float(1000 * job + step)), "job": job, "value": step}


def contents_of(place: Any) -> tuple[int, int]:
    """(job, step) of a checkpoint; all its bytes are of that job and step."""
    target = state(0, 0)
    load(target, checkpoint_id=place, check_keys_matched=False)
    job, step = target["job"], target["value"]
    assert bool((target["a"] == 1000 * job + step).all()), place
    return job, step


def until(holds: Any) -> None:
    deadline = time.monotonic() + seconds(120)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def saves(folder: str, job: int, first: int, every: int) -> list[tuple[int, str]]:
    """A job of two ranks that saves each step when the other job is as far, until one of the jobs
    may not save any more; (step, error or "")."""
    import torch.distributed as dist

    told: list[tuple[int, str]] = []
    manager = CheckpointManager(f"{folder}/run", timeout=seconds(60))
    for turn in range(TURNS):
        step = first + turn * every
        if dist.get_rank() == 0:
            Path(folder, f"{turn}-{job}").touch()
            until(lambda at=turn: Path(folder, f"{at}-{1 - job}").exists() or _over(folder))
        dist.barrier()
        if _over(folder) and told and turn > int(Path(folder, "over").read_text() or TURNS) + 2:
            break
        try:
            manager.save(step, state(job, step)).wait()
            told.append((step, ""))
        except errors.CheckpointError as error:
            told.append((step, str(error)))
            if "saves no more here" in str(error):
                if dist.get_rank() == 0:
                    Path(folder, "over").write_text(str(turn))
                break
        dist.barrier()
    with contextlib.suppress(errors.SaveFailedError):  # told already
        manager.close()
    return told


def _over(folder: str) -> bool:
    return Path(folder, "over").exists()


def both(folder: Path, *firsts: tuple[int, int]) -> list[list[tuple[int, str]]]:
    """What rank 0 of each job told; rank 1 told the same."""
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(run_ranks, saves, 2, str(folder), job, first, every)
            for job, (first, every) in enumerate(firsts)
        ]
        answers = [each.result(seconds(240)) for each in running]
    for zero, one in answers:
        assert [(step, not said) for step, said in zero] == [(s, not said) for s, said in one]
    return [answer[0] for answer in answers]


@pytest.mark.parametrize(
    "firsts",
    [((10, 10), (10, 10)), pytest.param(((10, 10), (15, 10)), marks=pytest.mark.long)],
)
def test_of_two_jobs_one_goes_on_and_the_other_is_told(
    tmp_path: Path, firsts: tuple[tuple[int, int], ...]
) -> None:
    told = both(tmp_path, *firsts)
    over = [job for job, said in enumerate(told) if "saves no more here" in said[-1][1]]
    assert len(over) == 1, told
    (loser,) = over
    winner = 1 - loser
    assert told[winner][-1][1] == "", told
    found = {one.step: one for one in find_checkpoints(tmp_path / "run")}
    owners = {}
    for step, one in found.items():
        assert verify_checkpoint(one).ok
        owners[step], its = contents_of(one)
        assert its == step
    committed = [{step for step, said in said_by if not said} for said_by in told]
    assert committed[0] | committed[1] == set(found)  # a step that was committed is there
    assert all(step in committed[owner] for step, owner in owners.items())
    assert owners[max(committed[winner])] == winner
    for _, said in (*told[0], *told[1]):  # each refusal names the other job
        assert not said or any(
            words in said
            for words in (
                "saves no more here",
                "a later run writes here",
                "another run",
                "another job",
            )
        ), said


def test_a_process_that_outlived_its_restart_saves_and_deletes_no_more(tmp_path: Path) -> None:
    old = CheckpointManager(tmp_path, keep_last_n=1, signals=())
    old.save(1, state(0, 1)).wait()
    with CheckpointManager(tmp_path, keep_last_n=3, signals=()) as new:
        assert new.restore(into=state(1, 0)) == 1
        new.save(2, state(1, 2)).wait()
        new.save(3, state(1, 3)).wait()
    old.save(4, state(0, 4)).wait()  # it cannot know yet
    until(lambda: old._rivals._over is not None)
    with pytest.raises(errors.StorageError, match="a later job has saved step"):
        old.save(5, state(0, 5))
    old.close()
    found = find_checkpoints(tmp_path)
    assert [one.step for one in found] == [1, 2, 3, 4]
    claims = [one.metadata["manager"]["claim"]["generation"] for one in found]
    older, later = claims[:2]
    assert older < later  # no chance decides who is the later one
    assert claims == [older, later, later, older]


def test_a_process_that_outlived_its_restart_saves_no_more_in_memory_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def manager() -> CheckpointManager:
        memory = Memory(1, keep=9, replicas=0)
        return CheckpointManager(tmp_path, interval=1000, memory=memory, signals=())

    def save(by: CheckpointManager, job: int, step: int) -> None:
        assert by.should_save(step)
        by.save(step, state(job, step)).wait()

    old = manager()
    assert old.restore(into=state(0, 0)) == 0
    save(old, 0, 1)
    with manager() as new:
        assert new.restore(into=state(1, 0)) == 1
        save(new, 1, 2)
        save(new, 1, 3)
        save(old, 0, 4)  # it cannot know yet
        until(lambda: "another job saves below keeper://" in caplog.text)
        assert old.should_save(5)
        with pytest.raises(errors.UsageError, match="a later job has saved step"):
            old.save(5, state(0, 5))
        save(new, 1, 5)
        old.close()
        root = old._memory.root  # step 4 is of a life that the run has left behind
        until(lambda: [one.step for one in find_checkpoints(root)] == [1, 2, 3, 5])
        found = find_checkpoints(root)
        assert [contents_of(one) for one in found] == [(0, 1), (1, 2), (1, 3), (1, 5)]


def saves_on_in_memory(folder: str) -> list[str]:
    """The errors of a job of two ranks that goes on after a later one has saved there."""
    import torch.distributed as dist

    def manager() -> CheckpointManager:
        memory = Memory(1, keep=9, replicas=0)
        return CheckpointManager(
            folder, interval=1000, memory=memory, signals=(), timeout=seconds(20)
        )

    old, told = manager(), []
    assert old.restore(into=state(0, 0)) == 0
    assert old.should_save(1)
    old.save(1, state(0, 1)).wait()
    new = manager()
    assert new.restore(into=state(1, 0)) == 1
    for step in (2, 3):
        assert new.should_save(step)
        new.save(step, state(1, step)).wait()
    assert old.should_save(4)
    old.save(4, state(0, 4)).wait()  # it cannot know yet
    rivals = old._memory._rivals
    until(lambda: dist.get_rank() or (rivals is not None and rivals._over is not None))
    dist.barrier()
    for step in range(5, 10):
        if not old.should_save(step):
            told.append("left out")
            continue
        try:
            old.save(step, state(0, step)).wait()
        except errors.CheckpointError as error:
            told.append(str(error))
    for one in (old, new):
        with contextlib.suppress(errors.SaveFailedError):
            one.close()
    return told


def test_ranks_that_go_on_after_a_later_job_has_memory_leave_out_the_same_saves(
    tmp_path: Path,
) -> None:
    for told in run_ranks(saves_on_in_memory, 2, str(tmp_path)):
        refused = ["a later job has saved step" in error for error in told]
        assert refused == [True, True, False, True, False], told
        assert told[2] == told[4] == "left out"


def test_without_a_claim_nothing_is_deleted_until_the_next_save_claims(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, signals=()) as other:
        other.save(1, state(1, 1)).wait()
        rivals = Rivals(other._steps)
        assert not rivals.look("1")
        rivals.refuse_older()
        assert rivals.look("1")


def test_a_later_job_that_saves_to_the_same_directories_only_is_seen(tmp_path: Path) -> None:
    old = CheckpointManager(tmp_path, signals=())
    old.save(10, state(0, 10)).wait()
    with CheckpointManager(tmp_path, signals=()) as new:
        assert new.restore(into=state(1, 0)) == 10
        new.save(10, state(1, 10)).wait()
    old.save(20, state(0, 20)).wait()
    until(lambda: old._rivals._over is not None)
    old.close()
    assert [contents_of(one) for one in find_checkpoints(tmp_path)] == [(1, 10), (0, 20)]


def test_a_step_of_another_run_is_not_replaced(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, signals=()) as first:
        first.save(10, state(0, 10))
        first.save(20, state(0, 20))
    with CheckpointManager(tmp_path, signals=()) as other:  # it restores nothing
        other.save(5, state(1, 5)).wait()
        with pytest.raises(errors.UsageError, match="step of another run .* would replace"):
            other.save(10, state(1, 10))
        other.save(15, state(1, 15)).wait()
    assert [contents_of(one) for one in find_checkpoints(tmp_path)] == [
        (0, 10) if step == 10 else (0, 20) if step == 20 else (1, step) for step in (5, 10, 15, 20)
    ]
    with CheckpointManager(tmp_path, signals=()) as same:  # the run goes on, and saves 20 again
        assert same.restore(into=state(0, 0)) == 20
        same.save(20, state(0, 20)).wait()
    assert verify_checkpoint(tmp_path / "20").ok
