"""The commands `publish` and `apply`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from smckpt.cli.models.options import as_json
from smckpt.cli.output import bytes_text, count_text, print_error, print_json, print_line

__all__ = ["apply", "follow_run", "publish", "reload"]


@click.command()
@click.argument("source")
@click.argument("out")
@click.option("--delta", type=click.Choice(["tensor", "block", "none"]), default="tensor",
              show_default=True, help="Write the tensors, or the blocks of 1 MiB, that changed "
              "since the last publish; none: everything.")  # fmt: skip
@click.option("--full-every", type=click.IntRange(1), default=20, show_default=True,
              help="Write everything after this many publishes.")  # fmt: skip
@as_json
def publish(source: str, out: str, delta: str, full_every: int, as_json: bool) -> None:
    """Write to OUT what changed in the model directory SOURCE since the last publish.

    SOURCE has safetensors files, as `smckpt export` writes them. `smckpt apply` makes it again,
    byte for byte, where servers are. Both may be in S3.
    """
    from smckpt.translate.publishing.publish import publish as run

    report = run(source, out, delta=None if delta == "none" else delta, full_every=full_every)
    if as_json:
        print_json(asdict(report))
        return
    changed = f"{report.tensors} of {report.tensors_in_all} tensors changed"
    what = "all" if report.full else changed if report.nbytes else "nothing changed"
    print_line(f"{what}: {bytes_text(report.nbytes)}, {report.seconds:.1f} s: {report.directory}")


@click.command()
@click.argument("root")
@click.argument("directory")
@click.option("--number", type=click.IntRange(0), help="Which publish. By default the newest.")
@click.option("--keep", type=click.IntRange(1), default=2, show_default=True,
              help="How many publishes stay in DIRECTORY.")  # fmt: skip
@as_json
def apply(root: str, directory: str, number: int | None, keep: int, as_json: bool) -> None:
    """Make DIRECTORY/latest the model that was last published at ROOT.

    It reads what changed, compares the result with its checksums, and then moves the link.
    """
    from smckpt.translate.publishing.apply import apply_published

    report = apply_published(root, directory, number=number, keep=keep)
    if as_json:
        print_json(asdict(report))
        return
    print_line(
        f"publish {report.number}, {bytes_text(report.nbytes)} read, {report.seconds:.1f} s: "
        f"{report.directory}"
    )


@click.command()
@click.argument("directory")
@click.argument("server", nargs=-1, required=True)
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True,
              help="Seconds that a server may take.")  # fmt: skip
@as_json
def reload(directory: str, server: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """Let running servers load the weights in DIRECTORY in place of theirs.

    SERVER is the URL of vLLM (started with VLLM_SERVER_DEV_MODE=1) or SGLang, which sees DIRECTORY
    at the same path: an export, or the link `latest` of `smckpt apply`. What it has cached of
    prompts is dropped.
    """
    from smckpt.translate.publishing.servers import reload_weights

    reports = [reload_weights(directory, url, timeout=timeout) for url in server]
    if as_json:
        print_json([asdict(report) for report in reports])
        return
    for report in reports:
        print_line(
            f"{report.server} ({report.kind}) has the weights of {report.directory}, "
            f"{report.seconds:.1f} s"
        )


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
    lower_priority(_NICENESS, _IDLE)
    reports: list[ExportReport] = []

    def export(checkpoint: str, directory: str) -> None:
        reports[:] = [export_hf(checkpoint, directory, **options)]

    failed = 0
    for done in follow(root[0], out, export, **given):
        step, error = done.checkpoint.step, done.error
        failed += error is not None
        if as_json:  # a line each, for a program that reads along
            record = {
                "checkpoint": done.checkpoint.path, "step": step, "directory": done.directory,
                "seconds": done.seconds, "error": None if error is None else str(error),
            }  # fmt: skip
            print(json.dumps(record, ensure_ascii=False), flush=True)
        elif error is not None:
            print_error(error)
        else:
            (report,) = reports
            print_line(
                f"step {step}: {count_text(report.tensors, 'tensor')}, "
                f"{bytes_text(report.nbytes)}, {done.seconds:.1f} s: {done.directory}"
            )
    sys.exit(1 if failed else 0)
