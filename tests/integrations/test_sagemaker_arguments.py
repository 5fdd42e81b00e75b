"""The door to Amazon SMP: arguments that its documentation names, each in one process or four."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import smckpt
from smckpt.integrations import sagemaker
from smckpt.integrations.sagemaker.context_parallel.utils import setup_transformer_engine_cp_groups
from smckpt.integrations.sagemaker.distributed.checkpoint import (
    s3_filesystem,
    state_dict_loader,
    state_dict_saver,
    state_dict_utils,
)
from smckpt.integrations.sagemaker.distributed.checkpoint.filesystem import (
    DistributedFileSystemReader,
    DistributedFileSystemWriter,
)
from smckpt.integrations.sagemaker.grad_norm import clip_grad_norm_
from smckpt.integrations.sagemaker.moe.moe_config import MoEConfig
from smckpt.run import provide
from tests.support.launch import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    sagemaker.state.reset()
    dist.destroy_process_group()


# -- init ------------------------------------------------------------------------------------------


def test_parameters_of_smps_layers_are_accepted_and_change_nothing(
    one_process: None, caplog: pytest.LogCaptureFixture
) -> None:
    given = {
        "random_seed": 12345,
        "activation_loading_horizon": 4,
        "fsdp_cache_flush_warnings": True,
        "allow_empty_shards": False,
        "sm_activation_offloading": False,
    }
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with caplog.at_level(logging.INFO, logger="smckpt"):
        sagemaker.init(given)
    assert torch.equal(torch.get_rng_state(), before)
    assert [line for line in caplog.messages if "no effect" in line] == [
        f"{name}={value!r} has no effect here" for name, value in given.items()
    ]
    assert sagemaker.is_initialized() and sagemaker.state.world_size == 1


def test_degrees_are_read_from_a_file_and_from_the_launchers_variable(
    one_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "smp.json"
    file.write_text(json.dumps({"hybrid_shard_degree": 1, "random_seed": 3}))
    sagemaker.init(file)
    assert sagemaker.state.hybrid_shard_degree == 1
    sagemaker.init(str(file))
    assert sagemaker.state.hybrid_shard_degree == 1
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"hybrid_shard_degree": 0}')
    sagemaker.init()
    assert sagemaker.state.hybrid_shard_degree == 0
    sagemaker.state.reset()
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"tensor_parallel_size": 2}')
    with pytest.raises(smckpt.UsageError, match="tensor_parallel_size is not a known parameter"):
        sagemaker.init()
    for text, words in (("{", "is not JSON"), ("[1]", "is not an object")):
        file.write_text(text)
        with pytest.raises(smckpt.UsageError, match=words) as raised:
            sagemaker.init(file)
        assert str(file) in str(raised.value)
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", text)
        with pytest.raises(smckpt.UsageError, match=words):
            sagemaker.init()
    assert not sagemaker.is_initialized()


def test_translate_on_save_is_there_from_init_on(one_process: None) -> None:
    """`translate_on_save` of torch's own config, by import as under `smckpt run`, and undone."""
    stock = FSDP.state_dict_type
    with pytest.raises(TypeError):
        FullStateDictConfig(translate_on_save=False)
    for _ in range(2):  # a second init extends nothing twice
        sagemaker.init({})
        assert not FullStateDictConfig(translate_on_save=False).translate_on_save
    with provide(["sagemaker"]):
        assert FullStateDictConfig().translate_on_save
    assert FullStateDictConfig().translate_on_save
    sagemaker.state.reset()
    assert FSDP.state_dict_type is stock
    with pytest.raises(TypeError):
        FullStateDictConfig(translate_on_save=False)


# -- save and load ---------------------------------------------------------------------------------


def test_a_region_and_options_of_s3_reach_the_store(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, endpoint = os.environ["SMCKPT_S3_REGION"], os.environ["SMCKPT_S3_ENDPOINT"]
    monkeypatch.delenv("SMCKPT_S3_REGION")
    monkeypatch.delenv("SMCKPT_S3_ENDPOINT")
    here: dict[str, Any] = {"s3_region": region, "s3client_config": {"endpoint": endpoint}}
    where = f"{s3_root}/step1"
    state_dict_saver.async_save({"a": torch.ones(3)}, checkpoint_id=where, **here)
    state_dict_saver.maybe_finalize_async_calls(blocking=True)
    target = {"a": torch.zeros(3)}
    state_dict_loader.load(target, checkpoint_id=where, **here)
    assert target["a"].tolist() == [1, 1, 1]
    state_dict_saver.save({"a": torch.full((3,), 2.0)}, checkpoint_id=where, **here)
    state_dict_loader.load(target, checkpoint_id=where, **here)
    assert target["a"].tolist() == [2, 2, 2]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**here, "s3client_config": {"endpoint": "not a URL"}}, "not a URL"),
        ({**here, "s3_region": "no region"}, "no region"),
    ]
    for given, words in wrong:
        for act in (state_dict_saver.save, state_dict_loader.load):
            with pytest.raises(smckpt.CheckpointError, match=words):
                act({"a": torch.zeros(3)}, checkpoint_id=where, **given)


class Saves(DefaultSavePlanner):
    planned = 0

    def create_local_plan(self) -> SavePlan:
        self.planned += 1
        return super().create_local_plan()


class Loads(DefaultLoadPlanner):
    planned = 0

    def create_local_plan(self) -> LoadPlan:
        self.planned += 1
        return super().create_local_plan()


def test_planners_plan(one_process: None, tmp_path: Path) -> None:
    heard: list[str] = []
    saves, loads = Saves(), Loads()
    writer = DistributedFileSystemWriter(tmp_path, pre_write_hooks=[lambda _: heard.append("pre")])
    state_dict_saver.save({"a": torch.ones(3)}, storage_writer=writer, planner=saves)
    target = {"a": torch.zeros(3)}
    state_dict_loader.load(
        target, storage_reader=DistributedFileSystemReader(tmp_path), planner=loads
    )
    assert target["a"].tolist() == [1, 1, 1]
    assert (saves.planned, loads.planned, heard) == (1, 1, ["pre"])
    after = DistributedFileSystemWriter(tmp_path / "b", post_write_hooks=[lambda _: None])
    with pytest.raises(Exception, match="post_write_hooks= is not honoured together"):
        state_dict_saver.save({"a": torch.ones(3)}, storage_writer=after, planner=saves)


def test_names_are_compared_unless_told_otherwise(tmp_path: Path) -> None:
    state_dict_saver.save({"m": {"a": torch.ones(3), "b": torch.ones(1)}}, checkpoint_id=tmp_path)
    part = {"m": {"a": torch.zeros(3)}}
    with pytest.raises(smckpt.CheckpointError, match=r"m\.b"):
        state_dict_loader.load(part, checkpoint_id=tmp_path)
    assert part["m"]["a"].tolist() == [0, 0, 0]
    state_dict_loader.load(part, checkpoint_id=tmp_path, check_keys_matched=False)
    assert part["m"]["a"].tolist() == [1, 1, 1]


# -- what stands beside checkpoints ----------------------------------------------------------------


def test_a_request_is_tried_three_times_while_the_store_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    left: list[Exception] = []
    calls: list[int] = []

    @s3_filesystem.retry_with_jitter
    def read(a: int, *, b: int) -> int:
        calls.append(a)
        if left:
            raise left.pop(0)
        return a + b

    store = smckpt.StorageError("the store is away", remedy="wait")
    left[:] = [store, OSError("no route")]
    assert read(1, b=2) == 3 and len(calls) == 3
    assert len(waits) == 2 and 0 <= waits[0] <= 1 and 0 <= waits[1] <= 2
    left[:] = [store] * 3
    with pytest.raises(smckpt.StorageError, match="the store is away"):
        read(1, b=2)
    assert len(calls) == 6
    left[:] = [ValueError("not the store's")]
    with pytest.raises(ValueError, match="not the store's"):
        read(1, b=2)
    assert len(calls) == 7 and read.__name__ == "read"


def test_smps_layers_are_refused_by_name() -> None:
    for act, words in (
        (lambda: MoEConfig(smp_moe=True), "MoEConfig does not exist here"),
        (lambda: setup_transformer_engine_cp_groups(None, [0], None), "context_parallel does not"),
    ):
        with pytest.raises(smckpt.UsageError, match=words):
            act()


# -- FSDP, on several ranks ------------------------------------------------------------------------


def sharded_as_told(degrees: list[dict[str, int]]) -> list[tuple[str, list[int], int, float]]:
    """For each set of degrees: what FSDP(model) does, whose groups the script does not name."""
    out = []
    for given in degrees:
        sagemaker.init(given)
        torch.manual_seed(0)
        model = FSDP(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
            post_param_init_fn=None,  # type: ignore[call-arg]
            device_id=CPU,
        )
        model(torch.full((1, 8), dist.get_rank() + 1.0)).sum().backward()
        try:
            norm = round(float(clip_grad_norm_(model, 1e-3)), 3)
        except smckpt.UsageError as error:
            assert "tensor or expert parallelism" in str(error)
            norm = -1.0
        inner: Any = model.module[0]
        held = sum(p.numel() for p in model.parameters())
        ranks = dist.get_process_group_ranks(inner.process_group)
        out.append((inner.sharding_strategy.name, ranks, held, norm))
        sagemaker.state.reset()
    return out


def kinds() -> list[str]:
    """What differs inside `sm_state_dict_type` of torch's own types."""
    torch.manual_seed(0)
    given = torch.nn.Linear(4, 3)
    expected = given.weight.detach().clone()
    model = FSDP(given, device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with FSDP.summon_full_params(model):
        expected = model.module.weight.detach().clone()
    rank, out = dist.get_rank(), []
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    for kind, chosen in (
        (StateDictType.FULL_STATE_DICT, config),
        (StateDictType.SHARDED_STATE_DICT, None),
    ):
        before = FSDP.get_state_dict_type(model)
        with state_dict_utils.sm_state_dict_type(model, kind, state_dict_config=chosen):
            inside = FSDP.get_state_dict_type(model).state_dict_type
            weight = model.state_dict().get("weight")
            moments = FSDP.optim_state_dict(model, optimizer)["state"]
        full = kind is StateDictType.FULL_STATE_DICT
        mine = expected if full else expected.chunk(2)[rank]
        if full and rank:
            right = weight is None
        else:
            right = torch.equal(weight if full else weight.local_shards()[0].tensor, mine)
        same = inside is kind and FSDP.get_state_dict_type(model) == before
        out += [] if right and same and "weight" in moments else [kind.name]
    try:
        FSDP(torch.nn.Linear(2, 2), device_id=CPU, post_param_init_fn=print)  # type: ignore[call-arg]
    except smckpt.UsageError as error:
        assert "post_param_init_fn" in str(error)
        return out
    return [*out, "post_param_init_fn= was not refused"]


def by_one_rank() -> list[str]:
    """What differs where rank 0 alone takes the state of a module inside FSDP, as a script that
    saves adapters does."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    model = FSDP(net, device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
    found: dict[str, Any] = {}
    with (
        state_dict_utils.sm_state_dict_type(model, smckpt.LOCAL),
        FSDP.summon_full_params(model.module[0], writeback=False, rank0_only=True),
    ):
        if dist.get_rank() == 0:
            found = {name: t.clone() for name, t in model.module.state_dict().items()}
        dist.barrier()
    out = [
        name for name in ("0.weight", "0.bias") if found and not found[name].equal(expected[name])
    ]
    out += [] if found or dist.get_rank() else ["nothing"]
    after = model.module.state_dict()  # gathers again
    return out + [name for name in expected if not after[name].equal(expected[name])]


def in_the_door(degrees: list[dict[str, int]]) -> tuple[list[tuple[Any, ...]], list[str]]:
    warnings.simplefilter("ignore")
    with provide(["sagemaker"]):
        two = dist.get_world_size() == 2
        return sharded_as_told(degrees), [*kinds(), *by_one_rank()] if two else []


def test_fsdp_shards_as_the_degrees_say_and_its_kinds_of_state_are_torchs() -> None:
    degrees = [{}, {"hybrid_shard_degree": 2}, {"hybrid_shard_degree": 1}]
    ranks = run_ranks(in_the_door, 2, [*degrees, {"tensor_parallel_degree": 2}])
    ((_, _, _, norm), *_) = ranks[0][0]
    assert norm > 0
    for rank, (told, different) in enumerate(ranks):
        assert different == []
        assert told == [
            ("FULL_SHARD", [0, 1], 41, norm),
            ("FULL_SHARD", [0, 1], 41, norm),
            ("NO_SHARD", [0, 1], 81, norm),
            ("NO_SHARD", [rank], 81, -1.0),
        ]


@pytest.mark.long
def test_fsdp_is_hybrid_where_the_degrees_leave_replicas() -> None:
    degrees = [{}, {"hybrid_shard_degree": 2}, {"tensor_parallel_degree": 2}]
    ranks = run_ranks(in_the_door, 4, degrees)
    ((_, _, _, norm), *_) = ranks[0][0]
    for rank, (told, _) in enumerate(ranks):
        assert told == [
            ("FULL_SHARD", [0, 1, 2, 3], 21, norm),
            ("HYBRID_SHARD", [0, 1] if rank < 2 else [2, 3], 41, norm),
            ("FULL_SHARD", [rank % 2, rank % 2 + 2], 41, -1.0),
        ]
