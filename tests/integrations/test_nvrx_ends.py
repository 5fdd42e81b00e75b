"""What a killed or careless program leaves behind under NVRx's names, and what it is told."""

from __future__ import annotations

import fcntl
import importlib
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from smckpt.integrations.nvrx.async_ckpt import save_whole
from smckpt.integrations.nvrx.async_ckpt.core import (
    AsyncCallFailedError,
    AsyncCallsQueue,
    PersistentAsyncCaller,
)
from smckpt.integrations.nvrx.local.basic_state_dict import BasicTensorAwareStateDict
from smckpt.integrations.nvrx.local.ckpt_managers.local_manager import LocalCheckpointManager
from tests.support import child
from tests.support.launch import ROOT
from tests.support.limits import seconds, within

CARELESS = """
import sys
from smckpt.integrations.nvrx.async_ckpt.core import AsyncCallsQueue, AsyncRequest

def ok(): pass
def bad(): raise OSError("no space left")

def main():
    global kept
    queue = AsyncCallsQueue(cpu_priority=None, persistent=sys.argv[3] == "persistent")
    work = bad if sys.argv[1] == "failed" else ok
    finalize = [] if sys.argv[1] == "nothing to finalize" else [lambda: None]
    queue.schedule_async_request(AsyncRequest(work, (), finalize))
    if sys.argv[2] == "global":
        kept = queue

if __name__ == "__main__":
    main()
    print("end of the program")
"""


@pytest.mark.parametrize(
    ("case", "queue", "kind", "status", "text"),
    [
        ("forgot", "local", "persistent", 1, "was never finalized"),
        ("failed", "local", "each", 1, "no space left"),
        ("forgot", "global", "each", 1, "was never finalized"),
        ("nothing to finalize", "local", "persistent", 0, ""),
    ],
)
def test_a_save_that_nobody_saw_end_makes_the_exit_status_1(
    tmp_path: Path, queue: str, kind: str, case: str, status: int, text: str
) -> None:
    script = tmp_path / "careless.py"
    script.write_text(CARELESS)
    done = child.script(script, case, queue, kind, forked=False)
    assert (done.returncode, text in done.stderr) == (status, True), done.stderr
    assert "end of the program" in done.stdout


UNGUARDED = """
from smckpt.integrations.nvrx.async_ckpt.core import AsyncCallsQueue, AsyncRequest

def ok(): pass

{before}
queue = AsyncCallsQueue(cpu_priority=None)
queue.schedule_async_request(AsyncRequest(ok, (), []))
queue.maybe_finalize_async_calls(blocking=True)
"""


@pytest.mark.parametrize(
    "before", ["", "import os, sys\nif os.getppid() != int(sys.argv[1]): raise ValueError('twice')"]
)
def test_a_script_without_a_guard_is_told_so(tmp_path: Path, before: str) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED.format(before=before))
    done = child.script(script, str(os.getpid()), forked=False)
    assert done.returncode == 1
    *_, last = [line for line in done.stderr.splitlines() if "AsyncCallFailedError" in line]
    assert "the worker could not import the script (exit status 1)" in last
    assert 'if __name__ == "__main__":' in last and "save again" not in last


KILLED = """
import os, signal, sys
import torch
from smckpt.integrations.nvrx.local.basic_state_dict import BasicTensorAwareStateDict
from smckpt.integrations.nvrx.local.ckpt_managers.local_manager import LocalCheckpointManager

class Dies:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

LocalCheckpointManager(sys.argv[1]).save(
    BasicTensorAwareStateDict({"w": torch.ones(10_000), "dies": Dies()}), 10
)
"""


def killed_save(root: Path) -> Path:
    """The file that a local save leaves which was killed in the middle."""
    done = subprocess.run(child.command(KILLED, str(root)), timeout=seconds(60), cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    (left,) = root.rglob("*.tmp")
    return left


@pytest.mark.parametrize("begin", ["find_latest", "save"])
def test_what_a_killed_local_save_left_is_removed(tmp_path: Path, begin: str) -> None:
    left = killed_save(tmp_path)
    beside = [left.parent / name for name in ("notes.0.tmp", "iter_1_0_local.pt.tmp", "x.tmp")]
    for path in beside:
        path.write_text("not ours")
    manager = LocalCheckpointManager(tmp_path)
    if begin == "find_latest":
        assert manager.find_latest() == -1
    else:
        manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), 11)
    assert not left.exists() and all(path.exists() for path in beside)


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    left = killed_save(tmp_path)
    with open(left, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert LocalCheckpointManager(tmp_path).find_latest() == -1
        assert left.exists()
    assert LocalCheckpointManager(tmp_path).find_latest() == -1
    assert not left.exists()


class Swept:
    """Has the file looked for by a sweep while it is written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __reduce__(self) -> tuple[type, tuple[()]]:
        LocalCheckpointManager(self.root).find_latest()
        return dict, ()


def test_a_sweep_in_the_middle_of_a_save_takes_nothing_from_it(tmp_path: Path) -> None:
    place = LocalCheckpointManager(tmp_path).local_ckpt_dir
    place.mkdir(parents=True)
    save_whole({"w": torch.ones(3), "x": Swept(tmp_path)}, place / "iter_0000001_0_local.pt")
    assert LocalCheckpointManager(tmp_path).find_latest() == 1


def test_a_worker_without_work_that_is_still_starting_is_not_waited_for() -> None:
    caller = PersistentAsyncCaller(cpu_priority=None)
    caller.start()
    process = caller._alive.process  # type: ignore[union-attr]
    caller.close()
    assert process.exitcode in (-signal.SIGTERM, -signal.SIGKILL), "it read no end from its pipe"
    queue = AsyncCallsQueue(cpu_priority=None)
    queue.close()


def dies(root: str) -> None:
    (Path(root) / "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("persistent", "when"),
    [
        (True, "starting"),
        (False, "starting"),
        (True, "saving"),
        pytest.param(False, "saving", marks=pytest.mark.long),
        pytest.param(True, "idle", marks=pytest.mark.long),
        pytest.param(False, "idle", marks=pytest.mark.long),
    ],
)
def test_close_after_a_killed_worker_does_not_wait_for_it(
    tmp_path: Path, persistent: bool, when: str
) -> None:
    manager = LocalCheckpointManager(tmp_path)
    queue = AsyncCallsQueue(persistent=persistent, cpu_priority=None)
    save = manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), 1, is_async=True)
    if when == "saving":
        save = save._replace(async_fn=dies, async_fn_args=(str(tmp_path),))
    queue.schedule_async_request(save)
    if when == "idle":
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    if when != "saving":
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)
    with within(seconds(30)):
        if when == "idle":
            queue.close()
        else:
            with pytest.raises(AsyncCallFailedError, match="the worker"):
                queue.close()
    assert not multiprocessing.active_children()
    found = 1 if when == "idle" else -1
    assert LocalCheckpointManager(tmp_path).find_latest() == found
    assert not [*tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("utils", "debug_time debug_msg diff preload_tensors wrap_for_async"),
        ("local.replication.utils", "zip_strict"),
        (
            "local.replication.group_utils",
            "ProcessGroupLike GroupWrapper ExchangePlan ExchangePlanEntry batched",
        ),
        (
            "local.replication.strategies",
            "LazyCliqueReplicationStrategy LazyReplicationStrategyBuilder ReplicationStrategy",
        ),
        ("local.basic_state_dict", "TensorPlaceholder nested_values dict_list_map_inplace"),
    ],
)
def test_the_names_that_programs_import_are_there(module: str, names: str) -> None:
    found = importlib.import_module(f"smckpt.integrations.nvrx.{module}")
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_the_smaller_names_do_what_they_say(caplog: pytest.LogCaptureFixture) -> None:
    from smckpt.integrations.nvrx.local.basic_state_dict import dict_list_map_inplace
    from smckpt.integrations.nvrx.local.replication.group_utils import batched
    from smckpt.integrations.nvrx.local.replication.utils import zip_strict
    from smckpt.integrations.nvrx.utils import debug_time

    assert list(zip_strict([1, 2], "ab")) == [(1, "a"), (2, "b")]
    with pytest.raises(AssertionError, match=r"\[2, 3\]"):
        zip_strict([1, 2], "abc")
    assert list(batched(range(5), 2)) == [(0, 1), (2, 3), (4,)]
    nested = {"a": [1, {"b": 2}]}
    assert dict_list_map_inplace(lambda n: n + 1, nested) is nested == {"a": [2, {"b": 3}]}
    with debug_time("a block", threshold=0.0):
        pass
    assert "a block took" in caplog.text
