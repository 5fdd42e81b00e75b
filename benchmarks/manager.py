"""Measures what the manager adds to a save on the training thread, and the cost of `should_save`.

    torchrun --standalone --nproc-per-node 2 benchmarks/manager.py --dir DIR

A plain loop (LOCAL state, `async_save`) and `CheckpointManager.save` save one FSDP2 model in turn,
and both the state of the random generators.
The model has many small tensors, so that the copy of its bytes hides nothing. Rank 0's time counts
from the first call until training may go on, and its training thread's processor time, in which
no wait for peers or for other programs counts. Who is first in a turn alternates. It prints
medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from smckpt import (
    LOCAL,
    CheckpointManager,
    async_save,
    maybe_finalize_async_calls,
    sm_state_dict_type,
)
from smckpt.manager.state import random_state


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one call, and of this thread's processor. The ranks begin together, with no save
    in flight."""
    maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    begin, busy = time.perf_counter(), time.thread_time()
    act()
    return time.perf_counter() - begin, time.thread_time() - busy


def show(what: str, times: list[float], unit: float, name: str) -> None:
    if dist.get_rank() == 0:
        middle, least, most = (f(times) / unit for f in (statistics.median, min, max))
        print(f"{what:58} {middle:8.2f} ({least:.2f} – {most:.2f}) {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", required=True, type=Path, help="a directory on a disk")
    parser.add_argument("--layers", type=int, default=48, help="two tensors each (default 48)")
    parser.add_argument("--repeats", type=int, default=15, help="turns (default 15)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(args.layers)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    root = args.dir / "smckpt-benchmark-manager"
    dist.barrier()

    def plain(step: int) -> None:
        with sm_state_dict_type(model, LOCAL):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state["random"] = random_state()
        async_save(state, checkpoint_id=root / f"plain/{step}", step=step)

    calls: list[float] = []
    saves: list[tuple[float, float]] = []
    managed: list[tuple[float, float]] = []
    every = timedelta(hours=1)
    with CheckpointManager(root / "managed", interval=every, keep_last_n=2) as manager:
        both = {"model": model, "optimizer": optimizer}
        for step in range(1, args.repeats + 3):
            turn = [
                (saves, lambda step=step: plain(step)),
                (managed, lambda step=step: manager.save(step, both)),
            ]
            for times, act in turn if step % 2 else reversed(turn):
                times.append(timed(act))
        for step in range(1000):
            calls.append(timed_call(manager, args.repeats + 10 + step))
    show("should_save, a call", calls, 1e-6, "µs")
    del saves[:2], managed[:2]  # the first ones make workers, arenas and meetings
    for turn_of, what in enumerate(("until training goes on", "processor time of the thread")):
        plainly, by_it = ([each[turn_of] for each in times] for times in (saves, managed))
        show(f"async_save, {6 * args.layers} tensors: {what}", plainly, 1e-3, "ms")
        show("CheckpointManager.save of the same", by_it, 1e-3, "ms")
        pairs = [b - a for a, b in zip(plainly, by_it, strict=True)]
        show("the manager adds, pair by pair", pairs, 1e-3, "ms")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    dist.destroy_process_group()


def timed_call(manager: CheckpointManager, step: int) -> float:
    begin = time.perf_counter()
    manager.should_save(step)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
