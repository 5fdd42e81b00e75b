"""NVRx's names over a worker of ours: its guide's loops, and the faults that were measured."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from smckpt.errors import UsageError
from smckpt.integrations.nvrx.async_ckpt import TorchAsyncCheckpoint
from smckpt.integrations.nvrx.async_ckpt.core import (
    AsyncCallFailedError,
    AsyncCallsQueue,
    AsyncRequest,
    abort_nvrx_checkpoint,
)
from smckpt.integrations.nvrx.async_ckpt.filesystem_async import (
    FileSystemWriterAsync,
    get_write_results_queue,
)
from tests.support import child
from tests.support.frameworks import nvrx_ranks
from tests.support.launch import run_ranks
from tests.support.limits import seconds

SUPPORT = Path(__file__).parents[1] / "support" / "frameworks"
RUN = ("-m", "smckpt.run", "--for", "nvrx")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def ends(pid: int) -> bool:
    """Whether a process that is not our child ends in time."""
    deadline = time.monotonic() + seconds(30)
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_the_guides_loop_is_killed_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    guide, out = SUPPORT / "nvrx_guide.py", tmp_path / "run"
    died = child.script(guide, str(out), "die", ranks=2, by=RUN)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    workers = [int(pid) for path in out.glob("*/worker") for pid in path.read_text().split()]
    assert len(workers) == 2 and all(map(ends, workers)), "a worker ends with its trainer"
    done = child.script(guide, str(out), "resume", ranks=2, by=RUN)
    assert done.returncode == 0, done.stderr[-4000:]
    told = child.told(done)
    assert len(told) == 2 and all(rank["resumed"] == rank["straight"] for rank in told)
    assert "smckpt run: provided nvidia_resiliency_ext\n" in done.stderr


@pytest.mark.long
def test_the_guides_save_to_multi_storage_client_is_killed_and_goes_on(
    msc_root: str,
) -> None:
    script, place = SUPPORT / "nvrx_dcp.py", msc_root
    died = child.script(script, place, "die", ranks=2, by=RUN)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr
    done = child.script(script, place, "resume", ranks=2, by=RUN)
    assert done.returncode == 0, done.stderr[-4000:]
    told = child.told(done)
    assert len(told) == 2 and all(rank["resumed"] == rank["straight"] for rank in told)


# -- the faults that were measured -------------------------------------------------------------


def test_no_cache_saves_old_weights_or_drops_a_name(tmp_path: Path) -> None:
    for rank in run_ranks(nvrx_ranks.each_save_has_the_state_of_its_moment, 2, str(tmp_path)):
        told = rank["told"]
        assert [told[number] for number in (1, 2, 3)] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
        assert told[4] == [7.0], "a name that came later is saved"
        assert told["before"] == [1.0] * 2 and told["after"] == [-1.0, -1.0, 7.0]
        assert rank["reused"] == [False, True, True, False]


@pytest.mark.long
def test_a_failed_save_is_told_on_every_rank_and_once(tmp_path: Path) -> None:
    first, second = run_ranks(nvrx_ranks.a_failure_is_told_on_both_ranks, 2, str(tmp_path))
    for told in (first, second):
        for name in ("dcp", "fresh"):
            assert told[name].startswith("dcp: ") and "No space left" in told[name]
        assert "rank 1" in told["own False"] and "No space left" in told["own False"]
        assert told["finalized False"] == [] and told["then"] == ""
    assert first["own True"] == "" and first["finalized True"] == [1]
    assert "No space left" in second["own True"] and second["finalized True"] == []
    # an older checkpoint there is not mixed with what the other rank wrote
    assert not (tmp_path / "dcp" / ".metadata").exists()


@pytest.mark.long
def test_a_killed_worker_is_told_on_every_rank_and_replaced(tmp_path: Path) -> None:
    first, second = run_ranks(nvrx_ranks.a_worker_dies, 2, str(tmp_path))
    for told in (first, second):
        assert "the worker died while it wrote this save" in told["0"] and "rank 1" in told["0"]
        assert told["1"] == "" and told["written 1"]
        assert told["dcp"].startswith("dcp: ") and not told["metadata"]
    assert "exit status -9" in second["dcp"] and "exit status -9" in first["dcp"]


def test_ranks_that_finalize_different_calls_are_refused() -> None:
    for told in run_ranks(nvrx_ranks.ranks_at_different_calls, 2):
        assert told.startswith("usage: ") and "others at 0 to 1" in told


def waits_then_keeps(gate: Path, path: Path, state: Any) -> None:
    deadline = time.monotonic() + seconds(60)
    while not gate.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    torch.save(state, path)


def test_a_tensor_is_saved_as_it_was_when_the_request_was_scheduled(tmp_path: Path) -> None:
    queue, gate = AsyncCallsQueue(), tmp_path / "gate"
    base = torch.zeros(4, 1000)
    state = {"base": base, "row": base[1], "strided": base.t()[::2], "bf16": base[0].bfloat16()}
    for number in range(16):
        base.fill_(number)
        state["bf16"].fill_(number)
        path = tmp_path / f"{number}.pt"
        queue.schedule_async_request(AsyncRequest(waits_then_keeps, (gate, path, state), []))
    base.fill_(-1)
    gate.touch()
    assert queue.maybe_finalize_async_calls(blocking=True) == list(range(16))
    for number in range(16):
        found = torch.load(tmp_path / f"{number}.pt")
        assert all((value == number).all() for value in found.values())
        assert found["row"].data_ptr() == found["base"][1].data_ptr()
    queue.close()


FORGETFUL = """
import sys, torch
from smckpt.integrations.nvrx.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from smckpt.integrations.nvrx.async_ckpt import save_whole
queue = AsyncCallsQueue(is_daemon=sys.argv[3] == "daemon")
finalize = [lambda: None] if sys.argv[2] == "finalize" else []
queue.schedule_async_request(AsyncRequest(save_whole, (torch.ones(3), sys.argv[1]), finalize))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["daemon", "process"])
def test_a_program_that_forgets_a_save_waits_for_it_and_tells(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text("if __name__ == '__main__':\n" + FORGETFUL.replace("\n", "\n    "))
    there, missing = tmp_path / "there.pt", tmp_path / "missing" / "never.pt"
    done = child.script(script, str(there), "", kind)
    assert done.returncode == 0, done.stderr
    assert torch.load(there).tolist() == [1.0] * 3
    done = child.script(script, str(there), "finalize", kind)
    assert done.returncode == 1 and "was never finalized" in done.stderr
    done = child.script(script, str(missing), "", kind)
    assert done.returncode == 1 and "No such file" in done.stderr


@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_lost_local_checkpoint_comes_back_from_another_rank(
    tmp_path: Path, persistent: bool
) -> None:
    lost = nvrx_ranks.a_rank_that_lost_its_disk_gets_its_state_from_a_copy
    ranks = run_ranks(lost, 2, str(tmp_path), persistent)
    for rank, (names, alone, found, id_, values, refused) in enumerate(ranks):
        assert names == ["iter_0000004_0_local.pt", "iter_0000004_1_local.pt"]
        assert alone == -1 and found == 4 and id_ == (4, rank, "session")
        assert values == [[40.0 + rank] * 5, [40.0 + rank] * 2]
        assert "call find_latest() first" in refused and "iteration 5 is not whole" in refused


# -- arguments and calls -----------------------------------------------------------------------


def tells(queue: Any, number: int) -> None:
    queue.put({"number": number, "priority": os.nice(0), "pid": os.getpid()})
    queue.put(torch.ones(2).tolist())


def doubled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: 2 * value for name, value in state.items()}


def keeps(path: Path, state: Any, *, suffix: str) -> None:
    torch.save(state, f"{path}{suffix}")


def test_a_request_runs_in_a_worker_with_its_preload_and_results(tmp_path: Path) -> None:
    from functools import partial

    queue, results, order = AsyncCallsQueue(cpu_priority=15), get_write_results_queue(), []
    queue.schedule_async_request(AsyncRequest(tells, (results, 3), []))
    preload = partial(doubled, {"a": torch.full((3,), 4.0)})
    request = AsyncRequest(keeps, [tmp_path / "x", None], [], {"suffix": ".pt"}, preload)
    request.add_finalize_fn(lambda: order.append("first"))
    request.add_finalize_fn(lambda: order.append("second"))
    assert queue.schedule_async_request(request) == 1
    assert queue.get_num_unfinalized_calls() == 2
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(lambda: None)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert order == ["first", "second"]
    assert torch.load(f"{tmp_path}/x.pt")["a"].tolist() == [8.0] * 3
    said = results.get_nowait()
    assert said["number"] == 3 and said["pid"] != os.getpid()
    assert said["priority"] == max(15, os.nice(0))
    assert results.get_nowait() == [1.0, 1.0] and results.empty()
    queue.close()
    assert queue.schedule_async_request(request) == 0, "it counts anew, with another worker"
    queue.close()
    assert order == ["first", "second"] * 2


@pytest.mark.long
def test_a_worker_for_each_request_ends_with_it(tmp_path: Path) -> None:
    queue, pids = AsyncCallsQueue(persistent=False), []
    for number in (1, 2):
        results = get_write_results_queue()
        queue.schedule_async_request(AsyncRequest(tells, (results, number), []))
        queue.maybe_finalize_async_calls(blocking=True)
        pids.append(results.get_nowait()["pid"])
    assert pids[0] != pids[1] and not any(map(alive, pids))
    queue.close()


def hangs(started: Path, ended: Path) -> None:
    try:
        started.write_text(str(os.getpid()))
        started.with_name("pid").symlink_to(started)
        signal.pause()
        started.with_name("survived").touch()
        signal.pause()
    finally:
        ended.touch()


def comes(path: Path) -> bool:
    deadline = time.monotonic() + seconds(60)
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from smckpt.integrations.nvrx.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from tests.integrations.test_nvrx import comes, hangs
queue, started = AsyncCallsQueue(), Path(sys.argv[1])
queue.schedule_async_request(AsyncRequest(hangs, (started, started.with_name("ended")), []))
assert comes(started.with_name("pid"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_ends_with_its_trainer_in_the_middle_of_its_work(tmp_path: Path) -> None:
    script, started = tmp_path / "killed.py", tmp_path / "started"
    script.write_text("if __name__ == '__main__':\n" + KILLED.replace("\n", "\n    "))
    done = child.script(script, str(started))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ends(int(started.read_text()))


@pytest.mark.long
def test_an_abort_ends_the_worker_in_the_middle_of_its_work(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    queue = AsyncCallsQueue(sigterm_timeout=seconds(20))
    queue.schedule_async_request(AsyncRequest(hangs, (started, ended), [lambda: 1 / 0]))
    caller = queue.persistent_caller
    assert caller is not None
    assert comes(tmp_path / "pid")
    pid = caller._alive.process.pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGTERM)  # of a batch system: the trainer may still want to save
    assert comes(tmp_path / "survived") and queue.maybe_finalize_async_calls() == []
    abort_nvrx_checkpoint()
    assert not alive(pid) and ended.exists(), "its finally blocks have run"
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    path = tmp_path / "after.pt"
    queue.schedule_async_request(AsyncRequest(keeps, (path, 1), [], {"suffix": ""}))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and path.exists()
    queue.close()


def test_what_torch_save_takes_is_saved_and_a_cut_file_never_has_the_name(tmp_path: Path) -> None:
    path, saver = tmp_path / "one.pt", TorchAsyncCheckpoint()
    state = {"weights": torch.arange(6.0), "step": 3, "names": ["a", ("b", None)]}
    saver.async_save(state, path, _use_new_zipfile_serialization=False)
    state["weights"].zero_()
    saver.finalize_async_save(blocking=True)
    found = torch.load(path, weights_only=False)
    assert found["weights"].tolist() == [0, 1, 2, 3, 4, 5] and found["names"] == ["a", ("b", None)]
    saver.async_save(state, path, pickle_protocol="no number")
    with pytest.raises(AsyncCallFailedError, match="in the worker"):
        saver.finalize_async_save(blocking=True)
    assert torch.load(path, weights_only=False)["step"] == 3, "the file of before is whole"
    assert os.listdir(tmp_path) == ["one.pt"]
    with (tmp_path / "file").open("wb") as file, pytest.raises(UsageError, match="sent to the"):
        saver.async_save(state, file)
    saver.finalize_async_save(terminate=True)


def test_what_is_not_honoured_is_refused_by_name(tmp_path: Path) -> None:
    queue = AsyncCallsQueue()
    with pytest.raises(UsageError, match="cannot be sent to the worker.*top of a module"):
        queue.schedule_async_request(AsyncRequest(lambda: None, (), []))
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()
    for wrong in ({"cpu_priority": 20}, {"io_priority": 4}, {"sigterm_timeout": -1.0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            AsyncCallsQueue(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="thread_count=1"):
        FileSystemWriterAsync(tmp_path, separation_hint="optimizer")
    with pytest.raises(NotImplementedError, match="single_file_per_rank"):
        FileSystemWriterAsync(tmp_path, single_file_per_rank=False)
    with pytest.raises(UsageError, match="open_file"):
        FileSystemWriterAsync("s3://bucket/key", open_file=os.fdopen)
    with pytest.raises(UsageError, match="mp_mode"):
        get_write_results_queue("forked")
