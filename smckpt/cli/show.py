"""`smckpt show`: the contents of a checkpoint, as one dict of JSON values and as tables."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from smckpt.checkpoint.records.objects import decode_object
from smckpt.cli.output import (
    bytes_text,
    count_text,
    print_facts,
    print_line,
    print_table,
    time_text,
)
from smckpt.cli.statistics import statistics
from smckpt.decoding import SENSELESS
from smckpt.errors import CheckpointError
from smckpt.layout.entries import DTYPES, dotted
from smckpt.layout.geometry import PerRankGeometry
from smckpt.storage.urls import relative_url

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.committed import CommittedCatalogue
    from smckpt.layout.entries import Entry

__all__ = ["SHOWN", "describe", "picked", "print_description", "print_tensors"]

SHOWN = 20  # rows of a table, unless the user asks for all
LONGEST = 60  # characters of a value
STATISTICS = ("min", "max", "mean", "std", "nonfinite")


def describe(
    catalogue: CommittedCatalogue, pattern: str | None, stats: bool = False
) -> dict[str, Any]:
    """All facts for `show`. `pattern` selects tensors: a glob, or a part of the name.

    It reads the manifests, one part record and, for `stats`, the selected tensors.
    """
    first = catalogue.manifests[0]
    lowest = catalogue.object_ranks[0]
    objects = catalogue.part(lowest)["objects"]
    tensors = [t for t in _tensors(catalogue) if picked(t["name"], pattern)]
    if stats:
        counted = statistics(catalogue, [tensor["name"] for tensor in tensors])
        tensors = [{**tensor, "statistics": counted[tensor["name"]]} for tensor in tensors]
    return {
        "path": catalogue.url,
        "identity": catalogue.identity,
        "kind": catalogue.kind,
        "step": catalogue.step,
        "fencing_token": catalogue.fencing_token,
        "number": catalogue.number,
        "committed_at": catalogue.committed_at,
        "format": list(first.format),
        "versions": first.versions,
        "topology": catalogue.topology,
        "metadata": catalogue.metadata,
        "bytes": sum(file.record.size for file in catalogue.files),
        "groups": [list(manifest.group_ranks) for manifest in catalogue.manifests],
        "writers": list(_writers(catalogue)),
        "tensors": tensors,
        "objects": {
            "rank": lowest,
            "keys": sorted(objects),
            "values": {key: _shown(objects[key]["value"]) for key in sorted(objects)},
        },
        "optimizers": sorted(catalogue.optimizers),
    }


def _writers(catalogue: CommittedCatalogue) -> Iterator[dict[str, Any]]:
    for rank, (directory, part) in sorted(catalogue.parts.items()):
        yield {
            "rank": rank,
            "host": part.host,
            "directory": relative_url(directory, catalogue.url),
            "bytes": sum(file.size for file in part.files),
            "files": [{"name": f.name, "bytes": f.size, "crc64": f.crc64} for f in part.files],
        }


def _tensors(catalogue: CommittedCatalogue) -> Iterator[dict[str, Any]]:
    rows: dict[str, list[Entry]] = {}
    for row in catalogue.rows:
        for fqn in row.fqns:
            rows.setdefault(dotted(row.logical_path(fqn)), []).append(row)
    for name, tensor in sorted(catalogue.logical.items()):
        yield {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize,
            "held": _held(rows[name]),
        }


def _held(rows: list[Entry]) -> str:
    """How ranks hold a tensor: "dp_replicate=2:R dp_shard=4:S0", "flat 1/4", "by each of 8"."""
    geometry = rows[0].geometry
    if geometry.per_rank:  # one row for each shape
        ranks = tuple({rank for row in rows for rank in row.ranks})
        return str(PerRankGeometry((), (), ranks))
    return str(geometry)


def _shown(value: Any) -> Any:
    """A short plain value unchanged; for any other, a text that describes it."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    try:
        text = value if isinstance(value, str) else _text(value)
    except (CheckpointError, *SENSELESS):
        text = "a value that cannot be decoded"  # `smckpt verify` says why
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _text(value: Any) -> str:
    """A text for an encoded value (`checkpoint.objects`), without torch."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if "~" not in value:
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    tag, inside = value["~"], value["v"]
    if tag in ("int", "float", "complex", "numpy"):
        return str(decode_object(value))
    if tag == "ndarray":
        return f"array of {inside[0].strip('<>|=')}, {_shape(inside[2])}"
    if tag in ("dict", "ordered"):
        return "{" + ", ".join(f"{_text(key)}: {_text(item)}" for key, item in inside) + "}"
    if isinstance(inside, list):
        return "(" + ", ".join(map(_text, inside)) + ")"
    if tag in ("bytes", "bytearray", "torch.save"):
        return f"{tag}, {bytes_text(len(inside) * 3 // 4)}"
    return f"{tag} {inside}"


def picked(name: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    if set(pattern) & set("*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def print_description(facts: dict[str, Any], pattern: str | None) -> None:
    """Print the tables of `show`. Without a pattern, long tables are cut, with a note."""
    print_facts(
        facts["path"],
        [
            ("kind", facts["kind"]),
            ("step", facts["step"]),
            ("committed", f"{time_text(facts['committed_at'])} by {facts['identity']}"),
            ("size", _size(facts)),
            ("groups", _groups(facts["groups"])),
            ("optimizers", ", ".join(facts["optimizers"]) or None),
            ("metadata", _pairs(facts["metadata"])),
            ("written with", _pairs(facts["versions"])),
        ],
    )
    if facts["topology"]:
        rows = [(name, _value(value)) for name, value in facts["topology"].items()]
        print_table("topology", ("degree", "ranks"), rows)
    _print_values(facts["objects"])
    print_tensors(facts["tensors"], pattern)
    _print_writers(facts["writers"])


def _print_values(objects: dict[str, Any]) -> None:
    values = list(objects["values"].items())
    if values:
        print_table(f"values of rank {objects['rank']}", ("key", "value"), values[:SHOWN])
    if len(values) > SHOWN:
        print_line(f"  … and {len(values) - SHOWN} more: --json lists all")


def print_tensors(tensors: list[dict[str, Any]], pattern: str | None) -> None:
    shown = tensors if pattern is not None else tensors[:SHOWN]
    total = bytes_text(sum(tensor["bytes"] for tensor in tensors))
    matching = "" if pattern is None else f" that match {pattern!r}"
    stats = STATISTICS if any("statistics" in tensor for tensor in tensors) else ()
    print_table(
        f"{count_text(len(tensors), 'tensor')}{matching}, {total}",
        ("tensor", "dtype", "shape", "size", *stats, "held"),
        [
            (
                *(t["name"], t["dtype"], _shape(t["shape"]), bytes_text(t["bytes"])),
                *(_number((t["statistics"] or {}).get(name)) for name in stats),
                t["held"],
            )
            for t in shown
        ],
        right=("size", *stats),
    )
    if len(shown) < len(tensors):
        print_line(f"  … and {len(tensors) - len(shown)} more: --tensors '*' lists all")


def _print_writers(writers: list[dict[str, Any]]) -> None:
    rows = [
        (
            writer["rank"],
            writer["host"],
            writer["directory"] or ".",
            file["name"],
            bytes_text(file["bytes"]),
        )
        for writer in writers
        for file in writer["files"] or [{"name": "no tensors", "bytes": 0}]
    ]
    print_table(
        "written by",
        ("rank", "host", "directory", "file", "size"),
        rows[:SHOWN],
        right=("rank", "size"),
    )
    if len(rows) > SHOWN:
        print_line(f"  … and {len(rows) - SHOWN} more: --json lists all")


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _size(facts: dict[str, Any]) -> str:
    files = sum(len(writer["files"]) for writer in facts["writers"])
    ranks = count_text(len(facts["writers"]), "rank")
    return f"{bytes_text(facts['bytes'])} in {count_text(files, 'file')} by {ranks}"


def _groups(groups: list[list[int]]) -> str:
    texts = ["{" + ",".join(map(str, ranks)) + "}" for ranks in groups[:SHOWN]]
    more = f" … {len(groups)} in all" if len(groups) > SHOWN else ""
    return " ".join(texts) + more


def _pairs(values: dict[str, Any] | None) -> str | None:
    return " ".join(f"{name}={value}" for name, value in (values or {}).items()) or None
