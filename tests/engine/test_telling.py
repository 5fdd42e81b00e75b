"""A long save or load says on rank 0 how far it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.engine import load
from smckpt.engine.events import EVERY, telling
from smckpt.engine.saving import queue, save
from tests.support.limits import seconds


class Heard(logging.Handler):
    """The lines of the log, and whether one has a text."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.INFO)
        self.text, self.lines, self.there = text, list[str](), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self.text in self.lines[-1]:
            self.there.set()


@pytest.fixture
def hear(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Heard]]:
    """Listens to the log. A line comes at once, and not after half a minute."""
    log = logging.getLogger("smckpt")
    before = log.level
    log.setLevel(logging.INFO)
    made: list[Heard] = []

    def of(text: str) -> Heard:
        made.append(Heard(text))
        log.addHandler(made[-1])
        return made[-1]

    def soon(rank: int, text: Callable[[], str]) -> Any:
        return telling(rank, text, every=0.01)

    monkeypatch.setattr(load, "telling", soon)
    monkeypatch.setattr(queue, "telling", soon)
    yield of
    log.setLevel(before)
    for one in made:
        log.removeHandler(one)


def test_a_save_says_that_it_is_being_written(
    tmp_path: Path, hear: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, write = hear("step 3 is being written to"), save.Saver.write

    def held(*args: Any) -> Any:
        assert heard.there.wait(seconds(30))
        return write(*args)

    monkeypatch.setattr(save.Saver, "write", held)
    smckpt.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "a", step=3)
    told = [line for line in heard.lines if "being written" in line]
    assert str(tmp_path / "a") in told[0] and told[0].endswith("s")
    assert not any(thread.name == "smckpt-telling" for thread in threading.enumerate())


def test_a_load_says_how_much_is_read(
    tmp_path: Path, hear: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    smckpt.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "a")
    heard = hear("% is read from")
    state = {"w": torch.zeros(4)}
    with monkeypatch.context() as within:
        within.setattr(load, "execute", _holding(load.execute, heard))
        smckpt.load(state, checkpoint_id=tmp_path / "a")
    assert state["w"].eq(1).all()
    (first, *_) = [line for line in heard.lines if "% is read" in line]
    assert first.startswith("0% is read from") and str(tmp_path / "a") in first


def _holding(execute: Callable[..., Any], heard: Heard) -> Callable[..., Any]:
    """A read that begins after the first line."""

    def held(*args: Any, **how: Any) -> Any:
        assert heard.there.wait(seconds(30))
        return execute(*args, **how)

    return held


def test_other_ranks_are_silent_and_a_short_one_too(hear: Any) -> None:
    heard = hear("under way")
    with telling(1, lambda: "under way", every=0.0):
        assert not any(thread.name == "smckpt-telling" for thread in threading.enumerate())
    with telling(0, lambda: "under way"):
        pass
    assert heard.lines == [] and EVERY == 30.0


class Raising(logging.Handler):
    """As one that sends lines over a connection that is down."""

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"not sent: {record.getMessage()}")


def test_a_handler_that_raises_ends_no_thread_and_no_save(tmp_path: Path, hear: Any) -> None:
    handler, called = Raising(), []
    (tmp_path / "file").touch()
    options = smckpt.SaveOptions(queue="raising", on_commit=called.append)
    logging.getLogger("smckpt").addHandler(handler)
    hear("nothing")  # so that lines of all levels are made
    try:
        for name, committed in ("a", True), ("file/b", False), ("c", True):
            handle = smckpt.async_save(
                {"w": torch.ones(4)}, checkpoint_id=tmp_path / name, options=options
            )
            assert handle.ended(seconds(60))
            if committed:
                handle.wait()
                continue
            with pytest.raises(smckpt.errors.SaveFailedError, match="the path is a file"):
                handle.wait()
    finally:
        logging.getLogger("smckpt").removeHandler(handler)
    assert len(called) == 2
