"""Measures saves and loads of a sharded checkpoint in S3: smckpt beside s3torchconnector's DCP
storage.

    pip install s3torchconnector[dcp]
    torchrun --standalone --nproc-per-node 4 benchmarks/s3_dcp.py

Rank 0 starts a real server on loopback (seaweedfs, the extra s3-test). All ranks work at once and
use the two clients in turn (A B A B …). Seconds are those of the slowest rank; CPU-seconds of a
load are those of all ranks together. The server's CPU-seconds are printed too: it shares the cores
and takes most of a load. With `--replay`, `s3_replay.py` answers the loads. It repeats the server's
own answers and takes almost no CPU, like a store with cores of its own. DCP writes `--files` files
a rank, smckpt one. Each load is compared with the saved state. Seconds mean something only on an
idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]

import loopback_s3  # noqa: E402

import smckpt  # noqa: E402

Costed = dict[str, list[tuple[float, float, float]]]
BUCKET, REGION, TENSORS = "bench", "us-east-1", 64


def state_of(mib: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = (mib << 20) // TENSORS // 4096
    made = {}
    for number in range(TENSORS):
        local = torch.randn(rows // dist.get_world_size(), 1024)
        made[f"layer{number}"] = DTensor.from_local(local, mesh, [Shard(0)])
    return {"model": made}


def zero(state: dict[str, Any]) -> None:
    for tensor in state["model"].values():
        tensor.to_local().zero_()


class Ours:
    name = "smckpt"

    def __init__(self, loads_from: str) -> None:
        self.config = smckpt.StoreOptions(endpoint=loads_from)

    def save(self, state: dict[str, Any], place: str) -> None:
        smckpt.save(state, checkpoint_id=place)

    def load(self, state: dict[str, Any], place: str) -> None:
        smckpt.load(state, checkpoint_id=place, storage=self.config)


class Connector:
    name = "s3torchconnector (DCP)"

    def __init__(self, endpoint: str, loads_from: str, files: int) -> None:
        import s3torchconnector.dcp  # noqa: F401 (not installed: reported at once)
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        config = S3ClientConfig(force_path_style=True, part_size=64 << 20)
        self.files = files
        # its DCP classes have no endpoint argument
        self.saving, self.loading = (
            S3Client(REGION, endpoint=url, s3client_config=config) for url in (endpoint, loads_from)
        )

    def save(self, state: dict[str, Any], place: str) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(REGION, place, thread_count=self.files)
        writer.fs._client = self.saving
        dcp.save(state, storage_writer=writer)

    def load(self, state: dict[str, Any], place: str) -> None:
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(REGION, place)
        reader.fs._client = self.loading
        dcp.load(state, storage_reader=reader)


class Costs:
    """The cost of a call that all ranks make at once."""

    def __init__(self, server: int) -> None:
        self._server = server

    def of(self, act: Callable[[], None]) -> tuple[float, float, float]:
        """Seconds of the slowest rank, CPU-seconds of all, CPU-seconds of the server."""
        dist.barrier()
        before, theirs, began = cpu(), cpu_of(self._server), time.perf_counter()
        act()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        used = torch.tensor([cpu() - before], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(used)
        return float(seconds), float(used), cpu_of(self._server) - theirs


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(args: argparse.Namespace, endpoint: str, loads_from: str, server: int) -> None:
    """Args:
    server: the process that answers loads, at `loads_from`.
    """
    clients: list[Any] = [Ours(loads_from)]
    try:
        clients.append(Connector(endpoint, loads_from, args.files))
    except ImportError as error:
        say(f"left out: s3torchconnector is not installed: {error}")
    state, costs = state_of(args.mib), Costs(server)
    saved = [tensor.to_local().clone() for tensor in state["model"].values()]
    saves, loads = ({client.name: [] for client in clients} for _ in range(2))
    for turn in range(args.saves):
        for client in clients:
            place = f"s3://{BUCKET}/{clients.index(client)}/{turn}/"
            saves[client.name].append(costs.of(lambda c=client, p=place: c.save(state, p)))
    for turn in range(args.repeats + 1):  # the first turn is a warm-up and does not count
        for client in clients:
            place = f"s3://{BUCKET}/{clients.index(client)}/{turn % args.saves}/"
            zero(state)
            cost = costs.of(lambda c=client, p=place: c.load(state, p))
            for tensor, was in zip(state["model"].values(), saved, strict=True):
                assert torch.equal(tensor.to_local(), was), f"{client.name} loaded other bytes"
            if turn:
                loads[client.name].append(cost)
    what = "real server, its answers to loads replayed" if args.replay else "real server"
    report(args.mib / 1024, what, saves, loads)


def report(gib: float, server: str, saves: Costed, loads: Costed) -> None:
    say(f"{gib:g} GiB on {dist.get_world_size()} ranks, per GiB: median (least–most), {server}")
    rows = (
        ("save, s", saves, 0),
        ("load, s", loads, 0),
        ("load, CPU-s of the ranks", loads, 1),
        ("load, CPU-s of the server", loads, 2),
    )
    for name in loads:
        for what, costed, index in rows:
            values = [cost[index] / gib for cost in costed[name]]
            middle = statistics.median(values)
            base = statistics.median(cost[index] / gib for cost in costed["smckpt"])
            spread = f"{min(values):.2f}–{max(values):.2f}"
            say(f"  {name:24} {what:26} {middle:7.2f} ({spread}), × {middle / base:.2f}")


@contextlib.contextmanager
def replay(endpoint: str) -> Iterator[tuple[str, int]]:
    """The URL and the process of a replay of the server's answers."""
    command = [sys.executable, str(HERE / "s3_replay.py"), endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        yield process.stdout.readline().decode().strip(), process.pid
        process.stdin.close()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="of all ranks (default 1024)")
    parser.add_argument("--files", type=int, default=16, help="of DCP, a rank (default 16)")
    parser.add_argument("--saves", type=int, default=1, help="by each (default 1)")
    parser.add_argument("--replay", action="store_true", help="loads from s3_replay.py")
    parser.add_argument("--repeats", type=int, default=5, help="loads that count (default 5)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        told: list[Any] = [None]
        if dist.get_rank() == 0:
            server = stack.enter_context(loopback_s3.serve(BUCKET))
            loads_from, process = server.endpoint, server.pid
            if args.replay:
                loads_from, process = stack.enter_context(replay(server.endpoint))
            told = [(server.endpoint, server.environment, loads_from, process)]
        dist.broadcast_object_list(told)
        endpoint, environment, loads_from, process = told[0]
        os.environ.update(environment)
        compare(args, endpoint, loads_from, process)
        smckpt.maybe_finalize_async_calls()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
