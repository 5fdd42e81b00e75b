"""The checkpoint that an import writes: one part for each rank, as if ranks had saved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from smckpt.checkpoint.commits.commit import commit_alone
from smckpt.checkpoint.commits.part import PartWriter, SummedFile, part_body
from smckpt.checkpoint.commits.sweep import sweep
from smckpt.checkpoint.records.format import data_name
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.geometry import PerRankGeometry
from smckpt.layout.image import Layout, compile_layout
from smckpt.storage import Storage
from smckpt.topology import ParallelState
from smckpt.translate.ranks.translated import Translated
from smckpt.translate.writing.files import Output
from smckpt.translate.writing.targets import OutputFile

__all__ = ["CheckpointOutput", "RankFile", "rank_files"]

_ONE_FILE = 1 << 62  # bytes; large enough that no rank's data is split


@dataclass(frozen=True)
class RankFile(OutputFile):
    """The data file of a rank, with the layout that the rank would use."""

    layout: Layout

    @cached_property
    def header(self) -> bytes:
        return self.layout.files[0].header


def rank_files(
    attempt: str, prefix: Path, ranks: Sequence[Sequence[Translated]]
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
        files.append(RankFile(data_name(attempt, rank, 0), named, layout))
    return tuple(files)


class CheckpointOutput(Output):
    """The directory `storage`, which becomes a checkpoint with one rank for each file."""

    def __init__(self, storage: Storage, attempt: str, files: Sequence[RankFile]) -> None:
        super().__init__(storage, files)
        self._hidden = False  # only a manifest makes the files a checkpoint
        self._attempt = attempt
        self._writers = {
            file.name: PartWriter(storage, attempt, rank) for rank, file in enumerate(files)
        }
        self._layouts = [file.layout for file in files]
        self._parts: list[dict[str, str]] = []

    def prepare(self, *, overwrite: bool) -> None:
        """Refuse a directory that is not empty. With `overwrite`, an old checkpoint there is
        removed after this one is committed."""
        self._present(overwrite)
        self._check_space()

    def put_parts(self, topology: ParallelState, metadata: Mapping[str, Any]) -> None:
        """Write the part of each rank."""
        for layout, writer in zip(self._layouts, self._writers.values(), strict=True):
            body = part_body(
                layout,
                encode_rows(layout.entries, {}),
                checkpoint_id=self.url,
                kind="SHARDED",
                step=0,
                topology=topology.to_json(),
                metadata=metadata,
            )
            self._parts.append(writer.finish(body))

    def commit(self, *, sweep_older: bool) -> None:
        """Commit the checkpoint. If that fails, nothing may be deleted (see `commit_alone`)."""
        manifest, fencing_token = commit_alone(self.storage, self._attempt, self._parts)
        if sweep_older:
            sweep(self.storage.access, self.url, [manifest], fencing_token)

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abort()
        super().abandon()

    def _begun(self, file: OutputFile, name: str) -> SummedFile:
        return self._writers[file.name].file(file.size)
