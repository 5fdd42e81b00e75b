"""A stager of somebody else: copies that go on after `async_save` returned. Public names alone."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from tests.support.launch import run_ranks
from tests.support.limits import seconds


class Late:
    """Copies in a thread of its own, once it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, copies: Any) -> Future[None]:
        return self._pool.submit(self._copy, copies)

    def _copy(self, copies: Any) -> None:
        assert self.let.wait(seconds(60))
        for target, source in copies:
            target.copy_(source)


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300, 7), value), "t": torch.arange(12.0).view(3, 4).t(), "step": 3}


def test_copies_end_after_async_save_returned_and_the_write_waits_for_them(tmp_path: Path) -> None:
    stager, saved = Late(), state(1.0)
    options = smckpt.SaveOptions(stager=stager)
    handle = smckpt.async_save(saved, checkpoint_id=tmp_path / "c", options=options)
    assert handle is not None
    assert not handle.done()  # the call has returned, and nothing was copied
    saved["w"].fill_(2.0)  # what the stager copies is what the tensors hold then
    threading.Event().wait(0.2)
    assert not list((tmp_path / "c").glob("part-*"))
    stager.let.set()
    timings = handle.wait(seconds(60))
    assert timings.blocked < timings.staged <= timings.written
    target = state(0.0)
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    assert torch.equal(target["w"], torch.full((300, 7), 2.0))
    assert torch.equal(target["t"], state(0.0)["t"])


def test_copies_that_do_not_end_fail_the_save_within_the_limit_and_the_next_one_is_fine(
    tmp_path: Path,
) -> None:
    stager = Late()
    limit = seconds(2)  # of each stage: the worker answers within it, too
    options = smckpt.SaveOptions(stager=stager, timeout=limit)
    handle = smckpt.async_save(state(1.0), checkpoint_id=tmp_path / "c", options=options)
    assert handle is not None
    with pytest.raises(smckpt.SaveFailedError, match=f"copies did not end within {limit:.0f} s"):
        handle.wait(seconds(60))
    assert handle.number not in smckpt.maybe_finalize_async_calls()  # wait() has told it
    smckpt.save(state(5.0), checkpoint_id=tmp_path / "c")
    stager.let.set()  # the late copies go to memory that is nobody's now
    stager._pool.shutdown()
    target = state(0.0)
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    assert target["w"][0, 0] == 5.0


def one_stager_fails(folder: str) -> str:
    def fails(copies: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(RuntimeError("the device is lost"))
        return future

    rank = torch.distributed.get_rank()
    options = smckpt.SaveOptions(stager=fails if rank == 1 else None)
    try:
        smckpt.save(state(1.0), checkpoint_id=f"{folder}/c", options=options)
    except smckpt.SaveFailedError as error:
        return str(error)
    return "committed"


def test_an_error_of_one_ranks_stager_fails_the_save_on_all(tmp_path: Path) -> None:
    for said in run_ranks(one_stager_fails, 2, str(tmp_path)):
        assert "the device is lost" in said and "rank 1" in said


def test_a_stager_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(smckpt.UsageError, match="stager"):
        smckpt.SaveOptions(stager="fast")  # type: ignore[arg-type]
