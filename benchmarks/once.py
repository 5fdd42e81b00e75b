"""Loads of replicas: each rank reads all that it needs, or the ranks read each byte once.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/once.py --dir DIR
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/once.py --s3

All ranks are on one host. DIR is read cold and from the page cache; `--s3` is a real server on
loopback, which shares the processors with the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import smckpt

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TENSORS = 32


def drop_cache(folder: str) -> None:
    for path in Path(folder).iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def used() -> float:
    times = resource.getrusage(resource.RUSAGE_SELF)
    return times.ru_utime + times.ru_stime


def measure(place: str, options: argparse.Namespace) -> dict[str, list[tuple[float, ...]]]:
    """By kind of load: seconds, CPU-seconds and bytes of each turn, over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    count = options.mib * 2**20 // TENSORS // 4

    def state(value: int) -> dict[str, Any]:
        whole = (torch.full((count,), float(value + n)) for n in range(TENSORS))
        return {str(n): distribute_tensor(t, mesh, [Replicate()]) for n, t in enumerate(whole)}

    smckpt.save({"model": state(1)}, checkpoint_id=place)
    target = {"model": state(0)}
    events: list[Any] = []
    smckpt.add_sink(events.append)
    found: dict[str, list[tuple[float, ...]]] = {}
    for turn in range(options.repeats + 1):
        for cold in (False,) if options.s3 else (False, True):
            for once in (False, True) if turn % 2 else (True, False):
                if cold and dist.get_rank() == 0:
                    drop_cache(place)
                dist.barrier()
                before = used()
                smckpt.load(target, checkpoint_id=place, options=smckpt.LoadOptions(read_once=once))
                event = events[-1]
                cost = torch.tensor([used() - before, event.fetched], dtype=torch.float64)
                slowest = torch.tensor(event.read - event.planned, dtype=torch.float64)
                dist.all_reduce(cost)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn:
                    name = f"{'cold, ' if cold else ''}{'each byte once' if once else 'all ranks'}"
                    row = (float(slowest), *cost.tolist())
                    found.setdefault(name, []).append(row)
    assert float(target["model"]["3"].to_local()[-1]) == 4
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", help="by default a temporary directory")
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--mib", type=int, default=256, help="of state, which every rank has")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        begun: list[Any] = [None]
        if dist.get_rank() == 0 and options.s3:
            sys.path.insert(0, str(EXAMPLES))
            import loopback_s3

            server = stack.enter_context(loopback_s3.serve("bench"))
            begun = [("s3://bench/once", server.environment)]
        elif dist.get_rank() == 0:
            begun = [(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)), {})]
        dist.broadcast_object_list(begun)
        place, environment = begun[0]
        os.environ.update(environment)
        found = measure(place, options)
        dist.barrier()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} replicas of {options.mib} MiB, {options.repeats} turns")
        for name, rows in found.items():
            seconds, processor, fetched = zip(*rows, strict=True)
            print(
                f"{name:24}{statistics.median(seconds):7.3f} s "
                f"({min(seconds):.3f} to {max(seconds):.3f}), "
                f"CPU {statistics.median(processor):6.3f} s, "
                f"read ÷ needed {fetched[-1] / (options.mib * 2**20):.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
