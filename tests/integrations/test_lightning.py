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


def test_one_process_goes_on_bit_for_bit_from_s3_after_a_kill(s3_root: str) -> None:
    held(child.killed_and_resumed(SCRIPT, s3_root + "/run", "s3", ("die",)))
    assert len(names(s3_root + "/run")) == 3  # the best two, and the last


def test_two_ranks_of_fsdp2_go_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    told = child.killed_and_resumed(SCRIPT, tmp_path / "run", "fsdp2", ("die",), ranks=2)
    assert {rank["resumed"]["sharded"] for rank in told} == {"DTensor"}
    held(told, 2)
    assert len(names(tmp_path / "run")) == 3


@pytest.mark.long
@pytest.mark.parametrize("how", ["disk", "disk-sync", "s3-wrapped", "epochs"])
def test_one_process_goes_on_bit_for_bit_in_other_ways(
    tmp_path: Path, s3_root: str, how: str
) -> None:
    place = s3_root if how.startswith("s3") else tmp_path
    held(child.killed_and_resumed(SCRIPT, f"{place}/run", how, ("die",)))
    assert len(names(f"{place}/run")) == 3


@pytest.mark.long
@pytest.mark.parametrize("how", ["disk", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("where", ["disk", "s3"])
def test_two_ranks_go_on_bit_for_bit_after_a_kill(
    tmp_path: Path, s3_root: str, how: str, where: str
) -> None:
    place = s3_root if where == "s3" else tmp_path
    held(child.killed_and_resumed(SCRIPT, f"{place}/run", how, ("die",), ranks=2), 2)
    assert len(names(f"{place}/run")) == 3


STOCK = """
import sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()

saved = ModelCheckpoint(dirpath=sys.argv[1], save_last=True, every_n_train_steps=2)
trainer = Trainer(max_steps=4, accelerator="cpu", callbacks=[saved], logger=False,
                  limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False)
model = Model(width=3)
trainer.fit(model, ckpt_path="last")
again = Model.load_from_checkpoint(saved.best_model_path)
assert again.hparams["width"] == 3
assert all(map(torch.equal, again.parameters(), model.parameters()))
"""


def test_a_script_of_lightning_is_run_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOCK)
    done = child.script(
        script, str(tmp_path / "run"), by=("-m", "smckpt.run", "--for", "lightning")
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert names(tmp_path / "run") == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert "replaced lightning.pytorch.strategies.FSDPStrategy" in done.stderr
