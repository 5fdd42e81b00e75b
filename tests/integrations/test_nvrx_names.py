"""NVRx's smaller names and arguments, each with its effect."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from smckpt.integrations.nvrx.async_ckpt import TorchAsyncCheckpoint
from smckpt.integrations.nvrx.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from smckpt.integrations.nvrx.async_ckpt.filesystem_async import get_write_results_queue
from smckpt.integrations.nvrx.utils import (
    dict_list_map_outplace,
    diff,
    preload_tensors,
    wrap_for_async,
)
from smckpt.run import provide
from tests.support.frameworks import nvrx_ranks
from tests.support.launch import ROOT, run_ranks
from tests.support.limits import seconds

_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


def tells_itself(queue: Any) -> None:
    number = _IOPRIO_GET.get(platform.machine(), -1)
    priority = ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0)
    queue.put((os.getpid(), priority >> 13))  # linux/ioprio.h: the class is above 13 bits


def told(queue: AsyncCallsQueue) -> tuple[int, int]:
    results = get_write_results_queue()
    queue.schedule_async_request(AsyncRequest(tells_itself, (results,), []))
    queue.maybe_finalize_async_calls(blocking=True)
    answer: tuple[int, int] = results.get_nowait()
    return answer


@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in _IOPRIO_GET, reason="another machine's numbers")
def test_the_worker_has_the_io_class_that_was_asked_for() -> None:
    idle = AsyncCallsQueue(io_priority=3)
    assert told(idle)[1] == 3
    idle.close()


def children() -> set[int]:
    path = f"/proc/{os.getpid()}/task"
    return {
        int(pid)
        for task in os.listdir(path)
        for pid in Path(path, task, "children").read_text().split()
    }


def test_a_warm_worker_takes_the_first_request() -> None:
    before = children()
    AsyncCallsQueue.warmup_persistent_caller(0)
    warm = children() - before
    queue = AsyncCallsQueue()
    assert told(queue)[0] in warm
    queue.close()


def test_a_copy_in_host_memory_is_apart_from_the_tensors() -> None:
    state = {"a": torch.ones(2), "b": [torch.ones(1), 3]}
    copy = preload_tensors(state)
    state["a"].zero_()  # type: ignore[union-attr]
    assert copy["a"].tolist() == [1.0, 1.0] and copy["b"][1] == 3
    assert wrap_for_async(preload_tensors) is preload_tensors


def test_nested_values_are_mapped_and_compared_by_path() -> None:
    one = {"a": torch.ones(2), "b": [1, 2], "only": 0}
    two = {"a": torch.zeros(2), "b": [1, 2, 3]}
    assert dict_list_map_outplace(type, one) == {"a": torch.Tensor, "b": [int, int], "only": int}
    left, right, differ = diff(one, two)
    assert (left, right) == ([("only",)], [("b", 2)])
    assert [path for path, *_ in differ] == [("a",)]
    assert diff(one, one) == ([], [], [])


@pytest.mark.long
def test_what_has_the_hints_name_goes_into_files_of_its_own(tmp_path: Path) -> None:
    run_ranks(nvrx_ranks.saves_with_a_hint, 1, str(tmp_path))
    names = sorted(path.name for path in tmp_path.glob("*.distcp"))
    assert [name.startswith("model") for name in names] == [False, True], names


@pytest.mark.long
def test_the_file_may_be_a_url(tmp_path: Path) -> None:
    saver = TorchAsyncCheckpoint()
    saver.async_save({"a": torch.arange(3)}, f"file://{tmp_path}/one.pt")
    saver.finalize_async_save(blocking=True, terminate=True)
    assert torch.load(tmp_path / "one.pt")["a"].tolist() == [0, 1, 2]


def test_the_package_tells_the_version_whose_names_it_has() -> None:
    with provide(["nvrx"]):
        # Megatron-core asks for both before it takes NVRx
        assert importlib.import_module("nvidia_resiliency_ext").__version__ == "0.7.0"
        for mode in ("fork", "spawn"):
            assert get_write_results_queue(mode).empty()


CHECKOUT = os.environ.get("SMCKPT_NVRX", "")


@pytest.mark.long
@pytest.mark.skipif(not CHECKOUT, reason="SMCKPT_NVRX names no checkout of NVRx's tests")
def test_nvrxs_own_tests_pass_on_the_door() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.frameworks.nvrx_suite", CHECKOUT],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds(600), check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if not line.startswith("    ")]
    assert told == [
        "test_async_save.py on 1 ranks: 3 of 3",
        "test_async_writer.py on 2 ranks: 13 of 15",
        "test_async_writer_msc.py on 2 ranks: 1 of 1",
        "test_basic_local.py on 2 ranks: 7 of 7",
        "test_cleanup.py on 2 ranks: 2 of 2",
    ], done.stdout + done.stderr[-2000:]
    assert "    test_wrap_exception_for_gather_" in done.stdout, done.stdout
    assert "::test_invalid_async_setup[True-True]: " in done.stdout, done.stdout
