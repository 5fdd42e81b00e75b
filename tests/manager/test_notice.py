"""A signal to one rank ends all after one step; a rank that is dead holds nobody up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt import CheckpointManager, Signals, find_checkpoints
from smckpt.errors import UsageError
from smckpt.manager import notice
from tests.support import child, warm
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.main_job import environment


def test_one_process_saves_once_more_and_exits(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    before = signal.getsignal(signal.SIGUSR1)
    step, deadline = 0, time.monotonic() + seconds(60)
    with (
        pytest.raises(SystemExit) as ended,
        CheckpointManager(tmp_path, interval=1000, signals=Signals(exit_status=99)) as manager,
    ):
        while time.monotonic() < deadline:
            step += 1
            if manager.should_save(step):
                manager.save(step, state)
            if step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            if step > 3:
                time.sleep(0.05)
    assert ended.value.code == 99
    assert [one.step for one in find_checkpoints(tmp_path)] == [step]
    assert step > 3
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_handler_that_was_there_is_called_too(tmp_path: Path) -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with CheckpointManager(tmp_path, signals=Signals(grace=60)) as manager:
            os.kill(os.getpid(), signal.SIGUSR1)
            deadline = time.monotonic() + seconds(20)
            while not manager.should_save(len(heard)) and time.monotonic() < deadline:
                heard.append(0)
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.SIGUSR1 in heard


def test_the_ranks_agree_within_what_the_measured_save_leaves_of_the_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    with CheckpointManager(tmp_path, signals=()) as manager:
        watch = manager._watch
        assert watch._patience(30.0) == 10.0  # nothing is measured yet
        took = manager.save(1, state).wait().committed
        assert watch.save_seconds == took
        assert watch._patience(300.0 * took) == pytest.approx(200.0 * took)  # never all of it
        watch.save_seconds = 10.0
        assert watch._patience(30.0) == 15.0
        assert "may have to restore an older step" not in caplog.text
        watch.save_seconds = 40.0
        assert watch._patience(30.0) == 3.0
    assert "took 40 s until its commit, and 30 s are left" in caplog.text


def test_outside_the_main_thread_no_signal_is_taken(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def make() -> None:
        with CheckpointManager(tmp_path):
            assert signal.getsignal(signal.SIGTERM) is before

    with ThreadPoolExecutor(1) as other:
        other.submit(make).result(seconds(60))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit statuses with which the watch would have ended this process."""
    statuses: list[int] = []
    monkeypatch.setattr(notice.os, "_exit", statuses.append)
    return statuses


CLOSED = """
import os, signal, sys, time
from smckpt import CheckpointManager, Signals
with CheckpointManager(sys.argv[1], signals=Signals(("SIGUSR1",), 1.0, 7)) as manager:
    manager.should_save(1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert manager.should_save(2)
time.sleep(2)
print("went on", flush=True)
"""


def test_a_manager_that_is_closed_ends_no_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSED, str(tmp_path)],
        env=environment(), capture_output=True, text=True, timeout=seconds(100),
    )  # fmt: skip
    assert done.stdout == "went on\n", done.stderr


def test_an_open_manager_ends_the_process_when_the_time_is_over(
    tmp_path: Path, ends: list[int]
) -> None:
    with CheckpointManager(tmp_path, signals=Signals(("SIGUSR1",), 0.3, 7)) as manager:
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + seconds(60)
        while not ends and time.monotonic() < deadline:
            manager.should_save(1)
            time.sleep(0.01)
    assert ends == [7]


def test_a_thread_that_fails_leaves_no_loop_waiting(
    tmp_path: Path, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = threading.Event()

    def broken(_: object, mine: object) -> None:
        if mine is None:  # before the signal the thread may ask, and must not fail then
            return
        # The thread may read of the signal before this process's handler has run. Without `_exit`
        # that handler would find a thread that is gone, and let the signal end the tests.
        handled.wait(seconds(30))
        raise RuntimeError("not one of ours")

    with CheckpointManager(tmp_path, signals=Signals(("SIGUSR1",), exit_status=7)) as manager:
        assert not manager.should_save(1)
        monkeypatch.setattr(notice, "_earliest_notice", broken)
        signal.raise_signal(signal.SIGUSR1)
        handled.set()
        waits = threading.Thread(target=manager.should_save, args=(2,), daemon=True)
        waits.start()
        waits.join(seconds(30))
        assert not waits.is_alive()
    assert ends == [7]


def test_a_manager_that_is_closed_leaves_no_loop_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(notice, "_earliest_notice", lambda *_: go_on.wait(seconds(20)) and None)
    manager = CheckpointManager(tmp_path, signals=("SIGUSR1",))
    signal.raise_signal(signal.SIGUSR1)
    waits = threading.Thread(target=manager.should_save, args=(2,), daemon=True)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()  # no rank trains on before the ranks have agreed
    threading.Timer(0.2, go_on.set).start()
    manager.close()
    waits.join(seconds(30))
    assert not waits.is_alive()


def test_managers_leave_no_descriptors_and_no_threads(tmp_path: Path) -> None:
    """In a process of its own: what other tests left may end meanwhile."""
    child.run(
        """
        import os, sys, threading
        from smckpt import CheckpointManager, Signals

        def left():
            return sorted(os.listdir("/proc/self/fd")), threading.active_count()

        CheckpointManager(sys.argv[1]).close()
        before = left()
        for _ in range(5):
            CheckpointManager(sys.argv[1]).close()
        assert left() == before, (before, left())
        """,
        str(tmp_path),
    )


def test_a_handler_that_saves_within_a_save_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    with CheckpointManager(tmp_path) as manager:

        def handler(*_: object) -> Any:
            with pytest.raises(UsageError, match="save was called while this thread was in"):
                manager.save(2, state)
            return {}

        monkeypatch.setattr(manager, "_recorded", handler)
        manager.save(1, state).wait()
    assert [one.step for one in find_checkpoints(tmp_path)] == [1]


def run_until_told(root: str) -> tuple[Any, int]:
    import torch.distributed as dist

    rank, step, code = dist.get_rank(), 0, None
    state = {"model": torch.nn.Linear(2, 2)}
    manager = CheckpointManager(root, signals=Signals(grace=120))
    try:
        while step < 3000:
            dist.all_reduce(torch.ones(1))
            step += 1
            if rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                manager.save(step, state)
            time.sleep(0.01 * rank)  # ranks come to a step at different times
    except SystemExit as ended:
        code = ended.code
    manager.close()
    os.environ["SMCKPT_EXIT_TIMEOUT"] = "20"
    return code, step


def test_a_signal_on_one_rank_is_enough(tmp_path: Path) -> None:
    told = run_ranks(run_until_told, 3, str(tmp_path))
    assert len(set(told)) == 1
    code, step = told[0]
    assert code == 143 and 20 <= step < 3000
    assert [one.step for one in find_checkpoints(tmp_path)] == [step]


DEAD = """
import datetime, os, signal, sys, torch
import torch.distributed as dist
from smckpt import CheckpointManager, Signals

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
rank, step = dist.get_rank(), 0
state = {"model": torch.nn.Linear(2, 2)}
with CheckpointManager(sys.argv[1], signals=Signals(grace=float(sys.argv[2]))) as manager:
    while True:
        if step == 3 and rank == 2:
            print("stopped", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        dist.all_reduce(torch.ones(1))
        step += 1
        if step == 2:
            manager.save(step, state).wait()
        manager.should_save(step)
"""


@contextmanager
def without_launcher(
    count: int, script: str, *arguments: object, forked: bool = True
) -> Iterator[list[Any]]:
    """Ranks that nobody ends when one of them dies, over a store that outlives them.

    Args:
        forked: sooner, and not for a test of the interpreter's end.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as torchrun, which outlives its ranks
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ranks: list[Any] = []
    for rank in range(count):
        env = {**environment(), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if forked:
            ranks.append(warm.Piped(command, env=env, merged=True))
        else:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen(command, env=env, text=True, **pipes))
    try:
        yield ranks
    finally:
        for one in ranks:
            one.kill()
            one.wait()
            one.stdout.close()


@pytest.mark.long
def test_a_rank_that_is_dead_holds_nobody_up(tmp_path: Path) -> None:
    with without_launcher(3, DEAD, tmp_path, seconds(12)) as ranks:
        assert any("stopped" in line for line in iter(ranks[2].stdout.readline, ""))
        began = time.monotonic()
        said = [rank.communicate(timeout=seconds(60))[0] for rank in ranks[:2]]
        took = time.monotonic() - began
    assert [rank.returncode for rank in ranks[:2]] == [143, 143], said
    assert took < seconds(30)
    assert "rank 2 did not answer" in said[0]
    assert [one.step for one in find_checkpoints(tmp_path)] == [2]


SLOW_EXIT = """
import atexit, os, signal, sys, threading, torch
from smckpt import CheckpointManager, Signals

atexit.register(lambda: (print("in the exit handler", flush=True), threading.Event().wait()))
state, step = {"model": torch.nn.Linear(2, 2)}, 0
manager = CheckpointManager(sys.argv[1], signals=Signals(grace=float(sys.argv[2])))
if sys.argv[3] == "closed at the exit":
    atexit.register(manager.close)  # it runs first
try:
    while True:
        step += 1
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if manager.should_save(step):
            manager.save(step, state)
finally:
    if sys.argv[3] == "closed":
        manager.close()
"""


@pytest.mark.parametrize("how", ["closed", "closed at the exit", "left open"])
def test_an_exit_handler_that_hangs_ends_with_the_grace_time(tmp_path: Path, how: str) -> None:
    grace = seconds(2)  # all of it is waited for; a save on a busy machine takes its time
    done = subprocess.run(
        [sys.executable, "-c", SLOW_EXIT, str(tmp_path), str(grace), how],
        env=environment(), capture_output=True, text=True, timeout=seconds(60),
    )  # fmt: skip
    assert "in the exit handler" in done.stdout, done.stderr
    assert done.returncode == 143, done.stderr
    assert len(find_checkpoints(tmp_path)) == 1


AT_EXIT = """
import atexit, os, signal, sys, threading, torch, smckpt
from smckpt.engine.saving.commit import Committer
from smckpt.manager.manager import QUEUE

earlier, weights, root = sys.argv[1:]
state = {"model": torch.nn.Linear(2, 2)}
if earlier == "load":
    smckpt.load(state, checkpoint_id=weights)
elif earlier != "nothing":
    queue = QUEUE if earlier == "save, same queue" else "other"
    options = smckpt.SaveOptions(queue=queue)
    smckpt.save(state, checkpoint_id=f"{root}-before", options=options)
publish, ends = Committer.publish, threading.Event()


def slow(*arguments):
    assert ends.wait(60)
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager._watch._decided.wait(60)  # the process ends here if nothing hears the signal
    return publish(*arguments)


manager = smckpt.CheckpointManager(root, interval=1)
manager.restore(into=state)
Committer.publish = slow
manager.save(1, state)
atexit.register(ends.set)  # it runs first
"""


@pytest.mark.parametrize("earlier", ["load", "save", "save, same queue", "nothing"])
def test_a_signal_while_the_exit_commits_the_last_save_leaves_it_its_time(
    tmp_path: Path, earlier: str
) -> None:
    """The exit handlers run the last one first, and what a program did before it made its manager
    had its handler before."""
    smckpt.save({"model": torch.nn.Linear(2, 2)}, checkpoint_id=tmp_path / "weights")
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, earlier, str(tmp_path / "weights"), str(tmp_path / "run")],
        env=environment(), capture_output=True, text=True, timeout=seconds(100),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [one.step for one in find_checkpoints(tmp_path / "run")] == [1]


LEFT_OPEN = """
import atexit, datetime, sys, threading, torch
import torch.distributed as dist

asking = {"smckpt-notice", "smckpt-schedule"}  # the threads that ask the job's store all the time
names = lambda: sorted(asking & {one.name for one in threading.enumerate()})
atexit.register(lambda: print("at the end:", names(), flush=True))  # it runs last
from smckpt import CheckpointManager

dist.init_process_group("gloo")
state = {"model": torch.nn.Linear(2, 2)}
manager = CheckpointManager(sys.argv[1], interval=datetime.timedelta(minutes=9))
manager.restore(into=state)
for step in range(1, 4):
    manager.should_save(step)
manager.save(step, state).wait()
print("in the training:", names(), flush=True)
"""


def test_a_program_that_leaves_its_manager_open_ends_without_a_thread_of_it(tmp_path: Path) -> None:
    """One that is in a call of torch's store when the interpreter ends may abort the program."""
    with without_launcher(2, LEFT_OPEN, tmp_path, forked=False) as ranks:
        texts = [rank.communicate(timeout=seconds(100))[0] for rank in ranks]
    for rank, text in zip(ranks, texts, strict=True):
        assert "in the training: ['smckpt-notice', 'smckpt-schedule']" in text, text
        assert rank.returncode == 0, text
        assert "at the end: []" in text, text


PEER_GONE = """
import atexit, os, signal, sys, threading, torch
import torch.distributed as dist
from smckpt import CheckpointManager, Signals
from smckpt.engine.background.worker_client import Worker

root, grace, how = sys.argv[1:]
dist.init_process_group("gloo")
rank, state = dist.get_rank(), {"model": torch.nn.Linear(2, 2)}
manager = CheckpointManager(root, signals=Signals(grace=float(grace)))
manager.save(1, state).wait()
call = Worker.call

def ends(self, command, **more):
    if command.function == "write_part":
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        threading.Event().wait(100)  # another thread may take the signal, and later than this one
    return call(self, command, **more)

if rank == 1:
    Worker.call = ends
manager.save(2, state)

@atexit.register  # it runs before smckpt's own, which waits for the commit
def ended():
    print("in the exit handler", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_an_exit_that_waits_for_a_dead_peer_ends_within_the_grace_time(
    tmp_path: Path, how: str
) -> None:
    with without_launcher(2, PEER_GONE, tmp_path, seconds(2), how) as ranks:
        text = ranks[0].communicate(timeout=seconds(100))[0]  # exit handlers wait for 600 s
    # Of a killed one the save's failure may be heard first, which ends the exit handlers.
    ended = {143} if how == "stopped" else {1, 143}
    assert "in the exit handler" in text and ranks[0].returncode in ended, text
    assert "rank 1" in text, text
    assert [one.step for one in find_checkpoints(tmp_path)] == [1]
