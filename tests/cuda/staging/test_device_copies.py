"""What stands in the arena after staging from a CUDA device, and what that costs there."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from smckpt.errors import MemoryBudgetError
from smckpt.layout.entries import DTYPES
from smckpt.layout.image import Layout, compile_layout
from smckpt.staging import digest, overlap
from smckpt.staging.arena import Arena
from smckpt.staging.copies import stage
from tests.staging.test_stage import any_bits, content, entry_of, files_in, raw
from tests.support import child
from tests.support.limits import seconds
from tests.support.on_cuda import needs_cuda, wait_on_device

pytestmark = needs_cuda
MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def laid_out(tensors: dict[str, torch.Tensor]) -> Layout:
    return compile_layout(
        [entry_of(key, tensor) for key, tensor in tensors.items()], rank=0, group_ranks=(0,)
    )


def staged(tensors: dict[str, torch.Tensor], *, pin: bool = True) -> dict[str, bytes]:
    layout = laid_out(tensors)
    with closing(Arena(layout.arena_size)) as arena:
        stage(arena, layout, [tensors[entry.key] for entry in layout.entries], pin=pin)
        assert arena.pinned is (True if pin else None)
        return content(b"".join(files_in(arena, layout)))


def test_every_dtype_comes_over_bit_for_bit() -> None:
    host = {name: any_bits(getattr(torch, name), 3, 5) for name in DTYPES if hasattr(torch, name)}
    assert {"bfloat16", "float8_e4m3fn", "complex64"} <= host.keys()
    for pin in (True, False):
        found = staged({name: tensor.cuda() for name, tensor in host.items()}, pin=pin)
        assert found == {name: raw(tensor) for name, tensor in host.items()}


@pytest.mark.parametrize("piece", [4096, overlap._PIECE])
def test_every_dtype_comes_over_after_the_call_and_is_proven(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(overlap, "_PIECE", piece)
    monkeypatch.setattr(digest, "CHUNK", min(piece, digest.CHUNK))
    host = {name: any_bits(getattr(torch, name), 30, 51) for name in DTYPES if hasattr(torch, name)}
    device = {name: tensor.cuda() for name, tensor in host.items()}
    device["offset"] = any_bits(torch.uint8, 5000).cuda()[3:]
    host["offset"] = device["offset"].cpu()
    layout = laid_out(device)
    with closing(Arena(layout.arena_size)) as arena:
        flight = stage(
            arena,
            layout,
            [device[entry.key] for entry in layout.entries],
            pin=True,
            overlap=overlap.Overlap(),
            stepped=device.keys(),
        )
        assert isinstance(flight, overlap.Flight)
        assert flight.proven.result(seconds(60)) is None
        found = content(b"".join(files_in(arena, layout)))
    assert found == {name: raw(tensor) for name, tensor in host.items()}


def test_any_strides_and_views_come_over_row_major() -> None:
    base, complex_ = torch.randn(6, 8, 10), torch.randn(4, 5, dtype=torch.complex64)
    many = torch.randn(3 << 20, dtype=torch.complex64)  # its copy takes a while
    host = {
        "transposed": base.transpose(0, 2),
        "sliced": base[::2, 1:7:3, ::3],
        "expanded": torch.randn(1, 5).expand(7, 5),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "scalar bf16": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "large conjugated": many.conj(),
        "large negated": many.conj().imag,
        "conjugated transposed": complex_.mH,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "fp8 transposed": any_bits(torch.float8_e5m2, 6, 9).t(),
        "large transposed": torch.randn(5000, 7001).t(),  # above the bound on temporaries
    }
    expected = {name: raw(tensor) for name, tensor in host.items()}
    device = {name: tensor.cuda() for name, tensor in host.items()}
    device["large conjugated"] = many.cuda().conj()
    device["large negated"] = many.cuda().conj().imag
    device["conjugated transposed"] = complex_.cuda().mH
    device["large transposed"] = host["large transposed"].t().cuda().t()
    assert device["large conjugated"].is_conj() and device["large negated"].is_neg()
    assert staged(device) == expected


def test_what_another_stream_still_writes_is_waited_for() -> None:
    """Nobody has made the current stream wait for the one that writes."""
    weight, writer = torch.zeros(MIB, device="cuda"), torch.cuda.Stream()
    staged({"w": weight})  # what a first call costs is over
    torch.cuda.synchronize()
    wait_on_device(writer)
    with torch.cuda.stream(writer):
        weight.fill_(7.0)
    assert not writer.query(), "the device was to be busy"
    assert staged({"w": weight})["w"] == raw(torch.full((MIB,), 7.0))


def test_a_caller_inside_another_stream_gets_what_the_default_stream_wrote() -> None:
    weight = torch.zeros(MIB, device="cuda")
    staged({"w": weight})
    torch.cuda.synchronize()
    wait_on_device(torch.cuda.default_stream())
    weight.fill_(3.0)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert staged({"w": weight})["w"] == raw(torch.full((MIB,), 3.0))


def test_contiguous_tensors_take_no_device_memory_and_strided_ones_at_most_64_mib() -> None:
    for tensors, bound in (
        ({"w": torch.randn(64 * MIB, device="cuda"), "s": torch.ones((), device="cuda")}, 0),
        ({"w": torch.randn(8192, 8192, device="cuda").t()}, 64 * MIB),
    ):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        staged(tensors)
        assert torch.cuda.max_memory_allocated() - before <= bound


def test_a_device_without_memory_for_a_strided_tensor_is_an_error_by_name_and_the_next_works() -> (
    None
):
    weight = torch.randn(8192, 8192, device="cuda").t()
    layout = laid_out({"w": weight})
    total = torch.cuda.get_device_properties(0).total_memory
    with closing(Arena(layout.arena_size)) as arena:
        torch.cuda.set_per_process_memory_fraction((weight.nbytes + 16 * MIB) / total)
        with pytest.raises(MemoryBudgetError, match=r"strided tensor contiguous.*out of memory"):
            stage(arena, layout, [weight])
        torch.cuda.set_per_process_memory_fraction(1.0)
        stage(arena, layout, [weight])
        assert content(files_in(arena, layout)[0])["w"] == raw(weight.cpu())


def test_memory_that_cuda_refuses_to_pin_is_told_once_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.randn(1000, device="cuda")
    layout = laid_out({"w": weight})
    with closing(Arena(layout.arena_size)) as arena:
        address = torch.frombuffer(arena.view(0, arena.size), dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()
        assert int(runtime.cudaHostRegister(address, 4096, 0)) == 0  # so a second time is refused
        with caplog.at_level(logging.WARNING, "smckpt"):
            for _ in range(2):
                stage(arena, layout, [weight], pin=True)
                assert content(files_in(arena, layout)[0])["w"] == raw(weight.cpu())
        assert arena.pinned is False
        (said,) = [record.getMessage() for record in caplog.records]
        assert "CUDA refused to pin" in said and "ulimit -l" in said
        torch.ones(3, device="cuda").sum().item()  # no error is left for the caller's own kernels
        assert int(runtime.cudaHostUnregister(address)) == 0


def test_the_memory_is_unregistered_when_the_arena_closes() -> None:
    weight = torch.randn(1000, device="cuda")
    layout = laid_out({"w": weight})
    arena = Arena(layout.arena_size)
    view = arena.view(0, arena.size)
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    stage(arena, layout, [weight], pin=True)
    assert arena.pinned
    arena.close()
    runtime = torch.cuda.cudart()  # the view keeps the memory mapped: it can be registered again
    assert int(runtime.cudaHostRegister(address, 4096, 0)) == 0
    assert int(runtime.cudaHostUnregister(address)) == 0
    view.release()


def test_a_rank_on_the_cpu_and_a_forked_child_do_not_touch_the_device() -> None:
    said = child.run(
        """
        import os, torch, smckpt, tempfile
        from smckpt.manager.state import random_state
        folder = tempfile.mkdtemp()
        state = {"w": torch.ones(1000)}
        smckpt.save(state, checkpoint_id=f"{folder}/cpu")
        smckpt.load(state, checkpoint_id=f"{folder}/cpu")
        random_state()
        print(torch.cuda.is_initialized())
        state = {"w": torch.ones(1000, device="cuda")}
        smckpt.save(state, checkpoint_id=f"{folder}/cuda")
        pid = os.fork()
        if pid == 0:
            import gc
            gc.collect()
            os._exit(0)
        print(os.waitpid(pid, 0)[1])
        smckpt.save(state, checkpoint_id=f"{folder}/again")
        """
    )
    assert said.split() == ["False", "0"]
