"""The Trainer with its checkpoints in S3: named by output_dir, by smckpt_root and by a call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import smckpt
from smckpt.errors import CheckpointNotFoundError
from smckpt.integrations.transformers import get_last_checkpoint
from smckpt.storage import open_storage
from tests.support.frameworks.small_trainer import (
    DATA,
    Begins,
    Opens,
    heard,
    same,
    trainer,
    weights,
)


@pytest.mark.parametrize(
    "where", ["output_dir", pytest.param("smckpt_root", marks=pytest.mark.long)]
)
def test_a_run_in_s3_goes_on_on_another_machine(
    tmp_path: Path, s3_root: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    for machine, steps in (("1", 4), ("2", 8), ("3", 10)):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        begins = Begins()
        out = s3_root if where == "output_dir" else "out"
        one = trainer(out, steps, begins, save_total_limit=2, lr_scheduler_type="constant")
        one.smckpt_root = None if where == "output_dir" else s3_root
        one.train(resume_from_checkpoint=machine != "1")
        begun.append(begins.step)
        found = [each.step for each in smckpt.find_checkpoints(s3_root)]
        assert found == [steps - 2, steps]
        assert not [*(tmp_path / machine).rglob("*.safetensors")]
        names = open_storage(s3_root).join(f"checkpoint-{steps}").names()
        assert {"config.json", "trainer_state.json"} <= {*names}
        for step in range(2, steps - 2, 2):
            assert not [*open_storage(s3_root).join(f"checkpoint-{step}").names()]
    assert begun == [0, 4, 8]
    straight = trainer(tmp_path / "straight", 10, lr_scheduler_type="constant")
    straight.train()
    assert same(weights(one.model), weights(straight.model))


def test_urls_stand_where_the_trainer_takes_directories(
    tmp_path: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with heard("transformers.smckpt") as lines:
        first = trainer(s3_root, 4, Opens())
    assert len([line for line in lines if s3_root in line and str(tmp_path) in line]) == 1
    first.train()
    names = {*open_storage(s3_root).join("checkpoint-4").names()}
    assert {"model.safetensors", "trainer_state.json"} <= names
    first.save_model()
    first.save_model(f"{s3_root}/final")
    for folder in (open_storage(s3_root), open_storage(s3_root).join("final")):
        files = tmp_path / "fetched" / str(len(folder.url))
        files.mkdir(parents=True)
        for name in folder.names():
            (files / name).write_bytes(folder.read(name))
        loaded = AutoModelForCausalLM.from_pretrained(files)
        assert same(weights(loaded), weights(first.model))
    assert get_last_checkpoint(s3_root) == f"{s3_root}/checkpoint-4"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        trainer(tmp_path / "local", 6).train(f"{s3_root}/elsewhere/checkpoint-2")
    begins = Begins()
    trainer(tmp_path / "local", 6, begins).train(f"{s3_root}/checkpoint-2")
    assert begins.step == 2


def test_the_best_checkpoint_is_kept_on_another_machine(
    tmp_path: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = []
    for machine, steps in (("1", 4), ("2", 8)):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        one = trainer(
            s3_root, steps, save_total_limit=1, eval_strategy="steps", eval_steps=2,
            load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
            eval_dataset=DATA,
        )  # fmt: skip
        one.train(resume_from_checkpoint=machine == "2")
        best.append(one.state.best_model_checkpoint)
    assert best == [f"{s3_root}/checkpoint-2"] * 2  # the loss falls
    held = smckpt.load(checkpoint_id=best[0], options=smckpt.LoadOptions(only=["model"]))
    assert held is not None and torch.equal(
        held["model"]["lm_head.weight"], one.model.lm_head.weight
    )
    assert [each.step for each in smckpt.find_checkpoints(s3_root)] == [2]
