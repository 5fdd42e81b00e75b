"""Copies that go on after the call: the image is the state of the call, or the copy fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizers

from smckpt.errors import StateError
from smckpt.layout.entries import DTYPES
from smckpt.layout.image import compile_layout
from smckpt.staging import digest, overlap
from smckpt.staging.arena import Arena
from smckpt.staging.copies import stage
from smckpt.staging.overlap import Flight
from tests.staging.test_stage import any_bits, content, entry_of, files_in, raw
from tests.support.faults.late_stream import LateStream
from tests.support.limits import seconds

TEARS = 1000


def copied(
    stream: LateStream, tensors: dict[str, torch.Tensor], early: tuple[str, ...] = ()
) -> tuple[Flight, dict[str, bytes]]:
    """Stage all tensors, those in `early` before the return. Returns when the verdict is there."""
    layout = compile_layout(
        [entry_of(key, tensor) for key, tensor in tensors.items()], rank=0, group_ranks=(0,)
    )
    with closing(Arena(layout.arena_size)) as arena:
        flight = stage(
            arena,
            layout,
            [tensors[entry.key] for entry in layout.entries],
            overlap=stream.overlap(),
            stepped=tensors.keys() - set(early),
            timeout=seconds(60),
        )
        assert isinstance(flight, Flight)
        flight.proven.exception(seconds(60))
        return flight, content(files_in(arena, layout)[0])


def some_tensors() -> dict[str, torch.Tensor]:
    """Small and large ones, of any bits, which fill no matrix of words, and begin anywhere."""
    return {
        "large": any_bits(torch.float32, 60, 61),
        "double": any_bits(torch.float64, 32, 32),
        "odd": any_bits(torch.uint8, 3001)[1:],
        "half": any_bits(torch.bfloat16, 2, 1023)[1],
        "small": any_bits(torch.float32, 7),
        "step": torch.tensor(3.0),
        "flags": any_bits(torch.bool, 1500)[3:],
    }


def mutations(rng: random.Random) -> Callable[[torch.Tensor], None]:
    """A random change of a tensor's bytes."""

    def one(data: torch.Tensor) -> None:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    def two_alike(data: torch.Tensor) -> None:
        """What a sum of all bits does not see: the same bit of two elements."""
        bit = 1 << rng.randrange(8)
        for at in rng.sample(range(len(data)), 2):
            data[at] ^= bit

    def swap(data: torch.Tensor) -> None:
        size = rng.choice([1, 4, 8]) if len(data) >= 16 else 1
        first, second = rng.sample(range(len(data) // size), 2)
        here, there = (slice(at * size, (at + 1) * size) for at in (first, second))
        data[here], data[there] = data[there].clone(), data[here].clone()

    def all_of_it(data: torch.Tensor) -> None:
        data[7 if len(data) > 7 else 0 :: rng.choice([1, 2, 4, 8, 16])] ^= 0x80  # as neg_() does

    def shift(data: torch.Tensor) -> None:
        data.copy_(data.roll(rng.choice([1, 4, 8, 64, 512])))

    return rng.choice([one, two_alike, swap, all_of_it, shift])


def test_a_thousand_tears_at_any_moment_are_noticed_and_nothing_else_is() -> None:
    """The verdict names exactly the tensors whose image is not what they were at the call."""
    rng, torn, whole = random.Random(1), 0, 0
    torch.manual_seed(1)
    kept = some_tensors()
    while torn < TEARS or whole < TEARS // 10:
        tensors = {name: tensor.clone() for name, tensor in kept.items()}
        victim, moment = rng.choice(list(tensors)), rng.randrange(len(tensors) + 1)
        change = mutations(rng)

        def between(landed: int) -> None:
            if landed == moment:  # noqa: B023
                change(tensors[victim].view(-1).view(torch.uint8))  # noqa: B023

        stream = LateStream(rng.shuffle, between)
        stream.let.set()
        flight, image = copied(stream, tensors)
        wrong = [name for name, tensor in kept.items() if image[name] != raw(tensor)]
        error = flight.proven.exception()
        if wrong:
            torn += 1
            assert isinstance(error, StateError), f"{victim} was torn by {change.__name__}"
            assert str(error.message).startswith(f"{victim} changed while"), error
        else:
            whole += 1
            assert error is None


def test_a_tensor_that_is_put_back_before_the_copies_end_is_noticed() -> None:
    """Weights that are swapped for an evaluation: the source is as before, the image is not."""
    tensors = {"a": torch.randn(500), "b": torch.randn(500), "c": torch.randn(500)}
    before = tensors["b"].clone()

    def between(landed: int) -> None:
        tensors["b"].copy_(before if landed == 3 else torch.zeros(500))

    stream = LateStream(between=between)
    stream.let.set()
    flight, _ = copied(stream, tensors)
    assert torch.equal(tensors["b"], before)
    with pytest.raises(StateError, match="^.*b changed while the save copied"):
        flight.proven.result()


def test_every_dtype_and_a_tensor_of_several_pieces_is_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1024)
    monkeypatch.setattr(overlap, "_PIECE", 4096)
    tensors = {name: any_bits(getattr(torch, name), 30, 50) for name in DTYPES}
    expected = {name: raw(tensor) for name, tensor in tensors.items()}
    last = tensors["float64"].view(-1)

    for tear in (False, True):

        def between(landed: int) -> None:
            if tear and landed == 0:  # noqa: B023
                last[-1] = 1.5

        stream = LateStream(between=between)
        stream.let.set()
        flight, image = copied(stream, tensors)
        if tear:
            with pytest.raises(StateError, match="float64 changed while"):
                flight.proven.result()
        else:
            assert flight.proven.result() is None and image == expected


def test_what_is_not_to_wait_and_what_is_strided_is_copied_before_the_return() -> None:
    complex_ = torch.randn(4, 5, dtype=torch.complex64)
    tensors = {
        "late": torch.randn(9, 9),
        "buffer": torch.randn(100),
        "transposed": torch.randn(6, 7).t(),
        "conjugated": complex_.conj(),
    }
    expected = {name: raw(tensor) for name, tensor in tensors.items()}
    layout = compile_layout([entry_of(k, t) for k, t in tensors.items()], rank=0, group_ranks=(0,))
    stream = LateStream()
    with closing(Arena(layout.arena_size)) as arena:
        flight = stage(
            arena,
            layout,
            [tensors[entry.key] for entry in layout.entries],
            overlap=stream.overlap(),
            stepped=tensors.keys() - {"buffer"},
        )
        assert isinstance(flight, Flight) and not flight.copied.done()
        for name in ("buffer", "transposed", "conjugated"):
            tensors[name].zero_()
        stream.let.set()
        assert flight.proven.result(seconds(60)) is None
        assert content(files_in(arena, layout)[0]) == expected


def test_memory_that_the_program_frees_is_kept_until_the_copies_have_ended() -> None:
    stream, tensors = LateStream(), {str(n): torch.full((5000,), float(n)) for n in range(8)}
    expected = {name: raw(tensor) for name, tensor in tensors.items()}
    layout = compile_layout([entry_of(k, t) for k, t in tensors.items()], rank=0, group_ranks=(0,))
    with closing(Arena(layout.arena_size)) as arena:
        flight = stage(
            arena,
            layout,
            [tensors[entry.key] for entry in layout.entries],
            overlap=stream.overlap(),
            stepped=tensors.keys(),
        )
        assert isinstance(flight, Flight)
        tensors.clear()
        reused = [torch.full((5000,), -1.0) for _ in range(50)]
        stream.let.set()
        assert flight.proven.result(seconds(60)) is None and len(reused) == 50
        assert content(files_in(arena, layout)[0]) == expected


def test_memory_that_is_not_pinned_is_copied_before_the_return_and_that_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensor, stream = torch.randn(1000), LateStream()
    layout = compile_layout([entry_of("w", tensor)], rank=0, group_ranks=(0,))
    with closing(Arena(layout.arena_size)) as arena, caplog.at_level(logging.WARNING, "smckpt"):
        arena.pinned = False  # as CUDA answered
        overlapping = stream.overlap()
        for _ in range(2):
            assert stage(arena, layout, [tensor], overlap=overlapping, stepped={"w"}) is None
        arena.pinned = None
        assert content(files_in(arena, layout)[0])["w"] == raw(tensor)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "blocks" in said and "refused to pin" in said


def test_a_device_without_memory_for_the_proof_copies_before_the_return(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, stream = torch.randn(1000), LateStream()
    layout = compile_layout([entry_of("w", tensor)], rank=0, group_ranks=(0,))

    def full(tensors: Any) -> Any:
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(stream, "digests", full)
    with closing(Arena(layout.arena_size)) as arena, caplog.at_level(logging.WARNING, "smckpt"):
        assert stage(arena, layout, [tensor], overlap=stream.overlap(), stepped={"w"}) is None
        assert content(files_in(arena, layout)[0])["w"] == raw(tensor)
    assert "no memory for the digests" in caplog.text


def test_a_device_without_a_compiler_copies_before_the_return_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensor = torch.randn(1000)
    layout = compile_layout([entry_of("w", tensor)], rank=0, group_ranks=(0,))

    class Without(overlap.Overlap):
        def _made_stream(self, device: torch.device) -> Any:
            raise RuntimeError("no NVRTC here")

    overlapping = Without()
    with closing(Arena(layout.arena_size)) as arena, caplog.at_level(logging.WARNING, "smckpt"):
        for _ in range(2):
            assert stage(arena, layout, [tensor], overlap=overlapping, stepped={"w"}) is None
        assert content(files_in(arena, layout)[0])["w"] == raw(tensor)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no NVRTC here" in line and overlapping.refusal is not None


def test_a_copy_that_fails_fails_the_save_after_all_copies_have_ended() -> None:
    def between(landed: int) -> None:
        if landed == 1:
            raise RuntimeError("the device is lost")

    stream = LateStream(between=between)
    stream.let.set()
    flight, _ = copied(stream, {"a": torch.randn(10), "b": torch.randn(10)})
    assert flight.copied.done()
    with pytest.raises(RuntimeError, match="the device is lost"):
        flight.proven.result()
    assert not torch_optimizers._global_optimizer_pre_hooks


def test_the_hook_of_somebody_else_is_left_alone_and_so_is_a_step_that_runs_it() -> None:
    """torch raises if a hook goes while it walks through several: ours goes once it is alone."""
    parameter = torch.nn.Parameter(torch.ones(50))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(50)
    stream, seen = LateStream(), []
    overlapping = stream.overlap()

    def begun() -> Flight:
        target = torch.zeros(50)
        flight = overlapping.begin([("w", target, parameter.detach())], seconds(60))
        assert flight is not None
        return flight

    def first(*_: Any) -> None:
        seen.append("first")
        stream.let.set()  # the copies end, and the hook is done, while torch walks through hooks
        flight.proven.result(seconds(60))

    theirs = [torch_optimizers.register_optimizer_step_pre_hook(first)]
    try:
        flight = begun()
        theirs.append(
            torch_optimizers.register_optimizer_step_pre_hook(lambda *_: seen.append("last"))
        )
        optimizer.step()
        assert seen == ["first", "last"]
        assert len(torch_optimizers._global_optimizer_pre_hooks) == 3
    finally:
        for handle in theirs:
            handle.remove()
    begun().proven.result(seconds(60))
    assert not torch_optimizers._global_optimizer_pre_hooks
