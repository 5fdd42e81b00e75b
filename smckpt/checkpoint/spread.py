"""Ranks' files under several stable prefixes, where one does not answer enough requests a second.

S3 splits a bucket by the beginnings of keys that are busy, over tens of minutes. So what spreads
the requests must come before whatever changes from save to save, and be the same each time. Of a
checkpoint in `<root>/<rest>/` rank r's files lie in `<root>/<prefix of r modulo n>/<rest>/`; what
coordinators publish stays in the directory itself, where readers look. Which way leads to them
follows from two numbers, so a manifest can point nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.storage import Storage, open_storage
from smckpt.storage.s3_config import S3Config
from smckpt.storage.urls import is_s3_url, join_url, normal_url, parent_url, relative_url

__all__ = ["Homes", "Spread", "found_spread", "is_prefix", "spread_for"]

MAX_PREFIXES = 256
_PREFIX = re.compile(r"[0-9a-f]{2}-smckpt")


@dataclass(frozen=True)
class Spread:
    """Over how many prefixes, and how many levels above a checkpoint's directory they lie."""

    up: int
    prefixes: int

    def __post_init__(self) -> None:
        if type(self.up) is not int or self.up < 0:
            raise ValueError(f"up is {self.up!r}, not a number from 0")
        if type(self.prefixes) is not int or not 2 <= self.prefixes <= MAX_PREFIXES:
            raise ValueError(f"prefixes is {self.prefixes!r}, not a number from 2 to 256")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Spread | None:
        return None if data is None else cls(data["up"], data["prefixes"])

    def homes(self, directory: str) -> list[str]:
        """Where the files of ranks 0, 1, … n - 1 of a checkpoint in `directory` lie."""
        root = normal_url(directory)
        for _ in range(self.up):
            root = parent_url(root)
        rest = relative_url(directory, root)
        return [join_url(join_url(root, _prefix(turn)), rest) for turn in range(self.prefixes)]

    def home(self, directory: str, rank: int) -> str:
        """Where the files of a rank lie."""
        return self.homes(directory)[rank % self.prefixes]

    def fullest(self, ranks: Iterable[int]) -> int:
        """How many of `ranks`, at most, have one home."""
        return max(Counter(rank % self.prefixes for rank in ranks).values(), default=1)


def _prefix(turn: int) -> str:
    """The names of the first n lie evenly among all, whatever n is: 00, 80, 40, c0, 20, …"""
    return f"{int(f'{turn:08b}'[::-1], 2):02x}-smckpt"


def is_prefix(name: str) -> bool:
    """Whether a directory of this name holds files of ranks, and no checkpoint of its own."""
    return _PREFIX.fullmatch(name) is not None


def spread_for(directory: str, config: S3Config | None, groups: int = 1) -> Spread | None:
    """How the options in force spread a save to `directory`; None where they do not.

    Args:
        groups: of the step. One group's directory is the step's; of several groups it lies in it.

    Raises:
        UsageError: the directory does not lie below `prefix_root`.
    """
    if config is None or config.prefixes == 1 or not is_s3_url(directory):
        return None
    if config.prefix_root is None:
        wanted, at = (1 if groups == 1 else 2), normal_url(directory)
        up = next((u for u in range(wanted) if _is_bucket(at, u)), wanted)
        return Spread(up, config.prefixes)
    root, at, up = normal_url(config.prefix_root), normal_url(directory), 0
    while at != root and not _is_bucket(at, 0):
        at, up = parent_url(at), up + 1
    if at != root:
        raise UsageError(
            f"the checkpoint does not lie below prefix_root={config.prefix_root!r}",
            remedy="give the place under which all of the run's checkpoints lie",
            path=directory,
        )
    return Spread(up, config.prefixes)


def _is_bucket(url: str, up: int) -> bool:
    """Whether `url` is, `up` levels higher, a whole bucket."""
    return normal_url(url).partition("://")[2].count("/") - 1 <= up


class Homes:
    """The stores in which the files of a group's ranks lie: all of them the directory's own where
    nothing is spread."""

    def __init__(self, storage: Storage, spread: Spread | None) -> None:
        self.directory = storage
        self._homes = [open_storage(url) for url in spread.homes(storage.url)] if spread else []

    def of(self, rank: int) -> Storage:
        return self._homes[rank % len(self._homes)] if self._homes else self.directory

    def all(self) -> list[Storage]:
        """The directory's store, then the others."""
        return [self.directory, *self._homes]

    def close(self) -> None:
        for storage in self.all():
            storage.close()


def found_spread(storage: Storage, spread: Spread | None, part: str) -> Spread | None:
    """How a committed checkpoint is spread where it stands now. A copy on a file system has all
    files in its directory; one that shows a bucket's keys as they are has not.

    Args:
        part: the name of one of its part records.
    """
    if spread is None or is_s3_url(storage.url):
        return spread
    try:
        storage.size(part)
    except CheckpointNotFoundError:
        return spread
    return None
