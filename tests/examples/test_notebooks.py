"""The notebooks run from top to bottom, as they are, and so do the examples that they start.

The quickstart runs the main job, and is run for its tests: tests/examples/test_train.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
import torch
from safetensors.torch import load_file

from smckpt import find_checkpoints
from tests.support.main_job import ROOT
from tests.support.tools.notebooks import executed

pytestmark = pytest.mark.early

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the notebook ran, which runs the tensor-parallel example, and what they printed."""
    folder = tmp_path_factory.mktemp("export")
    outputs = executed("export", folder)
    return folder / "runs", "".join(out.get("text", "") for out in outputs)


def test_the_export_runs_to_its_end_and_wrong_layouts_are_refused_in_it(
    export: tuple[Path, str],
) -> None:
    runs, text = export
    assert text.count("KeysMismatchError: ") == 2 and text.count("TensorMismatchError: ") == 2
    assert "several layouts: te_fused, te_fused_interleaved" in text
    assert os.listdir(runs) == ["tensor-parallel"]


def test_the_tensor_parallel_example_exports_the_model_that_it_trained(
    export: tuple[Path, str],
) -> None:
    run, text = export[0] / "tensor-parallel", export[1]
    assert "from the layout te_split" in text
    assert "is the checkpoint's: True" in text
    (apart,) = re.findall(r"differ by at most (\S+)", text)
    assert float(apart) <= 1e-5
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
    assert losses[-1] < 0.8 * losses[0]
    # the import, and the steps of the run
    assert sorted(found.step for found in find_checkpoints(run)) == [0, 5, 10, 15, 20]
    exported, again, start = (
        load_file(run / folder / "model.safetensors") for folder in ("exported", "again", "start")
    )
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in start.items()}
    assert all(torch.equal(tensor, again[name]) for name, tensor in exported.items())
    assert not any(torch.equal(tensor, start[name]) for name, tensor in exported.items())


def test_a_job_goes_on_from_memory_and_after_the_end_of_its_host_from_disk(
    tmp_path: Path,
) -> None:
    text = "".join(out.get("text", "") for out in executed("recover", tmp_path))
    died = re.findall(r"died after step (\d+), resumed after step (\d+): (\d+) steps again", text)
    (ranks, host) = [tuple(map(int, each)) for each in died]
    assert ranks[1] >= 34 and host[1] == 40
    assert f"{ranks[2] + host[2]} steps computed twice, all equal" in text


@pytest.mark.parametrize("stem", NOTEBOOKS)
def test_a_notebook_is_stored_with_what_it_printed_and_drew(stem: str) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    outputs = [out for cell in cells for out in cell.outputs]
    assert len(outputs) > len(cells) / 2
    drawn = [out for out in outputs if "image/png" in out.get("data", ())]
    assert len(drawn) == {"quickstart": 2, "recover": 1}.get(stem, 0)
    assert not any(out.output_type == "error" for out in outputs)


def test_every_notebook_is_run() -> None:
    assert NOTEBOOKS == ["export", "quickstart", "recover"]
