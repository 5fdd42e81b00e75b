"""A ledger of samples: over kills and other numbers of ranks each is taken once an epoch."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from smckpt import CheckpointManager
from tests.support.launch import ROOT, run_ranks

SIZE, BATCH, EPOCHS = 50, 2, 2


def printed() -> Any:
    """The class in docs/manager.md, as printed."""
    page = (ROOT / "docs" / "manager.md").read_text()
    (code,) = (
        code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "class Samples" in code
    )
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    return names["Samples"]


def train(folder: str, dies: int) -> int:
    """Train to the end, or until step `dies`; the step at which it began.

    Each rank writes (step, number of ranks, samples) to its ledger before the step is saved.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Linear(12, 12)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters())
    samples = printed()(SIZE, BATCH)
    state = {"model": model, "optimizer": optimizer, "samples": samples}
    ledger = Path(folder, f"ledger-{ranks}-{rank}.jsonl")
    with CheckpointManager(Path(folder, "run"), interval=3) as manager:
        step = began = manager.restore(into=state)
        while samples.taken < EPOCHS * SIZE:
            mine = samples.take(rank, ranks)
            batch = torch.tensor(mine, dtype=torch.float32).sum().expand(1, 12)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            with ledger.open("a") as file:
                file.write(json.dumps([step, mine]) + "\n")
            if step == dies:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if manager.should_save(step):
                manager.save(step, state).wait()
    return began


def rows(folder: Path, ranks: int) -> list[tuple[int, list[int]]]:
    return [
        (step, taken)
        for path in folder.glob(f"ledger-{ranks}-*.jsonl")
        for step, taken in map(json.loads, path.read_text().splitlines())
    ]


def test_over_kills_and_changes_of_world_every_sample_is_taken_once_an_epoch(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path)
    assert run_ranks(train, 4, folder, 5, killed=(0, 1, 2, 3)) == [None] * 4
    assert run_ranks(train, 2, folder, 10, killed=(0, 1)) == [None] * 2
    began = run_ranks(train, 3, folder, 0)
    assert began == [9, 9, 9]
    # what a later job did again was never saved by the one before
    kept = [taken for step, taken in rows(tmp_path, 4) if step <= 3]
    kept += [taken for step, taken in rows(tmp_path, 2) if 3 < step <= 9]
    kept += [taken for _, taken in rows(tmp_path, 3)]
    lost = [taken for step, taken in rows(tmp_path, 4) if step > 3]
    assert lost and min(step for step, _ in rows(tmp_path, 2)) == 4
    assert Counter(number for taken in kept for number in taken) == dict.fromkeys(
        range(SIZE), EPOCHS
    )
