"""The command line of `smckpt prove`."""

from __future__ import annotations

import logging
import sys

import click

from smckpt.cli.compare import ignore
from smckpt.cli.models.options import as_json
from smckpt.cli.output import print_json, print_line, visible
from smckpt.cli.proving import trials

__all__ = ["prove"]


@click.command(context_settings=trials.settings)
@click.option("--kill-at", type=click.IntRange(0), metavar="STEP",
              help="Kill at the commit of this step, or the first later one. "
              "By default at the first commit.")  # fmt: skip
@trials.out
@trials.chdir
@click.option("--timeout", type=click.FloatRange(1), default=3600.0, show_default=True,
              help="Seconds for each of the three runs.")  # fmt: skip
@ignore
@as_json
@trials.command
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
    with trials.directory(out, chdir, "prove", _say) as directory:
        found = Proving(directory.root, command, kill_at, chdir, timeout, ignore, _say).prove()
        directory.exact = found.exact
    if as_json:
        print_json(found.to_json())
    else:
        print_line(found.line)
    sys.exit(0 if found.exact else 1)


def _say(line: str) -> None:
    print(f"smckpt prove: {visible(line)}", file=sys.stderr, flush=True)
