"""A checkpoint of another system is opened by the reader that is registered for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import smckpt
from smckpt.checkpoint.reading.committed import open_any
from smckpt.cli.app import app
from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.registry import Reader, register_reader
from smckpt.storage import Storage, open_storage
from tests.support.limits import seconds


def test_a_reader_of_somebody_else_is_asked_where_nobody_of_ours_knows_the_files(
    tmp_path: Path,
) -> None:
    theirs, ours, empty = tmp_path / "theirs", tmp_path / "ours", tmp_path / "empty"
    for folder in (theirs, ours, empty):
        folder.mkdir()
    (theirs / "state.shelf").write_text("kept elsewhere")
    smckpt.save({"weight": torch.arange(3.0)}, checkpoint_id=ours)
    (ours / "state.shelf").write_text("beside ours")
    kept = open_any(open_storage(ours))
    asked: list[str] = []

    def read(storage: Storage) -> object:
        asked.append(storage.url)
        return kept if "state.shelf" in storage.names() else None

    register_reader("shelf", Reader(read))  # type: ignore[arg-type]
    state = {"weight": torch.zeros(3)}
    smckpt.load(state, checkpoint_id=theirs)
    assert state["weight"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CheckpointNotFoundError, match="empty"):
        smckpt.load(state, checkpoint_id=empty)
    assert [*dict.fromkeys(asked)] == [
        str(theirs),
        str(empty),
    ]  # where a checkpoint of ours is, no reader is asked
    assert open_any(open_storage(ours)).identity == kept.identity


def test_the_reader_of_the_docs_works_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    section = page.partition("## A reader of checkpoints")[2]
    exec(section.partition("```python")[2].partition("```")[0], {})
    smckpt.save({"weight": torch.arange(3.0)}, checkpoint_id=tmp_path / "step-2")
    (tmp_path / "latest.txt").write_text("step-2\n")
    assert smckpt.load(checkpoint_id=tmp_path)["weight"].tolist() == [0.0, 1.0, 2.0]


def test_what_a_readers_catalogue_holds_is_shown_and_exported(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "kept.pile").write_text("elsewhere")
    model = {"model.embed_tokens.weight": torch.arange(6.0).reshape(3, 2)}
    torch.save({"model": model, "epoch": 4}, tmp_path / "state.pt")
    kept = open_any(open_storage(os.fspath(tmp_path / "state.pt")))
    assert not kept.ours
    register_reader(
        "pile", Reader(lambda storage: kept if "kept.pile" in storage.names() else None)
    )
    done = CliRunner().invoke(app, ["show", "--json", os.fspath(theirs)])
    facts = json.loads(done.output)
    assert [one["name"] for one in facts["tensors"]] == ["model.model.embed_tokens.weight"]
    assert facts["objects"] == ["epoch"]
    smckpt.export_hf(theirs, tmp_path / "hf", config={"model_type": "unheard_of"})
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported["model.embed_tokens.weight"].equal(model["model.embed_tokens.weight"])


def test_a_name_is_taken_once_and_only_by_a_reader() -> None:
    with pytest.raises(UsageError, match="'others' exists"):
        register_reader("others", Reader(lambda storage: None))
    with pytest.raises(UsageError, match="give a Reader"):
        register_reader("shelf two", print)  # type: ignore[arg-type]


def test_the_engine_reads_torchs_own_checkpoint_though_it_imports_no_translator(
    tmp_path: Path,
) -> None:
    torch.save({"weight": torch.arange(3.0)}, tmp_path / "state.pt")
    code = (
        "import sys, torch, smckpt, smckpt.engine.api\n"
        "assert not [m for m in sys.modules if 'smckpt.translate' in m]\n"
        f"print(smckpt.load(checkpoint_id={str(tmp_path / 'state.pt')!r})['weight'].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60)
    )
    assert done.stdout.strip().endswith("[0.0, 1.0, 2.0]"), done.stderr
