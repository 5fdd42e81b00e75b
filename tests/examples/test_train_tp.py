"""The tensor-parallel example: what it exports is the model that it trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors.torch import load_file

from smckpt import find_checkpoints
from tests.support.main_job import run_example


def test_the_exported_model_computes_what_the_training_model_does(tmp_path: Path) -> None:
    outcome = run_example("train_tp.py", tmp_path, "--steps", "12", timeout=200)
    assert outcome.status == 0, outcome.output
    assert "from the layout te_split" in outcome.output
    assert "is the checkpoint's: True" in outcome.output
    (apart,) = re.findall(r"differ by at most (\S+)", outcome.output)
    assert float(apart) <= 1e-5
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", outcome.output)]
    assert losses[-1] < 0.8 * losses[0]
    (found,) = find_checkpoints(tmp_path)
    assert found.step == 12
    exported, start = (load_file(tmp_path / d / "model.safetensors") for d in ("exported", "start"))
    assert exported.keys() == start.keys()
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in start.items()}
    ranks = json.loads((tmp_path / "ranks" / "layout.json").read_text())
    assert (ranks["layout"], ranks["tp"]) == ("te_split", 2)
