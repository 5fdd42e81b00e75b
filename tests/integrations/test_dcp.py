"""torch.distributed.checkpoint reads and writes our checkpoints, and its own parts are honoured."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import smckpt
from smckpt import DistributedFileSystemReader as Reader
from smckpt import DistributedFileSystemWriter as Writer
from smckpt import errors
from smckpt.integrations.dcp import calls
from tests.support.launch import run_ranks
from tests.support.limits import seconds
from tests.support.models import shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def fsdp1(seed: int, use_orig_params: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    cpu = torch.device("cpu")
    return trained(FSDP(plain(seed), use_orig_params=use_orig_params, device_id=cpu))


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return trained(model)


def taken(model: nn.Module, optimizer: Any, kind: str, **more: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, getattr(smckpt, kind)):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def whole(tree: Any) -> Any:
    """A copy with every DTensor gathered."""
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return (tree.full_tensor() if hasattr(tree, "full_tensor") else tree).detach().clone()
    return tree


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def blank(tree: Any) -> Any:
    """The same structure with other values: what a load must fill."""
    if isinstance(tree, dict):
        return {key: blank(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [blank(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return torch.full_like(tree, 99)
    return tree if isinstance(tree, str) else None  # names of parameters are the target's own


# -- the reader -------------------------------------------------------------------------------


def dcp_loads_fsdp2(folder: str, kind: str) -> dict[str, bool]:
    model, optimizer = fsdp2(0)
    smckpt.save(taken(model, optimizer, kind, step=7), checkpoint_id=folder)
    other, its_optimizer = fsdp2(1)
    with smckpt.sm_state_dict_type(other, smckpt.SHARDED):
        target = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict(), "step": 0}
        dcp.load(target, storage_reader=Reader(folder))
    expected = taken(model, optimizer, "SHARDED", step=7)
    return {
        "model": equal(whole(target["model"]), whole(expected["model"])),
        "live": equal(whole(other.state_dict()), whole(model.state_dict())),
        "optimizer": equal(whole(target["optimizer"]), whole(dict(expected["optimizer"]))),
        "step": target["step"] == 7,
    }


def dcp_loads_both_kinds_of_fsdp2(folder: str) -> list[dict[str, bool]]:
    return [dcp_loads_fsdp2(f"{folder}/{kind}", kind) for kind in ("LOCAL", "SHARDED")]


def test_dcp_loads_what_fsdp2_saved(tmp_path: Path) -> None:
    for local, sharded in run_ranks(dcp_loads_both_kinds_of_fsdp2, 2, str(tmp_path)):
        assert all(local.values()), local
        assert all(sharded.values()), sharded


def dcp_loads_fsdp1_optimizer(folder: str, kind: str, use_orig_params: bool) -> list[bool]:
    """The recipe of torch's documentation for FSDP1, word for word."""
    model, optimizer = fsdp1(0, use_orig_params)
    smckpt.save(taken(model, optimizer, kind), checkpoint_id=folder)
    other, its_optimizer = fsdp1(1, use_orig_params)
    reader = Reader(folder)
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        target = {"model": other.state_dict()}
        dcp.load(target, storage_reader=reader)
        other.load_state_dict(target["model"])
        state = load_sharded_optimizer_state_dict(target["model"], "optimizer", reader)
        flat = FSDP.optim_state_dict_to_load(other, its_optimizer, state["optimizer"])
        its_optimizer.load_state_dict(flat)
    sides = []
    for one, its in ((model, optimizer), (other, its_optimizer)):
        with FSDP.state_dict_type(one, StateDictType.FULL_STATE_DICT):
            sides.append((one.state_dict(), FSDP.optim_state_dict(one, its)))
    return [equal(dict(sides[0][i]), dict(sides[1][i])) for i in (0, 1)]


def dcp_loads_fsdp1_optimizers(folder: str) -> dict[str, list[bool]]:
    return {
        f"{kind} {orig}": dcp_loads_fsdp1_optimizer(f"{folder}/{kind}{orig}", kind, orig)
        for kind in ("LOCAL", "SHARDED")
        for orig in (True, False)
    }


def test_load_sharded_optimizer_state_dict_restores_fsdp1(tmp_path: Path) -> None:
    for results in run_ranks(dcp_loads_fsdp1_optimizers, 2, str(tmp_path)):
        assert results == {case: [True, True] for case in results}
        assert len(results) == 4


@pytest.mark.parametrize("how", [shards.plain, shards.fsdp1, shards.fsdp2, shards.tp])
def test_one_process_loads_what_any_parallelism_saved(tmp_path: Path, how: Any) -> None:
    torch.manual_seed(0)
    state = {"a": torch.randn(7, 6), "b": torch.randn(5), "c": torch.randn(3, 4, 2)}
    shards.write(
        tmp_path, 2, lambda r: how(state, r, 2), objects={"step": 3, "list": [1, {"x": 2}]}
    )
    target = {"model": blank(state), "step": 0, "list": [0, {"x": 0}]}
    dcp.load(target, storage_reader=Reader(tmp_path))
    assert equal(target, {"model": state, "step": 3, "list": [1, {"x": 2}]})


def loads_on_two_meshes(folder: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    state = expected_of_two_meshes()
    out = []
    for placement in ([Shard(0)], [Shard(1)], [Replicate()]):
        target = {
            "model": {n: distribute_tensor(torch.zeros_like(t), mesh, placement)
                      for n, t in state.items()}
        }  # fmt: skip
        dcp.load(target, storage_reader=Reader(folder))
        out.append(equal(whole(target["model"]), state))
    return out


def expected_of_two_meshes() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(35.0).reshape(7, 5), "b": torch.arange(6).reshape(2, 3)}


def test_any_placement_is_filled_from_flat_and_mesh_shards(tmp_path: Path) -> None:
    state = expected_of_two_meshes()
    floats = {"a": state["a"]}
    ints = {"b": state["b"]}
    shards.write(tmp_path, 3, lambda r: shards.fsdp1(floats, r, 3) + shards.fsdp2(ints, r, 3))
    assert run_ranks(loads_on_two_meshes, 2, str(tmp_path)) == [[True] * 3] * 2


def test_a_target_of_another_dtype_is_filled_with_converted_values(tmp_path: Path) -> None:
    state = {"w": torch.randn(4, 6)}
    shards.write(tmp_path, 1, lambda r: shards.plain(state, r, 1))
    target = {"model": {"w": torch.zeros(4, 6, dtype=torch.bfloat16)}}
    dcp.load(target, storage_reader=Reader(tmp_path))
    assert torch.equal(target["model"]["w"], state["w"].bfloat16())


def test_targets_that_are_views_are_filled_in_place(tmp_path: Path) -> None:
    state = {"w": torch.randn(4, 6)}
    shards.write(tmp_path, 2, lambda r: shards.fsdp2(state, r, 2))
    memory = torch.zeros(6, 8)
    target = {"model": {"w": memory.t()[2:6]}}
    dcp.load(target, storage_reader=Reader(tmp_path))
    assert torch.equal(memory.t()[2:6], state["w"])
    assert memory.count_nonzero() == 24


def test_a_changed_byte_is_told_with_file_and_offset(tmp_path: Path) -> None:
    state = {"w": torch.randn(400, 6)}
    shards.write(tmp_path, 1, lambda r: shards.plain(state, r, 1))
    (victim,) = shards.files(tmp_path)
    shards.flip(victim, victim.stat().st_size - 9)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model": blank(state)}, storage_reader=Reader(tmp_path))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, errors.CorruptCheckpointError)
    assert victim.name in str(error) and "bytes 0 to" in str(error)


def test_a_name_that_is_not_saved_is_told_by_dcp(tmp_path: Path) -> None:
    state = {"w": torch.randn(4)}
    shards.write(tmp_path, 1, lambda r: shards.plain(state, r, 1))
    with pytest.raises(CheckpointException, match=r"model\.other"):
        dcp.load({"model": {"other": torch.zeros(4)}}, storage_reader=Reader(tmp_path))


def test_a_reader_follows_a_newer_commit_at_the_next_load(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for value in (1.0, 2.0):
        state = {"w": torch.full((3,), value)}
        shards.write(tmp_path, 1, lambda r, s=state: shards.plain(s, r, 1))
        target = {"model": {"w": torch.zeros(3)}}
        dcp.load(target, checkpoint_id=tmp_path, storage_reader=reader)
        assert target["model"]["w"].tolist() == [value] * 3


def test_ranks_that_found_different_commits_are_refused(tmp_path: Path) -> None:
    shards.write(tmp_path, 1, lambda r: shards.plain({"w": torch.ones(3)}, r, 1))
    early, late = Reader(tmp_path), Reader(tmp_path)
    early.read_metadata()
    shards.write(tmp_path, 1, lambda r: shards.plain({"w": torch.zeros(3)}, r, 1))
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in (early, late)]
    with pytest.raises(errors.UsageError, match="different commits"):
        late.prepare_global_plan(plans)


def each_rank_gets_its_own(folder: str) -> list[Any]:
    rank = dist.get_rank()
    ours = {} if rank else {"rates": {"lr": 0.5}}
    smckpt.save({"w": torch.ones(2), "mine": rank, "first": ours}, checkpoint_id=folder)
    target: dict[str, Any] = {"mine": None, "first": {"rates": {"lr": 0}}}
    dcp.load(target, storage_reader=Reader(folder))
    mine = target["mine"]
    assert target["first"]["rates"]["lr"] == 0.5, "one rank saved it for all"
    lone = [dist.new_group([0]), dist.new_group([1])]
    dcp.load(target, storage_reader=Reader(folder, process_group=lone[rank]), no_dist=True)
    assert target["mine"] == mine
    with pytest.raises(errors.UsageError, match="not a member of the reader's process_group"):
        Reader(folder, process_group=lone[1 - rank])
    if rank == 0:  # its peer does not come: told in time, not waited for without end
        began = time.monotonic()
        with pytest.raises(errors.PeerError, match="rank 1"):
            Reader(folder, process_group=dist.group.WORLD, timeout=0.5).read_metadata()
        assert time.monotonic() - began < seconds(30)
    return [mine]


def test_each_rank_gets_its_own_values_back(tmp_path: Path) -> None:
    assert run_ranks(each_rank_gets_its_own, 2, str(tmp_path)) == [[0], [1]]


# -- the writer -------------------------------------------------------------------------------


def dcp_saves(folder: str, how: str) -> Any:
    model, optimizer = fsdp2(0)
    mesh = init_device_mesh("cpu", (2,))
    state = {
        **taken(model, optimizer, "SHARDED", step=5, rank=dist.get_rank(), names=["a", ("b", 2)]),
        "rows": distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(15.0).reshape(3, 5), mesh, [Shard(1)]),
        "same": distribute_tensor(torch.arange(4), mesh, [Replicate()]),
        "bytes": torch.arange(5, dtype=torch.uint8).view(5),
        "mixed": [torch.full((2,), 3.0), {"deep": 4}],
    }
    state["optimizer"] = {k: dict(v) if k == "state" else v for k, v in state["optimizer"].items()}
    if how == "save":
        dcp.save(state, storage_writer=Writer(folder, step=5, metadata={"note": "x"}))
    else:
        dcp.async_save(state, storage_writer=Writer(folder, step=5)).result()
    target = blank(whole(state))
    dcp.load(target, storage_reader=Reader(folder))
    gathered = whole(state)
    return equal(target, gathered), gathered


def dcp_saves_both_ways(folder: str) -> dict[str, Any]:
    return {how: dcp_saves(f"{folder}/{how}", how) for how in ("save", "async_save")}


def test_what_dcp_saves_through_our_writer_is_a_checkpoint_of_ours(tmp_path: Path) -> None:
    results = run_ranks(dcp_saves_both_ways, 2, str(tmp_path))
    for how in ("save", "async_save"):
        assert [result[how][0] for result in results] == [True, True]
        _, expected = results[0][how]
        target = blank(expected)
        smckpt.load(target, checkpoint_id=tmp_path / how)
        assert equal(target, expected)
        assert not smckpt.verify_checkpoint(str(tmp_path / how)).problems
    found = smckpt.latest_checkpoint(tmp_path)
    assert found is not None and (found.step, found.kind) == (5, "SHARDED")


def test_saving_again_replaces_the_commit_and_sweeps_the_older(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((3,), value)}, storage_writer=Writer(tmp_path))
    assert len(shards.files(tmp_path)) == 1
    target = {"w": torch.zeros(3)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [2.0] * 3


@pytest.mark.parametrize("how", ["dcp", "smckpt"])
def test_a_writer_told_not_to_overwrite_refuses_a_committed_directory(
    tmp_path: Path, how: str
) -> None:
    save: Any = dcp.save if how == "dcp" else smckpt.save
    for place in ("new", "empty"):  # neither holds a commit
        folder = tmp_path / place
        if place == "empty":
            folder.mkdir()
        save({"w": torch.ones(2)}, storage_writer=Writer(folder, overwrite=False))
        with pytest.raises((CheckpointException, errors.UsageError), match="already exists"):
            save({"w": torch.zeros(2)}, storage_writer=Writer(folder, overwrite=False))
        target = {"w": torch.zeros(2)}
        smckpt.load(target, checkpoint_id=folder)
        assert target["w"].tolist() == [1.0, 1.0]
        save({"w": torch.full((2,), 3.0)}, storage_writer=Writer(folder))


def test_not_overwriting_counts_a_save_that_is_still_in_flight(tmp_path: Path) -> None:
    smckpt.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(errors.UsageError, match="already exists"):
        smckpt.async_save({"w": torch.zeros(2)}, storage_writer=Writer(tmp_path, overwrite=False))
    smckpt.maybe_finalize_async_calls()


def one_rank_cannot_save(folder: str) -> list[str]:
    dcp.save({"w": torch.ones(2), "x": 1}, storage_writer=Writer(folder))
    said = []
    bad = {"w": torch.zeros(2), "x": threading_lock() if dist.get_rank() else 1}
    try:
        dcp.save(bad, storage_writer=Writer(folder))
    except CheckpointException as error:
        said.append(str(error))
    target = {"w": torch.zeros(2), "x": None}
    dcp.load(target, storage_reader=Reader(folder))
    return [*said, str(target["w"].tolist())]


def threading_lock() -> Any:
    """A value that can be pickled by nobody."""
    return threading.Lock()


def test_a_save_that_fails_on_one_rank_leaves_the_older_commit(tmp_path: Path) -> None:
    for said in run_ranks(one_rank_cannot_save, 2, str(tmp_path)):
        assert "RANK 1" in said[0]
        assert said[1] == "[1.0, 1.0]"


def one_rank_wants_more(folder: str) -> tuple[str, Any]:
    calls.save({"w": torch.ones(2), "plain": {"x": 1}}, checkpoint_id=folder)
    target: dict[str, Any] = {"w": torch.zeros(2), "plain": {"x": 0}}
    if dist.get_rank():
        target["plain"]["y"] = 0
    try:
        calls.load(target, checkpoint_id=folder)
    except CheckpointException as error:
        return str(error), (target["w"].tolist(), target["plain"]["x"])
    return "loaded", target


def test_a_key_that_one_rank_lacks_fails_on_all_before_a_change(tmp_path: Path) -> None:
    for text, target in run_ranks(one_rank_wants_more, 2, str(tmp_path), timeout=60):
        assert "Missing key in checkpoint state_dict: plain.y." in text
        assert target == ([0.0, 0.0], 0)


class Custom:
    """A class of the user's: reading it back would run its code."""


def test_an_object_that_would_run_code_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(2), "a": {"thing": Custom()}}, storage_writer=Writer(tmp_path))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, errors.StateError) and "a.thing" in str(error)
    assert list(tmp_path.glob("manifest-*")) == list(tmp_path.glob("data-*")) == []


class Caching(DefaultSavePlanner):
    """Says at its second save that its plan has not changed."""

    made = False

    def create_local_plan(self) -> SavePlan:
        made, self.made = self.made, True
        return SavePlan([], usable=False) if made else super().create_local_plan()


def test_a_plan_of_a_planners_own_cache_is_refused_and_the_first_save_stands(
    tmp_path: Path,
) -> None:
    planner = Caching()
    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(tmp_path), planner=planner)
    with pytest.raises(CheckpointException, match="cache of its own"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=Writer(tmp_path), planner=planner)
    target = {"w": torch.zeros(2)}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [1.0, 1.0]


def cached_by_turns(folder: str) -> list[float]:
    """Saves of DCP's writer and ours, with planners that share DCP's cache of plans."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for number in range(6):
        place = f"{folder}/{number}"
        state = {"w": distribute_tensor(torch.full((4,), float(number)), mesh, [Shard(0)])}
        writer = Writer(place) if number in (1, 2, 4) else dcp.FileSystemWriter(place)
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        smckpt.load(target := {"w": torch.zeros(4)}, checkpoint_id=place)
        found += target["w"].unique().tolist()
    return found


def test_planners_that_cache_plans_serve_our_writer_and_dcps_by_turns(tmp_path: Path) -> None:
    told = run_ranks(cached_by_turns, 2, str(tmp_path))
    assert told == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2


def test_saving_without_coordination_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="use_collectives"):
        dcp.save({"w": torch.ones(2)}, storage_writer=Writer(tmp_path), use_collectives=False)


def test_a_later_run_fences_an_earlier_writer(tmp_path: Path) -> None:
    early = Writer(tmp_path)
    dcp.save({"w": torch.ones(2)}, storage_writer=early)
    dcp.save({"w": torch.full((2,), 2.0)}, storage_writer=Writer(tmp_path))
    with pytest.raises(CheckpointException, match="lease"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=early)


def test_a_directory_of_dcp_loads_by_the_same_call(tmp_path: Path) -> None:
    saved = {"model": plain(1).state_dict(), "step": 7}
    dcp.save(saved, checkpoint_id=tmp_path / "it's of dcp", no_dist=True)
    state: dict[str, Any] = {"model": plain(2).state_dict(), "step": 0}
    smckpt.load(state, checkpoint_id=tmp_path / "it's of dcp")
    assert equal(state, saved)


# -- DCP's own planners, writers and readers --------------------------------------------------


class Renaming(DefaultSavePlanner):
    """Puts everything below another key."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner({"renamed": state_dict}, storage_meta, is_coordinator)


def test_a_stock_writer_is_honoured(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0), "step": 3}
    handle = smckpt.async_save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    state["w"].zero_()  # the save has its own copy
    assert smckpt.maybe_finalize_async_calls() == [handle.number]
    target = {"w": torch.zeros(4), "step": 0}
    dcp.load(target, checkpoint_id=tmp_path)
    assert (target["w"].tolist(), target["step"]) == ([0.0, 1.0, 2.0, 3.0], 3)
    target = {"w": torch.zeros(4), "step": 0}
    smckpt.load(target, storage_reader=dcp.FileSystemReader(tmp_path))
    assert (target["w"].tolist(), target["step"]) == ([0.0, 1.0, 2.0, 3.0], 3)


def test_a_planner_is_honoured_and_our_format_is_written(tmp_path: Path) -> None:
    smckpt.save({"w": torch.arange(3.0)}, checkpoint_id=tmp_path, planner=Renaming())
    target = {"renamed": {"w": torch.zeros(3)}}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["renamed"]["w"].tolist() == [0.0, 1.0, 2.0]


def fsdp1_by_planners_and_writers(folder: str) -> dict[str, list[bool]]:
    """FSDP1's ShardedTensors, saved in each way by which DCP plans the save."""
    model, _ = fsdp1(0, True)
    saves: dict[str, Any] = {
        "planner": lambda **more: smckpt.save(planner=DefaultSavePlanner(), **more),
        "writer": lambda checkpoint_id, **more: smckpt.save(
            storage_writer=dcp.FileSystemWriter(checkpoint_id), **more
        ),
        "by DCP's name": lambda **more: calls.async_save(
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True), **more
        ).result(),
        "our writer by DCP's name": lambda checkpoint_id, **more: calls.async_save(
            storage_writer=Writer(checkpoint_id),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            **more,
        ).result(),
    }
    out = {}
    for name, save in saves.items():
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            save(state_dict={"model": model.state_dict()}, checkpoint_id=f"{folder}/{name}")
            other, _ = fsdp1(1, True)
        with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
            target = {"model": other.state_dict()}
            assert {type(value).__name__ for value in target["model"].values()} == {"ShardedTensor"}
            reader = calls.FileSystemReader(f"{folder}/{name}")
            smckpt.load(target, storage_reader=reader, planner=DefaultLoadPlanner())
            other.load_state_dict(target["model"])
        both = zip(model.parameters(), other.parameters(), strict=True)
        out[name] = [torch.equal(ours, theirs) for ours, theirs in both]
    return out


def test_sharded_tensors_of_fsdp1_are_saved_with_a_planner_and_a_writer(tmp_path: Path) -> None:
    for told in run_ranks(fsdp1_by_planners_and_writers, 2, str(tmp_path)):
        assert len(told) == 4 and all(len(same) == 4 and all(same) for same in told.values()), told


class Rows(torch.Tensor):
    """Says itself which rows of a tensor this rank has, by the names that DCP asks for."""

    held: dict[int, torch.Tensor]

    @staticmethod
    def __new__(cls, size: tuple[int, int], held: dict[int, torch.Tensor]) -> Rows:
        made: Rows = torch.Tensor._make_wrapper_subclass(cls, size)
        made.held = held
        return made

    def __init__(self, size: Any, held: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((r, 0)), t.size()) for r, t in self.held.items()]

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(held), self.size()
                ),
            )
            for chunk, held in zip(self.__create_chunk_list__(), self.held.values(), strict=True)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.held[index.offset[0]]


def rows_that_say_where_they_are(folder: str) -> list[str]:
    """By each call, saved in one cut and loaded into another; stock beside ours."""
    full = torch.arange(24.0).view(8, 3)
    mesh = init_device_mesh("cpu", (2,))

    def wrapped(held: dict[int, torch.Tensor]) -> DTensor:
        inner = LocalShardsWrapper(list(held.values()), [(row, 0) for row in held])
        out: DTensor = DTensor.from_local(
            inner, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)
        )
        return out

    ours = {"save": calls.save, "smckpt": smckpt.save, "async_save": calls.async_save}
    wrong = []
    for of in (lambda held: Rows((8, 3), held), wrapped):
        for name, save in {"stock": dcp.save, **ours}.items():
            load = dcp.load if name == "stock" else calls.load
            for saved, loaded in (  # each rank's first rows and their numbers
                ([{0: 3}, {3: 5}], [{0: 6}, {6: 2}]),
                ([{0: 2, 4: 2}, {2: 2, 6: 2}], [{0: 3, 5: 3}, {3: 2}]),
                ([{0: 8}, {}], [{}, {0: 8}]),
                ([{0: 8}, {0: 8}], [{2: 1}, {7: 1}]),
            ):
                for dtype in (torch.float32, torch.bfloat16):
                    place = f"{folder}/{of is wrapped}-{name}-{saved}-{dtype}"
                    cut = {r: full[r : r + n].to(dtype) for r, n in saved[dist.get_rank()].items()}
                    begun = save({"table": {"w": of(cut)}}, checkpoint_id=place)
                    if name == "async_save":
                        begun.result()  # type: ignore[union-attr]
                    mine = loaded[dist.get_rank()]
                    into = {r: torch.zeros(n, 3, dtype=dtype) for r, n in mine.items()}
                    target: Any = {"table": {"w": of(into)}}
                    kept = target["table"]["w"]
                    load(target, checkpoint_id=place)
                    same = all(
                        torch.equal(t, full[r : r + len(t)].to(dtype)) for r, t in into.items()
                    )
                    whole = {"table": {"w": torch.zeros(8, 3, dtype=dtype)}}
                    load(whole, checkpoint_id=place)
                    same = same and torch.equal(whole["table"]["w"], full.to(dtype))
                    if not same or target["table"]["w"] is not kept:
                        wrong.append(place)
    return wrong


def test_tensors_that_say_which_boxes_they_have_are_saved_and_loaded(tmp_path: Path) -> None:
    assert run_ranks(rows_that_say_where_they_are, 2, str(tmp_path)) == [[], []]


def alone(folder: str) -> list[float]:
    """Rank 1 saves and loads alone, while rank 0 waits for it elsewhere."""
    said: list[float] = []
    for planned in (False, True) if dist.get_rank() else ():
        planners: list[Any] = [Renaming(), DefaultLoadPlanner()] if planned else [None, None]
        where: Any = {"checkpoint_id": f"{folder}/{planned}", "no_dist": True}
        smckpt.save({"w": torch.full((2,), 3.0)}, planner=planners[0], **where)
        target = {"w": torch.zeros(2)}
        if planned:
            smckpt.load({"renamed": target}, planner=planners[1], **where)
        else:
            smckpt.load(target, **where)
        said += target["w"].tolist()
    only = dist.new_group([1])
    for more in ({"no_dist": True}, {"process_group": only}) if dist.get_rank() else ():
        where = {"checkpoint_id": f"{folder}/{[*more]}", **more}  # by DCP's names
        calls.save({"w": torch.full((2,), 4.0)}, **where)
        calls.async_save({"w": torch.full((2,), 3.0)}, **where).result()
        calls.load(target := {"w": torch.zeros(2)}, **where)
        said += target["w"].tolist()
    dist.barrier()
    return said


@pytest.mark.long
def test_one_rank_of_a_job_saves_and_loads_alone_with_no_dist(tmp_path: Path) -> None:
    assert run_ranks(alone, 2, str(tmp_path)) == [[], [3.0] * 8]


def test_no_dist_is_taken_without_a_job_and_refused_with_a_process_group(tmp_path: Path) -> None:
    smckpt.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    target = {"w": torch.zeros(2)}
    smckpt.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert target["w"].tolist() == [1.0, 1.0]
    with pytest.raises(errors.UsageError, match="no_dist"):
        smckpt.save({}, checkpoint_id=tmp_path, no_dist=True, process_group=object())


def test_a_load_planner_is_honoured(tmp_path: Path) -> None:
    smckpt.save({"w": torch.arange(3.0)}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(3), "new": torch.full((2,), 5.0)}
    with pytest.raises(errors.CheckpointError, match="new"):
        smckpt.load(target, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
    planner = DefaultLoadPlanner(allow_partial_load=True)
    smckpt.load(target, checkpoint_id=tmp_path, planner=planner)
    assert (target["w"].tolist(), target["new"].tolist()) == ([0.0, 1.0, 2.0], [5.0, 5.0])


def test_a_stock_reader_alone_reads_what_dcp_saved_and_is_refused_on_what_we_saved(
    tmp_path: Path,
) -> None:
    dcp.save({"w": torch.arange(3.0), "more": {"n": [1, 2]}}, checkpoint_id=tmp_path / "dcp")
    target = {"w": torch.zeros(3), "more": {"n": [0, 0]}}
    smckpt.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert (target["w"].tolist(), target["more"]["n"]) == ([0.0, 1.0, 2.0], [1, 2])
    smckpt.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ours")
    with pytest.raises(errors.UsageError, match=r"FileSystemReader .* leave storage_reader out"):
        smckpt.load({"w": target["w"]}, storage_reader=dcp.FileSystemReader(tmp_path / "ours"))
    assert target["w"].tolist() == [0.0, 1.0, 2.0]


def test_the_log_says_that_dcp_loads_nothing_into_an_optimizer_without_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def taken(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    smckpt.save(taken(*trained(nn.Linear(8, 3))), checkpoint_id=tmp_path)
    said = []
    for initialised in (True, False):
        model = nn.Linear(8, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        if initialised:
            smckpt.init_optim_state(optimizer)
        smckpt.load(taken(model, optimizer), checkpoint_id=tmp_path, planner=DefaultLoadPlanner())
        said.append("AdamW at optimizer has no state" in caplog.text)
    assert said == [False, True]


def test_a_missing_checkpoint_is_our_error_with_a_planner_too(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointNotFoundError):
        smckpt.load({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=DefaultLoadPlanner())


def test_our_reader_and_writer_say_where_without_a_planner(tmp_path: Path) -> None:
    smckpt.save({"w": torch.arange(3.0)}, storage_writer=Writer(tmp_path))
    target = {"w": torch.zeros(3)}
    smckpt.load(target, storage_reader=Reader(tmp_path))
    assert target["w"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(errors.UsageError, match="checkpoint_id"):
        smckpt.load(target, checkpoint_id=tmp_path / "b", storage_reader=Reader(tmp_path))


def many_saves_by_dcp(folder: str) -> list[Any]:
    """More saves than DCP takes at once, while training uses the same process group."""
    weights = torch.full((1000,), float(dist.get_rank()))
    for number in range(4):
        writer = dcp.FileSystemWriter(f"{folder}/{number}")
        mesh_state = {"w": weights, "number": number}
        smckpt.async_save({f"rank{dist.get_rank()}": mesh_state}, storage_writer=writer)
        for _ in range(20):
            dist.all_reduce(torch.ones(10))
        weights += 1
    done = smckpt.maybe_finalize_async_calls()
    out = []
    for number in range(4):
        mine = {"w": torch.zeros(1000), "number": -1}
        dcp.load({f"rank{dist.get_rank()}": mine}, checkpoint_id=f"{folder}/{number}")
        out.append((mine["w"][0].item() - dist.get_rank(), mine["number"]))
    return [done, out]


def test_saves_by_dcp_follow_each_other_beside_training(tmp_path: Path) -> None:
    for done, loaded in run_ranks(many_saves_by_dcp, 2, str(tmp_path)):
        assert done == [0, 1, 2, 3]
        assert loaded == [(float(n), n) for n in range(4)]


class Broken(dcp.FileSystemWriter):
    """Fails while writing on rank 1."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


def a_foreign_save_fails(folder: str, how: str) -> list[str]:
    state: Any = {"w": torch.ones(2)}
    said = []
    if how == "nothing on one rank" and dist.get_rank() == 1:
        state = None
    try:
        smckpt.async_save(state, storage_writer=Broken(folder) if how == "writing"
                          else dcp.FileSystemWriter(folder))  # fmt: skip
        smckpt.maybe_finalize_async_calls()
    except errors.CheckpointError as error:
        said.append(f"{type(error).__name__} {error.rank} {error}")
    smckpt.async_save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(folder + "/again"))
    return [*said, str(smckpt.maybe_finalize_async_calls())]


def foreign_saves_fail(folder: str) -> list[list[str]]:
    return [
        a_foreign_save_fails(f"{folder}/{n}", how)
        for n, how in enumerate(("writing", "nothing on one rank"))
    ]


def test_a_failure_under_dcp_is_raised_on_every_rank_with_its_cause(tmp_path: Path) -> None:
    zero, one = run_ranks(foreign_saves_fail, 2, str(tmp_path))
    for case, word in enumerate(("No space left", "nothing")):
        assert zero[case][0].startswith("SaveFailedError 1 ") and word in zero[case][0]
        assert word in one[case][0] and "rank 1" in one[case][0]
        assert zero[case][1] == one[case][1] == f"[{2 * case + 1}]"


class Held(dcp.FileSystemWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go_on = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.go_on.wait(seconds(60)), "somebody waits for this save"
        return super().write_data(plan, planner)


def test_finalizing_without_blocking_does_not_wait_for_dcp(tmp_path: Path) -> None:
    writer = Held(tmp_path)
    handle = smckpt.async_save({"w": torch.ones(2)}, storage_writer=writer)
    assert smckpt.maybe_finalize_async_calls(blocking=False) == []
    writer.go_on.set()
    assert smckpt.maybe_finalize_async_calls() == [handle.number]


def test_a_second_save_by_dcp_waits_for_the_first(tmp_path: Path) -> None:
    writers = Held(tmp_path / "1"), Held(tmp_path / "2")
    first = smckpt.async_save({"w": torch.ones(2)}, storage_writer=writers[0])
    with ThreadPoolExecutor(1) as other:
        call = other.submit(smckpt.async_save, {"w": torch.ones(2)}, storage_writer=writers[1])
        done, _ = wait([call], 0.3)  # it is held up as long as the first is
        assert not done and not first.done()
        writers[0].go_on.set()
        second = call.result(seconds(60))
    assert first.done() and not second.done()
    writers[1].go_on.set()
    assert smckpt.maybe_finalize_async_calls() == [first.number, second.number]


def test_arguments_that_dcp_does_not_know_are_refused(tmp_path: Path) -> None:
    asked = {
        "groups": [[0]],
        "on_commit": print,
        "metadata": {"note": 1},
        "parallel_state": smckpt.ParallelState(1, rank=0),
        "allow_objects": [Path],
        "sweep": False,
    }
    for name, value in asked.items():
        options = smckpt.SaveOptions(queue="of DCP", **{name: value})
        with pytest.raises(errors.UsageError, match=rf"SaveOptions\({name}=\) has no effect"):
            smckpt.async_save(
                {"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path), options=options
            )
    with pytest.raises(errors.UsageError, match="step= has no effect"):
        smckpt.async_save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter("x"), step=3)
    asked = {"preverify": True, "groups": [[0]], "threads": 8, "timeout": 3.0, "only": ["w"]}
    reader = dcp.FileSystemReader(tmp_path)
    for name, value in asked.items():
        with pytest.raises(errors.UsageError, match=rf"LoadOptions\({name}=\) has no effect"):
            options = smckpt.LoadOptions(**{name: value})
            smckpt.load({"w": torch.ones(2)}, storage_reader=reader, options=options)
    with pytest.raises(errors.UsageError, match="check_keys_matched= has no effect"):
        smckpt.load({"w": torch.ones(2)}, storage_reader=reader, check_keys_matched=False)


def test_queues_of_saves_by_dcp_are_independent(tmp_path: Path) -> None:
    writer = Held(tmp_path / "1")
    first = smckpt.async_save(
        {"w": torch.ones(2)}, storage_writer=writer, options=smckpt.SaveOptions(queue="slow")
    )
    smckpt.save(
        {"w": torch.ones(2)},
        storage_writer=dcp.FileSystemWriter(tmp_path / "2"),
        options=smckpt.SaveOptions(queue="fast"),
    )
    assert not first.done()
    writer.go_on.set()
    assert smckpt.maybe_finalize_async_calls(queue="slow") == [first.number]


def test_an_id_and_a_reader_or_writer_for_another_place_are_refused(tmp_path: Path) -> None:
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    state = {"w": torch.ones(2)}
    for writer in (smckpt.DistributedFileSystemWriter(there), dcp.FileSystemWriter(there)):
        with pytest.raises(errors.UsageError, match="storage_writer is for") as caught:
            smckpt.save(state, checkpoint_id=here, storage_writer=writer)
        assert here in str(caught.value) and there in str(caught.value) and caught.value.remedy
    for reader in (smckpt.DistributedFileSystemReader(there), dcp.FileSystemReader(there)):
        with pytest.raises(errors.UsageError, match="storage_reader is for"):
            smckpt.load(state, checkpoint_id=here, storage_reader=reader)
    assert not list(tmp_path.rglob("data-*"))
