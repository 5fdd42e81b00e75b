"""A training process that forks: its child has no part in its saves, and does not hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smckpt
from smckpt import CheckpointManager, Signals, errors, find_checkpoints
from smckpt.meeting.group import _over
from tests.support import child
from tests.support.launch import run_ranks
from tests.support.limits import seconds, within

# Its worker is stopped, so the save is in flight until we say otherwise.
IN_FLIGHT = """
    import gc, os, signal, sys, time
    import torch, smckpt
    from smckpt.engine import api
    from tests.support.limits import seconds
    place = sys.argv[1]
    smckpt.save({"a": torch.zeros(1 << 18)}, checkpoint_id=place, step=0)
    [queue] = api._RUNTIME.queues(None, None)
    os.kill(queue._worker.pid, signal.SIGSTOP)
    handle = smckpt.async_save({"a": torch.ones(1 << 18)}, checkpoint_id=place, step=1)
"""
GOES_ON = """
    os.kill(queue._worker.pid, signal.SIGCONT)
    handle.wait(seconds(60))
    assert smckpt.maybe_finalize_async_calls() == [1]
    names = [name for name in os.listdir(place) if name.startswith("manifest-")]
    assert len(names) == 1 or len(names) == 2, names  # the older one may not be swept yet
    target = {"a": torch.zeros(1 << 18)}
    smckpt.load(target, checkpoint_id=place)
    assert bool((target["a"] == 1).all())
"""


@pytest.mark.parametrize(
    "end", ["sys.exit(5)", pytest.param("os._exit(5)", marks=pytest.mark.long)]
)
def test_a_child_that_forks_off_in_mid_save_ends_clean_and_the_save_is_committed_once(
    tmp_path: Path, end: str
) -> None:
    child.run(
        IN_FLIGHT
        + f"""
    pid = os.fork()
    if pid == 0:
        assert smckpt.maybe_finalize_async_calls() == []  # it has no saves
        try:
            handle.wait()
        except smckpt.UsageError as error:
            assert "forked child" in str(error), error
        else:
            os._exit(1)
        del handle, queue
        gc.collect()
        {end}
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
"""
        + GOES_ON,
        str(tmp_path),
    )


def test_the_workers_of_a_data_loader_leave_a_save_in_flight_alone(tmp_path: Path) -> None:
    child.run(
        IN_FLIGHT
        + """
    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return index

    loader = torch.utils.data.DataLoader(Samples(), num_workers=2, multiprocessing_context="fork")
    assert sum(int(batch) for batch in loader) == 66
    del loader
"""
        + GOES_ON,
        str(tmp_path),
    )


@pytest.mark.long
def test_a_child_that_is_a_job_of_its_own_saves_elsewhere(tmp_path: Path) -> None:
    child.run(
        IN_FLIGHT
        + """
    pid = os.fork()
    if pid == 0:
        smckpt.save({"b": torch.ones(3)}, checkpoint_id=place + "-child")
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert smckpt.latest_checkpoint(place + "-child") is not None
"""
        + GOES_ON,
        str(tmp_path / "run"),
    )


def a_child_saves_as_its_parent(folder: str) -> tuple[str, str]:
    """What the forked child of rank 1 hears where it saves and loads as rank 1; and what the ranks
    save then."""
    state = {"a": torch.full((4,), 1.0)}
    smckpt.save(state, checkpoint_id=f"{folder}/c")
    heard = ""
    if dist.get_rank() == 1:
        ready, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            for call in (smckpt.save, smckpt.load):
                try:
                    call({"a": torch.zeros(4)}, checkpoint_id=f"{folder}/c")  # type: ignore
                except errors.CheckpointError as error:
                    os.write(say, f"{type(error).__name__}: {error}\n".encode())
            os._exit(0)
        with within(seconds(60)):
            os.waitpid(pid, 0)
        heard = os.read(ready, 10000).decode()
    dist.barrier()
    state["a"].fill_(2)
    smckpt.save(state, checkpoint_id=f"{folder}/c")
    target = {"a": torch.zeros(4)}
    smckpt.load(target, checkpoint_id=f"{folder}/c")
    return heard, str(target["a"].tolist())


def test_a_child_does_not_speak_for_the_rank_that_forked_it(tmp_path: Path) -> None:
    (_, zero), (heard, one) = run_ranks(a_child_saves_as_its_parent, 2, str(tmp_path))
    assert heard.count("a forked child of rank 1 saves or loads as that rank") == 2, heard
    assert zero == one == "[2.0, 2.0, 2.0, 2.0]"


# -- the manager -----------------------------------------------------------------------------------


def test_a_signal_to_a_child_is_no_notice_to_its_parent(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, signals=Signals(grace=600)) as manager:
        manager.save(1, state).wait()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(seconds(90)))  # if it does not end by the signal
            signal.pause()
            signal.pause()
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        with within(seconds(60)):
            status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
        watch = manager._watch
        assert watch._flag is None and watch._thread is not None
        manager.save(2, state).wait()
        assert not manager.should_save(3)
        assert watch._flag is None and watch.notice is None
    assert signal.getsignal(signal.SIGTERM) is before
    assert [one.step for one in find_checkpoints(tmp_path)] == [1, 2]


def has_left(manager: CheckpointManager, rank: int) -> bool:
    """Whether the rank has said good-bye in one of the manager's meetings."""
    members = manager._membership
    spare = members._clients.spare
    assert spare is not None and members._meetings
    meetings = [_over(meeting, spare) for meeting in members._meetings.values()]
    return any(meeting.transport.keys.wait(f"bye/{rank}", 0) is not None for meeting in meetings)


def a_child_unwinds(root: str) -> tuple[int, str, int | None]:
    """A child of rank 1 leaves the manager's block; its status, what it heard, and the newest
    step."""
    import sys

    state, status, heard = {"model": torch.nn.Linear(2, 2)}, 0, ""
    with CheckpointManager(root, timeout=seconds(60)) as manager:
        manager.save(1, state).wait()
        if dist.get_rank() == 1:
            ready, say = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    with manager:
                        try:
                            manager.save(2, state)
                        except errors.UsageError as error:
                            os.write(say, str(error).encode())
                        sys.exit(3)
                except SystemExit as left:
                    os._exit(int(left.code or 0))
            with within(seconds(60)):
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            heard = os.read(ready, 10000).decode()
        dist.barrier()
        assert not has_left(manager, 1)
        manager.save(2, state).wait()
        found = manager.latest()
    return status, heard, None if found is None else found.step


def test_a_child_that_leaves_the_managers_block_ends_nothing(tmp_path: Path) -> None:
    zero, one = run_ranks(a_child_unwinds, 2, str(tmp_path))
    assert zero == (0, "", 2)
    assert one[0] == 3 and one[2] == 2
    assert "a forked child uses the manager of its parent" in one[1]
