"""The commands. Each imports what it needs when it runs, so that the others start at once.

Exit status: 0 fine, 1 the checkpoint is bad, 2 the command could not be carried out.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from smckpt._version import __version__
from smckpt.cli.output import (
    bytes_text,
    print_error,
    print_json,
    print_line,
    print_table,
    progress_bar,
    time_text,
)
from smckpt.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["app", "main"]

app = typer.Typer(
    name="smckpt",
    help="Find, show, verify and export smckpt checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help in plain text: drawing it with rich takes 0.1 s
    pretty_exceptions_enable=False,
)

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="The directory of a committed checkpoint.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Threads = Annotated[int, typer.Option(min=1, max=256, help="Threads that read.")]


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII terminal must not end in a traceback
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="smckpt: %(message)s", level=logging.WARNING)
    try:
        app()
    except CheckpointError as error:
        print_error(error)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print_line(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def ls(
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="A directory with checkpoints in or below it.")
    ],
    as_json: Json = False,
) -> None:
    """List the committed checkpoints in and below ROOT, newest first."""
    from smckpt.checkpoint.discover import find_checkpoints
    from smckpt.storage.urls import is_local, local_path

    # finding nothing in a mistyped directory would look like an answer
    if is_local(root) and not os.path.isdir(local_path(root)):
        raise CheckpointNotFoundError("no such directory", path=root)
    found = find_checkpoints(root)[::-1]
    if as_json:
        print_json([one.to_json() for one in found])
        return
    if not found:
        print_line(f"no committed checkpoint in or below {root}")
        return
    columns = ("checkpoint", "step", "kind", "size", "groups", "committed")
    rows = [
        (
            one.path,
            one.step,
            one.kind,
            bytes_text(one.nbytes),
            len(one.groups),
            time_text(one.committed_at),
        )
        for one in found
    ]
    print_table("", columns, rows, right=("step", "size", "groups"))


@app.command()
def show(
    checkpoint: Checkpoint,
    tensors: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only these: a glob, or a part of the name."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what CHECKPOINT holds: topology, tensors, sizes, who wrote what, metadata."""
    from smckpt.checkpoint.catalogue import open_catalogue
    from smckpt.cli.show import describe, print_description

    facts = describe(open_catalogue(checkpoint), tensors)
    if as_json:
        print_json(facts)
    else:
        print_description(facts, tensors)


@app.command()
def verify(
    checkpoint: Checkpoint,
    threads: Threads = 4,
    as_json: Json = False,
) -> None:
    """Read every byte of CHECKPOINT against its checksum; exit with 1 if anything is wrong."""
    from smckpt.checkpoint.verify import verify_checkpoint

    with progress_bar("verifying", quiet=as_json) as progress:
        report = verify_checkpoint(checkpoint, threads=threads, progress=progress)
    if as_json:
        print_json(report.to_json())
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The directory to write.")],
    config: Annotated[
        str | None,
        typer.Option(help="The model's config.json, or a directory with it and a tokenizer."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast to float32, bfloat16 or float16.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file: 5GB, 512MiB.")] = "5GB",
    prefix: Annotated[
        str | None, typer.Option(help="Where the model stands in the saved state; found if absent.")
    ] = None,
    threads: Threads = 4,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is in OUT.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the model in CHECKPOINT as a Hugging Face directory."""
    from smckpt.translate import export_hf

    with progress_bar("exporting", quiet=as_json) as progress:
        report = export_hf(
            checkpoint,
            out,
            config=config,
            dtype=dtype,
            max_shard_size=max_shard_size,
            prefix=prefix,
            threads=threads,
            progress=progress,
            overwrite=overwrite,
        )
    facts: dict[str, Any] = asdict(report)
    if as_json:
        print_json(facts)
        return
    print_line(
        f"{report.tensors} tensors, {bytes_text(report.nbytes)} in {len(report.files)} files, "
        f"{report.seconds:.1f} s: {report.directory}"
    )
