"""Removing a committed checkpoint: what its record and manifests name, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.choose import choose_commit
from smckpt.checkpoint.claims import claims_at
from smckpt.checkpoint.contents import Contents
from smckpt.checkpoint.format import parse_name
from smckpt.checkpoint.spread import Homes, found_spread
from smckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from smckpt.storage import Storage, open_storage
from smckpt.storage.pool import pool_here

__all__ = ["RemoveReport", "remove_checkpoint"]

_DELETERS = 16
_WRITTEN = ("record", "manifest", "part", "data", "crc")

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class RemoveReport:
    """What was removed. left: the commit that counts there now, an older one that was kept."""

    path: str
    identity: str
    files: int
    nbytes: int
    left: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def remove_checkpoint(contents: Contents) -> RemoveReport:
    """Delete the files of a checkpoint: first what commits it, so that a removal which is cut short
    leaves no half checkpoint, but files that nothing takes for one.

    Files that are already gone are fine. Where nothing of ours is left, its claims of epochs go
    last, and directories that are empty then, the checkpoint's own included.

    Raises:
        StorageError: the store refused; what is left can be loaded only if nothing was deleted.
    """
    top = open_storage(contents.url)
    places = [top.join(group.directory) for group in contents.groups]
    homes = [
        Homes(place, found_spread(place, group.manifest.spread, group.manifest.parts[0].name))
        for place, group in zip(places, contents.groups, strict=True)
    ]
    parts = [
        (home.of(part.rank), part)
        for home, group in zip(homes, contents.groups, strict=True)
        for part in group.manifest.parts
    ]
    if contents.record is not None:
        top.delete(contents.record)
    with pool_here(_DELETERS, "smckpt-remove") as pool:

        def all_of(deletions: Iterable[tuple[Callable[[str], None], str]]) -> None:
            for done in pool.map(lambda each: each[0](each[1]), deletions):
                assert done is None

        pairs = zip(places, contents.groups, strict=True)
        all_of((place.delete, group.manifest_name) for place, group in pairs)
        all_of((home.delete, part.name) for home, part in parts)
        all_of((home.delete, file.name) for home, part in parts for file in part.files)
        all_of((home.delete, file.crc_name) for home, part in parts for file in part.files)
    _tidy(top, contents, places, homes)
    try:
        left = choose_commit(top).identity
    except (CheckpointNotFoundError, CorruptCheckpointError):  # or the rest of a swept one
        left = None
    return RemoveReport(contents.url, contents.identity, contents.files, contents.nbytes, left)


def _tidy(
    top: Storage, contents: Contents, places: Sequence[Storage], homes: Sequence[Homes]
) -> None:
    """Remove the claim under which the checkpoint was made, and directories that are empty now.

    Claims tell later runs from earlier ones: those before it go only where no save has left
    anything, and those after it stay.
    """
    urls = {place.url for place in places}
    names = {i.name for home in homes for place in home.all() for i in place.list()}
    written = [p for p in map(parse_name, names) if p is not None and p.kind in _WRITTEN]
    epoch = max(group.manifest.epoch for group in contents.groups)
    ours = not any(p.epoch == epoch for p in written)
    sessions = {group.manifest.session for group in contents.groups}
    for place in {place.url: place for place in (*places, top)}.values():
        try:
            claims = claims_at(place)
        except CheckpointError as error:
            log.warning("claims of epochs stay: %s", error)
            return
        for info in place.list("probe-"):
            if (probe := parse_name(info.name)) is not None and probe.session in sessions:
                place.delete(info.name)
        for claim in claims:
            over = ours if claim.epoch == epoch else claim.epoch < epoch and not written
            if over and claim.scope <= urls:
                place.delete(claim.name)
    for home in homes:
        for place in home.all()[1:]:
            place.remove_directory()
    for group in contents.groups:
        way = group.directory.split("/") if group.directory else []
        for depth in range(len(way), 0, -1):
            top.join("/".join(way[:depth])).remove_directory()
    top.remove_directory()
