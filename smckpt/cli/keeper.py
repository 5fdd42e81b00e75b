"""`smckpt keeper`: a keeper as a service of its host, which outlives the jobs there."""

from __future__ import annotations

import os
import signal
import sys

import click

from smckpt.cli.output import bytes_text, print_line


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
