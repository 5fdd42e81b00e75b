"""Bad input, seen from every rank that waits: one launch of two ranks for all cases."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import smckpt
from smckpt import errors
from smckpt.checkpoint.records.sealed import open_json, seal_json
from smckpt.engine.background.worker_client import Worker
from tests.support.faults.workers import kill_in_mid_request
from tests.support.launch import run_ranks
from tests.support.synthetic import flip

Message = dict[str, tuple[str, str, str, float]]


def state(value: float = 0.0, numel: int = 8) -> dict[str, Any]:
    return {"a": torch.full((numel,), float(value)), "step": int(value)}


def told(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of the error that `call` raises, with its causes."""
    try:
        call()
    except errors.CheckpointError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def worker_of_this_rank() -> Worker:
    from smckpt.engine import api

    [queue] = api._RUNTIME.queues(None, "default")
    return queue._worker


def bad_saves(folder: str) -> Message:
    """Each case, broken on rank 1 alone; then what stands in `c`, and one good save after it."""
    rank, said = dist.get_rank(), {}
    good = f"{folder}/c"
    smckpt.save(state(1), checkpoint_id=good)
    blocked = f"{folder}/file"
    if rank == 0:
        Path(blocked).write_text("in the way")
    dist.barrier()

    def save(value: Any, where: Any, **more: Any) -> Callable[[], Any]:
        return lambda: smckpt.save(value, checkpoint_id=where, **more)

    def dead_worker() -> None:
        if rank == 1:
            kill_in_mid_request(worker_of_this_rank())
        smckpt.save(state(2), checkpoint_id=good)

    cases = {
        "path is a file": save(state(2), blocked),
        "below a file": save(state(2), f"{blocked}/below"),
        "object": save({**state(2), "hook": {"f": print}} if rank else state(2), good),
        "lambda": save({**state(2), "hook": lambda: 1} if rank else state(2), good),
        "nothing": save(None if rank else state(2), good),
        "no id": save(state(2), None if rank else good),
        "step": save(state(2), good, step="seven" if rank else 7),
        "huge step": save(state(2), good, step=1 << 63 if rank else 7),
        "metadata": save(
            state(2), good, options=smckpt.SaveOptions(metadata={"f": print} if rank else {})
        ),
        "coordinator": save(state(2), good, coordinator_rank=rank),
        "no member": save(state(2), good, coordinator_rank=7 if rank else 0),
        "options": save(state(2), good, options={"timeout": 9} if rank else None),
        "a number": save(state(2), 5 if rank else good),
        "dead worker": dead_worker,
    }
    for name, case in cases.items():
        kind, text = told(case)
        dist.barrier()
        target = state(0)
        smckpt.load(target, checkpoint_id=good)
        said[name] = kind, text, str(target["step"]), float(target["a"][0])
        smckpt.save(state(1), checkpoint_id=good)
    return said


def test_a_bad_save_is_told_on_every_rank_and_loses_nothing(tmp_path: Path) -> None:
    zero, one = run_ranks(bad_saves, 2, str(tmp_path))
    culprit = {
        "object",
        "lambda",
        "nothing",
        "no id",
        "dead worker",
        "step",
        "metadata",
        "huge step",
    }
    culprit |= {"coordinator", "no member", "options", "a number"}  # it was rank 0 before
    path = {"path is a file": "/file", "below a file": "/file", "object": "hook", "lambda": "hook"}
    path.update(step="'seven'", metadata="builtin_function", coordinator="coordinator_rank")
    path |= {
        "huge step": "more than 64 bits",
        "no member": "coordinator_rank 7",
        "options": "'timeout': 9",
        "a number": "is 5, which is a int",
    }
    for name in zero:
        for kind, text, step, value in (zero[name], one[name]):
            assert kind, (name, text)
            assert socket.gethostname() in text, (name, text)
            assert "What to do: " in text, (name, text)
            assert path.get(name, "") in text, (name, text)
            if name in culprit:
                assert "rank 1" in text, (name, text)
            assert (step, value) == ("1", 1.0), name


def bad_loads(folder: str) -> Message:
    """Each case with a target that is wrong on rank 1 alone, or a checkpoint that is."""
    rank, said = dist.get_rank(), {}
    for name in ("good", "newer", "half", "damaged"):
        smckpt.save(state(1), checkpoint_id=f"{folder}/{name}")
    smckpt.save({**state(1), "b": torch.ones(1)}, checkpoint_id=f"{folder}/more")
    if rank == 0:
        for manifest in Path(folder, "newer").glob("manifest-*"):
            body = open_json(manifest.read_bytes(), str(manifest))
            manifest.write_bytes(seal_json({**body, "format": [9, 0]}))
        for manifest in Path(folder, "half").glob("manifest-*"):
            manifest.unlink()
        for data in Path(folder, "damaged").glob("data-*"):
            if data.suffix == ".safetensors":
                flip(data, data.stat().st_size - 1)
    dist.barrier()
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "missing": (state(), "nowhere"),
        "half": (state(), "half"),
        "newer": (state(), "newer"),
        "shape": (state(numel=9 if rank else 8), "good"),
        "dtype": ({**state(), **({"a": torch.zeros(8).double()} if rank else {})}, "good"),
        "unexpected": ({**state(), **({"b": torch.zeros(1)} if rank else {})}, "good"),
        "left out": (state(), "more"),  # by all: what one rank takes is not left out
        "damaged": (state(), "damaged"),
    }
    for name, (target, where) in cases.items():
        kind, text = told(lambda t=target, w=where: smckpt.load(t, checkpoint_id=f"{folder}/{w}"))
        touched = float(target["a"].sum()) if "a" in target else 0.0
        said[name] = kind, text, str(target["step"]), touched
    odd: dict[str, dict[str, Any]] = {
        "no id": {"checkpoint_id": None},
        "a number": {"checkpoint_id": 5},
        "options": {"options": {"threads": 2}},
    }
    for name, arguments in odd.items():
        given = {"checkpoint_id": f"{folder}/good", **(arguments if rank else {})}
        kind, text = told(lambda given=given: smckpt.load(state(), **given))
        said[name] = kind, text, "0", 0.0
    return said


def test_a_bad_load_is_told_on_every_rank_before_anything_is_touched(tmp_path: Path) -> None:
    zero, one = run_ranks(bad_loads, 2, str(tmp_path))
    kinds = {
        "missing": "CheckpointNotFoundError",
        "half": "CheckpointNotFoundError",
        "newer": "FormatVersionError",
        "shape": "TensorMismatchError",
        "dtype": "TensorMismatchError",
        "unexpected": "KeysMismatchError",
        "left out": "KeysMismatchError",
        "damaged": "CorruptCheckpointError",
    }
    odd = {"no id", "a number", "options"}
    kinds |= dict.fromkeys(odd, "UsageError")
    for name, expected in kinds.items():
        for kind, text, step, value in (zero[name], one[name]):
            assert kind == expected, (name, kind, text)
            assert socket.gethostname() in text and "What to do: " in text, (name, text)
            if name not in odd:
                assert str(tmp_path) in text, (name, text)
            if name in {"shape", "dtype", "unexpected", *odd}:
                assert "rank 1" in text, (name, text)
            if name != "damaged":
                assert (step, value) == ("0", 0.0), name
