"""A checkpoint in another format has the same names and bits, whichever way it goes."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import smckpt
from smckpt import convert, verify_checkpoint
from smckpt.cli.app import app
from smckpt.cli.output import print_error
from smckpt.errors import CorruptCheckpointError, StateError, UsageError
from smckpt.formats.conversion import whole_state
from tests.checkpoint.test_reshard import saved as saved_synthetic
from tests.state_dict.test_differing_objects import FORMS, plain, save_all
from tests.state_dict.test_made import CONTAINERS, TENSORS, Kept, described
from tests.support.launch import run_ranks
from tests.support.limits import seconds

State = dict[str, Any]


def trained() -> tuple[Any, Any]:
    """A model with an uneven first dimension and a buffer, under FSDP2, after a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def save(folder: str) -> None:
    model, optimizer = trained()
    own = {
        "step": 7,
        "name": "run",
        "betas": (0.5, float("inf")),
        "scheduler": {"last": 3, "lr": [0.25]},
    }
    for kind in (smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL):
        with smckpt.sm_state_dict_type(model, kind):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **own}
        smckpt.save(state, checkpoint_id=f"{folder}/{kind.name}")
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        **own,
    }
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    if dist.get_rank() == 0:
        dcp_to_torch_save(f"{folder}/dcp", f"{folder}/stock.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save, 2, str(folder))
    return folder


def flat(value: Any, path: tuple[Any, ...] = ()) -> State:
    """Leaves by dotted name, tensors and values; a list of plain values is a leaf."""
    if isinstance(value, dict):
        found = [flat(inner, (*path, key)) for key, inner in value.items()]
    elif isinstance(value, list) and any(isinstance(v, (dict, torch.Tensor)) for v in value):
        found = [flat(inner, (*path, index)) for index, inner in enumerate(value)]
    else:
        return {".".join(map(str, path)): value}
    return {name: leaf for one in found for name, leaf in one.items()}


def assert_same(found: Any, wanted: Any) -> None:
    ours, theirs = flat(found), flat(wanted)
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype and ours[name].shape == value.shape, name
            assert torch.equal(ours[name], value), name
        else:
            assert repr(ours[name]) == repr(value), name


def stock(saved: Path) -> State:
    return torch.load(saved / "stock.pt", weights_only=False)


@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED", "FULL"])
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_every_kind_comes_out_for_torch_bit_for_bit(saved, tmp_path, kind, to):
    target = tmp_path / "out"
    report = convert(saved / kind, target, to=to)
    assert (report.source_format, report.format) == ("smckpt", to)
    if to == "dcp":
        dcp_to_torch_save(target, tmp_path / "state.pt")
        found = torch.load(tmp_path / "state.pt", weights_only=False)
    else:
        found = torch.load(target, weights_only=True, mmap=True)
    wanted = smckpt.load(checkpoint_id=saved / kind)
    assert_same(found, wanted)
    assert report.tensors == sum(isinstance(v, torch.Tensor) for v in flat(wanted).values())
    assert os.listdir(tmp_path).count("out") == 1 and not list(tmp_path.glob("*.unfinished"))


def load_stock(folder: str) -> None:
    """Stock DCP fills the live state of two ranks, sharded otherwise than it was saved."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    model, optimizer = trained()
    with torch.no_grad():
        for tensor in (
            *model.parameters(),
            *(t for s in optimizer.state.values() for t in s.values()),
        ):
            tensor.zero_()
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 0,
    }
    dcp.load(state, checkpoint_id=f"{folder}/as_dcp")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    dcp.save({**state, "name": "run"}, checkpoint_id=f"{folder}/again")


def test_stock_dcp_loads_it_under_two_ranks(saved, tmp_path):
    convert(saved / "SHARDED", tmp_path / "as_dcp", to="dcp")
    run_ranks(load_stock, 2, str(tmp_path))
    dcp_to_torch_save(tmp_path / "again", tmp_path / "again.pt")
    found = torch.load(tmp_path / "again.pt", weights_only=False)
    wanted = stock(saved)
    assert_same(found, {key: wanted[key] for key in ("model", "optimizer", "step", "name")})


@pytest.mark.parametrize("source", ["dcp", "stock.pt"])
@pytest.mark.parametrize("shard", [1, 3])
def test_what_torch_wrote_becomes_ours_for_any_number_of_ranks(saved, tmp_path, source, shard):
    report = convert(saved / source, tmp_path / "ours", to="smckpt", shard=shard)
    assert report.ranks == shard and verify_checkpoint(tmp_path / "ours").ok
    assert_same(smckpt.load(checkpoint_id=tmp_path / "ours"), stock(saved))
    (one,) = smckpt.find_checkpoints(str(tmp_path))
    assert one.step == 7 and one.kind == ("FULL" if shard == 1 else "SHARDED")


def test_there_and_back_is_the_same_state(saved, tmp_path):
    convert(saved / "dcp", tmp_path / "ours", to="smckpt")
    convert(tmp_path / "ours", tmp_path / "a.pt", to="torch")
    convert(saved / "dcp", tmp_path / "b.pt", to="torch")
    assert_same(torch.load(tmp_path / "a.pt"), stock(saved))
    assert_same(torch.load(tmp_path / "b.pt"), stock(saved))


def test_several_groups_come_out_and_what_ranks_hold_apart_is_refused_by_name(tmp_path):
    source = saved_synthetic(tmp_path / "source", "hsdp")
    for to in ("dcp", "torch"):
        with pytest.raises(StateError, match="model.rng, rank are different on different ranks"):
            convert(source, tmp_path / "out", to=to)
    with pytest.raises(UsageError, match="rank=9"):
        convert(source, tmp_path / "out", to="torch", rank=9)
    convert(source, tmp_path / "of2.pt", to="torch", rank=2)
    convert(source, tmp_path / "none.pt", to="torch", ignore=["rank", "*.rng"])
    found, less = torch.load(tmp_path / "of2.pt"), torch.load(tmp_path / "none.pt")
    assert found["rank"] == 2 and found["model"]["rng"].reshape(1).view(torch.uint8)[0] == 2
    assert "rank" not in less and "rng" not in less["model"]
    wanted = smckpt.load(checkpoint_id=source)
    assert torch.equal(less["model"]["w"], wanted["model"]["w"])


DTYPES = (
    torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint16,
    torch.uint64, torch.bool, torch.complex64,
)  # fmt: skip


def odd_state() -> State:
    torch.manual_seed(0)
    raw = torch.randint(0, 255, (48,), dtype=torch.uint8)
    kinds = {str(d)[6:]: (raw % 2 if d is torch.bool else raw).clone().view(d) for d in DTYPES}
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "kinds": kinds, "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "turned": base.t(),
        "part": base[1:3, 2:4], "list": [torch.ones(2), {"x": torch.zeros(1)}], "none": None,
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]), "big": 1 << 80, "bytes": b"\0\xff",
    }  # fmt: skip


@pytest.mark.parametrize("source", ["pt", "pt before 1.6", "dcp", "ours"])
@pytest.mark.parametrize("to", ["dcp", "torch", "smckpt"])
def test_dtypes_strides_and_values_survive_every_way(tmp_path, source, to):
    state = odd_state()
    at = tmp_path / "source"
    if source.startswith("pt"):
        torch.save(state, at, _use_new_zipfile_serialization=source == "pt")
    elif source == "dcp":
        dcp.save(state, checkpoint_id=at, no_dist=True)
    else:
        smckpt.save(dict(state), checkpoint_id=at)
    out = tmp_path / "out"
    convert(at, out, to=to)
    if to == "dcp":
        dcp_to_torch_save(out, tmp_path / "out.pt")
    found = smckpt.load(checkpoint_id=out) if to == "smckpt" else torch.load(
        out if to == "torch" else tmp_path / "out.pt", weights_only=to == "torch"
    )  # fmt: skip
    for name, value in flat(state).items():
        got = flat(found)[name]
        if isinstance(value, torch.Tensor):
            assert got.dtype == value.dtype and got.shape == value.shape, name
            value, got = (t.contiguous().view(torch.uint8) if t.ndim else t for t in (value, got))
            assert torch.equal(got, value), name
        else:
            assert got == value and type(got) is type(value), name


def test_values_that_are_no_plain_data_are_refused_by_name(tmp_path):
    torch.save({"w": torch.ones(2), "odd": {"of": Path("x")}, "fine": 1}, tmp_path / "a.pt")
    with pytest.raises(StateError, match="odd hold objects that are not plain data"):
        convert(tmp_path / "a.pt", tmp_path / "out", to="smckpt")
    assert not (tmp_path / "out").exists()
    report = convert(tmp_path / "a.pt", tmp_path / "out", to="smckpt", ignore=["odd"])
    assert report.ignored == ("odd",) and sorted(smckpt.load(checkpoint_id=tmp_path / "out")) == [
        "fine",
        "w",
    ]
    state = {"w": torch.ones(2), "rng": np.random.RandomState(1).get_state()}
    smckpt.save(state, checkpoint_id=tmp_path / "numpy")
    with pytest.raises(StateError, match="rng.1 hold objects that torch.load"):
        convert(tmp_path / "numpy", tmp_path / "b.pt", to="torch")
    queues = {
        "q": deque([torch.ones(2), 1], 3), "p": deque([1]), "d": [deque([2])],
        "t": {"m": (torch.zeros(2), [deque([torch.ones(1)]), torch.Size([3])])},
    }  # fmt: skip
    smckpt.save(queues, checkpoint_id=tmp_path / "queue")
    left: list[str] = []
    for name in ("p, d, q, t.m.1.0", "d, q, t.m.1.0", "q, t.m.1.0", "t.m.1.0"):
        with pytest.raises(StateError, match=f"] {name} hold objects that torch.load") as refused:
            convert(tmp_path / "queue", tmp_path / "b.pt", to="torch", ignore=left)
        left += re.findall(r'"([^"]+)"', str(refused.value).partition("ignore=")[2])[:2]
    convert(tmp_path / "queue", tmp_path / "b.pt", to="torch", ignore=left)
    convert(tmp_path / "queue", tmp_path / "queue-dcp", to="dcp")
    dcp_to_torch_save(tmp_path / "queue-dcp", tmp_path / "queue.pt")
    found = torch.load(tmp_path / "queue.pt", weights_only=False)
    assert {key: described(found[key]) for key in queues} == {
        key: described(value) for key, value in queues.items()
    }
    convert(tmp_path / "numpy", tmp_path / "dcp", to="dcp")
    read = {"w": torch.zeros(2), "rng": ()}
    dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert (read["rng"][1] == state["rng"][1]).all()
    convert(tmp_path / "dcp", tmp_path / "back", to="smckpt")
    kind, keys, *rest = smckpt.load(checkpoint_id=tmp_path / "back")["rng"]
    assert (kind, *rest) == (state["rng"][0], *state["rng"][2:]) and (keys == state["rng"][1]).all()


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("d.1", {"d": {1: 5, "1": 6}}),
        ("d.1.x", {"d": [torch.ones(2), {"x": 1}], "d.1.x": 7}),
        ("a.b", {"a": {"b": torch.ones(2)}, "a.b": 2}),
    ],
)
def test_two_values_of_one_name_in_dcp_are_refused_by_it(tmp_path, name, state):
    smckpt.save({"w": torch.ones(2), **state}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(StateError, match=f"two values of the state have the name {name} in DCP"):
        convert(tmp_path / "saved", tmp_path / "dcp", to="dcp")
    assert os.listdir(tmp_path) == ["saved"]


def test_counters_and_a_state_without_a_tensor_come_back_from_a_file_of_torch(tmp_path):
    plain = {"none": Counter("aab"), "n": 3}
    for number, state in enumerate(({**plain, "c": Counter(b=torch.ones(2), a=1)}, plain, {})):
        saved, whole, back = (tmp_path / f"{name}{number}" for name in ("saved", "whole", "back"))
        smckpt.save(state, checkpoint_id=saved)
        convert(saved, whole, to="torch")
        convert(whole, back, to="smckpt")
        assert described(smckpt.load(checkpoint_id=back)) == described(
            smckpt.load(checkpoint_id=saved)
        )


def test_weights_of_hugging_face_become_ours(tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    weights = {"a.weight": torch.randn(3, 2), "b.bias": torch.ones(4, dtype=torch.bfloat16)}
    save_file(weights, hub / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    for number, source in enumerate(
        (hub, hub / "model.safetensors", tmp_path / "pytorch_model.bin")
    ):
        convert(source, tmp_path / f"{number}", to="smckpt")
        assert_same(smckpt.load(checkpoint_id=tmp_path / f"{number}"), weights)


def test_a_damaged_source_leaves_nothing(tmp_path):
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = data.find(np.arange(100, 104, dtype=np.float32).tobytes())
    data[at] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    for to in ("smckpt", "dcp", "torch"):
        with pytest.raises(CorruptCheckpointError, match="CRC-32"):
            convert(tmp_path / "a.pt", tmp_path / to, to=to)
    assert sorted(os.listdir(tmp_path)) in (["a.pt"], ["a.pt", "smckpt"])
    with pytest.raises(smckpt.CheckpointNotFoundError):
        smckpt.load(checkpoint_id=tmp_path / "smckpt")


def test_what_is_at_the_target_stays(tmp_path, capsys):
    smckpt.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for to, target in (
        ("dcp", "dir"),
        ("torch", "file"),
        ("smckpt", "dir"),
        ("torch", "dir"),
        ("dcp", "file"),
    ):
        with pytest.raises(smckpt.CheckpointError):
            convert(tmp_path / "a", tmp_path / target, to=to)
    assert (tmp_path / "dir" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("through", ["dcp", "torch"])
def test_the_step_of_a_manager_or_a_framework_comes_back(tmp_path: Path, through: str) -> None:
    forms: tuple[State, ...] = (
        {"step": 3}, {"step": torch.tensor(3)}, {"manager": {"step": 3}},
        {"trainer": {"global_step": 3}}, {"lightning": {"global_step": 3}},
        {"train_state": {"step": torch.tensor(3, dtype=torch.int32)}},
    )  # fmt: skip
    others: tuple[State, ...] = ({"step": torch.ones(3, dtype=torch.int64)}, {"step": -1})
    for number, state in enumerate((*forms, *others)):
        ours, other, back = (tmp_path / f"{one}-{number}" for one in ("ours", "other", "back"))
        smckpt.save({"w": torch.ones(2), **state}, checkpoint_id=ours)
        convert(ours, other, to=through)
        convert(other, back, to="smckpt")
        (found,) = smckpt.find_checkpoints(back)
        assert found.step == (3 if number < len(forms) else None), state


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    smckpt.save({"w": torch.ones(2), "step": 4}, checkpoint_id=tmp_path / "a")
    arguments = [str(tmp_path / "a"), str(tmp_path / "b"), "--to", "dcp"]
    app(["convert", *arguments, "--json"], standalone_mode=False)
    said = json.loads(capsys.readouterr().out)
    assert (said["source_format"], said["format"], said["tensors"], said["values"]) == (
        "smckpt",
        "dcp",
        1,
        1,
    )
    done = subprocess.run(
        [sys.executable, "-m", "smckpt.cli", "convert", *arguments],
        capture_output=True, text=True, timeout=seconds(60), check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "something is there already" in done.stderr


@pytest.mark.parametrize("to", ["dcp", "torch", "smckpt"])
def test_a_managers_checkpoint_is_converted_without_its_ranks_generators(
    tmp_path: Path, to: str
) -> None:
    run_ranks(manage, 2, str(tmp_path / "run"))
    report = convert(tmp_path / "run" / "1", tmp_path / "out", to=to)
    if to != "smckpt":  # ours holds a copy for each rank
        assert report.ignored
    assert all(name.startswith("manager.random.") for name in report.ignored)
    target = {"model": {"weight": torch.zeros(4, 4)}}
    smckpt.load(target, checkpoint_id=report.target, check_keys_matched=False)
    assert torch.equal(target["model"]["weight"], torch.full((4, 4), 3.0))


@pytest.mark.parametrize("rank", [None, 0])
def test_a_file_of_torch_has_no_generators_of_a_manager(tmp_path: Path, rank: int | None) -> None:
    """One process: they do not differ between ranks, and those of NumPy are no plain data."""
    manage(str(tmp_path / "run"))
    report = convert(tmp_path / "run" / "1", tmp_path / "out.pt", to="torch", rank=rank)
    assert {name.split(".")[2] for name in report.ignored} == {"python", "numpy", "torch"}
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(loaded["model"]["weight"], torch.full((4, 4), 3.0))
    report = convert(tmp_path / "run" / "1", tmp_path / "out", to="dcp", rank=rank)
    assert not report.ignored


def manage(root: str) -> None:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # the ranks' differ
    with smckpt.CheckpointManager(root, signals=()) as manager:
        manager.save(1, {"model": {"weight": torch.full((4, 4), 3.0)}}).wait()


def test_a_refusal_names_the_option_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(StateError("no", remedy="leave them out: ignore=[…]; pass rank= too"),
                ["ignore", "rank"])  # fmt: skip
    assert "leave them out: --ignore PATTERN; pass --rank too" in capsys.readouterr().err


def test_a_tensor_by_the_name_of_a_headers_metadata_is_refused(tmp_path: Path) -> None:
    """No reader of safetensors would find it: it stood in the metadata's stead."""
    named = {"__metadata__": torch.ones(2), "w": torch.ones(2)}
    torch.save(named, tmp_path / "file.pt")
    with pytest.raises(StateError, match="'__metadata__'"):
        convert(tmp_path / "file.pt", tmp_path / "ours", to="smckpt")
    with pytest.raises(UsageError, match="'__metadata__'"):
        smckpt.export_hf(
            tmp_path / "file.pt",
            tmp_path / "hf",
            options=smckpt.ExportOptions(against_model=False, naming="module"),
        )
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("name", [*TENSORS, *CONTAINERS])
def test_a_file_of_torch_has_what_torch_itself_would_have_kept(tmp_path: Path, name: str) -> None:
    for number, state in enumerate(
        {"o": kind({**TENSORS, **CONTAINERS}[name]())} for kind in (Kept, lambda value: value)
    ):
        saved, ours, stock = (tmp_path / f"{each}{number}" for each in ("saved", "ours", "stock"))
        smckpt.save(state, checkpoint_id=saved)
        torch.save({key: getattr(value, "value", value) for key, value in state.items()}, stock)
        wanted, ways = torch.load(stock, weights_only=False), [{"weights_only": False}]
        try:
            torch.load(stock, weights_only=True)
            ways += [{"weights_only": True}, {"mmap": True}]
        except pickle.UnpicklingError:
            # arrays, dicts with a default, and values of classes, each named once
            with pytest.raises(StateError, match=r"objects that torch.load\(weights") as refused:
                convert(saved, ours, to="torch")
            named = str(refused.value).partition("] ")[2].partition(" hold ")[0].split(", ")
            assert len(named) == len(set(named)), named
            continue
        convert(saved, ours, to="torch")
        for more in ways:
            assert described(torch.load(ours, **more)) == described(wanted)


def test_large_tensors_in_another_order_are_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_state, "AT_ONCE", 64)
    state = {
        "t": torch.arange(35 * 12 * 4.0).reshape(12, 35, 4).permute(1, 2, 0),
        "e": torch.arange(60).reshape(60, 1).expand(60, 3),
        "none": torch.ones(0, 3),
    }
    smckpt.save(state, checkpoint_id=tmp_path / "saved")
    seen: list[tuple[int, int]] = []
    convert(
        tmp_path / "saved", tmp_path / "ours", to="torch", progress=lambda *now: seen.append(now)
    )
    assert described(torch.load(tmp_path / "ours")) == described(state)
    assert seen[-1] == (60 * 3 * 8 + 35 * 12 * 4 * 4,) * 2


def test_each_rank_that_is_named_gives_an_object_of_its_own(tmp_path: Path) -> None:
    run_ranks(save_all, 2, str(tmp_path))
    for name, forms in FORMS.items():
        source, refused = tmp_path / name / "1", 0
        if name != "tensor, empty" and "array" not in name:
            with pytest.raises(StateError, match=r"own.* are different on different ranks"):
                convert(source, tmp_path / "whole.pt", to="torch")
        for rank, form in enumerate(forms):
            try:
                convert(source, tmp_path / f"{name}{rank}.pt", to="torch", rank=rank)
            except StateError as error:
                assert "weights_only" in str(error)
                refused += 1
                continue
            found = torch.load(tmp_path / f"{name}{rank}.pt")["own"]
            if name != "other keys":  # of these a load without a target has both
                assert plain(found) == plain(form), (name, rank)
        assert refused == ("array" in name)


@pytest.mark.parametrize("zipped", [True, False])
def test_values_in_a_file_of_a_torch_before_1_6_are_loaded(tmp_path: Path, zipped: bool) -> None:
    state = {"w": torch.ones(2), "array": np.arange(3.0), "loss": np.float64(0.5), "step": 7}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    found = smckpt.load(checkpoint_id=tmp_path / "a.pt")
    assert found is not None and found.keys() == state.keys()
    assert found["array"].tolist() == [0, 1, 2] and (found["loss"], found["step"]) == (0.5, 7)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_module_that_was_saved_itself_is_named_in_a_file_of_any_torch(tmp_path, zipped) -> None:
    """In an older file, the id of a module's class stood for damage."""
    at, module = tmp_path / "a.pt", torch.nn.Linear(2, 2)
    torch.save(module, at, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        UsageError, match=r"object of torch\.nn\.modules\.linear\.Linear.*state_dict"
    ):
        convert(at, tmp_path / "no", to="smckpt")
    torch.save({"model": module, "w": torch.ones(2)}, at, _use_new_zipfile_serialization=zipped)
    target = {"w": torch.zeros(2)}
    smckpt.load(target, checkpoint_id=at)
    assert target["w"].tolist() == [1, 1]


def of_numpy(seed: int) -> dict[str, Any]:
    """Arrays alone and inside values, without elements, in another order, and what torch lacks."""
    generator = np.random.RandomState(seed)
    return {
        "w": torch.full((3,), float(seed)), "step": seed, "none": b"", "empty": np.zeros((0, 3)),
        "counts": np.arange(5) + seed, "turned": np.asfortranarray(np.eye(3)[:2] * seed),
        "rng": generator.get_state(), "scalar": np.array(seed),
        "deep": {"list": [np.float32(seed), np.full((2, 2), seed), {"text": np.array(["t"])}]},
    }  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and np.array_equal(a, b)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b


@pytest.mark.parametrize("source", ["dcp", "torch"])
def test_arrays_of_numpy_that_torch_saved_come_into_arrays(tmp_path: Path, source: str) -> None:
    at, state, odd = tmp_path / "theirs", of_numpy(3), source == "torch"
    if odd:  # an object that only its code can make, beside them, costs itself alone
        torch.save({**state, "odd": Path("x")}, at)
    else:
        dcp.save(state, checkpoint_id=at, no_dist=True)
    target = of_numpy(1)
    live = target["counts"]
    smckpt.load(target, checkpoint_id=at, check_keys_matched=not odd)
    assert same(target, state) and target["counts"] is live
    if odd:
        with pytest.raises(StateError, match=r"odd hold objects .*LoadOptions\(only="):
            smckpt.load(checkpoint_id=at)
    only = smckpt.LoadOptions(only=[*state])
    assert same(smckpt.load(checkpoint_id=at, options=only), state)
    convert(at, tmp_path / "ours", to="smckpt", ignore=["odd"])
    found = of_numpy(2)
    smckpt.load(found, checkpoint_id=tmp_path / "ours")
    assert same(found, state)
    smckpt.save(state, checkpoint_id=tmp_path / "saved", step=3)
    convert(tmp_path / "saved", tmp_path / "back", to="dcp")
    for ours, theirs in (("saved", "back"), ("ours", "saved"), ("ours", "theirs")):
        command = ["diff", str(tmp_path / ours), str(tmp_path / theirs), "--ignore", "odd"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0 and done.output.startswith("equal"), done.output
