"""The command `import`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from smckpt.cli.output import bytes_text, count_text, print_json, print_line, progress_bar

__all__ = ["import_", "mtp", "threads"]

mtp = click.option(
    "--mtp", type=click.Choice(["drop", "keep"]), default="drop", show_default=True,
    help="Layers that predict further tokens: leave them out, or keep them.",
)  # fmt: skip
threads = click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Threads that read and write.",
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
@click.option("--allow-equal-ranks", is_flag=True, help="Of SOURCE, as for export.")
@mtp
@click.option("--from-layout", help="Of SOURCE: --layout of export. By default found.")
@click.option("--from-tp", type=click.IntRange(1), help="Of SOURCE, if it is not recorded.")
@click.option("--from-ep", type=click.IntRange(1), help="Of SOURCE, if it is not recorded.")
@click.option("--from-etp", type=click.IntRange(1), help="Of SOURCE, as for export.")
@click.option("--from-pp", type=click.IntRange(1), help="Of SOURCE, as for export.")
@click.option("--from-vpp", type=click.IntRange(1), help="Of SOURCE, as for export.")
@click.option("--from-padded-vocab-size", type=click.IntRange(1), help="Of SOURCE, as for export.")
@click.option("--from-prefix", help="The model's key in SOURCE. By default found.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a line.")
def import_(source: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Write the model in SOURCE as a checkpoint of tensor-parallel ranks, in OUT, on disk or in S3.

    SOURCE is a Hugging Face directory, or anything else that `smckpt export` reads: a checkpoint at
    other degrees or of another layout goes to the new one in one step.
    """
    from smckpt.translate import import_hf

    with progress_bar("importing", quiet=as_json) as progress:
        report = import_hf(
            source if len(source) > 1 else source[0], out, progress=progress, **options
        )
    if as_json:
        print_json(asdict(report))
        return
    print_line(
        f"{report.layout}: {count_text(len(report.files), 'rank')}, "
        f"{bytes_text(report.nbytes)}, {report.seconds:.1f} s: {report.directory}"
    )
    if report.source != "smckpt":
        print_line(f"made from {report.source}")
