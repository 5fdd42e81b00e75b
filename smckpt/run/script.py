"""Runs a script as `python script.py` does, after `provide`, and sees to the ranks that it starts.

Children of multiprocessing import the script through `smckpt.run.child`. torch's elastic agent,
which torchrun, `accelerate launch` and `elastic_launch` share, starts Python scripts through
`smckpt.run`. Other launchers are named on stderr.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from smckpt.errors import UsageError
from smckpt.run.doors import provide

# The environment variable that tells a child of multiprocessing to provide the same doors.
_VARIABLE = "SMCKPT_RUN"
_CHILD = "smckpt.run.child"

# Programs that start the ranks of a job, by the last part of their path or by the module's name.
_LAUNCHERS = frozenset(
    {
        "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed",
        "accelerate.commands.launch", "deepspeed.launcher.runner", "mpirun", "mpiexec", "srun",
    }
)  # fmt: skip
# Programs that start the command after them.
_BEFORE = frozenset(
    {"do", "env", "exec", "nice", "nohup", "numactl", "stdbuf", "sudo", "then", "time", "timeout"}
)
# An event of Python's audit hooks → where its command stands, and its environment.
_STARTS: dict[str, tuple[int, int | None]] = {
    "subprocess.Popen": (1, 3), "os.exec": (1, 2), "os.posix_spawn": (1, 2), "os.system": (0, None),
}  # fmt: skip
# Variables that a program gives to the ranks that it starts.
_OF_RANKS = ("RANK", "LOCAL_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "ACCELERATE_MIXED_PRECISION")


def run_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    doors: Sequence[str] | None = None,
    force: bool = False,
    shadow: bool = False,
    module: bool = False,
) -> None:
    """Provide the doors, print the changes on rank 0, and run the script as `__main__`. Ranks that
    the script starts through multiprocessing or torch's elastic agent get the doors too; others are
    named on stderr.

    Args:
        script: path of a Python file; the name of a module if `module` is set.
        arguments: of the script.
        doors, force, shadow: as in `provide`.

    Raises:
        UsageError: as `provide` does; or there is no such file or module, or it is a launcher.
        SystemExit: the script's own; or 1, with a traceback on stderr, if the script raises.
    """
    if script in _LAUNCHERS or (os.path.basename(script) in _LAUNCHERS and not module):
        raise UsageError(
            f"{script} would start the script without what smckpt provides",
            remedy=f"let the launcher run smckpt: {os.path.basename(script)} … -m smckpt.run …",
        )
    package = ""
    if module:
        sys.path[0] = os.getcwd()
        path, package = _found(script)
    else:
        path = os.path.abspath(script)
        if not os.path.isfile(path):
            raise UsageError("there is no such script", remedy="pass a Python file", path=path)
        sys.path[0] = os.path.dirname(path)
    lines = provide(doors, force=force, shadow=shadow).lines
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(f"smckpt run: {line}", file=sys.stderr, flush=True)
    passed = {
        "script": script if module else path, "doors": doors, "force": force, "shadow": shadow,
        "module": module,
    }  # fmt: skip
    os.environ[_VARIABLE] = json.dumps(passed)
    _see_to_ranks(passed)
    sys.argv = [path if module else script, *arguments]
    main = ModuleType("__main__")
    # A spawned child of multiprocessing imports the module of this name as its `__main__`.
    main.__spec__ = _Spec(_CHILD, package)
    main.__package__ = package
    main.__file__ = path if module else script
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as source:
            exec(compile(source.read(), main.__file__, "exec"), main.__dict__)
    except Exception:  # an error of the script is shown as Python shows it
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def main_of_child() -> dict[str, Any]:
    """The global names of the script, for a child that the script spawned."""
    passed = json.loads(os.environ[_VARIABLE])
    provide(passed["doors"], force=passed["force"], shadow=passed["shadow"])
    _see_to_ranks(passed)
    run = runpy.run_module if passed.get("module") else runpy.run_path
    return run(passed["script"], run_name="__mp_main__")


class _Spec(ModuleSpec):
    """The spec of a `__main__` whose relative imports begin in a package."""

    def __init__(self, name: str, package: str) -> None:
        super().__init__(name, None)
        self._package = package

    @property
    def parent(self) -> str:
        return self._package


def _found(name: str) -> tuple[str, str]:
    """The file of a module and its package, as `python -m` finds them."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"the module {name} is not found: {error}", remedy="check the name, and PYTHONPATH"
        ) from error
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        raise UsageError(
            f"there is no module {name}, or it has no __main__",
            remedy="check the name, and PYTHONPATH",
        )
    return spec.origin, spec.parent or ""


def _see_to_ranks(passed: dict[str, Any]) -> None:
    """Let the ranks that this process starts run with the same doors, or name what starts them."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    options = [] if passed["doors"] is None else ["--for", ",".join(passed["doors"])]
    options += [f"--{name}" for name in ("force", "shadow") if passed[name]]
    stock = SubprocessHandler.__init__

    @functools.wraps(stock)
    def made(self: Any, entrypoint: str, args: Sequence[Any], *more: Any, **named: Any) -> None:
        entrypoint, *words = _with_doors([entrypoint, *map(str, args)], options)
        stock(self, entrypoint, tuple(words), *more, **named)

    SubprocessHandler.__init__ = made  # type: ignore[method-assign]
    sys.addaudithook(functools.partial(_name_launcher, passed["script"]))


def _with_doors(words: list[str], options: list[str]) -> list[str]:
    """A command that runs Python with a script or module, through `smckpt.run`. Another command is
    returned as it is."""
    runs = _run_by_python(words)
    if not runs or runs[0] in ("-", "-c") or runs[:2] in (["-m", "smckpt.run"], ["-m", "smckpt"]):
        return words
    return [*words[: -len(runs)], "-m", "smckpt.run", *options, *runs]


def _run_by_python(words: list[str]) -> list[str]:
    """What follows Python's own options: a script, or -m and a module; none for another program."""
    if not words or (words[0] != sys.executable and "python" not in os.path.basename(words[0])):
        return []
    at = 1
    while at < len(words) and re.match(r"-[^mc]", words[at]):
        at += 2 if words[at] in ("-W", "-X") else 1
    return words[at:]


def _name_launcher(script: str, event: str, values: tuple[Any, ...]) -> None:
    """An audit hook: names what starts ranks without the doors. That is a launcher, a command whose
    environment makes it a rank, or the script once more."""
    if event not in _STARTS:
        return
    command, environment = (None if at is None else values[at] for at in _STARTS[event])
    if not isinstance(command, (str, bytes)):
        command = [os.fsdecode(word) for word in command or ()]
        shell = len(command) == 3 and re.fullmatch("-[a-z]*c", command[1]) is not None
        commands = _simple(command[2]) if shell else [command]
    else:
        commands = _simple(os.fsdecode(command))
    given = {os.fsdecode(key): os.fsdecode(value) for key, value in (environment or {}).items()}
    is_rank = any(given[name] != os.environ.get(name) for name in _OF_RANKS if name in given)
    for words in commands:
        # before the program stand `A=b`, `nohup`, `nice -n 5`
        run = [word for word in words if not re.match(r"[A-Za-z_]\w*=", word)]
        while run and run[0] in _BEFORE:
            run = list(itertools.dropwhile(re.compile(r"-|\d").match, run[1:]))
        runs = _run_by_python(run) or run
        program = "".join(runs[1:2] if runs[:1] == ["-m"] else runs[:1])
        again = runs is not run and script in (program, os.path.abspath(program))
        launches = program in _LAUNCHERS or os.path.basename(program) in _LAUNCHERS
        if "smckpt.run" in words or not (again or is_rank or launches):
            continue
        print(
            f"smckpt run: {' '.join(words)[:200]}: the ranks that this starts run without what "
            "smckpt provides; let it run `-m smckpt.run` with the script",
            file=sys.stderr,
            flush=True,
        )


def _simple(command: str) -> list[list[str]]:
    """The simple commands of a shell's text; none where it cannot be read."""
    words = shlex.shlex(command, posix=True, punctuation_chars=";&|()\n")
    words.whitespace, words.whitespace_split, words.commenters = " \t\r", True, ""
    try:
        read = list(words)
    except ValueError:  # a quotation without an end
        return []
    split = itertools.groupby(read, lambda word: not set(word) <= set(";&|()\n"))
    return [list(group) for wanted, group in split if wanted]
