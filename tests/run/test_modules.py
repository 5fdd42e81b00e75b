"""`smckpt run -m`, and launchers that a script starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smckpt.errors import UsageError
from smckpt.run import run_script
from tests.support.child import ROOT
from tests.support.limits import seconds

TRAIN = """
import multiprocessing, sys, warnings
warnings.simplefilter("error")
from .parts import value
from . import parts

def child(queue):
    import torch.sagemaker
    queue.put((__name__, __package__, parts.value))

if __name__ == "__main__":
    made = multiprocessing.get_context("spawn")
    queue = made.SimpleQueue()
    process = made.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(), value, __package__, sys.argv[1:], sys.path[0] == sys.argv[1])
    print(sys.argv[0] == __file__)
    process.join()
"""


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False,
        timeout=seconds(120), env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_module_runs_as_python_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    for name, text in (("__init__", ""), ("parts", "value = 42"), ("train", TRAIN)):
        (package / f"{name}.py").write_text(text)
    (package / "__main__.py").write_text(TRAIN)
    for name in ("pkg.train", "pkg"):
        run = started(tmp_path, "-m", "smckpt.run", "-m", name, str(tmp_path), "-m", "--for", "x")
        assert run.returncode == 0, run.stderr[-3000:]
        told = f"('__mp_main__', 'pkg', 42) 42 pkg ['{tmp_path}', '-m', '--for', 'x'] True"
        assert run.stdout.splitlines() == [told, "True"]


def test_a_launcher_that_the_script_starts_is_named(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "os.environ['PATH'] = '/nowhere'\n"  # nothing starts
        "none = {'executable': '/bin/true'}\n"
        "run = [sys.executable, '-m', 'torch.distributed.run', 'script.py']\n"
        "for command in (run, [*run, '-m', 'smckpt.run'], ['python', '-c', 'torchrun=1'], ['x']):\n"
        "    subprocess.run(command, **none)\n"
        "subprocess.run('torchrun --first', shell=True)\n"
        "os.system('accelerate launch --second')\n"
        "subprocess.run(['python', '/env/bin/deepspeed', '--third'], **none)\n"
    )
    done = started(tmp_path, "-m", "smckpt.run", str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    named = [line for line in done.stderr.splitlines() if "this launcher" in line]
    for line, text in zip(named, ("script.py", "--first", "--second", "--third"), strict=True):
        assert text in line


@pytest.mark.parametrize("name", ["absent", "absent.part", "json", "torch.distributed.run"])
def test_a_module_that_cannot_be_run_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no module|not found|would start"):
        run_script(name, module=True)
