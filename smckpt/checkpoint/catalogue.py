"""Everything that a committed checkpoint holds: by key and rank, and by logical name."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from smckpt.checkpoint.blocks import BlockReader, Readers, SavedFile, not_missing
from smckpt.checkpoint.choose import READERS, Commit, choose_commit
from smckpt.checkpoint.crc import crc64, hex64
from smckpt.checkpoint.format import Manifest, PartRecord, open_json
from smckpt.checkpoint.headers import Header, HeaderEntry, read_header
from smckpt.checkpoint.objects import decode_object
from smckpt.checkpoint.rows import Row, decode_rows
from smckpt.checkpoint.sources import Source, Sources, row_shape
from smckpt.checkpoint.spread import found_spread
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.entries import DTYPES, Path
from smckpt.layout.mesh import Shape
from smckpt.storage import Storage, open_storage
from smckpt.storage.pool import pool_here
from smckpt.storage.s3_pace import current_share, sharing
from smckpt.storage.urls import file_url, join_url, parent_url

__all__ = ["Catalogue", "LogicalTensor", "SavedFile", "Source", "StoredSlot", "open_catalogue"]


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor by its logical name; `shape` is the global one."""

    name: str
    path: Path
    dtype: str
    shape: Shape


class StoredSlot(NamedTuple):
    """Elements [start, stop) of a stored array, at byte `offset` of `file`."""

    start: int
    stop: int
    file: SavedFile
    offset: int


@dataclass(frozen=True)
class _Member:
    """One group's manifest and where it stands; homes: where its ranks' files lie, by turns."""

    directory: str
    manifest: Manifest
    rows: tuple[Row, ...]
    homes: tuple[str, ...]


class _Memory:
    """What a catalogue has read and found out so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.readers = Readers(verify=True)
        self.files: dict[int, list[SavedFile]] = {}
        self.headers: dict[SavedFile, Header] = {}
        self.slots: dict[tuple[int, ...], dict[str, list[tuple[SavedFile, HeaderEntry]]]] = {}


@dataclass(frozen=True)
class Catalogue:
    """A committed checkpoint; made by `open_catalogue`. Thread-safe.

    Headers are read when they are needed, and held against the checksums of their blocks.
    """

    url: str
    commit: Commit
    members: tuple[_Member, ...]
    _memory: _Memory = field(default_factory=_Memory, compare=False, repr=False)

    @property
    def identity(self) -> str:
        """The name of the file that commits it: same for all groups of a step."""
        return self.commit.identity

    @property
    def above(self) -> str:
        """The directory in which all groups of the step can be opened; `url` where it is one."""
        record = self._first.record
        if record is None or self.commit.through_record:
            return self.url
        return parent_url(join_url(self.members[0].directory, record))

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
    def pieces(self) -> Sources:
        """The rows by logical name, and the boxes that they say ranks hold."""
        return Sources(self.rows)

    @cached_property
    def logical(self) -> dict[str, LogicalTensor]:
        """All tensors by logical name."""
        out = {}
        for name, rows in self.pieces.by_name.items():
            row, fqn = rows[0]
            out[name] = LogicalTensor(name, row.logical_path(fqn), row.dtype, row_shape(row, fqn))
        return out

    @cached_property
    def parts(self) -> dict[int, tuple[str, PartRecord]]:
        """Rank → the directory in which its files lie, and its part."""
        return {
            part.rank: (member.homes[part.rank % len(member.homes)], part)
            for member in self.members
            for part in member.manifest.parts
        }

    @property
    def object_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.parts))

    @property
    def files(self) -> list[SavedFile]:
        return [file for rank in self.object_ranks for file in self._files_of(rank)]

    @property
    def readers(self) -> Readers:
        """Of its files, with the checksums and connections that they have got by now."""
        return self._memory.readers

    def storage(self, directory: str) -> Storage:
        return self._memory.readers.storage(directory)

    def reader(self, file: SavedFile) -> BlockReader:
        """Reads of a data file, checked."""
        return self._memory.readers.of(file)

    # -- where tensors are ---------------------------------------------------------------------

    def sources(self, name: str) -> list[Source]:
        """The saved pieces of a logical tensor, one for each distinct shard coordinate.

        Of a kept row there is one for each rank.
        """
        return self.pieces.all(name)

    def held_empty(self, name: str) -> bool:
        """Whether one of the ranks that hold a tensor has none of its elements."""
        rows = [row for row, _ in self.pieces.by_name[name]]
        return any(0 in row.local_shape(rank) for row in rows for rank in row.ranks)

    def holders(self, row: Row) -> list[tuple[int, ...]]:
        """The ranks that share an array of this row, for each distinct array."""
        return list(self.pieces.holders(row).values())

    def read_headers(self, ranks: Iterable[int]) -> None:
        """Read the headers of all files that these ranks wrote, many at once.

        Raises:
            CorruptCheckpointError: one is damaged, missing, or of another size.
        """
        files = [file for rank in sorted(set(ranks)) for file in self._files_of(rank)]
        files = [file for file in files if file not in self._memory.headers]
        if len(files) > 1:
            with pool_here(min(READERS, len(files)), "smckpt-headers") as pool:
                list(pool.map(self.header, files))

    def header(self, file: SavedFile) -> Header:
        """The header of a data file.

        Raises:
            CorruptCheckpointError: it is damaged, or the file missing or of another size.
        """
        header = self._memory.headers.get(file)
        if header is None:
            reader = self.reader(file)
            with not_missing(file.path):
                size = reader.storage.size(file.record.name)
            if size != reader.size:
                raise CorruptCheckpointError(
                    f"the file has {size} bytes, {reader.size} were written",
                    remedy="it was cut or replaced after it was written: use an older checkpoint",
                    path=file.path,
                )
            header = read_header(reader.read, size, file.path)
            self._memory.headers[file] = header
        return header

    def slots(self, row: Row, holders: Sequence[int]) -> list[StoredSlot]:
        """Where the array of `row` that `holders` share is stored, in order of elements.

        Raises:
            CorruptCheckpointError: some elements are in no file.
        """
        shape = row.local_shape(holders[0])
        numel, dtype = math.prod(shape), DTYPES[row.dtype]
        found = []
        for file, stored in self._stored(tuple(holders)).get(row.key, ()):
            start, stop = stored.elements or (0, numel)
            if (
                stored.code != (dtype.code or "U8")
                or stored.nbytes != (stop - start) * dtype.itemsize
                or stop > numel
            ):
                raise CorruptCheckpointError(
                    f"the header says that {row.key!r} is {stored.code} {list(stored.shape)} from "
                    f"element {start}, the manifest that it is {row.dtype} {list(shape)}",
                    remedy="use an older checkpoint",
                    path=file.path,
                )
            found.append(StoredSlot(start, stop, file, stored.offset))
        if len(found) > 1:
            found.sort(key=lambda slot: (slot.start, slot.stop))
        at = 0
        for slot in found:
            if slot.start > at:
                break
            at = max(at, slot.stop)
        if at < numel or not found:
            raise CorruptCheckpointError(
                f"{row.key!r}: elements {at} to {numel} of the array of ranks "
                f"{list(holders)} are in none of their files",
                remedy="use an older checkpoint",
                path=self.url,
            )
        return found

    def _files_of(self, rank: int) -> list[SavedFile]:
        if rank not in self._memory.files:
            directory, part = self.parts[rank]
            self._memory.files[rank] = [SavedFile(directory, f, rank) for f in part.files]
        return self._memory.files[rank]

    def _stored(self, holders: tuple[int, ...]) -> dict[str, list[tuple[SavedFile, HeaderEntry]]]:
        """What the files of these ranks hold, by key."""
        if holders not in self._memory.slots:
            self.read_headers(holders)
            found: dict[str, list[tuple[SavedFile, HeaderEntry]]] = {}
            for rank in holders:
                for file in self._files_of(rank):
                    for key, stored in self.header(file).entries.items():
                        found.setdefault(key, []).append((file, stored))
            self._memory.slots[holders] = found
        return self._memory.slots[holders]

    # -- what is no tensor ---------------------------------------------------------------------

    def objects(self, rank: int) -> dict[str, tuple[Path, Any]]:
        """The values of saved rank `rank` that are no tensors: key → (path, value)."""
        return {
            key: (tuple(leaf["path"]), decode_object(leaf["value"]))
            for key, leaf in self.part(rank)["objects"].items()
        }

    def part(self, rank: int) -> dict[str, Any]:
        """The part record of a saved rank, checked against the manifest.

        Raises:
            CorruptCheckpointError: it is missing, or not the one that the manifest names.
        """
        directory, part = self.parts[rank]
        path = file_url(directory, part.name)
        with not_missing(path):
            data = self.storage(directory).read(part.name)
        if hex64(crc64(data)) != part.crc64:
            raise CorruptCheckpointError(
                "the part record is not the one that the manifest names (checksum differs)",
                remedy="use an older checkpoint, and check the file system",
                path=path,
            )
        return open_json(data, path)


def open_catalogue(url: str, *, choose: str | None = None, name: str | None = None) -> Catalogue:
    """The newest committed checkpoint at `url`: a group's directory, or one with a record in it.

    Args:
        choose: follow this commit (`Catalogue.identity`), chosen by another group.
        name: the name by which a peer found it here (`Commit.name`): nothing need be listed.

    Raises:
        CheckpointNotFoundError: nothing committed is here; says what is.
        CorruptCheckpointError, FormatVersionError: the newest commit cannot be read.
    """
    commit = choose_commit(open_storage(url), choose, name)
    members = tuple(_member(directory, manifest) for directory, manifest in commit.manifests)
    # All ranks read at once, and from all prefixes: each has its part of what all of them stand.
    with sharing(current_share().times(min(len(member.homes) for member in members))):
        return Catalogue(url, commit, members)


def _member(directory: str, manifest: Manifest) -> _Member:
    rows = tuple(decode_rows(manifest.layout, manifest.group_ranks, directory))
    for row in rows:
        if row.dtype not in DTYPES:
            raise CorruptCheckpointError(
                f"{row.key!r} has the dtype {row.dtype!r}, which this smckpt does not know",
                remedy="install a newer smckpt, or use another checkpoint",
                path=directory,
            )
    spread = manifest.spread
    if spread is not None:
        storage, part = open_storage(directory), manifest.parts[0].name
        spread = found_spread(storage, spread, part)
    homes = spread.homes(directory) if spread else [directory]
    return _Member(directory, manifest, rows, tuple(homes))
