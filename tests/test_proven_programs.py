"""Each whole program of the docs, and each example, is exact under `smckpt prove`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import seconds
from tests.support.main_job import ROOT, SMALL, environment
from tests.test_guide import blocks

pytestmark = pytest.mark.early

EXAMPLES = ROOT / "examples"
# the launchers' loop, and those that start torchrun by themselves: their arguments and ranks
PROVED = {
    "launchers/train.py": (2, "{root}", "40"),
    "train.py": (4, "--out", "{root}", "--kill-at", "never", "--no-reference", *SMALL),
    "train_tp.py": (4, "--out", "{root}"),
}
# Ray's workers are not below a process that could be killed: tests/examples/test_ray_train.py
RESUMED_ELSEWHERE = {"ray_train.py"}


def whole_program(page: str) -> str:
    (program,) = blocks(page, "A whole program")
    return program


def prove(command: list[str], folder: Path, *options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "smckpt.cli", "prove", *options, "--", sys.executable, *command],
        cwd=folder,
        env={**environment(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=seconds(360),
    )
    assert done.returncode == 0 and done.stdout.startswith("exact:"), done.stdout + done.stderr


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("page", "ranks"),
    [
        pytest.param("docs/manager.md", 4, id="manager"),
        pytest.param("docs/guide.md", 2, id="guide", marks=pytest.mark.long),
    ],
)
def test_a_killed_program_of_the_docs_resumes_exactly(
    tmp_path: Path, page: str, ranks: int
) -> None:
    (tmp_path / "train.py").write_text(whole_program(page))
    # it names its own directory
    prove([*torchrun(ranks), str(tmp_path / "train.py")], tmp_path, "--chdir")


@pytest.mark.timeout(1200)
@pytest.mark.long
@pytest.mark.parametrize("example", PROVED)
def test_a_killed_example_resumes_exactly(tmp_path: Path, example: str) -> None:
    ranks, *arguments = PROVED[example]
    # a step of its training: that of train_tp.py begins with an import, which is step 0
    prove([*torchrun(ranks), str(EXAMPLES / example), *arguments], tmp_path, "--kill-at", "3")


def test_each_example_that_trains_is_proved() -> None:
    train = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*.py")
        if "optimizer.step()" in path.read_text()
    }
    assert train == PROVED.keys() | RESUMED_ELSEWHERE
