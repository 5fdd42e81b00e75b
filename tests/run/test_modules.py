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


STARTS = """
import multiprocessing, os, sys
import torch.distributed.run as torchrun
from torch import multiprocessing as mp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank(*_):
    from torch.distributed import checkpoint
    # in one write, so that the lines of two ranks do not mix
    os.write(1, f"a rank has {checkpoint.save.__module__}\\n".encode())

def elastic(entry, start="spawn"):
    return elastic_launch(
        LaunchConfig(
            1, 1, 2, run_id="x", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
            start_method=start, rdzv_configs={"join_timeout": 60},
        ), entry)

def accelerated(launcher):
    import accelerate
    getattr(accelerate, launcher)(rank, num_processes=2)

job = ["--standalone", "--nproc-per-node", "2"]
ways = {
    "rank": rank,
    "spawn": lambda: mp.spawn(rank, nprocs=2),
    "forkserver": lambda: mp.start_processes(rank, nprocs=2, start_method="forkserver"),
    "elastic spawn": lambda: elastic(rank)(),
    "elastic fork": lambda: elastic(rank, "fork")(),
    "elastic python": lambda: elastic(sys.executable)("-W", "default", "-u", __file__, "rank"),
    "torchrun": lambda: torchrun.main([*job, __file__, "rank"]),
    "torchrun -m": lambda: torchrun.main([*job, "-m", "starts", "rank"]),
    "torchrun, through smckpt": lambda: torchrun.main(
        [*job, "-m", "smckpt.run", "--for", "dcp", __file__, "rank"]),
    "torchrun --run-path": lambda: torchrun.main([*job, "--run-path", __file__, "rank"]),
    "notebook": lambda: accelerated("notebook_launcher"),
    "debug": lambda: accelerated("debug_launcher"),
}
if __name__ == "__main__":
    for name in sys.argv[1:]:
        ways[name]()
"""


LONG = (
    "forkserver", "elastic spawn", "elastic python", "torchrun -m", "torchrun, through smckpt",
    "torchrun --run-path", "notebook", "debug",
)  # fmt: skip


@pytest.mark.parametrize(
    "starts",
    ["spawn", "elastic fork", "torchrun", *(pytest.param(n, marks=pytest.mark.long) for n in LONG)],
)
def test_ranks_that_a_script_starts_have_the_doors(tmp_path: Path, starts: str) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    done = started(tmp_path, "-m", "smckpt.run", "--for", "dcp", str(script), starts)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [line for line in done.stdout.splitlines() if line.startswith("a rank has")]
    assert ranks == ["a rank has smckpt.integrations.dcp.calls"] * 2, done.stdout
    assert "run without" not in done.stderr


@pytest.mark.long
def test_a_spawned_child_starts_ranks_with_the_doors_too(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(
        STARTS.replace(
            'if __name__ == "__main__":',
            "def inner(_):\n    ways['torchrun']()\n"
            "ways['inner'] = lambda: mp.spawn(inner, nprocs=1, daemon=False)\n"
            'if __name__ == "__main__":',
        )
    )
    done = started(tmp_path, "-m", "smckpt.run", "--for", "dcp", str(script), "inner")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("a rank has smckpt.integrations.dcp.calls") == 2, done.stdout


def test_what_starts_ranks_without_the_doors_is_named(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "if sys.argv[1:]:\n    sys.exit()\n"
        "python, none = sys.executable, {'executable': '/bin/true'}\n"
        "os.environ['PATH'] = '/nowhere'\n"  # nothing starts
        "rank = {**os.environ, 'RANK': '1'}\n"
        "run = [python, '-m', 'torch.distributed.run', 'script.py']\n"
        # none of these starts a rank that lacks the doors
        "for command in (\n"
        "    [*run[:3], '-m', 'smckpt.run', 'script.py'], ['python', '-c', 'torchrun=1'], ['x'],\n"
        "    ['pip', 'install', 'deepspeed'], ['cat', __file__], [python, '-c', '0'],\n"
        "):\n    subprocess.run(command, **none)\n"
        "for text in ('which torchrun', 'echo accelerate launch; true', 'echo \"torchrun'):\n"
        "    os.system(text)\n"
        "subprocess.run([python, '-c', '0'], env=dict(os.environ))\n"
        # each of these does
        "subprocess.run(run, **none)\n"
        "subprocess.run('torchrun --first', shell=True)\n"
        "os.system('accelerate launch --second')\n"
        "subprocess.run(['python', '/env/bin/deepspeed', '--third'], **none)\n"
        "os.system('cd / && A=1 B=2 nohup torchrun --fourth & wait')\n"
        "subprocess.run(['bash', '-lc', 'nice -n 5 mpirun --fifth | tee log'], **none)\n"
        "os.system('for a in 1; do\\n srun --sixth\\ndone')\n"
        "subprocess.run(['any', '--seventh'], env=rank, **none)\n"
        "subprocess.run([python, __file__, '--eighth'])\n"
        "os.posix_spawn(python, [python, __file__, '--ninth'], {'LOCAL_RANK': '0'})\n"
        "if not os.fork():\n    os.execve(python, [python, __file__, '--tenth'], rank)\n"
        "os.wait()\n"
    )
    done = started(tmp_path, "-m", "smckpt.run", str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    named = [line for line in done.stderr.splitlines() if "without what smckpt" in line]
    texts = "script.py --first --second --third --fourth --fifth --sixth --seventh --eighth --ninth"
    for line, text in zip(named, [*texts.split(), "--tenth"], strict=True):
        assert text in line


@pytest.mark.parametrize("name", ["absent", "absent.part", "json", "torch.distributed.run"])
def test_a_module_that_cannot_be_run_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no module|not found|would start"):
        run_script(name, module=True)
