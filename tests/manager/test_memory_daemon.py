"""A run's last steps in HyperPod's daemon, by `Memory(daemon=)`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smckpt
from smckpt import CheckpointManager, Memory, UsageError
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.integrations.kept import memory_of
from smckpt.manager import record
from smckpt.storage import open_storage
from tests.support.frameworks.managed_tier import DAEMONS, ask
from tests.support.limits import seconds


@pytest.fixture(params=DAEMONS)
def daemon(request: pytest.FixtureRequest) -> Iterator[str]:
    with DAEMONS[request.param]() as address:
        yield address


def manager(root: Path, address: str, **more: Any) -> CheckpointManager:
    memory = Memory(1, daemon=f"http://{address}/job-1", **more)
    return CheckpointManager(str(root), memory=memory, interval=4, signals=(), random=False)


def status(root: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "smckpt.cli", "status", "--json", str(root)],
        capture_output=True, text=True, timeout=seconds(60), check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_a_run_goes_on_from_the_daemon_keeps_its_last_steps_and_falls_back_to_the_disk(
    daemon: str, tmp_path: Path
) -> None:
    state = {"w": torch.zeros(4)}
    with manager(tmp_path, daemon, keep=2) as first:
        first.restore(into=state)
        for step in range(1, 8):
            state["w"] += 1
            assert first.should_save(step)
            first.save(step, state).wait()
    assert [one.step for one in smckpt.find_checkpoints(tmp_path)] == [4], "of the disk alone"
    memory = next(tmp_path.rglob("memory"))
    url = f"hyperpod://{daemon}/job-1/file{memory}"
    assert [one.step for one in smckpt.find_checkpoints(url)] == [6, 7]
    assert [len([*one.glob("held-*")]) for one in sorted(memory.iterdir())] == [1, 1]
    told = status(tmp_path)
    assert (told["steps"], told["newest"]["step"], told["keepers"]) == (3, 7, [])
    half = open_storage(f"{url}/9").create_file(
        "data-0773ea0c5872-00000002-r00000-0.safetensors", 1
    )
    half.write_at(0, memoryview(b"x"))
    half.finish()  # and the job ends
    with manager(tmp_path, daemon) as second:
        assert second.restore(into=state) == 7 and state["w"].tolist() == [7.0] * 4
    assert [*open_storage(url).tree()] == ["6", "7"], "what was unfinished is deleted"
    ask(daemon, "POST", "/v1/cp/cluster/reset")
    with manager(tmp_path, daemon) as third:
        assert third.restore(into=state) == 4 and state["w"].tolist() == [4.0] * 4
        assert third.should_save(5)
        third.save(5, state).wait()
    with manager(tmp_path, daemon) as fourth:
        assert fourth.restore(into=state) == 5


def test_a_daemon_that_cannot_be_reached_costs_the_tier_and_no_step_of_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.zeros(4)}
    with manager(tmp_path, "127.0.0.1:1") as first:
        first.restore(into=state)
        saved = [step for step in range(1, 9) if first.should_save(step)]
        first.save(8, state).wait()
    assert saved == [4, 8] and smckpt.latest_checkpoint(tmp_path).step == 8
    assert "no step is kept in memory" in caplog.text and "does not answer" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"daemon": "127.0.0.1:9200"}, "no address with a namespace"),
        ({"daemon": "http://h:9200/a/b"}, "no address with a namespace"),
        ({"replicas": 2}, "replicas of Memory is not honoured"),
        ({"budget": 1 << 30}, "budget of Memory is not honoured"),
        ({"domain": "rack"}, "domain of Memory is not honoured"),
        ({"keep": 7}, "keep of Memory is 7, and the daemon drops all but 8"),
    ],
)
def test_what_the_daemon_cannot_do_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Memory(**{"interval": 5, "daemon": "http://h:9200/job-1", **wrong})


def test_options_of_a_store_are_refused_beside_a_daemon() -> None:
    memory = Memory(5, daemon="http://h:9200/job-1")
    with pytest.raises(UsageError, match="storage= is not honoured with Memory"):
        CheckpointManager("s3://b/run", memory=memory, storage={"region": "eu-west-1"})


def test_a_door_that_knows_keepers_alone_refuses_a_daemon() -> None:
    with pytest.raises(UsageError, match="daemon of Memory is not honoured"):
        memory_of({"memory": Memory(5, daemon="http://h:9200/job-1")})


@pytest.mark.parametrize(
    ("named", "followed"),
    [
        ("hyperpod://127.0.0.1:9200/job-1/file/run/memory", True),
        ("hyperpod://localhost/job-1/s3/bucket/run/memory", True),
        ("keeper://job", True),
        ("hyperpod://10.0.0.7:9200/job-1/file/run/memory", False),
        ("hyperpod://127.0.0.1.example.org:80/job-1/file/run/memory", False),
        ("hyperpod://127.0.0.1@10.0.0.7/job-1/file/run/memory", False),
        ("s3://bucket/run", False),
    ],
)
def test_what_a_checkpoint_says_of_memory_makes_no_command_call_another_host(
    named: str, followed: bool
) -> None:
    found = FoundCheckpoint("/run/1", 1, 1, 1, 0, None, 0, (), "", {"manager": {"memory": named}})
    assert record.memory_of(found) == (named if followed else "")
