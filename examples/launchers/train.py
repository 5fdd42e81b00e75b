"""The training loop that every launcher of this folder starts. It saves, ends after a signal, and
resumes.

    torchrun --standalone --nproc-per-node 2 train.py ROOT [STEPS]

ROOT: a directory that all ranks see, or s3://bucket/prefix.
"""

import os
import random
import sys

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smckpt import CheckpointManager, Signals


def main(root: str, steps: int = 1000) -> None:
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(dist.get_rank())
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    # seconds for the last save after a signal, if the launcher waits longer than torchrun does
    grace = float(os.environ["GRACE"]) if "GRACE" in os.environ else None
    with CheckpointManager(
        root, interval=10, keep_last_n=3, signals=Signals(grace=grace)
    ) as manager:
        step = manager.restore(into=state)
        print(f"rank {dist.get_rank()} begins at step {step}", flush=True)
        while step < steps:
            batch = torch.randn(32, 64, device=device)
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if manager.should_save(step):
                manager.save(step, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
