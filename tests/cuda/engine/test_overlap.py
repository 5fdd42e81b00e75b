"""`SaveOptions(staging="overlap")` on a CUDA device: what goes on, what waits, and what fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.engine import api
from smckpt.staging import overlap
from smckpt.staging.overlap import Overlap, SideStream
from tests.cuda.engine.test_moment import ADAMW, made, trained
from tests.support.limits import seconds
from tests.support.on_cuda import copied, needs_cuda, taken, wait_on_device
from tests.support.truth import differences, flat

pytestmark = needs_cuda

QUEUES = itertools.count()
MIB = 1 << 20


class Busy:
    """The device's own stream, which is busy before it copies."""

    def __init__(self, device: torch.device) -> None:
        made = overlap._stream_of(device)
        assert made is not None
        self._own, self._waited = made, False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self._waited:
            self._waited = True
            wait_on_device(torch.cuda.current_stream(), 2500)
        self._own.copy(target, source)

    def finish(self) -> None:
        self._own.finish()
        self._waited = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that begins a save whose copies land after 2.5 s, in a queue of its own."""

    def stream_of(device: torch.device) -> SideStream | None:
        return Busy(device) if device.type == "cuda" else None

    monkeypatch.setattr(api._RUNTIME, "overlap", Overlap(stream_of))
    options = smckpt.SaveOptions(staging="auto", queue=f"overlap-{next(QUEUES)}")

    def begun(state: dict[str, Any], name: str = "c") -> Any:
        handle = smckpt.async_save(state, checkpoint_id=tmp_path / name, options=options)
        assert handle is not None
        return handle

    yield begun


def resumed(path: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    fresh, its = made(arguments, seed=1)
    smckpt.init_optim_state(its)
    smckpt.load(taken(fresh, its), checkpoint_id=path)
    return flat(copied(taken(fresh, its)))


@pytest.mark.parametrize("arguments", ADAMW, ids=lambda a: "-".join(map(str, *a.items())))
def test_steps_right_behind_wait_for_the_copies_and_change_nothing_that_is_saved(
    tmp_path: Path, begin: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    model, optimizer = made(arguments)
    trained(model, optimizer, 3)
    begin(taken(model, optimizer), "warm").wait(seconds(60))
    expected = flat(copied(taken(model, optimizer)))
    handle = begin(taken(model, optimizer))
    assert not handle.copied.done(), "the call was to return before the copies"
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    assert handle.copied.done()
    trained(model, optimizer, 4)
    handle.wait(seconds(60))
    assert differences(flat(copied(taken(model, optimizer))), expected)
    assert differences(resumed(tmp_path / "c", arguments), expected) == []


def test_the_step_of_a_grad_scaler_waits(tmp_path: Path, begin: Callable[..., Any]) -> None:
    arguments = {"fused": True}
    model, optimizer = made(arguments)
    trained(model, optimizer, 2)
    scaler = torch.amp.GradScaler("cuda")
    expected = flat(copied(taken(model, optimizer)))
    handle = begin(taken(model, optimizer))
    assert not handle.copied.done()
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(64, 512, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert handle.copied.done()
    scaler.update()
    handle.wait(seconds(60))
    assert differences(resumed(tmp_path / "c", arguments), expected) == []


def test_a_change_that_no_hook_sees_fails_the_save_by_name(
    tmp_path: Path, begin: Callable[..., Any]
) -> None:
    model, optimizer = made({"fused": True})
    trained(model, optimizer, 2)
    handle = begin(taken(model, optimizer))
    model[2].weight.data[3, 4] += 1
    with pytest.raises(smckpt.SaveFailedError, match=r"2\.weight changed while the save copied"):
        handle.wait(seconds(60))
    expected = flat(copied(taken(model, optimizer)))
    handle = begin(taken(model, optimizer), "next")  # it blocks
    with torch.no_grad():
        model[2].weight.zero_()
    handle.wait(seconds(60))
    assert differences(resumed(tmp_path / "next", {"fused": True}), expected) == []


def test_a_replay_of_a_captured_step_fails_the_save_unless_it_waits(
    tmp_path: Path, begin: Callable[..., Any]
) -> None:
    """A replay runs no hook."""
    model, optimizer = made({"capturable": True})
    x, warm = torch.randn(64, 512, device="cuda"), torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
        optimizer.step()
    graph.replay()
    expected = flat(copied(taken(model, optimizer)))
    handle = begin(taken(model, optimizer))
    handle.wait_for_staging()
    graph.replay()
    handle.wait(seconds(60))
    assert differences(resumed(tmp_path / "c", {"capturable": True}), expected) == []
    handle = begin(taken(model, optimizer), "torn")
    graph.replay()
    with pytest.raises(smckpt.SaveFailedError, match="changed while the save copied the state"):
        handle.wait(seconds(60))


def test_the_device_lends_little_memory(begin: Callable[..., Any]) -> None:
    """64 MiB for what comes back from the host, 128 while torch sums so much, and the sums."""
    weight = torch.nn.Parameter(torch.randn(128 * MIB, device="cuda"))
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        state = {"model": model.state_dict()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin(state).wait(seconds(120))
    assert torch.cuda.max_memory_allocated() - before <= 200 * MIB
    assert torch.cuda.memory_allocated() == before
