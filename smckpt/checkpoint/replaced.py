"""Telling a checkpoint that a newer save swept while it was read from one that is damaged."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager

from smckpt.checkpoint.choose import choose_commit
from smckpt.checkpoint.format import parse_name
from smckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointReplacedError
from smckpt.storage import open_storage

__all__ = ["noticing_replacement", "replacement"]


@contextmanager
def noticing_replacement(url: str, identity: str, doing: str = "load") -> Iterator[None]:
    """What is missing of the commit `identity` at `url` may be missing because a newer save has
    committed there and swept it.

    Args:
        doing: what is to be done again then.

    Raises:
        CheckpointReplacedError: instead of the error in the block, where that is so.
    """
    try:
        yield
    except CheckpointError as error:
        replaced = replacement(url, identity, doing) if _lacks_file(error) else None
        if replaced is None:
            raise
        raise replaced from error


def replacement(url: str, identity: str, doing: str) -> CheckpointReplacedError | None:
    """The error to raise where a newer save has committed at `url` than `identity`."""
    newer = _newer(url, identity)
    if newer is None:
        return None
    return CheckpointReplacedError(
        f"the checkpoint was replaced by a newer save while it was read: {newer} has committed "
        f"and the files of {identity} are swept",
        remedy=f"{doing} again; where saves land here faster than that takes, give each step a "
        "checkpoint_id of its own, or save with SaveOptions(sweep=False)",
        path=url,
    )


def _lacks_file(error: BaseException | None) -> bool:
    looked_at: list[BaseException] = []
    while error is not None and error not in looked_at:  # an error may be raised from itself
        looked_at.append(error)
        if isinstance(error, CheckpointNotFoundError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ESTALE:  # deleted by another host
            return True
        error = error.__cause__
    return False


def _newer(url: str, identity: str) -> str | None:
    """The newest commit here, if it is newer than `identity`."""
    try:
        with closing(open_storage(url)) as storage:
            newest = choose_commit(storage).identity
    except CheckpointError:
        return None
    return newest if _order(newest) > _order(identity) else None


def _order(identity: str) -> tuple[int, int]:
    parsed = parse_name(identity)
    return (0, 0) if parsed is None else (parsed.epoch, parsed.number)
