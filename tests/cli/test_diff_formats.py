"""`smckpt diff` of checkpoints of other formats, and of two formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import smckpt
from smckpt.cli.app import app
from smckpt.errors import StateError, UsageError

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b.bias": torch.ones(3)}


def state(**changed: Any) -> dict[str, Any]:
    return {
        "model": {**{n: t.clone() for n, t in WEIGHTS.items()}},
        "step": 7,
        "lr": [0.5],
        **changed,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """One state in three formats, and its weights as Hugging Face has them."""
    at = tmp_path_factory.mktemp("formats")
    smckpt.save(state(), checkpoint_id=at / "ours")
    dcp.save(state(), checkpoint_id=at / "dcp", no_dist=True)
    torch.save(state(), at / "state.pt")
    (at / "hf").mkdir()
    save_file(WEIGHTS, at / "hf" / "model.safetensors")
    torch.save(WEIGHTS, at / "weights.bin")
    return at


def diff(capsys: Any, *arguments: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        app(["diff", *map(str, arguments), "--json"], standalone_mode=False)
    code = ended.value.code
    assert isinstance(code, int)
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("a", "b"), [("ours", "dcp"), ("dcp", "state.pt"), ("state.pt", "ours"), ("hf", "weights.bin")]
)
def test_one_state_is_equal_in_two_formats(saved, capsys, a, b):
    code, told = diff(capsys, saved / a, saved / b)
    assert (code, told["differences"]) == (0, []) and told["tensors"] == 2
    assert told["values"] == (0 if a == "hf" else 2)


@pytest.mark.parametrize("kind", ["ours", "dcp", "state.pt"])
def test_what_differs_is_named_with_the_largest_difference(saved, tmp_path, capsys, kind):
    other = state(step=8)
    other["model"]["a.weight"][2, 1] += 0.25
    dcp.save(other, checkpoint_id=tmp_path / "b", no_dist=True)
    code, told = diff(capsys, saved / kind, tmp_path / "b")
    found = {one["name"]: one for one in told["differences"]}
    assert code == 1 and sorted(found) == ["model.a.weight", "step"]
    one = found["model.a.weight"]
    assert (one["count"], one["first"], one["largest"]) == (1, [2, 1], 0.25)
    code, told = diff(
        capsys, saved / kind, tmp_path / "b", "--ignore", "step", "--ignore", "*.weight"
    )
    assert code == 0 and told["ignored"] == ["model.a.weight", "step"]


def test_weights_under_other_names_are_refused_and_the_command_for_them_is_named(saved):
    with pytest.raises(UsageError, match="verify --hf .*/hf --against .*/ours"):
        app(["diff", str(saved / "ours"), str(saved / "hf")], standalone_mode=False)
    with pytest.raises(UsageError, match="no tensor has the same name"):
        app(["diff", str(saved / "dcp"), str(saved / "weights.bin")], standalone_mode=False)


def test_values_that_cannot_be_read_are_refused_unless_they_are_ignored(saved, tmp_path, capsys):
    torch.save(state(odd=Path("x")), tmp_path / "a.pt")
    with pytest.raises(StateError, match="odd hold"):
        app(["diff", str(saved / "ours"), str(tmp_path / "a.pt")], standalone_mode=False)
    code, _ = diff(capsys, saved / "ours", tmp_path / "a.pt", "--ignore", "odd")
    assert code == 0


def test_a_directory_without_any_checkpoint_is_refused(saved, tmp_path):
    shutil.copytree(saved / "hf", tmp_path / "empty", ignore=lambda *_: ["model.safetensors"])
    with pytest.raises(smckpt.CheckpointNotFoundError):
        app(["diff", str(saved / "ours"), str(tmp_path / "empty")], standalone_mode=False)
