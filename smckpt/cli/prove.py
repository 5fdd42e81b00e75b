"""The command line of `smckpt prove`."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import click

from smckpt.cli.compare import ignore
from smckpt.cli.output import print_json, print_line, visible
from smckpt.errors import UsageError

__all__ = ["prove"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--kill-at", type=click.IntRange(0), metavar="STEP",
              help="Kill at the commit of this step, or the first later one. "
              "By default at the first commit.")  # fmt: skip
@click.option("--out", metavar="DIR",
              help="A new directory, or URL, for the checkpoints, which is kept. By "
                  "default one in the working directory, which is removed if the resume "
                  "is exact.")  # fmt: skip
@click.option("--chdir", is_flag=True,
              help="Run the command in the run's directory. For scripts that save below their "
              "working directory.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(1), default=3600.0, show_default=True,
              help="Seconds for each of the three runs.")  # fmt: skip
@ignore
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a line.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def prove(
    kill_at: int | None,
    out: str | None,
    chdir: bool,
    timeout: float,
    ignore: tuple[str, ...],
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Prove that COMMAND resumes exactly: smckpt prove -- torchrun … train.py --out {root}

    It runs COMMAND until a step is committed and kills it (SIGKILL). It runs COMMAND again to its
    end, and once more in another directory without a kill. Then it compares the checkpoints bit for
    bit. {root} stands for the directory of checkpoints; the variable SMCKPT_PROVE_ROOT names it
    too.

    Exit status: 0 exact, 1 not exact, 2 not proved (a run failed, or committed nothing).
    """
    from smckpt.run import ending
    from smckpt.run.prove import Proving

    ending.watch()
    logging.getLogger("smckpt").setLevel(logging.ERROR)  # steps may be saved and deleted meanwhile
    root = _root_of(out, chdir)
    done = False
    try:
        found = Proving(root, command, kill_at, chdir, timeout, ignore, _say).prove()
        done = found.exact
    finally:
        if out is None and done:
            shutil.rmtree(root, ignore_errors=True)
        elif out is None:
            _say(f"the runs' checkpoints stay in {root}")
    if as_json:
        print_json(found.to_json())
    else:
        print_line(found.line)
    sys.exit(0 if found.exact else 1)


def _root_of(out: str | None, chdir: bool) -> str:
    """The directory of the runs. It must be empty, or the first run would resume from it."""
    from smckpt.storage.urls import is_local, local_path

    if out is None:
        return tempfile.mkdtemp(prefix="smckpt-prove-", dir=os.getcwd())
    if not is_local(out):
        from smckpt.checkpoint.discover import find_checkpoints

        if chdir:
            raise UsageError("--chdir needs a directory", remedy="pass a directory to --out")
        if find_checkpoints(out):
            raise UsageError(
                "there are checkpoints in it already", remedy="pass a new --out", path=out
            )
        return out
    place = Path(local_path(out)).absolute()
    if place.exists() and any(place.iterdir()):
        raise UsageError("the directory is not empty", remedy="pass a new --out", path=out)
    place.mkdir(parents=True, exist_ok=True)
    return str(place)


def _say(line: str) -> None:
    print(f"smckpt prove: {visible(line)}", file=sys.stderr, flush=True)
