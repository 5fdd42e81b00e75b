"""Read the parts of a group back from storage and check that they belong together."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from smckpt.calls import Threads
from smckpt.checkpoint.commits.part import tables_digest
from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.format import FileRecord, PartRecord
from smckpt.checkpoint.records.rows import RowMerger, decode_rows
from smckpt.checkpoint.records.sealed import FILES_AT_ONCE, MAX_JSON_BYTES, open_sections, sound
from smckpt.decoding import decode
from smckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateError,
    StorageError,
    UsageError,
    few,
)
from smckpt.storage import Storage
from smckpt.storage.urls import file_url

_BATCH = 256  # parts in memory at once
_NAMED = 6  # ranks, hosts or keys that a message names
_REFERENCE = 128  # bytes that the name of another rank's table has at most; a table has more
# a rank may pass another value, which is refused
_SAME = ("checkpoint_id", "kind", "step", "group_ranks")
_OURS = ("attempt", "session", "number")  # the engine sets these
_HEAD = ("kind", "step", "topology", "metadata", "versions", "checkpoint_id")
_NEEDED = {*_SAME, *_OURS, *_HEAD, "rank", "host", "files", "classes", "layout", "optimizers"}


def gather_parts(
    storage: Storage, attempt: str, ranks: Sequence[int], parts: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Read all parts and check all files that they name; the fields of a `Manifest` that they tell.
    What the ranks have alike is that of the lowest rank; of optimizers it has those of all, the
    lowest rank's first.

    Args:
        ranks: the ranks of the group.
        parts: rank (as text) → {"part": name, "crc64": hex, "host": name}, as the ranks reported.

    Raises:
        StorageError: a part or file is missing here, because the hosts do not share the directory.
        CorruptCheckpointError: a part or file reads back with other bytes than were written.
        StateError, UsageError: the parts do not belong together.
    """
    if sorted(map(int, parts)) != sorted(ranks):
        raise StateError(
            f"ranks {sorted(map(int, parts))} wrote, but the group is {sorted(ranks)}",
            remedy="all ranks of process_group must save",
            path=storage.url,
        )
    group = _Group(storage, attempt)
    with Threads(min(FILES_AT_ONCE, len(parts))) as pool:
        ordered = sorted(map(int, parts))
        for batch in (ordered[at : at + _BATCH] for at in range(0, len(ordered), _BATCH)):
            read = pool.map(lambda rank: _read(storage, rank, parts[str(rank)]), batch)
            for rank, found in zip(batch, read, strict=True):
                group.add(rank, found)
    group.merge()
    if group.unseen:
        _not_shared(storage, group.unseen, parts)
    _check_classes(storage.url, group)
    gathered = group.gathered(parts)
    _check_shards(storage.url, gathered["layout"], ranks)
    return gathered


@dataclass(frozen=True)
class _Read:
    """A part that was read: the JSON of each section, and its files if all of them have the
    recorded sizes. table_of: the rank and digest that it names in place of a table."""

    sections: dict[str, bytes]
    files: tuple[FileRecord, ...]
    table_of: tuple[int, str] | None


class _Group:
    """The parts that were read so far. Content that is the same for many ranks is kept and parsed
    once."""

    def __init__(self, storage: Storage, attempt: str) -> None:
        self.storage = storage
        self.attempt = attempt
        self.unseen: dict[int, str] = {}  # rank → which of its files is missing here
        self.classes: dict[int, dict[str, str]] = {}
        self.layouts: dict[int, bytes] = {}
        self._tables_of: dict[int, tuple[int, str]] = {}  # rank → whose table it has, and digest
        self._merger = RowMerger()
        self._first: dict[str, bytes] = {}
        self._hosts: dict[int, str] = {}
        self._files: dict[int, tuple[FileRecord, ...]] = {}
        self._value_paths: dict[int, dict[str, str]] = {}
        self._optimizers: dict[bytes, None] = {}
        self._parsed: dict[bytes, Any] = {}
        self._alike: dict[bytes, bytes] = {}
        self._tables: dict[int, tuple[bytes, ...]] = {}  # rank → its table and optimizers

    def add(self, rank: int, found: _Read | str) -> None:
        if isinstance(found, str):
            self.unseen[rank] = found
            return
        sections = found.sections
        self._hosts[rank] = self.value(sections["host"])
        if not self._first:
            self._first = sections
        self._check_same(rank, sections)
        self._files[rank] = found.files
        self._value_paths[rank] = self.value(sections["value_paths"])
        self.classes[rank] = self.value(sections["classes"])
        if found.table_of is not None:
            self._tables_of[rank] = found.table_of
            return
        layout, optimizers = (sections[key] for key in ("layout", "optimizers"))
        self._tables[rank] = tuple(
            self._alike.setdefault(each, each) for each in (layout, optimizers)
        )

    def merge(self) -> None:
        """Merge the tables, that of the lowest rank first. Which rank of those that have a table
        wrote it is a matter of chance, and must not show."""
        digests: dict[int, str] = {}
        for rank in sorted(self._files):
            owner, digest = self._tables_of.get(rank, (rank, None))
            if owner in self.unseen:
                continue
            if digest is not None and owner in self._tables and owner not in digests:
                digests[owner] = tables_digest(*map(json.loads, self._tables[owner]))
            if digest is not None and digests.get(owner) != digest:
                self._refuse_attempt(
                    f"the part of rank {rank} names the table of rank {owner}, which is another",
                    {"path": self.storage.url, "rank": rank, "host": self._hosts[rank]},
                )
            layout, optimizers = self._tables[owner]
            self.layouts[rank] = layout
            self._optimizers[optimizers] = None
            if not self._merger.same(rank, layout):
                self._merger.add(rank, json.loads(layout), layout)

    def value(self, text: bytes) -> Any:
        if text not in self._parsed:
            self._parsed[text] = json.loads(text)
        return self._parsed[text]

    def gathered(self, parts: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        optimizers: dict[str, Any] = {}
        for text in self._optimizers:
            optimizers = {**json.loads(text), **optimizers}
        records = []
        for rank, files in self._files.items():
            listed, host, paths = parts[str(rank)], self._hosts[rank], self._value_paths[rank]
            records.append(PartRecord(rank, host, listed["part"], listed["crc64"], files, paths))
        head = {key: json.loads(self._first[key]) for key in _HEAD}
        layout = self._merger.merged()
        return {**head, "optimizers": optimizers, "layout": layout, "parts": tuple(records)}

    def _check_same(self, rank: int, sections: Mapping[str, bytes]) -> None:
        first = json.loads(self._first["rank"])
        where: dict[str, Any] = {"path": self.storage.url, "rank": rank, "host": self._hosts[rank]}
        for key in (*_OURS, *_SAME):
            if sections[key] == self._first[key]:
                continue
            here, there = sections[key].decode(), self._first[key].decode()
            if key in _SAME:
                raise UsageError(
                    f"{key} is {here[:200]} on rank {rank}, but {there[:200]} on rank {first}",
                    remedy=f"pass the same {key} on all ranks of process_group",
                    **where,
                )
            self._refuse_attempt(f"{key} is {here} on rank {rank}, {there} on rank {first}", where)
        if self.value(sections["rank"]) != rank or self.value(sections["attempt"]) != self.attempt:
            listed = f"rank {sections['rank'].decode()}, attempt {sections['attempt'].decode()}"
            self._refuse_attempt(
                f"the part of rank {rank} says {listed}, not {self.attempt}", where
            )

    def _refuse_attempt(self, what: str, where: Mapping[str, Any]) -> NoReturn:
        remedy = "this is a fault of smckpt: please report it"
        raise StateError(f"the parts belong to different saves: {what}", remedy=remedy, **where)


def _read(storage: Storage, rank: int, listed: Mapping[str, str]) -> _Read | str:
    """Read the part of a rank, or return the name of the file that is missing here."""
    name = listed["part"]
    path = storage.path_of(name)
    where: dict[str, Any] = {"path": path, "rank": rank, "host": listed["host"]}

    def read() -> bytes:
        data = storage.read(name, most=MAX_JSON_BYTES)
        if hex64(crc64(data)) != listed["crc64"]:
            raise CorruptCheckpointError(
                "the part record reads back with other bytes than were written",
                remedy="check the file system of that host; the save was not committed",
                **where,
            )
        return data

    try:
        data = sound(storage, read)
        sections = open_sections(data, path)
        paths = sections.get("value_paths", b"null")  # a repair commits older parts too
        sections = {key: sections[key] for key in _NEEDED}  # not the objects, which may be large
        sections["value_paths"] = paths
        files = decode(tuple[FileRecord, ...], json.loads(sections["files"]), newer=True)
        for file in files:
            for name, size in file.sizes.items():
                there = storage.size(name)
                if there != size:
                    raise StorageError(
                        f"{name} has {there} bytes, but {size} were written",
                        remedy="check the file system; the save was not committed",
                        **{**where, "path": storage.path_of(name)},
                    )
        short = len(sections["layout"]) < _REFERENCE
        table = json.loads(sections["layout"]) if short else {}
        table_of = (int(table["rank"]), str(table["digest"])) if "digest" in table else None
    except CheckpointNotFoundError:
        return name
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"the part record cannot be decoded: {type(error).__name__} {error}",
            remedy="this is a fault of smckpt: please report it",
            **where,
        ) from error
    return _Read(sections, files, table_of)


def _not_shared(
    storage: Storage, unseen: Mapping[int, str], parts: Mapping[str, Mapping[str, str]]
) -> NoReturn:
    blind = sorted({parts[str(rank)]["host"] for rank in unseen})
    seen = sorted({listed["host"] for rank, listed in parts.items() if int(rank) not in unseen})
    here = socket.gethostname()
    name = next(iter(unseen.values()))
    if blind == [here]:
        what = f"{name}, which rank {next(iter(unseen))} wrote on this host, is missing"
        remedy = (
            "find out whether another job saves to this directory, which took this save for one of "
            "a dead job, or what else deletes files here; the save was not committed"
        )
    else:
        what = (
            "the directory is not shared by the hosts of the group: the files of "
            f"{few(blind, _NAMED)} (ranks {few(sorted(unseen), _NAMED)}) are not seen on {here}"
        )
        what += f"; those of {few(seen, _NAMED)} are" if seen else ""
        remedy = "mount one file system on all hosts, or use an s3:// checkpoint_id"
    raise StorageError(what, remedy=remedy, path=file_url(storage.url, name))


# -- replicas ----------------------------------------------------------------------------------


def _check_classes(url: str, group: _Group) -> None:
    """Ranks that share the writing of tensors must agree on the tensors; otherwise some elements
    would be written by nobody."""
    digests: dict[str, dict[int, str]] = {}
    for rank, classes in group.classes.items():
        for writers, digest in classes.items():
            digests.setdefault(writers, {})[rank] = digest
    for writers, by_rank in digests.items():
        members = [int(rank) for rank in writers.split(",")]
        first = by_rank[min(by_rank)]
        odd = [rank for rank in members if by_rank.get(rank) != first]
        if not odd:
            continue
        like = min(by_rank)
        differ = _differing(group.layouts.get(like), group.layouts.get(odd[0]))
        raise StateError(
            f"ranks {few(members, _NAMED)} share the writing of their common tensors, but rank "
            f"{odd[0]} holds other tensors than rank {like}: {differ}",
            remedy="give all replicas the same state: initialise optimizer state on all of them "
            "(init_optim_state), and save values that differ between ranks as plain tensors",
            path=url,
            rank=odd[0],
        )


def _check_shards(url: str, layout: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Each rank of a mesh must have its shard of what another rank of it has; otherwise no load
    could fill the tensor. A rank without elements of it may lack it."""
    rows = [row for row in layout["rows"] if "ranks" in row]  # those that some ranks lack
    lacking: dict[tuple[int, int], list[int]] = {}  # rows share both tuples
    entries = decode_rows({**layout, "rows": rows}, sorted(ranks), url) if rows else []
    for entry in entries:
        rule = entry.geometry
        if rule.per_rank or rule.explicit:
            continue
        key = id(rule.ranks), id(entry.ranks)
        if key not in lacking:
            lacking[key] = sorted({*rule.ranks}.intersection(ranks).difference(entry.ranks))
        if odd := [rank for rank in lacking[key] if rule.pieces(rank)]:
            others = [e for e in entries if e.path == entry.path and odd[0] in e.ranks]
            what = f"{others[0].dtype} with the rule {others[0].geometry}" if others else "nothing"
            raise StateError(
                f"{entry.key} is divided over ranks {few(rule.ranks, _NAMED)}; rank "
                f"{entry.ranks[0]} has its part as {entry.dtype} with the rule {rule}, but rank "
                f"{odd[0]} has {what} under this name: no load could fill it",
                remedy="give all ranks of the mesh the same state (for an optimizer: "
                "init_optim_state), and save values that differ between ranks as plain tensors",
                path=url,
                rank=odd[0],
            )


def _differing(ours: bytes | None, theirs: bytes | None) -> str:
    """The first keys in which two tables differ."""
    if ours is None or theirs is None:
        return "one of the two wrote nothing"
    a, b = (
        {
            json.dumps([row["path"], row["dtype"], row["geometry"]])
            for row in json.loads(text)["rows"]
        }
        for text in (ours, theirs)
    )
    keys = sorted({".".join(map(str, json.loads(row)[0])) for row in a ^ b})
    return few(keys, _NAMED) if keys else "the same names and shapes, placed differently"
