"""What commands share: the options of several, and how they print sizes, times, JSON, tables and
progress bars.

rich is imported when a table is drawn. `smckpt --json` and `smckpt --version` do not need it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar

import click

from smckpt.errors import CheckpointError, visible

__all__ = [
    "SHOWN",
    "VisibleFormatter",
    "as_json",
    "bytes_text",
    "mtp",
    "of_ranks",
    "print_error",
    "print_facts",
    "print_json",
    "print_line",
    "print_table",
    "progress_bar",
    "span_text",
    "taken",
    "threads",
    "time_text",
    "visible",
]

SHOWN = 20  # rows of a table, unless the user asks for all
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_UNFOLDED = len("2025-03-01 12:30:05+01:00")  # what a cell shows in one line, whatever the width
# The width of a table in a pipe or a file, where nothing wraps it.
_UNBOUNDED = 100_000


def bytes_text(size: int) -> str:
    """1536 → "1.5 KiB"."""
    value, unit = float(size), "B"
    for larger in _UNITS:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def time_text(nanoseconds: int) -> str:
    """A time since 1970 in the reader's zone: "2025-03-01 12:30:05+01:00"."""
    return datetime.fromtimestamp(nanoseconds // 10**9).astimezone().isoformat(" ")


def span_text(seconds: float) -> str:
    """90.4 → "90 s"; 300000 → "83 h"."""
    for unit, name, most in ((1, "s", 120), (60, "min", 120), (3600, "h", 96)):
        if seconds / unit < most:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


def print_json(value: Any) -> None:
    """JSON whose text shows as it is, but for characters that act on a terminal or that nobody
    sees. Those are JSON's escapes."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    print(text)


class VisibleFormatter(logging.Formatter):
    """Of log records on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keep="\n\t")


def print_line(text: str) -> None:
    print(visible(text))


def print_report(as_json: bool, facts: Any, *lines: str) -> None:
    """What a command did: its facts as JSON, or as lines, without those that are empty."""
    if as_json:
        print_json(facts)
    else:
        for line in filter(None, lines):
            print_line(line)


def print_error(error: CheckpointError, options: Iterable[str] = ()) -> None:
    """One line on stderr, without host and rank, which matter in a job only.

    Args:
        options: the Python names of the command's options. If a remedy names one of them, it is
            printed as an option of the command.
    """
    where = f"{error.path}: " if error.path and error.path not in error.message else ""
    # "pass options with overwrite=True" → "pass --overwrite", "base=" → "--base"
    remedy = re.sub(r"\w+Options\((\w+=[^()]*)\)", r"\1", error.remedy or "").replace(
        "options with ", ""
    )
    for name in options:
        flag = "--" + name.replace("_", "-")
        remedy = re.sub(rf"\b{name}=False\b", flag.replace("--", "--no-", 1), remedy)
        remedy = re.sub(rf"\b{name}=True\b", flag, remedy)
        remedy = re.sub(rf"\b{name}=\[…\]", flag + " PATTERN", remedy)
        remedy = re.sub(rf"\b{name}=(?=\w|\")", flag + " ", remedy)
        remedy = re.sub(rf"\b{name}=", flag, remedy)
    line = " ".join(f"{where}{error.message}{f' — {remedy}' if remedy else ''}".split())
    print(f"smckpt: {visible(line)}", file=sys.stderr)


def _print(thing: Any, needed: int = 0) -> None:
    """Draw a rich object on stdout: in colour on a terminal; elsewhere uncut and unpadded.

    Args:
        needed: columns. On a terminal that has less it is drawn uncut too, and the terminal wraps
            whole lines: cells of three characters are harder to read.
    """
    from rich.console import Console

    # no markup: a path may hold [brackets]
    terminal = sys.stdout.isatty()
    console = Console(markup=False, highlight=False, emoji=False)
    if not terminal or console.width < needed:
        console.width = _UNBOUNDED
    if terminal:
        console.print(thing)
        return
    with console.capture() as captured:
        console.print(thing)
    print("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Sequence[str] = (),
    rest: str = "",
) -> None:
    """A table; columns named in `right` are flush right. None shows as "-".

    Args:
        rest: the option that lists all: the table is cut after `SHOWN` rows, and a line says so.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    all_rows = [*rows]
    texts = [[visible(column) for column in columns]]
    for row in all_rows[: SHOWN if rest else None]:
        texts.append(["-" if cell is None else visible(str(cell)) for cell in row])
    least = [min(max(map(cell_len, cells)), _UNFOLDED) for cells in zip(*texts, strict=True)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column, text, width in zip(columns, texts[0], least, strict=True):
        table.add_column(
            text, justify="right" if column in right else "left", overflow="fold", min_width=width
        )
    for each in texts[1:]:
        table.add_row(*each)
    if title:
        _print(Text(f"\n{visible(title)}", style="bold"))
    _print(table, sum(least) + 3 * (len(least) - 1))
    if rest and len(all_rows) > SHOWN:
        print_line(f"  … and {len(all_rows) - SHOWN} more: {rest} lists all")


def print_facts(title: str, facts: Iterable[tuple[str, Any]]) -> None:
    """A title and its name–value lines."""
    from rich.table import Column, Table
    from rich.text import Text

    _print(Text(visible(title), style="bold"))
    table = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    for name, value in facts:
        table.add_row(f"  {name}", "-" if value is None else visible(str(value)))
    _print(table)


@contextmanager
def progress_bar(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on stderr; yields a function to call with (done, total).

    Yields None if `quiet`, or if stderr is not a terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# -- options -----------------------------------------------------------------------------------

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
threads = click.option(
    "--threads", type=click.IntRange(1, 256), default=4, show_default=True,
    help="Threads that read, check and write.",
)  # fmt: skip
mtp = click.option(
    "--mtp", type=click.Choice(["drop", "keep"]), default="drop", show_default=True,
    help="Layers that predict further tokens: leave them out, or keep them.",
)  # fmt: skip
# The fields of `Parallel` that are options: what it is in an export.
_OF_RANKS = {
    "layout": "The tensor-parallel layout. By default found from the names.",
    "tp": "Tensor-parallel degree, if not recorded.",
    "ep": "Expert-parallel degree, if not recorded.",
    "etp": "Tensor-parallel degree of experts, if not --tp.",
    "pp": "Pipeline stages of the files of ranks.",
    "vpp": "Chunks of each pipeline stage, if names show none.",
    "padded-vocab-size": "Stored rows of the vocabulary, if trainers do not round vocab_size up to "
    "that number.",
}


def of_ranks(prefix: str = "", help: str | None = None) -> Callable[[_F], _F]:
    """The options about the ranks that wrote a source.

    Args:
        prefix: of their names. help: what each says, if not what it is in an export.
    """

    def of(command: _F) -> _F:
        for name, text in reversed(_OF_RANKS.items()):
            kind = None if name == "layout" else click.IntRange(1)
            command = click.option(f"--{prefix}{name}", type=kind, help=help or text)(command)
        return command

    return of


def taken(kind: type[_T], options: dict[str, Any], prefix: str = "", **more: Any) -> _T:
    """Take the options that are fields of `kind` out of `options`, and make one of them."""
    names = [field.name for field in fields(kind) if prefix + field.name in options]  # type: ignore[arg-type]
    return kind(**{name: options.pop(prefix + name) for name in names}, **more)
