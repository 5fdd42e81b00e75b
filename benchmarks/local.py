"""Measures how fast a LOCAL checkpoint is taken, staged, saved, loaded and verified, against this
machine's limits.

    torchrun --standalone --nproc-per-node 2 benchmarks/local.py --dir /path/on/the/disk
    torchrun --standalone --nproc-per-node 2 benchmarks/local.py --s3

Everything is measured in one run, in turn (A B C A B C …), by all ranks at once, and printed as a
ratio to a raw limit of the same run: a plain copy into pre-faulted memory, the fastest raw durable
write, the fastest raw read. torch.distributed.checkpoint is measured for comparison. It prints
medians of `--repeats` turns, with minimum and maximum; the slowest rank counts. `--s3` instead
compares how long `async_save` blocks for the disk and for a real S3 server on loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from smckpt import (
    LOCAL,
    async_save,
    init_optim_state,
    load,
    maybe_finalize_async_calls,
    save,
    sm_state_dict_type,
    verify_checkpoint,
)

HERE = Path(__file__).resolve().parent
PIECE = 8 << 20


class Block(nn.Module):
    """The tensors of a Llama block. It never runs, so it has no forward."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = hidden * 8 // 3 // 64 * 64
        for name, shape in {
            "q": (hidden, hidden),
            "k": (hidden, hidden),
            "v": (hidden, hidden),
            "o": (hidden, hidden),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
            "norm1": (hidden,),
            "norm2": (hidden,),
        }.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def build(kind: str, hidden: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(hidden) for _ in range(layers)))
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
            use_orig_params=kind == "fsdp1-orig",
            device_id=torch.device("cpu"),
        )
    optimizer = torch.optim.AdamW(model.parameters())
    init_optim_state(optimizer)
    return model, optimizer


def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with sm_state_dict_type(model, LOCAL):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def local_tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree.to_local() if hasattr(tree, "to_local") else tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in local_tensors(value)]
    if isinstance(tree, (list, tuple)):
        return [t for value in tree for t in local_tensors(value)]
    return []


def timed_on_one(act: Callable[[], Any]) -> float:
    """Seconds of rank 0, while the others wait."""
    return timed(act if dist.get_rank() == 0 else lambda: None)


def timed(act: Callable[[], Any]) -> float:
    """Seconds of the slowest rank. All ranks start together."""
    dist.barrier()
    began = time.perf_counter()
    act()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds.item())


class Raw:
    """The limits: the same bytes, by the plainest means."""

    def __init__(self, tensors: list[torch.Tensor], path: Path) -> None:
        self.tensors = [t.detach() for t in tensors]
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self.padded = -(-self.nbytes // PIECE) * PIECE
        self.memory = mmap.mmap(-1, self.padded)
        self.buffer = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.buffer.fill_(1)
        self.path = path

    def copy(self) -> None:
        at = 0
        for tensor in self.tensors:
            end = at + tensor.nbytes
            self.buffer[at:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            at = -(-end // 8) * 8

    def _pieces(self, act: Callable[[int], Any]) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(act, range(0, self.padded, PIECE)))

    def write(self, direct: bool) -> None:
        """Write a new file, as a checkpoint does. `clear` runs before, untimed."""
        flags = os.O_CREAT | os.O_WRONLY | os.O_EXCL | (os.O_DIRECT if direct else 0)
        fd = os.open(self.path, flags)
        os.posix_fallocate(fd, 0, self.padded)
        view = memoryview(self.memory)
        self._pieces(lambda at: os.pwrite(fd, view[at : at + PIECE], at))
        os.fsync(fd)
        os.close(fd)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
        os.sync()  # so that earlier writes do not count here

    def read(self, path: Path | None = None) -> None:
        fd = os.open(path or self.path, os.O_RDONLY)
        view = memoryview(self.memory)
        self._pieces(lambda at: os.preadv(fd, [view[at : at + PIECE]], at))
        os.close(fd)

    def read_all(self, paths: list[Path]) -> None:
        """All data files of a checkpoint, as `verify` reads them: by one process, four threads."""
        files = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in paths]
        view = memoryview(self.memory)

        def piece(task: tuple[int, int, int]) -> None:
            fd, at, size = task
            low = at % self.padded
            os.preadv(fd, [view[low : low + min(PIECE, size - at)]], at)

        with ThreadPoolExecutor(4) as pool:
            tasks = [(fd, at, size) for fd, size in files for at in range(0, size, PIECE)]
            list(pool.map(piece, tasks))
        for fd, _ in files:
            os.close(fd)


def verified(folder: Path) -> None:
    report = verify_checkpoint(folder)
    assert report.ok, report.problems


def begin_dcp(state: Callable[[], Any], path: Path, future: list[Any]) -> None:
    future.append(dcp.async_save(state(), checkpoint_id=path))


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fresh(path: Path) -> Path:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return path


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    rank = dist.get_rank()
    root = Path(options.dir) / "smckpt-benchmark"
    model, optimizer = build(options.model, options.hidden, options.layers)
    state = take(model, optimizer)
    tensors = local_tensors(state)
    raw_folder = root / "raw"
    raw_folder.mkdir(parents=True, exist_ok=True)
    raw = Raw(tensors, raw_folder / f"{rank}.bin")
    ours, theirs = root / "smckpt", root / "dcp"
    out: dict[str, list[float]] = {"bytes": [float(raw.nbytes)], "tensors": [float(len(tensors))]}

    def note(name: str, seconds: float) -> None:
        out.setdefault(name, []).append(seconds)

    def blocked() -> None:
        async_save(take(model, optimizer), checkpoint_id=ours)

    def dcp_state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    fresh(ours)
    blocked()  # makes worker, arena and session
    maybe_finalize_async_calls()
    for _ in range(options.repeats):
        note("take", timed(lambda: take(model, optimizer)))
        note("raw copy", timed(raw.copy))
        note("async_save blocks", timed(blocked))
        maybe_finalize_async_calls()
        for name, direct in (("raw write, O_DIRECT", True), ("raw write, fsync", False)):
            raw.clear()
            note(name, timed(partial(raw.write, direct)))
        os.sync()  # so that earlier writes do not count here
        note("save", timed(lambda: save(take(model, optimizer), checkpoint_id=ours)))
        # fills the page cache; the first reader of it also pays for the kernel's lists
        for _ in range(2):
            raw.read()
            load(take(model, optimizer), checkpoint_id=ours)
        own = partial(raw.read, next(ours.rglob(f"data-*-r{rank:05d}-0.safetensors")))
        own()
        note("raw read, same files", timed(own))
        note("raw read, cached", timed(raw.read))
        note("load, cached", timed(lambda: load(take(model, optimizer), checkpoint_id=ours)))
        drop_cache(raw_folder)
        note("raw read, cold", timed(raw.read))
        drop_cache(ours)
        note("load, cold", timed(lambda: load(take(model, optimizer), checkpoint_id=ours)))
        every = sorted(ours.rglob("data-*.safetensors"))
        for act in (partial(raw.read_all, every), partial(verified, ours)):  # fills the cache
            timed_on_one(act)
        note("raw read of all, cached", timed_on_one(partial(raw.read_all, every)))
        note("verify, cached", timed_on_one(partial(verified, ours)))
        drop_cache(ours)
        note("raw read of all, cold", timed_on_one(partial(raw.read_all, every)))
        drop_cache(ours)
        note("verify, cold", timed_on_one(partial(verified, ours)))
        if options.model == "fsdp2" and not options.no_dcp:
            fresh(theirs)
            note("DCP save", timed(lambda: dcp.save(dcp_state(), checkpoint_id=theirs)))
            future: list[Any] = []
            fresh(theirs)
            begin = partial(begin_dcp, dcp_state, theirs, future)
            note("DCP async_save blocks", timed(begin))
            future[0].result()
            note("DCP load, cached", timed(lambda: dcp.load(dcp_state(), checkpoint_id=theirs)))
    fresh(root)
    return out


def measure_s3(options: argparse.Namespace) -> dict[str, list[float]]:
    """How long async_save blocks for disk and S3, in turn. Each save ends before the next."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]
    import loopback_s3

    root = Path(options.dir) / "smckpt-benchmark"
    model, optimizer = build(options.model, options.hidden, options.layers)
    tensors = local_tensors(take(model, optimizer))
    nbytes = float(sum(t.nbytes for t in tensors))
    out: dict[str, list[float]] = {"bytes": [nbytes], "tensors": [float(len(tensors))]}
    with contextlib.ExitStack() as stack:
        told: list[Any] = [None]
        if dist.get_rank() == 0:
            told = [stack.enter_context(loopback_s3.serve("bench")).environment]
        dist.broadcast_object_list(told)
        os.environ.update(told[0])  # before the first save, which starts the worker
        fresh(root)
        places = [("disk", root / "blocked"), ("S3", "s3://bench/blocked")]
        for turn in range(options.repeats + 1):  # the first makes worker, arena and sessions
            for name, place in places if turn % 2 else reversed(places):
                time.sleep(1)  # the server still works after an answer, on the same cores
                begin = partial(async_save, take(model, optimizer), checkpoint_id=place)
                seconds = timed(begin)
                maybe_finalize_async_calls()
                if turn:
                    out.setdefault(f"blocks, {name}", []).append(seconds)
        fresh(root)
    pairs = zip(out["blocks, S3"], out["blocks, disk"], strict=True)
    out["S3 / disk"] = [s3 / disk for s3, disk in pairs]
    return out


def report_s3(out: dict[str, list[float]], options: argparse.Namespace) -> None:
    nbytes, count = out.pop("bytes")[0], int(out.pop("tensors")[0])
    print(
        f"\n{options.model}, {dist.get_world_size()} ranks, {count} tensors and "
        f"{nbytes / 1e9:.2f} GB a rank, {options.repeats} turns: median (min – max)\n"
    )
    for name, values in out.items():
        spread = f"({min(values):.3f} – {max(values):.3f})"
        print(f"{name:24}{statistics.median(values):9.4f} {spread}")
    print(json.dumps({"model": options.model, "bytes": nbytes, "seconds": out}))


def report(out: dict[str, list[float]], options: argparse.Namespace) -> None:
    nbytes, count = out.pop("bytes")[0], int(out.pop("tensors")[0])
    middle = {name: statistics.median(values) for name, values in out.items()}
    best_write = min(middle["raw write, O_DIRECT"], middle["raw write, fsync"])
    limits = {
        "take": None,
        "async_save blocks": middle["raw copy"],
        "DCP async_save blocks": middle["raw copy"],
        "save": best_write,
        "DCP save": best_write,
        "load, cached": min(middle["raw read, same files"], middle["raw read, cached"]),
        "DCP load, cached": middle["raw read, cached"],
        "load, cold": middle["raw read, cold"],
        "verify, cached": middle["raw read of all, cached"],
        "verify, cold": middle["raw read of all, cold"],
    }
    print(
        f"\n{options.model}, {dist.get_world_size()} ranks, {count} tensors and "
        f"{nbytes / 1e9:.2f} GB a rank, median of {options.repeats} (min – max)\n"
    )
    print(f"{'':24}{'seconds':>9}{'min – max':>18}{'GB/s':>13}{'time / limit':>14}")
    for name, values in out.items():
        limit = limits.get(name)
        ratio = f"{middle[name] / limit:.2f}" if limit else ""
        spread = f"{min(values):.3f} – {max(values):.3f}"
        ranks = dist.get_world_size() if name.startswith(("verify", "raw read of all")) else 1
        rate = nbytes * ranks / middle[name] / 1e9
        print(f"{name:24}{middle[name]:9.4f}{spread:>18}{rate:13.2f}{ratio:>14}")
    print(f"\ntaking: {middle['take'] / count * 1e6:.1f} µs a tensor")
    print(json.dumps({"model": options.model, "bytes": nbytes, "tensors": count, "seconds": out}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=".", help="a directory on the disk to measure")
    parser.add_argument("--model", default="fsdp2", choices=["fsdp2", "fsdp1", "fsdp1-orig"])
    parser.add_argument("--hidden", type=int, default=1088)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-dcp", action="store_true")
    parser.add_argument("--s3", action="store_true", help="compare how long the two stores block")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    out = (measure_s3 if options.s3 else measure)(options)
    if dist.get_rank() == 0:
        (report_s3 if options.s3 else report)(out, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
