"""`smckpt show` of a checkpoint that others wrote."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from smckpt.cli.output import bytes_text, count_text, print_facts, print_table
from smckpt.cli.show import SHOWN, picked, print_tensors
from smckpt.layout.entries import DTYPES

if TYPE_CHECKING:
    from smckpt.translate.ranks.rank_sources import RankFilesFound
    from smckpt.translate.sources.boxes import ForeignCheckpoint

__all__ = ["describe_foreign", "print_foreign"]


def describe_foreign(source: ForeignCheckpoint | RankFilesFound, pattern: str | None) -> Any:
    """All facts, as JSON values. `pattern` selects tensors, as for ours."""
    from smckpt.translate.sources.boxes import ForeignCheckpoint

    facts = _of_checkpoint(source) if isinstance(source, ForeignCheckpoint) else _of_files(source)
    facts["tensors"] = [t for t in facts["tensors"] if picked(t["name"], pattern)]
    return facts


def _of_checkpoint(source: ForeignCheckpoint) -> dict[str, Any]:
    return {
        "path": source.url,
        "format": source.format,
        "facts": dict(source.facts),
        "bytes": sum(source.files.values()),
        "files": [{"name": name, "bytes": size} for name, size in sorted(source.files.items())],
        "tensors": [
            _tensor(name, t.dtype, t.shape, count_text(len(t.boxes), "part"))
            for name, t in sorted(source.saved.items())
        ],
        "objects": list(source.objects),
        "optimizers": sorted(source.optimizers),
    }


def _of_files(source: RankFilesFound) -> dict[str, Any]:
    from smckpt.translate.ranks.rank_sources import open_ranks
    from smckpt.translate.tables.degrees import Degrees

    degrees, pp = Degrees.of(source.tp or 1, source.ep or 1), source.pp or 1
    reader = open_ranks(source, degrees, pp, None, None, equal_ranks=True)
    sizes = {name: record.nbytes for name, record in source.files.items()}
    return {
        "path": reader.url,
        "format": source.format,
        "facts": {"tp": source.tp, "ep": source.ep, **({"pp": pp} if pp > 1 else {})}
        if source.tp
        else {},
        "bytes": sum(sizes.values()),
        "files": [{"name": name, "bytes": size} for name, size in sizes.items()],
        "tensors": list(_shards(reader.held, degrees.ranks)),
        "objects": [],
        "optimizers": [],
    }


def _shards(held: Any, ranks: int) -> Iterator[dict[str, Any]]:
    for name, tensor in sorted(held.items()):
        shape = tensor.shards[0, 0]
        yield _tensor(name, tensor.dtype, shape, "" if ranks == 1 else f"by each of {ranks}")


def _tensor(name: str, dtype: str, shape: tuple[int, ...], held: str) -> dict[str, Any]:
    size = math.prod(shape) * DTYPES[dtype].itemsize
    return {"name": name, "dtype": dtype, "shape": list(shape), "bytes": size, "held": held}


def print_foreign(facts: dict[str, Any], pattern: str | None) -> None:
    """Print the tables. Without a pattern, long ones are cut, with a note."""
    files = facts["files"]
    print_facts(
        facts["path"],
        [
            ("format", facts["format"]),
            ("size", f"{bytes_text(facts['bytes'])} in {count_text(len(files), 'file')}"),
            *((name, value) for name, value in facts["facts"].items()),
            ("optimizers", ", ".join(facts["optimizers"]) or None),
            ("values", ", ".join(facts["objects"][:SHOWN]) or None),
        ],
    )
    print_tensors(facts["tensors"], pattern)
    print_table(
        "files", ("file", "size"),
        [(file["name"], bytes_text(file["bytes"])) for file in files[:SHOWN]], right=("size",),
    )  # fmt: skip
