"""A committed checkpoint of ours: opened, and what it holds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from smckpt.calls import in_threads
from smckpt.checkpoint.commits.choose import Commit, choose_commit, read_part
from smckpt.checkpoint.commits.contents import Contents, opened
from smckpt.checkpoint.commits.foreign import refuse_newer_dcp
from smckpt.checkpoint.reading.blocks import SavedFile, Stores, not_missing
from smckpt.checkpoint.reading.catalogue import Catalogue, SavedPieces, Stored
from smckpt.checkpoint.records.format import PartRecord, parse_name
from smckpt.checkpoint.records.headers import Header, read_header
from smckpt.checkpoint.records.rows import decode_containers, rows_of_groups
from smckpt.checkpoint.records.sealed import FILES_AT_ONCE
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from smckpt.layout.entries import DTYPES, Entry, Path, dotted
from smckpt.layout.flat_geometry import FlatGeometry
from smckpt.registry import READERS
from smckpt.storage import Storage
from smckpt.storage.urls import file_url


def _by_number(rows: Sequence[Entry], optimizers: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The rows of optimizers' states whose record names parameters by their numbers alone. An older
    smckpt gave such a row, of a state from outside a block, the names of an earlier block. Parts of
    flat parameters have nothing but these names."""

    def of_number(row: Entry) -> bool:
        at = len(row.before)
        number = row.path[at] if 1 < at < len(row.path) and row.before[-1] == "state" else None
        if not isinstance(number, int):
            return False
        ids = optimizers.get(dotted(row.before[:-1]), {}).get("ids", ())
        return number < len(ids) and ids[number] == [str(number)] != [*row.fqns]

    def by_path(row: Entry) -> Entry:
        last = str(row.path[-1])
        geometry = row.geometry.named(lambda _: last)
        return replace(row, geometry=geometry, before=row.path[:-1], after=())

    found = [row for row in rows if of_number(row)]
    flat = {
        row.before for row in found if len(row.fqns) > 1 or isinstance(row.geometry, FlatGeometry)
    }
    named = {id(row): by_path(row) for row in found if row.before not in flat}
    return tuple(named.get(id(row), row) for row in rows)


class CommittedCatalogue(Catalogue):
    """A committed checkpoint of ours; made by `open_catalogue`.

    Headers are read when they are needed, and compared with the checksums of their blocks.
    """

    ours = True

    def __init__(self, contents: Contents, stores: Stores) -> None:
        commit, self._groups = contents.commit, contents.groups
        first = commit.first
        self.url, self.commit, self.stores = contents.url, commit, stores
        self.identity, self.name, self.whole = commit.identity, commit.name, commit.whole
        self.above = self.url if commit.whole else commit.above
        self.kind, self.topology = first.kind, first.topology
        self.metadata, self.optimizers = first.metadata, first.optimizers
        self.nbytes = commit.nbytes
        self.manifests = tuple(group.manifest for group in self._groups)
        self.object_ranks = tuple(sorted(r for m in self.manifests for r in m.group_ranks))
        tables = ((g.manifest.layout, g.manifest.group_ranks, g.storage.url) for g in self._groups)
        self._rows = _by_number(list(rows_of_groups(tables)), self.optimizers)
        self._kinds: dict[int, dict[Path, str]] = {}
        self._files: dict[int, list[SavedFile]] = {}
        self._headers: dict[SavedFile, Header] = {}
        self._slots: dict[tuple[int, ...], dict[str, list[Stored]]] = {}

    @property
    def step(self) -> int | None:
        return self.commit.first.step

    @property
    def rows(self) -> tuple[Entry, ...]:
        return self._rows

    @cached_property
    def _containers(self) -> dict[tuple[Path, str], list[frozenset[int]]] | None:
        """By path and kind the ranks, of each group, that have such a container."""
        found: dict[tuple[Path, str], list[frozenset[int]]] = {}
        for manifest in self.manifests:
            recorded = decode_containers(manifest.layout, manifest.group_ranks, self.url)
            if recorded is None:
                return None
            for path, kind, ranks in recorded:
                found.setdefault((path, kind), []).append(ranks)
        return found

    @cached_property
    def _all_alike(self) -> dict[Path, str] | None:
        """The kinds, if all ranks have the same."""
        found, every = self._containers or {}, len(self.object_ranks)
        alike = all(sum(map(len, sets)) == every for sets in found.values())
        kinds = dict(found.keys())
        return kinds if alike and len(kinds) == len(found) else None

    @cached_property
    def _of_ranks(self) -> set[Path]:
        """The paths at which ranks have containers and tensors of their own. The parts of a tensor
        that is divided are one tensor of one kind, which a rank with few or no elements may not
        record."""
        return {
            row.path[:depth]
            for row in self.rows
            for depth in range(1, len(row.path) + row.geometry.per_rank)
        }

    def kinds(self, rank: int) -> dict[Path, str] | None:
        if self._containers is None:
            return None
        if self._all_alike is not None:
            return self._all_alike
        if rank not in self._kinds:
            found = self._kinds[rank] = {}
            for (path, kind), sets in self._containers.items():
                if any(rank in ranks for ranks in sets):
                    found[path] = kind
                elif path not in self._of_ranks:
                    found.setdefault(path, kind)
        return self._kinds[rank]

    @cached_property
    def pieces(self) -> SavedPieces:
        return SavedPieces(self.rows, (manifest.group_ranks for manifest in self.manifests))

    @cached_property
    def parts(self) -> dict[int, tuple[str, PartRecord]]:
        """Rank → the directory of its files, and its part."""
        return {
            part.rank: (group.storage.holder(part.name).url, part)
            for group in self._groups
            for part in group.manifest.parts
        }

    def value_paths(self, rank: int) -> dict[str, str] | None:
        return self.parts[rank][1].value_paths

    @property
    def files(self) -> list[SavedFile]:
        return [file for rank in self.object_ranks for file in self._files_of(rank)]

    def read_headers(self, ranks: Iterable[int]) -> None:
        files = [file for rank in sorted(set(ranks)) for file in self._files_of(rank)]
        files = [file for file in files if file not in self._headers]
        if len(files) > 1:
            in_threads(self.header, files, FILES_AT_ONCE, "smckpt-headers")

    def header(self, file: SavedFile) -> Header:
        """The header of a data file.

        Raises:
            CorruptCheckpointError: the header is damaged, or the file is missing or has another
                size.
        """
        header = self._headers.get(file)
        if header is None:
            with not_missing(file.path):
                size = file.storage.size(file.record.name)
            if size != file.size:
                raise CorruptCheckpointError(
                    f"the file has {size} bytes, but {file.size} were written",
                    remedy="the file was cut or replaced after it was written: use an older "
                    "checkpoint",
                    path=file.path,
                )
            header = read_header(file.read, size, file.path)
            self._headers[file] = header
        return header

    def slots(self, row: Entry, holders: Sequence[int]) -> list[Stored]:
        shape = row.geometry.local_shape(holders[0])
        dtype = DTYPES[row.dtype]
        numel, itemsize = math.prod(shape), dtype.itemsize
        found = []
        for file, stored in self._stored(tuple(holders)).get(row.key, ()):
            count = stored.shape[0] if stored.part else numel
            # a type that safetensors lacks has its bytes as one more dimension
            kept = shape if dtype.code else (*shape, itemsize)
            if (
                (not stored.part and stored.shape != kept)
                or stored.code != (dtype.code or "U8")
                or stored.nbytes != count * itemsize
                or stored.stop > numel * itemsize
            ):
                raise CorruptCheckpointError(
                    f"the header says that {row.key!r} is {stored.code} {list(stored.shape)} from "
                    f"byte {stored.start}, but the manifest says that it is {row.dtype} "
                    f"{list(shape)}",
                    remedy="use an older checkpoint",
                    path=file.path,
                )
            found.append((file, stored))
        if len(found) > 1:
            found.sort(key=lambda stored: stored[1][:2])
        at = 0
        for _, slot in found:
            if slot.start > at:
                break
            at = max(at, slot.stop)
        if at < numel * itemsize or not found:
            raise CorruptCheckpointError(
                f"{row.key!r}: elements {at // itemsize} to {numel} of the array of ranks "
                f"{list(holders)} are missing from their files",
                remedy="use an older checkpoint",
                path=self.url,
            )
        return found

    def _files_of(self, rank: int) -> list[SavedFile]:
        if rank not in self._files:
            directory, part = self.parts[rank]
            self._files[rank] = [self.stores.file(directory, f, rank) for f in part.files]
        return self._files[rank]

    def _stored(self, holders: tuple[int, ...]) -> dict[str, list[Stored]]:
        """The arrays that the files of these ranks hold, by key."""
        if holders not in self._slots:
            self.read_headers(holders)
            found: dict[str, list[Stored]] = {}
            for rank in holders:
                for file in self._files_of(rank):
                    for key, slot in self.header(file).slots.items():
                        found.setdefault(key, []).append((file, slot))
            self._slots[holders] = found
        return self._slots[holders]

    def part_url(self, rank: int) -> str:
        directory, part = self.parts[rank]
        return file_url(directory, part.name)

    def part(self, rank: int) -> dict[str, Any]:
        """The part record, checked against the manifest."""
        directory, part = self.parts[rank]
        manifest = next(m for m in self.manifests if rank in m.group_ranks)
        with not_missing(file_url(directory, part.name)):
            return read_part(self.stores.storage(directory), part, manifest)


def open_any(storage: Storage, *, choose: str | None = None, name: str | None = None) -> Catalogue:
    """The newest commit of ours in a directory; or, where there is none, the checkpoint that others
    wrote there. Arguments and errors are those of `open_catalogue`.

    Raises:
        UsageError: others wrote it, in a form that is no whole state.
    """
    failure: CheckpointNotFoundError | None = None
    single = storage.folder is not None and os.path.isfile(storage.folder)
    if not single and (choose is None or parse_name(choose) is not None):
        try:
            return open_catalogue(storage, choose=choose, name=name)
        except CheckpointNotFoundError as error:
            failure = error
    for reader in READERS.all().values():
        found: Catalogue | None = reader.open(storage)
        if found is not None:
            return found
    raise failure or CheckpointNotFoundError(
        "nothing is here", remedy="check the path", path=storage.url
    )


def open_catalogue(
    storage: Storage, *, choose: str | None = None, name: str | None = None
) -> CommittedCatalogue:
    """Open the newest committed checkpoint in a directory, which is a group's or has a record.

    Args:
        choose: open this commit (`Catalogue.identity`), which another group chose.
        name: the name by which a peer found the commit here (`Commit.name`). Then nothing is
            listed.

    Raises:
        CheckpointNotFoundError: nothing committed is here. The message says what is here instead.
        CorruptCheckpointError, FormatVersionError: the newest commit cannot be read.
        UsageError: torch's own DCP has saved here since.
    """
    commit = choose_commit(storage, choose, name)
    if name is None:  # else the peer has looked
        refuse_newer_dcp(storage, commit.replaces)
    return catalogue_of(storage, commit)


def catalogue_of(storage: Storage, commit: Commit) -> CommittedCatalogue:
    """The catalogue of a commit in a directory, which was read or is about to be made."""
    contents = opened(storage, commit)
    # All ranks read at once, from all prefixes, so this rank takes its share of all prefixes'
    # requests.
    spreads = [group.storage.spread for group in contents.groups]
    access = contents.storage.access
    share = access.share.times(min(s.prefixes if s else 1 for s in spreads))
    return CommittedCatalogue(contents, Stores(access.holding(share)))
