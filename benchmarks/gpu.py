"""Measures a save and a load of state on a CUDA device, against the device's own limits.

    torchrun --standalone --nproc-per-node 1 benchmarks/gpu.py --dir DIR

A model of Llama's blocks with AdamW's moments, sharded by FSDP2, and a training step that keeps the
device busy. Everything is measured in one run, in turn (A B C A B C …). It prints medians of
`--repeats` turns, with the least and the most. The limits are one plain copy of the same bytes
between the device and pinned memory. For comparison it measures torch.save and
torch.distributed.checkpoint: `async_save` with its defaults, and with a `DefaultStager` that pins
and shares its memory and stages in a thread of its own, if this torch has one. With that stager, no
step may begin before its staging ends.

*Overlap* is `SaveOptions(staging="overlap")`. Its true stall is the time of a step that begins
right after the call, less that of a step alone: what training feels after the call has blocked it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from local import Block, fresh, local_tensors, take
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smckpt


class Layer(Block):
    """A Llama block without attention's products, which keeps the device busy enough."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.rms_norm(x, x.shape[-1:], self.norm1)
        x = x + (y @ self.q.t() + y @ self.k.t() + y @ self.v.t()) @ self.o.t()
        y = nn.functional.rms_norm(x, x.shape[-1:], self.norm2)
        return x + (nn.functional.silu(y @ self.gate.t()) * (y @ self.up.t())) @ self.down.t()


class Training:
    """A model, its optimizer, and a step of both."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))
        layers = [Layer(options.hidden) for _ in range(options.layers)]
        self.model: Any = nn.Sequential(*layers).to("cuda", getattr(torch, options.dtype))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.02)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.x = torch.randn(
            options.tokens, options.hidden, device="cuda", dtype=getattr(torch, options.dtype)
        )

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return take(self.model, self.optimizer)

    def torchs_state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Raw:
    """The same bytes as one array on the device, and pinned memory for them."""

    def __init__(self, nbytes: int) -> None:
        self.device = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def down(self) -> None:
        self.host.copy_(self.device, non_blocking=True)

    def up(self) -> None:
        self.device.copy_(self.host, non_blocking=True)


def timed(act: Callable[[], Any], *, to_the_end: bool = True) -> float:
    """Seconds of a call on an idle device; by default until the device is idle again."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    if to_the_end:
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Peers:
    """torch's own ways to write a checkpoint."""

    def __init__(self, training: Training, root: Path) -> None:
        self.training, self.root = training, root
        self.ways: dict[str, Callable[[], dict[str, Any]]] = {"DCP async_save": dict}
        try:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        except ImportError as error:
            print("this torch has no DefaultStager:", error)
            return
        options = StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=True,
        )
        # One for each save: torch 2.11 closes the stager at the end of a save.
        self.ways["DCP, own stager"] = lambda: {"async_stager": DefaultStager(options)}

    def begin(self, way: str, out: list[Any]) -> None:
        state, more = self.training.torchs_state(), self.ways[way]()
        out.append(dcp.async_save(state, checkpoint_id=self.root / "dcp", **more))


class Clock:
    """Records when futures end, in seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.at: dict[str, float] = {}

    def watch(self, name: str, future: Any) -> None:
        future.add_done_callback(
            lambda _: self.at.setdefault(name, time.perf_counter() - self._began)
        )


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    root = Path(options.dir) / "smckpt-gpu-benchmark"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    training = Training(options)
    for _ in range(3):
        training.step()
    tensors = local_tensors(training.state())
    raw = Raw(sum(t.nbytes for t in tensors))
    peers = Peers(training, root)
    ours, plain = root / "smckpt", [t.detach() for t in tensors]
    out: dict[str, list[float]] = {
        "bytes": [float(raw.host.nbytes)],
        "tensors": [float(len(tensors))],
    }

    def note(name: str, seconds: float) -> None:
        out.setdefault(name, []).append(seconds)

    def save(saved: list[Any], staging: Any = "block") -> None:
        chosen = smckpt.SaveOptions(staging=staging)
        saved.append(smckpt.async_save(training.state(), checkpoint_id=ours, options=chosen))

    def steps_during(name: str, flying: Callable[[], bool]) -> None:
        """Steps while something is in flight, at most ten."""
        for _ in range(10):
            if not flying():
                return
            note(f"step, {name} in flight", timed(training.step))

    kept, began = ("bytes", "tensors"), time.perf_counter()
    for turn in range(options.repeats + 1):
        if turn:
            last = {name: round(values[-1], 4) for name, values in out.items()}
            print(
                f"turn {turn - 1}, {time.perf_counter() - began:.0f} s:",
                json.dumps(last),
                flush=True,
            )
        if turn == 1:  # the first turn made workers, memory and sessions
            out = {name: values for name, values in out.items() if name in kept}
        if time.perf_counter() - began > options.limit:
            break
        for _ in range(5):
            note("step, alone", timed(training.step))
        note("raw copy down", timed(raw.down))
        note("raw copy up", timed(raw.up))
        note("take", timed(training.state))
        torch.cuda.reset_peak_memory_stats()
        before, begun = torch.cuda.memory_allocated(), []
        note("async_save blocks", timed(partial(save, begun), to_the_end=False))
        out.setdefault("extra device bytes", []).append(
            float(torch.cuda.max_memory_allocated() - before)
        )
        steps_during("save", lambda handle=begun[0]: not handle.done())
        timings = begun[0].wait()
        note("staging within it", timings.staged)
        note("committed", timings.committed)
        begun = []
        note("overlap blocks", timed(partial(save, begun, "overlap"), to_the_end=False))
        step_began = time.perf_counter()
        training.step()
        torch.cuda.current_stream().synchronize()  # others may go on
        note("step, right after overlap", time.perf_counter() - step_began)
        alone = statistics.median(out["step, alone"][-5:])
        note("true stall of overlap", out["step, right after overlap"][-1] - alone)
        steps_during("overlap", lambda handle=begun[0]: not handle.done())
        timings = begun[0].wait()
        note("overlap staged and proven", timings.staged)
        note("overlap committed", timings.committed)
        note("load", timed(lambda: smckpt.load(training.state(), checkpoint_id=ours)))
        for way in peers.ways:
            fresh(root / "dcp")
            dcps: list[Any] = []
            clock = Clock()
            note(f"{way} blocks", timed(partial(peers.begin, way, dcps), to_the_end=False))
            future = getattr(dcps[0], "upload_completion", dcps[0])
            clock.watch("ended", future)
            if hasattr(dcps[0], "staging_completion"):  # no step may change the state before
                clock.watch("staged", dcps[0].staging_completion)
                dcps[0].staging_completion.result()
                note(f"{way} staged", clock.at["staged"])
            steps_during(way, lambda future=future: not future.done())
            future.result()
            note(f"{way} ended", clock.at["ended"])
        note(
            "DCP load",
            timed(lambda: dcp.load(training.torchs_state(), checkpoint_id=root / "dcp")),
        )
        note("torch.save", timed(partial(torch.save, plain, root / "torch.pt")))
        note("torch.load", timed(partial(torch.load, root / "torch.pt", map_location="cuda")))
        torch.cuda.empty_cache()
    shutil.rmtree(root)
    return out


def report(out: dict[str, list[float]], options: argparse.Namespace) -> None:
    nbytes, count = out.pop("bytes")[0], int(out.pop("tensors")[0])
    extra = max(out.pop("extra device bytes"))
    middle = {name: statistics.median(values) for name, values in out.items()}
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}, "
        f"{count} tensors, {nbytes / 1e9:.2f} GB, in {options.dir}; "
        f"median of {len(out['take'])} (min – max)\n"
    )
    print(f"{'':44}{'seconds':>9}{'min – max':>18}{'GB/s':>8}{'÷ raw copy':>12}")
    for name, values in out.items():
        moves = not name.startswith(("step", "take", "true stall"))
        limit = middle["raw copy up" if "load" in name else "raw copy down"]
        rate = f"{nbytes / middle[name] / 1e9:.2f}" if moves else ""
        ratio = f"{middle[name] / limit:.2f}" if moves else ""
        spread = f"{min(values):.3f} – {max(values):.3f}"
        print(f"{name:44}{middle[name]:9.4f}{spread:>18}{rate:>8}{ratio:>12}")
    print(f"\nasync_save took at most {extra:.0f} bytes more of the device's memory")
    print(json.dumps({"bytes": nbytes, "tensors": count, "dir": options.dir, "seconds": out}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=".", help="a directory in the file system to measure")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600, help="no turn begins after as many s")
    options = parser.parse_args()
    torch.cuda.set_device(dist.get_node_local_rank(0))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.set_float32_matmul_precision("high")
    out = measure(options)
    if dist.get_rank() == 0:
        report(out, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
