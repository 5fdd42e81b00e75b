"""Commands that make a checkpoint or a model of another form, or serve one: `convert`, `reshard`,
`import`, `publish`, `apply`, `reload`, and `export --follow`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from smckpt.cli.output import (
    as_json,
    bytes_text,
    mtp,
    of_ranks,
    print_error,
    print_line,
    print_report,
    progress_bar,
    taken,
    threads,
)
from smckpt.errors import count_text, few

_FORMATS = ("smckpt", "dcp", "torch", "trainer", "accelerate", "lightning", "torchtitan")


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--to", "to", type=click.Choice(_FORMATS), required=True,
              help="The format to write: smckpt's; a directory of torch.distributed.checkpoint; "
              "one file of torch.save; or what a framework itself resumes from, of a checkpoint "
              "that smckpt saved in that framework.")  # fmt: skip
@click.option("--shard", type=click.IntRange(1), default=1, show_default=True,
              help="With --to smckpt: the number of ranks. 1: whole tensors (FULL).")  # fmt: skip
@click.option("--rank", type=click.IntRange(0),
              help="Take what differs between ranks (random generators) from this saved rank. By "
              "default such names are refused.")  # fmt: skip
@click.option("--ignore", multiple=True, metavar="PATTERN",
              help="Leave these names out (a glob); may be repeated.")  # fmt: skip
@threads
@as_json
def convert(source: str, target: str, as_json: bool, **options: Any) -> None:
    """Write the checkpoint in SOURCE to TARGET in another format, under the same names, bit for
    bit.

    SOURCE is a checkpoint of smckpt, of torch DCP (accelerate, torchtitan, Megatron-core), a file
    of torch.save or safetensors, or a directory of Hugging Face. TARGET must not exist, or be
    empty. It appears whole or not at all.

    Exit status: 0 written, 2 refused or failed, and nothing was written.
    """
    from smckpt.formats.conversion.convert import convert as run

    with progress_bar("converting", quiet=as_json) as progress:
        report = run(source, target, progress=progress, **options)
    print_report(
        as_json,
        report.to_json(),
        f"left out: {few(report.ignored)}" if report.ignored else "",
        f"changed by DCP: {few(report.changed)}" if report.changed else "",
        f"{report.source_format} to {report.format}: {count_text(report.tensors, 'tensor')}, "
        f"{count_text(report.values, 'value')}, {bytes_text(report.nbytes)}, "
        f"{report.seconds:.1f} s: {report.target}",
    )


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--shard", type=click.IntRange(1), help="The number of ranks.")
@click.option("--full", is_flag=True, help="Whole tensors, in one rank's file; as --shard 1.")
@threads
@as_json
def reshard(
    source: str, target: str, shard: int | None, full: bool, threads: int, as_json: bool
) -> None:
    """Write the checkpoint in SOURCE to the empty directory TARGET, as another number of ranks
    would have saved it.

    A load at another number of ranks needs no such copy. It serves tools that read one file for
    each rank, and with --full those that want whole tensors.
    """
    from smckpt.checkpoint.upkeep.reshard import reshard_checkpoint

    if (shard is None) != full:
        raise click.UsageError("give either --shard N or --full")
    with progress_bar("resharding", quiet=as_json) as progress:
        report = reshard_checkpoint(
            source, target, shard=shard or 1, threads=threads, progress=progress
        )
    print_report(
        as_json,
        report.to_json(),
        f"{report.kind}, {count_text(report.ranks, 'rank')}: "
        f"{count_text(report.tensors, 'tensor')}, {bytes_text(report.nbytes)}, "
        f"{report.seconds:.1f} s: {report.target}",
    )


@click.command("import")
@click.argument("source", nargs=-1, required=True)
@click.argument("out")
@click.option("--layout", required=True, help="The tensor-parallel layout to write.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ep", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--etp", type=click.IntRange(1), help="Tensor-parallel degree of experts, if not --tp."
)
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Stages.")
@click.option("--config", help="The model's config.json; by default the one in SOURCE.")
@click.option(
    "--pad-vocab-to-multiple-of", type=click.IntRange(1), default=1, show_default=True,
    help="Make each rank's rows of the vocabulary a multiple of this.",
)  # fmt: skip
@click.option(
    "--prefix", default="model", show_default=True,
    help="The model's key in the state that will be loaded.",
)  # fmt: skip
@threads
@click.option("--overwrite", is_flag=True, help="Supersede a checkpoint that is in OUT.")
@click.option(
    "--allow-nonfinite", is_flag=True, help="Import weights that contain NaN or infinity."
)
@click.option(
    "--allow-equal-ranks", "from_allow_equal_ranks", is_flag=True, help="Of SOURCE, as for export."
)
@mtp
@of_ranks("from-", "Of SOURCE, as for export.")
@click.option("--from-prefix", help="The model's key in SOURCE. By default found.")
@as_json
def import_(source: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Write the model in SOURCE as a checkpoint of tensor-parallel ranks, in OUT, on disk or in S3.

    SOURCE is a Hugging Face directory, or anything else that `smckpt export` reads: a checkpoint at
    other degrees or of another layout goes to the new one in one step.
    """
    from smckpt.translate import ImportOptions, Parallel, import_hf

    options["source"] = taken(Parallel, options, "from_")
    options["parallel"] = taken(Parallel, options)
    with progress_bar("importing", quiet=as_json) as progress:
        options["options"] = taken(ImportOptions, options, progress=progress)
        report = import_hf(source if len(source) > 1 else source[0], out, **options)
    print_report(
        as_json,
        asdict(report),
        f"{report.layout}: {count_text(len(report.files), 'rank')}, "
        f"{bytes_text(report.nbytes)}, {report.seconds:.1f} s: {report.directory}",
        "" if report.source == "smckpt" else f"made from {report.source}",
    )


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
    changed = f"{report.tensors} of {report.tensors_in_all} tensors changed"
    what = "all" if report.full else changed if report.nbytes else "nothing changed"
    line = f"{what}: {bytes_text(report.nbytes)}, {report.seconds:.1f} s: {report.directory}"
    print_report(as_json, asdict(report), line)


@click.command()
@click.argument("root")
@click.argument("directory")
@click.option("--number", type=click.IntRange(0), help="Which publish. By default the newest.")
@click.option("--keep", type=click.IntRange(1), default=2, show_default=True,
              help="How many publishes stay in DIRECTORY.")  # fmt: skip
@click.option("--quick", is_flag=True,
              help="If the publish is served already, do not read files whose size and time are as "
              "they were made.")  # fmt: skip
@as_json
def apply(root: str, directory: str, as_json: bool, **options: Any) -> None:
    """Make DIRECTORY/latest the model that was last published at ROOT.

    It reads what changed, compares the result with its checksums, and then moves the link. If that
    publish is served already, it compares the files there, and makes those anew that differ.
    """
    from smckpt.translate.publishing.apply import apply_published

    report = apply_published(root, directory, **options)
    mended = f"made anew, because they differed: {', '.join(report.mended)}; let servers load again"
    print_report(
        as_json,
        asdict(report),
        f"publish {report.number}, {bytes_text(report.nbytes)} read, {report.seconds:.1f} s: "
        f"{report.directory}",
        mended if report.mended else "",
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
    lines = (
        f"{report.server} ({report.kind}) has the weights of {report.directory}, "
        f"{report.seconds:.1f} s"
        for report in reports
    )
    print_report(as_json, [asdict(report) for report in reports], *lines)


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
    lower_priority(10, 3)  # class 3 of `ionice -c`: idle
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
