"""The command line of `smckpt chaos`."""

from __future__ import annotations

import logging
import sys

import click

from smckpt.cli.compare import ignore
from smckpt.cli.models.options import as_json
from smckpt.cli.output import print_json, print_line, visible
from smckpt.cli.proving import trials

__all__ = ["chaos"]


@click.command(context_settings=trials.settings)
@click.option("--moments", type=click.IntRange(1), default=20, show_default=True, metavar="N",
              help="Kill at this many moments, evenly spread over the run.")  # fmt: skip
@click.option("--all", "all_of_them", is_flag=True, help="Kill at every moment.")
@trials.out
@trials.chdir
@click.option("--timeout", type=click.FloatRange(1),
              help="Seconds for each run. By default an hour for the first, and ten times as long "
              "as that took, or 60, for each other.")  # fmt: skip
@ignore
@as_json
@trials.command
def chaos(
    moments: int,
    all_of_them: bool,
    out: str | None,
    chdir: bool,
    timeout: float | None,
    ignore: tuple[str, ...],
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Kill COMMAND in the middle of its saves: smckpt chaos -- torchrun … train.py --out {root}

    It runs COMMAND without a kill and counts its moments: each call by which one of its processes
    changes files below {root}, or sends something to the object store. Then it runs COMMAND to one
    of them, kills all of its processes (SIGKILL), runs COMMAND again to its end, and compares the
    checkpoints with those of the uninterrupted run; and so on for each chosen moment. {root} stands
    for the directory of checkpoints; the variable SMCKPT_PROVE_ROOT names it too.

    Exit status: 0 every resume was exact, 1 one was not, 2 nothing was found out (a run failed
    without a kill, or committed nothing).
    """
    from smckpt.run import ending
    from smckpt.run.chaos import Chaos

    ending.watch()
    logging.getLogger("smckpt").setLevel(logging.ERROR)  # what a kill leaves is no news here
    with trials.directory(out, chdir, "chaos", _say) as directory:
        asked = None if all_of_them else moments
        found = Chaos(directory.root, command, asked, chdir, timeout, ignore, _say).run()
        directory.exact = found.exact
    if as_json:
        print_json(found.to_json())
    else:
        for line in found.lines:
            print_line(line)
    sys.exit(0 if found.exact else 1)


def _say(line: str) -> None:
    print(f"smckpt chaos: {visible(line)}", file=sys.stderr, flush=True)
