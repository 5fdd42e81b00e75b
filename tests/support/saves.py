"""Saves of synthetic ranks, written in this process by the real functions, without torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smckpt.checkpoint.commits.commit import publish_manifest, take_lease
from smckpt.checkpoint.records.format import FORMAT_VERSION
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.engine.background.commands import ArenaFile, PartWritten, WritePart
from smckpt.engine.background.worker_write import write_part
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import MeshGeometry, PerRankGeometry
from smckpt.layout.image import Layout, compile_layout
from smckpt.layout.mesh import Mesh, Placement
from smckpt.storage import Access
from smckpt.storage.budget import Spread

# What a rank holds: its entries, and each one's bytes by key.
State = Callable[[int], "tuple[list[Entry], dict[str, bytes]]"]


def hybrid(ranks: Sequence[int], replicas: int) -> Mesh:
    """A mesh (replicate, shard) over `ranks`."""
    return Mesh(("replicate", "shard"), (replicas, len(ranks) // replicas), tuple(ranks))


def state_of(mesh: Mesh, *, rows: int = 10, tensors: int = 2, seed: int = 0) -> State:
    """Sharded float32 matrices, a replicated bf16 vector, and a step kept per rank."""

    def of(rank: int) -> tuple[list[Entry], dict[str, bytes]]:
        entries, data = [], {}
        for number in range(tensors):
            fqn = f"layers.{number}.weight"
            rule = MeshGeometry(
                fqn, (rows, 6), mesh, (Placement("replicate"), Placement("shard", 0))
            )
            entry = Entry(("model", fqn), "float32", rule, ("model",), (), (rank,))
            low = rule.intervals(rank)[0][0][0] * 6 if entry.numel else 0
            whole = pattern(rows * 6 * 4, seed + number)
            entries.append(entry)
            data[entry.key] = whole[low * 4 : low * 4 + entry.nbytes]
        same = MeshGeometry("bias", (7,), mesh, (Placement("replicate"),) * 2)
        entries.append(Entry(("model", "bias"), "bfloat16", same, ("model",), (), (rank,)))
        data["model.bias"] = pattern(14, seed + 100)
        kept = PerRankGeometry(("step",), (), (rank,))
        entries.append(Entry(("optimizer", "step"), "int64", kept, ("optimizer",), (), (rank,)))
        data["optimizer.step"] = (seed * 1000 + rank).to_bytes(8, "little")
        return entries, data

    return of


def pattern(size: int, seed: int) -> bytes:
    """Bytes that differ from place to place and from seed to seed."""
    return bytes((i * 7 + seed * 13 + i // 251) % 256 for i in range(size))


def image_of(layout: Layout, data: dict[str, bytes]) -> bytearray:
    """The arena as staging would fill it."""
    arena = bytearray(layout.arena_size)
    for file in layout.files:
        arena[file.arena_offset : file.arena_offset + len(file.header)] = file.header
    for slot in layout.slots:
        entry = layout.entries[slot.entry]
        low, high = slot.start * entry.itemsize, slot.stop * entry.itemsize
        at = layout.files[slot.file].arena_offset + slot.offset
        arena[at : at + high - low] = data[entry.key][low:high]
    return arena


@dataclass
class Group:
    """Ranks that save to one directory under one session; `save` numbers its saves from 0."""

    directory: Path
    ranks: Sequence[int]
    session: str = "0123456789ab"
    state: State | None = None
    host: str = "host"
    fencing_token: int | None = None
    numbers: Any = field(default_factory=itertools.count)
    spread: Spread | None = None
    access: Access = field(default_factory=Access)

    @property
    def spreading(self) -> Access:
        """The access of the saves."""
        return self.access.holding(self.access.share, self.spread)

    def write(self, number: int, **part: Any) -> dict[str, Any]:
        """Write all parts of a save; the arguments for `publish_manifest`.

        Args:
            part: fields of the parts that differ from the usual: values, or functions of the rank.
        """
        attempt = f"{self.session}-{number:08d}"
        parts = {}
        for rank in self.ranks:
            done = self.write_rank(rank, number, **part)
            host = part.get("host", self.host)
            parts[str(rank)] = {"part": done.part, "crc64": done.crc64, "host": host}
        return {
            "directory": str(self.directory),
            "attempt": attempt,
            "fencing_token": self.fencing_token,
            "ranks": list(self.ranks),
            "parts": parts,
            "record": None,
        }

    def write_rank(
        self, rank: int, number: int, state: State | None = None, **part: Any
    ) -> PartWritten:
        make = state or self.state or state_of(hybrid(self.ranks, 1))
        entries, data = make(rank)
        layout = compile_layout(entries, rank=rank, group_ranks=self.ranks)
        body = {
            "format": list(FORMAT_VERSION),
            "checkpoint_id": str(self.directory),
            "kind": "LOCAL",
            "step": 10 * number,
            "attempt": f"{self.session}-{number:08d}",
            "session": self.session,
            "number": number,
            "rank": rank,
            "host": self.host,
            "group_ranks": list(self.ranks),
            "fingerprint": layout.fingerprint,
            "classes": layout.classes,
            "layout": encode_rows(layout.entries, {}),
            "objects": {"rank": {"path": ["rank"], "value": rank}},
            "optimizers": {},
            "topology": None,
            "metadata": {},
            "versions": {"smckpt": "0"},
            **{key: value(rank) if callable(value) else value for key, value in part.items()},
        }
        return write_part(
            self.spreading,
            memoryview(image_of(layout, data)),  # type: ignore[arg-type]
            WritePart(
                directory=str(self.directory),
                attempt=body["attempt"],
                rank=rank,
                arena=None,
                files=tuple(ArenaFile(f.arena_offset, f.size) for f in layout.files),
                part=body,
            ),
        )

    def lease(self) -> int:
        if self.fencing_token is None:
            lease = take_lease(
                self.spreading,
                str(self.directory),
                self.session,
                self.host,
            )
            self.fencing_token = lease["fencing_token"]
        return self.fencing_token

    def save(self, record: str | None = None, **part: Any) -> dict[str, Any]:
        """Write and publish the next save; what `publish_manifest` returns."""
        self.lease()
        payload = self.write(next(self.numbers), **part)
        return publish_manifest(self.spreading, **{**payload, "record": record})
