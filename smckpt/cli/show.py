"""`smckpt show`: the contents of a checkpoint, of ours or of others, as one dict of JSON values and
as tables."""

from __future__ import annotations

import fnmatch
import json
import math
from typing import TYPE_CHECKING, Any

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.records.objects import decode_object
from smckpt.cli.output import (
    SHOWN,
    bytes_text,
    print_facts,
    print_table,
    time_text,
)
from smckpt.cli.statistics import statistics
from smckpt.decoding import SENSELESS
from smckpt.errors import CheckpointError, count_text
from smckpt.layout.entries import DTYPES
from smckpt.layout.geometry import PerRankGeometry
from smckpt.storage.urls import relative_url

if TYPE_CHECKING:
    from smckpt.checkpoint.reading.committed import CommittedCatalogue
    from smckpt.formats.boxes import ForeignCheckpoint
    from smckpt.formats.readers.rank_sources import RankFilesFound
    from smckpt.layout.entries import Entry


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
    entries: dict[str, list[Entry]] = {}
    for row in catalogue.rows:
        for fqn in row.fqns:
            entries.setdefault(row.logical_name(fqn), []).append(row)
    tensors = []
    for name, tensor in sorted(catalogue.logical.items()):
        if not picked(name, pattern):
            continue
        geometry = entries[name][0].geometry
        if geometry.per_rank:  # one row for each shape
            ranks = {rank for row in entries[name] for rank in row.ranks}
            geometry = PerRankGeometry((), (), tuple(ranks))
        tensors.append(_tensor(name, tensor.dtype, tensor.shape, str(geometry)))
    if stats:
        counted = statistics(catalogue, [tensor["name"] for tensor in tensors])
        tensors = [{**tensor, "statistics": counted[tensor["name"]]} for tensor in tensors]
    return {
        "path": catalogue.url,
        "identity": catalogue.identity,
        "kind": catalogue.kind,
        "step": catalogue.step,
        "fencing_token": first.fencing_token,
        "number": first.number,
        "committed_at": catalogue.commit.committed_at,
        "format": list(first.format),
        "versions": first.versions,
        "topology": catalogue.topology,
        "metadata": catalogue.metadata,
        "bytes": catalogue.nbytes,
        "groups": [list(manifest.group_ranks) for manifest in catalogue.manifests],
        "writers": [
            {
                "rank": rank,
                "host": part.host,
                "directory": relative_url(directory, catalogue.url),
                "bytes": sum(file.size for file in part.files),
                "files": [{"name": f.name, "bytes": f.size, "crc64": f.crc64} for f in part.files],
            }
            for rank, (directory, part) in sorted(catalogue.parts.items())
        ],
        "tensors": tensors,
        "objects": {
            "rank": lowest,
            "keys": sorted(objects),
            "values": {key: _shown(objects[key]["value"]) for key in sorted(objects)},
        },
        "optimizers": sorted(catalogue.optimizers),
    }


def _tensor(name: str, dtype: str, shape: tuple[int, ...], held: str) -> dict[str, Any]:
    size = math.prod(shape) * DTYPES[dtype].itemsize
    return {"name": name, "dtype": dtype, "shape": list(shape), "bytes": size, "held": held}


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
    writers, groups = facts["writers"], facts["groups"]
    files = sum(len(writer["files"]) for writer in writers)
    size = f"{bytes_text(facts['bytes'])} in {count_text(files, 'file')}"
    ranks = " ".join("{" + ",".join(map(str, ranks)) + "}" for ranks in groups[:SHOWN])
    metadata = facts["metadata"] or {}
    recorded = {k: metadata[k] for k in ("metrics", "manager") if isinstance(metadata.get(k), dict)}
    print_facts(
        facts["path"],
        [
            ("kind", facts["kind"]),
            ("step", facts["step"]),
            ("committed", f"{time_text(facts['committed_at'])} by {facts['identity']}"),
            ("size", f"{size} by {count_text(len(writers), 'rank')}"),
            ("groups", ranks + (f" … {len(groups)} in all" if groups[SHOWN:] else "")),
            ("optimizers", ", ".join(facts["optimizers"]) or None),
            ("metadata", _pairs({k: v for k, v in metadata.items() if k not in recorded})),
            *((key, _pairs(value)) for key, value in recorded.items()),
            ("written with", _pairs(facts["versions"])),
        ],
    )
    if facts["topology"]:
        rows = [
            (name, ", ".join(map(str, value)) if isinstance(value, list) else value)
            for name, value in facts["topology"].items()
        ]
        print_table("topology", ("degree", "ranks"), rows)
    if values := facts["objects"]["values"].items():
        title = f"values of rank {facts['objects']['rank']}"
        print_table(title, ("key", "value"), values, rest="--json")
    _print_tensors(facts["tensors"], pattern)
    print_table(
        "written by",
        ("rank", "host", "directory", "file", "size"),
        [
            (
                *(writer["rank"], writer["host"], writer["directory"] or "."),
                *(file["name"], bytes_text(file["bytes"])),
            )
            for writer in writers
            for file in writer["files"] or [{"name": "no tensors", "bytes": 0}]
        ],
        right=("rank", "size"),
        rest="--json",
    )


def _print_tensors(tensors: list[dict[str, Any]], pattern: str | None) -> None:
    total = bytes_text(sum(tensor["bytes"] for tensor in tensors))
    matching = "" if pattern is None else f" that match {pattern!r}"
    stats = STATISTICS if any("statistics" in tensor for tensor in tensors) else ()
    print_table(
        f"{count_text(len(tensors), 'tensor')}{matching}, {total}",
        ("tensor", "dtype", "shape", "size", *stats, "held"),
        [
            (
                *(t["name"], t["dtype"], _shape(t["shape"]), bytes_text(t["bytes"])),
                *(
                    None if (value := (t["statistics"] or {}).get(name)) is None else f"{value:.4g}"
                    for name in stats
                ),
                t["held"],
            )
            for t in tensors
        ],
        right=("size", *stats),
        rest="--tensors '*'" if pattern is None else "",
    )


def _shape(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _pairs(values: dict[str, Any] | None) -> str | None:
    """Values with their names, without those that say nothing."""
    shown = ((k, _shown(v)) for k, v in (values or {}).items() if v not in (None, "", [], {}))
    return " ".join(f"{name}={value}" for name, value in shown) or None


# -- of others ---------------------------------------------------------------------------------


def describe_foreign(
    source: ForeignCheckpoint | RankFilesFound | Catalogue, pattern: str | None
) -> Any:
    """All facts, as JSON values. `pattern` selects tensors, as for ours."""
    from smckpt.formats.boxes import ForeignCheckpoint

    held: dict[str, tuple[str, tuple[int, ...], str]]  # dtype, shape, who holds it
    if isinstance(source, ForeignCheckpoint):
        held = {
            name: (t.dtype, t.shape, count_text(len(t.boxes), "part"))
            for name, t in source.saved.items()
        }
        kind, facts, sizes = source.format, dict(source.facts), dict(sorted(source.files.items()))
        objects, optimizers = list(source.objects), sorted(source.optimizers)
    elif isinstance(source, Catalogue):  # of a reader of the user's
        held = {name: (t.dtype, t.shape, "") for name, t in source.logical.items()}
        kind, facts, sizes = "what a registered reader knows", {"step": source.step}, {}
        objects = sorted(source.part(source.object_ranks[0])["objects"])
        optimizers = sorted(source.optimizers)
    else:
        held, pp = _held_by_ranks(source), source.pp or 1
        degrees = {"tp": source.tp, "ep": source.ep, **({"pp": pp} if pp > 1 else {})}
        kind, facts, objects, optimizers = source.format, degrees if source.tp else {}, [], []
        sizes = {name: record.nbytes for name, record in source.files.items()}
    return {
        "path": source.url,
        "format": kind,
        "facts": facts,
        "bytes": source.nbytes if isinstance(source, Catalogue) else sum(sizes.values()),
        "files": [{"name": name, "bytes": size} for name, size in sizes.items()],
        "tensors": [_tensor(n, *of) for n, of in sorted(held.items()) if picked(n, pattern)],
        "objects": objects,
        "optimizers": optimizers,
    }


def _held_by_ranks(source: RankFilesFound) -> dict[str, tuple[str, tuple[int, ...], str]]:
    from smckpt.formats.degrees import Degrees
    from smckpt.translate.ranks.pipeline import open_ranks

    degrees = Degrees.of(source.tp or 1, source.ep or 1)
    reader, _ = open_ranks(source, degrees, source.pp or 1, None, None, equal_ranks=True)
    held = "" if degrees.ranks == 1 else f"by each of {degrees.ranks}"
    return {name: (t.dtype, t.shards[0, 0], held) for name, t in reader.held.items()}


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
    _print_tensors(facts["tensors"], pattern)
    print_table(
        "files", ("file", "size"),
        [(file["name"], bytes_text(file["bytes"])) for file in files[:SHOWN]], right=("size",),
    )  # fmt: skip
