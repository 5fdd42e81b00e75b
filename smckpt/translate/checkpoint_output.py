"""An import's checkpoint: the parts of ranks that never ran, as they would have written them."""

from __future__ import annotations

import platform
import socket
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from smckpt._version import __version__
from smckpt.checkpoint.commit import claim_epoch, publish_manifest
from smckpt.checkpoint.crc import BLOCK, combine, crc64, hex64
from smckpt.checkpoint.format import FileRecord, Part, crc_name, data_name, part_name, seal_json
from smckpt.checkpoint.rows import encode_rows
from smckpt.checkpoint.sweep import sweep
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.geometry import KeptGeometry
from smckpt.layout.image import Layout, compile_layout
from smckpt.storage import FileWriter
from smckpt.topology import ParallelState
from smckpt.translate.files import Output
from smckpt.translate.targets import OutputFile
from smckpt.translate.translated import Translated

__all__ = ["CheckpointOutput", "RankFile", "new_session", "rank_files"]

_NUMBER = 0  # of the save: the first of its session, and the only one
_ONE_FILE = 1 << 62  # bytes: no rank's data is split


@dataclass(frozen=True)
class RankFile(OutputFile):
    """The data file of a rank, laid out as that rank would."""

    layout: Layout

    @cached_property
    def header(self) -> bytes:
        return self.layout.files[0].header


def new_session() -> str:
    return uuid.uuid4().hex[:12]


def rank_files(
    session: str, prefix: Path, ranks: Sequence[Sequence[Translated]]
) -> tuple[RankFile, ...]:
    """A file for each rank: tensors of its own, under `prefix` in the state dict."""
    files = []
    for rank, targets in enumerate(ranks):
        entries = [
            Entry(
                path=(*prefix, t.name), dtype=t.dtype, shape=t.shape,
                geometry=KeptGeometry((t.name,), t.shape, rank), before=prefix, after=(),
            )
            for t in targets
        ]  # fmt: skip
        layout = compile_layout(
            entries, rank=rank, group_ranks=range(len(ranks)), max_file_bytes=_ONE_FILE
        )
        named = tuple(replace(t, name=dotted((*prefix, t.name))) for t in targets)
        files.append(RankFile(data_name(_attempt(session), rank, 0), named, layout))
    return tuple(files)


class CheckpointOutput(Output):
    """The directory `url`, on its way to a checkpoint of as many ranks as there are files."""

    def __init__(self, url: str, session: str, files: Sequence[RankFile]) -> None:
        super().__init__(url, files)
        self._hidden = False  # nothing but a manifest makes files a checkpoint
        self._session = session
        self._ranks = tuple(files)
        self._summed: dict[str, _Summed] = {}
        self._parts: dict[str, dict[str, str]] = {}

    def prepare(self, *, overwrite: bool) -> None:
        """Refuse a directory that holds something; a checkpoint there goes when this one stands."""
        self._present(overwrite)
        self._check_space()

    def put_parts(self, topology: ParallelState, metadata: Mapping[str, Any]) -> None:
        """Say for each rank what it wrote."""
        for rank in range(len(self._ranks)):
            self._parts[str(rank)] = self._put_part(rank, topology, metadata)

    def commit(self, *, sweep_older: bool) -> None:
        """Make it a checkpoint. Where that fails nothing may be deleted: a store can have created
        the manifest and its answer be lost."""
        session = self._session
        epoch = int(claim_epoch(self.url, session, socket.gethostname())["epoch"])
        done = publish_manifest(
            self.url, _attempt(session), session, _NUMBER, epoch, range(len(self._ranks)),
            self._parts, None,
        )  # fmt: skip
        if sweep_older:
            sweep(self.url, [done["manifest"]], epoch)

    def _put_part(
        self, rank: int, topology: ParallelState, metadata: Mapping[str, Any]
    ) -> dict[str, str]:
        file = self._ranks[rank]
        part = Part(
            checkpoint_id=self.url, kind="SHARDED", step=0, attempt=_attempt(self._session),
            session=self._session, number=_NUMBER, rank=rank, host=socket.gethostname(),
            group_ranks=file.layout.group_ranks, fingerprint=file.layout.fingerprint,
            classes=file.layout.classes, layout=encode_rows(file.layout.entries), objects={},
            files=(self._record(file, rank),), topology=topology.to_json(),
            metadata=dict(metadata),
            versions={"smckpt": __version__, "python": platform.python_version()},
        )  # fmt: skip
        name, body = part_name(part.attempt, rank), seal_json(part.to_json())
        self._made.append(name)
        self.storage.put(name, body)
        return {"part": name, "crc64": hex64(crc64(body)), "host": part.host}

    def _record(self, file: RankFile, rank: int) -> FileRecord:
        """Of a data file whose block checksums are put beside it."""
        blocks, name = self._summed[file.name].blocks(), crc_name(_attempt(self._session), rank, 0)
        self._made.append(name)
        self.storage.put(name, struct.pack(f"<{len(blocks)}Q", *blocks))
        total = 0
        for at, value in enumerate(blocks):
            total = combine(total, value, min(BLOCK, file.size - at * BLOCK))
        return FileRecord(file.name, file.size, hex64(total), name)

    def _create(self, name: str, size: int) -> FileWriter:
        self._summed[name] = _Summed(super()._create(name, size), size)
        return self._summed[name]


class _Summed:
    """A file under way and the checksums of what was written, whatever the order."""

    def __init__(self, writer: FileWriter, size: int) -> None:
        self._writer = writer
        self._size = size
        self._runs: dict[int, tuple[int, int]] = {}  # offset → length within a block, checksum

    @property
    def piece(self) -> int:
        return self._writer.piece

    def write_at(self, offset: int, data: memoryview, _: int | None = None) -> None:
        at = total = 0
        while at < len(data):
            length = min(BLOCK - (offset + at) % BLOCK, len(data) - at)
            value = crc64(data[at : at + length])
            self._runs[offset + at] = length, value
            total = combine(total, value, length)
            at += length
        self._writer.write_at(offset, data, total)

    def finish(self) -> None:
        self._writer.finish()

    def abort(self) -> None:
        self._writer.abort()

    def blocks(self) -> list[int]:
        """The checksum of each block of the file."""
        out = [0] * -(-self._size // BLOCK)
        for at in sorted(self._runs):
            length, value = self._runs[at]
            out[at // BLOCK] = combine(out[at // BLOCK], value, length)
        return out


def _attempt(session: str) -> str:
    return f"{session}-{_NUMBER:08d}"
