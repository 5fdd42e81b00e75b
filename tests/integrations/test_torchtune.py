"""torchtune's intermediate checkpoints through smckpt: its own recipe, killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import child
from tests.support.interpreters import torchtune

SCRIPT = Path(__file__).parents[1] / "support" / "torchtune_run.py"


def told(*arguments: Any, **where: Any) -> list[dict[str, Any]]:
    done = child.script(SCRIPT, *map(str, arguments), python=torchtune(), **where)
    assert done.returncode == 0, done.stderr[-4000:]
    return child.told(done)


def test_the_calls_of_torchtunes_checkpointer(tmp_path: Path) -> None:
    for rank in told("calls", tmp_path, ranks=2):
        assert rank["at first"] is None
        assert rank["latest"] == str(tmp_path / "dist_epoch_1")
        for epoch in (0, 1):
            assert rank[f"loaded {epoch}"] == rank[f"kept {epoch}"]
            assert rank[f"loaded {epoch} epochs"] == epoch + 1
