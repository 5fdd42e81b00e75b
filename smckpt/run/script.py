"""Runs a script as `python script.py` does, after `provide`."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from smckpt.errors import UsageError
from smckpt.run.doors import provide

__all__ = ["main_of_child", "run_script"]

# The environment variable that tells a child of multiprocessing to provide the same doors.
_VARIABLE = "SMCKPT_RUN"
_CHILD = "smckpt.run.child"

# Programs that start the ranks of a job, by the last part of their path or by the module's name.
_LAUNCHERS = frozenset(
    {
        "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed",
        "accelerate.commands.launch", "mpirun", "mpiexec", "srun",
    }
)  # fmt: skip
_STARTS = {"subprocess.Popen": 1, "os.exec": 1, "os.posix_spawn": 1, "os.system": 0}


def run_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    doors: Sequence[str] | None = None,
    force: bool = False,
    shadow: bool = False,
    module: bool = False,
) -> None:
    """Provide the doors, print the changes on rank 0, and run the script as `__main__`. A launcher
    that the script starts is named on stderr, because its ranks run without the doors.

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
    sys.addaudithook(_name_launcher)
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


def _name_launcher(event: str, values: tuple[Any, ...]) -> None:
    """An audit hook: names a launcher that the script starts."""
    if event not in _STARTS:
        return
    command = values[_STARTS[event]]
    if isinstance(command, (str, bytes)):
        try:
            words = shlex.split(os.fsdecode(command))
        except ValueError:
            return
    else:
        words = [os.fsdecode(word) for word in command or ()]
    if words[1:2] == ["-c"] and len(words) == 3:  # of a shell
        _name_launcher("os.system", (words[2],))
        return
    # the program itself, or what python runs
    starts = [os.path.basename(word) for word in words[:2]]
    starts += [words[at + 1] for at, word in enumerate(words[:-1]) if word == "-m"][:1]
    if _LAUNCHERS.isdisjoint(starts) or "smckpt.run" in words:
        return
    print(
        f"smckpt run: {' '.join(words)[:200]}: the ranks that this launcher starts run without "
        "what smckpt provides; let it run `-m smckpt.run` with the script",
        file=sys.stderr,
        flush=True,
    )
