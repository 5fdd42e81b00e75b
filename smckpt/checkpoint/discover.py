"""Finding checkpoints below a directory."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.choose import Commit, choose_commit, commits_at
from smckpt.checkpoint.spread import is_prefix
from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import relative_url

__all__ = ["Found", "find_checkpoints", "latest"]

log = logging.getLogger("smckpt")

# What the store answers for as long as nobody changes the place: not ours, or of no use to us.
_FOREIGN = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
DEPTH = 3  # levels of directories below the root that are looked at


@dataclass(frozen=True)
class Found:
    """A committed checkpoint, usable as a path.

    Args:
        path: where it is opened.
        step: as the save was told, or None.
        epoch, number: which session made it, and its how-manieth save it was.
        committed_at: nanoseconds since 1970.
        kind: "LOCAL", "SHARDED", "FULL" or None.
        nbytes: of all data files.
        groups: the groups' directories, relative to `path`.
        identity: the name of the file that commits it.
    """

    path: str
    step: int | None
    epoch: int
    number: int
    committed_at: int
    kind: str | None
    nbytes: int
    groups: tuple[str, ...]
    identity: str

    def __fspath__(self) -> str:
        return self.path

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Found:
        return cls(**{**data, "groups": tuple(data["groups"])})


def find_checkpoints(root: str, depth: int = DEPTH, *, sure: bool = False) -> list[Found]:
    """All committed checkpoints at and below `root`, oldest first; one for each place: the newest
    there. Oldest by step where all have one, else by when they were committed.

    Unfinished, half-written and foreign directories are passed over; so is one that cannot be read,
    with a warning in the log. A group's directory is found as a part of its step, or by itself
    where it is the root.

    Args:
        sure: a directory that the store fails to read just now is not passed over.

    Raises:
        StorageError: the root itself cannot be read; or `sure`, and one below.
    """
    top = open_storage(root)
    top.list_dirs()  # a root that cannot be read is no empty root
    found = []
    for storage in _directories(top, depth, sure):
        try:
            commit = choose_commit(storage) if commits_at(storage) else None
        except CheckpointNotFoundError:
            continue  # manifests of steps that were not finished
        except CheckpointError as error:
            _pass_over(error, sure)
            continue
        if commit is not None and (storage is top or not _of_a_step(commit)):
            found.append(_found(storage, commit))
    return sorted(found, key=_order(found))


def latest(root: str, depth: int = DEPTH) -> Found | None:
    """The newest of `find_checkpoints`, or None.

    Raises:
        StorageError: the store fails to read a directory just now. It may hold the newest: a job
            that went on without would begin at an older step, or anew.
    """
    found = find_checkpoints(root, depth, sure=True)
    return found[-1] if found else None


def _pass_over(error: CheckpointError, sure: bool) -> None:
    """Log why a directory is not looked into; where it may be ours and only the moment is bad,
    raise that."""
    its = error.__cause__
    foreign = isinstance(its, OSError) and its.errno in _FOREIGN
    if sure and isinstance(error, StorageError) and not foreign:
        raise error
    log.warning("passed over: %s", error)


def _order(found: list[Found]) -> Any:
    if all(f.step is not None for f in found):
        return lambda f: (f.step, f.committed_at, f.epoch, f.number)
    return lambda f: (f.committed_at, f.epoch, f.number)


def _of_a_step(commit: Commit) -> bool:
    """Whether it is one group of a step, whose record stands elsewhere."""
    return not commit.through_record and commit.manifests[0][1].record is not None


def _found(storage: Storage, commit: Commit) -> Found:
    first = commit.manifests[0][1]
    return Found(
        path=storage.url,
        step=first.step,
        epoch=commit.order[0],
        number=commit.order[1],
        committed_at=commit.committed_at,
        kind=first.kind,
        nbytes=sum(f.size for _, m in commit.manifests for p in m.parts for f in p.files),
        groups=tuple(relative_url(url, storage.url) for url, _ in commit.manifests),
        identity=commit.identity,
    )


def _directories(root: Storage, depth: int, sure: bool) -> Iterator[Storage]:
    yield root
    if depth == 0:
        return
    try:
        names = root.list_dirs()
    except CheckpointError as error:
        _pass_over(error, sure)
        return
    for name in names:
        if is_prefix(name):  # the ranks' files of what lies beside it
            continue
        yield from _directories(root.join(name), depth - 1, sure)
