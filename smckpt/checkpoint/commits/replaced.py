"""Distinguish a damaged checkpoint from one that a newer save swept while it was read."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager

from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.records.format import parse_name
from smckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointReplacedError
from smckpt.storage import Storage

__all__ = ["noticing_replacement", "replacement"]


@contextmanager
def noticing_replacement(storage: Storage, identity: str, doing: str = "load") -> Iterator[None]:
    """If a file of the commit `identity` is missing in the block, check whether a newer save has
    committed in its directory and swept it.

    Args:
        doing: what the error tells the user to repeat.

    Raises:
        CheckpointReplacedError: a newer save swept it; replaces the error of the block.
    """
    try:
        yield
    except CheckpointError as error:
        replaced = replacement(storage, identity, doing) if _lacks_file(error) else None
        if replaced is None:
            raise
        raise replaced from error


def replacement(storage: Storage, identity: str, doing: str) -> CheckpointReplacedError | None:
    """The error to raise if a newer save than `identity` has committed there; otherwise None."""
    newer = _newer(storage, identity)
    if newer is None:
        return None
    return CheckpointReplacedError(
        f"a newer save replaced the checkpoint while it was read: {newer} was committed, and the "
        f"files of {identity} were deleted",
        remedy=f"{doing} again; if saves here are faster than that, give each step a "
        "checkpoint_id of its own, or save with SaveOptions(sweep=False)",
        path=storage.url,
    )


def _lacks_file(error: BaseException | None) -> bool:
    looked_at: list[BaseException] = []
    while error is not None and error not in looked_at:  # an error may be its own cause
        looked_at.append(error)
        if isinstance(error, CheckpointNotFoundError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ESTALE:  # deleted by another host
            return True
        error = error.__cause__
    return False


def _newer(storage: Storage, identity: str) -> str | None:
    """The newest commit here, if it is newer than `identity`."""
    try:
        with closing(storage):
            newest = choose_commit(storage).identity
    except CheckpointError:
        return None
    return newest if _order(newest) > _order(identity) else None


def _order(identity: str) -> tuple[int, int]:
    parsed = parse_name(identity)
    return (0, 0) if parsed is None else (parsed.fencing_token, parsed.number)
