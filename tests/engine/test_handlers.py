"""A signal handler that saves, at every instruction of the calls that it may interrupt."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import smckpt
from smckpt.calls import alone
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.engine.saving.job import SaveHandle, Timings
from smckpt.errors import CheckpointError, UsageError
from tests.support.limits import seconds

# Between any two instructions of these files a handler may run; `threading` has locks of its own.
_FILES = ("/smckpt/calls.py", "/smckpt/engine/api.py", "/smckpt/engine/runtime.py",
          "/smckpt/engine/saving/queue.py", "/smckpt/engine/saving/job.py",
          "/smckpt/checkpoint/upkeep/verify.py", "/smckpt/checkpoint/upkeep/transfer.py",
          "/smckpt/checkpoint/commits/discover.py",
          "/concurrent/futures/thread.py", "/threading.py")  # fmt: skip


class Late(BaseException):
    """Nothing in the library takes it for an error of its own, and goes on."""


@contextmanager
def interrupted(handler: Callable[[], None]) -> Iterator[None]:
    """Run `handler` before each instruction of the library's front, as a signal would.

    Raises:
        Late: it took too long, as where a handler waits for the code that it interrupted.
    """
    over = False

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if over or not frame.f_code.co_filename.endswith(_FILES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            handler()
        return trace

    def late(*_: object) -> None:
        nonlocal over
        over = True
        raise Late("a handler waits for the code that it interrupted")

    gc.collect()  # what it frees runs code of these files too, outside of any call
    gc.disable()
    before = signal.signal(signal.SIGALRM, late)
    # Again each second: what unwinds may wait for that lock too. The test's own limit comes back.
    limit = signal.setitimer(signal.ITIMER_REAL, seconds(120), 1)
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks here whether there are any
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, *limit)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


class Handler:
    """Acts, by default saves, and counts what came of it."""

    def __init__(self, folder: Path, act: Callable[[], object] | None = None) -> None:
        self.act = act or partial(smckpt.async_save, {"b": torch.ones(1)}, checkpoint_id=folder)
        self.told: Counter[str] = Counter()

    def __call__(self) -> None:
        try:
            self.act()
            self.told["done"] += 1
        except UsageError as error:
            assert "while this thread was in" in error.message
            self.told["refused"] += 1


CALLS: dict[str, Callable[[Path], object]] = {
    "async_save": lambda at: smckpt.async_save({"a": torch.ones(9)}, checkpoint_id=at),
    "save": lambda at: smckpt.save({"a": torch.ones(9)}, checkpoint_id=at),
    # a place of its own: two queues that save to one directory fence each other
    "first save": lambda at: smckpt.async_save(
        {"a": torch.ones(9)}, checkpoint_id=at.parent / "q", options=smckpt.SaveOptions(queue="q")
    ),
    "finalize": lambda at: smckpt.maybe_finalize_async_calls(blocking=True),
    "load": lambda at: smckpt.load({"a": torch.zeros(9)}, checkpoint_id=at),
    "latest": lambda at: smckpt.latest_checkpoint(at),
    "verify": lambda at: smckpt.verify_checkpoint(at),
    "find": lambda at: smckpt.find_checkpoints(at),
    "copy": lambda at: copy_checkpoint(at, at.parent / "copy"),
}
ACTS: dict[str, Callable[[Path], object]] = {
    **{name: CALLS[name] for name in ("save", "load", "finalize", "verify", "find", "copy")},
    "export": lambda at: smckpt.export_hf(at, at.parent / "hf", config=at),
    "import": lambda at: smckpt.import_hf(at, at.parent / "made", smckpt.Parallel("hf")),
    "compare": lambda at: smckpt.verify_hf(at),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_handler_that_saves_is_refused_by_name_and_never_waits(tmp_path: Path, call: str) -> None:
    smckpt.save({"a": torch.ones(9)}, checkpoint_id=tmp_path / "a")
    handler = Handler(tmp_path / "b")
    with interrupted(handler):
        CALLS[call](tmp_path / "a")
    assert handler.told["refused"] > 100, handler.told
    smckpt.save({"a": torch.full((9,), 2.0)}, checkpoint_id=tmp_path / "a")
    target = {"a": torch.zeros(9)}
    smckpt.load(target, checkpoint_id=tmp_path / "a")
    assert target["a"].tolist() == [2.0] * 9


@pytest.mark.parametrize("act", ACTS)
def test_whatever_a_handler_calls_in_the_midst_of_a_call_is_refused(
    tmp_path: Path, act: str
) -> None:
    smckpt.save({"a": torch.ones(9)}, checkpoint_id=tmp_path / "a")
    handler = Handler(tmp_path, partial(ACTS[act], tmp_path / "a"))
    with interrupted(handler):
        smckpt.verify_checkpoint(tmp_path / "a")
    assert handler.told["refused"] > 100 and not handler.told["done"], handler.told


def test_a_call_keeps_none_of_its_arguments() -> None:
    """A frame that refers to itself would, until the garbage collector runs."""
    tensor = torch.ones(1)
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        alone()(len)([tensor])
        del tensor
        assert gone() is None
    finally:
        gc.enable()


def test_a_handler_may_wait_for_the_save_whose_wait_it_interrupts(tmp_path: Path) -> None:
    """A wait that holds a lock, as `threading.Event` does, would wait for its own thread."""
    handle = SaveHandle(0, str(tmp_path), None)
    nothing = Timings(0, 0, 0, 0, 0, 0)
    waited: list[bool] = []
    later = threading.Timer(0.5, handle.finish, (nothing, UsageError("told")))
    ended = handle.ended

    def look() -> None:
        if not waited:
            later.start()
        waited.append(ended(0.001))

    with interrupted(look), pytest.raises(CheckpointError):
        handle.wait()
    later.join()
    assert len(waited) > 10 and waited[0] is False


def test_a_refusal_that_the_handler_does_not_catch_leaves_nothing_locked(tmp_path: Path) -> None:
    """It comes out of the interrupted call, wherever a real signal got in."""

    came = within = False

    def handler(*_: object) -> None:
        nonlocal came, within
        if within:
            raise Late("a handler waits for the code that it interrupted")
        came = within = True
        try:
            smckpt.async_save({"b": torch.ones(1)}, checkpoint_id=tmp_path / "b")
        finally:
            within = False

    smckpt.save({"a": torch.ones(9)}, checkpoint_id=tmp_path / "a")
    before, limit = signal.signal(signal.SIGALRM, handler), signal.setitimer(signal.ITIMER_REAL, 0)
    refused = 0
    try:
        for turn in range(1, 200):
            try:
                came = False
                signal.setitimer(signal.ITIMER_REAL, turn * 1e-6, seconds(60))
                while not came:
                    smckpt.maybe_finalize_async_calls(blocking=False)
            except UsageError:
                refused += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, *limit)
        signal.signal(signal.SIGALRM, before)
    assert refused > 20
    smckpt.save({"a": torch.ones(9)}, checkpoint_id=tmp_path / "a")
