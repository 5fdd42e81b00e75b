"""Steps in the memory of hosts: a host dies with its ranks and its keeper, and no step is lost."""

from __future__ import annotations

import datetime
import json
import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt import CheckpointManager, Memory, UsageError
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.manager import schedule
from smckpt.manager.memory import SERVICE
from smckpt.storage import open_storage
from tests.support import warm
from tests.support.faults.hosts import Host, hosts, keeper_service
from tests.support.limits import seconds

FSDP = "torch.distributed.fsdp", "torch._dynamo"
SCRIPT = """
import json, logging, os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import smckpt
from smckpt import CheckpointManager, Memory

root, until, last, replicas = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
copies = int(sys.argv[5])  # HSDP with as many replicas; 1: FSDP
disk = int(sys.argv[6])
logging.basicConfig(level=logging.INFO)
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Linear(24, 6))
mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("copies", "shards"))
fully_shard(model, mesh=mesh if copies > 1 else mesh["shards"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
with CheckpointManager(root, interval=disk, memory=Memory(interval=5, replicas=replicas),
                       timeout=120) as manager:
    step = began = manager.restore(into=state)
    while step < until:
        optimizer.zero_grad()
        model(torch.full((2, 12), float(step))).sum().backward()
        optimizer.step()
        step += 1
        if manager.should_save(step):
            manager.save(step, state).wait()
        if step == last:
            dist.barrier()
            os._exit(9)  # the job dies
full = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
print(json.dumps([began, full]), flush=True)
dist.barrier()  # gloo aborts a process whose peers have gone
dist.destroy_process_group()
"""


def start(
    job: Sequence[Host], tmp_path: Path, port: int, script: str, *words: str, ranks: int = 1
) -> None:
    """Args:
    ranks: of each host.
    """
    tmp_path.mkdir(exist_ok=True)
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(script))
    of_all = {
        "WORLD_SIZE": str(len(job) * ranks), "MASTER_ADDR": job[0].address,
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"job{tmp_path.name}",
        "GLOO_SOCKET_IFNAME": "e0",
    }  # fmt: skip
    for number, host in enumerate(job):
        envs = [
            {**of_all, "RANK": str(number * ranks + local), "LOCAL_RANK": str(local)}
            for local in range(ranks)
        ]
        host.begin(program, [str(tmp_path / "root"), *words], *envs)


def run(
    job: Sequence[Host],
    tmp_path: Path,
    port: int,
    until: int,
    last: int = -1,
    replicas: int = 1,
    ranks: int = 1,
    copies: int = 1,
    disk: int = 100,
    says: str = "",
) -> list[Any]:
    words = [str(each) for each in (until, last, replicas, copies, disk)]
    start(job, tmp_path, port, SCRIPT, *words, ranks=ranks)
    ended = [host.ended() for host in job]
    wanted = 9 if last >= 0 else 0
    assert [code for code, *_ in ended] == [wanted] * len(job), ended
    assert says in ended[0][2]
    return [json.loads(line) for _, out, _ in ended for line in out.splitlines()]


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.allclose(torch.tensor(one[name]), torch.tensor(other[name]), atol=1e-5)
        for name in one
    )


@pytest.mark.parametrize("dead", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_host_dies_and_the_others_go_on_from_memory(tmp_path: Path, dead: int) -> None:
    with hosts(3, *FSDP) as job:
        run(job, tmp_path, 29611, until=20, last=12)
        job[dead].die()
        left = [host for number, host in enumerate(job) if number != dead]
        resumed = run(left, tmp_path, 29612, until=14)
        straight = run(left, tmp_path / "straight", 29613, until=14)
    assert [began for began, _ in resumed] == [10, 10]
    assert [began for began, _ in straight] == [0, 0]
    assert close(resumed[0][1], straight[0][1])
    assert smckpt.find_checkpoints(tmp_path / "root") == []  # nothing was on disk


@pytest.mark.parametrize(
    ("count", "ranks", "copies"),
    [
        (2, 2, 2),
        pytest.param(4, 1, 2, marks=pytest.mark.long),
        pytest.param(4, 2, 1, marks=pytest.mark.long),
    ],
)
def test_a_job_shrinks_by_a_host_and_grows_again_from_memory(
    tmp_path: Path, count: int, ranks: int, copies: int
) -> None:
    """HSDP with 2 copies and FSDP2. A host that dies leaves HSDP with one copy."""
    with hosts(count, *FSDP) as job:
        run(job, tmp_path, 29621, until=20, last=12, ranks=ranks, copies=copies)
        job[-1].die()
        run(job[:-1], tmp_path, 29622, until=20, last=17, ranks=ranks)
        job[-1].revive()  # with nothing in its memory
        grown = run(job, tmp_path, 29623, until=18, ranks=ranks, copies=copies)
        straight = run(job, tmp_path / "straight", 29624, until=18, ranks=ranks, copies=copies)
    assert [began for began, _ in grown] == [15] * count * ranks
    assert [began for began, _ in straight] == [0] * count * ranks
    assert close(grown[0][1], straight[0][1])
    assert smckpt.find_checkpoints(tmp_path / "root") == []  # nothing was on disk


def test_hosts_with_each_others_only_copies_die_and_the_job_begins_from_disk(
    tmp_path: Path,
) -> None:
    with hosts(4, *FSDP) as job:
        run(job, tmp_path, 29614, until=20, last=16, disk=10)
        job[1].die()
        job[2].die()  # the copies of host 1 are there
        left = [job[0], job[3]]
        resumed = run(left, tmp_path, 29615, until=12, disk=10, says="step 15 in memory is lost: ")
    assert [began for began, _ in resumed] == [10, 10]


def test_no_process_is_left_after_the_job(tmp_path: Path) -> None:
    with hosts(1, *FSDP) as job:
        run(job, tmp_path, 29616, until=6)
        assert len(job[0].processes()) == 2  # the agent and the keeper
        (keeper,) = {*job[0].processes()} - {str(job[0].agent.pid)}
        ends = os.pidfd_open(int(keeper))
        job[0].agent.stdin.close()
        job[0].agent.wait(seconds(20))
        assert select.select([ends], [], [], seconds(20))[0]
        os.close(ends)
        assert job[0].processes() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0},
        {"keep": 0},
        {"replicas": -1},
        {"budget": 0},
        {"interval": "often"},
        {"domain": ""},
    ],
)
def test_what_memory_cannot_do_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Memory(**{"interval": 5, **wrong})


@pytest.mark.parametrize("interval", [datetime.timedelta(milliseconds=1), "auto"])
def test_a_time_and_auto_decide_for_memory_as_for_the_root(
    tmp_path: Path, interval: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "FIRST_SECONDS", 0.001)
    caplog.set_level("INFO")
    state = {"w": torch.ones(4)}
    with CheckpointManager(
        str(tmp_path), memory=Memory(interval, replicas=0), interval=1000, signals=(), random=False
    ) as manager:
        manager.restore(into=state)
        saved = []
        for step in range(1, 200):
            if manager.should_save(step):
                manager.save(step, state).wait()
                saved.append(step)
                state["w"] += 1
            time.sleep(0.001)
        assert saved
        newest = float(state["w"][0]) - 1
        assert manager.restore(into=state) == saved[-1]
        assert float(state["w"][0]) == newest
    assert smckpt.find_checkpoints(tmp_path) == []
    assert (interval == "auto") == ("memory: interval=" in caplog.text)


SERVED = """
import sys, torch
from smckpt import CheckpointManager, Memory
state = {"w": torch.zeros(4)}
with CheckpointManager(sys.argv[1], memory=Memory(5), signals=(), random=False) as manager:
    step = manager.restore(into=state)
    print("from", step, state["w"].tolist())
    state["w"] += 1
    if manager.should_save(step + 5):
        manager.save(step + 5, state).wait()
"""


@pytest.fixture
def service() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with keeper_service() as started:
        yield started


def test_a_keeper_that_is_a_service_outlives_the_job(
    tmp_path: Path, service: tuple[str, subprocess.Popen[str]]
) -> None:
    name, process = service

    def job() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", SERVED, str(tmp_path)]
        return warm.run(command, env={**os.environ, SERVICE: name}, timeout=seconds(60))

    assert [job().stdout for _ in range(2)] == [
        "from 0 [0.0, 0.0, 0.0, 0.0]\n", "from 5 [1.0, 1.0, 1.0, 1.0]\n"
    ]  # fmt: skip
    process.terminate()
    assert process.wait(seconds(20)) == 0
    after = job()
    assert after.stdout == "from 0 [0.0, 0.0, 0.0, 0.0]\n"
    assert "no step is kept in memory: " in after.stderr
    assert f"the keeper of job {name} on " in after.stderr


HARMED = """
import contextlib, json, os, signal, sys
import torch, torch.distributed as dist
from smckpt import CheckpointManager, Memory

dist.init_process_group("gloo")
rank, number = dist.get_rank(), getattr(signal, sys.argv[2])
state = {"w": torch.zeros(1000)}
saved = []
with CheckpointManager(sys.argv[1], interval=1000, memory=Memory(1), random=False) as manager:
    manager.restore(into=state)
    for step in range(1, 40):
        if step == 4 and rank == 1:  # its host's keeper
            keepers = []
            for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
                with contextlib.suppress(OSError):  # a process that has ended meanwhile
                    if (b"memory.keeper" in open(f"/proc/{pid}/cmdline", "rb").read()
                            and os.stat(f"/proc/{pid}/ns/net") == os.stat("/proc/self/ns/net")):
                        keepers.append(pid)
            os.kill(keepers[0], number)
        dist.barrier()
        if manager.should_save(step):
            failed = manager.save(step, state).exception()
            saved.append(step if failed is None else -step)
print(json.dumps(saved), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_keeper_that_was_killed_is_started_again(tmp_path: Path) -> None:
    with hosts(2) as job:
        start(job, tmp_path, 29619, HARMED, "SIGKILL")
        ended = [host.ended() for host in job]
    assert [code for code, *_ in ended] == [0, 0], ended
    # the save of step 4 fails, that of 5 starts the keeper, and 6 is left out
    saved = [1, 2, 3, -4, 5, *range(7, 40)]
    assert [json.loads(out) for _, out, _ in ended] == [saved, saved]
    assert "not saved to memory" not in ended[0][2]
    assert "1 saves to memory have failed in a row: the next 1 are left out" in ended[0][2]


@pytest.mark.long
def test_while_a_keeper_hangs_most_saves_are_left_out(tmp_path: Path) -> None:
    with hosts(2) as job:
        start(job, tmp_path, 29618, HARMED, "SIGSTOP")
        ended = [host.ended() for host in job]
    assert [code for code, *_ in ended] == [0, 0], ended
    one, other = [json.loads(out) for _, out, _ in ended]
    assert one == other
    assert one[:4] == [1, 2, 3, -4]
    assert len(one) < 12  # of 39
    assert "saves to memory have failed in a row" in ended[0][2]


def test_what_a_job_left_in_the_middle_of_a_save_is_deleted(
    tmp_path: Path, service: tuple[str, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = service
    monkeypatch.setenv(SERVICE, name)
    state = {"w": torch.ones(4)}

    def manager() -> CheckpointManager:
        return CheckpointManager(str(tmp_path), memory=Memory(1), signals=(), random=False)

    with manager() as first:
        first.restore(into=state)
        assert first.should_save(5)
        first.save(5, state).wait()
        (run,) = open_storage(f"keeper://{name}").list_dirs()
        root = open_storage(f"keeper://{name}/{run}")
        root.join("6/part").put("data-0773ea0c5872-00000002-r00000-0.safetensors", b"half")
        root.join("50").put("data-0773ea0c5872-00000003-r00000-0.safetensors", b"half")
        for _ in range(2):  # that may be a save of its own, under way
            assert first.restore(into=state) == 5
        assert sorted(root.list_dirs()) == ["5", "50", "6"]
    with manager() as second:
        assert second.restore(into=state) == 5
    assert list(root.list_dirs()) == ["5"]


def test_a_step_that_the_run_has_left_behind_does_not_come_back_with_its_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    service: tuple[str, subprocess.Popen[str]],
) -> None:
    monkeypatch.setenv(SERVICE, service[0])
    state = {"w": torch.zeros(4)}

    def life(*steps: int) -> tuple[int, str]:
        """Where it goes on, and its steps in memory."""
        with CheckpointManager(
            str(tmp_path / "run"), interval=1000, memory=Memory(1), signals=(), random=False
        ) as manager:
            went_on = manager.restore(into=state)
            for step in steps:
                assert manager.should_save(step)
                manager.save(step, state).wait()
            return went_on, manager._memory.root

    _, root = life(40, 60)
    copy_checkpoint(f"{root}/60", tmp_path / "away")
    smckpt.remove(f"{root}/60")  # its host is away
    assert life(45)[0] == 40
    copy_checkpoint(tmp_path / "away", f"{root}/60")
    assert life()[0] == 45
    assert "step 60 in memory is lost: the run went back to an older step" in caplog.text
    smckpt.remove(f"{root}/45")
    smckpt.remove(f"{root}/60")
    smckpt.remove(f"{root}/40")  # nothing is left that tells of the earlier lives
    assert life(42)[0] == 0
    copy_checkpoint(tmp_path / "away", f"{root}/60")
    assert life(43)[0] == 42
    assert sorted(found.step for found in smckpt.find_checkpoints(root)) == [42, 43]


def test_a_budget_for_a_service_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVICE, "nobody")
    with (
        pytest.raises(UsageError, match="budget of Memory has no effect"),
        CheckpointManager(str(tmp_path), memory=Memory(1, budget=1 << 20)) as manager,
    ):
        manager.restore(into={"w": torch.zeros(1)})


def test_with_room_for_two_steps_the_newest_one_stays_and_the_next_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(1 << 18)}  # 1 MiB
    with CheckpointManager(
        str(tmp_path), memory=Memory(interval=1, budget=5 << 19), signals=(), random=False
    ) as manager:
        saved, until = [], time.monotonic() + seconds(20)
        while len(saved) < 6:
            step = len(saved) + 1
            assert time.monotonic() < until
            if manager.should_save(step) and manager.save(step, state).exception() is None:
                saved.append(step)
        assert manager.restore(into=state) == saved[-1]
    assert caplog.text.count("it holds one step from now on") == 1


def test_where_the_next_step_never_fits_beside_the_first_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(1 << 18)}  # 1 MiB
    with CheckpointManager(
        str(tmp_path), memory=Memory(interval=1, budget=3 << 19), signals=(), random=False
    ) as manager:
        outcomes = [
            manager.save(step, state).exception() is None
            for step in range(1, 25)
            if manager.should_save(step)
        ]
        assert outcomes == [True] + [False] * 5
        assert manager.restore(into=state) == 1
    assert caplog.text.count("memory has no room for a second step while the first is there") == 1


def test_without_room_in_memory_the_step_is_saved_on_disk_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(1 << 18)}
    with CheckpointManager(
        str(tmp_path), memory=Memory(interval=1, budget=1 << 10), signals=(), random=False
    ) as manager:
        for step in (1, 2):
            assert manager.should_save(step)
            manager.save(step, state).exception()
        assert manager.restore(into=state) == 0
    assert "more do not fit" in caplog.text
