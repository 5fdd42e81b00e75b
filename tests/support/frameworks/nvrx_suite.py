"""Runs NVRx's own tests of its checkpointing over smckpt in NVRx's place, on the CPU.

    python -m tests.support.frameworks.nvrx_suite CHECKOUT [--files NAME …] [--only EXPRESSION]

CHECKOUT is a checkout of NVIDIA/nvidia-resiliency-ext; its files are read there and are not part of
this project. `tests/checkpointing/unit` is copied to a temporary directory with gloo in place of
nccl and the CPU in place of CUDA, and each file runs once under torchrun, by pytest on each rank.
A test has passed when it has on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.limits import seconds

ROOT = Path(__file__).resolve().parents[3]
BELOW = Path("tests", "checkpointing", "unit")
# The ranks of each. On two, `test_async_save.py` has both write other weights to one path.
FILES = {
    "test_async_save.py": 1,
    "test_async_writer.py": 2,
    "test_async_writer_msc.py": 2,
    "test_basic_local.py": 2,
    "test_cleanup.py": 2,
}
# On a machine without CUDA. Order matters.
_CPU = (
    (r"torch\.cuda\.set_device\(.*\)", "None"),
    (r"""f(['"])cuda:\{torch\.cuda\.current_device\(\)\}['"]""", r"\1cpu\1"),
    (r"""(['"])cuda['"]""", r"\1cpu\1"),
    (r"""(['"])nccl['"]""", r"\1gloo\1"),
)


def on_cpu(source: str) -> str:
    """The text of a file, for a machine without CUDA."""
    for pattern, text in _CPU:
        source = re.sub(pattern, text, source)
    return source


def copied(checkout: Path, scratch: Path) -> None:
    there = scratch / BELOW
    there.mkdir(parents=True)
    for folder in (scratch / "tests", scratch / "tests" / "checkpointing"):
        (folder / "__init__.py").touch()  # or the `tests` of this project would be found
    for path in (checkout / BELOW).glob("*.py"):
        (there / path.name).write_text(on_cpu(path.read_text()))


def run_file(checkout: Path, name: str, ranks: int, only: str | None) -> dict[str, str]:
    """The outcome of each test of a file: "passed", "skipped" or the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        copied(checkout, scratch)
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launched += [f"--nproc-per-node={ranks}", "-m", "smckpt.run", "--for", "nvrx"]
        launched += [str(Path(__file__).with_name("nvrx_suite_rank.py")), str(scratch)]
        launched += [str(BELOW / name), *(["-k", only] if only else [])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
        }
        done = subprocess.run(
            launched, cwd=scratch, env=environment,
            capture_output=True, text=True, timeout=seconds(600), check=False,
        )  # fmt: skip
        told = [json.loads(path.read_text()) for path in sorted(scratch.glob("rank-*.json"))]
    if len(told) < ranks or not told[0]:
        return {"(file)": (done.stdout + done.stderr)[-2000:]}
    return {
        test: next((seen for rank in told if (seen := rank[test]) != "passed"), "passed")
        for test in told[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--only")
    chosen = parser.parse_args()
    failed = False
    for name in chosen.files:
        outcomes = run_file(chosen.checkout, name, FILES[name], chosen.only)
        passed = [test for test, outcome in outcomes.items() if outcome == "passed"]
        print(f"{name} on {FILES[name]} ranks: {len(passed)} of {len(outcomes)}", flush=True)
        for test, outcome in outcomes.items():
            if outcome != "passed":
                failed = True
                print(f"    {test}: {outcome[:300]}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
