"""A save under torchrun whose coordinator, with its worker, is killed between parts and manifest.

The worker of rank 0 counts its calls that open or change files, from the first lease or manifest in
the directory of a step on, and kills itself and its rank before one of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.limits import seconds
from tests.support.main_job import environment

__all__ = ["die", "load"]

# What the worker of that rank runs first: it starts without a site, so no hook of Python's does.
HOOK = """
import os, signal
left, armed = [int(os.environ["KILL_MOMENT"])], []

def wrapped(call):
    def counted(*arguments, **named):
        path = os.fspath(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else ""
        beside = named.get("dir_fd", named.get("src_dir_fd"))
        if beside is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{beside}"), path)
        ours = os.path.basename(path).startswith((".epoch-", ".manifest-", ".record-"))
        if ours and os.environ["KILL_IN"] in path:
            armed.append(True)
        if armed:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)
    return counted

for name in ("open", "write", "fsync", "link", "rename", "unlink"):
    setattr(os, name, wrapped(getattr(os, name)))
"""

PROGRAM = """
import hashlib, json, os, sys, torch, torch.distributed as dist, smckpt
from datetime import timedelta
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from smckpt import LOCAL, sm_state_dict_type

mode, out, groups = sys.argv[1:]
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
if "KILL_HOOK" in os.environ and rank == 0:
    from smckpt.engine.background import worker_client
    worker_client._PROGRAM = os.environ["KILL_HOOK"] + worker_client._PROGRAM
torch.manual_seed(1 if mode == "die" else 2)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def train():
    batch = torch.randn(8, 64)
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def state():
    with sm_state_dict_type(model, LOCAL):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(), "step": step}

def digests(of):
    def leaf(value):
        value = value.to_local() if hasattr(value, "to_local") else value
        return hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy()).hexdigest() \\
            if isinstance(value, torch.Tensor) and value.numel() and value.dim() else repr(value)
    def walk(value, way):
        items = value.items() if isinstance(value, dict) else \\
            enumerate(value) if isinstance(value, (list, tuple)) else None
        if items is None:
            yield way, leaf(value)
        else:
            for key, item in items:
                yield from walk(item, f"{way}.{key}")
    return dict(walk(of, ""))

group = smckpt.replication_group(model) if groups == "groups" else None
how = {"process_group": group.process_group} if group else {}
place = lambda: group.directory(f"{out}/{step}") if group else f"{out}/{step}"
step = 0
if mode == "die":
    for step in (1, 2):
        train()
        now = state()
        with open(f"{out}-{step}-{rank}.json", "w") as file:
            json.dump(digests(now), file)
        smckpt.save(now, checkpoint_id=place(), options=smckpt.SaveOptions(timeout=30.0), **how)
else:
    train()
    step = int(mode)
    now = smckpt.load(state(), checkpoint_id=place(), **how)
    with open(f"{out}-{step}-{rank}.json") as file:
        saved = json.load(file)
    live = digests(now)
    print("told " + json.dumps({"rank": rank, "names": len(saved), "other": sorted(
        name for name in {*saved, *live} if saved.get(name) != live.get(name))}), flush=True)
dist.destroy_process_group()
"""


def die(folder: Path, groups: bool, moment: int) -> bool:
    """Save steps 1 and 2; the coordinator of rank 0 is killed before its `moment`-th call of the
    commit of step 2. Whether it was."""
    done = _run(folder, "die", groups, moment)
    assert "Error" not in done.stdout + done.stderr or done.returncode, done.stderr[-3000:]
    return done.returncode != 0


def load(folder: Path, groups: bool, step: int) -> list[dict[str, Any]]:
    """Load a step into another model; for each rank the names that differ from what was saved."""
    done = _run(folder, str(step), groups, None)
    assert done.returncode == 0, done.stdout + done.stderr
    # two ranks may write one line
    return [json.loads(said) for said in re.findall(r"told (\{[^{}]*\})", done.stdout)]


def _run(
    folder: Path, mode: str, groups: bool, moment: int | None
) -> subprocess.CompletedProcess[str]:
    hook = folder / "hook.py"
    hook.write_text(HOOK)
    (folder / "program.py").write_text(PROGRAM)
    env = {**environment(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if moment is not None:
        env |= {
            "KILL_HOOK": f"exec(open({str(hook)!r}).read()); ",
            "KILL_MOMENT": str(moment),
            "KILL_IN": f"{folder}/run/2",
        }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [mode, str(folder / "run"), "groups" if groups else "one"]
    command = [sys.executable, *torchrun, str(folder / "program.py"), *arguments]
    return warm.run(command, env=env, timeout=seconds(120))
