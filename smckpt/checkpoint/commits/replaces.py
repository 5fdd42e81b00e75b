"""A checkpoint of torch's own DCP in the directory of one of ours: which of the two is newer?

DCP writes `.metadata` last, under one name for every save. A commit of ours records the checksum of
the `.metadata` that it found, and deletes that checkpoint once it has committed. So where both are
in a directory, ours is the newer one if its commit names this `.metadata`: the process ended before
it could delete. Otherwise DCP saved after our commit, or somebody has mixed two directories. Times
do not tell those apart, because a copy changes them. Then nothing is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.errors import CheckpointError, CheckpointNotFoundError, UsageError
from smckpt.storage import Storage

__all__ = ["checksum_of_dcp", "delete_dcp", "holds_dcp", "refuse_newer_dcp"]

log = logging.getLogger("smckpt")

_METADATA, _OF_RANK_0 = ".metadata", "__0.metadata"  # the latter where each rank plans for itself
_OF_RANKS = re.compile(r"__\d+\.metadata")
_DATA = re.compile(r"__\d+_\d+\.distcp")


def holds_dcp(names: Iterable[str]) -> bool:
    """Whether one of the names of a directory says that DCP wrote a checkpoint there."""
    return any(name in (_METADATA, _OF_RANK_0) for name in names)


def checksum_of_dcp(storage: Storage) -> str | None:
    """Of the metadata of DCP's checkpoint here, which is another one for each save; None: there is
    none."""
    storage = storage.with_links()  # files of others
    found = [n for n in storage.names(_METADATA, _OF_RANK_0) if n in (_METADATA, _OF_RANK_0)]
    try:
        return hex64(crc64(b"".join(storage.read(name) for name in found))) if found else None
    except CheckpointNotFoundError:  # deleted since
        return None


def refuse_newer_dcp(storage: Storage, replaced: str | None) -> None:
    """Check that the newest commit here is newer than DCP's checkpoint here, if there is one.

    Args:
        replaced: what the commit records.

    Raises:
        UsageError: nothing tells which is newer.
    """
    there = checksum_of_dcp(storage)
    if there is None or there == replaced:
        return
    raise UsageError(
        "two checkpoints are in this directory, one of smckpt and one of "
        "torch.distributed.checkpoint, which was written or copied here later: nothing is read, "
        "because one of them is old",
        remedy=f"to read smckpt's, delete {_METADATA} and the files *.distcp; to read torch's, "
        "move its files to a directory of their own, or run `smckpt rm` on this one; then let one "
        "of the two save here",
        path=storage.url,
    )


def delete_dcp(storage: Storage, replaced: str | None) -> None:
    """Delete DCP's checkpoint, which a commit of ours has just replaced; its metadata first. Raises
    nothing, because the commit stands."""
    if replaced is None:
        return
    try:
        if checksum_of_dcp(storage) != replaced:
            return  # DCP has saved again
        names = storage.names("__")
        storage.delete(_METADATA)
        storage.delete_many([name for name in names if _OF_RANKS.fullmatch(name)])
        doomed = [name for name in names if _DATA.fullmatch(name)]
        storage.delete_many(doomed)
        log.warning(
            "this save replaces the checkpoint that torch.distributed.checkpoint wrote to %s: its "
            "%d files are deleted",
            storage.url,
            len(doomed) + 1,
        )
    except CheckpointError as error:
        log.warning("a replaced checkpoint of torch.distributed.checkpoint is left: %s", error)
