"""`smckpt show`: what a checkpoint is made of, as one JSON-able dict and as tables."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from smckpt.cli.output import (
    bytes_text,
    count_text,
    print_facts,
    print_line,
    print_table,
    time_text,
)
from smckpt.layout.entries import DTYPES, dotted
from smckpt.layout.geometry import FlatGeometry, MeshGeometry
from smckpt.storage.urls import relative_url

if TYPE_CHECKING:
    from smckpt.checkpoint.catalogue import Catalogue
    from smckpt.checkpoint.rows import Row

__all__ = ["describe", "print_description"]

SHOWN = 20  # rows of a table that nobody asked for in full


def describe(catalogue: Catalogue, pattern: str | None) -> dict[str, Any]:
    """Everything that `show` knows. `pattern` picks tensors: a glob, or a part of the name.

    Reads one part record beside the manifests, and decodes none of its objects.
    """
    first = catalogue.manifests[0]
    lowest = catalogue.object_ranks[0]
    return {
        "path": catalogue.url,
        "identity": catalogue.identity,
        "kind": catalogue.kind,
        "step": catalogue.step,
        "epoch": catalogue.epoch,
        "number": catalogue.number,
        "committed_at": catalogue.committed_at,
        "format": list(first.format),
        "versions": first.versions,
        "topology": catalogue.topology,
        "metadata": catalogue.metadata,
        "bytes": sum(file.record.size for file in catalogue.files),
        "groups": [list(manifest.group_ranks) for manifest in catalogue.manifests],
        "writers": list(_writers(catalogue)),
        "tensors": [t for t in _tensors(catalogue) if _picked(t["name"], pattern)],
        "objects": {"rank": lowest, "keys": sorted(catalogue.part(lowest)["objects"])},
        "optimizers": sorted(catalogue.optimizers),
    }


def _writers(catalogue: Catalogue) -> Iterator[dict[str, Any]]:
    for rank, (directory, part) in sorted(catalogue.parts.items()):
        yield {
            "rank": rank,
            "host": part.host,
            "directory": relative_url(directory, catalogue.url),
            "bytes": sum(file.size for file in part.files),
            "files": [{"name": f.name, "bytes": f.size, "crc64": f.crc64} for f in part.files],
        }


def _tensors(catalogue: Catalogue) -> Iterator[dict[str, Any]]:
    rows: dict[str, list[Row]] = {}
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


def _held(rows: list[Row]) -> str:
    """How ranks hold a tensor: "dp_replicate=2:R dp_shard=4:S0", "flat 1/4", "by each of 8"."""
    geometry = rows[0].geometry
    if geometry is None:
        ranks = {rank for row in rows for rank in row.ranks}
        return "by its rank" if len(ranks) == 1 else f"by each of {len(ranks)} ranks"
    if isinstance(geometry, MeshGeometry):
        mesh = geometry.mesh
        dims = zip(mesh.dim_names, mesh.shape, geometry.placements, strict=True)
        return " ".join(f"{dim}={size}:{placement}" for dim, size, placement in dims)
    if isinstance(geometry, FlatGeometry):
        return f"flat 1/{geometry.shard_degree()}"
    return "boxes"


def _picked(name: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    if set(pattern) & set("*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def print_description(facts: dict[str, Any], pattern: str | None) -> None:
    """The tables of `show`. Without a pattern, long ones are cut, and say so."""
    print_facts(
        facts["path"],
        [
            ("kind", facts["kind"]),
            ("step", facts["step"]),
            ("committed", f"{time_text(facts['committed_at'])} by {facts['identity']}"),
            ("size", _size(facts)),
            ("groups", _groups(facts["groups"])),
            ("topology", _pairs(facts["topology"])),
            ("optimizers", ", ".join(facts["optimizers"]) or None),
            (f"objects (rank {facts['objects']['rank']})", _cut(facts["objects"]["keys"])),
            ("metadata", _pairs(facts["metadata"])),
            ("written with", _pairs(facts["versions"])),
        ],
    )
    _print_tensors(facts["tensors"], pattern)
    _print_writers(facts["writers"])


def _print_tensors(tensors: list[dict[str, Any]], pattern: str | None) -> None:
    shown = tensors if pattern is not None else tensors[:SHOWN]
    total = bytes_text(sum(tensor["bytes"] for tensor in tensors))
    matching = "" if pattern is None else f" that match {pattern!r}"
    print_table(
        f"{count_text(len(tensors), 'tensor')}{matching}, {total}",
        ("tensor", "dtype", "shape", "size", "held"),
        [
            (t["name"], t["dtype"], _shape(t["shape"]), bytes_text(t["bytes"]), t["held"])
            for t in shown
        ],
        right=("size",),
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


def _cut(names: list[str]) -> str | None:
    more = f" … {len(names)} in all" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) + more) or None
