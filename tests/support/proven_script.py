"""A training on two ranks, for `smckpt prove` and `chaos`; arguments tell what it forgets, and how
many steps it keeps."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smckpt import CheckpointManager


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def main(root: str, forgets: str, keeps: str = "") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "losses": []}
    seed(dist.get_rank())
    waits = Path(root).name == "interrupted"  # as prove names it
    keep = int(keeps) if keeps else None
    with CheckpointManager(root, interval=2, keep_last_n=keep) as manager:
        step = began = manager.restore(into=state)
        if began and "scheduler" in forgets:
            state["scheduler"] = scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if began and "random" in forgets:
            seed(dist.get_rank())
        while step < 6:
            if step == 3 and not began and waits:
                signal.pause()  # until it is killed, at the commit of step 2
            batch = torch.randn(4, 6)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state["losses"].append(loss.item())
            step += 1
            if manager.should_save(step):
                manager.save(step, state)
    dist.destroy_process_group()


main(*sys.argv[1:])
