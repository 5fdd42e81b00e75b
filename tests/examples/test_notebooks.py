"""The notebooks run from top to bottom, as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.main_job import ROOT, environment

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def executed(stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outputs of a notebook's cells; all of them ran, and wrote into one directory of runs."""
    # in a copy of the tree, so that it writes into no checkout
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "notebooks").mkdir()
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=200,  # seconds a cell
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path / "notebooks")}},
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    return [out for cell in cells for out in cell.outputs]


def test_the_quickstart_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = executed("quickstart", tmp_path, monkeypatch)
    assert "image/png" in {kind for out in outputs for kind in out.get("data", ())}
    assert (tmp_path / "runs" / "quickstart" / "train.png").exists()
    assert os.listdir(tmp_path / "runs") == ["quickstart"]


def test_the_export_runs_to_its_end_and_wrong_layouts_are_refused_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = executed("export", tmp_path, monkeypatch)
    text = "".join(out.get("text", "") for out in outputs)
    assert "differ by at most" in text
    assert text.count("KeysMismatchError: ") == 2 and text.count("TensorMismatchError: ") == 2
    assert "several layouts: te_fused, te_fused_interleaved" in text
    assert os.listdir(tmp_path / "runs") == ["tensor-parallel"]


def test_every_notebook_is_run() -> None:
    assert NOTEBOOKS == ["export", "quickstart"]
