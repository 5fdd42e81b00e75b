"""Saves into memory of the host and restores from it, beside a plain copy of the bytes and a disk.

    OMP_NUM_THREADS=1 python benchmarks/recover.py --tensors 16 --repeats 5

One process, one host. What a restore from another host costs is measured over TCP on loopback,
against the same bytes sent by `sendfile` over a connection of its own. The last rows are the
processor time of a save with a copy on another host, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import smckpt
from smckpt import CheckpointManager, Memory
from smckpt.checkpoint.records.crc import crc64
from smckpt.storage.memory.store import asked_locally

TENSOR = 8 << 20  # elements of float32: 32 MiB
PIECE = 256 << 10  # bytes that are read and summed at a time, as smckpt does


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
    parser.add_argument(
        "--pause", type=float, default=5, help="seconds from a first step or a restore to a save"
    )
    options = parser.parse_args()
    state = {f"t{n}": torch.randn(TENSOR) for n in range(options.tensors)}
    other = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    # as in a training: a manager gets the memory of a save early only where there is an optimizer
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    beside = {"optimizer": torch.optim.SGD([weight], momentum=0.9)}

    def copy() -> None:
        for name, tensor in state.items():
            other[name].copy_(tensor)

    copy()
    copies = seconds(copy, options.repeats)
    limit = statistics.median(copies)
    nbytes = 4 * TENSOR * options.tensors
    bare = bare_restores(other, options.repeats)
    print(f"{nbytes / 2**30:.2f} GiB, medians of {options.repeats} (spread), ÷ a plain copy")
    print(f"{'plain copy':60}{text(copies, limit)}")
    print(f"{'bare calls of a restore: preadv and a checksum, two threads':60}{text(bare, limit)}")
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("memory", {"memory": Memory(interval=1, replicas=0, budget=4 * nbytes + (1 << 20))}),
        ("disk, through the page cache", {"interval": 1}),
    )
    for name, more in kinds:
        with tempfile.TemporaryDirectory(dir=options.dir) as root:
            blocked, committed, step = [], [], 0
            made = partial(CheckpointManager, root, keep_last_n=1, random=False, signals=())
            with made(**more) as manager:
                assert manager.restore(into={**other, **beside}) == 0
                beside["optimizer"].step()
                manager.should_save(1)
                time.sleep(options.pause)
                for step in range(2, options.repeats + 3):
                    assert manager.should_save(step)
                    handle = manager.save(step, {**state, **beside})
                    handle.wait()
                    assert handle.timings is not None
                    blocked.append(handle.timings.blocked)
                    committed.append(handle.timings.committed)
                took = seconds(
                    lambda: manager.restore(into={**other, **beside}), options.repeats + 1
                )
                assert all(torch.equal(other[key], state[key]) for key in state)
            with made(**more) as manager:  # the run goes on in another process
                manager.restore(into={**other, **beside})
                time.sleep(options.pause)
                assert manager.should_save(step + 1)
                handle = manager.save(step + 1, {**state, **beside})
                handle.wait()
                assert handle.timings is not None
            resumed = handle.timings.blocked, handle.timings.committed
            for what, each, first in zip(
                ("blocks", "is committed"), (blocked, committed), resumed, strict=True
            ):
                print(f"{f'{name}: a save {what}':60}{text(each[1:], limit)}")
                print(f"{f'{name}: a first save {what}':60}{text(each[:1], limit)}")
                print(f"{f'{name}: a first save after a restore {what}':60}{text([first], limit)}")
            print(f"{f'{name}: a restore':60}{text(took[1:], limit)}")
    from_another_host(state, other, nbytes, options.repeats)
    with_a_copy(state, nbytes, options.repeats)


@contextlib.contextmanager
def two_keepers(budget: int, replicas: int) -> Generator[tuple[list[str], list[int]]]:
    """Two keepers as of two hosts, the first with the second as its peer: their names and pids."""
    names = [f"recover-{os.getpid()}-{replicas}-{letter}" for letter in "ab"]
    command = [sys.executable, "-m", "smckpt.cli", "keeper"]
    pids = []
    with contextlib.ExitStack() as stack:
        for name in names:
            given = [name, "--address", "127.0.0.1", "--budget", str(budget / 2**30 + 0.1)]
            keeper = stack.enter_context(
                subprocess.Popen([*command, *given], stdout=subprocess.PIPE)
            )
            stack.callback(keeper.kill)
            assert keeper.stdout is not None
            keeper.stdout.readline()
            pids.append(keeper.pid)
        peers = [asked_locally(name, {"do": "hello"})["own"] for name in names]
        asked_locally(names[0], {"do": "join", "peers": peers, "replicas": replicas})
        yield names, pids


def from_another_host(
    state: dict[str, torch.Tensor], other: dict[str, torch.Tensor], nbytes: int, repeats: int
) -> None:
    """A load of which every byte comes from another keeper, beside `sendfile`."""
    with two_keepers(2 * nbytes, 0) as (names, _):
        smckpt.save(state, checkpoint_id=f"keeper://{names[1]}/1")
        raw = seconds(lambda: sent(nbytes), repeats + 1)[1:]
        limit = statistics.median(raw)
        print(f"{'sendfile over loopback':60}{text(raw, limit)}")
        for tensor in other.values():
            tensor.zero_()
        where = f"keeper://{names[0]}/1"
        took = seconds(lambda: smckpt.load(other, checkpoint_id=where), repeats + 1)[1:]
        assert all(torch.equal(other[key], state[key]) for key in state)
        print(f"{'memory of another host: a load, ÷ sendfile':60}{text(took, limit)}")
        few = {"few": torch.zeros(1024)}
        smckpt.save(few, checkpoint_id=f"keeper://{names[1]}/2")
        near, far = (
            seconds(partial(smckpt.load, few, checkpoint_id=f"keeper://{name}/2"), repeats + 1)[1:]
            for name in reversed(names)
        )
        limit = statistics.median(near)
        print(f"{'memory of this host: a load of 4 kB':60}{text(near, limit)}")
        print(f"{'memory of another host: a load of 4 kB':60}{text(far, limit)}")


def with_a_copy(state: dict[str, torch.Tensor], nbytes: int, repeats: int) -> None:
    """What a save into memory with a copy on another host takes of processors, beside training:
    the worker, the keeper that is written to, and the one that receives the copy."""
    with two_keepers(3 * nbytes, 1) as (names, keepers):
        taken: list[list[float]] = []
        for _ in range(repeats + 2):  # the third is the first that finds memory to use again
            before = processor_times()
            smckpt.save(state, checkpoint_id=f"keeper://{names[0]}/1")
            after = processor_times()
            spent = {pid: after[pid] - before.get(pid, 0) for pid in after}
            of_keepers = [spent.pop(pid) for pid in keepers]
            taken.append([sum(spent.values()), *of_keepers, bare_calls(nbytes)])
        for what, each in zip(
            ("worker", "keeper", "keeper of the copy", "bare calls", "the three together"),
            [*zip(*taken[2:], strict=True), [sum(each[:3]) for each in taken[2:]]],
            strict=True,
        ):
            per_gib = [took * 2**30 / nbytes for took in each]
            middle = statistics.median(per_gib)
            spread = f"({min(per_gib):.2f} to {max(per_gib):.2f})"
            print(f"{f'memory and a copy, CPU s / GiB: {what}':60}{middle:6.2f}   {spread}")


def processor_times() -> dict[int, float]:
    """Seconds that each child of this process has computed, by its pid."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            found[int(pid)] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def bare_calls(nbytes: int) -> float:
    """Processor seconds of what such a save cannot do without: a checksum, a copy into memory that
    is there, `sendfile`, and what receives it, which copies into memory that is there too."""
    with open(os.memfd_create("copy"), "r+b") as copy:
        data = memoryview(bytearray(nbytes))
        fill(copy.fileno(), data)
        began = time.process_time()
        crc64(data)
        fill(copy.fileno(), data)
        took = time.process_time() - began
        at = 0

        def received(piece: memoryview) -> None:
            nonlocal at
            at += os.pwrite(copy.fileno(), piece, at)

        return took + sent(nbytes, received)


def bare_restores(other: dict[str, torch.Tensor], repeats: int) -> list[float]:
    """What a restore from the own keeper cannot do without: `preadv` of memory that has a file,
    into tensors, and the checksum of each block while it is in the cache."""
    views = [memoryview(tensor.view(torch.uint8).numpy()) for tensor in other.values()]
    with open(os.memfd_create("image"), "r+b") as image, ThreadPoolExecutor(2) as pool:
        for view in views:
            os.write(image.fileno(), view)

        def read(number: int) -> None:
            for at in range(0, len(views[number]), PIECE):
                block = views[number][at : at + PIECE]
                os.preadv(image.fileno(), [block], number * len(views[number]) + at)
                crc64(block)

        return seconds(lambda: list(pool.map(read, range(len(views)))), repeats)


def fill(fd: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(fd, data[at : at + (8 << 20)], at)


def sent(nbytes: int, received: Callable[[memoryview], None] = lambda _: None) -> float:
    """Send so many bytes of memory to a thread of this process; its processor seconds."""
    fd = os.memfd_create("raw")
    os.ftruncate(fd, nbytes)
    os.posix_fallocate(fd, 0, nbytes)
    buffer = memoryview(bytearray(8 << 20))
    with open(fd, "rb") as file, socket.create_server(("127.0.0.1", 0)) as door:

        def send() -> None:
            with socket.create_connection(door.getsockname()) as to:
                to.sendfile(file, 0, nbytes)

        began = time.process_time()
        sender = threading.Thread(target=send)
        sender.start()
        made, _ = door.accept()
        with made:
            while got := made.recv_into(buffer):
                received(buffer[:got])
        sender.join()
        return time.process_time() - began


if __name__ == "__main__":
    main()
