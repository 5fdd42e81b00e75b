"""Finding checkpoints below a directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.choose import Commit, choose_commit, commits_at
from smckpt.errors import CheckpointError, CheckpointNotFoundError
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import relative_url

__all__ = ["Found", "find_checkpoints", "latest"]

log = logging.getLogger("smckpt")

DEPTH = 3  # levels of directories below the root that are looked at


@dataclass(frozen=True)
class Found:
    """A committed checkpoint. `groups`: the groups' directories, relative to `path`; committed_at:
    nanoseconds since 1970."""

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


def find_checkpoints(root: str, depth: int = DEPTH) -> list[Found]:
    """All committed checkpoints at and below `root`, oldest first; one for each place: the newest
    there. Unfinished, half-written and foreign directories are passed over; one that cannot be
    read is logged."""
    found: dict[str, Found] = {}
    members: set[tuple[str, str]] = set()
    for storage in _directories(open_storage(root), depth):
        try:
            if not commits_at(storage):
                continue
            commit = choose_commit(storage)
        except CheckpointNotFoundError:
            continue
        except CheckpointError as error:
            log.warning("passed over: %s", error)
            continue
        if commit.identity.startswith("record-") and _is_member(storage, commit):
            members.add((storage.url, commit.identity))
            continue
        found[storage.url] = _found(storage, commit)
    return sorted(found.values(), key=_order(found.values()))


def latest(root: str, depth: int = DEPTH) -> Found | None:
    """The newest of `find_checkpoints`, or None."""
    found = find_checkpoints(root, depth)
    return found[-1] if found else None


def _order(found: Any) -> Any:
    if all(f.step is not None for f in found):
        return lambda f: (f.step, f.committed_at, f.epoch, f.number)
    return lambda f: (f.committed_at, f.epoch, f.number)


def _is_member(storage: Storage, commit: Commit) -> bool:
    """Whether the commit is made by a record that stands elsewhere."""
    [*rest] = commit.manifests
    return len(rest) == 1 and rest[0][0] == storage.url and rest[0][1].record is not None


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


def _directories(root: Storage, depth: int) -> Iterator[Storage]:
    yield root
    if depth == 0:
        return
    try:
        names = root.list_dirs()
    except CheckpointError as error:
        log.warning("passed over: %s", error)
        return
    for name in names:
        yield from _directories(root.join(name), depth - 1)
