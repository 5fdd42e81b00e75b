"""Commands that compare: `diff`."""

from __future__ import annotations

import fnmatch
import sys
from typing import TYPE_CHECKING, Any

import click

from smckpt.cli.models.options import as_json, threads
from smckpt.cli.output import (
    bytes_text,
    count_text,
    print_json,
    print_line,
    print_table,
    progress_bar,
)
from smckpt.errors import CheckpointNotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smckpt.checkpoint.reading.catalogue import Catalogue
    from smckpt.checkpoint.upkeep.compare import Compared
    from smckpt.checkpoint.upkeep.difference import Difference

__all__ = ["diff", "ignore", "rows_of"]

ignore = click.option("--ignore", multiple=True, metavar="PATTERN",
                      help="Do not compare these names (a glob); may be repeated.")  # fmt: skip

SHOWN = 20  # rows of the table
_RANKS = 8  # ranks of a row


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
    else:
        _print(found)
    sys.exit(0 if found.equal else 1)


def _opened(url: str, ignore: tuple[str, ...]) -> Catalogue:
    """The catalogue of ours or of others."""
    from smckpt.checkpoint.reading.readers import open_any
    from smckpt.storage import open_storage
    from smckpt.translate.ranks.foreign_catalogue import ForeignCatalogue

    catalogue = open_any(open_storage(url))
    if isinstance(catalogue, ForeignCatalogue):
        catalogue.refuse_unread(lambda name: any(fnmatch.fnmatchcase(name, p) for p in ignore))
    return catalogue


def _refuse_other_names(a: Catalogue, b: Catalogue) -> None:
    """Refuse a comparison of two formats that have no name in common: all would differ."""
    from smckpt.translate.ranks.rank_sources import HUB_DIRECTORY

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
        more = f" and {len(ranks) - _RANKS} more" if ranks[_RANKS:] else ""
        of = f"ranks {', '.join(ranks[:_RANKS])}{more}" if together else ", ".join(holders)
        rows.append((name, of or None, what, text))
    return sorted(rows, key=lambda row: row[1] is not None)


def _print(found: Compared) -> None:
    """Print one line. If anything differs, print a table of it first."""
    size = (
        f"{count_text(found.tensors, 'tensor')}, {count_text(found.values, 'value')}, "
        f"{bytes_text(found.nbytes)}"
    )
    if found.ignored:
        size += f"; {count_text(len(found.ignored), 'name')} ignored"
    if found.equal:
        print_line(f"equal: {size}")
        return
    rows = rows_of(found.differences)
    print_table("", ("name", "of", "what", "A and B"), rows[:SHOWN])
    if rows[SHOWN:]:
        print_line(f"  … and {len(rows) - SHOWN} more: --json lists all")
    names: dict[str, Any] = dict.fromkeys(one.name for one in found.differences)
    print_line(f"differ: {count_text(len(names), 'name')} of {size}")
