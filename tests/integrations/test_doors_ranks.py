"""accelerate and Lightning on two ranks: what one rank shows in their own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors.torch import load_file

import smckpt
from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.integrations.accelerate import SmckptAccelerator, merge_fsdp_weights
from smckpt.integrations.lightning import SmckptCheckpointIO, SmckptTrainer
from tests.support.launch import run_ranks


def prepared(seed: int) -> tuple[SmckptAccelerator, list[Any]]:
    """Two models with an optimizer each."""
    AcceleratorState._reset_state(reset_partial_state=True)
    made = SmckptAccelerator(cpu=True)
    torch.manual_seed(seed)
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    return made, list(made.prepare(*models, *optimizers))


def everything(parts: list[Any]) -> list[torch.Tensor]:
    one, two, *optimizers = parts
    moments = [v for o in optimizers for slots in o.state.values() for v in slots.values()]
    return [t.clone() for t in (*one.state_dict().values(), *two.state_dict().values(), *moments)]


def accelerates(out: Path) -> None:
    accelerator, (one, two, *optimizers) = prepared(0)
    accelerator.backward(two(one(torch.ones(2, 4))).sum())
    for optimizer in optimizers:
        optimizer.step()
    Accelerator.save_state(accelerator, str(out / "step_2"))  # accelerate's own, saved over
    dist.barrier()
    with pytest.raises(UsageError, match="lost a slash"):  # on each rank, so that none waits
        accelerator.save_state("s3:/bucket/run")
    for name in ("step_2", "step_4"):
        accelerator.save_state(str(out / name))
        smckpt.maybe_finalize_async_calls()
    wanted = everything([one, two, *optimizers])
    dist.barrier()
    left = {path.name for path in (out / "step_2").iterdir()}
    assert not {"model.safetensors", "optimizer.bin", "random_states_1.pkl"} & left
    if accelerator.is_main_process:
        for path in (out / "step_4").glob("manifest-*"):
            path.unlink()
    dist.barrier()
    accelerator, parts = prepared(1)
    with pytest.raises(CheckpointNotFoundError, match=f"load {out / 'step_2'}, the newest whole"):
        accelerator.load_state(str(out / "step_4"))
    accelerator.load_state(str(out / "step_2"))
    assert len(wanted) == 16 and all(map(torch.equal, everything(parts), wanted))
    merge_fsdp_weights(out / "step_2", out / "merged", remove_checkpoint_dir=True)
    merged = load_file(out / "merged" / "model.safetensors")
    names = [name.removeprefix("module.") for name in parts[0].state_dict()]
    assert sorted(merged) == sorted(names) and not (out / "step_2").exists()


class Begins(Callback):  # type: ignore[misc]
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step
        self.weights = {name: one.clone() for name, one in pl_module.state_dict().items()}


def fit(kind: Any, folder: Path, epochs: int, at: Any = None) -> Any:
    begins = Begins()
    saved = ModelCheckpoint(dirpath=folder, save_top_k=-1, save_last=True)
    plugins = [SmckptCheckpointIO()] if kind is SmckptTrainer else []
    made = kind(
        max_epochs=epochs, callbacks=[saved, begins], plugins=plugins, accelerator="cpu", devices=2,
        strategy="ddp", logger=False, enable_progress_bar=False, enable_model_summary=False,
        limit_train_batches=4, limit_val_batches=0,
    )  # fmt: skip
    torch.manual_seed(3)
    model = BoringModel()
    made.fit(model, ckpt_path=at)
    begins.ended = {name: one.clone() for name, one in model.state_dict().items()}
    dist.barrier()
    return begins


def lightnings(out: Path) -> None:
    begun = fit(Trainer, out, 1)
    went_on = fit(SmckptTrainer, out, 2, "last")
    assert went_on.step == 4
    assert all(torch.equal(one, begun.ended[name]) for name, one in went_on.weights.items())
    assert (out / "last.ckpt").is_dir()
    again = fit(SmckptTrainer, out, 3, str(out / "last.ckpt"))
    assert again.step == 8
    straight = fit(Trainer, out.with_name("straight"), 3)
    assert all(torch.equal(one, straight.ended[name]) for name, one in again.ended.items())


def both(folder: str) -> None:
    accelerates(Path(folder, "accelerate"))
    dist.barrier()
    lightnings(Path(folder, "lightning"))


@pytest.mark.long
def test_two_ranks_go_on(tmp_path: Path) -> None:
    for name in ("accelerate", "lightning"):
        (tmp_path / name).mkdir()
    run_ranks(both, 2, str(tmp_path))
