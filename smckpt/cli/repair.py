"""The command `repair`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from smckpt.cli.output import (
    as_json,
    bytes_text,
    print_json,
    print_line,
    progress_bar,
    threads,
)
from smckpt.errors import count_text, few

if TYPE_CHECKING:
    from smckpt.checkpoint.upkeep.repair import RepairReport

__all__ = ["repair"]

_PIN = 6 * 3600.0  # seconds for which a repair keeps a manager from deleting the checkpoint
_SHOWN = 6  # tensors, ranges and sources of a line


@click.command()
@click.argument("checkpoint")
@click.option("--from", "sources", multiple=True, metavar="OTHER",
              help="A copy of the checkpoint or of some of its files, on disk or in S3; or another "
              "checkpoint of the run. May be repeated.")  # fmt: skip
@click.option("--group", "groups", multiple=True, metavar="DIR",
              help="A group's directory below CHECKPOINT, if no lease names the groups. May be "
              'repeated; "." alone: CHECKPOINT is a checkpoint by itself.')  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before a commit.")
@threads
@as_json
def repair(
    checkpoint: str,
    sources: tuple[str, ...],
    groups: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Commit what a dead coordinator could not, and mend damaged files of CHECKPOINT.

    If all parts of a save are there and nobody has committed them, it reads every byte and commits
    them. If the checkpoint is committed, it reads every byte, and writes damaged files anew out of
    --from, its own other files and the checkpoints beside it. It deletes nothing. No job may be
    saving there: it would be locked out.

    Exit status: 0 the checkpoint is whole (with --dry-run: would be), 1 something is left that
    cannot be mended, 2 the repair failed.
    """
    from smckpt.checkpoint.commits.contents import contents_of
    from smckpt.checkpoint.commits.remove import pinned
    from smckpt.checkpoint.upkeep.repair import repair_checkpoint
    from smckpt.checkpoint.upkeep.unfinished import UnfinishedStep, unfinished_step
    from smckpt.errors import CheckpointError
    from smckpt.storage import open_storage

    subpaths = list(groups) or None
    top = open_storage(checkpoint)
    step = unfinished_step(top, subpaths)
    with ExitStack() as held:
        if not dry_run and isinstance(step, UnfinishedStep):
            if not yes:
                of = "" if step.step is None else f" {step.step}"
                ranks = count_text(len(step.ranks), "rank")
                click.confirm(
                    f"All parts of step{of} are at {top.url} ({ranks}, "
                    f"{count_text(len(step.attempts), 'group')}), and nobody has committed them. "
                    "If the job that wrote them still runs, its next save there fails. Check and "
                    "commit them?",
                    abort=True,
                    err=True,
                )
        elif not dry_run:
            try:
                contents_of(top)
            except CheckpointError:
                pass  # the repair says what is wrong
            else:  # keep a manager from deleting what is being mended
                held.enter_context(pinned(checkpoint, seconds=_PIN))
        bar = held.enter_context(progress_bar("repairing", quiet=as_json))
        report = repair_checkpoint(
            checkpoint,
            sources=sources,
            groups=subpaths,
            dry_run=dry_run,
            threads=threads,
            progress=bar,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    sys.exit(0 if report.whole else 1)


def _print(report: RepairReport) -> None:
    would = "would " if report.dry_run else ""
    for file in report.mended:
        sources = ", ".join(file.sources[:_SHOWN]) or "its own bytes and the manifest"
        verb = "would mend" if report.dry_run else "mended"
        print_line(f"{verb} {file.path}: {bytes_text(file.nbytes)} from {sources}")
    for left in report.left:
        facts = {
            "rank": "" if left.rank is None else str(left.rank),
            "bytes": few([f"{low} to {high}" for low, high in left.ranges], _SHOWN),
            "tensors": few(left.tensors, _SHOWN),
        }
        known = "; ".join(f"{name} {value}" for name, value in facts.items() if value)
        print_line(
            f"cannot be mended: {left.path}: {left.what}{f' ({known})' if known else ''}. "
            f"What to do: {left.remedy}"
        )
    of = "" if report.step is None else f" step {report.step}"
    if report.left:
        print_line(f"not whole: {count_text(len(report.left), 'fault')}")
    elif report.commits:
        name = "" if report.committed is None else f", {report.committed}"
        print_line(f"{would}commit{'' if would else 'ted'}{of}{name}: {report.url}")
    elif report.mended:
        print_line(f"{would}mend{'' if would else 'ed'}{of}: {report.url} is whole")
    else:
        print_line(f"nothing to repair:{of or ' the checkpoint'} is whole: {report.url}")
