"""Everything that a committed checkpoint holds: by key and rank, and by logical name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from smckpt.checkpoint.choose import Commit, choose_commit
from smckpt.checkpoint.crc import crc64, hex64
from smckpt.checkpoint.format import FileRecord, Manifest, PartRecord, open_json
from smckpt.checkpoint.headers import Header, read_header
from smckpt.checkpoint.objects import decode_object
from smckpt.checkpoint.rows import Row, decode_rows
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import Path, dotted
from smckpt.layout.geometry import Box, FlatGeometry, Piece, Shape
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import join_url

__all__ = ["Catalogue", "LogicalTensor", "SavedFile", "Source", "StoredSlot", "open_catalogue"]


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor by its logical name; `shape` is the global one."""

    name: str
    path: Path
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class SavedFile:
    """A data file and the rank that wrote it."""

    directory: str
    record: FileRecord
    rank: int

    @property
    def path(self) -> str:
        return join_url(self.directory, self.record.name)


@dataclass(frozen=True)
class StoredSlot:
    """Elements [start, stop) of a stored array, at byte `offset` of `file`."""

    start: int
    stop: int
    file: SavedFile
    offset: int


@dataclass(frozen=True)
class Source:
    """A piece of a logical tensor as saved, and who holds the array that it is part of."""

    piece: Piece
    row: Row
    holders: tuple[int, ...]


@dataclass(frozen=True)
class _Member:
    """One group's manifest and where it stands."""

    directory: str
    manifest: Manifest
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Catalogue:
    """A committed checkpoint; made by `open_catalogue`. Thread-safe."""

    url: str
    commit: Commit
    members: tuple[_Member, ...]
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    _memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def identity(self) -> str:
        """The name of the file that commits it: same for all groups of a step."""
        return self.commit.identity

    @property
    def single_group(self) -> bool:
        return len(self.members) == 1

    @property
    def whole(self) -> bool:
        """Whether all groups of the step are here, not one of several."""
        return self.members[0].manifest.record is None or self.commit.through_record

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(m.manifest for m in self.members)

    @property
    def _first(self) -> Manifest:
        return self.members[0].manifest

    @property
    def kind(self) -> str | None:
        return self._first.kind

    @property
    def step(self) -> int | None:
        return self._first.step

    @property
    def epoch(self) -> int:
        return self._first.epoch

    @property
    def number(self) -> int:
        return self._first.number

    @property
    def committed_at(self) -> int:
        return self.commit.committed_at

    @property
    def topology(self) -> dict[str, Any] | None:
        return self._first.topology

    @property
    def metadata(self) -> dict[str, Any]:
        return self._first.metadata

    @property
    def optimizers(self) -> dict[str, Any]:
        return self._first.optimizers

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for member in self.members for row in member.rows)

    @cached_property
    def rows_by_key(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.key, []).append(row)
        return found

    @cached_property
    def _rows_by_name(self) -> dict[str, list[tuple[Row, str]]]:
        found: dict[str, list[tuple[Row, str]]] = {}
        for row in self.rows:
            for fqn in row.fqns:
                found.setdefault(dotted(row.logical_path(fqn)), []).append((row, fqn))
        return found

    @cached_property
    def logical(self) -> dict[str, LogicalTensor]:
        """All tensors by logical name."""
        return {
            name: LogicalTensor(
                name, rows[0][0].logical_path(rows[0][1]), rows[0][0].dtype, _shape(*rows[0])
            )
            for name, rows in self._rows_by_name.items()
        }

    @cached_property
    def parts(self) -> dict[int, tuple[str, PartRecord]]:
        """Rank → its group's directory and its part."""
        return {
            part.rank: (member.directory, part)
            for member in self.members
            for part in member.manifest.parts
        }

    @property
    def object_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.parts))

    @property
    def files(self) -> list[SavedFile]:
        return [
            SavedFile(directory, file, rank)
            for rank, (directory, part) in sorted(self.parts.items())
            for file in part.files
        ]

    def storage(self, directory: str) -> Storage:
        with self._lock:
            key = ("storage", directory)
            if key not in self._memo:
                self._memo[key] = open_storage(directory)
            storage: Storage = self._memo[key]
            return storage

    def sources(self, name: str) -> list[Source]:
        """The saved pieces of a logical tensor, one for each distinct shard coordinate.

        Of a kept row there is one for each rank.
        """
        out = []
        for row, fqn in self._rows_by_name[name]:
            for holders in self.holders(row):
                for piece in self._pieces(row, holders[0]):
                    if piece.name == fqn:
                        out.append(Source(piece, row, holders))
        return out

    def holders(self, row: Row) -> list[tuple[int, ...]]:
        """The ranks that share an array of this row, for each distinct array."""
        if row.geometry is None:
            return [(rank,) for rank in row.ranks]
        by_coordinate: dict[Shape, list[int]] = {}
        for rank in row.ranks:
            by_coordinate.setdefault(row.geometry.coordinate(rank), []).append(rank)
        return [tuple(ranks) for ranks in by_coordinate.values()]

    def _pieces(self, row: Row, rank: int) -> list[Piece]:
        if not isinstance(row.geometry, FlatGeometry) or row.geometry.member is not None:
            return row.entry(rank).geometry.pieces(rank)
        # A flat shard has pieces of many tensors: found once per unit and shard, not per tensor.
        key = ("pieces", id(row.geometry.unit), row.geometry.coordinate(rank))
        if key not in self._memo:
            self._memo[key] = row.geometry.pieces(rank)
        pieces: list[Piece] = self._memo[key]
        return pieces

    def header(self, file: SavedFile) -> Header:
        key = ("header", file.path)
        if key not in self._memo:
            storage = self.storage(file.directory)
            self._memo[key] = read_header(storage, file.record.name, file.record.size)
        header: Header = self._memo[key]
        return header

    def slots(self, row: Row, holders: Sequence[int]) -> list[StoredSlot]:
        """Where the array of `row` that `holders` share is stored, in order of elements.

        Raises:
            CorruptCheckpointError: some elements are in no file.
        """
        numel = row.entry(holders[0]).numel
        found = []
        for rank in holders:
            directory, part = self.parts[rank]
            for record in part.files:
                file = SavedFile(directory, record, rank)
                entry = self.header(file).entries.get(row.key)
                if entry is not None:
                    start, stop = entry.elements or (0, numel)
                    found.append(StoredSlot(start, stop, file, entry.offset))
        found.sort(key=lambda slot: (slot.start, slot.stop))
        at = 0
        for slot in found:
            if slot.start > at:
                break
            at = max(at, slot.stop)
        if at < numel or not found:
            raise CorruptCheckpointError(
                f"elements {at} to {numel} of {row.key!r} are in no file of ranks {list(holders)}",
                remedy="use an older checkpoint",
                path=self.url,
            )
        return found

    def objects(self, rank: int) -> dict[str, tuple[Path, Any]]:
        """The values of saved rank `rank` that are no tensors: key → (path, value)."""
        return {
            key: (tuple(leaf["path"]), decode_object(leaf["value"]))
            for key, leaf in self.part(rank)["objects"].items()
        }

    def part(self, rank: int) -> dict[str, Any]:
        """The part record of a saved rank, checked against the manifest."""
        directory, part = self.parts[rank]
        path = join_url(directory, part.name)
        data = self.storage(directory).read(part.name)
        if hex64(crc64(data)) != part.crc64:
            raise CorruptCheckpointError(
                "the part record is not the one that the manifest names (checksum differs)",
                remedy="use an older checkpoint, and check the file system",
                path=path,
            )
        return open_json(data, path)


def open_catalogue(url: str, *, choose: str | None = None) -> Catalogue:
    """The newest committed checkpoint at `url`: a group's directory, or one with a record in it.

    Args:
        choose: follow this commit (`Catalogue.identity`), chosen by another group.

    Raises:
        CheckpointNotFoundError: nothing committed is here; says what is.
        CorruptCheckpointError, FormatVersionError: the newest commit cannot be read.
    """
    commit = choose_commit(open_storage(url), choose)
    members = tuple(
        _Member(
            directory,
            manifest,
            tuple(decode_rows(manifest.layout, manifest.group_ranks, directory)),
        )
        for directory, manifest in commit.manifests
    )
    return Catalogue(url, commit, members)


def _shape(row: Row, fqn: str) -> Shape:
    if isinstance(row.geometry, FlatGeometry):
        return next(s.shape for s in row.geometry.unit.segments if s.fqn == fqn)
    return row.shape


def remaining_after(boxes: Iterable[Box], taken: Box) -> list[Box]:
    """`boxes` without what `taken` covers, as disjoint boxes."""
    out: list[Box] = []
    for box in boxes:
        common = box.intersect(taken)
        if common is None:
            out.append(box)
            continue
        offsets, sizes = list(box.offsets), list(box.sizes)
        for dim in range(len(sizes)):
            low, high = common.offsets[dim], common.offsets[dim] + common.sizes[dim]
            if offsets[dim] < low:
                before = [*sizes]
                before[dim] = low - offsets[dim]
                out.append(Box(tuple(offsets), tuple(before)))
            end = offsets[dim] + sizes[dim]
            if high < end:
                at, after = [*offsets], [*sizes]
                at[dim], after[dim] = high, end - high
                out.append(Box(tuple(at), tuple(after)))
            offsets[dim], sizes[dim] = low, high - low
    return out
