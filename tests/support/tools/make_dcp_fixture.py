"""Make tests/fixtures/dcp-VERSION: what stock DCP of the running torch writes from two ranks.

Run it by the torch whose checkpoints are meant; it imports nothing else of ours than the limits:

    python tests/support/tools/make_dcp_fixture.py tests/fixtures
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def whole() -> dict[str, Any]:
    """The state, with whole tensors."""
    weight = torch.arange(35.0).reshape(7, 5)
    return {
        "model": {"weight": weight, "bias": torch.arange(5).to(torch.bfloat16)},
        "optimizer": {
            "state": {
                "weight": {"exp_avg": weight * 2, "step": torch.tensor(3.0)},
                "bias": {"exp_avg": torch.arange(5.0) - 2, "step": torch.tensor(3.0)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["weight", "bias"]}],
        },
        "rng": torch.arange(8, dtype=torch.uint8),
        "run": {"name": "a", "seen": [1, 2]},
        "step": 7,
    }


def save(rank: int, store: str, place: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (2,))

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(inner) for key, inner in value.items()}
        if isinstance(value, torch.Tensor) and value.dim():
            # 7 rows: the ranks hold parts of other sizes
            cut = Shard(0) if value.dim() == 2 else Replicate()
            return distribute_tensor(value, mesh, [cut])
        return value

    state = whole()
    state |= {"model": placed(state["model"]), "optimizer": placed(state["optimizer"])}
    dcp.save(state, checkpoint_id=place)
    dist.barrier()
    os._exit(0)  # torch 2.6 waits for ever where it leaves a group over a file


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from limits import seconds

    folder = Path(sys.argv[1]).resolve() / f"dcp-{torch.__version__.partition('+')[0]}"
    folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    store = str(folder) + ".store"
    ranks = [spawn.Process(target=save, args=(rank, store, str(folder))) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(seconds(120))
    Path(store).unlink(missing_ok=True)
    sys.exit(any(each.exitcode for each in ranks))
