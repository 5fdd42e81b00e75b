"""Prefix sharding: ranks' files are under several stable prefixes if one prefix does not answer
enough requests a second.

S3 splits a bucket by the beginnings of busy keys, over tens of minutes. So the prefix must come
before every part of the path that changes from save to save, and must be the same each time.

For a checkpoint in `<root>/<rest>/`, rank r's files are in `<root>/<prefix of r modulo n>/<rest>/`.
Manifests and records stay in the directory itself, where readers look. The paths follow from two
numbers, so a manifest cannot point anywhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.storage import Storage
from smckpt.storage.urls import join_url, normal_url, parent_url, relative_url

__all__ = [
    "PrefixSharding",
    "PrefixStores",
    "delete_at",
    "found_prefix_sharding",
    "is_prefix",
    "prefix_sharding_for",
]

MAX_PREFIXES = 256
MAX_UP = 256  # levels; no path has more
_PREFIX = re.compile(r"[0-9a-f]{2}-smckpt")


@dataclass(frozen=True)
class PrefixSharding:
    """prefixes: how many. up: how many levels above a checkpoint's directory they are."""

    up: Annotated[int, Meta(ge=0, le=MAX_UP)]
    prefixes: Annotated[int, Meta(ge=2, le=MAX_PREFIXES)]

    def directories(self, directory: str) -> list[str]:
        """The directories of ranks 0, 1, … n - 1 for a checkpoint in `directory`."""
        root = self.root(directory)
        rest = relative_url(directory, root)
        return [join_url(join_url(root, _prefix(turn)), rest) for turn in range(self.prefixes)]

    def root(self, directory: str) -> str:
        """The location below which all files of a checkpoint in `directory` are."""
        root = normal_url(directory)
        for _ in range(self.up):
            root = parent_url(root)
        return root

    def directory_of(self, directory: str, rank: int) -> str:
        """The directory of a rank's files."""
        return self.directories(directory)[rank % self.prefixes]

    def fullest(self, ranks: Iterable[int]) -> int:
        """The largest number of `ranks` that have their files in one directory."""
        return max(Counter(rank % self.prefixes for rank in ranks).values(), default=1)


def _prefix(turn: int) -> str:
    """For any n, the first n names are spread evenly over all names: 00, 80, 40, c0, 20, …"""
    return f"{int(f'{turn:08b}'[::-1], 2):02x}-smckpt"


def is_prefix(name: str) -> bool:
    """Whether a directory of this name holds ranks' files and no commit of its own."""
    return _PREFIX.fullmatch(name) is not None


def prefix_sharding_for(storage: Storage, groups: int = 1) -> PrefixSharding | None:
    """The prefix sharding of a save that the options of the directory's store ask for; None if they
    ask for none.

    Args:
        groups: how many groups make the step. A single group saves to the step's directory. Several
            groups save to directories in it.

    Raises:
        UsageError: the directory is not below `prefix_root`.
    """
    if storage.prefixes == 1:
        return None
    if storage.prefix_root is None:
        wanted, at = (1 if groups == 1 else 2), storage.url
        up = next((u for u in range(wanted) if _is_bucket(at, u)), wanted)
        return PrefixSharding(up, storage.prefixes)
    root, at, up = normal_url(storage.prefix_root), storage.url, 0
    while at != root and not _is_bucket(at, 0):
        at, up = parent_url(at), up + 1
    if at != root:
        raise UsageError(
            f"the checkpoint is not below prefix_root={storage.prefix_root!r}",
            remedy="pass the location that contains all of the run's checkpoints",
            path=storage.url,
        )
    return PrefixSharding(up, storage.prefixes)


def _is_bucket(url: str, up: int) -> bool:
    """Whether the location `up` levels above `url` is a whole bucket."""
    return normal_url(url).partition("://")[2].count("/") - 1 <= up


class PrefixStores:
    """The stores of a group's rank files. Without prefix sharding, each is the directory's own
    store."""

    def __init__(self, storage: Storage, prefix_sharding: PrefixSharding | None) -> None:
        self.directory = storage
        self._stores: list[Storage] = []
        if prefix_sharding is not None:
            root = storage.at(prefix_sharding.root(storage.url))
            urls = prefix_sharding.directories(storage.url)
            self._stores = [root.join(relative_url(url, root.url)) for url in urls]

    def of(self, rank: int) -> Storage:
        return self._stores[rank % len(self._stores)] if self._stores else self.directory

    def all(self) -> list[Storage]:
        """The directory's store, then the others."""
        return [self.directory, *self._stores]

    def close(self) -> None:
        for storage in self.all():
            storage.close()


def found_prefix_sharding(
    storage: Storage, prefix_sharding: PrefixSharding | None, part: str
) -> PrefixSharding | None:
    """The prefix sharding of a committed checkpoint in its present place. A copy on a file system
    has all files in its directory. A file system that shows a bucket's keys has them under the
    prefixes.

    Args:
        part: the name of one of the checkpoint's part records.
    """
    if prefix_sharding is None or storage.shards_prefixes:
        return prefix_sharding
    try:
        storage.size(part)
    except CheckpointNotFoundError:
        return prefix_sharding
    return None


def delete_at(doomed: Iterable[tuple[Storage, Sequence[str]]]) -> None:
    """Delete files in any order, those of one store together."""
    at: dict[str, tuple[Storage, list[str]]] = {}
    for store, names in doomed:
        at.setdefault(store.url, (store, []))[1].extend(names)
    for store, together in at.values():
        store.delete_many(together)
