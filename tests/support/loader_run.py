"""Training that reads its samples through torchdata's StatefulDataLoader, or a Hugging Face dataset
that is read in order, under `CheckpointManager`; run by tests/manager/test_ledger.py.

    loader_run.py FOLDER KIND STOP [without]

Each rank tells the samples of each step. At step STOP it ends without a save (0: at the end of the
epoch). `without`: the position is left out of what is restored.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smckpt

SIZE, BATCH = 48, 2


def data(kind: str, rank: int, ranks: int) -> tuple[Any, Any]:
    """A rank's batches, and what has its position."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    if kind.startswith("map"):
        numbers = list(range(SIZE))
        sampler = StatefulDistributedSampler(numbers, ranks, rank, shuffle=True, seed=3)
        loader = StatefulDataLoader(
            numbers, BATCH, sampler=sampler, num_workers=int(kind.removeprefix("map") or 0)
        )
        return loader, loader
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    whole = Dataset.from_dict({"n": list(range(SIZE))}).to_iterable_dataset(num_shards=6)
    part = split_dataset_by_node(whole, rank=rank, world_size=ranks)
    if kind == "iterable":
        # not part.batch(): datasets 4.4 skips samples when it resumes that, without smckpt too
        return pairs(part), part
    loader = StatefulDataLoader(part, BATCH)
    return loader, loader


def pairs(dataset: Any) -> Any:
    """Its samples two by two; it begins when the first is wanted, after the restore."""
    samples = iter(dataset)
    for sample in samples:
        yield [sample, next(samples)]


def numbers_of(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        return [int(n) for n in batch["n"]]
    return [int(n["n"] if isinstance(n, dict) else n) for n in batch]


def train(folder: str, kind: str, stop: int, without: bool) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, position = data(kind, rank, ranks)
    state = {"model": model, "optimizer": optimizer, "data": {"position": position}}
    into = {key: value for key, value in state.items() if key != "data" or not without}
    ledger: dict[str, list[int]] = {}
    with smckpt.CheckpointManager(Path(folder, "run"), interval=3) as manager:
        try:
            step = began = manager.restore(into=into)
        except smckpt.CheckpointError as error:
            return {"refused": type(error).__name__, "text": str(error)}
        for batch in batches:
            step += 1
            ledger[str(step)] = numbers_of(batch)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if manager.should_save(step):
                manager.save(step, state).wait()
            if step == stop:
                break
    return {"rank": rank, "began": began, "ledger": ledger}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    told = train(sys.argv[1], sys.argv[2], int(sys.argv[3]), "without" in sys.argv)
    print("told " + json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()
