"""Run a function on several real processes that meet over gloo and loopback."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["run_ranks"]

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """What `function(*args)` gives on each of `world_size` ranks.

    `function` stands at the top of its module. A rank that raises, dies or outlasts `timeout`
    seconds fails the test with its traceback and output; only our own children are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        children = []
        for rank in range(world_size):
            job = Path(folder, f"{rank}.job")
            job.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            with Path(folder, f"{rank}.log").open("wb") as log:
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.support.launch", str(job)],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                    )
                )
        _wait(children, timeout)
        return [_result(Path(folder), rank, child) for rank, child in enumerate(children)]


def _wait(children: list[subprocess.Popen[bytes]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for child in children:
        try:
            child.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            break
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()


def _result(folder: Path, rank: int, child: subprocess.Popen[bytes]) -> Any:
    answer = folder / f"{rank}.job.out"
    log = "".join(
        f"\n--- output of {path.stem} ---\n{path.read_text(errors='replace')[-4000:]}"
        for path in sorted(folder.glob("*.log"))
    )
    if not answer.exists():
        raise AssertionError(f"rank {rank} gave no result (exit status {child.returncode}){log}")
    ok, value = pickle.loads(answer.read_bytes())
    if not ok:
        raise AssertionError(f"rank {rank} raised:\n{value}{log}")
    if child.returncode:
        raise AssertionError(f"rank {rank} ended with exit status {child.returncode}{log}")
    return value


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _main(job: str) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, name, args = pickle.loads(Path(job).read_bytes())
    dist.init_process_group("gloo")
    try:
        outcome = (True, getattr(importlib.import_module(module), name)(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    Path(job + ".out").write_bytes(pickle.dumps(outcome))
    if not outcome[0]:
        os._exit(1)


if __name__ == "__main__":
    _main(sys.argv[1])
