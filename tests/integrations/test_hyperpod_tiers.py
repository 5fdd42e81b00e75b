"""The names of `amzn-sagemaker-checkpointing`: memory on each save, S3 on some, the newest whole
step back. Its faults that were measured are tests that pass here."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import smckpt
from smckpt.errors import UsageError
from smckpt.integrations import hyperpod
from smckpt.integrations.hyperpod import (
    SageMakerCheckpointConfig,
    SageMakerTieredStorageConfigError,
    SageMakerTieredStorageError,
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from smckpt.run import provide
from smckpt.storage import open_storage
from tests.support import warm
from tests.support.frameworks.managed_tier import DAEMONS, ask, blob_of
from tests.support.launch import ROOT, run_ranks
from tests.support.limits import seconds

TRAIN = ROOT / "tests" / "support" / "frameworks" / "hyperpod_train.py"


def trained(base: str, until: int, die: int = -1, ranks: int = 2) -> list[Any]:
    """The step that the job began at, and its weights."""
    done = warm.run(
        [
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
            "--max-restarts=1",
            "-m", "smckpt.run", "--for", "hyperpod", str(TRAIN), base, str(until), str(die),
        ],
        timeout=seconds(150),
        env={
            **os.environ, "PYTHONPATH": str(ROOT),
            # else gloo finds addresses of the life before in torchrun's store, and waits for them
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(400)
def test_the_readmes_loop_is_killed_and_goes_on_from_memory_with_the_same_bits(
    s3_root: str,
) -> None:
    began, weights = trained(f"{s3_root}/killed", 12, die=9)
    assert began == 9, "step 8 is in memory, and S3 has step 6"
    assert [0, weights] == trained(f"{s3_root}/whole", 12)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.long)])
def test_memory_is_lost_with_the_job_and_s3_resumes_at_another_world_size(
    s3_root: str, saved: int, loaded: int
) -> None:
    """The package finds nothing there, and the job starts from scratch."""
    trained(s3_root, 9, ranks=saved)
    began, _ = trained(s3_root, 10, ranks=loaded)
    assert began == 7, "of step 6"


# -- on two ranks ----------------------------------------------------------------------------------


def state_at(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(40.0).reshape(10, 4) + step
    return {
        "model": {
            "a": distribute_tensor(rows, mesh, [Shard(0)]),
            "b": distribute_tensor(-rows, mesh, [Shard(0)]),
        },
        "step": step,
    }


def config_of(root: str, **more: Any) -> SageMakerCheckpointConfig:
    size = dist.get_world_size() if dist.is_initialized() else 1
    where = {"s3_tier_base_path": root} if root.startswith("s3://") else {}
    if root and not where:
        where = {"disk_tier_base_path": root}
    return SageMakerCheckpointConfig(namespace="job-1", world_size=size, **where, **more)


def saves(root: str, durable: tuple[int, ...], memory: tuple[int, ...] = ()) -> None:
    with provide(["hyperpod"]):
        config = config_of(root)
        for step in sorted({*durable, *memory}):
            config.save_to_s3 = step in durable and root.startswith("s3://")
            config.save_to_disk = step in durable and not config.save_to_s3
            writer = SageMakerTieredStorageWriter(config, step=step)
            dcp.save(state_at(step), storage_writer=writer)
            assert writer.in_memory_success and writer.s3_success == (step in durable)


def loads(root: str, step: int | None = None) -> tuple[Any, bool] | str:
    """The step, and whether all is as it was saved; or the error, with the state as it was."""
    with provide(["hyperpod"]):
        reader = SageMakerTieredStorageReader(config_of(root), step=step)
        state = state_at(-1)
        try:
            dcp.load(state, storage_reader=reader)
        except CheckpointException as error:
            return str(error)
        found = state["step"]
        wanted = state_at(found)["model"]
        equal = all(
            torch.equal(state["model"][key].to_local(), wanted[key].to_local()) for key in wanted
        )
        assert reader.step == found
        return found, equal


def saves_and_loads(root: str) -> list[Any]:
    saves(root, (2, 6), (2, 4, 6, 8))
    return [loads(root), loads(root, 2), loads(root, 6), loads(root, 4), loads(root, 3)]


def test_a_reader_takes_the_newest_step_of_memory_or_the_one_it_names(s3_root: str) -> None:
    for newest, second, sixth, fourth, third in run_ranks(saves_and_loads, 2, s3_root):
        assert (newest, second, sixth, fourth) == ((8, True), (2, True), (6, True), (4, True))
        assert "step 3 of namespace job-1 is whole in memory" in third


def at_rank_0_files_of(root: str, step: int) -> list[tuple[Any, str]]:
    store = open_storage(f"{root}/job-1/step_{step}")
    return [(store, name) for name in store.names("data-") if name.endswith(".safetensors")]


def cut_at_a_tensor(data: bytes) -> bytes:
    """Without the last tensor, at the boundary of the one before."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    starts = [one["data_offsets"][0] for key, one in header.items() if key != "__metadata__"]
    return data[: 8 + int.from_bytes(data[:8], "little") + max(starts)]


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


@pytest.mark.parametrize("hurt", [pytest.param(cut_at_a_tensor, marks=pytest.mark.long), flipped])
def test_an_object_in_s3_that_is_cut_or_flipped_is_never_loaded(
    s3_root: str, hurt: Callable[[bytes], bytes]
) -> None:
    """The package loads half of the weights "successfully", and the flipped bit too."""
    run_ranks(saves, 2, s3_root, (2, 4))
    store, name = at_rank_0_files_of(s3_root, 4)[-1]
    whole = store.read(name)
    store.overwrite(name, hurt(whole))
    assert run_ranks(loads, 2, s3_root) == [(2, True), (2, True)], "the older one, which is whole"
    for error in run_ranks(loads, 2, s3_root, 4):
        assert name in error and "step_4" in error
    store.overwrite(name, whole)
    assert run_ranks(loads, 2, s3_root) == [(4, True), (4, True)]


def test_the_tier_on_disk_holds_the_step(tmp_path: Path) -> None:
    """The package's is empty: it takes save_to_disk and writes nothing."""
    run_ranks(saves, 2, str(tmp_path), (2,))
    assert smckpt.latest_checkpoint(tmp_path / "job-1").step == 2
    assert run_ranks(loads, 1, str(tmp_path)) == [(2, True)]


class Bomb:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def test_a_pickle_in_the_place_of_metadata_runs_nothing(s3_root: str, tmp_path: Path) -> None:
    """The package calls pickle.loads on what it finds there."""
    run_ranks(saves, 2, s3_root, (2, 4))
    mark = tmp_path / "ran"
    store = open_storage(f"{s3_root}/job-1/step_4")
    for name in store.names("manifest-", "part-"):
        store.overwrite(name, pickle.dumps(Bomb(str(mark))))
    theirs = open_storage(f"{s3_root}/job-1/rank_0/step_4")
    theirs.put("metadata.metadata", pickle.dumps(Bomb(str(mark))))
    assert run_ranks(loads, 2, s3_root) == [(2, True), (2, True)]
    assert not mark.exists()


# -- HyperPod's daemon in place of our keepers -----------------------------------------------------


@pytest.fixture(params=DAEMONS)
def daemon(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with DAEMONS[request.param]() as address:
        monkeypatch.setenv("SMCKPT_HYPERPOD_DAEMON", f"http://{address}")
        yield address


def notes_at(root: str, step: int) -> list[bytes]:
    """Where the daemon has the files of a step."""
    store = open_storage(f"{root}/job-1/memory/step_{step}")
    return [store.read(name) for name in store.names("held-")]


def test_the_daemon_holds_steps_beyond_the_job_and_s3_the_others(daemon: str, s3_root: str) -> None:
    run_ranks(saves, 2, s3_root, (2,), (2, 4, 6, 8))
    assert len(notes_at(s3_root, 8)) == 2, "one blob of each rank"
    assert run_ranks(loads, 2, s3_root) == [(8, True), (8, True)], "by another job"
    assert run_ranks(loads, 1, s3_root) == [(8, True)], "by one of another size"
    assert run_ranks(loads, 3, s3_root, 6) == [(6, True)] * 3
    assert smckpt.latest_checkpoint(f"{s3_root}/job-1").step == 2, "S3 alone has that"
    first, second = notes_at(s3_root, 8)
    _, body, meta = ask(daemon, "GET", blob_of(first))
    ask(daemon, "POST", blob_of(first), flipped(body), meta)
    assert run_ranks(loads, 2, s3_root) == [(6, True), (6, True)], "a bit in memory is wrong"
    ask(daemon, "DELETE", blob_of(second))
    assert run_ranks(loads, 2, s3_root) == [(6, True), (6, True)], "a host is gone"
    ask(daemon, "POST", "/v1/cp/cluster/reset")
    assert run_ranks(loads, 2, s3_root) == [(2, True), (2, True)], "all of memory is gone"
    run_ranks(saves, 2, s3_root, (), (3, 5))
    assert run_ranks(loads, 2, s3_root) == [(5, True), (5, True)]


def saves_without_a_daemon(root: str) -> str:
    config = config_of(root, save_to_s3=True)
    writer = SageMakerTieredStorageWriter(config, step=2)
    hyperpod.save(state_at(2), storage_writer=writer)
    assert writer.s3_success and not writer.in_memory_success
    config.save_to_s3 = False
    with pytest.raises(CheckpointException) as caught:
        hyperpod.save(state_at(4), storage_writer=SageMakerTieredStorageWriter(config, step=4))
    return f"{caught.value} {loads(root)}"


def test_without_a_daemon_s3_has_its_steps_and_no_other_step_counts_as_saved(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMCKPT_HYPERPOD_DAEMON", "http://127.0.0.1:1")
    for told in run_ranks(saves_without_a_daemon, 2, s3_root):
        assert "step 4 of job-1 is not saved" in told and "(2, True)" in told
    (told,) = run_ranks(saves_in_memory_alone, 1)
    assert "SMCKPT_HYPERPOD_DAEMON is set, and the config names no place for the commits" in told


def saves_in_memory_alone() -> str:
    writer = SageMakerTieredStorageWriter(config_of(""), step=4)
    with pytest.raises(CheckpointException) as caught:
        hyperpod.save({"w": torch.ones(2)}, storage_writer=writer)
    return str(caught.value)


def names_a_namespace_of_its_own(root: str) -> list[str]:
    found = []
    for call in (
        lambda config: hyperpod.save(
            state_at(1), storage_writer=SageMakerTieredStorageWriter(config, step=1)
        ),
        lambda config: hyperpod.load(
            state_at(0), storage_reader=SageMakerTieredStorageReader(config)
        ),
    ):
        config = config_of(root, save_to_s3=True)
        config.namespace = f"job-{dist.get_rank()}"
        with pytest.raises(CheckpointException) as caught:
            call(config)
        found.append(str(caught.value))
    saves(root, (2,))
    return found


def test_ranks_that_name_different_namespaces_hear_it_at_once(s3_root: str) -> None:
    words = f"job-0 below {s3_root}/job-0/, job-1 below {s3_root}/job-1/"
    for told in run_ranks(names_a_namespace_of_its_own, 2, s3_root):
        assert all(words in text and "one namespace" in text for text in told), told


def test_without_a_path_steps_are_in_memory_alone() -> None:
    assert run_ranks(in_memory_alone, 2) == [((4, True), (2, True))] * 2


def in_memory_alone() -> Any:
    saves("", (), (2, 4))
    return loads(""), loads("", 2)


# -- the arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"namespace": ""}, "namespace is ''"),
        ({"namespace": "a/b"}, "namespace is 'a/b'"),
        ({"world_size": 2}, "world_size is 2, and the job has 1"),
        ({"save_to_s3": True}, "save_to_s3 is set without a path"),
        ({"save_to_disk": True}, "save_to_disk is set without a path"),
        ({"s3_tier_base_path": "bucket/x"}, "'bucket/x' is not a path in S3"),
        (
            {"s3_tier_base_path": "s3://b/x", "disk_tier_base_path": "/d"},
            "disk_tier_base_path is not honoured beside a path in S3",
        ),
    ],
)
def test_a_field_of_the_config_that_is_wrong_is_named(fields: dict[str, Any], words: str) -> None:
    config = SageMakerCheckpointConfig(**{"namespace": "job-1", "world_size": 1, **fields})
    with pytest.raises(SageMakerTieredStorageConfigError, match=words):
        SageMakerTieredStorageWriter(config, step=1)
    with pytest.raises(SageMakerTieredStorageConfigError, match=words):
        SageMakerTieredStorageReader(config)


class Scattered(hyperpod.DefaultS3PathStrategy):
    def get_checkpoint_dir(self, namespace: str, step: int) -> str:
        return f"{self.base_path}/{step}/{namespace}"


def test_a_strategy_of_paths_gives_its_base_and_no_other_place() -> None:
    ray = hyperpod.RayS3PathStrategy("s3://b/base")
    config = SageMakerCheckpointConfig("job-1", 1, s3_path_strategy=ray)
    writer = SageMakerTieredStorageWriter(config, path="/x/step_12/y")
    assert writer.step == 12 and writer.s3_checkpoint_dir == "s3://b/base/job-1/step_12"
    with pytest.raises(ValueError, match="both given"):
        SageMakerCheckpointConfig("job-1", 1, s3_tier_base_path="s3://b", s3_path_strategy=ray)
    config.s3_path_strategy = Scattered("s3://b/base")
    with pytest.raises(SageMakerTieredStorageConfigError, match="get_checkpoint_dir of Scattered"):
        SageMakerTieredStorageReader(config)


def test_what_names_no_step_and_what_tiers_do_not_honour_is_refused(tmp_path: Path) -> None:
    config = config_of(str(tmp_path))
    with pytest.raises(SageMakerTieredStorageError, match="step is -1"):
        SageMakerTieredStorageWriter(config, path="/no/step")
    with pytest.raises(UsageError, match="fsync"):
        SageMakerTieredStorageWriter(config, step=1, fsync=True)
    writer = SageMakerTieredStorageWriter(config, step=1)
    state = {"w": torch.ones(2)}
    with pytest.raises(CheckpointException, match="smckpt run --for hyperpod"):
        dcp.save(state, storage_writer=writer)
    for named, words in (
        ({"checkpoint_id": tmp_path}, "checkpoint_id is not honoured"),
        ({"no_dist": True}, "no_dist is not honoured"),
        ({"planner": DefaultSavePlanner(flatten_state_dict=False)}, "DefaultSavePlanner"),
    ):
        with pytest.raises(CheckpointException, match=words):
            hyperpod.save(state, storage_writer=writer, **named)


def tells_its_logger(root: str) -> list[str]:
    told: list[str] = []
    logger = logging.Logger("mine")
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    config = config_of(root, logger=logger, save_to_disk=True)
    writer = SageMakerTieredStorageWriter(config, step=3)
    hyperpod.save({"w": torch.ones(2)}, storage_writer=writer)
    return sorted(told)


def test_the_logger_of_the_config_is_told_of_each_tier(tmp_path: Path) -> None:
    (told,) = run_ranks(tells_its_logger, 1, str(tmp_path))
    assert told == [f"step 3 of job-1 is in {tmp_path}/job-1", "step 3 of job-1 is in memory"]


def another_writer(root: str) -> None:
    with provide(["hyperpod"]):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/a")
        dcp.async_save({"w": torch.ones(2)}, checkpoint_id=f"{root}/b").result()
        for folder in "ab":
            dcp.load(target := {"w": torch.zeros(2)}, checkpoint_id=f"{root}/{folder}")
            assert target["w"].tolist() == [1.0, 1.0]


def test_a_save_without_tiers_stays_torchs_own(tmp_path: Path) -> None:
    run_ranks(another_writer, 1, str(tmp_path))
    assert (tmp_path / "a" / ".metadata").exists() and (tmp_path / "b" / ".metadata").exists()
