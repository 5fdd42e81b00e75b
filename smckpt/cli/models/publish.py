"""The commands `publish` and `apply`."""

from __future__ import annotations

from dataclasses import asdict

import click

from smckpt.cli.output import bytes_text, print_json, print_line

__all__ = ["apply", "publish"]

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a line.")


@click.command()
@click.argument("source")
@click.argument("out")
@click.option("--delta", type=click.Choice(["tensor", "block", "none"]), default="tensor",
              show_default=True, help="Write the tensors, or the blocks of 1 MiB, that changed "
              "since the last publish; none: everything.")  # fmt: skip
@click.option("--full-every", type=click.IntRange(1), default=20, show_default=True,
              help="Write everything after this many publishes.")  # fmt: skip
@_as_json
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
@_as_json
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
