"""Steps in the memory of hosts whose links are slow, or cut in the middle of a save."""

from __future__ import annotations

import os
import signal
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
    """Hosts with a rank each, which save so many MiB: on disk each second step."""

    hosts: list[Host]
    at: Path
    mib: int
    timeout: int
    port: int = 29640

    def begin(self, until: int, replicas: int = 1) -> None:
        self.port += 1
        words = self.timeout, self.mib << 20, until, replicas
        start(self.hosts, self.at, self.port, SCRIPT, *map(str, words))

    def ended(self) -> list[tuple[int, int]]:
        return [ended(host) for host in self.hosts]


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


def in_the_middle(host: Host, before: int) -> None:
    """Wait until 2 MiB more than `before` went over its link."""
    until = time.monotonic() + seconds(120)
    while host.carried() < before + (2 << 20):
        assert time.monotonic() < until, "nothing goes over the link"
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize(("moment", "step"), [("save", 2), ("restore", 3)])
def test_a_link_that_is_cut_costs_no_committed_step(tmp_path: Path, moment: str, step: int) -> None:
    """In the middle of the save of step 3, and of its restore by a host that came back with
    nothing. Rank 0, whose host has the job's store, ends after `timeout`; rank 1, which does not
    reach it, after a time of its own."""
    with hosts(2) as both:
        job = Job(both, tmp_path, 16, timeout=30)
        job.begin(until=step)
        assert job.ended() == [(0, 0), (0, 0)]
        if moment == "restore":
            both[0].die()
            both[0].revive()
        both[1].slow("8mbit")
        before = both[1].carried()
        job.begin(until=3)
        in_the_middle(both[1], before)
        both[1].link("down")
        cut = time.monotonic()
        assert ended(both[0])[0] != 0
        # 30 s and 20 s of the keepers; the exit does not wait again for the peer that is missing
        assert time.monotonic() - cut < seconds(75)
        assert ended(both[1])[0] != 0
        assert time.monotonic() - cut < seconds(2 * 60 + 60)
        both[1].link("up")
        job.begin(until=step)
        assert job.ended() == [(0, step), (0, step)]  # step 2 from disk


def keeper_of(host: Host) -> int:
    found = [pid for pid in map(int, host.processes())
             if b"memory.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()]  # fmt: skip
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("replicas", "step", "how"),
    [
        (2, 3, signal.SIGKILL),
        (1, 2, signal.SIGKILL),
        pytest.param(2, 3, signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param(1, 2, signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_a_keeper_that_goes_in_the_middle_of_a_restore_costs_its_copy_alone(
    tmp_path: Path, replicas: int, step: int, how: signal.Signals
) -> None:
    """Host 0 comes back with nothing. With one copy of each file, all ranks begin from disk."""
    with hosts(3) as three:
        job = Job(three, tmp_path, 24, timeout=120)
        job.begin(until=3, replicas=replicas)
        assert job.ended() == [(0, 0)] * 3
        three[0].die()
        three[0].revive()
        three[1].slow("8mbit")
        before = three[1].carried()
        job.begin(until=2, replicas=replicas)
        in_the_middle(three[1], before)
        os.kill(keeper_of(three[1]), how)
        went = time.monotonic()
        ends = [host.ended() for host in three]
        assert time.monotonic() - went < seconds(60)
    assert [(code, int(out or -1)) for code, out, _ in ends] == [(0, step)] * 3
    assert ("; lost: step 3 (" in ends[0][2]) == (step == 2)
