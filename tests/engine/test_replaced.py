"""A load whose checkpoint is swept by a newer save while it reads: all ranks load the newer one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import smckpt
from smckpt import errors
from smckpt.engine import load_plan
from tests.support.launch import run_ranks
from tests.support.limits import seconds


class WhileLoading:
    """Calls `act` each time that a load is about to make room in an optimizer: the commit is chosen
    then, and none of its files of data is opened."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.calls = 0

    def __enter__(self) -> WhileLoading:
        self.real = load_plan.prepare_optimizers
        load_plan.prepare_optimizers = self.acting
        return self

    def __exit__(self, *_: object) -> None:
        load_plan.prepare_optimizers = self.real

    def acting(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.act()
        return self.real(*args, **kwargs)


def state(value: int) -> dict[str, Any]:
    """A model of `value`s with a momentum of `value`s; of 0 with none."""
    model = nn.Linear(300, 90, bias=False)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if value:
        optimizer.state[model.weight]["momentum_buffer"] = torch.full_like(model.weight, value)
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": value}


def holds(target: dict[str, Any], value: int) -> bool:
    tensors = [target["model"]["weight"], target["optimizer"]["state"][0]["momentum_buffer"]]
    return target["step"] == value and all(bool((tensor == value).all()) for tensor in tensors)


def replacing(folder: Path, times: int, **saving: Any) -> Callable[[], None]:
    """Saves a state of 2 into `folder`, `times` times, and waits each time until what was there is
    swept."""
    old = files_of(folder)

    def act() -> None:
        nonlocal old, times
        if not times:
            return
        times -= 1
        # in a thread of its own: one that is in a load may begin no save
        with ThreadPoolExecutor(1) as other:
            other.submit(smckpt.save, state(2), **{"checkpoint_id": folder, **saving}).result()
        deadline = time.monotonic() + seconds(60)
        while old & files_of(folder):
            assert time.monotonic() < deadline, f"{folder} is not swept"
            time.sleep(0.01)
        old = files_of(folder)

    return act


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(("data", "manifest"))}


def test_a_load_whose_commit_is_swept_meanwhile_takes_the_newer_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    smckpt.save(state(1), checkpoint_id=tmp_path)
    target = state(0)
    act = replacing(tmp_path, 1)
    with caplog.at_level(logging.WARNING, "smckpt"), WhileLoading(act) as hook:
        smckpt.load(target, checkpoint_id=tmp_path)
    assert hook.calls == 2
    assert holds(target, 2)
    assert "a newer save replaced the checkpoint while it was read" in caplog.text


def test_a_load_that_is_overtaken_again_and_again_says_so_and_leaves_no_slots(
    tmp_path: Path,
) -> None:
    smckpt.save(state(1), checkpoint_id=tmp_path)
    target = state(0)
    with (
        WhileLoading(replacing(tmp_path, 3)) as hook,
        pytest.raises(errors.CheckpointReplacedError, match=r"3 times.*load again") as raised,
    ):
        smckpt.load(target, checkpoint_id=tmp_path)
    assert hook.calls == 3
    assert raised.value.path == str(tmp_path)
    assert target["optimizer"]["state"] == {}


def test_what_is_deleted_without_a_newer_save_is_damage_and_not_tried_again(tmp_path: Path) -> None:
    smckpt.save(state(1), checkpoint_id=tmp_path)

    def delete() -> None:
        for path in tmp_path.glob("data-*"):
            path.unlink()

    with (
        WhileLoading(delete) as hook,
        pytest.raises(errors.CorruptCheckpointError, match="is missing"),
    ):
        smckpt.load(state(0), checkpoint_id=tmp_path)
    assert hook.calls == 1


def load_and_save(target: Any, where: dict[str, Any], saving: dict[str, Any]) -> None:
    """Takes part in the newer save while it reads: a load waits for what was begun before it."""
    begun: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as other:

        def save() -> None:
            if not begun:
                begun.append(other.submit(smckpt.save, state(2), **saving))

        with WhileLoading(save):
            smckpt.load(target, **where)
        begun[0].result()


def overtaken(folder: str) -> list[bool]:
    """Rank 1 lets a newer save land while it loads, and rank 0 has done its part of both."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    one: dict[str, Any] = {"checkpoint_id": Path(folder, "one")}
    two: dict[str, Any] = {"checkpoint_id": Path(folder, f"two/{rank}"), "process_group": alone}
    out = []
    for where in (one, two):
        groups = None if where is one else [[0], [1]]
        saving = {**where, "options": smckpt.SaveOptions(groups=groups)}
        where["options"] = smckpt.LoadOptions(timeout=60, groups=groups)
        if where is one:
            saving["coordinator_rank"] = 1
        smckpt.save(state(1), **saving)
        dist.barrier()
        act = replacing(saving["checkpoint_id"], 1, **saving)
        target = state(0)
        dist.barrier()
        if rank:
            with WhileLoading(act):
                smckpt.load(target, **where)
        else:
            load_and_save(target, where, saving)
        out.append(holds(target, 2))
    return out


def test_all_ranks_of_all_groups_take_the_newer_one_together(tmp_path: Path) -> None:
    for found in run_ranks(overtaken, 2, str(tmp_path)):
        assert found == [True, True]


def test_under_dcp_the_error_says_that_it_was_replaced(tmp_path: Path) -> None:
    smckpt.save(state(1), checkpoint_id=tmp_path)
    reader = smckpt.DistributedFileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    replacing(tmp_path, 1)()
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"model.weight": torch.zeros(90, 300)}, metadata, True)
    with pytest.raises(errors.CheckpointReplacedError, match="load again"):
        reader.read_data(planner.create_local_plan(), planner)
