"""accelerate and transformers' Trainer through smckpt on a CUDA device: killed, and resumed to the
last bit, random numbers of the device among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import test_accelerate, test_transformers
from tests.support.on_cuda import needs_cuda

pytestmark = needs_cuda


@pytest.mark.parametrize("how", ["plain-cuda", "fsdp1-cuda", "fsdp2-cuda"])
def test_accelerate_goes_on_bit_for_bit_after_a_kill(tmp_path: Path, how: str) -> None:
    sharded = how != "plain-cuda"
    (told,) = test_accelerate.killed_and_resumed(tmp_path, how, torchrun=sharded)
    kind = "DTensor" if how == "fsdp2-cuda" else "Parameter"
    assert told["resumed"]["sharded"] == kind


@pytest.mark.parametrize("how", ["plain-cuda", "fsdp-cuda"])
def test_the_trainer_goes_on_bit_for_bit_after_a_kill(tmp_path: Path, how: str) -> None:
    sharded = how != "plain-cuda"
    out, told = test_transformers.killed_and_resumed(tmp_path, how, torchrun=sharded)
    test_transformers.held(out, told)
    assert told[0]["resumed"]["sharded"] == ("DTensor" if sharded else "Parameter")
