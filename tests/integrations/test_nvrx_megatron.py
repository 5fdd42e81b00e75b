"""Megatron-core's saves with `async_strategy="nvrx"`, over smckpt in NVRx's place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import child

SCRIPT = Path(__file__).parents[1] / "support" / "frameworks" / "nvrx_megatron.py"
RUN = ("-m", "smckpt.run", "--for", "nvrx")

# A version that knows the strategy asks for Python 3.12, so it is no pin.
PYTHON = os.environ.get("SMCKPT_NEW_MEGATRON_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON, reason="SMCKPT_NEW_MEGATRON_PYTHON names no interpreter with megatron-core 0.19"
    ),
]


def ended(out: Path, what: str) -> list[dict[str, Any]]:
    done = child.script(SCRIPT, str(out), what, ranks=2, python=PYTHON, by=RUN)
    assert done.returncode == 0, done.stderr[-4000:]
    told = child.told(done)
    assert len(told) == 2 and told[0]["version"].startswith("0.19"), told
    return told


def test_a_model_of_megatron_is_killed_in_a_save_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    out = tmp_path / "run"
    died = child.script(SCRIPT, str(out), "die", ranks=2, python=PYTHON, by=RUN)
    assert died.returncode != 0 and "it lives" not in died.stderr, died.stderr[-4000:]
    assert not (out / "iter_0000005" / ".metadata").exists()
    for rank in ended(out, "resume"):
        assert rank["from"] == "iter_0000004" and rank["resumed"] == rank["straight"]


def test_each_save_of_megatron_has_the_weights_of_its_moment(tmp_path: Path) -> None:
    for rank in ended(tmp_path, "stay"):
        assert len(set(rank["digests"])) == 3 and rank["same"] == [True] * 3
    names = [path.name for path in tmp_path.glob("0/*.distcp")]
    assert any(name.startswith("optimizer") for name in names), names
