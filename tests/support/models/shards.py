"""Checkpoints as ranks of different parallelisms would have written them, made in one process.

Arrays are cut by the geometry, and laid out, written and published by the code that a rank and its
coordinator run.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from smckpt.checkpoint.commits.commit import publish_manifest, take_lease
from smckpt.checkpoint.records.format import FORMAT_VERSION
from smckpt.checkpoint.records.objects import encode_object
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.engine.background.commands import ArenaFile, WritePart
from smckpt.engine.background.worker_write import write_part
from smckpt.layout.entries import Entry
from smckpt.layout.flat_geometry import FlatGeometry, FlatUnit, Segment
from smckpt.layout.geometry import Geometry, MeshGeometry, PerRankGeometry
from smckpt.layout.image import compile_layout
from smckpt.layout.mesh import Mesh, Placement
from smckpt.staging.arena import Arena
from smckpt.staging.copies import stage
from smckpt.storage import Access

Tensors = Mapping[str, torch.Tensor]
Held = list[tuple[Entry, torch.Tensor]]


def plain(state: Tensors, rank: int, world: int, top: tuple[str, ...] = ("model",)) -> Held:
    """Every rank has all of it (DDP, one process)."""
    mesh = Mesh(("replicate",), (world,), tuple(range(world)))
    return [
        _held(top, name, name, MeshGeometry(name, tuple(t.shape), mesh, (Placement("replicate"),)),
              rank, state, t.dtype)
        for name, t in state.items()
    ]  # fmt: skip


def own(state: Tensors, rank: int, top: tuple[str, ...] = ("model",)) -> Held:
    """Every rank keeps its own, as Megatron's modules do without FSDP."""
    return [
        _held(
            top, name, name, PerRankGeometry((name,), tuple(t.shape), (rank,)), rank, state, t.dtype
        )
        for name, t in state.items()
    ]


def fsdp2(state: Tensors, rank: int, world: int, top: tuple[str, ...] = ("model",)) -> Held:
    """Sharded on dimension 0; with 4 ranks hybrid, 2 × 2. Scalars are kept."""
    hybrid = world == 4
    mesh = Mesh(("replicate", "shard"), (2, 2) if hybrid else (1, world), tuple(range(world)))
    out = []
    for name, t in state.items():
        geometry: Geometry = PerRankGeometry((name,), (), (rank,))
        if t.dim():
            places = (Placement("replicate"), Placement("shard", 0))
            geometry = MeshGeometry(name, tuple(t.shape), mesh, places)
        out.append(_held(top, name, name, geometry, rank, state, t.dtype))
    return out


def tp(state: Tensors, rank: int, world: int, top: tuple[str, ...] = ("model",)) -> Held:
    """Matrices sharded on dimension 1, the rest replicated."""
    mesh = Mesh(("tp",), (world,), tuple(range(world)))
    out = []
    for name, t in state.items():
        place = Placement("shard", 1) if t.dim() == 2 else Placement("replicate")
        geometry = MeshGeometry(name, tuple(t.shape), mesh, (place,))
        out.append(_held(top, name, name, geometry, rank, state, t.dtype))
    return out


def fsdp1(state: Tensors, rank: int, world: int, top: tuple[str, ...] = ("model",)) -> Held:
    """Flat parameters of three tensors each, cut in equal shards wherever that falls."""
    mesh = Mesh(("replicate", "shard"), (1, world), tuple(range(world)))
    names = list(state)
    out = []
    for number, at in enumerate(range(0, len(names), 3)):
        members = [n for n in names[at : at + 3] if state[n].dtype == state[names[at]].dtype]
        assert members == names[at : at + 3], "one dtype per flat parameter"
        segments = tuple(Segment(n, tuple(state[n].shape), state[n].numel()) for n in members)
        total = sum(s.numel for s in segments)
        unit = FlatUnit(segments, -(-total // world))
        key = f"unit{number}._flat_param"
        out.append(_held(top, key, None, FlatGeometry(unit, mesh), rank, state,
                         state[members[0]].dtype))  # fmt: skip
    return out


def write(
    directory: str | os.PathLike[str],
    world: int,
    held: Callable[[int], Held],
    *,
    kind: str | None = "LOCAL",
    objects: Mapping[str, Any] | None = None,
    optimizers: Mapping[str, Any] | None = None,
    step: int | None = None,
    topology: Mapping[str, Any] | None = None,
) -> Path:
    """A committed checkpoint of one group of `world` ranks, in which rank r has `held(r)`."""
    url, session, number = os.path.abspath(directory), uuid.uuid4().hex[:12], 0
    attempt, ranks = f"{session}-{number:08d}", tuple(range(world))
    parts = {
        str(rank): _part(url, session, attempt, rank, ranks, held(rank), {
            "kind": kind, "step": step, "topology": dict(topology) if topology else None,
            "optimizers": dict(optimizers or {}),
            "objects": {key: {"path": key.split("."), "value": encode_object(value)}
                        for key, value in (objects or {}).items()},
        })
        for rank in ranks
    }  # fmt: skip
    fencing_token = take_lease(Access(), url, session, "here")["fencing_token"]
    publish_manifest(Access(), url, attempt, fencing_token, ranks, parts, None)
    return Path(url)


def files(directory: Path, pattern: str = "data-*.safetensors") -> list[Path]:
    return sorted(directory.glob(pattern))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _held(
    top: tuple[str, ...], key: str, fqn: str | None, geometry: Geometry, rank: int,
    state: Tensors, dtype: torch.dtype,
) -> tuple[Entry, torch.Tensor]:  # fmt: skip
    entry = Entry((*top, key), str(dtype).removeprefix("torch."), geometry, top, (), (rank,))
    array = torch.zeros(entry.shape, dtype=dtype)
    for piece in geometry.pieces(rank):
        where = tuple(
            slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True)
        )
        part = torch.as_strided(array, piece.box.sizes, piece.strides, piece.start)
        part.copy_(state[piece.name][where])
    return entry, array


def _part(
    url: str, session: str, attempt: str, rank: int, ranks: Iterable[int], held: Held,
    more: dict[str, Any],
) -> dict[str, str]:  # fmt: skip
    layout = compile_layout([e for e, _ in held], rank=rank, group_ranks=tuple(ranks))
    arena = Arena(layout.arena_size) if layout.arena_size else None
    memory = None
    if arena is not None:
        arrays = {id(entry): array for entry, array in held}
        stage(arena, layout, [arrays[id(entry)] for entry in layout.entries])
        memory = mmap.mmap(arena.fd, arena.size)
    files = tuple(ArenaFile(f.arena_offset, f.size) for f in layout.files)
    done = write_part(
        Access(), memory,
        WritePart(url, attempt, rank, None, files, {
            "format": list(FORMAT_VERSION), "checkpoint_id": url, "attempt": attempt,
            "session": session, "number": 0, "rank": rank, "host": "here",
            "group_ranks": list(ranks), "fingerprint": layout.fingerprint,
            "classes": layout.classes, "layout": encode_rows(layout.entries, {}),
            "metadata": {}, "versions": {}, **more,
        }),
    )  # fmt: skip
    if arena is not None:
        arena.close()
    return {"part": done.part, "crc64": done.crc64, "host": "here"}
