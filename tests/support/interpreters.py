"""The interpreters that other people's code, which the translator is held against, runs in."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpreter(variable: str, package: str, version: str = "") -> str:
    """The Python that `variable` names, or this one, where `package` is installed in it.

    Without any the test is skipped; under `./dev test`, which makes one, it fails. Set to nothing,
    the variable says that none is wanted.
    """
    named = os.environ.get(variable)
    if named:
        return named
    if named is None and importlib.util.find_spec(package) is not None and not version:
        return sys.executable
    missing = f"{package} {version}".strip()
    if named is None and os.environ.get("SMCKPT_TEST_ALL"):
        pytest.fail(f"no interpreter with {missing}: {variable} is not set")
    pytest.skip(f"{variable} can name an interpreter with {missing}")


def megatron() -> str:
    return interpreter("SMCKPT_MEGATRON_PYTHON", "megatron")


def torchtitan() -> str:
    return interpreter("SMCKPT_TORCHTITAN_PYTHON", "torchtitan")


def transformers4() -> str:
    return interpreter("SMCKPT_TRANSFORMERS4_PYTHON", "transformers", "4.57")


def run(python: str, *arguments: str | Path, ranks: int = 0, timeout: float = 200) -> str:
    """What the script prints; `ranks` processes of it under torchrun, where any are asked for."""
    launcher = [
        "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(ranks),
    ] if ranks else []  # fmt: skip
    done = subprocess.run(
        [python, "-W", "ignore", *launcher, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
