"""Saves into memory of the host and restores from it, beside a plain copy of the bytes and a disk.

    OMP_NUM_THREADS=1 python benchmarks/recover.py --tensors 16 --repeats 5

One process, one host: no copy goes over a network.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from smckpt import CheckpointManager, Memory

TENSOR = 8 << 20  # elements of float32: 32 MiB


def seconds(run: Callable[[], object], repeats: int) -> list[float]:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return took


def text(took: list[float], limit: float) -> str:
    middle = statistics.median(took)
    return f"{middle:6.3f} s ({min(took):.3f} to {max(took):.3f})  {middle / limit:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=16, help="of 32 MiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", help="the directory of the disk; by default a temporary one")
    options = parser.parse_args()
    state = {f"t{n}": torch.randn(TENSOR) for n in range(options.tensors)}
    other = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            other[name].copy_(tensor)

    copy()
    copies = seconds(copy, options.repeats)
    limit = statistics.median(copies)
    nbytes = 4 * TENSOR * options.tensors
    print(f"{nbytes / 2**30:.2f} GiB, medians of {options.repeats} (spread), ÷ a plain copy")
    print(f"{'plain copy':46}{text(copies, limit)}")
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("memory", {"memory": Memory(interval=1, replicas=0, budget=4 * nbytes + (1 << 20))}),
        ("disk, through the page cache", {"interval": 1}),
    )
    for name, more in kinds:
        with tempfile.TemporaryDirectory(dir=options.dir) as root:
            blocked, committed, step = [], [], 0
            with CheckpointManager(
                root, keep_last_n=1, random=False, signals=(), **more
            ) as manager:
                for step in range(1, options.repeats + 2):
                    assert manager.should_save(step)
                    handle = manager.save(step, state)
                    handle.wait()
                    assert handle.timings is not None
                    blocked.append(handle.timings.blocked)
                    committed.append(handle.timings.committed)
                took = seconds(lambda: manager.restore(into=other), options.repeats + 1)
                assert all(torch.equal(other[key], state[key]) for key in state)
            for what, each in (("blocks", blocked), ("is committed", committed)):
                print(f"{f'{name}: a save {what}':46}{text(each[1:], limit)}")
            print(f"{f'{name}: a restore':46}{text(took[1:], limit)}")


if __name__ == "__main__":
    main()
