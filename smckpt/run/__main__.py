"""`smckpt run`, and `torchrun … -m smckpt.run script.py …`."""

from __future__ import annotations

import sys

import click

from smckpt.errors import CheckpointError
from smckpt.run.doors import DOORS
from smckpt.run.script import run_script


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--for",
    "doors",
    metavar="NAME[,NAME…]",
    help=f"Doors, separated by commas: {', '.join(DOORS)}. By default sagemaker.",
)
@click.option("--force", is_flag=True, help="Also use versions that were not tested.")
@click.option("--shadow", is_flag=True, help="Also shadow a real package that is installed.")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.argument("script", type=click.Path(), required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    doors: str | None,
    force: bool,
    shadow: bool,
    module: str | None,
    script: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT, or a module with -m, written for another checkpoint system, with smckpt in its
    place.

    Under torchrun: torchrun … -m smckpt.run [OPTIONS] SCRIPT [ARGUMENTS]…
    """
    if module is None and script is None:
        raise click.UsageError("Missing argument 'SCRIPT', or -m MODULE.")
    if module is not None and script is not None:
        arguments = (script, *arguments)
    chosen = None if doors is None else [name for name in doors.split(",") if name]
    what = script if module is None else module
    assert what is not None
    run_script(what, arguments, doors=chosen, force=force, shadow=shadow, module=module is not None)


if __name__ == "__main__":
    try:
        run(prog_name="python -m smckpt.run")
    except CheckpointError as error:
        print(f"smckpt run: {error}", file=sys.stderr)
        sys.exit(2)
