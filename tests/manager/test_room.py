"""Before the first save: what a step takes, and whether there is room."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smckpt import CheckpointManager, ParallelState, find_checkpoints
from smckpt.errors import StorageError
from smckpt.manager import room
from smckpt.manager.retention import Best, Every, Newest
from smckpt.manager.room import Room, degrees_text, room_at
from smckpt.storage import open_storage
from tests.support.launch import run_ranks

STATE = {"model": torch.nn.Linear(1000, 1000)}  # 4 MB


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(nbytes: int | None) -> None:
        told = None if nbytes is None else Room(nbytes, "the file system")
        monkeypatch.setattr(room, "room_at", lambda _: told)

    return of


def test_a_step_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, left: Any
) -> None:
    left(4_000_000)
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(StorageError, match=r"a step takes 4\.0 MB, and there are 4\.0 MB left"):
            manager.save(1, STATE)
        assert not (tmp_path / "run").exists()
        left(5_000_000)
        manager.save(2, STATE)
    assert [one.step for one in find_checkpoints(tmp_path / "run")] == [2]


def test_what_the_rules_keep_must_fit_too(tmp_path: Path, left: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="smckpt")
    left(13_000_000)
    for keep, fits in ((1, True), (2, True), (3, False)):
        caplog.clear()
        with CheckpointManager(tmp_path / str(keep), keep_last_n=keep) as manager:
            manager.save(1, STATE)
        assert any("room for 3 steps" in one.message for one in caplog.records)
        warned = [one.message for one in caplog.records if one.levelno == logging.WARNING]
        assert len(warned) == (not fits), warned
    assert "keep up to 3 steps" in warned[0] and "16.1 MB" in warned[0]


def test_the_best_are_kept_too_and_what_this_run_has_saved_may_go(caplog: Any, left: Any) -> None:
    left(100)
    keep = (Newest(2), Best("loss", 3), Every(1000))
    room.check_room(open_storage("/run"), {0: 20, 1: 10}, 2, keep, lambda: 80)
    assert not caplog.records
    room.check_room(open_storage("/run"), {0: 20, 1: 10}, 2, keep, lambda: 79)
    assert "keep up to 5 steps, and those of Every(steps=1000), and one more" in caplog.text


def test_where_nobody_tells_nothing_is_refused(tmp_path: Path, left: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="smckpt")
    assert room_at(open_storage("s3://bucket/run")) is None
    left(None)
    with CheckpointManager(tmp_path, keep_last_n=5) as manager:
        manager.save(1, STATE)
    assert "is not known" in caplog.text


def test_the_file_system_tells_of_a_place_that_is_not_there_yet(tmp_path: Path) -> None:
    told = room_at(open_storage(tmp_path / "a" / "b"))
    free = os.statvfs(tmp_path)
    assert told is not None and told.nbytes <= free.f_blocks * free.f_frsize


def test_a_file_system_without_a_size_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    assert room_at(open_storage(tmp_path)) is None


def test_the_smaller_of_quota_and_file_system_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def quotactl(command: int, device: bytes, user: int, answer: Any) -> int:
        asked.append((command, device, user))
        address = ctypes.cast(answer, ctypes.POINTER(ctypes.c_uint64))
        address[0], address[1], address[2] = 100, 50, 1024 * 99 + 24
        return 0

    monkeypatch.setattr(room, "_device_of", lambda _: "/dev/a")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(quotactl=quotactl))
    assert room_at(open_storage(tmp_path)) == Room(1000, "this user's quota")
    assert asked == [(0x80000700, b"/dev/a", os.getuid())]


def four_ranks(root: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("smckpt").addHandler(Kept())
    logging.getLogger("smckpt").setLevel(logging.INFO)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Linear(1000, 1000)
    fully_shard(model, mesh=mesh)
    with CheckpointManager(root) as manager:
        manager.save(1, {"model": model})
    kept = ("saves to", "is committed after", "committed step")
    return "\n".join(line for line in lines if any(words in line for words in kept))


def test_one_line_tells_degrees_groups_and_bytes(tmp_path: Path) -> None:
    told = run_ranks(four_ranks, 4, str(tmp_path))
    (found,) = find_checkpoints(tmp_path)
    assert (
        f"saves to {tmp_path}: 4 ranks (shard 2), 2 groups of 2; 4.1 MB a step, up to 1.0 MB a"
        in told[0]
    )
    assert "the first commit will tell the time of a save" in told[0]
    assert "a step is committed after" in told[0]
    assert abs(found.nbytes - 4_004_000) < 100_000
    for rank, shard in enumerate(told[:2]):  # the group of each coordinator: half of the step
        assert "committed step 1: 2.0 MB in" in shard and f"/1/shard{rank}" in shard
    assert "\n" not in told[1] and told[2:] == ["", ""]


def test_a_run_that_goes_on_knows_the_time_of_a_save(tmp_path: Path, caplog: Any) -> None:
    state = {"model": torch.nn.Linear(2, 2)}
    with CheckpointManager(tmp_path) as manager:
        took = manager.save(1, state).wait().committed
        manager.save(2, state)  # its manifest tells the time of the first
    caplog.set_level(logging.INFO, logger="smckpt")
    with CheckpointManager(tmp_path) as manager:
        manager.restore(into=state)
        manager.save(3, state)
    assert f"a save takes about {took:.3g} s, as the run's last one; " in caplog.text


def test_the_degrees_are_told_as_text() -> None:
    job = ParallelState(8, tensor_parallel_degree=2, hybrid_shard_degree=2, rank=0)
    assert degrees_text(job, []) == " (tp 2, shard 2, replicas 2)"
    names = ["dp_shard0_tp0", "dp_shard0_tp1", "dp_shard1_tp0", "dp_shard1_tp1", "dp_shard2_tp0"]
    assert degrees_text(None, names) == " (dp_shard 3, tp 2)"
    assert degrees_text(None, ["tp0_ep0_fsdp0", "tp0_ep0_fsdp1"]) == " (fsdp 2)"
    assert degrees_text(None, ["", ""]) == ""
