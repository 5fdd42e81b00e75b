"""The checkpoint that an import writes: one part for each rank, as if ranks had saved it."""

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
from smckpt.checkpoint.commit import publish_manifest, take_lease
from smckpt.checkpoint.crc import crc64 as crc
from smckpt.checkpoint.crc import hex64
from smckpt.checkpoint.format import FileRecord, Part, crc_name, data_name, part_name
from smckpt.checkpoint.rows import encode_rows
from smckpt.checkpoint.sealed import seal_json
from smckpt.checkpoint.sweep import sweep
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.geometry import PerRankGeometry
from smckpt.layout.image import Layout, compile_layout
from smckpt.storage import Storage
from smckpt.topology import ParallelState
from smckpt.translate.files import Output
from smckpt.translate.targets import OutputFile
from smckpt.translate.translated import Translated

__all__ = ["CheckpointOutput", "RankFile", "new_session", "rank_files"]

_NUMBER = 0  # number of the save, the only one of its session
_ONE_FILE = 1 << 62  # bytes; large enough that no rank's data is split


@dataclass(frozen=True)
class RankFile(OutputFile):
    """The data file of a rank, with the layout that the rank would use."""

    layout: Layout

    @cached_property
    def header(self) -> bytes:
        return self.layout.files[0].header


def new_session() -> str:
    return uuid.uuid4().hex[:12]


def rank_files(
    session: str, prefix: Path, ranks: Sequence[Sequence[Translated]]
) -> tuple[RankFile, ...]:
    """Make a file for each rank, with its own tensors under `prefix` in the state dict."""
    files = []
    for rank, targets in enumerate(ranks):
        entries = [
            Entry(
                path=(*prefix, t.name), dtype=t.dtype, before=prefix, after=(), ranks=(rank,),
                geometry=PerRankGeometry((t.name,), t.shape, (rank,)),
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
    """The directory `storage`, which becomes a checkpoint with one rank for each file."""

    def __init__(self, storage: Storage, session: str, files: Sequence[RankFile]) -> None:
        super().__init__(storage, files)
        self._hidden = False  # only a manifest makes the files a checkpoint
        self._session = session
        self._ranks = tuple(files)
        self._parts: dict[str, dict[str, str]] = {}

    def prepare(self, *, overwrite: bool) -> None:
        """Refuse a directory that is not empty. With `overwrite`, an old checkpoint there is
        removed after this one is committed."""
        self._present(overwrite)
        self._check_space()

    def put_parts(self, topology: ParallelState, metadata: Mapping[str, Any]) -> None:
        """Write the part of each rank."""
        for rank in range(len(self._ranks)):
            self._parts[str(rank)] = self._put_part(rank, topology, metadata)

    def commit(self, *, sweep_older: bool) -> None:
        """Commit the checkpoint. If that fails, nothing may be deleted: the store may have created
        the manifest and lost its answer."""
        session, access = self._session, self.storage.access
        fencing_token = int(
            take_lease(access, self.url, session, socket.gethostname())["fencing_token"]
        )
        done = publish_manifest(
            access, self.url, _attempt(session), session, _NUMBER, fencing_token,
            range(len(self._ranks)), self._parts, None,
        )  # fmt: skip
        if sweep_older:
            sweep(access, self.url, [done["manifest"]], fencing_token)

    def _put_part(
        self, rank: int, topology: ParallelState, metadata: Mapping[str, Any]
    ) -> dict[str, str]:
        file = self._ranks[rank]
        part = Part(
            checkpoint_id=self.url, kind="SHARDED", step=0, attempt=_attempt(self._session),
            session=self._session, number=_NUMBER, rank=rank, host=socket.gethostname(),
            group_ranks=file.layout.group_ranks, fingerprint=file.layout.fingerprint,
            classes=file.layout.classes, layout=encode_rows(file.layout.entries, {}), objects={},
            files=(self._record(file, rank),), topology=topology.to_json(),
            metadata=dict(metadata),
            versions={"smckpt": __version__, "python": platform.python_version()},
        )  # fmt: skip
        name, body = part_name(part.attempt, rank), seal_json(part.to_json())
        self._made.append(name)
        self.storage.put(name, body)
        return {"part": name, "crc64": hex64(crc(body)), "host": part.host}

    def _record(self, file: RankFile, rank: int) -> FileRecord:
        """The record of a data file. Its block checksums are written beside it."""
        blocks, name = self.blocks_of(file), crc_name(_attempt(self._session), rank, 0)
        self._made.append(name)
        self.storage.put(name, struct.pack(f"<{len(blocks)}Q", *blocks))
        return FileRecord(file.name, file.size, self.checksum_of(file), name)


def _attempt(session: str) -> str:
    return f"{session}-{_NUMBER:08d}"
