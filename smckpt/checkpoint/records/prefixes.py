"""A checkpoint's directory whose ranks' files are under several prefixes (`Spread`), as one store.

Manifests, records and leases stay in the directory itself, where readers look. The paths of the
ranks' files follow from two numbers, so a manifest cannot point anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from smckpt.checkpoint.records.format import Manifest, parse_name
from smckpt.errors import UsageError
from smckpt.storage import Access, FileInfo, Storage
from smckpt.storage.budget import Spread
from smckpt.storage.urls import normal_url, parent_url, relative_url

_PREFIX = re.compile(r"[0-9a-f]{2}-smckpt")
_OF_RANKS = ("part-", "data-")  # how names of ranks' files begin
_ATTRIBUTES = (
    "write_threads", "read_threads", "request_bytes", "rereads", "exclusive", "one_process",
    "read_once", "folder", "shards_prefixes", "prefixes", "prefix_root",
)  # fmt: skip


def is_prefix(name: str) -> bool:
    """Whether a directory of this name holds ranks' files and no commit of its own."""
    return _PREFIX.fullmatch(name) is not None


def spread_of(storage: Storage, groups: int = 1) -> Spread | None:
    """The prefixes of a save that the options of the directory's store ask for; None if they ask
    for none.

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
        return Spread(up, storage.prefixes)
    root, at, up = normal_url(storage.prefix_root), storage.url, 0
    while at != root and not _is_bucket(at, 0):
        at, up = parent_url(at), up + 1
    if at != root:
        raise UsageError(
            f"the checkpoint is not below prefix_root={storage.prefix_root!r}",
            remedy="pass the location that contains all of the run's checkpoints",
            path=storage.url,
        )
    return Spread(up, storage.prefixes)


def _is_bucket(url: str, up: int) -> bool:
    """Whether the location `up` levels above `url` is a whole bucket."""
    return normal_url(url).partition("://")[2].count("/") - 1 <= up


def open_spread(access: Access, directory: str) -> Storage:
    """The directory of a new save, whose files are spread as the access says."""
    return spread_over(access.open(directory), [access.spread])


def files_of(storage: Storage, manifest: Manifest) -> Storage:
    """The directory of a manifest, with the ranks' files in their present place. A copy on a file
    system has all files in its directory; any one of them tells. A file system that shows a
    bucket's keys has them under the prefixes."""
    if manifest.spread is None:
        return storage
    if not storage.shards_prefixes:
        here = set(storage.names(*_OF_RANKS))
        for part in manifest.parts:
            if not here.isdisjoint([part.name, *(file.name for file in part.files)]):
                return storage
    return spread_over(storage, [manifest.spread])


def spread_over(storage: Storage, spreads: Iterable[Spread | None]) -> Storage:
    """A directory whose ranks' files may be under the prefixes of one of `spreads`, or in the
    directory itself for None. New ones are written by the first."""
    directory, each = storage.holder(""), tuple(dict.fromkeys(spreads))
    return directory if each == (None,) else _SpreadStorage(directory, each)


def _of_holder(verb: str) -> Any:
    """A verb about one file, which the store has that holds the file."""

    def call(self: Storage, name: str, *args: Any, **named: Any) -> Any:
        return getattr(self.holder(name), verb)(name, *args, **named)

    return call


class _SpreadStorage(Storage):
    """Each verb goes to the store that has the file of that name; listings merge all stores."""

    def __init__(self, directory: Storage, spreads: Sequence[Spread | None]) -> None:
        super().__init__(directory.url, directory.access)
        self.spread = spreads[0]
        self._directory, self._spreads = directory, spreads
        # for each spread, the directories of ranks 0, 1, …
        self._ranks = [[self.url] if s is None else s.directories(self.url) for s in spreads]
        self._stores = {self.url: directory}
        self._seen: dict[str, set[str]] = {}  # name → where listings have seen it
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(directory, name))

    @property
    def retries(self) -> int | None:
        each = [store.retries for store in tuple(self._stores.values())]
        return None if None in each else sum(count or 0 for count in each)

    def holder(self, name: str) -> Storage:
        return self._store(next(iter(self._urls(name))))

    create_file = _of_holder("create_file")
    put_exclusive = _of_holder("put_exclusive")
    put = _of_holder("put")
    overwrite = _of_holder("overwrite")
    rename = _of_holder("rename")
    read_into = _of_holder("read_into")
    read = _of_holder("read")
    fetch = _of_holder("fetch")
    size = _of_holder("size")
    stored_crc64 = _of_holder("stored_crc64")
    try_out = _of_holder("try_out")

    def list(self, prefix: str = "") -> list[FileInfo]:
        found: dict[str, FileInfo] = {}
        for store in self._listed(prefix):
            found |= {
                info.name: info for info in store.list(prefix) if self._is_of(info.name, store)
            }
        return [found[name] for name in sorted(found)]

    def names(self, *prefixes: str, all_kinds: bool = False) -> Sequence[str]:
        found: set[str] = set()
        for store in self._listed(*prefixes or ("",)):
            names = store.names(*prefixes, all_kinds=all_kinds)
            found.update(name for name in names if self._is_of(name, store))
        return sorted(found)

    def list_dirs(self) -> Sequence[str]:
        return self._directory.list_dirs()

    def list_unfinished(self) -> Sequence[str]:
        return sorted({name for store in self._all() for name in store.list_unfinished()})

    def delete(self, name: str) -> None:
        self.delete_many([name])

    def delete_many(self, names: Collection[str]) -> None:
        together: dict[str, list[str]] = {}
        for name in names:
            for url in self._seen.get(name) or self._urls(name):
                together.setdefault(url, []).append(name)
        for url, some in together.items():
            self._store(url).delete_many(some)

    def discard_unfinished(self, names: Collection[str]) -> None:
        for store in self._all():
            store.discard_unfinished(names)

    def sync(self) -> None:
        for store in self._all():
            store.sync()

    def remove_directory(self) -> None:
        for store in reversed(self._all()):
            store.remove_directory()

    def refuse_links(self) -> None:
        for store in self._all():
            store.refuse_links()

    def reading_from(self, *urls: str) -> Storage:
        return _SpreadStorage(self._directory.reading_from(*urls), self._spreads)

    def without_links(self) -> Storage:
        return _SpreadStorage(self._directory.without_links(), self._spreads)

    def with_links(self) -> Storage:
        return _SpreadStorage(self._directory.with_links(), self._spreads)

    def at(self, url: str) -> Storage:
        return self._directory.at(url)

    def close(self) -> None:
        for store in tuple(self._stores.values()):
            store.close()

    # -- where files are ---------------------------------------------------------------------------

    def _urls(self, name: str) -> dict[str, None]:
        """The directories in which a file of this name may be."""
        parsed = parse_name(name)
        if parsed is None or parsed.rank < 0:
            return {self.url: None}
        return dict.fromkeys(ranks[parsed.rank % len(ranks)] for ranks in self._ranks)

    def _is_of(self, name: str, store: Storage) -> bool:
        """Whether a file that a store has is one of this checkpoint's."""
        urls = self._urls(name)
        if store.url in urls and len(urls) > 1:
            self._seen.setdefault(name, set()).add(store.url)
        return store.url in urls

    def _store(self, url: str) -> Storage:
        if url not in self._stores:
            spread = next(
                s for s, ranks in zip(self._spreads, self._ranks, strict=True) if s and url in ranks
            )
            root = self._directory.at(spread.root(self.url))
            self._stores[url] = root.join(relative_url(url, root.url))
        return self._stores[url]

    def _all(self) -> Sequence[Storage]:
        """The directory's store, then the others."""
        return [self._store(url) for url in dict.fromkeys(chain([self.url], *self._ranks))]

    def _listed(self, *prefixes: str) -> Sequence[Storage]:
        """Those that may have files whose names begin with one of `prefixes`."""
        if any(a.startswith(b) or b.startswith(a) for a in prefixes for b in _OF_RANKS):
            return self._all()
        return [self._directory]
