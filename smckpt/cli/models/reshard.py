"""The command `reshard`."""

from __future__ import annotations

import click

from smckpt.cli.output import bytes_text, count_text, print_json, print_line, progress_bar

__all__ = ["reshard"]


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--shard", type=click.IntRange(1), help="The number of ranks.")
@click.option("--full", is_flag=True, help="Whole tensors, in one rank's file; as --shard 1.")
@click.option("--threads", type=click.IntRange(1, 256), default=4, show_default=True,
              help="Threads that read and check.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a line.")
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
    if as_json:
        print_json(report.to_json())
        return
    print_line(
        f"{report.kind}, {count_text(report.ranks, 'rank')}: "
        f"{count_text(report.tensors, 'tensor')}, {bytes_text(report.nbytes)}, "
        f"{report.seconds:.1f} s: {report.target}"
    )
