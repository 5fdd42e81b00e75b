"""Removing a committed checkpoint: what its record and manifests name, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.choose import choose_commit
from smckpt.checkpoint.contents import Contents
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
    if contents.record is not None:
        top.delete(contents.record)
    with pool_here(_DELETERS, "smckpt-remove") as pool:

        def all_of(deletions: Iterable[tuple[Callable[[str], None], str]]) -> None:
            for done in pool.map(lambda each: each[0](each[1]), deletions):
                assert done is None

        pairs = [
            (place.delete, group) for place, group in zip(places, contents.groups, strict=True)
        ]
        all_of((delete, group.manifest_name) for delete, group in pairs)
        all_of((delete, part.name) for delete, group in pairs for part in group.manifest.parts)
        all_of((delete, file.name) for delete, group in pairs for file in group.data)
        all_of((delete, file.crc_name) for delete, group in pairs for file in group.data)
    try:
        left = choose_commit(top).identity
    except (CheckpointNotFoundError, CorruptCheckpointError):  # or the rest of a swept one
        left = None
    return RemoveReport(contents.url, contents.identity, contents.files, contents.nbytes, left)
