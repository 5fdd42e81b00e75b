"""What alarms cost: how long `async_save` blocks and a save takes, with each alarm in turns.

    torchrun --standalone --nproc-per-node 2 benchmarks/alarms.py --dir /path/on/the/disk

Two replicas of one model (DDP's worst case for the comparison of replicas: each holds all of it).
Every turn makes one save for each choice of alarms, in an order that turns round. Each is divided
by the save of the same turn without any alarm; medians of `--repeats` turns with their quartiles.
The slowest rank counts. The processor time of the training thread is rank 0's: it shows what an
alarm costs there on a machine that has other work too.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from local import Block, take, timed  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from smckpt import (
    Alarms,
    SaveOptions,
    async_save,
    init_optim_state,
    maybe_finalize_async_calls,
)

CHOICES = {
    "none": Alarms(unchanged="off"),
    "default": Alarms(),
    "nonfinite": Alarms(unchanged="off", nonfinite="warn"),
    "replicas": Alarms(unchanged="off", replicas="warn"),
}


Measured = dict[str, list[tuple[float, float, float]]]


def measure(options: argparse.Namespace) -> Measured:
    """Choice → (blocked, processor time of the training thread, until committed) of each turn."""
    root = Path(options.dir) / "smckpt-alarms"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*map(Block, [options.hidden] * options.layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    init_optim_state(optimizer)
    found: Measured = {name: [] for name in CHOICES}
    step = 0
    for turn in range(options.repeats + 1):  # the first makes worker, arena and session
        names = list(CHOICES)[turn % len(CHOICES) :] + list(CHOICES)[: turn % len(CHOICES)]
        for name in names:
            step += 1
            with torch.no_grad():
                next(iter(model.parameters())).add_(1)  # or the default would warn
            chosen = SaveOptions(alarms=CHOICES[name])
            begin = partial(
                async_save, take(model, optimizer), checkpoint_id=root, step=step, options=chosen
            )
            spent = [0.0]
            blocked = timed(partial(counted, begin, spent))
            rest = timed(maybe_finalize_async_calls)
            if turn:
                found[name].append((blocked, spent[0], blocked + rest))
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
    return found


def counted(act: Callable[[], object], spent: list[float]) -> None:
    began = time.thread_time()
    act()
    spent[0] = time.thread_time() - began


def report(found: Measured, repeats: int) -> None:
    print(f"\n{repeats} turns; ratio to no alarm, median (quartiles)\n")
    titles = ("blocked s", "processor s", "committed s")
    print(" " * 12 + "".join(f"{title:>13}{'ratio':>22}" for title in titles))
    for name, values in found.items():
        line = f"{name:12}"
        for which in range(3):
            ratios = [
                mine[which] / base[which] for mine, base in zip(values, found["none"], strict=True)
            ]
            low, middle, high = statistics.quantiles(ratios, n=4)
            line += f"{statistics.median(v[which] for v in values):13.4f}"
            line += f"{f'{middle:.2f} ({low:.2f} – {high:.2f})':>22}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=".", help="a directory on the disk to measure")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = measure(options)
    if dist.get_rank() == 0:
        report(found, options.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
