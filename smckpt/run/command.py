"""The command line of `smckpt run` and `python -m smckpt.run`."""

from __future__ import annotations

import click

from smckpt.run.places import DOORS
from smckpt.run.script import run_script

__all__ = ["run"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--for",
    "doors",
    metavar="NAME[,NAME…]",
    help=f"Doors, separated by commas: {', '.join(DOORS)}. By default sagemaker.",
)
@click.option("--force", is_flag=True, help="Also use versions that were not tested.")
@click.option("--shadow", is_flag=True, help="Also shadow a real package that is installed.")
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    doors: str | None, force: bool, shadow: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT, written for another checkpoint system, with smckpt in its place.

    Under torchrun: torchrun … -m smckpt.run [OPTIONS] SCRIPT [ARGUMENTS]…
    """
    chosen = None if doors is None else [name for name in doors.split(",") if name]
    run_script(script, arguments, doors=chosen, force=force, shadow=shadow)
