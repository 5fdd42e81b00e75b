"""Carrying out a read plan: which thread reads."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.checkpoint import read
from smckpt.storage.posix import PosixStorage

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
    monkeypatch.setattr(read, "_processors", lambda: processors)
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
