"""transformers' Trainer through smckpt: killed, and resumed to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import child
from tests.support.interpreters import transformers4

SCRIPT = Path(__file__).parents[1] / "support" / "trainer_run.py"


def killed_and_resumed(folder: Path, how: str, **where: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Killed after step 5, when the save of step 4 has just begun or been committed."""
    out = folder / "run"
    return out, child.killed_and_resumed(SCRIPT, out, how, ("die", "5"), **where)


def held(out: Path, told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["resumed"] == rank["straight"]
        assert rank["kept"] == ["checkpoint-6", "checkpoint-7"]
    assert told


def test_one_process_goes_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    held(*killed_and_resumed(tmp_path, "plain"))


@pytest.mark.long
def test_fsdp2_goes_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    out, told = killed_and_resumed(tmp_path, "fsdp", ranks=2)
    held(out, told)
    assert {rank["resumed"]["sharded"] for rank in told} == {"DTensor"}


@pytest.mark.long
def test_ddp_goes_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    held(*killed_and_resumed(tmp_path, "plain", ranks=2))


@pytest.mark.long
@pytest.mark.parametrize(("how", "ranks"), [("plain", 1), ("plain", 2), ("fsdp", 2)])
def test_transformers_4_goes_on_bit_for_bit_after_a_kill(
    tmp_path: Path, how: str, ranks: int
) -> None:
    held(*killed_and_resumed(tmp_path, how, ranks=ranks, python=transformers4()))
