"""Removing a committed checkpoint: what its record and manifests name, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.choose import choose_commit
from smckpt.checkpoint.contents import Contents
from smckpt.checkpoint.spread import Homes, found_spread
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from smckpt.storage import open_storage
from smckpt.storage.pool import pool_here

__all__ = ["RemoveReport", "remove_checkpoint"]

_DELETERS = 16


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

    Files that are already gone are fine. Claims of epochs stay: they tell later runs from earlier.

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
    try:
        left = choose_commit(top).identity
    except (CheckpointNotFoundError, CorruptCheckpointError):  # or the rest of a swept one
        left = None
    return RemoveReport(contents.url, contents.identity, contents.files, contents.nbytes, left)
