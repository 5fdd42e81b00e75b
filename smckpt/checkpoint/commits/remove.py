"""Removes a committed checkpoint: the files that its record and manifests name, and no others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.contents import Contents
from smckpt.checkpoint.commits.leases import leases_at
from smckpt.checkpoint.records.format import ATTEMPTS, parse_name, parse_temporary
from smckpt.checkpoint.records.prefixes import (
    PrefixSharding,
    PrefixStores,
    delete_at,
    found_prefix_sharding,
)
from smckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from smckpt.storage import Storage

__all__ = [
    "Doomed",
    "DoomedGroup",
    "RemoveReport",
    "carry_out",
    "doomed_of",
    "remove_checkpoint",
    "remove_probes",
]

_WRITTEN = ("record", "manifest", "part", "data", "crc")

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class RemoveReport:
    """What was removed. left: the older commit that is the newest there now, if there is one."""

    path: str
    identity: str
    files: int
    nbytes: int
    left: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DoomedGroup:
    """The files of a group. directory: relative to the checkpoint's. parts: (rank, names of its
    part, data and checksums, in the order of deletion)."""

    directory: str
    manifest: str
    fencing_token: int
    session: str
    parts: tuple[tuple[int, tuple[str, ...]], ...]
    prefix_sharding: PrefixSharding | None


@dataclass(frozen=True)
class Doomed:
    """All files of a checkpoint to delete. It is enough to finish a deletion after the manifests
    are gone."""

    record: str | None
    groups: tuple[DoomedGroup, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Doomed:
        """
        Raises:
            ValueError, TypeError, KeyError, AttributeError: it names something that is not a file
                of smckpt's.
        """
        groups = tuple(
            DoomedGroup(
                str(group["directory"]),
                _ours(group["manifest"], "manifest"),
                int(group["fencing_token"]),
                str(group["session"]),
                tuple(
                    (int(rank), tuple(_ours(name, "part", "data", "crc") for name in names))
                    for rank, names in group["parts"]
                ),
                PrefixSharding.from_json(group["prefix_sharding"]),
            )
            for group in data["groups"]
        )
        if not groups or not all(names for group in groups for _, names in group.parts):
            raise ValueError("it names no group, or a rank without files")
        record = data["record"]
        return cls(None if record is None else _ours(record, "record"), groups)


def _ours(name: Any, *kinds: str) -> str:
    parsed = parse_name(name) if isinstance(name, str) else None
    if parsed is None or parsed.kind not in kinds:
        raise ValueError(f"{name!r} is not the name of a {' or '.join(kinds)}")
    return str(name)


def doomed_of(contents: Contents) -> Doomed:
    """The files that a removal of this checkpoint deletes.

    Raises:
        UsageError: a group's directory is a link, which would lead to somebody else's files.
    """
    groups = []
    for group in contents.groups:
        place = contents.storage.join(group.directory)
        place.refuse_links()
        manifest = group.manifest
        parts = []
        for part in manifest.parts:
            names = [part.name, *(f.name for f in part.files), *(f.crc_name for f in part.files)]
            parts.append((part.rank, tuple(names)))
        first = manifest.parts[0].name
        groups.append(
            DoomedGroup(
                group.directory,
                group.manifest_name,
                manifest.fencing_token,
                manifest.session,
                tuple(parts),
                found_prefix_sharding(place, manifest.prefix_sharding, first),
            )
        )
    return Doomed(contents.record, tuple(groups))


def remove_checkpoint(contents: Contents) -> RemoveReport:
    """Delete the files of a checkpoint. The record and manifests are deleted first, so a removal
    that is cut short leaves no half checkpoint, only files that no reader takes for one.

    Files that are already gone are fine. If no file of a save is left, the leases are deleted last,
    and then empty directories, the checkpoint's own included.

    Raises:
        UsageError: a group's directory is a link, which would lead to somebody else's files.
        StorageError: the store refused; what is left can be loaded only if nothing was deleted.
    """
    top = contents.storage
    carry_out(top, doomed_of(contents))
    try:
        left = choose_commit(top).identity
    except (CheckpointNotFoundError, CorruptCheckpointError):  # or the rest of a swept commit
        left = None
    return RemoveReport(contents.url, contents.identity, contents.files, contents.nbytes, left)


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
    if any(place.list_dirs() for place in groups):
        return
    tried = [(place, place.names()) for place in (*groups, step)]
    parsed = [parse_name(name) or parse_temporary(name) for _, names in tried for name in names]
    if not parsed or any(one is None or one.kind != "probe" for one in parsed):
        return
    for place, _ in tried:
        place.refuse_links()
    for place, names in tried:
        place.delete_many(names)
        place.remove_directory()


def carry_out(top: Storage, doomed: Doomed, seen: Collection[str] | None = None) -> None:
    """Delete the files in the directory `top` and below. After a call that was cut short, call it
    again.

    Args:
        seen: the names that `top` had just now, if the caller has listed it. So each directory is
            listed once.

    Raises:
        As `remove_checkpoint`.
    """
    places = [top.join(group.directory) for group in doomed.groups]
    sharded = [
        PrefixStores(place, group.prefix_sharding)
        for place, group in zip(places, doomed.groups, strict=True)
    ]
    for stores in sharded:  # all places, before anything is deleted
        for place in stores.all():
            place.refuse_links()
    if doomed.record is not None:
        top.delete(doomed.record)
        top.sync()
    pairs = list(zip(places, sharded, doomed.groups, strict=True))
    delete_at((place, (group.manifest,)) for place, _, group in pairs)
    for place in places:  # a power failure could bring a manifest back without its files
        place.sync()
    ranks = [(at.of(rank), names) for _, at, group in pairs for rank, names in group.parts]
    delete_at((place, names[:1]) for place, names in ranks)
    delete_at((place, names[1:]) for place, names in ranks)
    left = {place.url: place.names() for place in _directories(top, places, sharded, seen)}
    if seen is not None:
        gone = {name for place, names in ranks if place.url == top.url for name in names}
        gone |= {group.manifest for group in doomed.groups if not group.directory}
        left[top.url] = sorted({*seen} - gone - {doomed.record})
    _tidy(top, doomed, places, sharded, left)


def _directories(
    top: Storage,
    places: Sequence[Storage],
    sharded: Sequence[PrefixStores],
    seen: Collection[str] | None,
) -> list[Storage]:
    """All directories that may hold files of the checkpoint, without `top` if that was seen."""
    every = (*places, *(place for stores in sharded for place in stores.all()), top)
    found = {place.url: place for place in every}
    return [place for url, place in found.items() if seen is None or url != top.url]


def _tidy(
    top: Storage,
    doomed: Doomed,
    places: Sequence[Storage],
    sharded: Sequence[PrefixStores],
    left: Mapping[str, Collection[str]],
) -> None:
    """Remove the lease under which the checkpoint was made, and directories that are empty now.

    Leases tell later runs from earlier ones. So earlier leases are deleted only if no file of a
    save is left, and later ones stay.

    Args:
        left: the names that are left in each directory, by URL.
    """
    urls = {place.url for place in places}
    names = {n for stores in sharded for place in stores.all() for n in left[place.url]}
    written = [p for p in map(parse_name, names) if p is not None and p.kind in _WRITTEN]
    fencing_token = max(group.fencing_token for group in doomed.groups)
    ours = not any(p.fencing_token == fencing_token for p in written)
    sessions = {group.session for group in doomed.groups}
    for place in {place.url: place for place in (*places, top)}.values():
        try:
            leases = leases_at(place, left[place.url])
        except CheckpointError as error:
            log.warning("leases stay: %s", error)
            return
        for name in left[place.url]:
            probe = parse_name(name)
            if probe is not None and probe.kind == "probe" and probe.session in sessions:
                place.delete(name)
        for lease in leases:
            over = (
                ours
                if lease.fencing_token == fencing_token
                else lease.fencing_token < fencing_token and not written
            )
            if over and lease.scope <= urls:
                place.delete(lease.name)
        for name in left[place.url]:  # what a creation could not remove, as the disk failed
            its = parse_temporary(name)
            if its is not None and (its.session in sessions or its.fencing_token == fencing_token):
                place.delete(name)
    if ATTEMPTS in left[top.url]:
        top.delete(ATTEMPTS)
    for stores in sharded:
        for place in stores.all()[1:]:
            place.remove_directory()
    for group in doomed.groups:
        subpath = group.directory.split("/") if group.directory else []
        for depth in range(len(subpath), 0, -1):
            top.join("/".join(subpath[:depth])).remove_directory()
    top.remove_directory()
