"""Steps in the memory of hosts whose links are slow, or cut in the middle of a save."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.manager.test_memory import start
from tests.support.faults.hosts import Host, hosts
from tests.support.limits import seconds

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from smckpt import CheckpointManager, Memory

root, (timeout, nbytes, until, replicas) = sys.argv[1], map(int, sys.argv[2:])
dist.init_process_group("gloo")
state = {"w": torch.zeros(nbytes // 4)}
with CheckpointManager(root, interval=2, memory=Memory(1, replicas=replicas), signals=(),
                       random=False, timeout=timeout) as manager:
    step = manager.restore(into=state)
    assert state["w"].eq(step).all()
    print(step, flush=True)
    while step < until:
        step += 1
        state["w"].fill_(step)
        assert manager.should_save(step)
        manager.save(step, state).wait()
dist.barrier()
os._exit(0)
"""


@dataclass
class Job:
    """Two hosts with a rank each, which save so many MiB: on disk each second step."""

    both: list[Host]
    at: Path
    mib: int
    timeout: int
    port: int = 29640

    def begin(self, until: int, replicas: int = 1) -> None:
        self.port += 1
        words = self.timeout, self.mib << 20, until, replicas
        start(self.both, self.at, self.port, SCRIPT, *map(str, words))

    def ended(self) -> list[tuple[int, int]]:
        return [ended(host) for host in self.both]


def ended(host: Host) -> tuple[int, int]:
    """The exit status of the rank there, and the step that it restored; -1: none."""
    code, out, _ = host.ended()
    return code, int(out or -1)


@pytest.mark.parametrize(
    ("rate", "mib"), [("64mbit", 8), pytest.param("8mbit", 48, marks=pytest.mark.long)]
)
def test_over_a_slow_link_steps_are_saved_and_restored(tmp_path: Path, rate: str, mib: int) -> None:
    with hosts(2) as both:
        job = Job(both, tmp_path, mib, timeout=120)
        both[1].slow(rate)
        job.begin(until=1)
        assert job.ended() == [(0, 0), (0, 0)]
        job.begin(until=1)
        assert job.ended() == [(0, 1), (0, 1)]


@pytest.mark.long
def test_a_link_that_is_cut_in_the_middle_of_a_save_costs_no_committed_step(
    tmp_path: Path,
) -> None:
    """Rank 0, whose host has the job's store, ends after `timeout`; rank 1, which does not reach
    it, after a time of its own."""
    with hosts(2) as both:
        job = Job(both, tmp_path, 24, timeout=10)
        job.begin(until=2)
        assert job.ended() == [(0, 0), (0, 0)]
        both[1].slow("8mbit")
        before = both[1].carried()
        job.begin(until=3)
        until = time.monotonic() + seconds(120)
        while both[1].carried() < before + (2 << 20):
            assert time.monotonic() < until, "nothing goes over the link"
            time.sleep(0.02)
        both[1].link("down")
        cut = time.monotonic()
        assert ended(both[0])[0] != 0
        assert time.monotonic() - cut < seconds(60)  # 10 s, 20 s of the keepers, and the exit
        assert ended(both[1])[0] != 0
        assert time.monotonic() - cut < seconds(2 * 60 + 60)
        both[1].link("up")
        job.begin(until=2)
        assert job.ended() == [(0, 2), (0, 2)]  # from disk
