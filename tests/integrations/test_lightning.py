"""Lightning's Trainer through smckpt: killed, and resumed to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smckpt
from tests.support import child

SCRIPT = Path(__file__).parents[1] / "support" / "lightning_run.py"


def names(out: Any) -> list[str]:
    return sorted(one.path.rstrip("/").rpartition("/")[2] for one in smckpt.find_checkpoints(out))


def held(told: list[dict[str, Any]], ranks: int = 1) -> None:
    assert len(told) == ranks
    for rank in told:
        resumed, straight = rank["resumed"], rank["straight"]
        ours, losses = resumed.pop("losses"), straight["losses"]
        assert ours == losses[-len(ours) :]
        assert ours[0][0] in (3, 5)  # the save of step 4 was under way when it was killed
        assert {**resumed, "losses": losses} == straight


@pytest.mark.parametrize("how", ["s3"])
def test_one_process_goes_on_bit_for_bit_from_s3_after_a_kill(s3_root: str, how: str) -> None:
    held(child.killed_and_resumed(SCRIPT, s3_root + "/run", how, ("die",)))
    assert names(s3_root + "/run")


@pytest.mark.parametrize("how", ["fsdp2"])
def test_ranks_go_on_bit_for_bit_after_a_kill(tmp_path: Path, how: str) -> None:
    told = child.killed_and_resumed(SCRIPT, tmp_path / "run", how, ("die",), ranks=2)
    held(told, 2)
    assert names(tmp_path / "run")
