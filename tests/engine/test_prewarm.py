"""`prewarm`: what the first save waits for is there before it."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smckpt
from smckpt.engine.api import _RUNTIME
from smckpt.engine.saving import queue as queue_module
from smckpt.engine.saving.queue import SaveQueue
from smckpt.engine.saving.save import Saver
from smckpt.errors import StateError, UsageError
from smckpt.staging import arena
from tests.support.launch import run_ranks
from tests.support.limits import seconds, within

MANY = 1 << 18  # elements of a float32


def arenas() -> dict[int, int]:
    """Inode → bytes that the kernel has provided, of the arenas of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "smckpt-arena" in os.readlink(f"/proc/self/fd/{name}"):
                status = os.stat(f"/proc/self/fd/{name}")
                found[status.st_ino] = status.st_blocks * 512
    return found


def prewarmed(name: str) -> dict[int, int]:
    """The arenas, once the thread has ended that gets the memory."""
    (queue,) = _RUNTIME.queues(None, name)
    assert isinstance(queue, SaveQueue)
    if queue._reserving is not None:
        queue._reserving.join(seconds(60))
        assert not queue._reserving.is_alive()
    return arenas()


def train_and_save(folder: str, kind: str) -> tuple[dict[int, int], dict[int, int], bool]:
    """The arenas after the first step and after the saves; whether one worker did both."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, MANY // 512)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    options = smckpt.SaveOptions(queue="mine")

    def taken(step: int) -> dict[str, Any]:
        with smckpt.sm_state_dict_type(model, kind):
            of = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return {**of, "step": step}

    for step in range(1, 4):
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        if step == 1:
            smckpt.prewarm(taken(step), options=options)
            before = prewarmed("mine")
            (queue,) = _RUNTIME.queues(None, "mine")
            worker = queue._worker.pid  # type: ignore[attr-defined]
            assert worker is not None
        smckpt.save(taken(step), checkpoint_id=folder, options=options)
    after = arenas()
    smckpt.prewarm(taken(step), options=options)
    assert prewarmed("mine") == after  # nothing is got once there is an arena
    return before, after, queue._worker.pid == worker  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL])
def test_the_memory_and_the_worker_of_the_first_save_are_there_before_it(
    tmp_path: Path, kind: str
) -> None:
    ranks = run_ranks(train_and_save, 2, str(tmp_path), kind)
    for before, after, same in ranks:
        assert after == before and same
    # parameters and two moments; FULL has them on rank 0 alone
    assert sum(sum(before.values()) for before, *_ in ranks) >= 3 * 4 * MANY


def test_memory_that_the_host_lacks_is_left_to_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(16 << 20), "step": 1}
    with open("/proc/meminfo") as file:
        (free,) = [int(line.split()[1]) << 10 for line in file if "MemAvailable" in line]
    # each takes 64 MiB and a reserve of 64: there is room for one arena of each, and not for two
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(free // (160 << 20)))
    options, others = smckpt.SaveOptions(queue="narrow"), arenas()
    smckpt.prewarm(state, options=options)
    assert prewarmed("narrow") == others
    smckpt.save(state, checkpoint_id=tmp_path, options=options)
    assert len(arenas()) == len(others) + 1
    _RUNTIME.drop("narrow", 10)


def test_what_cannot_be_saved_is_refused_before_the_first_save() -> None:
    with pytest.raises(StateError, match="meta"):
        smckpt.prewarm({"w": torch.ones(2, 2, device="meta")})
    with pytest.raises(UsageError, match="SaveOptions"):
        smckpt.prewarm({"w": torch.ones(1)}, options={"queue": "mine"})  # type: ignore[arg-type]


def wait_until(what: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds(60)
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, the kernel provides no pages of an arena."""
    populate, goes_on = arena._populate, threading.Event()

    def waits(memory: mmap.mmap, start: int, length: int) -> int:
        assert goes_on.wait(seconds(60))
        return populate(memory, start, length)

    monkeypatch.setattr(arena, "_populate", waits)
    yield goes_on
    goes_on.set()


def test_a_queue_that_closes_meanwhile_does_not_wait_and_leaves_no_memory(
    late: threading.Event,
) -> None:
    others = arenas()
    smckpt.prewarm({"w": torch.ones(MANY)}, options=smckpt.SaveOptions(queue="short"))
    (queue,) = _RUNTIME.queues(None, "short")
    assert isinstance(queue, SaveQueue)
    thread = queue._reserving
    assert thread is not None
    wait_until(lambda: len(arenas()) > len(others))  # it is being made
    _RUNTIME.drop("short", 10)
    assert thread.is_alive()
    late.set()
    thread.join(seconds(60))
    assert arenas() == others


def test_a_close_waits_for_the_call_that_pins_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would be unmapped while CUDA registers it."""
    begun, goes_on, closed = threading.Event(), threading.Event(), list[bool]()

    def pin(self: arena.Arena, device: torch.device) -> None:
        begun.set()
        assert goes_on.wait(seconds(60))
        closed.append(self.closed)

    monkeypatch.setattr(arena.Arena, "pin", pin)
    monkeypatch.setattr(queue_module, "beside_captures", lambda: True)
    monkeypatch.setattr(Saver, "needs", lambda *_: (MANY, MANY, torch.device("cuda", 0)))
    others = arenas()
    smckpt.prewarm({"w": torch.ones(1)}, options=smckpt.SaveOptions(queue="pins"))
    (queue,) = _RUNTIME.queues(None, "pins")
    assert isinstance(queue, SaveQueue) and begun.wait(seconds(60))
    thread, closing = queue._reserving, threading.Thread(target=_RUNTIME.drop, args=("pins", 10))
    closing.start()
    closing.join(2)  # it would have ended if it did not wait
    goes_on.set()
    closing.join(seconds(60))
    assert thread is not None
    thread.join(seconds(60))
    assert closed == [False] and arenas() == others


def test_another_call_and_a_save_under_way_are_not_waited_for(
    tmp_path: Path, late: threading.Event
) -> None:
    options, state = smckpt.SaveOptions(queue="twice"), {"w": torch.ones(MANY), "step": 1}
    smckpt.prewarm(state, options=options)
    with within(seconds(30)):
        smckpt.prewarm(state, options=options)
    late.set()
    smckpt.save(state, checkpoint_id=tmp_path, options=options)
    (queue,) = _RUNTIME.queues(None, "twice")
    worker = queue._worker  # type: ignore[attr-defined]
    with worker._lock, within(seconds(30)):  # as while it writes
        smckpt.prewarm(state, options=options)
    _RUNTIME.drop("twice", 10)


def test_the_wait_for_memory_counts_as_blocked(tmp_path: Path, late: threading.Event) -> None:
    options, state = smckpt.SaveOptions(queue="counts"), {"w": torch.ones(MANY), "step": 1}
    smckpt.prewarm(state, options=options)
    threading.Timer(0.5, late.set).start()
    began = time.perf_counter()
    handle = smckpt.async_save(state, checkpoint_id=tmp_path, options=options)
    blocked = time.perf_counter() - began
    assert handle is not None
    handle.result()
    assert handle.timings is not None
    assert 0.9 * blocked < handle.timings.blocked <= blocked
    _RUNTIME.drop("counts", 10)
