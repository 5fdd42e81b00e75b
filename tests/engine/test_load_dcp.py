"""smckpt.load reads what torch's own checkpoints hold, under any kind and on another mesh."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import smckpt
import smckpt.engine.load as engine_load
import smckpt.engine.load_rounds as load_rounds
from smckpt.cli.app import app
from smckpt.errors import CorruptCheckpointError, KeysMismatchError, TensorMismatchError, UsageError
from tests.engine.test_load_whole import equal
from tests.support.launch import run_ranks
from tests.support.tools import make_fixture
from tests.support.tools.make_dcp_fixture import whole as whole_state

HOW = ("fsdp2", "fsdp1", "plain")


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))


def wrapped(how: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = net()
    if how == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif how == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if seed == 3 else 0.1)
    return model, optimizer


def stepped(model: Any, optimizer: Any) -> None:
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(folder: str) -> None:
    """The same training under each wrapper, saved by stock DCP, and what it holds, whole."""
    for how in HOW:
        model, optimizer = wrapped(how, 3)
        stepped(model, optimizer)
        if how == "fsdp1":
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        weights, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": of_optimizer, "step": 7, "run": {"name": "a"}}
        dcp.save(state, checkpoint_id=f"{folder}/{how}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save, 2, str(folder))
    return folder


def load(folder: str, source: str, how: str, kind: str) -> None:
    """Fill another model, which has stepped or not, and save it with DCP to compare."""
    model, optimizer = wrapped(how, 4)
    with smckpt.sm_state_dict_type(model, smckpt.SMStateDictType[kind]):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"step": 0, "run": {"name": ""}}
        smckpt.load(state, checkpoint_id=f"{folder}/{source}")
    if kind == "FULL":
        with smckpt.sm_state_dict_type(model, smckpt.FULL):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    assert (state["step"], state["run"]) == (7, {"name": "a"}) or dist.get_rank() > 0
    assert optimizer.param_groups[0]["lr"] == 0.5
    if how == "fsdp1":
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    weights, of_optimizer = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": of_optimizer},
        checkpoint_id=f"{folder}/{source}-{how}-{kind}",
    )


def whole(place: Path) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = {}
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    planner = _EmptyStateDictLoadPlanner()
    reader = dcp.FileSystemReader(place)
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    flat = {f"model.{k}": v for k, v in state["model"].items()}
    for name, slots in state["optimizer"]["state"].items():
        flat |= {f"optimizer.{name}.{slot}": value for slot, value in slots.items()}
    return flat


WAYS = [
    ("fsdp2", "fsdp2", "LOCAL"),
    ("fsdp2", "fsdp2", "FULL"),
    ("fsdp2", "fsdp1", "SHARDED"),
    ("fsdp1", "fsdp2", "SHARDED"),
    ("fsdp1", "fsdp1", "LOCAL"),
    ("plain", "fsdp2", "LOCAL"),
]
QUICK = [(2, *WAYS[0]), (3, *WAYS[2])]
SLOW = [(world, *way) for world in (1, 2, 3) for way in WAYS if (world, *way) not in QUICK]


@pytest.mark.parametrize(
    ("world", "source", "how", "kind"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in SLOW)],
)
def test_a_live_state_is_filled_bit_for_bit(saved, world, source, how, kind):
    run_ranks(load, world, str(saved), source, how, kind)
    found, wanted = whole(saved / f"{source}-{how}-{kind}"), whole(saved / source)
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_one_process_fills_a_plain_model(saved):
    model, optimizer = wrapped("plain", 4)
    with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"step": 0, "run": {"name": ""}}
    smckpt.load(state, checkpoint_id=saved / "fsdp2")
    wanted = whole(saved / "fsdp2")
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[f"model.{name}"])
    assert state["step"] == 7 and optimizer.param_groups[0]["lr"] == 0.5


def test_without_a_target_it_gives_the_whole_state(saved):
    state = smckpt.load(checkpoint_id=saved / "fsdp2")
    assert sorted(state) == ["model", "optimizer", "run", "step"] and state["run"] == {"name": "a"}
    assert torch.equal(state["model"]["0.weight"], whole(saved / "fsdp2")["model.0.weight"])


def test_a_state_of_other_names_or_shapes_is_refused_before_it_is_changed(saved):
    wide = {"model": {**net().state_dict(), "0.weight": torch.zeros(6, 6)}}
    with pytest.raises(TensorMismatchError, match="0.weight"):
        smckpt.load(wide, checkpoint_id=saved / "fsdp2")
    less = {"model": {"0.weight": torch.zeros(5, 6)}}
    with pytest.raises(KeysMismatchError, match="0.bias"):
        smckpt.load(less, checkpoint_id=saved / "fsdp2")
    assert not less["model"]["0.weight"].any()


def test_a_changed_byte_is_found(tmp_path):
    dcp.save({"w": torch.arange(5000.0)}, checkpoint_id=tmp_path / "a", no_dist=True)
    (file,) = (tmp_path / "a").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.find(torch.arange(700.0, 704.0).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        smckpt.load({"w": torch.zeros(5000)}, checkpoint_id=tmp_path / "a")


def test_a_single_file_is_loaded_too(tmp_path):
    torch.save({"model": {"w": torch.arange(6.0)}, "step": 3}, tmp_path / "a.pt")
    state = {"model": {"w": torch.zeros(6)}, "step": 0}
    smckpt.load(state, checkpoint_id=tmp_path / "a.pt")
    assert torch.equal(state["model"]["w"], torch.arange(6.0)) and state["step"] == 3


def test_files_of_tensor_parallel_ranks_are_refused_by_name(tmp_path):
    for rank in range(2):
        (tmp_path / f"mp_rank_{rank:02d}").mkdir()
        torch.save(
            {"model": {"w": torch.ones(2)}}, tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        )
    with pytest.raises(UsageError, match="Megatron-LM"):
        smckpt.load({"model": {"w": torch.zeros(2)}}, checkpoint_id=tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["model.safetensors", ".metadata", "shard-00001-model-00001-of-00001.safetensors"]
)
def test_a_pipe_under_the_name_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(smckpt.CheckpointNotFoundError, match="no committed checkpoint"):
        smckpt.load({"a": torch.ones(1)}, checkpoint_id=tmp_path)
    with pytest.raises(smckpt.CheckpointError, match="the path is a file"):
        smckpt.load({"a": torch.ones(1)}, checkpoint_id=tmp_path / name)


def fails_to_look(folder: str) -> str:
    """A load whose first rank meets an error that is none of smckpt's while it looks."""
    odd = {"side_effect": ZeroDivisionError("odd")}
    with (
        mock.patch.object(engine_load, "open_any", **odd),
        mock.patch.object(load_rounds, "open_any", **odd),
    ):
        try:
            smckpt.load({"a": torch.ones(1)}, checkpoint_id=folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_another_kind_reaches_every_rank_too(tmp_path: Path) -> None:
    smckpt.save({"a": torch.ones(1)}, checkpoint_id=tmp_path)
    zero, one = run_ranks(fails_to_look, 2, str(tmp_path))
    assert "odd" in zero
    assert "odd" in one and "rank 0" in one


@pytest.mark.parametrize("fixture", sorted(make_fixture.ROOT.glob("dcp-*")), ids=lambda p: p.name)
def test_what_an_older_torch_saved_is_loaded_and_converted(fixture, tmp_path):
    """Of two ranks, by the torch that its name has (tests/support/tools/make_dcp_fixture.py)."""
    wanted = whole_state()
    smckpt.convert(fixture, tmp_path / "ours", to="smckpt")
    for place in (fixture, tmp_path / "ours"):
        assert equal(smckpt.load(checkpoint_id=place), wanted)
        part = {"model": {name: torch.zeros_like(t) for name, t in wanted["model"].items()}}
        smckpt.load(part, checkpoint_id=place)
        assert equal(part["model"], wanted["model"])
    smckpt.convert(tmp_path / "ours", tmp_path / "back", to="dcp")
    assert equal(smckpt.load(checkpoint_id=tmp_path / "back"), wanted)


def test_verify_reads_what_torch_saved_and_tells_a_changed_byte(tmp_path, capsys):
    def verified(place: Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            app(["verify", str(place)])
        return ended.value.code, capsys.readouterr().out

    place = tmp_path / "dcp"
    shutil.copytree(make_fixture.ROOT / "dcp-2.6.0", place)
    assert verified(place) == (
        0,
        "ok: 7 tensors in 2 files, 326 B, of torch.distributed.checkpoint (DCP)\n",
    )
    torch.save({"w": torch.ones(3)}, tmp_path / "one.pt")
    assert verified(tmp_path / "one.pt")[0] == 0
    for other in (place, tmp_path / "one.pt"):
        with pytest.raises(UsageError, match="leave --quick out"):
            app(["verify", "--quick", str(other)])
    file = place / "__1_0.distcp"
    data = file.read_bytes()
    at = data.index(torch.tensor([66.0, 68.0]).numpy().tobytes())
    file.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    status, said = verified(place)
    assert status == 1 and "optimizer.state.weight.exp_avg" in said and "__1_0.distcp" in said


def test_older_releases_of_torch_are_among_the_fixtures():
    assert {"dcp-2.6.0", "dcp-2.9.1"} <= {place.name for place in make_fixture.ROOT.iterdir()}
