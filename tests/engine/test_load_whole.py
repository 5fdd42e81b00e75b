"""Loads without a target, of a part, and of what ranks saved differently."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import smckpt
from smckpt import errors
from tests.support.launch import run_ranks
from tests.support.tools import make_fixture


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def equal(a: Any, b: Any) -> bool:
    """Of one kind all the way down, and of one value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def test_a_load_without_a_target_gives_back_what_was_saved(tmp_path: Path) -> None:
    t = torch.arange(6.0)
    counts: dict[str, list[int]] = defaultdict(list)
    state = {
        "model": OrderedDict([("b", t), ("a", t.bool())]),
        "lists": [t, {"x": t, 3: "three"}, (t, 1), [], {}],
        "by number": {0: t, 1: t + 1, 7: {}},
        "empty": {},
        "nothing": [],
        "array": np.arange(4, dtype=np.int16),
        "scalar": torch.tensor(2.5),
        "mixed": {"deep": {"empty": {}, "t": t}},
        "counts": defaultdict(list, t=t),
        "values": {"when": (1, 2), "who": None},
        "step": 4,
    }
    smckpt.save(state, checkpoint_id=tmp_path)
    loaded = smckpt.load(checkpoint_id=tmp_path)
    assert equal(loaded, state), loaded
    assert loaded["counts"].default_factory is list and not counts
    part = smckpt.load(checkpoint_id=tmp_path, options=smckpt.LoadOptions(only=["lists", "step"]))
    assert equal(part, {"lists": state["lists"], "step": 4})
    with pytest.raises(errors.KeysMismatchError, match="'other'"):
        smckpt.load(checkpoint_id=tmp_path, options=smckpt.LoadOptions(only=["other"]))
    with pytest.raises(errors.UsageError, match="there is a target"):
        smckpt.load(
            {"model": {}}, checkpoint_id=tmp_path, options=smckpt.LoadOptions(only=["step"])
        )


@pytest.mark.parametrize("kind", [smckpt.LOCAL, smckpt.SHARDED, None])
def test_an_optimizer_comes_back_by_name_where_its_model_was_known(
    tmp_path: Path, kind: Any
) -> None:
    model, optimizer = trained()
    if kind is None:
        state: dict[str, Any] = {"optimizer": optimizer.state_dict()}
    else:
        with smckpt.sm_state_dict_type(model, kind):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    smckpt.save(state, checkpoint_id=tmp_path)
    loaded = smckpt.load(checkpoint_id=tmp_path)
    names = [0, 1, 2, 3] if kind is None else [n for n, _ in model.named_parameters()]
    assert list(loaded["optimizer"]["state"]) == names
    assert loaded["optimizer"]["param_groups"][0]["params"] == names
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 1e-2
    for name, parameter in zip(names, model.parameters(), strict=True):
        for slot, value in optimizer.state[parameter].items():
            assert torch.equal(loaded["optimizer"]["state"][name][slot], value)
    if kind is None:
        fresh = torch.optim.AdamW(model.parameters())
        fresh.load_state_dict(loaded["optimizer"])


@pytest.mark.parametrize("version", ["1.0", "2.0", "1.1", "2.1"])
def test_checkpoints_of_every_version_load_without_a_target(version: str) -> None:
    loaded = smckpt.load(checkpoint_id=make_fixture.ROOT / f"format-{version}" / "checkpoint")
    assert {"a.weight", "a.bias"} <= set(loaded["optimizer"]["state"])


def test_what_an_older_writer_left_open_is_a_list_where_the_keys_count_from_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of formats 1.0 and 2.0, which did not tell a list from a dict with such keys."""
    from smckpt.engine.saving import save

    encode = save.encode_rows
    monkeypatch.setattr(save, "encode_rows", lambda entries, _: encode(entries))
    t = torch.ones(2)
    state = {
        "rng": [t, t],
        "gaps": {0: t, 2: t},
        "text": {"0": t},
        "optimizer": {"state": {0: {"m": t}}, "param_groups": [{"lr": t[0], "params": [0]}]},
    }
    smckpt.save(state, checkpoint_id=tmp_path)
    assert equal(smckpt.load(checkpoint_id=tmp_path), state)


# -- a part of what was saved ----------------------------------------------------------------------


def test_the_model_alone_loads_under_every_kind_and_what_is_left_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in (smckpt.LOCAL, smckpt.SHARDED, smckpt.FULL):
        model, optimizer = trained()
        with smckpt.sm_state_dict_type(model, kind):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        smckpt.save({**state, "rng": torch.ones(3)}, checkpoint_id=tmp_path / kind.value)
        other, _ = trained(1)
        with smckpt.sm_state_dict_type(other, kind):
            target = {"model": other.state_dict()}
        caplog.clear()
        smckpt.load(target, checkpoint_id=tmp_path / kind.value)
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert list(target) == ["model"]
        assert "the target has no such keys: optimizer, rng, step" in caplog.text


def test_a_part_must_match_and_tensors_at_the_top_are_one_part(tmp_path: Path) -> None:
    t = torch.ones(2)
    smckpt.save({"a": t, "b": t, "model": {"x": t, "y": t, "v": 1}}, checkpoint_id=tmp_path)
    smckpt.load({"model": {"x": t, "y": t, "v": 0}}, checkpoint_id=tmp_path)
    smckpt.load({"a": t, "b": t}, checkpoint_id=tmp_path)
    assert equal(
        smckpt.load(checkpoint_id=tmp_path, options=smckpt.LoadOptions(only=["a"])), {"a": t}
    )
    for target, name in (
        ({"a": t}, "'b'"),
        ({"model": {"x": t, "v": 0}}, "model.y"),
        ({"model": {"x": t, "y": t}}, "model.v"),
        ({"modell": {"x": t}}, "modell.x"),
    ):
        with pytest.raises(errors.KeysMismatchError, match=name):
            smckpt.load(target, checkpoint_id=tmp_path)


def test_a_state_without_anything_is_saved_and_loaded(tmp_path: Path) -> None:
    smckpt.save({}, checkpoint_id=tmp_path)
    assert smckpt.load(checkpoint_id=tmp_path) == {}
    assert smckpt.load({}, checkpoint_id=tmp_path) == {}
    with pytest.raises(errors.StateError, match="None"):
        smckpt.save(None, checkpoint_id=tmp_path)


# -- targets as people bring them ------------------------------------------------------------------


class Recorder:
    """A Stateful that says when it is asked."""

    def __init__(self, name: str, log: list[str], value: int = 0) -> None:
        self.name, self.log, self.value = name, log, value

    def state_dict(self) -> dict[str, Any]:
        self.log.append(f"take {self.name}")
        return {"value": self.value, "t": torch.full((2,), float(self.value))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log.append(f"give {self.name}")
        assert state["t"][0] == state["value"]
        self.value = state["value"]


def test_objects_are_asked_in_the_order_of_their_keys(tmp_path: Path) -> None:
    log: list[str] = []
    made = {name: Recorder(name, log, n) for n, name in enumerate(("z", "a", "m"))}
    smckpt.save({"x": made, "b": Recorder("b", log)}, checkpoint_id=tmp_path)
    assert log == ["take b", "take a", "take m", "take z"]
    log.clear()
    fresh = {name: Recorder(name, log, 9) for name in ("m", "z", "a")}
    smckpt.load({"x": fresh, "b": Recorder("b", log)}, checkpoint_id=tmp_path)
    assert log == [f"{do} {name}" for do in ("take", "give") for name in ("b", "a", "m", "z")]
    assert {name: one.value for name, one in fresh.items()} == {"z": 0, "a": 1, "m": 2}


class Guarded(dict):  # type: ignore[type-arg]
    """A user's dict that takes no foreign values."""

    def __setitem__(self, key: Any, value: Any) -> None:
        assert not isinstance(value, dict), key
        super().__setitem__(key, value)


def test_the_users_dict_is_not_written_into_for_objects(tmp_path: Path) -> None:
    log: list[str] = []
    smckpt.save({"s": Recorder("s", log, 4), "step": 7}, checkpoint_id=tmp_path)
    ours = Recorder("s", log)
    target = Guarded({"s": ours, "step": 0})
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target == {"s": ours, "step": 7} and ours.value == 4
    other = Guarded({"s": ours, "step": 0, "more": 1})
    with pytest.raises(errors.KeysMismatchError):
        smckpt.load(other, checkpoint_id=tmp_path)
    assert other == {"s": ours, "step": 0, "more": 1}


class Flat(torch.optim.SGD):
    """An optimizer whose state dict is flat, as some wrappers give it."""

    def state_dict(self) -> dict[str, Any]:
        whole = super().state_dict()
        return {f"{i}.{k}": v for i, slots in whole["state"].items() for k, v in slots.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict


def test_an_optimizer_with_a_flat_state_dict_is_an_object_like_others(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = Flat(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {key: value.clone() for key, value in optimizer.state_dict().items()}
    smckpt.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    optimizer.step()
    smckpt.load({"optimizer": optimizer}, checkpoint_id=tmp_path)
    assert equal(optimizer.given, saved) and len(saved) == 2


def test_tensors_on_the_meta_device_are_replaced_by_what_was_saved(tmp_path: Path) -> None:
    model, _ = trained()
    smckpt.save({"model": model.state_dict(), "epoch": 2}, checkpoint_id=tmp_path)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    target = {"model": empty.state_dict(), "epoch": 0}
    own = target["model"]
    smckpt.load(target, checkpoint_id=tmp_path)
    assert target["model"] is own and target["epoch"] == 2
    empty.load_state_dict(own, assign=True)
    for ours, theirs in zip(empty.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_module_on_the_meta_device_gets_what_was_saved(tmp_path: Path) -> None:
    model, _ = trained()
    smckpt.save({"model": model}, checkpoint_id=tmp_path)
    _, second = model
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    empty[1] = nn.Linear(5, 3)  # a part of it is in memory, where an optimizer may hold it
    held = empty[1].weight
    smckpt.load({"model": empty}, checkpoint_id=tmp_path)
    assert empty[1].weight is held and torch.equal(held, second.weight)
    for ours, theirs in zip(empty.parameters(), model.parameters(), strict=True):
        assert isinstance(ours, nn.Parameter) and torch.equal(ours, theirs)


# -- two ranks -------------------------------------------------------------------------------------


def of_two(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    told: dict[str, Any] = {}

    # without a target
    for kind in (smckpt.LOCAL, smckpt.SHARDED):
        with smckpt.sm_state_dict_type(model, kind):
            state = {"model": model.state_dict(), "rank": rank, "own": torch.full((1,), rank)}
        smckpt.save(state, checkpoint_id=f"{folder}/{kind.value}")
        loaded = smckpt.load(checkpoint_id=f"{folder}/{kind.value}")
        told[kind.value] = equal(
            loaded, {"model": whole, "rank": rank, "own": torch.full((1,), rank)}
        )

    # what rank 0 alone saved
    for kind in (smckpt.LOCAL, smckpt.SHARDED):
        with smckpt.sm_state_dict_type(model, kind):
            state = {"model": model.state_dict()}
        if rank == 0:
            state |= {"epoch": 5, "table": torch.arange(3.0)}
        smckpt.save(state, checkpoint_id=f"{folder}/zero-{kind.value}")
        target = {"model": state["model"], "epoch": 0, "table": torch.zeros(3)}
        smckpt.load(target, checkpoint_id=f"{folder}/zero-{kind.value}")
        whole_too = smckpt.load(
            checkpoint_id=f"{folder}/zero-{kind.value}", options=smckpt.LoadOptions(only=["epoch"])
        )
        told[f"zero {kind.value}"] = (target["epoch"], target["table"].tolist(), whole_too)

    # a mesh without this rank
    alone = DeviceMesh("cpu", [0])
    part = DTensor.from_local(torch.arange(4.0) if rank == 0 else torch.empty(0), alone, [Shard(0)])
    both = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    smckpt.save({"part": {"t": part}, "both": {"t": both}}, checkpoint_id=f"{folder}/submesh")
    for tensor in (part, both):
        tensor._local_tensor.zero_()
    smckpt.load({"part": {"t": part}, "both": {"t": both}}, checkpoint_id=f"{folder}/submesh")
    told["submesh"] = part._local_tensor.tolist(), both._local_tensor.tolist()

    # objects in another order, which talk to each other
    class Talks(Recorder):
        def state_dict(self) -> dict[str, Any]:
            dist.all_reduce(torch.zeros(len(self.name)))
            return super().state_dict()

    log: list[str] = []
    names = ["long name", "a"] if rank else ["a", "long name"]
    state = {name: Talks(name, log, 1) for name in names}
    smckpt.save(state, checkpoint_id=f"{folder}/order")
    smckpt.load(state, checkpoint_id=f"{folder}/order")
    told["order"] = log
    return told


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(of_two, 2, str(tmp_path_factory.mktemp("two")), timeout=200)


def test_each_rank_gets_the_whole_without_a_target_and_values_of_its_own(two: Any) -> None:
    assert [told["LOCAL"] and told["SHARDED"] for told in two] == [True, True]


@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED"])
def test_what_one_rank_alone_saved_reaches_the_others(two: Any, kind: str) -> None:
    for told in two:
        assert told[f"zero {kind}"] == (5, [0.0, 1.0, 2.0], {"epoch": 5})


def test_a_tensor_of_a_mesh_without_this_rank_is_left_to_the_others(two: Any) -> None:
    assert [told["submesh"] for told in two] == [
        ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0]),
        ([], [3.0, 4.0, 5.0]),
    ]


def test_objects_in_another_order_on_another_rank_do_not_wait_for_each_other(two: Any) -> None:
    for told in two:
        assert told["order"] == [
            f"{do} {name}" for do in ("take", "take", "give") for name in ("a", "long name")
        ]


def one_has_more(folder: str) -> None:
    rank = dist.get_rank()
    trainer: dict[str, Any] = {"scale": torch.ones(1), "rank": rank}
    if rank == 2:
        trainer["position"] = 1234
    smckpt.save({"model": {"w": torch.ones(2)}, "trainer": trainer}, checkpoint_id=folder)


def test_a_load_reads_records_of_ranks_with_values_at_other_paths_alone(tmp_path: Path) -> None:
    """The manifest tells which. So each key that is asked for is whole, and others cost nothing."""
    run_ranks(one_has_more, 3, str(tmp_path))
    [of_one] = tmp_path.glob("part-*-r00001.json")
    [of_two] = tmp_path.glob("part-*-r00002.json")
    of_one.unlink()  # as rank 0's
    trainer = {"scale": torch.ones(1), "rank": 0, "position": 1234}
    assert equal(smckpt.load(checkpoint_id=tmp_path)["trainer"], trainer)
    found = smckpt.load(checkpoint_id=tmp_path, options=smckpt.LoadOptions(only=["trainer"]))
    assert equal(found, {"trainer": trainer})
    target = {"trainer": {"scale": torch.zeros(1), "rank": -1, "position": -1}}
    smckpt.load(target, checkpoint_id=tmp_path)
    assert equal(target["trainer"], trainer)
    of_two.unlink()
    found = smckpt.load(checkpoint_id=tmp_path, options=smckpt.LoadOptions(only=["model"]))
    assert found["model"]["w"].tolist() == [1, 1]
    with pytest.raises(errors.CorruptCheckpointError, match="r00002"):
        smckpt.load(checkpoint_id=tmp_path)
