"""Each whole program of the docs, and each example that resumes, is exact under `smckpt prove`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import seconds
from tests.support.main_job import ROOT, environment
from tests.test_guide import blocks

pytestmark = pytest.mark.early

LAUNCHER = ROOT / "examples" / "launchers" / "train.py"


def whole_program(page: str) -> str:
    (program,) = blocks(page, "A whole program")
    return program


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("program", "ranks", "arguments"),
    [
        pytest.param("docs/manager.md", 4, (), id="manager"),
        pytest.param("docs/guide.md", 2, (), id="guide", marks=pytest.mark.long),
        pytest.param(LAUNCHER, 2, ("{root}", "40"), id="launchers", marks=pytest.mark.long),
    ],
)
def test_a_killed_program_resumes_exactly(
    tmp_path: Path, program: str | Path, ranks: int, arguments: tuple[str, ...]
) -> None:
    script = tmp_path / "train.py"
    if isinstance(program, Path):
        shutil.copy2(program, script)
    else:
        script.write_text(whole_program(program))
    below = [] if arguments else ["--chdir"]  # a page's program names its own directory
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "smckpt.cli", "prove", *below, "--"),
            *(sys.executable, *torchrun, str(script), *arguments),
        ],
        cwd=tmp_path,
        env={**environment(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=seconds(360),
    )
    assert done.returncode == 0 and done.stdout.startswith("exact:"), done.stdout + done.stderr
