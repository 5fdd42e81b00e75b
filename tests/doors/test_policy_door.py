"""A retention policy of somebody else: the one that docs/extending.md prints, as it is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import smckpt
from smckpt import CheckpointManager


def test_the_policy_of_the_docs_works_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    section = page.partition("## A retention policy")[2]
    code = section.partition("```python")[2].partition("```")[0]
    assert len(code.splitlines()) < 60
    names: dict[str, Any] = {"root": tmp_path}
    exec(code, names)
    with names["manager"] as manager:
        for step, loss in ((100, 3.0), (900, 2.0), (1100, 9.0), (1200, 8.0), (1900, None)):
            metrics = {} if loss is None else {"loss": loss}
            manager.save(step, {"a": torch.ones(2)}, metrics=metrics).wait()
        manager.save(2000, {"a": torch.ones(2)}, metrics={"loss": 1.0})
        manager.save(2100, {"a": torch.ones(2)}, metrics={"loss": 1.5})
    steps = [one.step for one in smckpt.find_checkpoints(tmp_path)]
    assert steps == [900, 1200, 1900, 2000, 2100]


class Broken:
    def kept(self, steps: Any, whole: Any) -> Any:
        return [one for one in steps if one.metadata["metrics"]["acuracy"] > 0.5]


def test_a_policy_that_raises_is_named_and_nothing_is_deleted(tmp_path: Path, caplog: Any) -> None:
    with CheckpointManager(tmp_path, keep_last_n=1, keep=[Broken()]) as manager:
        for step in (1, 2):
            manager.save(step, {"a": torch.ones(2)}, metrics={"accuracy": 0.9}).wait()
    assert [one.step for one in smckpt.find_checkpoints(tmp_path)] == [1, 2]
    assert "Broken object" in caplog.text and "raised KeyError: 'acuracy'" in caplog.text
    assert "until then nothing is deleted" in caplog.text
