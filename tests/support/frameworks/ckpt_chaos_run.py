"""A script for the public package ckpt-chaos: it trains, saves, resumes, and writes `final.pt`.

    ckpt-chaos run --step-regex "resumed from step (\\d+)" --result-file "{out}/final.pt" \\
        -- python tests/support/frameworks/ckpt_chaos_run.py {out} save

With `save` it saves to one directory by `smckpt.save`; with `manager`, by a manager that keeps one
step; with `trainer` and `lightning`, through the doors of these frameworks. ckpt-chaos counts the
calls of the script's own process, but smckpt's worker writes the files of a save. With a third
argument, `worker`, and `env CKPT_CHAOS_ARMED=1` before the command, it counts those of the worker
instead, and a kill ends the script too.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smckpt
from smckpt import CheckpointManager
from smckpt.engine.background import worker_client

STEPS = 3
IN_WORKER = """
import os, signal
from ckpt_chaos.targets.common import arm_from_env
real = os._exit
os._exit = lambda code: (os.kill(os.getppid(), signal.SIGKILL), real(code))
arm_from_env(0, lazy=True)
"""


def main(out: str, door: str, armed: str = "") -> None:
    if armed == "worker":
        worker_client._PROGRAM = worker_client._PROGRAM.replace(
            "from smckpt", f"exec({IN_WORKER!r}); from smckpt", 1
        )
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    if door in ("trainer", "lightning"):
        os.makedirs(out, exist_ok=True)
        ended = {"trainer": by_trainer, "lightning": by_lightning}[door](out)
        torch.save(ended, Path(out, "final.pt"))
        return
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train() -> None:
        batch = torch.randn(4, 8)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    {"save": by_save, "manager": by_manager}[door](
        Path(out, "checkpoints"), model, optimizer, train
    )
    torch.save(model.state_dict(), Path(out, "final.pt"))


def by_save(root, model, optimizer, train) -> None:  # type: ignore[no-untyped-def]
    def state(step: int) -> dict[str, object]:
        return {"model": model, "optimizer": optimizer, "step": step, "rng": torch.get_rng_state()}

    step = 0
    if smckpt.find_checkpoints(root):
        loaded = smckpt.load(state(0), checkpoint_id=root)
        step = loaded["step"]
        torch.set_rng_state(loaded["rng"])
    print(f"resumed from step {step}", flush=True)
    for now in range(step + 1, STEPS + 1):
        train()
        smckpt.save(state(now), checkpoint_id=root, step=now)


def by_manager(root, model, optimizer, train) -> None:  # type: ignore[no-untyped-def]
    live = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root, interval=1, keep_last_n=1) as manager:
        step = manager.restore(into=live)
        print(f"resumed from step {step}", flush=True)
        for now in range(step + 1, STEPS + 1):
            train()
            manager.save(now, live)


def by_trainer(out: str) -> dict[str, Any]:
    from transformers import TrainerCallback

    from tests.support.frameworks import trainer_run

    class Begins(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(f"resumed from step {state.global_step}", flush=True)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # the Trainer saves its last step, and resumed from there it trains one more
            control.should_training_stop = state.global_step == trainer_run.STEPS - 1

    trainer_run.STEPS = 6
    made = trainer_run.trainer(out, "plain", [Begins()])
    made.train(resume_from_checkpoint=any(one.startswith("checkpoint-") for one in os.listdir(out)))
    return trainer_run.ended(made)


def by_lightning(out: str) -> dict[str, Any]:
    from lightning.pytorch import Callback, seed_everything

    from tests.support.frameworks import lightning_run

    class Begins(Callback):
        def on_train_start(self, trainer: Any, model: Any) -> None:
            print(f"resumed from step {trainer.global_step}", flush=True)

    seed_everything(0, verbose=False)
    lightning_run.STEPS = 5  # the last one is not saved
    made, model = lightning_run.trainer(out, "disk", dies=-1), lightning_run.Model()
    made.callbacks.append(Begins())
    made.fit(model, lightning_run.Batches(), ckpt_path="last")
    ended = lightning_run.ended(made, model)
    # a resumed run has seen only its own losses; files of the last step get another name where the
    # killed run left half of one
    return {key: ended[key] for key in ("digest", "lr", "random", "seen", "epoch", "hparams")}


main(*sys.argv[1:])
