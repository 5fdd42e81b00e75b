"""Removes a committed checkpoint: the files that its record and manifests name, and no others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from smckpt.checkpoint.commits.contents import Contents
from smckpt.checkpoint.commits.leases import leases_at
from smckpt.checkpoint.records.format import ATTEMPTS, Rank, name_of, parse_name, parse_temporary
from smckpt.checkpoint.records.prefixes import spread_over
from smckpt.decoding import Count
from smckpt.errors import CheckpointError
from smckpt.storage import Storage
from smckpt.storage.budget import Spread

__all__ = [
    "Removal",
    "RemovalGroup",
    "RemoveReport",
    "carry_out",
    "removal_of",
    "remove_probes",
]

_WRITTEN = ("record", "manifest", "part", "data", "crc")

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class RemoveReport:
    """What was removed. nbytes: 0 where a removal that was cut short had begun it. left: the older
    commit that is the newest there now, if there is one."""

    path: str
    identity: str
    files: int
    nbytes: int
    left: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RemovalGroup:
    """The files of a group. directory: relative to the checkpoint's. parts: (rank, names of its
    part, data and checksums, in the order of deletion)."""

    directory: str
    manifest: str
    fencing_token: Count
    session: str
    parts: tuple[tuple[Rank, Annotated[tuple[str, ...], Meta(min_length=1)]], ...]
    prefix_sharding: Spread | None  # the word of the mark

    def __post_init__(self) -> None:
        name_of(self.manifest, "manifest")
        for _, names in self.parts:
            for name in names:
                name_of(name, "part", "data", "crc")


@dataclass(frozen=True)
class Removal:
    """All files of a checkpoint to delete. It is enough to finish a deletion after the manifests
    are gone."""

    record: str | None
    groups: Annotated[tuple[RemovalGroup, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.record is not None:
            name_of(self.record, "record")

    @property
    def identity(self) -> str:
        return self.record or self.groups[0].manifest

    @property
    def files(self) -> int:
        named = sum(1 + sum(len(names) for _, names in group.parts) for group in self.groups)
        return named + (self.record is not None)


def removal_of(contents: Contents) -> Removal:
    """The files that a removal of this checkpoint deletes.

    Raises:
        UsageError: a group's directory is a link, which would lead to somebody else's files.
    """
    groups = []
    for group in contents.groups:
        manifest = group.manifest
        group.storage.refuse_links()
        parts = []
        for part in manifest.parts:
            names = [part.name, *(f.name for f in part.files), *(f.crc_name for f in part.files)]
            parts.append((part.rank, tuple(names)))
        groups.append(
            RemovalGroup(
                group.directory,
                group.manifest_name,
                manifest.fencing_token,
                manifest.session,
                tuple(parts),
                group.storage.spread,
            )
        )
    return Removal(contents.record, tuple(groups))


def remove_probes(root: Storage, steps: Iterable[str]) -> None:
    """Remove the directories in which a save was killed before it had written anything. A directory
    that holds another file stays as it is.

    Args:
        steps: directories below `root`, where nobody saves any more.
    """
    for subpath in steps:
        try:
            _remove_probes(root.join(subpath))
        except CheckpointError as error:
            log.warning("what a killed save has left in %s stays: %s", subpath, error)


def _remove_probes(step: Storage) -> None:
    groups = [step.join(name) for name in step.list_dirs()]
    if any(store.list_dirs() for store in groups):
        return
    tried = [(store, store.names()) for store in (*groups, step)]
    parsed = [parse_name(name) or parse_temporary(name) for _, names in tried for name in names]
    if not parsed or any(one is None or one.kind != "probe" for one in parsed):
        return
    for store, _ in tried:
        store.refuse_links()
    for store, names in tried:
        store.delete_many(names)
        store.remove_directory()


def carry_out(top: Storage, removal: Removal, seen: Collection[str] | None = None) -> None:
    """Delete the files in the directory `top` and below. After a call that was cut short, call it
    again.

    Args:
        seen: the names that `top` had just now, if the caller has listed it. So each directory is
            listed once.

    Raises:
        UsageError: a directory is a link, which would lead to somebody else's files.
        StorageError: the store refused.
    """
    groups = [
        (spread_over(top.join(group.directory), [group.prefix_sharding]), group)
        for group in removal.groups
    ]
    for store, _ in groups:  # all places, before anything is deleted
        store.refuse_links()
    if removal.record is not None:
        top.delete(removal.record)
        top.sync()
    for store, group in groups:
        store.delete(group.manifest)
    for store, _ in groups:  # a power failure could bring a manifest back without its files
        store.sync()
    for store, group in groups:
        store.delete_many([names[0] for _, names in group.parts])
    for store, group in groups:
        store.delete_many([name for _, names in group.parts for name in names[1:]])
    directories = [store for store, _ in groups]
    left: dict[str, Collection[str]] = {}
    for store in {one.url: one for one in (top, *directories)}.values():
        if seen is None or store.url != top.url or store.spread is not None:
            # with files of saves that did not spread theirs
            left[store.url] = spread_over(store, [store.spread, None]).names()
        else:
            inside = [group for group in removal.groups if not group.directory]
            gone = {name for group in inside for _, names in group.parts for name in names}
            gone |= {removal.record or "", *(group.manifest for group in inside)}
            left[store.url] = sorted({*seen} - gone)
    _tidy(top, removal, directories, left)


def _tidy(
    top: Storage,
    removal: Removal,
    directories: Sequence[Storage],
    left: Mapping[str, Collection[str]],
) -> None:
    """Remove the lease under which the checkpoint was made, and directories that are empty now.

    Leases tell later runs from earlier ones. So earlier leases are deleted only if no file of a
    save is left, and later ones stay.

    Args:
        left: the names that are left in each directory, by URL.
    """
    urls = {store.url for store in directories}
    names = {name for store in directories for name in left[store.url]}
    written = [p for p in map(parse_name, names) if p is not None and p.kind in _WRITTEN]
    fencing_token = max(group.fencing_token for group in removal.groups)
    ours = not any(p.fencing_token == fencing_token for p in written)
    sessions = {group.session for group in removal.groups}
    for store in {store.url: store for store in (*directories, top)}.values():
        try:
            leases = leases_at(store, left[store.url])
        except CheckpointError as error:
            log.warning("leases stay: %s", error)
            return
        for name in left[store.url]:
            probe = parse_name(name)
            if probe is not None and probe.kind == "probe" and probe.session in sessions:
                store.delete(name)
        for lease in leases:
            over = (
                ours
                if lease.fencing_token == fencing_token
                else lease.fencing_token < fencing_token and not written
            )
            if over and lease.scope <= urls:
                store.delete(lease.name)
        for name in left[store.url]:  # what a creation could not remove, as the disk failed
            tmp = parse_temporary(name)
            if tmp is not None and (tmp.session in sessions or tmp.fencing_token == fencing_token):
                store.delete(name)
    if ATTEMPTS in left[top.url]:
        top.delete(ATTEMPTS)
    for store in directories:
        store.remove_directory()
    for group in removal.groups:
        subpath = group.directory.split("/")
        for depth in range(len(subpath) - 1, 0, -1):
            top.join("/".join(subpath[:depth])).remove_directory()
    top.remove_directory()
