"""A save has the bits of the moment of `async_save`, whatever the device does after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from tests.support.limits import seconds
from tests.support.on_cuda import copied, needs_cuda, taken, wait_on_device
from tests.support.truth import differences, flat

pytestmark = needs_cuda

ADAMW = [{"fused": True}, {"foreach": True}, {"foreach": False}, {"capturable": True}]


def made(arguments: dict[str, Any], seed: int = 0) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)]
    model = torch.nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **arguments)


def trained(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        x = torch.randn(64, 512, generator=generator).cuda()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("arguments", ADAMW, ids=lambda a: "-".join(map(str, *a.items())))
def test_steps_right_after_the_call_change_nothing_that_is_saved(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    model, optimizer = made(arguments)
    trained(model, optimizer, 3)
    steps = [slots["step"] for slots in optimizer.state.values()]
    on_device = "fused" in arguments or "capturable" in arguments
    assert {step.is_cuda for step in steps} == {on_device}  # beside moments on the device
    expected = copied(taken(model, optimizer))
    wait_on_device(torch.cuda.current_stream())
    handle = smckpt.async_save(taken(model, optimizer), checkpoint_id=tmp_path / "c")
    trained(model, optimizer, 4)
    assert handle is not None
    handle.wait(seconds(60))
    straight = copied(taken(model, optimizer))
    assert differences(flat(straight), flat(expected))

    fresh, its = made(arguments, seed=1)
    smckpt.init_optim_state(its)
    target = taken(fresh, its)
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    assert differences(flat(copied(taken(fresh, its))), flat(expected)) == []
    assert {slots["step"].is_cuda for slots in its.state.values()} == {on_device}
    trained(fresh, its, 4)
    assert differences(flat(copied(taken(fresh, its))), flat(straight)) == []


@pytest.mark.parametrize("inside", [False, True], ids=["default stream", "own stream"])
def test_a_step_on_a_stream_of_its_own_is_saved_whole(tmp_path: Path, inside: bool) -> None:
    """The optimizer steps on a side stream, which is busy when the save begins and writes on right
    after it returned."""
    model, optimizer = made({"fused": True})
    trained(model, optimizer, 1)
    smckpt.save(taken(model, optimizer), checkpoint_id=tmp_path / "warm")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    wait_on_device(side)
    with torch.cuda.stream(side):
        optimizer.step()
    assert not side.query()
    state = taken(model, optimizer)
    with torch.cuda.stream(side if inside else torch.cuda.current_stream()):
        handle = smckpt.async_save(state, checkpoint_id=tmp_path / "c")
    torch.cuda.synchronize()
    expected = copied(state)
    with torch.cuda.stream(side):
        optimizer.step()
    assert handle is not None
    handle.wait(seconds(60))
    fresh, its = made({"fused": True}, seed=1)
    smckpt.init_optim_state(its)
    smckpt.load(taken(fresh, its), checkpoint_id=tmp_path / "c")
    assert differences(flat(copied(taken(fresh, its))), flat(expected)) == []


def test_a_stream_that_writes_right_after_the_call_changes_nothing(tmp_path: Path) -> None:
    weight, other = torch.ones(256 << 20, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    smckpt.save({"w": weight}, checkpoint_id=tmp_path / "warm")
    smckpt.async_save({"w": weight}, checkpoint_id=tmp_path / "c")
    with torch.cuda.stream(other):
        weight.fill_(2)
    smckpt.maybe_finalize_async_calls()
    saved: Any = smckpt.load(checkpoint_id=tmp_path / "c")
    assert bool((saved["w"] == 1).all())


def test_a_captured_step_is_saved_between_replays(tmp_path: Path) -> None:
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
    for turn in range(3):
        graph.replay()
        state = taken(model, optimizer)
        handle = smckpt.async_save(state, checkpoint_id=tmp_path / str(turn))
        expected = copied(state)
        for _ in range(5):
            graph.replay()
        assert handle is not None
        handle.wait(seconds(60))
        target = taken(model, optimizer)
        smckpt.load(target, checkpoint_id=tmp_path / str(turn))  # in place, where the graph writes
        assert differences(flat(copied(taken(model, optimizer))), flat(expected)) == []


def test_a_copy_that_fails_fails_the_save_by_name_and_the_next_works(tmp_path: Path) -> None:
    weight = torch.randn(8192, 8192, device="cuda").t()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (16 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with pytest.raises(smckpt.CheckpointError, match=r"rank 0.*out of memory"):
            smckpt.save({"w": weight}, checkpoint_id=tmp_path / "c")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    smckpt.save({"w": weight}, checkpoint_id=tmp_path / "c")
    saved: Any = smckpt.load(checkpoint_id=tmp_path / "c")
    assert torch.equal(saved["w"], weight.cpu())
