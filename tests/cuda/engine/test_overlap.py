"""`SaveOptions(staging="overlap")` on a CUDA device: what goes on, what waits, and what fails."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt.engine import api
from smckpt.staging import digest
from smckpt.staging.overlap import Overlap, SideStream
from tests.cuda.engine.test_moment import ADAMW, made, trained
from tests.engine.test_prewarm import arenas, prewarmed
from tests.support.faults.late_stream import digests_of
from tests.support.limits import seconds
from tests.support.on_cuda import copied, needs_cuda, taken, wait_on_device
from tests.support.truth import differences, flat

pytestmark = needs_cuda

QUEUES = itertools.count()
MIB = 1 << 20


class Busy:
    """The device's own stream, which is busy before it copies."""

    def __init__(self, device: torch.device) -> None:
        self._own, self._waited = SideStream(device), False

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

    class Slow(Overlap):
        def _made_stream(self, device: torch.device) -> Any:
            return Busy(device) if device.type == "cuda" else None

    monkeypatch.setattr(api._RUNTIME, "overlap", Slow())
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
    model[2].weight.data[3, 4] += 1  # CUDA loads a kernel once, and may wait for the device then
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
    """64 MiB for what comes back from the host, and eight bytes for each 256 KiB."""
    weight = torch.nn.Parameter(torch.randn(128 * MIB, device="cuda"))
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        state = {"model": model.state_dict()}
    torch.cuda.synchronize()
    gc.collect()  # of other tests
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin(state).wait(seconds(120))
    assert torch.cuda.max_memory_allocated() - before <= 65 * MIB
    assert torch.cuda.memory_allocated() - before < MIB  # tables of addresses


def test_prewarm_pins_the_memory_and_compiles_what_the_first_save_needs(tmp_path: Path) -> None:
    model, optimizer = made({"fused": True})
    trained(model, optimizer, 1)
    options = smckpt.SaveOptions(staging="overlap", queue=f"overlap-{next(QUEUES)}")
    smckpt.prewarm(taken(model, optimizer), options=options)
    got = prewarmed(options.queue)
    (queue,) = api._RUNTIME.queues(None, options.queue)
    arena = queue._saver._arena
    assert arena.pinned and torch.device("cuda", 0) in queue._saver._overlap._streams
    smckpt.save(taken(model, optimizer), checkpoint_id=tmp_path / "c", options=options)
    assert queue._saver._arena is arena and arenas() == got


def test_the_kernel_computes_what_its_text_says_wherever_a_tensor_begins() -> None:
    device = torch.device("cuda", 0)
    host = torch.randint(0, 256, (3 * MIB + 5000,), dtype=torch.uint8)
    parts = [host[start:stop] for start, stop in itertools.pairwise((0, 1, 8, 4099, MIB + 3, -1))]
    parts += [host, host[7:].view(torch.uint8), torch.randn(1031, 517, dtype=torch.float64)]
    whole = host.to(device)
    moved = [whole[start:stop] for start, stop in itertools.pairwise((0, 1, 8, 4099, MIB + 3, -1))]
    moved += [whole, whole[7:], parts[-1].to(device)]
    found = digest.digests_on(device)(moved).tolist()
    assert [value % 2**64 for value in found] == digests_of(parts)


def test_a_torch_without_a_compiler_blocks_and_that_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no NVRTC here")

    monkeypatch.setattr(torch.cuda, "_compile_kernel", refuse)
    monkeypatch.setattr(api._RUNTIME, "overlap", Overlap())
    model, optimizer = made({"fused": True})
    trained(model, optimizer, 1)
    expected = flat(copied(taken(model, optimizer)))
    options = smckpt.SaveOptions(staging="overlap", queue=f"overlap-{next(QUEUES)}")
    for name in ("a", "b"):
        handle = smckpt.async_save(
            taken(model, optimizer), checkpoint_id=tmp_path / name, options=options
        )
        assert handle is not None and (handle.copied is None or handle.copied.done())
        handle.wait(seconds(60))
    assert differences(resumed(tmp_path / "b", {"fused": True}), expected) == []
    (line,) = [r.getMessage() for r in caplog.records if "blocks until" in r.getMessage()]
    assert "no NVRTC here" in line
