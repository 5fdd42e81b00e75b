"""NVRx's local checkpoints: classes of the user's over them, other writers, and other jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.errors import UsageError
from smckpt.integrations.nvrx.async_ckpt.core import AsyncCallsQueue
from smckpt.integrations.nvrx.async_ckpt.filesystem_async import FileSystemWriterAsync
from smckpt.integrations.nvrx.local.base_state_dict import TensorAwareStateDict
from smckpt.integrations.nvrx.local.basic_state_dict import BasicTensorAwareStateDict
from smckpt.integrations.nvrx.local.ckpt_managers.base_manager import (
    BaseCheckpointManager,
    CkptID,
    SameMachineReplicationException,
)
from smckpt.integrations.nvrx.local.ckpt_managers.local_manager import LocalCheckpointManager
from smckpt.integrations.nvrx.local.replication.strategies import CliqueReplicationStrategy
from smckpt.manager.memory import SERVICE
from tests.support import child
from tests.support.faults.hosts import keeper_service
from tests.support.frameworks import nvrx_ranks
from tests.support.launch import run_ranks

# -- classes of the user's -----------------------------------------------------------------------


class Halves(LocalCheckpointManager):
    """Saves in half precision."""

    def _save(self, state_dict: Any, ckpt_id: CkptID) -> None:
        state_dict.state_dict = {k: v.half() for k, v in state_dict.state_dict.items()}
        super()._save(state_dict, ckpt_id)


class Flat(BaseCheckpointManager):
    """A manager that a user wrote with NVRx's abstract methods alone."""

    def __init__(self, root: Path) -> None:
        super().__init__("s")
        self.root = root

    def _path(self, ckpt_id: CkptID) -> Path:
        return self.root / f"{ckpt_id[0]}-{ckpt_id[1]}.pt"

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        for path in self.root.glob("*.pt"):
            iteration, rank = path.stem.split("-")
            yield int(iteration), int(rank), self.session_id

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        found: TensorAwareStateDict = torch.load(self._path(ckpt_id), weights_only=False)
        return found

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        if self._path(ckpt_id).exists():
            raise SameMachineReplicationException(ckpt_id)
        torch.save(state_dict, self._path(ckpt_id))

    def _cleanup(self, iteration: int) -> None:
        for ckpt_id in list(self._my_ckpt_ids()):
            if ckpt_id[0] < iteration:
                self._path(ckpt_id).unlink()

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._path(self._ckpt_id(iteration)).unlink()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [Halves, Flat])
def test_the_users_own_methods_write_and_read(tmp_path: Path, kind: Any, is_async: bool) -> None:
    for iteration in (1, 2):
        manager = kind(tmp_path)
        state = BasicTensorAwareStateDict({"w": torch.full((3,), float(iteration))})
        request = manager.save(state, iteration, is_async=is_async)
        if request is not None:
            queue = AsyncCallsQueue(cpu_priority=None)
            queue.schedule_async_request(request)
            assert queue.maybe_finalize_async_calls(blocking=True) == [0]
            queue.close()
        for thread in threading.enumerate():
            if thread.name == "smckpt-local":  # it removes what is older
                thread.join()
    manager = kind(tmp_path)
    assert manager.find_latest() == 2
    loaded, _ = manager.load()
    assert loaded.state_dict["w"].dtype == (torch.half if kind is Halves else torch.float)
    assert loaded.state_dict["w"].tolist() == [2.0] * 3
    assert len([*tmp_path.rglob("*.pt")]) == 1


@pytest.mark.parametrize(
    "name", ["preload_tensors", "write_preloaded_data", "write_preloaded_data_multithread"]
)
def test_an_overridden_function_that_nothing_calls_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"Own\.{name} would never be called"):
        type("Own", (FileSystemWriterAsync,), {name: staticmethod(lambda *_: None)})
    type("Own", (FileSystemWriterAsync,), {"finish": FileSystemWriterAsync.finish})


def test_an_error_of_nvrxs_name_says_which_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "3-0.pt").touch()
    with pytest.raises(Exception, match="not whole|on this machine") as raised:
        Flat(tmp_path)._save(BasicTensorAwareStateDict({}), (3, 0, "s"))
    assert "(3, 0, 's') is on this machine already" in str(raised.value)


# -- other writers, other jobs --------------------------------------------------------------------


@pytest.mark.parametrize("iteration", [3, 5])
def test_what_a_killed_save_of_nvrxs_own_left_goes_when_nvrx_would_remove_it(
    tmp_path: Path, iteration: int
) -> None:
    manager = LocalCheckpointManager(tmp_path)
    manager.local_ckpt_dir.mkdir()
    left = manager.local_ckpt_dir / f"iter_{iteration:07}_0_local.dirty.pt"
    left.write_bytes(b"half")
    manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), 4)
    assert left.exists() == (iteration > 4)


def test_a_state_that_nvrx_itself_pickled_is_read() -> None:
    """Its class has these attributes, and no others."""
    state = BasicTensorAwareStateDict.__new__(BasicTensorAwareStateDict)
    vars(state).update(state_dict={"w": torch.ones(2)}, _is_hollow=False)
    assert not state.is_hollow
    (tensor,) = state.pop_tensors()
    state.insert_tensors([tensor])
    if torch.cuda.is_available():
        state.restore_tensor_device()
    else:  # as NVRx: what it saved was on CUDA
        with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
            state.restore_tensor_device()
    assert {"state_dict", "_is_hollow"} <= vars(BasicTensorAwareStateDict({})).keys()


def test_a_smaller_job_takes_no_part_of_a_larger_ones_states(tmp_path: Path) -> None:
    """A rank that keeps copies has the states of a rank that this job does not have."""
    place = LocalCheckpointManager(tmp_path).local_ckpt_dir
    place.mkdir()
    for rank in (0, 1):
        torch.save(0, place / f"iter_0000004_{rank}_local.pt")
    copies: Any = object.__new__(CliqueReplicationStrategy)
    assert LocalCheckpointManager(tmp_path).find_latest() == 4, "without copies, a rank's own"
    assert LocalCheckpointManager(tmp_path, "", copies).find_latest() == -1


@pytest.mark.parametrize("wrong", [None, [0, 1], 2])
def test_what_is_no_process_group_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="is no process group"):
        CliqueReplicationStrategy(wrong)


def test_no_jump_of_0_ranks_is_taken_for_another() -> None:
    assert all(run_ranks(nvrx_ranks.a_jump_of_no_ranks, 2))


# -- in the memory of the hosts -------------------------------------------------------------------

KEPT = """
import hashlib, os, sys
import torch, torch.distributed as dist
from smckpt import Memory
from smckpt.integrations.nvrx.async_ckpt.core import AsyncCallsQueue
from smckpt.integrations.nvrx.local.basic_state_dict import BasicTensorAwareStateDict
from smckpt.integrations.nvrx.local.ckpt_managers.local_manager import LocalCheckpointManager

if __name__ == "__main__":
    root, interval, is_async, die = sys.argv[1], *map(int, sys.argv[2:])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    live, done = {"w": torch.zeros(5), "half": [torch.zeros(3).bfloat16()]}, 0
    memory = {"memory": Memory(interval)}
    manager = LocalCheckpointManager(f"{root}/node{rank}", "s", smckpt_arguments=memory)
    queue, began = AsyncCallsQueue(cpu_priority=None), manager.find_latest()
    if began != -1:
        state, named = manager.load()
        assert named == (began, rank, "s")
        live, done, random = (state.state_dict[each] for each in ("live", "done", "random"))
        assert done == began
        torch.set_rng_state(random)
    for iteration in range(done + 1, 9):
        live["w"] += torch.rand(5)
        live["half"][0] += iteration
        told = {"live": live, "done": iteration, "random": torch.get_rng_state()}
        request = manager.save(BasicTensorAwareStateDict(told), iteration, is_async=bool(is_async))
        assert (request is not None) == bool(is_async)
        if request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        if iteration == die:
            dist.barrier()
            os._exit(9)
    queue.close()
    assert manager.find_latest() == 8
    digest = hashlib.sha256(torch.cat([live["w"], live["half"][0].float()]).numpy().tobytes())
    # one write: lines of ranks do not mix
    os.write(1, f"{rank} {began} {digest.hexdigest()}\\n".encode())
    dist.destroy_process_group()
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Runs the script beside a keeper that outlives it: per rank, its number, the iteration that it
    began from, and a digest of what it had at the end."""
    script = tmp_path / "train.py"
    script.write_text(KEPT)

    def run(name: str, *words: int, ranks: int = 2) -> list[list[str]]:
        root = str(tmp_path / name)
        done = child.script(script, root, *map(str, words), ranks=ranks, torchrun=True)
        assert (done.returncode != 0) == (words[-1] > 0), done.stderr[-4000:]
        return sorted(line.split() for line in done.stdout.splitlines())

    with keeper_service() as (service, _):
        monkeypatch.setenv(SERVICE, service)
        yield run


@pytest.mark.parametrize("is_async", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_job_goes_on_bit_for_bit_from_memory_alone(
    tmp_path: Path, train: Callable[..., Any], is_async: int
) -> None:
    train("run", 1, is_async, 5)
    assert [*tmp_path.rglob("*.pt")] == []  # nothing was on disk
    resumed, straight = train("run", 1, is_async, 0), train("straight", 1, is_async, 0)
    assert [began for _, began, _ in resumed] == ["5", "5"]
    assert [began for _, began, _ in straight] == ["-1", "-1"]
    assert [digest for *_, digest in resumed] == [digest for *_, digest in straight]


@pytest.mark.long
def test_the_newest_of_memory_and_of_the_directories_counts_for_as_many_ranks(
    tmp_path: Path, train: Callable[..., Any]
) -> None:
    assert train("run", 2, 1, 5) == []
    assert {path.name[:12] for path in tmp_path.rglob("*.pt")} == {"iter_0000005"}
    assert train("run", 2, 1, 6) == []
    assert [began for _, began, _ in train("run", 2, 1, 0)] == ["6", "6"]
    assert [began for _, began, _ in train("run", 2, 0, 0, ranks=1)] == ["7"]  # 8 is of two ranks


@pytest.mark.parametrize(
    ("kind", "copies", "more", "named"),
    [
        (Halves, None, {}, "with which _save would not be called"),
        (LocalCheckpointManager, "some", {}, "memory beside repl_strategy"),
        (LocalCheckpointManager, None, {"storage": {}}, "has storage, which is not honoured"),
    ],
)
def test_what_memory_would_not_honour_is_refused(
    tmp_path: Path, kind: Any, copies: Any, more: dict[str, Any], named: str
) -> None:
    arguments = {"memory": smckpt.Memory(1), **more}
    with pytest.raises(UsageError, match=named):
        kind(tmp_path, "s", copies, smckpt_arguments=arguments)


@pytest.mark.parametrize(
    ("is_stuck", "named"),
    [(False, "cannot pickle '_thread.lock' object"), (True, "the tensors are stuck")],
)
def test_a_state_that_a_rank_cannot_take_apart_fails_the_save_on_all_ranks(
    is_stuck: bool, named: str
) -> None:
    errors = run_ranks(nvrx_ranks.a_state_that_one_rank_cannot_take_apart, 2, is_stuck)
    assert all(named in error for error in errors), errors


def test_what_rank_0_alone_hears_at_a_save_in_memory_all_ranks_hear_when_they_finalize() -> None:
    for errors in run_ranks(nvrx_ranks.a_later_job_saves_in_memory, 2):
        assert len(errors) == 2, errors
        assert all("a later job has saved step 9" in error for error in errors)


def test_an_iteration_in_memory_does_not_count_for_one_that_a_rank_did_not_write(
    tmp_path: Path,
) -> None:
    ranks = nvrx_ranks.a_rank_does_not_write_before_a_newer_one_is_in_memory
    for error, newest in run_ranks(ranks, 2, str(tmp_path)):
        assert "iteration 11 is not whole: the newest that is, is 9" in error
        assert newest == 9


def test_where_memory_does_not_load_the_next_older_iteration_is_found(tmp_path: Path) -> None:
    for outcome in run_ranks(nvrx_ranks.what_memory_has_does_not_load, 2, str(tmp_path)):
        found, error, older, values = outcome
        assert (found, older, values) == (2, 1, [1])
        assert "iteration 2 in memory is gone" in error
