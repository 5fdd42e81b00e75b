"""`smckpt export` of what the Trainer, accelerate and Lightning saved through their doors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import smckpt
from tests.support.models import hub_families

pytestmark = pytest.mark.long


def by_trainer(model: Any, folder: Path) -> None:
    from transformers import TrainingArguments

    from smckpt.integrations.transformers import SmckptTrainer

    rows = [{"input_ids": row, "labels": row} for row in hub_families.TOKENS]
    arguments = TrainingArguments(
        str(folder), max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    SmckptTrainer(model=model, args=arguments, train_dataset=rows).train()  # type: ignore[arg-type]


def by_accelerate(model: Any, folder: Path) -> None:
    from accelerate.state import AcceleratorState

    from smckpt.integrations.accelerate import SmckptAccelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = SmckptAccelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(str(folder / "one"))
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)


def by_lightning(model: Any, folder: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from smckpt.integrations.lightning import SmckptCheckpointIO

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    trainer: Any = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        callbacks=[ModelCheckpoint(dirpath=folder)], plugins=[SmckptCheckpointIO()],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(hub_families.TOKENS))


@pytest.mark.parametrize("save", [by_trainer, by_accelerate, by_lightning])
def test_a_checkpoint_of_a_door_is_exported(
    save: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    model = hub_families.model("llama")
    save(model, tmp_path / "run")
    found = smckpt.latest_checkpoint(tmp_path / "run")
    assert found is not None and smckpt.verify_checkpoint(found).ok
    smckpt.export_hf(found, tmp_path / "hf", config=model.config)
    model.save_pretrained(tmp_path / "wanted")
    ours, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "wanted"))
    assert sorted(ours) == sorted(wanted)
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []
