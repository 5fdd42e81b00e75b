"""A sink of events of somebody else: a record of each save and each load. Public names alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from tests.support.limits import seconds


@pytest.fixture
def events() -> Iterator[list[Any]]:
    heard: list[Any] = []
    remove = smckpt.add_sink(heard.append)
    yield heard
    remove()


def wait_for(count: int, events: list[Any]) -> None:
    """The queue's thread tells of a save, a moment after its handle is done."""
    deadline = time.monotonic() + seconds(60)
    while len(events) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(events) == count


class Hears(logging.Handler):
    """Sets `heard` when the log says `words`."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words, self.heard = words, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.words in record.getMessage():
            self.heard.set()


@pytest.fixture
def second_waits(caplog: Any) -> Iterator[threading.Event]:
    """Set when a save has begun to wait for the one before it."""
    handler = Hears("a save waits for save")
    with caplog.at_level(logging.INFO, "smckpt"):
        logging.getLogger("smckpt").addHandler(handler)
        yield handler.heard
        logging.getLogger("smckpt").removeHandler(handler)


def test_a_record_of_each_save_and_load(
    tmp_path: Path, events: list[Any], second_waits: threading.Event
) -> None:
    state = {"w": torch.ones(1 << 20)}
    options = smckpt.SaveOptions(queue="sink", on_commit=lambda _: second_waits.wait(seconds(60)))
    for step in (1, 2):
        handle = smckpt.async_save(state, checkpoint_id=tmp_path / "c", step=step, options=options)
    smckpt.maybe_finalize_async_calls()
    wait_for(2, events)
    smckpt.load(state, checkpoint_id=tmp_path / "c")
    first, second, load = events
    for number, event in enumerate((first, second)):
        assert isinstance(event, smckpt.SaveEvent)
        assert (event.step, event.number, event.queue) == (number + 1, number, "sink")
        assert (event.directory, event.outcome, event.error) == (
            str(tmp_path / "c"), "committed", None,
        )  # fmt: skip
        assert 0 < event.staged <= event.written <= event.committed
        assert event.nbytes >= 4 << 20 and event.rate > 0
    assert first.waited == 0 < second.waited < second.blocked  # the second waited for the first
    assert handle is not None and handle.timings is not None
    assert handle.timings.waited == second.waited
    assert handle.timings.staged == second.staged  # the wait is not counted as staging
    assert isinstance(load, smckpt.LoadEvent)
    assert (load.directory, load.step, load.outcome) == (str(tmp_path / "c"), 2, "loaded")
    assert 0 < load.chosen <= load.planned <= load.read <= load.ended
    assert load.nbytes == 4 << 20 and load.rate > 0


def test_failures_are_recorded_with_their_cause(tmp_path: Path, events: list[Any]) -> None:
    with pytest.raises(smckpt.CheckpointError):
        smckpt.load({"w": torch.ones(2)}, checkpoint_id=tmp_path / "none")
    with pytest.raises(smckpt.UsageError):
        smckpt.save({"w": torch.ones(2)}, options=smckpt.SaveOptions(queue="failing"))
    wait_for(2, events)
    load, save = events
    assert (load.outcome, save.outcome) == ("failed", "failed")
    assert isinstance(load.error, smckpt.CheckpointNotFoundError)
    assert isinstance(save.error, smckpt.UsageError)


def test_a_sink_that_raises_is_logged_and_harms_nothing(
    tmp_path: Path, events: list[Any], caplog: Any
) -> None:
    def broken(event: Any) -> None:
        raise SystemExit("the metrics server is gone")

    remove = smckpt.add_sink(broken)
    later: list[Any] = []
    end = smckpt.add_sink(later.append)
    try:
        with caplog.at_level(logging.ERROR, "smckpt"):
            for _ in range(2):
                smckpt.save(
                    {"w": torch.ones(2)},
                    checkpoint_id=tmp_path / "c",
                    options=smckpt.SaveOptions(queue="sinks"),
                )
            wait_for(2, later)  # who follows it heard all
    finally:
        remove()
        end()
    assert caplog.text.count("a sink of events raised") == 2
    smckpt.save(
        {"w": torch.ones(2)},
        checkpoint_id=tmp_path / "c",
        options=smckpt.SaveOptions(queue="sinks"),
    )
    wait_for(3, events)
    assert len(later) == 2  # it was removed


def test_a_commit_is_one_line_of_the_log_and_the_handle_says_what_it_is(
    tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level(logging.INFO, "smckpt"):
        handle = smckpt.save(
            {"w": torch.ones(1 << 18)},
            checkpoint_id=tmp_path / "c",
            step=7,
            options=smckpt.SaveOptions(queue="line"),
        )
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("committed")]
    assert len(lines) == 1
    for part in ("step 7", "1.1 MB", "B/s", " s, ", str(tmp_path / "c")):
        assert part in lines[0], lines[0]
    assert handle is not None
    for part in ("SaveHandle", "step 7", str(tmp_path / "c"), "committed in", "1.1 MB"):
        assert part in repr(handle)
