"""Measures smckpt's S3 store beside other clients, in one run.

    python benchmarks/s3.py                    # cost of the clients against a sink, over TLS
    python benchmarks/s3.py --server real      # rates against a real server on loopback, over TLS
    python benchmarks/s3.py --plain            # the same over plain HTTP

The *sink* (`s3_sink.py`) is a process of its own that drops bodies and serves zeros. So the figures
show the client's own cost, in CPU-seconds per GiB, also on a busy machine. The *real* server is
seaweedfs on loopback (the extra s3-test). Its own work bounds the rates, which mean something only
on an idle machine. Each client has a process of its own, and they use one piece of shared memory in
turn (A B C A B C …). It prints medians, with the least and the most. The time of the checksum alone
(CRC-64/NVME of the same memory) is measured in the same run. A line names the clients that are left
out because they are not installed: `pip install s3torchconnector[dcp] obstore`.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]

from s3_clients import CLIENTS  # noqa: E402

CHECKSUM = "CRC-64/NVME alone"
BUCKET = "bench"
Sample = tuple[float, float]  # CPU-seconds and seconds per GiB


# -- one client, in a process of its own ---------------------------------------------------------


def serve_client(name: str, endpoint: str, path: str, size: int, pipe: Connection) -> None:
    """Carry out the pipe's commands ("put", key) and ("get", key), and answer with the cost."""
    source, target = mapped(path + ".source", size), mapped(path + ".target", size)
    try:
        if name == CHECKSUM:
            act = checksums(source)
        else:
            client = CLIENTS[name](endpoint, BUCKET)

            def act(verb: str, key: str) -> None:
                if verb == "put":
                    client.put(key, source)
                else:
                    client.get(key, target)

        pipe.send("ready")
    except ImportError as error:
        pipe.send(f"is not installed: {error}")
        return
    while order := pipe.recv():
        verb, key = order
        try:
            before, began = cpu(), time.perf_counter()
            act(verb, key)
            seconds = time.perf_counter() - began
            pipe.send(((cpu() - before) * (1 << 30) / size, seconds * (1 << 30) / size))
        except Exception as error:
            pipe.send(f"failed to {verb}: {type(error).__name__} {error}")


def checksums(source: memoryview) -> Any:
    from smckpt.checkpoint.records.crc import BLOCK, crc64

    def act(verb: str, key: str) -> None:
        for at in range(0, len(source), BLOCK):
            crc64(source[at : at + BLOCK])

    return act


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def mapped(path: str, size: int) -> memoryview:
    with open(path, "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), size))
    np.frombuffer(memory, np.uint8)[::4096].sum()  # fault in each page before anything is timed
    return memory


class Worker:
    """The parent's view of a client's process."""

    def __init__(self, name: str, endpoint: str, path: str, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        arguments = (name, endpoint, path, size, theirs)
        self.process = context.Process(target=serve_client, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.samples: dict[str, list[Sample]] = {"put": [], "get": []}
        try:
            self.trouble = self.pipe.recv()
        except EOFError:
            self.trouble = "ended while it started"
        self.alive = self.trouble == "ready"

    def turn(self, verb: str, key: str, count: bool) -> None:
        if not self.alive:
            return
        self.pipe.send((verb, key))
        try:
            answer = self.pipe.recv() if self.pipe.poll(300) else f"hung in {verb}"
        except EOFError:
            answer = f"ended in {verb}"
        if isinstance(answer, str):
            self.alive, self.trouble = False, answer
        elif count:
            self.samples[verb].append(answer)

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


# -- servers -------------------------------------------------------------------------------------


@contextlib.contextmanager
def sink(certificate: str | None) -> Iterator[str]:
    command = [sys.executable, str(HERE / "s3_sink.py"), *filter(None, [certificate])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        yield process.stdout.readline().decode().strip()
        process.stdin.close()


@contextlib.contextmanager
def real(certificate: str | None) -> Iterator[str]:
    import loopback_s3

    with loopback_s3.serve(BUCKET, certificate=certificate) as server:
        os.environ.update(server.environment)
        yield server.endpoint


@contextlib.contextmanager
def certificate(authority: str) -> Iterator[str]:
    """A file with a key and a certificate for the loopback. The authority that signed it is written
    to the file `authority`, which the clients then trust."""
    import trustme

    made = trustme.CA()
    made.cert_pem.write_to_path(authority)
    os.environ["AWS_CA_BUNDLE"] = authority
    with made.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.tempfile() as pem:
        yield pem


# -- the run -------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, endpoint: str) -> list[Worker]:
    size = args.mib << 20
    names = [
        n for n in (*CLIENTS, CHECKSUM) if not args.only or n in (*args.only, "smckpt", CHECKSUM)
    ]
    with tempfile.TemporaryDirectory(dir=args.memory) as folder:
        path = f"{folder}/memory"
        for end in (".source", ".target"):
            with open(path + end, "wb") as file:
                for _ in range(args.mib):
                    file.write(os.urandom(1 << 20) if end == ".source" else bytes(1 << 20))
        workers = [Worker(name, endpoint, path, size) for name in names]
        try:
            for turn in range(args.repeats + 1):  # the first turn is a warm-up and does not count
                for worker in workers:
                    key = f"{names.index(worker.name)}-{turn}"
                    worker.turn("put", key, turn > 0)
                    # raw sockets put parts, and get the object that the first client put
                    there = f"zeros-{size}" if args.server == "sink" else f"0-{turn}"
                    worker.turn("get", there, turn > 0)
        finally:
            for worker in workers:
                worker.end()
    return workers


def report(workers: list[Worker], server: str) -> None:
    for worker in workers:
        if not worker.alive:
            print(f"left out: {worker.name} {worker.trouble}")
    what = {"sink": "sink: drops bodies, serves zeros", "real": "real server: seaweedfs"}[server]
    index, unit = (0, "CPU-s/GiB") if server == "sink" else (1, "s/GiB")
    table = Table(title=f"{what}; {unit}, median (least–most); × smckpt")
    for column in ("client", "PUT", "×", "GET", "×"):
        table.add_column(column, justify="left" if column == "client" else "right")
    ours = workers[0]
    for worker in workers:
        cells = [worker.name]
        for verb in ("put", "get"):
            values = [sample[index] for sample in worker.samples[verb]]
            if not worker.alive or not values or not ours.alive:
                cells += ["-", "-"]
                continue
            base = statistics.median(sample[index] for sample in ours.samples[verb])
            middle = statistics.median(values)
            cells += [f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})", f"{middle / base:.1f}"]
        table.add_row(*cells)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--server", choices=("sink", "real"), default="sink")
    add("--mib", type=int, default=1024, help="size of the object (default 1024)")
    add("--repeats", type=int, default=5, help="turns that count (default 5)")
    add("--only", nargs="+", choices=tuple(CLIENTS), help="these clients beside smckpt")
    add("--plain", action="store_true", help="plain HTTP")
    add("--authority", help="directory for the authority's certificate (default: /tmp)")
    add("--memory", default="/dev/shm", help="directory for shared memory (default /dev/shm)")
    args = parser.parse_args()
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "k")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "s")
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    with contextlib.ExitStack() as servers:
        pem = None
        if not args.plain:
            folder = servers.enter_context(tempfile.TemporaryDirectory())
            pem = servers.enter_context(certificate(args.authority or f"{folder}/authority.pem"))
        endpoint = servers.enter_context({"sink": sink, "real": real}[args.server](pem))
        workers = measure(args, endpoint)
    report(workers, args.server)


if __name__ == "__main__":
    main()
