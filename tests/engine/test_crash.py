"""Killed at a random moment: a reader finds one whole step, and all groups the same one."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import smckpt
from tests.support import warm
from tests.support.launch import ROOT, free_port, run_ranks
from tests.support.limits import seconds

SIZE = 300_000
SAVER = """
import sys, torch, torch.distributed as dist, smckpt
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
for step in range(1, 1000):
    a, b = (torch.full((n,), float(step)) for n in (SIZE, 7))
    state = {"a": a, "b": b, "step": step}
    try:
        smckpt.save(
            state,
            checkpoint_id=f"{sys.argv[1]}/group{rank}",
            process_group=groups[rank],
            options=smckpt.SaveOptions(
                timeout=float(sys.argv[2]), groups=[[r] for r in range(dist.get_world_size())]
            ),
        )
    except smckpt.SaveFailedError:
        sys.exit(3)  # the peer was killed
    print(step, flush=True)
""".replace("SIZE", str(SIZE))


def loaded(folder: str) -> tuple[set[float], int]:
    rank = dist.get_rank()
    groups = [dist.new_group([r]) for r in range(2)]
    target = {"a": torch.zeros(SIZE), "b": torch.zeros(7), "step": 0}
    smckpt.load(
        target,
        checkpoint_id=f"{folder}/group{rank}",
        process_group=groups[rank],
        options=smckpt.LoadOptions(groups=[[0], [1]]),
    )
    return {*target["a"].unique().tolist(), *target["b"].unique().tolist()}, target["step"]


def run_and_kill(folder: Path, chance: random.Random) -> int:
    """Two ranks, each a group of its own, save again and again under one id; kill one at a random
    moment, then the other. The last step that both reported."""
    port = str(free_port())
    children = [
        warm.Piped(
            [sys.executable, "-c", SAVER, str(folder), str(seconds(30))],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            },
        )
        for rank in range(2)
    ]
    steps = [0, 0]
    try:
        for index, child in enumerate(children):
            steps[index] = int(child.stdout.readline())  # the first commit
        moment = threading.Event()
        order = chance.sample(children, 2)
        for child in order:
            moment.wait(chance.uniform(0, 0.4))
            child.kill()
        for index, child in enumerate(children):
            rest, _ = child.communicate(timeout=seconds(90))
            steps[index] = int((rest.split() or [steps[index]])[-1])
    finally:
        for child in children:
            child.kill()
            child.wait()
    return min(steps)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(s, marks=pytest.mark.long) for s in range(2, 30))]
)
def test_a_kill_at_a_random_moment_leaves_one_whole_step_the_same_for_all_groups(
    tmp_path: Path, seed: int
) -> None:
    reported = run_and_kill(tmp_path, random.Random(seed))
    zero, one = run_ranks(loaded, 2, str(tmp_path))
    for values, step in (zero, one):
        assert values == {float(step)}
    assert zero[1] == one[1] >= reported
