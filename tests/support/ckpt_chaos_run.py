"""A script for the public package ckpt-chaos: it trains, saves, resumes, and writes `final.pt`.

    ckpt-chaos run --step-regex "resumed from step (\\d+)" --result-file "{out}/final.pt" \\
        -- python tests/support/ckpt_chaos_run.py {out} save

With `save` it saves to one directory by `smckpt.save`; with `manager`, by a manager that keeps one
step. ckpt-chaos counts the calls of the script's own process, but smckpt's worker writes the files
of a save. With a third argument, `worker`, and `env CKPT_CHAOS_ARMED=1` before the command, it
counts those of the worker instead, and a kill ends the script too.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch

import smckpt
from smckpt import CheckpointManager
from smckpt.engine import worker_client

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


main(*sys.argv[1:])
