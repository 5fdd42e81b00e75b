"""Runs a script as `python script.py` does, after `provide`."""

from __future__ import annotations

import builtins
import json
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from smckpt.errors import UsageError
from smckpt.run.places import Provided, provide

__all__ = ["main_of_child", "run_script"]

# The environment variable that tells a child of multiprocessing to provide the same doors.
_VARIABLE = "SMCKPT_RUN"
_CHILD = "smckpt.run.child"


def run_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    doors: Sequence[str] | None = None,
    force: bool = False,
    shadow: bool = False,
) -> None:
    """Provide the doors, print the changes on rank 0, and run the script as `__main__`.

    Args:
        script: path of a Python file.
        arguments: of the script.
        doors, force, shadow: as in `provide`.

    Raises:
        UsageError: as `provide` does; or there is no such file.
        SystemExit: the script's own; or 1, with a traceback on stderr, if the script raises.
    """
    path = os.path.abspath(script)
    if not os.path.isfile(path):
        raise UsageError("there is no such script", remedy="pass a Python file", path=path)
    _say(provide(doors, force=force, shadow=shadow))
    told = {"script": path, "doors": doors, "force": force, "shadow": shadow}
    os.environ[_VARIABLE] = json.dumps(told)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(path)
    main = ModuleType("__main__")
    # A spawned child of multiprocessing imports the module of this name as its `__main__`.
    main.__spec__ = ModuleSpec(_CHILD, None)
    main.__file__ = script
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as source:
            exec(compile(source.read(), script, "exec"), main.__dict__)
    except Exception:  # an error of the script is shown as Python shows it
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def main_of_child() -> dict[str, Any]:
    """The global names of the script, for a child that the script spawned."""
    told = json.loads(os.environ[_VARIABLE])
    provide(told["doors"], force=told["force"], shadow=told["shadow"])
    return runpy.run_path(told["script"], run_name="__mp_main__")


def _say(provided: Provided) -> None:
    if os.environ.get("RANK", "0") == "0":
        for line in provided.lines:
            print(f"smckpt run: {line}", file=sys.stderr)
        sys.stderr.flush()
