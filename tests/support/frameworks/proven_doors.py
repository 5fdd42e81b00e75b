"""A script that trains through the door of a framework, and goes on after what it finds.

Its arguments: OUT DOOR. DOOR: trainer, lightning, accelerate, dcp; "-fsdp2" after it shards.
"""

from __future__ import annotations

import os
import random
import sys

import numpy
import torch

from smckpt import find_checkpoints


def trainer(out: str, how: str) -> None:
    from tests.support.frameworks.trainer_run import STEPS, trainer

    found = any(one.startswith("checkpoint-") for one in os.listdir(out))
    if [one.step for one in find_checkpoints(out)][-1:] == [STEPS]:
        return  # the Trainer itself would train one more step
    trainer(out, "fsdp" if how else "plain", []).train(resume_from_checkpoint=found)


def lightning(out: str, how: str) -> None:
    from tests.support.frameworks import lightning_run

    lightning_run.STEPS = 8  # the last one is saved: a resume from it has nothing left to train
    made = lightning_run.trainer(out, how or "disk", dies=-1)
    made.fit(lightning_run.Model(), lightning_run.Batches(), ckpt_path="last")


def accelerate(out: str, how: str) -> None:
    from smckpt.integrations.accelerate import SmckptAccelerator
    from tests.support.frameworks import accelerate_run

    made = accelerate_run.made(out, how or "plain", SmckptAccelerator)
    accelerate_run.train(made, resume=bool(find_checkpoints(out)))


def dcp(out: str, how: str) -> None:
    """torch's own calls, with our writer and reader; sharded, DCP's names over our engine."""
    if how:
        dcp_fsdp2(out)
        return
    import torch.distributed.checkpoint as stock

    from smckpt.integrations.dcp import DistributedFileSystemReader, DistributedFileSystemWriter

    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # has no state of its own
    step = 0
    if found := find_checkpoints(out):
        held = {"model": model.state_dict(), "step": 0}
        stock.load(held, storage_reader=DistributedFileSystemReader(found[-1]))
        step = held["step"]
    while step < 6:
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        state = {"model": model.state_dict(), "step": step}
        place = os.path.join(out, str(step))
        stock.save(state, storage_writer=DistributedFileSystemWriter(place, step=step))


def dcp_fsdp2(out: str) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    from smckpt.integrations.dcp.calls import async_save, load

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 6))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(dist.get_rank())

    def taken(step: int) -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        rng = torch.get_rng_state().tolist()  # each rank's own
        return {
            "model": weights,
            "optim": moments,
            "scheduler": scheduler,
            "rng": rng,
            "step": step,
        }

    step, saving = 0, None
    if found := find_checkpoints(out):
        held = taken(0)
        load(held, checkpoint_id=found[-1].path)
        set_state_dict(
            model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"]
        )
        torch.set_rng_state(torch.tensor(held["rng"], dtype=torch.uint8))
        step = held["step"]
    while step < 6:
        batch = torch.randn(4, 6)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if saving is not None:
            saving.result()
        saving = async_save(taken(step), checkpoint_id=os.path.join(out, str(step)))
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    place, door = sys.argv[1:]
    os.makedirs(place, exist_ok=True)
    name, _, kind = door.partition("-")
    globals()[name](place, kind)
