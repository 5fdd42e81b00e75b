"""The command `verify`."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from smckpt.cli.models.options import as_json, of_ranks, taken, threads
from smckpt.cli.output import bytes_text, count_text, print_json, print_line, progress_bar

__all__ = ["verify"]

_SHOWN = 8  # names of a line


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--hf", metavar="DIR", help="Check a Hugging Face directory instead.")
@click.option(
    "--restorable-at",
    "geometry",
    metavar="DEGREES",
    help="Say whether CHECKPOINT (or the newest step below it) loads on a job of these "
    'degrees, such as "tp=2,shard=64" (also ep, cp, pp, replicas, world). Reads no data.',
)
@click.option(
    "--quick",
    is_flag=True,
    help="Check names, sizes and the blocks of headers; read no other data.",
)
@click.option(
    "--against", metavar="CHECKPOINT", help="With --hf: compare the weights with this checkpoint."
)
@click.option(
    "--reference", metavar="DIR", help="With --hf: compare the logits with this directory's model."
)
@of_ranks(help="With --against, as for export.")
@threads
@as_json
def verify(
    checkpoint: str | None,
    hf: str | None,
    geometry: str | None,
    quick: bool,
    against: str | None,
    reference: str | None,
    threads: int,
    as_json: bool,
    **of_layout: Any,
) -> None:
    """Compare every byte of CHECKPOINT with its checksum, or check an exported model with --hf.

    CHECKPOINT may also be of torch (DCP, torch.save): its tensors are compared with its CRC-32s.

    Exit status: 0 all is right, 1 something is wrong (with --restorable-at: it does not load), 2 it
    could not be checked.
    """
    if (checkpoint is None) == (hf is None):
        raise click.UsageError("give either CHECKPOINT or --hf DIR")
    if hf is not None:
        if quick or geometry is not None:
            raise click.UsageError("--quick and --restorable-at go with CHECKPOINT")
        _verify_hf(hf, against, reference, as_json, of_layout)
    if any(value is not None for value in (against, reference, *of_layout.values())):
        raise click.UsageError(
            "--against, --reference, --layout, --tp, --ep, --etp, --pp, --vpp, --padded-vocab-size "
            "go with --hf"
        )
    assert checkpoint is not None
    if geometry is not None:
        if quick:
            raise click.UsageError("--restorable-at reads no data: leave --quick out")
        _restorable(checkpoint, geometry, as_json)
    from smckpt.checkpoint.upkeep.verify import verify_checkpoint
    from smckpt.errors import CheckpointNotFoundError, StorageError

    with progress_bar("verifying", quiet=as_json or quick) as progress:
        try:
            report = verify_checkpoint(checkpoint, quick=quick, threads=threads, progress=progress)
        except (CheckpointNotFoundError, StorageError) as error:
            if isinstance(error, StorageError) and not os.path.isfile(checkpoint):
                raise
            from smckpt.translate.ranks.foreign_catalogue import verify_foreign

            found = (
                None if quick else verify_foreign(checkpoint, threads=threads, progress=progress)
            )
            if found is None:
                raise
            report = found
    if as_json:
        print_json(report.to_json())
    else:
        for problem in report.problems:
            print_line(f"{problem.path}: {problem.what}")
        verdict = "ok" if report.ok else count_text(len(report.problems), "problem")
        verdict += " (names, sizes and the blocks of headers; no other data)" if quick else ""
        print_line(
            f"{verdict}: {count_text(report.tensors, 'tensor')} in "
            f"{count_text(report.files, 'file')}, {bytes_text(report.nbytes)}, of {report.identity}"
        )
    sys.exit(0 if report.ok else 1)


def _verify_hf(
    directory: str,
    against: str | None,
    reference: str | None,
    as_json: bool,
    of_layout: dict[str, Any],
) -> NoReturn:
    from smckpt.translate import Parallel, verify_hf

    parallel = taken(Parallel, of_layout)
    with progress_bar("comparing", quiet=as_json or against is None) as progress:
        report = verify_hf(
            directory, against=against, reference=reference, progress=progress, parallel=parallel
        )
    if as_json:
        print_json(report.to_json())
    else:
        for problem in report.problems:
            print_line(problem)
        verdict = "ok" if report.ok else count_text(len(report.problems), "problem")
        compared = f", {report.compared} compared with {against}" if against else ""
        apart = f", logits within {report.logits:g}" if report.logits is not None else ""
        print_line(f"{verdict}: {count_text(report.tensors, 'tensor')}{compared}{apart}")
    sys.exit(0 if report.ok else 1)


def _restorable(checkpoint: str, geometry: str, as_json: bool) -> NoReturn:
    from smckpt.checkpoint.upkeep.restorable import parse_geometry, restorable_at

    found = restorable_at(checkpoint, parse_geometry(geometry))
    if as_json:
        print_json(found.to_json())
        sys.exit(0 if found.loads else 1)
    for one in found.obstacles:
        names = f"{_few(one.names)}: " if one.names else ""
        print_line(f"{names}{one.what}. What to do: {one.remedy}")
    if found.per_rank and not found.same_ranks:
        print_line(f"each of {found.ranks} ranks saved its own, and rank i takes that of saved "
                   f"rank i mod {found.ranks}: {_few(found.per_rank)}")  # fmt: skip
    step = "" if found.step is None else f" step {found.step}"
    verdict = "loads" if found.loads else "does not load"
    print_line(f"{verdict} on {count_text(found.world_size, 'rank')} ({geometry}):{step} of "
               f"{count_text(found.ranks, 'rank')}, {found.url}")  # fmt: skip
    sys.exit(0 if found.loads else 1)


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    return ", ".join(names[:_SHOWN]) + more
