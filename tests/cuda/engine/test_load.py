"""Loads into the memory of a CUDA device, in place, and between device and CPU."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from tests.support.on_cuda import copied, needs_cuda, wait_on_device
from tests.support.truth import differences, flat

pytestmark = needs_cuda


def state(device: str, value: float | None = None) -> dict[str, Any]:
    """Tensors of many kinds; the same random ones each time, or all of one value."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.randn(shape, generator=generator).to(dtype)
        if value is not None:
            made = torch.full(shape, value).to(dtype)
        return made.to(device)

    return {
        "plain": random(300, 70),
        "bf16": random(33, dtype=torch.bfloat16),
        "fp8": random(40, 9, dtype=torch.float8_e4m3fn),
        "complex": random(12, 5, dtype=torch.complex64),
        "scalar": random(),
        "transposed": random(50, 60).t(),
        "sliced": random(64, 64)[::2, 3:50:3],
        "conjugated": random(8, 9, dtype=torch.complex64).conj(),
        "channels last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("saved_on", ["cuda", "cpu"])
@pytest.mark.parametrize("loaded_on", ["cuda", "cpu"])
def test_tensors_are_filled_in_place_wherever_they_were_saved(
    tmp_path: Path, saved_on: str, loaded_on: str
) -> None:
    saved = state(saved_on)
    smckpt.save(saved, checkpoint_id=tmp_path / "c")
    target = state(loaded_on, 9.0)
    before = {key: (t.data_ptr(), t.stride(), t.device) for key, t in target.items()}
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    assert before == {key: (t.data_ptr(), t.stride(), t.device) for key, t in target.items()}
    assert differences(flat(copied(target)), flat(copied(saved))) == []


def test_what_a_side_stream_does_after_a_load_sees_all_of_it(tmp_path: Path) -> None:
    saved = {"w": torch.randn(16 << 20, device="cuda")}
    smckpt.save(saved, checkpoint_id=tmp_path / "c")
    target = {"w": torch.zeros(16 << 20, device="cuda")}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    with torch.cuda.stream(side):
        seen = target["w"].clone()
    torch.cuda.synchronize()
    assert torch.equal(seen, saved["w"])


def test_what_another_stream_still_writes_does_not_undo_a_load(tmp_path: Path) -> None:
    saved = {"w": torch.randn(1 << 20, device="cuda")}
    smckpt.save(saved, checkpoint_id=tmp_path / "c")
    target = {"w": torch.zeros(1 << 20, device="cuda")}
    smckpt.load(target, checkpoint_id=tmp_path / "c")  # what a first load costs is over
    torch.cuda.synchronize()
    writer = torch.cuda.Stream()
    wait_on_device(writer, 2000)
    with torch.cuda.stream(writer):
        target["w"].fill_(9.0)
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    torch.cuda.synchronize()
    assert torch.equal(target["w"], saved["w"])


def test_a_load_takes_no_image_of_the_state_on_the_host(tmp_path: Path) -> None:
    saved = {"w": torch.arange(1 << 30, dtype=torch.int32, device="cuda")}  # 4 GiB
    smckpt.save(saved, checkpoint_id=tmp_path / "c")
    target = {"w": torch.zeros(1 << 30, dtype=torch.int32, device="cuda")}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    smckpt.load(target, checkpoint_id=tmp_path / "c", options=smckpt.LoadOptions(threads=8))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert torch.equal(target["w"], saved["w"])
    assert grown < 1 << 20  # KiB: its 13 slots have 208 MiB


def test_a_state_of_many_sizes_is_read_through_the_ring_and_through_scratch(
    tmp_path: Path,
) -> None:
    """Tensors smaller and larger than a slot, two that are one, one of no elements."""
    sizes = [0, 1, 7, 1000, 3 << 20, 9 << 20, 20 << 20]
    saved = {f"t{n}": torch.randn(n, device="cuda") for n in sizes}
    saved["rows"] = torch.randn(3000, 700, device="cuda")
    smckpt.save(saved, checkpoint_id=tmp_path / "c")
    target = {key: torch.full_like(value, 9.0) for key, value in saved.items()}
    target["rows"] = torch.full((700, 3000), 9.0, device="cuda").t()
    smckpt.load(target, checkpoint_id=tmp_path / "c")
    assert differences(flat(copied(target)), flat(copied(saved))) == []


def test_a_bad_block_is_named_and_its_request_stays_on_the_host(tmp_path: Path) -> None:
    saved = {"w": torch.ones(1 << 20, device="cuda")}
    smckpt.save(saved, checkpoint_id=tmp_path / "c")
    data = next((tmp_path / "c").rglob("*.safetensors"))
    with open(data, "r+b") as file:
        file.seek(3 << 20)
        file.write(b"wrong")
    target = {"w": torch.zeros(1 << 20, device="cuda")}
    with pytest.raises(smckpt.CorruptCheckpointError, match="checksum differs"):
        smckpt.load(target, checkpoint_id=tmp_path / "c")
    assert not target["w"].any()
