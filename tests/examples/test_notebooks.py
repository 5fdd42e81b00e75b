"""The notebooks run from top to bottom, as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.main_job import ROOT, environment

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in a copy of the tree, so that it writes into no checkout
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "notebooks").mkdir()
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=200,  # seconds a cell
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path / "notebooks")}},
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    kinds = {kind for cell in cells for out in cell.outputs for kind in out.get("data", ())}
    assert "image/png" in kinds
    assert (tmp_path / "runs" / "quickstart" / "train.png").exists()
    assert os.listdir(tmp_path / "runs") == ["quickstart"]


def test_there_is_a_notebook() -> None:
    assert "quickstart" in [path.stem for path in NOTEBOOKS]
