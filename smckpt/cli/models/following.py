"""`smckpt export --follow`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from smckpt.cli.output import bytes_text, count_text, print_error, print_line

__all__ = ["follow_run"]

_NICENESS, _IDLE = 10, 3


def follow_run(
    root: Sequence[str], out: str, as_json: bool, options: dict[str, Any], given: dict[str, Any]
) -> None:
    """Print a line for each step that is exported. Exit with 1 in the end if one failed.

    Args:
        options: of `export_hf`. given: of `follow`.
    """
    from smckpt.manager.follow import follow
    from smckpt.storage.disk.linux import lower_priority
    from smckpt.translate import ExportReport, export_hf

    if len(root) != 1:
        raise click.UsageError("--follow takes one ROOT")
    if "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise click.UsageError("--follow is one process: run it without torchrun")
    options.pop("overwrite")  # what has no record is the rest of an export
    lower_priority(_NICENESS, _IDLE)
    reports: list[ExportReport] = []

    def export(checkpoint: str, directory: str) -> None:
        reports[:] = [export_hf(checkpoint, directory, overwrite=True, **options)]

    failed = 0
    for done in follow(root[0], out, export, **given):
        step, error = done.checkpoint.step, done.error
        failed += error is not None
        if as_json:  # a line each, for a program that reads along
            told = {
                "checkpoint": done.checkpoint.path, "step": step, "directory": done.directory,
                "seconds": done.seconds, "error": None if error is None else str(error),
            }  # fmt: skip
            print(json.dumps(told, ensure_ascii=False), flush=True)
        elif error is not None:
            print_error(error)
        else:
            (report,) = reports
            print_line(
                f"step {step}: {count_text(report.tensors, 'tensor')}, "
                f"{bytes_text(report.nbytes)}, {done.seconds:.1f} s: {done.directory}"
            )
    sys.exit(1 if failed else 0)
