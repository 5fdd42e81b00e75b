"""What the commands that run a user's script share: `prove` and `chaos`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from smckpt.errors import UsageError

__all__ = ["TrialsDirectory", "chdir", "command", "directory", "out", "settings"]

settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}

chdir = click.option("--chdir", is_flag=True,
                     help="Run the command in the run's directory. For scripts that save below "
                     "their working directory.")  # fmt: skip
out = click.option("--out", metavar="DIR",
                   help="A new directory, or URL, for the checkpoints, which is kept. By default "
                   "one in the working directory, which is removed if all is exact.")  # fmt: skip
command = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)


@dataclass
class TrialsDirectory:
    """Where the runs save. exact: set when they were, so that a directory of ours is removed."""

    root: str
    exact: bool = False


@contextmanager
def directory(
    out: str | None, chdir: bool, name: str, say: Callable[[str], None]
) -> Iterator[TrialsDirectory]:
    """The place for the runs of the command `name`.

    Raises:
        UsageError: there is something in it.
    """
    made = TrialsDirectory(_root_of(out, chdir, name))
    try:
        yield made
    finally:
        if out is None and made.exact:
            shutil.rmtree(made.root, ignore_errors=True)
        elif out is None:
            say(f"the runs' checkpoints stay in {made.root}")


def _root_of(out: str | None, chdir: bool, command: str) -> str:
    """The directory of the runs. It must be empty, or the first run would resume from it."""
    from smckpt.storage.urls import is_local, local_path

    if out is None:
        return tempfile.mkdtemp(prefix=f"smckpt-{command}-", dir=os.getcwd())
    if not is_local(out):
        from smckpt.checkpoint.commits.discover import find_checkpoints

        if chdir:
            raise UsageError("--chdir needs a directory", remedy="pass a directory to --out")
        if find_checkpoints(out):
            raise UsageError(
                "there are checkpoints in it already", remedy="pass a new --out", path=out
            )
        return out
    path = Path(local_path(out)).absolute()
    if path.exists() and any(path.iterdir()):
        raise UsageError("the directory is not empty", remedy="pass a new --out", path=out)
    path.mkdir(parents=True, exist_ok=True)
    return str(path)
