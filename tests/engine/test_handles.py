"""What a save's handle is to its holder: a future; and who is told of a failure, once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt import errors
from smckpt.storage import open_storage
from tests.support.limits import seconds

STATE = {"a": torch.arange(1 << 16)}


@pytest.fixture
def no_place(tmp_path: Path) -> Path:
    """A file where a directory is meant: a save to it fails in the background."""
    place = tmp_path / "file"
    place.write_text("")
    return place


def begun(place: Path, **options: Any) -> smckpt.SaveHandle:
    handle = smckpt.async_save(STATE, checkpoint_id=place, options=smckpt.SaveOptions(**options))
    assert handle is not None
    return handle


def test_a_handle_is_a_future_of_its_timings(tmp_path: Path) -> None:
    handle = begun(tmp_path / "a")
    done, waiting = concurrent.futures.wait([handle], timeout=seconds(60))
    assert done == {handle} and not waiting and not handle.running()
    assert next(concurrent.futures.as_completed([handle])) is handle
    assert handle.result() == handle.timings and handle.exception() is None
    assert handle.result(timeout=0).nbytes > STATE["a"].nbytes
    assert not handle.cancel() and not handle.cancelled()

    async def awaited() -> smckpt.Timings:
        return await asyncio.wrap_future(begun(tmp_path / "b"))

    assert asyncio.run(awaited()).committed > 0


def test_callbacks_hear_of_the_verdict_and_can_neither_fail_nor_end_their_queue(
    tmp_path: Path, no_place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[tuple[int, bool]] = []

    def hear(handle: smckpt.SaveHandle) -> None:
        heard.append((handle.number, handle.exception() is None))

    good = begun(tmp_path / "a", queue="callbacks")
    good.add_done_callback(lambda _: sys.exit("from a callback"))
    good.add_done_callback(hear)
    good.result(seconds(60))
    bad = begun(no_place, queue="callbacks")
    bad.add_done_callback(hear)
    begun(tmp_path / "b", queue="callbacks").result(
        seconds(60)
    )  # the queue lives, and `bad` was told
    assert heard == [(good.number, True), (bad.number, False)]
    assert f"a callback of save {good.number} raised" in caplog.text


@pytest.mark.parametrize("ask", ["result", "exception", "wait"])
def test_a_failure_that_the_handle_told_is_not_raised_again(
    tmp_path: Path, no_place: Path, ask: str
) -> None:
    handle = begun(no_place, queue=ask)
    if ask == "exception":
        assert isinstance(handle.exception(60), errors.SaveFailedError)
    else:
        with pytest.raises(errors.SaveFailedError, match=f"save {handle.number}"):
            getattr(handle, ask)(60)
    after = begun(tmp_path / "b", queue=ask)
    assert after.result(seconds(60)).nbytes > 0
    assert smckpt.maybe_finalize_async_calls(queue=ask) == [after.number]


def test_a_directory_that_is_removed_during_a_save_is_told_as_that(tmp_path: Path) -> None:
    writer = open_storage(str(tmp_path / "step")).create_file("data", 4)
    writer.write_at(0, memoryview(b"abcd"))
    shutil.rmtree(tmp_path / "step")
    with pytest.raises(errors.StorageError, match="the directory was removed while data was"):
        writer.finish()


def test_a_load_waits_for_the_save_of_the_same_process_to_the_same_place(tmp_path: Path) -> None:
    handle = begun(tmp_path / "a")
    handle.add_done_callback(lambda _: None)
    target = {"a": torch.zeros_like(STATE["a"])}
    smckpt.load(target, checkpoint_id=tmp_path / "a")
    assert torch.equal(target["a"], STATE["a"])


def test_a_load_in_on_commit_does_not_wait_for_itself(tmp_path: Path) -> None:
    target = {"a": torch.zeros_like(STATE["a"])}
    handle = begun(
        tmp_path / "a", on_commit=lambda h: smckpt.load(target, checkpoint_id=h.checkpoint_id)
    )
    handle.result(seconds(60))
    assert torch.equal(target["a"], STATE["a"])


def test_a_checkpoint_is_removed_by_its_directory_and_others_stay(tmp_path: Path) -> None:
    for step in (1, 2):
        smckpt.save(STATE, checkpoint_id=tmp_path / f"step_{step}", step=step)
    (tmp_path / "step_1" / "notes.txt").write_text("mine")
    report = smckpt.remove(tmp_path / "step_1")
    assert report.files == 4 and report.left is None
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["notes.txt"]
    assert smckpt.latest_checkpoint(tmp_path).step == 2
    with pytest.raises(errors.CheckpointNotFoundError):
        smckpt.remove(tmp_path / "step_1")
    assert smckpt.remove(str(tmp_path / "step_2")).files == 4
    assert not (tmp_path / "step_2").exists()


def test_a_removal_is_refused_while_a_save_goes_there(tmp_path: Path) -> None:
    smckpt.save(STATE, checkpoint_id=tmp_path / "run")
    refused: list[str] = []

    def remove(handle: smckpt.SaveHandle) -> None:
        with pytest.raises(errors.UsageError, match="still under way there") as caught:
            smckpt.remove(tmp_path)
        refused.append(str(caught.value))

    began = time.monotonic()
    begun(tmp_path / "run", on_commit=remove).result(seconds(60))
    assert refused and time.monotonic() - began < seconds(60)
