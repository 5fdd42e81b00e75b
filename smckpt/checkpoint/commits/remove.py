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
from smckpt.checkpoint.records.prefixes import (
    PrefixSharding,
    PrefixStores,
    delete_at,
    found_prefix_sharding,
)
from smckpt.decoding import Count
from smckpt.errors import CheckpointError
from smckpt.storage import Storage

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
    prefix_sharding: PrefixSharding | None

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
        store = contents.storage.join(group.directory)
        store.refuse_links()
        manifest = group.manifest
        parts = []
        for part in manifest.parts:
            names = [part.name, *(f.name for f in part.files), *(f.crc_name for f in part.files)]
            parts.append((part.rank, tuple(names)))
        first = manifest.parts[0].name
        sharding = found_prefix_sharding(store, manifest.prefix_sharding, first)
        for sharded in PrefixStores(store, sharding).all():
            sharded.refuse_links()
        groups.append(
            RemovalGroup(
                group.directory,
                group.manifest_name,
                manifest.fencing_token,
                manifest.session,
                tuple(parts),
                sharding,
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
    directories = [top.join(group.directory) for group in removal.groups]
    sharded = [
        PrefixStores(store, group.prefix_sharding)
        for store, group in zip(directories, removal.groups, strict=True)
    ]
    for stores in sharded:  # all places, before anything is deleted
        for store in stores.all():
            store.refuse_links()
    if removal.record is not None:
        top.delete(removal.record)
        top.sync()
    pairs = list(zip(directories, sharded, removal.groups, strict=True))
    delete_at((store, (group.manifest,)) for store, _, group in pairs)
    for store in directories:  # a power failure could bring a manifest back without its files
        store.sync()
    ranks = [(at.of(rank), names) for _, at, group in pairs for rank, names in group.parts]
    delete_at((store, names[:1]) for store, names in ranks)
    delete_at((store, names[1:]) for store, names in ranks)
    left = {store.url: store.names() for store in _directories(top, directories, sharded, seen)}
    if seen is not None:
        gone = {name for store, names in ranks if store.url == top.url for name in names}
        gone |= {group.manifest for group in removal.groups if not group.directory}
        left[top.url] = sorted({*seen} - gone - {removal.record})
    _tidy(top, removal, directories, sharded, left)


def _directories(
    top: Storage,
    directories: Sequence[Storage],
    sharded: Sequence[PrefixStores],
    seen: Collection[str] | None,
) -> list[Storage]:
    """All directories that may hold files of the checkpoint, without `top` if that was seen."""
    every = (*directories, *(store for stores in sharded for store in stores.all()), top)
    found = {store.url: store for store in every}
    return [store for url, store in found.items() if seen is None or url != top.url]


def _tidy(
    top: Storage,
    removal: Removal,
    directories: Sequence[Storage],
    sharded: Sequence[PrefixStores],
    left: Mapping[str, Collection[str]],
) -> None:
    """Remove the lease under which the checkpoint was made, and directories that are empty now.

    Leases tell later runs from earlier ones. So earlier leases are deleted only if no file of a
    save is left, and later ones stay.

    Args:
        left: the names that are left in each directory, by URL.
    """
    urls = {store.url for store in directories}
    names = {n for stores in sharded for store in stores.all() for n in left[store.url]}
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
    for stores in sharded:
        for store in stores.all()[1:]:
            store.remove_directory()
    for group in removal.groups:
        subpath = group.directory.split("/") if group.directory else []
        for depth in range(len(subpath), 0, -1):
            top.join("/".join(subpath[:depth])).remove_directory()
    top.remove_directory()
