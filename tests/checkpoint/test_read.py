"""Carrying out a read plan: which thread reads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.checkpoint.reading import read
from smckpt.checkpoint.reading.blocks import Destination
from smckpt.storage.disk.posix import PosixStorage

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts of Linux")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """192 MiB: several requests."""
    smckpt.save({"w": torch.arange(48 << 20, dtype=torch.int32)}, checkpoint_id=tmp_path)
    return tmp_path


def reading_threads(
    saved: Path, monkeypatch: pytest.MonkeyPatch, processors: int, waits: bool
) -> list[bool]:
    """Of each request, whether it ran in the thread that loads; what was loaded is checked."""
    from_cache = PosixStorage.read_into
    seen: list[bool] = []

    def slow_or_not(self: Any, name: str, *arguments: Any) -> None:
        if name.endswith(".safetensors") and sum(b.nbytes for b in arguments[1]) > 1 << 20:
            seen.append(threading.current_thread() is threading.main_thread())
            for _ in range(5 if waits else 0):  # as a disk that answers in its own time
                threading.Event().wait(0.001)
        from_cache(self, name, *arguments)

    monkeypatch.setattr(PosixStorage, "read_into", slow_or_not)
    monkeypatch.setattr(read.os, "sched_getaffinity", lambda _: range(processors))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    state = {"w": torch.zeros(48 << 20, dtype=torch.int32)}
    smckpt.load(state, checkpoint_id=saved)
    assert torch.equal(state["w"], torch.arange(48 << 20, dtype=torch.int32))
    return seen


def test_a_rank_with_one_processor_reads_what_is_cached_itself(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading_threads(saved, monkeypatch, 4, waits=False)  # into the cache
    for _ in range(5):  # a busy machine may drop it from the cache, or wait for another's disk
        here = reading_threads(saved, monkeypatch, 3, waits=False)
        if all(here):
            break
    assert len(here) > 2 and all(here)


def test_threads_help_as_soon_as_it_waits(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = reading_threads(saved, monkeypatch, 2, waits=True)
    assert first and len(others) > 1 and not any(others)


def test_where_there_are_processors_threads_read_from_the_start(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(reading_threads(saved, monkeypatch, 4, waits=False))


class Far:
    """Memory that no read can write to, as a device's. A slice shares it."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> Far:
        return Far(self.data[part])

    def __setitem__(self, part: slice, other: Far) -> None:
        self.data[part] = other.data


class Lends:
    """Host memory for far memory, as the ring of a device."""

    request_bytes = 32 << 20

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.under_way: list[tuple[Far, memoryview]] = []

    @contextmanager
    def lent(self, segments: Sequence[Destination]) -> Iterator[Sequence[Destination]]:
        hosts = [s._replace(buffer=memoryview(bytearray(len(s.buffer)))) for s in segments]
        yield hosts
        self.sizes.append(sum(len(s.buffer) for s in segments))
        for host, segment in zip(hosts, segments, strict=True):
            self.under_way.append((segment.buffer, host.buffer))

    def finish(self) -> None:
        for far, host in self.under_way:
            far.data[:] = host


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Lends:
    """Loads fill far memory, but for targets that short runs fill."""
    ring, execute = Lends(), read.execute

    def through(copies: Any, buffers: Sequence[Any], *more: Any, **options: Any) -> Any:
        near = read.scattered(copies)
        spans = [b if n in near or not len(b) else Far(b) for n, b in enumerate(buffers)]
        return execute(copies, spans, *more, **{**options, "ring": ring})

    monkeypatch.setattr("smckpt.engine.load.execute", through)
    return ring


def test_what_no_read_can_write_to_is_filled_through_host_memory(
    tmp_path: Path, ring: Lends
) -> None:
    """Tensors of no element, of a few and of several requests, and rows that short runs fill."""
    saved = {f"t{n}": torch.randn(n) for n in (0, 1, 7, 1000, 20 << 20)}
    saved["rows"] = torch.randn(400, 30)
    smckpt.save(saved, checkpoint_id=tmp_path)
    target = {key: torch.full_like(value, 9.0) for key, value in saved.items()}
    target["rows"] = torch.full((800, 30), 9.0)[::2]
    smckpt.load(target, checkpoint_id=tmp_path)
    assert all(torch.equal(target[key], saved[key]) for key in saved)
    assert len(ring.sizes) == 3 and max(ring.sizes) <= ring.request_bytes


def test_bytes_that_two_far_targets_need_are_read_once(
    tmp_path: Path, ring: Lends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the step of a flat parameter, which each of its parameters has."""
    saved, other = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    smckpt.save({"w": saved}, checkpoint_id=tmp_path)

    def twice(copies: Any, buffers: Sequence[Any], *more: Any, **options: Any) -> Any:
        copies.append(copies[0]._replace(target=1))
        spans = [*map(Far, buffers), Far(memoryview(other.numpy()).cast("B"))]
        return read.execute(copies, spans, *more, **{**options, "ring": ring})

    monkeypatch.setattr("smckpt.engine.load.execute", twice)
    target = {"w": torch.zeros(1000, dtype=torch.int64)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], saved) and torch.equal(other, saved)
    assert sum(ring.sizes) == 8000


def test_a_bad_block_does_not_reach_far_memory(tmp_path: Path, ring: Lends) -> None:
    smckpt.save({"w": torch.ones(1 << 20)}, checkpoint_id=tmp_path)
    data = next(tmp_path.rglob("*.safetensors"))
    with open(data, "r+b") as file:
        file.seek(3 << 20)
        file.write(b"wrong")
    target = {"w": torch.zeros(1 << 20)}
    with pytest.raises(smckpt.CorruptCheckpointError, match="checksum differs"):
        smckpt.load(target, checkpoint_id=tmp_path)
    assert not target["w"].any() and ring.sizes == []


@pytest.mark.parametrize("bad", [[0], [3], [4], [5, 6], [12]])
def test_a_bad_block_among_several_that_are_read_at_once_is_named(
    tmp_path: Path, bad: list[int]
) -> None:
    saved = torch.randn(3 << 20)
    smckpt.save({"w": saved}, checkpoint_id=tmp_path)
    data = next(tmp_path.rglob("*.safetensors"))
    with open(data, "r+b") as file:
        for block in bad:
            file.seek((block << 20) + (100 if block else 5000))
            file.write(b"wrong")
    target = {"w": torch.zeros(3 << 20)}
    found = rf"bytes {bad[0] << 20} to \d+ of .* differ from what was written"
    with pytest.raises(smckpt.CorruptCheckpointError, match=found):
        smckpt.load(target, checkpoint_id=tmp_path, options=smckpt.LoadOptions(threads=1))
