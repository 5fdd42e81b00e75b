"""The commands that compare a checkpoint, and that mend it: `verify`, `diff` and `repair`."""

from __future__ import annotations

import fnmatch
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import click

from smckpt.cli.output import (
    as_json,
    bytes_text,
    of_ranks,
    print_json,
    print_line,
    print_report,
    print_table,
    progress_bar,
    taken,
    threads,
)
from smckpt.errors import CheckpointNotFoundError, StorageError, UsageError, count_text, few

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smckpt.checkpoint.reading.catalogue import Catalogue
    from smckpt.checkpoint.upkeep.difference import Difference
    from smckpt.checkpoint.upkeep.repair import RepairReport


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

    with progress_bar("verifying", quiet=as_json or quick) as progress:
        try:
            report = verify_checkpoint(checkpoint, quick=quick, threads=threads, progress=progress)
        except (CheckpointNotFoundError, StorageError) as error:
            if isinstance(error, StorageError) and not os.path.isfile(checkpoint):
                raise
            from smckpt.formats.readers.foreign_catalogue import foreign_catalogue, verify_foreign
            from smckpt.storage import open_storage

            if quick and foreign_catalogue(open_storage(checkpoint)) is not None:
                raise UsageError(
                    "others wrote this, and recorded nothing that --quick could compare",
                    remedy="leave --quick out", path=checkpoint,
                ) from None  # fmt: skip
            found = verify_foreign(checkpoint, threads=threads, progress=progress)
            if found is None:
                raise
            report = found
    verdict = _verdict(report.problems)
    verdict += " (names, sizes and the blocks of headers; no other data)" if quick else ""
    print_report(
        as_json,
        report.to_json(),
        *(f"{problem.path}: {problem.what}" for problem in report.problems),
        f"{verdict}: {count_text(report.tensors, 'tensor')} in "
        f"{count_text(report.files, 'file')}, {bytes_text(report.nbytes)}"
        + (f", of {report.identity}" if report.identity else ""),
    )
    sys.exit(0 if report.ok else 1)


def _verdict(problems: Sequence[object]) -> str:
    return count_text(len(problems), "problem") if problems else "ok"


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
    compared = f", {report.compared} compared with {against}" if against else ""
    apart = f", logits within {report.logits:g}" if report.logits is not None else ""
    tensors = count_text(report.tensors, "tensor")
    line = f"{_verdict(report.problems)}: {tensors}{compared}{apart}"
    print_report(as_json, report.to_json(), *report.problems, line)
    sys.exit(0 if report.ok else 1)


def _restorable(checkpoint: str, geometry: str, as_json: bool) -> NoReturn:
    from smckpt.checkpoint.upkeep.restorable import parse_geometry, restorable_at

    found = restorable_at(checkpoint, parse_geometry(geometry))
    obstacles = (
        f"{few(one.names) + ': ' if one.names else ''}{one.what}. What to do: {one.remedy}"
        for one in found.obstacles
    )
    own = (
        f"each of {found.ranks} ranks saved its own, and rank i takes that of saved rank i mod "
        f"{found.ranks}: {few(found.per_rank)}"
    )
    step = "" if found.step is None else f" step {found.step}"
    verdict = "loads" if found.loads else "does not load"
    print_report(
        as_json,
        found.to_json(),
        *obstacles,
        own if found.per_rank and not found.same_ranks else "",
        f"{verdict} on {count_text(found.world_size, 'rank')} ({geometry}):{step} of "
        f"{count_text(found.ranks, 'rank')}, {found.url}",
    )
    sys.exit(0 if found.loads else 1)


ignore = click.option("--ignore", multiple=True, metavar="PATTERN",
                      help="Do not compare these names (a glob); may be repeated.")  # fmt: skip


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--at", "step", type=click.IntRange(0), metavar="STEP",
              help="A and B are directories of runs: compare this step of both.")  # fmt: skip
@ignore
@threads
@as_json
def diff(
    a: str, b: str, step: int | None, ignore: tuple[str, ...], threads: int, as_json: bool
) -> None:
    """Compare checkpoints A and B by logical name, bit for bit: tensors, random states, values.

    The two may differ in kind of state, sharding and number of ranks. Each may also be a directory
    of torch DCP, a file of torch.save or safetensors, or a directory of Hugging Face. Exit status:
    0 equal, 1 they differ, 2 they could not be compared.
    """
    from smckpt.checkpoint.upkeep.compare import compare_catalogues

    if step is not None:
        a, b = _at(a, step), _at(b, step)
    with progress_bar("comparing", quiet=as_json) as progress:
        opened = _opened(a, ignore), _opened(b, ignore)
        _refuse_other_names(*opened)
        found = compare_catalogues(*opened, ignore=ignore, threads=threads, progress=progress)
    if as_json:
        print_json(found.to_json())
        sys.exit(0 if found.equal else 1)
    size = (
        f"{count_text(found.tensors, 'tensor')}, {count_text(found.values, 'value')}, "
        f"{bytes_text(found.nbytes)}"
    )
    if found.ignored:
        size += f"; {count_text(len(found.ignored), 'name')} ignored"
    if found.equal:
        print_line(f"equal: {size}")
        sys.exit(0)
    rows = rows_of(found.differences)
    print_table("", ("name", "of", "what", "A and B"), rows, rest="--json")
    names = {one.name for one in found.differences}
    print_line(f"differ: {count_text(len(names), 'name')} of {size}")
    sys.exit(1)


def _opened(url: str, ignore: tuple[str, ...]) -> Catalogue:
    """The catalogue of ours or of others."""
    from smckpt.checkpoint.reading.committed import open_any
    from smckpt.formats.readers.foreign_catalogue import ForeignCatalogue
    from smckpt.storage import open_storage

    catalogue = open_any(open_storage(url))
    if isinstance(catalogue, ForeignCatalogue):
        catalogue.refuse_unread(lambda name: any(fnmatch.fnmatchcase(name, p) for p in ignore))
    return catalogue


def _refuse_other_names(a: Catalogue, b: Catalogue) -> None:
    """Refuse a comparison of two formats that have no name in common: all would differ."""
    from smckpt.formats.readers.rank_sources import HUB_DIRECTORY

    names, others = a.logical.keys(), b.logical.keys()
    if (a.ours and b.ours) or not names or not others or names & others:
        return
    remedy = "compare files whose names agree; `smckpt show` lists them"
    for one, other in ((a, b), (b, a)):
        if one.identity == HUB_DIRECTORY:
            remedy = f"run `smckpt verify --hf {one.url} --against {other.url}`, which translates "
            remedy += "names"
    raise UsageError(
        f"no tensor has the same name in both: {a.url} has {min(names)}, {b.url} {min(others)}",
        remedy=remedy,
    )


def _at(root: str, step: int) -> str:
    """The checkpoint of a step below a directory."""
    from smckpt.checkpoint.commits.discover import find_checkpoints

    found = find_checkpoints(root)
    for one in reversed(found):
        if one.step == step:
            return one.path
    there = ", ".join(str(one.step) for one in found) or "none"
    raise CheckpointNotFoundError(
        f"step {step} is not committed here; there is {there}",
        remedy="pass one of those to --at",
        path=root,
    )


def rows_of(differences: Sequence[Difference]) -> list[tuple[str, str | None, str, str]]:
    """Rows of the table: what the job holds once, then what each rank holds. Ranks that differ
    alike share a row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for one in differences:
        alike.setdefault((one.name, one.what, one.text), []).append(one.holder)
    rows = []
    for (name, what, text), holders in alike.items():
        ranks = [holder.removeprefix("rank ") for holder in holders if holder.startswith("rank ")]
        together = len(ranks) == len(holders) > 1
        of = f"ranks {few(ranks)}" if together else ", ".join(holders)
        rows.append((name, of or None, what, text))
    return sorted(rows, key=lambda row: row[1] is not None)


_PIN = 6 * 3600.0  # seconds for which a repair keeps a manager from deleting the checkpoint


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
    checkpoint: str, groups: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool, **more: Any
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
            checkpoint, groups=subpaths, dry_run=dry_run, progress=bar, **more
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    sys.exit(0 if report.whole else 1)


def _print(report: RepairReport) -> None:
    would = "would " if report.dry_run else ""
    for file in report.mended:
        sources = few(file.sources) or "its own bytes and the manifest"
        verb = "would mend" if report.dry_run else "mended"
        print_line(f"{verb} {file.path}: {bytes_text(file.nbytes)} from {sources}")
    for left in report.left:
        facts = {
            "rank": "" if left.rank is None else str(left.rank),
            "bytes": few([f"{low} to {high}" for low, high in left.ranges]),
            "tensors": few(left.tensors),
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
