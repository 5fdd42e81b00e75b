"""Run a notebook from top to bottom, as a user does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.limits import seconds
from tests.support.main_job import ROOT, environment


def executed(stem: str, folder: Path) -> list[Any]:
    """The outputs of a notebook's cells, all of which ran. It ran in a copy of the tree in
    `folder`, so that it writes into no checkout."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "notebooks").mkdir()
    notebook = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=round(seconds(600)),  # a cell
        kernel_name="python3",
        resources={"metadata": {"path": str(folder / "notebooks")}},
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    return [out for cell in cells for out in cell.outputs]
