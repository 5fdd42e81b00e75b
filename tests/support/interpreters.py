"""The interpreters that other people's code, which the translator is held against, runs in."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.limits import seconds


def interpreter(variable: str, package: str, version: str = "") -> str:
    """The Python that `variable` names, or this one, where `package` is installed in it.

    Without any the test is skipped; under `./dev test`, which makes one, it fails. Set to nothing,
    the variable says that none is wanted.
    """
    unset = variable not in os.environ
    if unset and not version and importlib.util.find_spec(package) is not None:
        return sys.executable
    return _named(variable, f"an interpreter with {package} {version}".strip())


def _named(variable: str, what: str) -> str:
    named = os.environ.get(variable)
    if named:
        return named
    if named is None and os.environ.get("SMCKPT_TEST_ALL"):
        pytest.fail(f"{variable} is not set: it names {what}")
    pytest.skip(f"{variable} can name {what}")


def megatron() -> str:
    return interpreter("SMCKPT_MEGATRON_PYTHON", "megatron")


def megatron_bridge() -> str:
    return interpreter("SMCKPT_MEGATRON_BRIDGE_PYTHON", "megatron.bridge", "0.3")


def torchtitan() -> str:
    return interpreter("SMCKPT_TORCHTITAN_PYTHON", "torchtitan")


def torchtune() -> str:
    return interpreter("SMCKPT_TORCHTUNE_PYTHON", "torchtune")


def transformers4() -> str:
    return interpreter("SMCKPT_TRANSFORMERS4_PYTHON", "transformers", "4.57")


def transformer_engine() -> str:
    """A folder with the package, whose compiled part is missing: no interpreter's own, for others
    take it for whole where they find it."""
    return _named("SMCKPT_TRANSFORMER_ENGINE", "a folder with the package transformer_engine")


def run(python: str, *arguments: str | Path, timeout: float = 200) -> str:
    """What the script prints."""
    command = [python, "-W", "ignore", *map(str, arguments)]
    done = warm.run(command, timeout=seconds(timeout), env=_environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@contextmanager
def serving(python: str, script: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that has a job done by the script, which is started once, and raises its error.

    A job has `seconds`, after which the script ends it; it ends with its input.
    """
    with subprocess.Popen(
        [python, "-W", "ignore", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
    ) as server:  # fmt: skip

        def ask(job: dict[str, Any]) -> None:
            assert server.stdin is not None and server.stdout is not None
            late = threading.Timer(job["seconds"] + 100, server.kill)  # it imports for a while
            late.start()
            try:
                server.stdin.write(json.dumps(job) + "\n")
                server.stdin.flush()
                answer = server.stdout.readline()
            finally:
                late.cancel()
            assert answer, f"{script} is gone"
            assert json.loads(answer) is None, json.loads(answer)

        yield ask


def _environment() -> dict[str, str]:
    """The scripts import `limits`, which needs no package of ours."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]))
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    return {**os.environ, **settings}
