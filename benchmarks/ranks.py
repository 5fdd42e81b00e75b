"""Many ranks with tiny tensors on this machine: what the ranks' meetings cost, first and later.

    python benchmarks/ranks.py [--ranks 16 64] [--saves 6] [--pause 10] [--dir .]

Every rank is a process of torchrun's with a worker of its own. (A fork of one that has imported
torch would copy a thousand pages in its first save, as no job does.) The state is eight DTensors of
a few kB, sharded over all ranks: one SHARDED group. It prints seconds of the slowest rank: how long
the first save blocks and takes until it is committed, the medians of the later ones, and loads.
Saves are a `CheckpointManager`'s, which starts the workers when it restores; `--pause` seconds go
by before the first save, as the first steps of a training do. With `--pause -1` they are bare calls
of `async_save`, whose first one starts the worker. On a machine with fewer processors than ranks
most of the time is the ranks' turns at the processors, so the figure beside them is that of a
barrier of gloo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import smckpt
from tests.support.launch import free_port


def timed(act: Callable[[], object]) -> float:
    """How long the slowest rank takes."""
    dist.barrier()
    began = time.perf_counter()
    act()
    took = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def rank(folder: str, saves: int, pause: float) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(float(4 * dist.get_world_size())).reshape(-1, 4)
    state = {f"w{n}": distribute_tensor(whole + n, mesh, [Shard(0)]) for n in range(8)}
    weights = torch.nn.Parameter(torch.ones(4))  # a new run's memory is got after its first step
    optimizer = torch.optim.SGD([weights], momentum=0.9)
    out: dict[str, list[float]] = {"blocked": [], "committed": [], "loaded": [], "barrier": []}
    manager = smckpt.CheckpointManager(folder, keep_last_n=None) if pause >= 0 else None
    if manager is not None:
        manager.restore({**state, "optimizer": optimizer})
        weights.sum().backward()
        optimizer.step()
        manager.should_save(1)  # after each step, as a training does
        time.sleep(pause)
    for step in range(2, saves + 2):
        handles = []

        def save(step: int = step, handles: list[smckpt.SaveHandle] = handles) -> None:
            there = f"{folder}/{step}"
            if manager is None:
                handles.append(smckpt.async_save({**state, "step": step}, checkpoint_id=there))
            else:
                handles.append(manager.save(step, {**state, "optimizer": optimizer}))

        blocked = timed(save)
        out["committed"].append(blocked + timed(lambda handles=handles: handles[0].wait()))
        out["blocked"].append(blocked)
        out["barrier"].append(timed(dist.barrier))
    for _ in range(3):
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        there = f"{folder}/{saves + 1}"
        out["loaded"].append(
            timed(
                lambda target=target, there=there: smckpt.load(
                    target, checkpoint_id=there, check_keys_matched="target"
                )
            )
        )
        assert all(torch.equal(target[n].to_local(), state[n].to_local()) for n in state)
    return out


def launched(count: int, folder: str, given: argparse.Namespace) -> dict[str, list[float]]:
    """What `rank` gives in a job of so many ranks."""
    job = ["torch.distributed.run", f"--nproc-per-node={count}", f"--master-port={free_port()}"]
    own = [__file__, f"--rank-in={folder}", f"--saves={given.saves}", f"--pause={given.pause}"]
    log = Path(folder, "log")
    with log.open("w") as out:
        command = [sys.executable, "-m", *job, *own]
        if subprocess.run(command, stdout=out, stderr=out, timeout=900).returncode:
            raise SystemExit(log.read_text())
    found: dict[str, list[float]] = json.loads(Path(folder, "found.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank-in", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--pause", type=float, default=10)
    parser.add_argument("--dir", default=".")
    given = parser.parse_args()
    if given.rank_in:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = rank(f"{given.rank_in}/run", given.saves, given.pause)
        if dist.get_rank() == 0:
            Path(given.rank_in, "found.json").write_text(json.dumps(found))
        return
    for count in given.ranks:
        with tempfile.TemporaryDirectory(dir=given.dir) as folder:
            found = launched(count, folder, given)
        for name, values in found.items():
            first, *later = values
            middle = statistics.median(later)
            print(
                f"{count:4} ranks {name:10} first {first:6.3f} s   later {middle:6.3f} s "
                f"({min(later):.3f} to {max(later):.3f})   first ÷ later {first / middle:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
