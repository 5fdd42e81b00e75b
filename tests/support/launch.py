"""Run a function on several real processes that meet over loopback, by gloo or another backend.

The processes are forked from a server that has imported torch and smckpt, once for a whole run of
the tests: importing them takes seconds of processor time, and there are hundreds of ranks to start.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.limits import seconds

__all__ = ["free_port", "run_ranks", "server"]

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = [
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
# only without a device: it looks for devices, and a process that did may not fork
PRELOADED_ON_CPU = [
    "torch._dynamo",  # every optimizer imports it
    "pytest",  # most modules of tests do
    "boto3",  # each save to S3 does
    # not smckpt.engine.api: its runtime remembers the process that imported it, and when it began
    "smckpt.engine.saving.save",
    "smckpt.engine.load",
    "smckpt.full.context",
    "smckpt.state_dict",
]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    killed: tuple[int, ...] = (),
    backend: str = "gloo",
) -> list[Any]:
    """What `function(*args)` gives on each of `world_size` ranks; None for those of `killed`,
    which have to end by SIGKILL.

    `function` stands at the top of its module. A rank that raises, dies or outlasts `timeout`
    seconds fails the test with its traceback and output; only our own children are killed.
    """
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        job = pickle.dumps((function.__module__, function.__qualname__, args, backend))
        children = []
        for rank in range(world_size):
            mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            child = context.Process(target=_main, args=(job, folder, rank, mine))
            child.start()
            children.append(child)
        _wait(children, timeout)
        return [
            _result(Path(folder), rank, child, rank in killed)
            for rank, child in enumerate(children)
        ]


def server() -> Any:
    """The context of multiprocessing whose processes are forked with torch imported."""
    context = multiprocessing.get_context("forkserver")
    more = [] if torch.cuda.is_available() else PRELOADED_ON_CPU
    context.set_forkserver_preload(PRELOADED + more)
    return context


def _wait(children: list[Any], timeout: float) -> None:
    deadline = time.monotonic() + seconds(timeout)
    for child in children:
        child.join(max(deadline - time.monotonic(), 0.1))
    for child in children:
        if child.is_alive():
            child.kill()
            child.join()


def _result(folder: Path, rank: int, child: Any, killed: bool) -> Any:
    answer = folder / f"{rank}.out"
    log = "".join(
        f"\n--- output of {path.stem} ---\n{path.read_text(errors='replace')[-4000:]}"
        for path in sorted(folder.glob("*.log"))
    )
    if killed and child.exitcode == -signal.SIGKILL and not answer.exists():
        return None
    if killed or not answer.exists():
        raise AssertionError(f"rank {rank} gave no result (exit status {child.exitcode}){log}")
    ok, value = pickle.loads(answer.read_bytes())
    if not ok:
        raise AssertionError(f"rank {rank} raised:\n{value}{log}")
    if child.exitcode:
        raise AssertionError(f"rank {rank} ended with exit status {child.exitcode}{log}")
    return value


def free_port() -> int:
    """A port below those that Linux gives to whoever asks for any: another process would have
    taken one of these between now and the job that listens there.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def _main(job: bytes, folder: str, rank: int, environment: dict[str, str]) -> None:
    import importlib

    os.environ.clear()
    os.environ.update(environment)
    with Path(folder, f"{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))

    import numpy
    import torch.distributed as dist

    numpy.random.seed()  # else each rank has the server's generator; that of `random` is new
    torch.set_num_threads(1)
    module, name, args, backend = pickle.loads(job)
    dist.init_process_group(backend)
    try:
        outcome = (True, getattr(importlib.import_module(module), name)(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    Path(folder, f"{rank}.out").write_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    if not outcome[0]:
        os._exit(1)
    # A child of multiprocessing leaves without the exit handlers, which are under test here.
    atexit._run_exitfuncs()
