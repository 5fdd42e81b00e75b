"""The commands that run a training to show that it resumes, `prove` and `chaos`; and
`keeper`, a keeper as a service of its host, which outlives the jobs there."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from smckpt.cli.output import as_json, bytes_text, print_line, print_report, visible
from smckpt.cli.verify import ignore
from smckpt.errors import UsageError

_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}

_chdir = click.option("--chdir", is_flag=True,
                     help="Run the command in the run's directory. For scripts that save below "
                     "their working directory.")  # fmt: skip
_out = click.option("--out", metavar="DIR",
                   help="A new directory, or URL, for the checkpoints, which is kept. By default "
                   "one in the working directory, which is removed if all is exact.")  # fmt: skip
_command = click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)


@dataclass
class TrialsDirectory:
    """Where the runs save. exact: set when they were, so that a directory of ours is removed."""

    root: str
    command: str
    exact: bool = False

    def say(self, line: str) -> None:
        print(f"smckpt {self.command}: {visible(line)}", file=sys.stderr, flush=True)


@contextmanager
def _directory(out: str | None, chdir: bool, command: str) -> Iterator[TrialsDirectory]:
    """The directory of the runs of a command. It must be empty, or the first run would resume from
    it.

    Raises:
        UsageError: there is something in it.
    """
    from smckpt.run import ending
    from smckpt.storage.urls import disk_path

    ending.watch()
    # steps may be saved and deleted meanwhile, and what a kill leaves is no news here
    logging.getLogger("smckpt").setLevel(logging.ERROR)
    if out is None:
        made = TrialsDirectory(
            tempfile.mkdtemp(prefix=f"smckpt-{command}-", dir=os.getcwd()), command
        )
        try:
            yield made
        finally:
            if made.exact:
                shutil.rmtree(made.root, ignore_errors=True)
            else:
                made.say(f"the runs' checkpoints stay in {made.root}")
        return
    if (there := disk_path(out)) is None:
        from smckpt.checkpoint.commits.discover import find_checkpoints

        if chdir:
            raise UsageError("--chdir needs a directory", remedy="pass a directory to --out")
        if find_checkpoints(out):
            raise UsageError(
                "there are checkpoints in it already", remedy="pass a new --out", path=out
            )
        yield TrialsDirectory(out, command)
        return
    path = Path(there)
    if path.exists() and any(path.iterdir()):
        raise UsageError("the directory is not empty", remedy="pass a new --out", path=out)
    path.mkdir(parents=True, exist_ok=True)
    yield TrialsDirectory(str(path), command)


@click.command(context_settings=_settings)
@click.option("--kill-at", type=click.IntRange(0), metavar="STEP",
              help="Kill at the commit of this step, or the first later one. "
              "By default at the first commit.")  # fmt: skip
@_out
@_chdir
@click.option("--timeout", type=click.FloatRange(1), default=3600.0, show_default=True,
              help="Seconds for each of the three runs.")  # fmt: skip
@ignore
@as_json
@_command
def prove(out: str | None, as_json: bool, **options: Any) -> None:
    """Prove that COMMAND resumes exactly: smckpt prove -- torchrun … train.py --out {root}

    It runs COMMAND until a step is committed and kills it (SIGKILL). It runs COMMAND again to its
    end, and once more in another directory without a kill. Then it compares the checkpoints bit for
    bit. {root} stands for the directory of checkpoints; the variable SMCKPT_PROVE_ROOT names it
    too.

    Exit status: 0 exact, 1 not exact, 2 not proved (a run failed, or committed nothing).
    """
    from smckpt.run.prove import Proving

    with _directory(out, options["chdir"], "prove") as directory:
        found = Proving(directory.root, say=directory.say, **options).prove()
        directory.exact = found.exact
    print_report(as_json, found.to_json(), found.line)
    sys.exit(0 if found.exact else 1)


@click.command(context_settings=_settings)
@click.option("--moments", type=click.IntRange(1), default=20, show_default=True, metavar="N",
              help="Kill at this many moments, evenly spread over the run.")  # fmt: skip
@click.option("--all", "all_of_them", is_flag=True, help="Kill at every moment.")
@_out
@_chdir
@click.option("--timeout", type=click.FloatRange(1),
              help="Seconds for each run. By default an hour for the first, and ten times as long "
              "as that took, or 60, for each other.")  # fmt: skip
@ignore
@as_json
@_command
def chaos(out: str | None, all_of_them: bool, as_json: bool, **options: Any) -> None:
    """Kill COMMAND in the middle of its saves: smckpt chaos -- torchrun … train.py --out {root}

    It runs COMMAND without a kill and counts its moments: each call by which one of its processes
    changes files below {root}, or sends something to the object store. Then it runs COMMAND to one
    of them, kills all of its processes (SIGKILL), runs COMMAND again to its end, and compares the
    checkpoints with those of the uninterrupted run; and so on for each chosen moment. {root} stands
    for the directory of checkpoints; the variable SMCKPT_PROVE_ROOT names it too.

    Exit status: 0 every resume was exact, 1 one was not, 2 nothing was found out (a run failed
    without a kill, or committed nothing).
    """
    from smckpt.run.chaos import Chaos

    if all_of_them:
        options["moments"] = None
    with _directory(out, options["chdir"], "chaos") as directory:
        found = Chaos(directory.root, say=directory.say, **options).trials()
        directory.exact = found.exact
    print_report(as_json, found.to_json(), *found.lines)
    sys.exit(0 if found.exact else 1)


@click.command("keeper")
@click.argument("name")
@click.option(
    "--address", required=True,
    help="Where other hosts reach it: an address of this host, in the network of the job.",
)  # fmt: skip
@click.option("--port", type=int, default=0, help="By default any that is free.")
@click.option(
    "--budget", type=click.FloatRange(min=0, min_open=True), required=True,
    help="GiB of memory for steps, of this host's ranks and copies of others'.",
)  # fmt: skip
def keeper(name: str, address: str, port: int, budget: float) -> None:
    """Hold the last steps of the job NAME in this host's memory, until SIGTERM.

    Start one on each host, as the user of the training processes and in their network namespace;
    give the ranks SMCKPT_KEEPER=NAME and `CheckpointManager(memory=Memory(...))`. The steps then
    survive the end of torchrun too. One job at a time uses it.
    """
    from smckpt.storage.memory.keeper import Keeper, listening

    if not name or not all(c.isalnum() or c in "-_." for c in name):
        raise click.BadParameter("letters, digits, '-', '_' and '.' alone", param_hint="NAME")
    local = listening(name)
    if local is None:
        raise click.ClickException(f"a keeper of {name} runs on this host already")
    ended, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(end)
    nbytes = int(budget * 2**30)
    with local:
        service = Keeper(nbytes, address, port)
        where = "{}:{}".format(*service.address)
        print_line(f"keeper {name} at {where}, {bytes_text(nbytes)}")
        sys.stdout.flush()  # into a log, it would wait for the end
        service.serve(local, [ended])
