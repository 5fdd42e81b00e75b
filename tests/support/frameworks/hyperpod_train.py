"""The training loop of the README of `amzn-sagemaker-checkpointing` 1.1.3, on CPUs, with FSDP2
where there are several ranks. It imports that package's names only.

BASE UNTIL DIE: the path in S3, or the directory; the end; the step after which the first life of
the job dies (-1: it does not). It saves each second step, and each sixth one to S3 or the disk.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import (
    SageMakerCheckpointConfig,
)
from torch.distributed.checkpoint import async_save, load
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

IN_MEMORY, IN_S3 = 2, 6


def main(base: str, until: int, die: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Linear(24, 6))
    if dist.get_world_size() > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    config = SageMakerCheckpointConfig(
        namespace="job-1", world_size=dist.get_world_size(), s3_tier_base_path=base
    )
    start = 0
    try:
        weights, moments = get_state_dict(model, optimizer)
        state = {
            "model": weights, "optimizer": moments, "lr_scheduler": scheduler.state_dict(),
            "step": 0,
        }  # fmt: skip
        reader = SageMakerTieredStorageReader(checkpoint_config=config)
        load(state, storage_reader=reader)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        scheduler.load_state_dict(state["lr_scheduler"])
        start = state["step"] + 1
    except BaseException as error:  # as the README does
        print(f"No checkpoint found, starting from scratch: {error}", file=sys.stderr)
    future = None
    for step in range(start, until):
        optimizer.zero_grad()
        model(torch.full((2, 12), float(step))).sum().backward()
        optimizer.step()
        scheduler.step()
        if step % IN_MEMORY == 0 or step % IN_S3 == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {
                "model": weights, "optimizer": moments, "lr_scheduler": scheduler.state_dict(),
                "step": step,
            }  # fmt: skip
            config.save_to_s3 = step % IN_S3 == 0
            writer = SageMakerTieredStorageWriter(checkpoint_config=config, step=step)
            if future is not None:
                failed = future.exception()
                assert failed is None, failed
            future = async_save(state_dict=state, storage_writer=writer)
        if step == die and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            assert future is not None
            future.result()
            dist.barrier()
            os._exit(9)
    assert future is not None
    future.result()
    whole = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
        for name, value in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        print(json.dumps([start, whole]), flush=True)
    dist.barrier()  # gloo aborts a process whose peers have gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
