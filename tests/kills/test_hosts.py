"""A host of four is killed at random moments, again and again, with steps in memory alone.

`SMCKPT_KILLS` says how often (100). What is looked for: the run resumes at most one interval and
one save under way behind what it had reached, with equal bits; nothing hangs; no process is left.
"""

from __future__ import annotations

import json
import os
import random
import select
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.faults.hosts import Host, hosts
from tests.support.limits import seconds

SCRIPT = """
import datetime, faulthandler, hashlib, json, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from smckpt import CheckpointManager, Memory

root, reached, until, disk = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
world, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = {"model": model, "optimizer": optimizer}

def digest():
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(value.full_tensor().detach().numpy().tobytes())
    return found.hexdigest()

def say(line):
    if rank == 0:
        with open(reached, "a") as file:
            file.write(json.dumps(line) + "\\n")

faulthandler.dump_traceback_later(100, file=open(f"{reached}.stack{rank}", "w"))
say(["met"])
with CheckpointManager(root, interval=disk, memory=Memory(interval=5), timeout=60) as manager:
    step = manager.restore(into=state)
    say(["began", step, world, digest()])
    while step < until:
        for number, one in enumerate(model.parameters()):
            # of the step alone, and of each element by itself: equal bits on any number of ranks
            one.grad = one.detach() * 0.01 + (step % 7) * 0.001 + number * 0.1
        optimizer.step()
        step += 1
        if manager.should_save(step):
            manager.save(step, state)
        together = torch.ones(1)
        dist.all_reduce(together)
        say(["step", step])
        time.sleep(0.01)
say(["ended", step, world, digest()])
dist.barrier()
dist.destroy_process_group()
"""
KILLS = int(os.environ.get("SMCKPT_KILLS", "100"))


def start(job: Sequence[Host], at: Path, port: int, until: int, disk: int) -> None:
    for rank, host in enumerate(job):
        env = {
            "RANK": str(rank), "WORLD_SIZE": str(len(job)), "LOCAL_RANK": "0",
            "MASTER_ADDR": job[0].address, "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "kills", "GLOO_SOCKET_IFNAME": "e0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = [str(at / "root"), str(at / "reached"), str(until), str(disk)]
        host.begin(at / "train.py", words, env)


def lines(at: Path) -> list[list]:
    found = at / "reached"
    return [json.loads(each) for each in found.read_text().splitlines()] if found.exists() else []


def has_ended(job: Sequence[Host]) -> bool:
    """Whether a rank of the job has ended: gloo does not always connect on a busy machine."""
    return bool(select.select([host.agent.stdout for host in job], [], [], 0)[0])


@pytest.mark.long
@pytest.mark.timeout(seconds(14400))
def test_a_host_of_four_is_killed_at_random_moments(tmp_path: Path) -> None:
    seed = int(os.environ.get("SMCKPT_SEED", str(random.randrange(1 << 30))))
    print("seed", seed)
    moments = random.Random(seed)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    digests: dict[int, str] = {}
    behind, outcomes = Counter[int](), Counter[str]()
    with hosts(4, "torch.distributed.fsdp") as job:
        done, victim, lost = 0, None, None
        for life in range(KILLS):
            (tmp_path / "reached").write_text("")
            alive = [host for host in job if host.agent.poll() is None]
            start(alive, tmp_path, 20000 + life, 1 << 30, 1 << 20)
            # a host that dies before the others have their copies again is the last one again: two
            # others would hold each other's only copies
            early = len(alive) == 4 and moments.random() < 0.4
            victim = victim if early and victim is not None else moments.choice(alive)
            began = time.monotonic()
            while len(lines(tmp_path)) < (1 if early else 2) and not has_ended(alive):
                assert time.monotonic() - began < seconds(150), "it does not start"
                time.sleep(0.05)
            time.sleep(moments.uniform(0, 3))
            victim.die()
            killed = time.monotonic()
            for host in alive:
                if host is not victim:
                    assert select.select([host.agent.stdout], [], [], seconds(120))[0], (
                        f"life {life}: {host.name} hangs"
                    )
                    code, _, error = host.ended()
                    outcomes["orderly" if code == 0 else "with an error"] += 1
                    if code < 0 or "please report it" in error:
                        outcomes[f"{code}: {error.splitlines()[-1:]}"] += 1
            outcomes["slowest end"] = max(outcomes["slowest end"], round(time.monotonic() - killed))
            found = lines(tmp_path)[1:]
            if found:
                _, step, world, digest = found[0]
                assert step >= done // 5 * 5 - 5, f"life {life}: from {step}, had reached {done}"
                behind[done - step] += 1
                print(f"life {life}: {world} ranks, from {step} of {done}, to {found[-1][1]}")
                assert digests.setdefault(step, digest) == digest, f"life {life}: other bits"
                done = found[-1][1]
            else:
                outcomes["killed before it resumed"] += 1
            if len(alive) == 3:  # both are back, with empty memory
                lost.revive()
                victim.revive()
            elif moments.random() < 0.7:
                victim.revive()
            lost = victim
        # the run without a kill
        (tmp_path / "reached").write_text("")
        start(job, tmp_path, 19999, done + 5, 1 << 20)
        for host in job:
            code, _, error = host.ended()
            assert code == 0, error
        ended = lines(tmp_path)[-1]
        (tmp_path / "straight").mkdir()
        (tmp_path / "straight" / "train.py").write_text(textwrap.dedent(SCRIPT))
        start(job, tmp_path / "straight", 19998, ended[1], 1 << 20)
        for host in job:
            assert host.ended()[0] == 0
        assert lines(tmp_path / "straight")[-1] == ended
        left = [host.processes() for host in job]
    print("behind:", sorted(behind.items()), dict(outcomes), "left:", left)
