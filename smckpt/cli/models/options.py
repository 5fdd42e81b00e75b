"""Options that several commands have, and the values that the package's functions make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

__all__ = ["as_json", "mtp", "of_ranks", "taken", "threads"]

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
