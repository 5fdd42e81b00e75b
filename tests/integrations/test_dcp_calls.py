"""DCP's save, async_save and load by their own names, and `smckpt run --for dcp`."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load as safetensors_load
from torch import nn
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

import smckpt
from smckpt.errors import CheckpointNotFoundError, KeysMismatchError, UsageError
from smckpt.integrations.dcp import calls
from smckpt.run import provide
from smckpt.storage import open_storage
from tests.support.launch import ROOT
from tests.support.limits import seconds


def saved_by_dcp(folder: Path) -> bool:
    return (folder / ".metadata").exists()


def test_a_state_saved_and_loaded_by_dcps_names_is_ours(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    calls.save(state, checkpoint_id=tmp_path)
    assert not saved_by_dcp(tmp_path)
    target = {"model": nn.Linear(3, 2).state_dict(), "step": 0}
    calls.load(target, checkpoint_id=tmp_path)  # the optimizer is left, as by DCP
    assert target["step"] == 7
    assert all(torch.equal(target["model"][k], v) for k, v in model.state_dict().items())


class Counting(dict[str, Any]):
    """A dict that tells what was set in it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.were_set: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.were_set.append(key)
        super().__setitem__(key, value)


class Loaded(Stateful):
    def __init__(self) -> None:
        self.seen: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"n": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["n"]


def test_what_has_load_state_dict_stays_in_the_dict_and_the_rest_is_set(tmp_path: Path) -> None:
    state = Counting({"object": Loaded(), "plain": {"w": torch.ones(2)}})
    calls.save(state, checkpoint_id=tmp_path)
    calls.load(state, checkpoint_id=tmp_path)
    assert (state["object"].seen, state.were_set) == (3, ["plain"])


def test_a_name_that_is_not_saved_fails_as_in_dcp(tmp_path: Path) -> None:
    calls.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    target = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint.*c") as caught:
        calls.load(target, checkpoint_id=tmp_path)
    assert isinstance(caught.value.__context__, KeysMismatchError), "our own words stay"
    assert target["a"].tolist() == [0.0, 0.0], "refused before anything is changed"
    planner = DefaultLoadPlanner(allow_partial_load=True)
    calls.load(target, checkpoint_id=tmp_path, planner=planner)
    assert (target["a"].tolist(), target["c"].tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_the_storage_may_be_the_second_argument_as_in_dcp(tmp_path: Path) -> None:
    calls.save({"w": torch.ones(2)}, calls.FileSystemWriter(tmp_path), use_collectives=False)
    calls.load(target := {"w": torch.zeros(2)}, calls.FileSystemReader(tmp_path))
    assert target["w"].tolist() == [1.0, 1.0] and not saved_by_dcp(tmp_path)


def test_a_value_that_only_the_checkpoint_has_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.save(
        {"a": {"n": 1, "m": 2, "w": torch.ones(2), "v": torch.ones(2)}}, checkpoint_id=tmp_path
    )
    target = {"a": {"n": 0, "w": torch.zeros(2)}}
    with monkeypatch.context() as patched:
        patched.delattr(calls, "_load")  # our engine does it, without DCP's collectives
        calls.load(target, checkpoint_id=tmp_path)
    assert target["a"]["n"] == 1 and "m" not in target["a"]
    with pytest.raises(CheckpointException, match="Missing key"):
        calls.load({"a": {"k": 0}}, checkpoint_id=tmp_path)


def test_another_dtype_is_converted_and_another_size_refused_as_in_dcp(tmp_path: Path) -> None:
    calls.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path)
    calls.load(target := {"w": torch.zeros(4, dtype=torch.float16)}, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(CheckpointException, match="Size mismatch"):
        calls.load({"w": torch.zeros(5)}, checkpoint_id=tmp_path)


def test_a_future_ends_with_the_commit_and_fails_as_in_dcp(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0)}
    future = calls.async_save(
        state, checkpoint_id=tmp_path, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    state["w"].zero_()
    seen: Future[Any] = Future()
    future.add_done_callback(seen.set_result)
    assert isinstance(future, Future) and seen.result(seconds(60)) is future
    assert future.result() is not None and future.done()
    target = {"w": torch.zeros(4)}
    calls.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    writer = calls.FileSystemWriter(tmp_path, overwrite=False)
    with pytest.raises(CheckpointException, match="already exists|is committed"):
        calls.async_save({"w": torch.ones(4)}, storage_writer=writer)
    (tmp_path / "file").touch()
    failing = calls.async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "file" / "below")
    assert isinstance(failing.exception(seconds(60)), CheckpointException)
    with pytest.raises(CheckpointException):
        failing.result()
    smckpt.maybe_finalize_async_calls()  # what the future told is not raised again


def test_a_stager_that_copies_in_the_background_gets_dcps_answer(tmp_path: Path) -> None:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    answer = calls.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_stager=stager)
    assert isinstance(answer, AsyncSaveResponse)
    answer.staging_completion.result(seconds(60))
    answer.upload_completion.result(seconds(60))
    stager.close()
    calls.load(target := {"w": torch.zeros(2)}, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [1.0, 1.0]


def test_a_planner_that_caches_plans_saves_what_the_state_holds_now(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        calls.save({"w": torch.full((2,), number)}, checkpoint_id=tmp_path, planner=planner)
        calls.load(target := {"w": torch.zeros(2)}, checkpoint_id=tmp_path)
        assert target["w"].tolist() == [number, number]


class Doubled(DefaultLoadPlanner):
    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


class Named(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, *rest: Any, **more: Any) -> None:
        super().set_up_planner({"below": state_dict}, *rest, **more)


def test_planners_and_storage_of_the_users_own_are_dcps_with_our_storage(tmp_path: Path) -> None:
    calls.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "ours", planner=Named())
    assert not saved_by_dcp(tmp_path / "ours")
    target = {"below": {"w": torch.zeros(2)}}
    calls.load(target, checkpoint_id=tmp_path / "ours", planner=Doubled())
    assert target["below"]["w"].tolist() == [2.0, 2.0]
    theirs = tmp_path / "theirs"
    calls.async_save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(theirs)).result()
    assert saved_by_dcp(theirs)
    calls.load(again := {"w": torch.zeros(2)}, checkpoint_id=theirs)
    calls.load(more := {"w": torch.zeros(2)}, checkpoint_id=theirs, planner=Doubled())
    assert (again["w"].tolist(), more["w"].tolist()) == ([1.0, 1.0], [2.0, 2.0])
    assert isinstance(calls.FileSystemReader(theirs), dcp.FileSystemReader)


class Flipped(StreamTransformExtension):
    """Stores each byte flipped."""

    class _Stream(io.RawIOBase):
        def __init__(self, below: Any) -> None:
            self._below = below

        def writable(self) -> bool:
            return True

        def readable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self._below.write(bytes(255 - byte for byte in bytes(data)))
            return len(data)

        def readinto(self, buffer: Any) -> int:
            data = self._below.read(len(buffer))
            buffer[: len(data)] = bytes(255 - byte for byte in data)
            return len(data)

    @staticmethod
    def registry_name() -> str:
        return "stream.flipped"

    @staticmethod
    def from_descriptor(version: str) -> Flipped:
        return Flipped()

    def get_descriptor(self) -> str:
        return "stream.flipped/1"

    def transform_to(self, output: Any) -> Any:
        return self._Stream(output)

    def transform_from(self, input: Any) -> Any:
        return self._Stream(input)


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_extensions_of_the_writer_are_dcps_and_read_by_every_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    registry = ExtensionRegistry()
    registry.register(Flipped)
    writer = calls.FileSystemWriter(tmp_path, thread_count=2, _extensions=[Flipped()])
    done = getattr(calls, call)({"w": torch.ones(2), "n": 3}, storage_writer=writer)
    if call == "async_save":
        done.result()
    assert saved_by_dcp(tmp_path)
    reader = calls.FileSystemReader(tmp_path, registry)
    calls.load(target := {"w": torch.zeros(2), "n": 0}, storage_reader=reader)
    assert target["w"].tolist() == [1.0, 1.0] and target["n"] == 3  # type: ignore[attr-defined]
    # without a reader, by the extensions that DCP knows by itself
    monkeypatch.setattr(
        "torch.distributed.checkpoint.filesystem.ExtensionRegistry", lambda: registry
    )
    calls.load(target := {"w": torch.zeros(2), "n": 0}, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [1.0, 1.0] and target["n"] == 3  # type: ignore[attr-defined]
    calls.save({"w": torch.full((2,), 4.0), "n": 4}, checkpoint_id=tmp_path)
    for reader in (None, calls.FileSystemReader(tmp_path, registry)):  # one registry for both kinds
        target["w"].zero_()  # type: ignore[attr-defined]
        calls.load(target, checkpoint_id=tmp_path, storage_reader=reader)
        assert target["w"].tolist() == [4.0, 4.0] and not saved_by_dcp(tmp_path)  # type: ignore[attr-defined]


def test_another_serialization_is_written_by_dcp(tmp_path: Path) -> None:
    format = dcp.filesystem.SerializationFormat.SAFETENSORS
    writer = calls.FileSystemWriter(tmp_path, serialization_format=format)
    assert type(writer) is dcp.FileSystemWriter and writer.serialization_format is format
    calls.save({"w": torch.ones(2)}, storage_writer=writer)
    assert saved_by_dcp(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    (found,) = safetensors_load(file.read_bytes()).values()
    assert found.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner(dedup_save_to_lowest_rank=True)])
def test_writer_and_reader_name_one_save(tmp_path: Path, planner: Any) -> None:
    writer = calls.FileSystemWriter(tmp_path)
    seen = []
    for _ in range(2):
        calls.save({"w": torch.ones(2)}, storage_writer=writer, planner=planner)
        reader = calls.FileSystemReader(tmp_path)
        meta = reader.read_metadata().storage_meta
        assert meta.save_id == writer.save_id and meta.load_id == reader.load_id
        seen.append(meta.save_id)
    assert seen[0] != seen[1]


def test_writer_and_reader_go_to_other_processes(tmp_path: Path) -> None:
    """DCP's `AsyncCheckpointerType.PROCESS` sends the writer to the process that saves."""
    writer = pickle.loads(pickle.dumps(calls.FileSystemWriter(tmp_path, thread_count=2)))
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    reader = pickle.loads(pickle.dumps(calls.FileSystemReader(tmp_path)))
    dcp.load(target := {"w": torch.zeros(2)}, storage_reader=reader)
    assert target["w"].tolist() == [1.0, 1.0]
    assert reader.read_metadata().storage_meta.save_id == writer.save_id


def test_a_planner_sees_the_version_of_metadata_that_dcp_writes(tmp_path: Path) -> None:
    for save, load, at in ((dcp.save, dcp.load, "dcp"), (calls.save, calls.load, "ours")):
        save({"w": torch.ones(2)}, checkpoint_id=tmp_path / at)
        seen = DefaultLoadPlanner()
        load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / at, planner=seen)
        assert seen.metadata is not None
        assert seen.metadata.version == dcp.filesystem.CURRENT_DCP_VERSION


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner(dedup_save_to_lowest_rank=True)])
def test_one_writer_and_reader_serve_the_directories_of_many_saves(
    tmp_path: Path, planner: Any
) -> None:
    writer, reader = calls.FileSystemWriter(tmp_path), calls.FileSystemReader(tmp_path)
    for step in (1, 2):
        at = tmp_path / f"step-{step}"
        state = {"w": torch.full((2,), step)}
        calls.save(state, checkpoint_id=at, storage_writer=writer, planner=planner)
    calls.async_save({"w": torch.full((2,), 3)}, checkpoint_id=at, storage_writer=writer).result()
    for step, value in ((1, 1), (2, 3)):
        target = {"w": torch.zeros(2, dtype=torch.int64)}
        calls.load(target, checkpoint_id=tmp_path / f"step-{step}", storage_reader=reader)
        assert target["w"].tolist() == [value, value]
    assert not [*tmp_path.glob("manifest*")]


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner(dedup_save_to_lowest_rank=True)])
def test_torchs_converter_makes_the_lists_and_dicts_that_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner: Any
) -> None:
    model, w = nn.Linear(2, 2), torch.arange(2.0)
    optimizer = torch.optim.Adam(model.parameters())
    model(w).sum().backward()
    optimizer.step()
    state = {
        "tensors": [w, w + 1],
        "mixed": [w, 3, [w, 7], {"q": w}],
        "deep": [[w], [w, w]],
        "values": [1, [2]],
        "numbers": {0: w, 1: {"a": 4}},
        "optimizer": optimizer.state_dict(),
        "object": optimizer,
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    calls.save(state, checkpoint_id=tmp_path / "ours", planner=planner)
    loaded = []
    monkeypatch.setattr(format_utils, "FileSystemReader", calls.FileSystemReader)
    for of in ("dcp", "ours"):
        format_utils.dcp_to_torch_save(tmp_path / of, tmp_path / f"{of}.pt")
        loaded.append(torch.load(tmp_path / f"{of}.pt"))
    torch.testing.assert_close(*loaded, rtol=0, atol=0)
    whole = smckpt.load(checkpoint_id=tmp_path / "ours")
    assert [type(whole[key]) for key in ("tensors", "mixed", "deep")] == [list] * 3


def test_a_planner_of_the_callers_is_used(tmp_path: Path) -> None:
    calls.save({"a": {"w": torch.ones(2)}, "n": 3}, checkpoint_id=tmp_path)
    planner = DefaultLoadPlanner()
    target = {"a": {"w": torch.zeros(2)}, "n": 0}
    calls.load(target, checkpoint_id=tmp_path, planner=planner)
    assert target["n"] == 3 and set(planner.state_dict) == {"a.w", "n"}
    assert planner.mappings["a.w"] == ("a", "w") and planner.metadata is not None


@pytest.mark.parametrize("by", ["calls", "smckpt", "writer"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_planner_that_cuts_no_nested_values_loads_what_it_saved(
    tmp_path: Path, by: str, sharded: bool
) -> None:
    def state(value: int) -> dict[str, Any]:
        w = torch.full((2,), float(value))
        return {
            "m": {"w": w.clone(), "l": [w, value]},
            "cfg": {"lr": value},
            "x": w + 1,
            "n": value,
        }

    save, load = DefaultSavePlanner(flatten_state_dict=False), DefaultLoadPlanner(False, sharded)
    target = state(0)
    if by == "writer":
        dcp.save(state(2), storage_writer=calls.FileSystemWriter(tmp_path), planner=save)
        calls.load(target, checkpoint_id=tmp_path, planner=load)
    elif by == "calls":
        calls.save(state(2), checkpoint_id=tmp_path, planner=save)
        calls.load(target, checkpoint_id=tmp_path, planner=load)
    else:
        smckpt.save(state(2), checkpoint_id=tmp_path, planner=save)
        smckpt.load(target, checkpoint_id=tmp_path, planner=load)
    for found in (target, smckpt.load(checkpoint_id=tmp_path)):
        assert found is not None
        assert found["m"]["w"].tolist() == [2.0, 2.0] and found["m"]["l"][1] == found["n"] == 2
        assert found["m"]["l"][0].tolist() == [2.0, 2.0] and found["cfg"] == {"lr": 2}
        assert found["x"].tolist() == [3.0, 3.0]
    cut = state(0)
    calls.load(cut, checkpoint_id=tmp_path)  # by names, as without a planner
    assert cut["m"]["w"].tolist() == [2.0, 2.0] and cut["cfg"] == {"lr": 2}


class App(Stateful):
    """As in torch's recipe."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


@pytest.mark.parametrize("form", ["recipe", "set_state_dict", "load_state_dict"])
def test_a_load_into_what_is_given_back_by_the_caller_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    def taken(app: App) -> dict[str, Any]:
        if form == "recipe":
            return {"app": app}
        if form == "set_state_dict":
            return {"app": app.state_dict()}
        return {"app": {"model": app.model.state_dict(), "optim": app.optimizer.state_dict()}}

    saved, fresh = App(*made()), App(*made())
    saved.optimizer.param_groups[0]["lr"] = 0.25
    calls.save(taken(saved), checkpoint_id=tmp_path)
    caplog.clear()
    state = taken(fresh)
    calls.load(state, checkpoint_id=tmp_path)
    if form == "set_state_dict":
        fresh.load_state_dict(state["app"])
    elif form == "load_state_dict":
        fresh.optimizer.load_state_dict(state["app"]["optim"])
    assert fresh.optimizer.param_groups[0]["lr"] == 0.25
    for one, other in zip(saved.model.parameters(), fresh.model.parameters(), strict=True):
        kept, loaded = saved.optimizer.state[one], fresh.optimizer.state[other]
        assert torch.equal(one, other) and torch.equal(kept["exp_avg"], loaded["exp_avg"])
    assert [r.message for r in caplog.records if r.name == "smckpt" and r.levelno >= 30] == []


def test_no_store_and_arguments_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    for call in (calls.save, calls.async_save, calls.load):
        for wrong in ("abc://abc.abc", None):
            with pytest.raises(RuntimeError, match="Cannot detect"):
                call({"w": torch.ones(2)}, checkpoint_id=wrong)  # type: ignore[operator]
    assert not calls.FileSystemWriter.validate_checkpoint_id("abc://abc.abc")
    assert calls.FileSystemWriter.validate_checkpoint_id(tmp_path)
    with pytest.raises(UsageError, match="sync_files=False is not honoured"):
        calls.FileSystemWriter(tmp_path, sync_files=False)
    with pytest.raises(UsageError, match="step is not honoured by DCP's own writer"):
        calls.FileSystemWriter(tmp_path, _extensions=[Flipped()], step=3)
    with pytest.raises(UsageError, match="not honoured in a store"):
        calls.FileSystemWriter("s3://bucket/place", _extensions=[Flipped()])
    calls.FileSystemWriter(tmp_path, False, True, 8, 1, True, True)
    with pytest.raises(CheckpointException) as caught:
        calls.load({"w": torch.ones(2)}, checkpoint_id=tmp_path / "nothing")
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CheckpointNotFoundError)
    with pytest.raises(UsageError, match="check_keys_matched"):
        smckpt.load({"w": 1}, checkpoint_id=tmp_path, check_keys_matched="some")  # type: ignore[arg-type]


def test_dcp_saves_streams_spans_and_paths_through_our_writer(tmp_path: Path) -> None:
    values = {
        "stream": io.BytesIO(b"abc"),
        "span": timedelta(hours=2),
        "lists": defaultdict(list, {"a": [1]}),
        "path": Path("/data/x"),
    }
    dcp.save({"v": values}, storage_writer=calls.FileSystemWriter(tmp_path))
    found = smckpt.load(checkpoint_id=tmp_path)
    assert found is not None
    assert found["v"].pop("stream").getvalue() == values.pop("stream").getvalue()  # type: ignore[attr-defined]
    assert found["v"] == values


VALUES = {
    "range": range(1, 9, 2),
    "slice": slice(None, 3),
    "frozenset": frozenset({1, 2}),
    "complex": 1 - 2j,
    "Decimal": Decimal("1.50"),
    "Fraction": Fraction(1, 3),
    "UUID": UUID(int=7),
    "datetime": datetime(2026, 1, 2, tzinfo=UTC),
    "deque": deque([1, (2,)], maxlen=4),
    "numpy scalar": np.float32(0.1),
    "numpy array": np.arange(4, dtype="int16"),
    "numpy dtype": np.dtype("float16"),
    "dtype": torch.bfloat16,
    "nested": {"a": [{"b": frozenset({3})}], "c": ...},
}


@pytest.mark.parametrize("door", ["calls", "writer"])
@pytest.mark.parametrize("name", list(VALUES))
def test_values_of_pythons_library_and_numpy_come_back_as_from_dcp(
    tmp_path: Path, name: str, door: str
) -> None:
    def blank() -> dict[str, Any]:
        given = {"nested": {"a": [{"b": 0}], "c": 0}, "numpy array": np.zeros(4, "int16")}
        return {"v": given.get(name, 0), "t": torch.zeros(1)}

    state = {"v": VALUES[name], "t": torch.ones(1)}
    stock, ours = blank(), blank()
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    dcp.load(stock, checkpoint_id=tmp_path / "stock")
    if door == "calls":
        calls.save(state, checkpoint_id=tmp_path / "ours")
        calls.load(ours, checkpoint_id=tmp_path / "ours")
    else:
        dcp.save(state, storage_writer=smckpt.DistributedFileSystemWriter(tmp_path / "ours"))
        dcp.load(ours, storage_reader=smckpt.DistributedFileSystemReader(tmp_path / "ours"))
    assert repr(ours) == repr(stock) and type(ours["v"]) is type(VALUES[name])


@pytest.mark.parametrize(
    "target",
    [
        {"plain": {}},
        {"plain": {"x": 0}},
        {"both": {}},
        {"both": {"inner": {}}},
        {"ordered": OrderedDict(), "deep": {"m": {}}},
        {"deep": {"m": {"k": 0}}, "list": []},
        {"list": {}},
        {"empty": {}},
        {"empty": {"more": 1}},
        {"deep": {"m": {"other": 1}}},
        {"list": {"x": 0}},
    ],
    ids=str,
)
def test_a_dict_of_the_target_keeps_its_keys_as_in_dcp(tmp_path: Path, target: Any) -> None:
    """A dict stays the same object too, and a key that is not saved is refused."""
    state = {
        "plain": {"x": 1, "y": 2},
        "both": {"t": torch.ones(2), "inner": {"z": 3}},
        "ordered": OrderedDict(b=4),
        "deep": {"m": {"k": 5, "l": [6]}},
        "list": [1, 2],
        "empty": {},
    }
    found = []
    for module in (dcp, calls):
        given: Any = copy.deepcopy(target)
        module.save(state, checkpoint_id=tmp_path / module.__name__)
        inner = [value for key, value in given.items() if key != "list"]
        try:
            module.load(given, checkpoint_id=tmp_path / module.__name__)
        except CheckpointException as error:
            found.append(
                re.findall(r"Missing key in checkpoint state_dict: ([\w.]+)\.", str(error))
            )
        else:
            found.append(repr(given))
            assert all(any(one is value for value in given.values()) for one in inner)
    assert found[0] == found[1]


@pytest.fixture
def provided() -> Iterator[list[str]]:
    with provide(["dcp"]) as places:
        yield places.lines


def test_the_door_replaces_dcps_names_and_gives_them_back(
    tmp_path: Path, provided: list[str]
) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    assert len(provided) == 12 and dcp.save is calls.save
    dcp.save({"m": {"w": torch.ones(2)}, "n": 3}, checkpoint_id=tmp_path)
    dcp.async_save({"m": {"w": torch.ones(2)}, "n": 4}, checkpoint_id=tmp_path).result()
    assert not saved_by_dcp(tmp_path)
    dcp.load(target := {"n": 0}, checkpoint_id=tmp_path)
    assert target == {"n": 4}
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    assert not issubclass(FsspecWriter, calls.FileSystemWriter), "it was made before"
    # a function of DCP's that finds its reader by the path
    part = _load_state_dict_from_keys("m", checkpoint_id=tmp_path)
    assert part["m"]["w"].tolist() == [1.0, 1.0]


def test_dcps_names_are_its_own_again() -> None:
    assert dcp.save.__module__ == "torch.distributed.checkpoint.state_dict_saver"
    assert dcp.FileSystemReader.__module__ == "torch.distributed.checkpoint.filesystem"


CHECKOUT = os.environ.get("SMCKPT_PYTORCH", "")


@pytest.mark.long
@pytest.mark.skipif(not CHECKOUT, reason="SMCKPT_PYTORCH names no checkout of pytorch's tests")
def test_torchs_own_tests_pass_with_ours_in_dcps_place() -> None:
    files = ["checkpoint/e2e/test_fine_tuning.py", "checkpoint/test_file_system_checkpoint.py"]
    command = [
        sys.executable,
        "-m",
        "tests.support.frameworks.torch_suite",
        CHECKOUT,
        "--files",
        *files,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=seconds(600), check=True
    )
    counts = r"stock: ([1-9]\d*) of \1\ncalls: \1 of \1\nstorage: \1 of \1\n"  # by torch's version
    assert re.search(counts, done.stdout), done.stdout


def test_a_load_with_a_planner_reads_what_dcp_wrote(tmp_path: Path, s3_root: str) -> None:
    """From a disk. What DCP wrote into a store is read without a planner, as the error says."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for place in (tmp_path / "theirs", (tmp_path / "theirs").as_uri()):
        smckpt.load(target := {"w": torch.zeros(2)}, checkpoint_id=place, planner=Doubled())
        assert target["w"].tolist() == [2.0, 2.0]
    store = open_storage(s3_root)
    for path in (tmp_path / "theirs").iterdir():
        store.put(path.name, path.read_bytes())
    with pytest.raises(UsageError, match="from a disk only.*leave planner= out"):
        smckpt.load({"w": torch.zeros(2)}, checkpoint_id=s3_root, planner=Doubled())
    smckpt.load(plain := {"w": torch.zeros(2)}, checkpoint_id=s3_root)
    assert plain["w"].tolist() == [1.0, 1.0]
    smckpt.save({"w": torch.full((2,), 3.0)}, checkpoint_id=tmp_path / "theirs")
    smckpt.load(ours := {"w": torch.zeros(2)}, checkpoint_id=tmp_path / "theirs", planner=Doubled())
    assert ours["w"].tolist() == [6.0, 6.0]  # a commit of smckpt's comes first, as without one
