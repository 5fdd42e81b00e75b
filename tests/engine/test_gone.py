"""Ranks that leave, or whose process is killed: the others hear so at once, and end by themselves.

The limits are far above what is needed, and the reason is looked for: no test measures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import smckpt
from smckpt.engine import runtime
from smckpt.engine.api import _RUNTIME
from smckpt.meeting.group import Membership
from tests.support import warm
from tests.support.launch import run_ranks
from tests.support.limits import seconds

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist, smckpt
from pathlib import Path
from smckpt.engine import api
from smckpt.engine.saving.commit import Committer
from smckpt.engine.saving.save import Saver
from smckpt.engine.background.worker_client import Worker

moment, ending, victim, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"a": torch.full((1000,), float(rank))}
smckpt.save(state, checkpoint_id=folder, step=1)
dist.barrier()

def die(*_):
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "left":
        raise SystemExit(0)

if rank == victim and moment == "staging":
    stage = Saver.stage
    Saver.stage = lambda *of: die()
if rank == victim and moment == "writing":
    call = Worker.call
    Worker.call = lambda self, command, **more: (
        die() if command.function == "write_part" else call(self, command, **more))
if rank == victim and moment == "before its part":
    write = Saver.write
    def written(*of):
        write(*of)
        die()
    Saver.write = written
if rank == victim and moment == "publishing":
    Committer._publish = lambda *of: die()
if rank == victim and moment == "before the save":
    die()
smckpt.async_save(state, checkpoint_id=folder, step=2)
if ending == "left":
    smckpt.maybe_finalize_async_calls()
if "exception" in sys.argv:
    while True:
        dist.all_reduce(torch.ones(1))
elif "finalize" in sys.argv:
    smckpt.maybe_finalize_async_calls()
print("rank", rank, "reached the end", flush=True)
"""


def ranks(tmp_path: Path, *arguments: str, script: str = SCRIPT, count: int = 2) -> tuple[int, str]:
    """Run ranks without a launcher that would kill them. The exit status of the last of them, and
    all that they wrote."""
    file = tmp_path / "script.py"
    file.write_text(script)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    try:
        for rank in range(count):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, str(file), *arguments]
            children.append(warm.Program(command, tmp_path / f"{rank}.log", env=environment))
        for child in children:
            child.wait(seconds(100))
    finally:
        for child in children:
            child.kill()
            child.wait()
    text = "".join((tmp_path / f"{rank}.log").read_text() for rank in range(count))
    return children[-1].returncode, text


@pytest.mark.parametrize(
    ("moment", "end"),
    [
        ("staging", "exit"),
        ("writing", "finalize"),
        pytest.param("before its part", "exit", marks=pytest.mark.long),
        pytest.param("before the save", "exit", marks=pytest.mark.long),
        ("writing", "exception"),
        ("publishing", "exit"),
        pytest.param("publishing", "exception", marks=pytest.mark.long),
    ],
)
def test_survivors_of_a_kill_end_by_themselves(tmp_path: Path, moment: str, end: str) -> None:
    """In training too, where a collective raises, and in the exit handlers."""
    victim = 0 if moment == "publishing" else 1
    _, text = ranks(tmp_path, moment, "killed", str(victim), str(tmp_path / "c"), end)
    assert f"rank {victim} is gone" in text, text


def test_a_killed_coordinator_is_named(tmp_path: Path) -> None:
    _, text = ranks(tmp_path, "writing", "killed", "0", str(tmp_path / "c"), "exit")
    assert "rank 0 is gone" in text, text


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_end_of_a_rank_is_noticed_before_the_ranks_have_met(
    tmp_path: Path, victim: int, ending: str
) -> None:
    """In the first save of all; the follower's end and the leader's."""
    first = SCRIPT.replace("smckpt.save(state, checkpoint_id=folder, step=1)\n", "").replace(
        "def die(",
        "from smckpt.meeting.group import Membership\n"
        "connect = Membership.connect\n"
        "def connected(self):\n"
        "    connect(self)\n"
        f"    if rank == victim: {ending}\n"
        "Membership.connect = connected\n"
        "def die(",
    )
    _, text = ranks(tmp_path, "", "", str(victim), str(tmp_path / "c"), "finalize", script=first)
    assert f"rank {victim} is gone" in text, text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_has_left_is_named_at_once(tmp_path: Path, victim: int) -> None:
    _, text = ranks(tmp_path, "before the save", "left", str(victim), str(tmp_path / "c"))
    assert f"rank {victim} has left" in text, text


OF_GROUPS = """
import sys, torch, torch.distributed as dist, smckpt
victim, folder, met = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([rank], use_local_synchronization=True)
options = smckpt.SaveOptions(groups=[[0], [1]], timeout=20)
smckpt.save({"a": torch.ones(2)}, checkpoint_id=f"{folder}/own{rank}", process_group=group)
for step in range(met + 1):
    if step == met and rank == victim:
        sys.exit(0)
    where = f"{folder}/{step}/group{rank}"
    state = {"a": torch.full((2,), step)}
    smckpt.save(state, checkpoint_id=where, process_group=group, step=step, options=options)
"""


@pytest.mark.parametrize("met", [0, 2])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_that_has_left_is_named_at_once(tmp_path: Path, victim: int, met: int) -> None:
    """Before its first save with the others, and after two of them."""
    _, text = ranks(tmp_path, str(victim), str(tmp_path / "c"), str(met), script=OF_GROUPS)
    assert f"group [{victim}] has left" in text or f"rank {victim} has left" in text, text


def test_a_stopped_rank_is_not_gone(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        "smckpt.async_save(state, checkpoint_id=folder, step=2)",
        "if rank == 1 and os.fork() == 0:\n"
        "    os.kill(os.getppid(), signal.SIGSTOP)\n"
        "    time.sleep(3)\n"
        "    os.kill(os.getppid(), signal.SIGCONT)\n"
        "    os._exit(0)\n"
        "smckpt.async_save(state, checkpoint_id=folder, step=2)",
    )
    status, text = ranks(tmp_path, "", "", "1", str(tmp_path / "c"), "finalize", script=script)
    assert status == 0 and "gone" not in text, text


IN_CI = {("closed", 1), ("exit", 0), ("restore", 1)}
MANAGER = """
import os, sys, time, torch, torch.distributed as dist, smckpt
how, victim, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
manager = smckpt.CheckpointManager(folder, interval=1, signals=())
if how != "restore":
    manager.restore(into={"model": model})
    manager.save(1, {"model": model}).wait()
if rank == victim:
    if how in ("closed", "all"):
        manager.close()
        dist.distributed_c10d._get_default_store().wait(["heard"])
    elif how == "destroyed":
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        store.wait(["heard"])
    sys.exit(0)
try:
    if how == "restore":
        manager.restore(into={"model": model})
    elif how == "all":
        manager.all()
    else:
        manager.save(2, {"model": model}).wait()
except smckpt.errors.CheckpointError as error:
    print("HEARD", error, flush=True)
dist.distributed_c10d._get_default_store().set("heard", "1")
"""


@pytest.mark.parametrize(
    ("how", "victim"),
    [
        pytest.param(how, victim, marks=() if (how, victim) in IN_CI else pytest.mark.long)
        for how in ("closed", "exit", "destroyed", "all", "restore")
        for victim in (0, 1)
    ],
)
def test_a_manager_hears_of_a_rank_that_has_left(tmp_path: Path, how: str, victim: int) -> None:
    _, text = ranks(tmp_path, how, str(victim), str(tmp_path / "c"), script=MANAGER)
    assert "HEARD" in text and f"rank {victim} " in text, text


NEVER_MET = """
import os, select, sys, torch, torch.distributed as dist, smckpt
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.broadcast_object_list(pids := [os.getpid()], src=0)
if rank == 0:
    smckpt.async_save({"a": torch.ones(3)}, checkpoint_id=sys.argv[1])
else:
    poll = select.poll()
    poll.register(os.pidfd_open(pids[0]), select.POLLIN)
    print("rank 0 has ended" if poll.poll(60_000) else "rank 0 waits", flush=True)
"""


def test_an_exit_ends_in_its_time_although_the_first_save_has_met_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer lives and makes no save. What the exit has to say waits for no meeting."""
    monkeypatch.setenv("SMCKPT_EXIT_TIMEOUT", "1")
    _, text = ranks(tmp_path, str(tmp_path / "c"), script=NEVER_MET)
    assert "rank 0 has ended" in text, text


def end_without_the_other(folder: str) -> list[float]:
    """Rank 0 uses four meetings and ends; rank 1 stays until then. The patience of each leaving."""
    patience: list[float] = []
    leave = Membership.leave

    def noted(self: Membership, timeout: float) -> None:
        patience.append(timeout)
        leave(self, timeout)

    for name in ("one", "two", "three"):
        options = smckpt.SaveOptions(queue=name)
        smckpt.save({"a": torch.ones(3)}, checkpoint_id=f"{folder}/{name}", options=options)
    smckpt.load({"a": torch.ones(3)}, checkpoint_id=f"{folder}/one")
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "LEAVE_SECONDS", 2.0)
            patch.setattr(Membership, "leave", noted)
            assert _RUNTIME.close(seconds(60)) == []
    dist.barrier()
    return patience


def test_an_end_waits_once_for_peers_that_do_not_leave(tmp_path: Path) -> None:
    """And not once for each queue and loader."""
    patience, _ = run_ranks(end_without_the_other, 2, str(tmp_path))
    assert len(patience) == 4
    assert 1 < sum(patience) <= 2


def end_after_one_stayed_away(folder: str) -> list[float]:
    """Rank 0 has waited in vain for rank 1, which lives, and ends. The patience of each leaving."""
    patience: list[float] = []
    leave = Membership.leave

    def noted(self: Membership, timeout: float) -> None:
        patience.append(timeout)
        leave(self, timeout)

    for name in ("one", "two"):
        options = smckpt.SaveOptions(queue=name, timeout=2)
        smckpt.save({"a": torch.ones(3)}, checkpoint_id=f"{folder}/{name}", options=options)
    smckpt.load({"a": torch.ones(3)}, checkpoint_id=f"{folder}/one")
    if dist.get_rank() == 0:
        with pytest.raises(smckpt.errors.SaveFailedError, match="rank 1 did not answer in time"):
            smckpt.save({"a": torch.ones(3)}, checkpoint_id=f"{folder}/two", options=options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "LEAVE_SECONDS", 10.0)
            patch.setattr(Membership, "leave", noted)
            assert _RUNTIME.close(seconds(60)) == []
    dist.barrier()
    return patience


def test_an_end_does_not_wait_again_for_a_peer_that_stayed_away(tmp_path: Path) -> None:
    """In no meeting, also where that peer came in time."""
    patience, _ = run_ranks(end_after_one_stayed_away, 2, str(tmp_path))
    assert len(patience) == 3 and all(patience), patience
