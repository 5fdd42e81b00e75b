"""The command `convert`."""

from __future__ import annotations

import click

from smckpt.cli.output import bytes_text, count_text, print_json, print_line, progress_bar

__all__ = ["convert"]

_SHOWN = 8  # names of a line
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
@click.option("--threads", type=click.IntRange(1, 256), default=4, show_default=True,
              help="Threads that read and check.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a line.")
def convert(
    source: str,
    target: str,
    to: str,
    shard: int,
    rank: int | None,
    ignore: tuple[str, ...],
    threads: int,
    as_json: bool,
) -> None:
    """Write the checkpoint in SOURCE to TARGET in another format, under the same names, bit for
    bit.

    SOURCE is a checkpoint of smckpt, of torch DCP (accelerate, torchtitan, Megatron-core), a file
    of torch.save or safetensors, or a directory of Hugging Face. TARGET must not exist, or be
    empty. It appears whole or not at all.

    Exit status: 0 written, 2 refused or failed, and nothing was written.
    """
    from smckpt.translate.conversion.convert import convert as run

    with progress_bar("converting", quiet=as_json) as progress:
        report = run(
            source, target, to=to, shard=shard, rank=rank, ignore=ignore, threads=threads,
            progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(report.to_json())
        return
    for what, names in (("left out", report.ignored), ("changed by DCP", report.changed)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
            print_line(f"{what}: {', '.join(names[:_SHOWN])}{more}")
    print_line(
        f"{report.source_format} to {report.format}: {count_text(report.tensors, 'tensor')}, "
        f"{count_text(report.values, 'value')}, {bytes_text(report.nbytes)}, "
        f"{report.seconds:.1f} s: {report.target}"
    )
