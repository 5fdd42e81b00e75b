"""Jobs whose ranks write under several prefixes: everything finds its way, and the pace rises."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smckpt
from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.storage import open_storage
from smckpt.storage.budget import Share
from tests.support.faults.copies import contents
from tests.support.heard import heard_shares
from tests.support.launch import run_ranks

OPTIONS = {"prefixes": 4}
NOWHERE = "http://127.0.0.1:9"


def state(value: float) -> dict[str, object]:
    return {"a": torch.full((1000,), value), "rank": dist.get_rank()}


@contextmanager
def one_rank_lists(root: str) -> Iterator[None]:
    """Inside, rank 0 looks and tells the others."""
    listings: list[str] = []
    events = open_storage(root).run("look", root, lambda client: client.meta.events)  # type: ignore[attr-defined]
    events.register("before-call.s3.ListObjectsV2", lambda **_: listings.append("one"), "count")
    try:
        yield
    finally:
        events.unregister("before-call.s3.ListObjectsV2", unique_id="count")
    assert bool(listings) == (dist.get_rank() == 0)


def a_run(root: str) -> tuple[list[float], str, dict[str, Share]]:
    """Two steps, the second saved twice; what is loaded of each, without an option."""
    heard = heard_shares()
    for step, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
        where = f"{root}/run/step-{step}"
        smckpt.save(state(value), checkpoint_id=where, step=step, storage=OPTIONS)
    smckpt.maybe_finalize_async_calls(blocking=True)
    values = []
    for step in (1, 2):
        target = state(0.0)
        smckpt.load(target, checkpoint_id=f"{root}/run/step-{step}")
        assert target["rank"] == dist.get_rank()
        values.append(target["a"][0].item())  # type: ignore[index]
    with one_rank_lists(root):
        found = smckpt.latest_checkpoint(root)
    assert found is not None
    return values, found.path, heard


def groups_of_a_step(root: str) -> float:
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    where = f"{root}/groups/step-1/part-{rank}"
    smckpt.save(
        state(5.0 + rank), checkpoint_id=where, process_group=groups[rank],
        options=smckpt.SaveOptions(groups=[[0], [1]]), storage=OPTIONS, step=1,
    )  # fmt: skip
    target = state(0.0)
    smckpt.load(
        target,
        checkpoint_id=where,
        process_group=groups[rank],
        options=smckpt.LoadOptions(groups=[[0], [1]]),
    )
    return target["a"][0].item()  # type: ignore[index, no-any-return]


def different_options(root: str) -> str:
    with pytest.raises(smckpt.SaveFailedError) as caught:
        smckpt.save(state(1.0), checkpoint_id=root, storage={"prefixes": 2 + dist.get_rank()})
    return str(caught.value)


def dcp(root: str) -> float:
    from torch.distributed import checkpoint

    # The endpoint comes with the options alone: nothing listens where the environment leads to.
    endpoint, os.environ["SMCKPT_S3_ENDPOINT"] = os.environ["SMCKPT_S3_ENDPOINT"], NOWHERE
    reach = {"endpoint": endpoint, "retries": 0}
    where = f"{root}/dcp/step-1"
    Writer, Reader = smckpt.DistributedFileSystemWriter, smckpt.DistributedFileSystemReader
    writer = Writer(where, storage={**OPTIONS, **reach})
    checkpoint.save({"a": torch.full((4,), 7.0)}, storage_writer=writer)
    alone, plain = {"a": torch.zeros(4)}, {"a": torch.ones(4)}
    checkpoint.load(alone, storage_reader=Reader(where, storage=reach))
    # With an engine of ours they say how to get there, too.
    smckpt.save(plain, storage_writer=Writer(f"{root}/said", storage={**OPTIONS, **reach}))
    smckpt.load(plain, storage_reader=Reader(f"{root}/said", storage=reach))
    with pytest.raises(smckpt.UsageError, match="to one of the two"):
        smckpt.load(plain, storage_reader=Reader(where, storage=reach), storage={"region": "a"})
    os.environ["SMCKPT_S3_ENDPOINT"] = endpoint
    together = {"a": torch.zeros(4)}
    reader = smckpt.DistributedFileSystemReader(where, process_group=dist.group.WORLD)
    with one_rank_lists(root):
        checkpoint.load(together, storage_reader=reader)
    planned = {"a": torch.zeros(4)}
    with one_rank_lists(root):
        smckpt.load(planned, checkpoint_id=where, planner=checkpoint.DefaultLoadPlanner())
    assert torch.equal(planned["a"], alone["a"])
    with pytest.raises(checkpoint.api.CheckpointException):
        checkpoint.load(together, checkpoint_id=f"{root}/nothing", storage_reader=reader)
    assert type(reader.failure) is smckpt.CheckpointNotFoundError  # on each rank
    assert torch.equal(together["a"], alone["a"])
    return alone["a"][0].item()


def everything(root: str) -> tuple[Any, tuple[float, str, float]]:
    run = a_run(f"{root}/a")  # one start of two processes for all
    return run, (groups_of_a_step(root), different_options(f"{root}/odd"), dcp(root))


def test_ranks_write_under_prefixes_before_the_step_and_all_readers_follow_unasked(
    s3_root: str,
) -> None:
    told = run_ranks(everything, 2, s3_root)
    check_the_run(f"{s3_root}/a", [run for run, _ in told])
    check_the_rest(s3_root, [rest for _, rest in told])


def check_the_run(s3_root: str, told: list[tuple[list[float], str, dict[str, Share]]]) -> None:
    for rank, (values, newest, heard) in enumerate(told):
        assert values == [1.0, 3.0]
        assert newest == f"{s3_root}/run/step-2"
        assert heard["write_part"] == Share.of_rank(rank, 2, prefixes=4)
        if rank == 0:
            assert heard["publish_manifest"] == Share.of_coordinator(0, 1, prefixes=4)
    ways = set(contents(s3_root))
    directories = {way.rpartition("/")[0] for way in ways}
    assert directories == {
        f"run/{p}step-{s}" for p in ("", "00-smckpt/", "80-smckpt/") for s in (1, 2)
    }
    attempts = {m[0] for way in ways if "step-2/" in way if (m := re.search(r"-0000000\d-", way))}
    assert attempts == {"-00000002-"}, "what the third save superseded is swept"
    assert smckpt.verify_checkpoint(f"{s3_root}/run/step-2").ok


def check_the_rest(s3_root: str, told: list[tuple[float, str, float]]) -> None:
    for rank, (value, said, through_dcp) in enumerate(told):
        assert value == 5.0 + rank
        assert "shard their files over different prefixes" in said
        assert through_dcp == 7.0
    directories = {way.rpartition("/")[0] for way in contents(f"{s3_root}/groups")}
    assert directories == {
        "step-1", "step-1/part-0", "step-1/part-1",
        "00-smckpt/step-1/part-0", "80-smckpt/step-1/part-1",
    }  # fmt: skip
    assert smckpt.verify_checkpoint(f"{s3_root}/groups/step-1").ok
    dcp_homes = {way.rpartition("/")[0] for way in contents(f"{s3_root}/dcp")}
    assert dcp_homes == {"step-1", "00-smckpt/step-1", "80-smckpt/step-1"}
    commit = choose_commit(open_storage(f"{s3_root}/groups/step-1"))
    assert {m.spread.up for _, m in commit.manifests if m.spread} == {2}
