"""FSDP2 under Ray Train v2: smckpt saves while training goes on, and Ray only learns where.

    pip install smckpt[ray]
    python examples/ray_train.py STORAGE NAME [STEPS]

STORAGE: a directory that all workers see, or s3://bucket/prefix. The checkpoints lie below
STORAGE/NAME, because Ray takes no others without an upload. Ray replaces a worker that dies
(`FailureConfig`), and all of them go on from the newest committed step.
"""

import random
import sys
from typing import Any

import numpy
import ray.train
import torch
import torch.distributed as dist
from ray.train import CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smckpt import CheckpointManager


def train(config: dict[str, Any]) -> None:
    device = get_device()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(dist.get_rank())
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    saving, loss = None, torch.zeros(())
    # Ray trains in a thread, where Python lets nobody handle signals. Ray restarts a worker anyway.
    with CheckpointManager(config["root"], interval=10, keep_last_n=3, signals=()) as manager:
        step = manager.restore(into=state)
        print(f"rank {dist.get_rank()} begins at step {step}", flush=True)
        while step < config["steps"]:
            batch = torch.randn(32, 64, device=device)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if manager.should_save(step):
                tell_ray(saving, loss)  # of the save before, which is committed by now
                saving = manager.save(step, state)
        tell_ray(saving, loss)


def tell_ray(saving: Any, loss: torch.Tensor) -> None:
    """Report a committed step. Its files stay where they are: Ray uploads nothing."""
    if saving is None:
        return
    saving.result()
    ray.train.report(
        {"loss": loss.item()},
        checkpoint=ray.train.Checkpoint(saving.checkpoint_id),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def main(storage: str, name: str, steps: int = 1000) -> None:
    cuda = torch.cuda.is_available()
    trainer = TorchTrainer(
        train,
        train_loop_config={"root": f"{storage}/{name}/steps", "steps": steps},
        torch_config=TorchConfig(backend="nccl" if cuda else "gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=cuda),
        run_config=RunConfig(
            storage_path=storage,
            name=name,
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print("the newest checkpoint:", result.checkpoint)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
