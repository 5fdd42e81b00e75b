"""Run a command of this Python in a process that has imported torch already.

Importing torch takes two to three seconds of processor time, and tests start hundreds of programs.
These are forked from the server that tests/support/launch.py forks ranks from; below it they are
processes like others: arguments, environment, directory, output, exit handlers and exit status.
Under torchrun the agent forks its ranks.

It is not for a test of what an interpreter's start, an import or an interpreter's end does: the
end runs the threads and exit handlers, and takes nothing down. An interpreter with another torch is
started as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.launch import server
from tests.support.limits import seconds

__all__ = ["Piped", "Program", "run"]

TORCHRUN = ("-m", "torch.distributed.run")


@dataclass(frozen=True)
class _Interpreter:
    """What a forked process takes over from an interpreter that has this one's torch."""

    executable: str
    prefix: str
    paths: tuple[str, ...]

    @staticmethod
    @functools.cache
    def of(executable: str) -> _Interpreter | None:
        """None: its torch is another one."""
        if executable == sys.executable:
            return _Interpreter(executable, sys.prefix, ())
        code = (
            "import importlib.util, json, sys\n"
            "torch = importlib.util.find_spec('torch')\n"
            "print(json.dumps([torch and torch.origin, sys.prefix, sys.path[1:]]))"
        )
        found = subprocess.run(
            [executable, "-c", code], capture_output=True, text=True, timeout=seconds(60)
        )
        ours = importlib.util.find_spec("torch")
        assert ours is not None
        torch, prefix, paths = json.loads(found.stdout)
        if torch != ours.origin:
            return None
        return _Interpreter(executable, prefix, tuple(p for p in paths if p not in sys.path))

    def be(self) -> None:
        """Its own packages come before those that both have."""
        sys.executable, sys.prefix = self.executable, self.prefix
        first = next(at for at, path in enumerate(sys.path) if path.endswith("site-packages"))
        sys.path[first:first] = self.paths
        own = {
            name.removesuffix(".py")
            for path in self.paths if os.path.isdir(path) for name in os.listdir(path)
        }  # fmt: skip
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]  # the other environment's, which the server imported


class Program:
    """A program that runs, with the verbs of `subprocess.Popen` that tests use.

    Args:
        command: an interpreter (`serves`) and its arguments: `-u` and `-W ignore`, then `-c CODE`,
            `-m MODULE` or a file.
        stdout, stderr: files that get its output; without the second, the first gets both.
        stdin: a file, if it reads one.
    """

    def __init__(
        self,
        command: Sequence[str],
        stdout: Path,
        stderr: Path | None = None,
        stdin: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        self.args = [*map(str, command)]
        interpreter = _Interpreter.of(self.args[0])
        assert interpreter is not None, f"it has another torch: {command[0]}"
        environment = dict(os.environ if env is None else env)
        files = (str(stdin or os.devnull), str(stdout), str(stderr or stdout))
        self._process = server().Process(
            target=_main,
            args=(interpreter, self.args[1:], environment, str(cwd or os.getcwd()), files),
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()


class Piped(Program):
    """With pipes for its input and output.

    Args:
        merged: stdout gets both.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        merged: bool = False,
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            stdin, stdout, stderr = (Path(folder, name) for name in ("in", "out", "err"))
            for path in (stdin, stdout, stderr):
                os.mkfifo(path)
            super().__init__(command, stdout, None if merged else stderr, stdin, env=env, cwd=cwd)
            # each waits until the program opens its end, in the same order
            self.stdin = stdin.open("w")
            self.stdout = stdout.open(errors="replace")
            self.stderr = self.stdout if merged else stderr.open(errors="replace")

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it still writes until its end."""
        self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            rest = [pool.submit(stream.read) for stream in {self.stdout: 0, self.stderr: 0}]
            try:
                self.wait(timeout)
            except BaseException:
                self.kill()
                raise
        self.close()
        return rest[0].result(), rest[-1].result()

    def close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                stream.close()


def run(
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(command, capture_output=True, text=True, …)`, sooner where it can be."""
    if _Interpreter.of(str(command[0])) is None:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=env, cwd=cwd, check=False
        )
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        program = Program(command, stdout, stderr, env=env, cwd=cwd)
        try:
            status = program.wait(timeout)
        except BaseException:
            program.kill()
            program.wait()
            print(stdout.read_text(errors="replace"), stderr.read_text(errors="replace"))
            raise
        said = [path.read_text(errors="replace") for path in (stdout, stderr)]
    return subprocess.CompletedProcess(program.args, status, *said)


def _main(
    interpreter: _Interpreter,
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    files: tuple[str, str, str],
) -> None:
    """The forked process: become the program, and leave as an interpreter leaves."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for descriptor, path in enumerate(files):
        if descriptor == 2 and path == files[1]:  # opened, and a pipe's name may be gone
            os.dup2(descriptor - 1, descriptor)
            continue
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY
        opened = os.open(path, how)
        os.dup2(opened, descriptor)
        os.close(opened)
    _be_a_program_of_its_own()
    interpreter.be()
    status = _ended(arguments)
    os._exit(status)


def _be_a_program_of_its_own() -> None:
    """No child of multiprocessing, with other paths and another generator than the server."""
    import multiprocessing
    import multiprocessing.process

    import numpy
    import torch

    process: Any = multiprocessing.process
    process._parent_process = None
    mine = multiprocessing.current_process()
    vars(mine).update(_identity=(), _name="MainProcess", _parent_pid=None)
    multiprocessing.set_start_method(None, force=True)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _ended(arguments: Sequence[str]) -> int:
    """Run the program, its threads and its exit handlers to their end. The exit status."""
    import atexit
    import threading
    import traceback

    atexit._clear()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    status: Any = 0
    try:
        _interpret(arguments)
    except SystemExit as end:
        status = end.code
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status or 0) & 0xFF


def _interpret(arguments: Sequence[str]) -> None:
    """What `python ARGUMENTS` does after its start."""
    import runpy
    import types
    import warnings

    arguments = [*arguments]
    while arguments[0] in ("-u", "-W"):
        option = arguments.pop(0)
        if option == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
        # -u is as it is: lines are written when they end
    if tuple(arguments[:2]) == TORCHRUN:
        _torchrun(arguments[2:])
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        code = compile(arguments[1], "<string>", "exec")
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        main.__file__ = arguments[0]
        code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec")
    exec(code, main.__dict__)


def _torchrun(arguments: Sequence[str]) -> None:
    """torchrun as it is, except that its agent forks the ranks."""
    from dataclasses import replace

    from torch.distributed import run as torchrun
    from torch.distributed.launcher.api import elastic_launch

    given = torchrun.parse_args(arguments)
    if given.standalone:
        given.rdzv_backend, given.rdzv_endpoint = "c10d", "localhost:0"
        given.rdzv_id = str(os.getpid())
    config, _, rank = torchrun.config_from_args(given)
    elastic_launch(config=replace(config, start_method="fork"), entrypoint=_rank)(*rank)


def _rank(*arguments: str) -> None:
    """One rank. The agent takes its return for success, so that a failure leaves here."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's handlers
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = _ended(arguments)
    if status:
        os._exit(status)
