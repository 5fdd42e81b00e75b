"""What a store is, and how it is opened.

A public call makes one `Access` and passes it on, or a `Storage` that came from it. A store knows
its access, so siblings, parents and sub-directories have the same options. The worker gets it too.

A `Storage` is one directory. Names are plain file names; a sub-directory is a `Storage` of its own.
Nothing here knows what a checkpoint is. Every verb raises errors of `smckpt.errors` only
(`smckpt.storage.faults` makes them of those of file systems, `outside` of those of others' stores).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smckpt.calls import in_threads
from smckpt.decoding import decode
from smckpt.errors import UsageError
from smckpt.registry import Registry
from smckpt.storage.budget import Share, Spread
from smckpt.storage.faults import guard, guarded, name_taken, owner_of, too_long
from smckpt.storage.urls import file_url, join_url, normal_url, scheme_of

__all__ = [
    "DIRECT_UNIT",
    "Access",
    "FileInfo",
    "FileWriter",
    "Storage",
    "register_store",
]

_DELETERS = 16  # threads
DIRECT_UNIT = 4096  # bytes; direct writes need memory and offsets that are multiples of it


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file: its name, without directory, and its size in bytes."""

    name: str
    size: int


class FileWriter(ABC):
    """One new file, written piecewise by any number of threads."""

    #: The size of a write, in bytes, that the store takes best; 0: the caller decides.
    piece: int = 0

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        guard(cls)

    @abstractmethod
    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        """Write all of `data` at byte `offset`. Each byte of the file is written exactly once.

        Args:
            crc64: the CRC-64/NVME of `data`, if the caller has it. A store that sends a checksum
                along then need not compute it.

        Writes are fast when `offset` and the memory's address are multiples of 4,096. Then only the
        file's last piece may have an odd length.

        Raises:
            StorageError: the store refused (full, quota, gone).
        """

    @abstractmethod
    def finish(self) -> None:
        """Make the file and its name durable. After that no crash removes it.

        Raises:
            StorageError: the store refused, or some of the bytes were never written.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove the written bytes. It may be called again. After `finish` it removes the file."""


@dataclass(frozen=True)
class Access:
    """Opens stores. Immutable.

    options: scheme → the JSON fields that stores of this scheme understand. A store whose scheme
        has no fields takes its options from the environment.
    share: this process's part of the requests per second that a store answers to the whole job.
    spread: the prefixes over which a new save spreads the ranks' files.
    named: the URLs that the user named. What is written or deleted below one of them is not reached
        through a symbolic link.
    read_from: the URLs of directories whose files belong together, such as a checkpoint's. What is
        read below one of them is not reached through a symbolic link either.
    """

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    share: Share = field(default_factory=Share)
    spread: Spread | None = None
    named: tuple[str, ...] = ()
    read_from: tuple[str, ...] = ()

    def open(self, url: str | os.PathLike[str]) -> Storage:
        """Open the store at `url`: a path, or scheme://…. This sends no request.

        Raises:
            UsageError: the path is empty, or no store is known for the scheme.
        """
        text = os.fspath(url)
        scheme = scheme_of(text)
        found = _STORES.find(scheme) or _OTHERS
        make = _imported(scheme, found) if isinstance(found, str) else found
        owner = owner_of(make)
        if not owner.startswith("smckpt."):
            make = guarded(make, owner, "its making", text)
        store = make(text, self)
        if not isinstance(store, Storage):
            raise UsageError(
                f"{owner}, which makes the stores of {scheme}://, returned {store!r}, which is no "
                "Storage",
                remedy="return a subclass of smckpt.storage.Storage",
                path=text,
            )
        return store

    def holding(self, share: Share, spread: Spread | None = None) -> Access:
        """The same options with another share, and the prefixes of a save."""
        return dataclasses.replace(self, share=share, spread=spread)

    def to_json(self) -> dict[str, Any]:
        """A form for another process, with the stores that were registered in this process."""
        return {
            "stores": dict(_STORES.registered),
            "options": {scheme: dict(fields) for scheme, fields in self.options.items()},
            "share": dataclasses.asdict(self.share),
            "spread": self.spread and dataclasses.asdict(self.spread),
            "named": list(self.named),
            "read_from": list(self.read_from),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Access:
        for scheme, factory in data["stores"].items():
            register_store(scheme, factory)
        return decode(cls, {key: value for key, value in data.items() if key != "stores"})


class Storage(ABC):
    """One directory. It need not exist yet: verbs that write create it. Thread-safe.

    Args:
        url: an absolute path, or `scheme://…`. It is kept in its normal spelling.
        access: the access that opened it.
    """

    #: How many writes should be in flight; 0: the caller decides.
    write_threads: int = 0
    #: How many reads should be in flight; 0: the caller decides.
    read_threads: int = 0
    #: How many bytes one read should ask for; whole MiB.
    request_bytes: int = 8 << 20
    #: How often to repeat a read that gave wrong bytes, which a network may have changed.
    rereads: int = 0
    #: Whether `put_exclusive` also excludes other processes.
    exclusive: bool = True
    #: Whether a file is visible only to the process that wrote it.
    one_process: bool = False
    #: Whether ranks that need the same bytes should read them once and pass them on. It costs more
    #: than a read out of the host's page cache.
    read_once: bool = False
    #: The directory on a file system, whose files are read through the page cache; None: on none.
    folder: str | None = None
    #: Whether the store limits requests per prefix of its keys. Then ranks' files may be under
    #: several.
    shards_prefixes: bool = False
    #: Over how many prefixes a new save spreads the ranks' files.
    prefixes: int = 1
    #: The location below which these prefixes are made; None: the parent of the step's directory.
    prefix_root: str | None = None
    #: Over which prefixes the ranks' files of this checkpoint are; None: over none.
    spread: Spread | None = None

    @property
    def retries(self) -> int | None:
        """How many requests it has sent again; None: it does not count them."""
        return None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        guard(cls)

    def __init__(self, url: str, access: Access | None = None) -> None:
        self.url = normal_url(url)
        self.access = Access() if access is None else access

    # -- what each store must have -----------------------------------------------------------------

    @abstractmethod
    def create_file(self, name: str, size: int, *, replace: bool = False) -> FileWriter:
        """Begin a new file of `size` bytes.

        Args:
            replace: the file gets its name when it is finished, and replaces a file that has the
                name by then. Otherwise the name must be free, and a file system shows the
                unfinished file.

        Raises:
            StorageError: the name exists and `replace` is not set (an object store finds that when
                the object is complete), or the store refused.
        """

    @abstractmethod
    def put_exclusive(self, name: str, data: bytes) -> bool:
        """Create `name`, whole and durable, unless it exists. Of all callers that try, one
        succeeds. No reader ever sees a part of the file.

        Returns:
            Whether it was created; False: the name exists.

        Raises:
            StorageError: the store refused, or cannot create exclusively. The whole file may or may
                not exist then, but never a part of it.
        """

    @abstractmethod
    def read_into(
        self, name: str, offset: int, buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:  # fmt: skip
        """Fill `buffers`, one after the other, with consecutive bytes that begin at `offset`.

        Args:
            seen: called with each filled stretch, in order, while the processor's cache has it.

        Raises:
            CheckpointNotFoundError: no such file.
            CorruptCheckpointError: the file ends before the last buffer is full.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """The size of a file in bytes.

        Raises:
            CheckpointNotFoundError: no such file.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> list[FileInfo]:
        """The files directly in this directory with this prefix, by name. It may be missing."""

    @abstractmethod
    def list_dirs(self) -> Sequence[str]:
        """The sorted names of the sub-directories directly in this directory."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file. A missing file is no error."""

    # -- defaults that a store may do better -------------------------------------------------------

    def delete_many(self, names: Collection[str]) -> None:
        """Remove files, in any order. A missing one is no error."""
        in_threads(self.delete, names, _DELETERS, "smckpt-delete")

    def put(self, name: str, data: bytes) -> None:
        """Create a small file. It is durable when this returns. A crash may leave it half written,
        so `name` must be unique to the attempt.

        Raises:
            StorageError: the name exists, or the store refused.
        """
        if not self.put_exclusive(name, data):
            raise name_taken(file_url(self.url, name))

    def overwrite(self, name: str, data: bytes | memoryview) -> None:
        """Create a file, or replace the one that has the name. It has all bytes, or none.

        Raises:
            StorageError: the store refused.
        """
        writer = self.create_file(name, len(data), replace=True)
        try:
            writer.write_at(0, memoryview(data))
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    def read(
        self, name: str, offset: int = 0, length: int | None = None, *, most: int | None = None
    ) -> bytes:
        """Read `length` bytes from `offset`, or everything up to the end.

        Args:
            most: how many bytes the file may have. A larger file is refused and not read.

        Raises:
            CheckpointNotFoundError: no such file.
            CorruptCheckpointError: the file ends before `offset + length`, or is larger than
                `most`.
        """
        if length is None:
            size = self.size(name)
            if most is not None and size > most:
                raise too_long(name, size, most, file_url(self.url, name))
            length = max(size - offset, 0)
        data = bytearray(length)
        self.read_into(name, offset, [memoryview(data)])
        return bytes(data)

    def fetch(self, name: str, target: memoryview) -> None:
        """Fill `target` with a whole file that has exactly as many bytes, at most `request_bytes`.

        Raises:
            CheckpointNotFoundError: no such file.
            CorruptCheckpointError: the file has fewer bytes, or more (not every store notices
                more).
        """
        self.read_into(name, 0, [target])

    def try_out(self, name: str) -> str:
        """Find out whether saves can work here. It writes a small file and removes it. On a file
        system it does nothing, because the first file of a save shows it. Elsewhere a session calls
        it once for each bucket.

        Returns:
            A remark for the user that is no error, or "".

        Raises:
            StorageError, UsageError: saves cannot work here.
        """
        return ""

    def names(self, *prefixes: str, all_kinds: bool = False) -> Sequence[str]:
        """The sorted names of `list`, of those that have one of `prefixes` if any are given; with
        `all_kinds` also those of pipes, directories and dangling links."""
        return sorted({info.name for each in prefixes or ("",) for info in self.list(each)})

    def list_unfinished(self) -> Sequence[str]:
        """The sorted names of unfinished files here: uploads, and on a file system the temporary
        files of exclusive and replacing writes."""
        return []

    def discard_unfinished(self, names: Collection[str]) -> None:  # noqa: B027
        """Remove unfinished files with these names. Finished files stay."""

    def stored_crc64(self, name: str) -> int | None:
        """The CRC-64/NVME of a whole file, if the store itself computed and keeps it.

        Raises:
            CheckpointNotFoundError: no such file.
        """
        self.size(name)
        return None

    def sync(self) -> None:  # noqa: B027
        """Make deletions here durable. An object store does that at once. A missing directory is no
        error.

        Raises:
            StorageError: the store refused.
        """

    def remove_directory(self) -> None:  # noqa: B027
        """Remove this directory if it is empty. An object store has no directories."""

    def rename(self, name: str, new: str) -> None:
        """Give a finished file another name, durably; a file that has it is replaced. Only file
        systems can (`folder`).

        Raises:
            StorageError: the file system refused.
        """
        raise UsageError(
            f"this store cannot rename {name}", remedy="write the file under its name",
            path=self.url,
        )  # fmt: skip

    def refuse_links(self) -> None:  # noqa: B027
        """Check now that no symbolic link is on the path from the directory that the user named.
        All verbs that write or delete hold this for themselves, at the moment of their call.

        Raises:
            UsageError: there is such a link.
        """

    def reading_from(self, *urls: str) -> Storage:
        """This directory as a store whose reads follow no symbolic link below the nearest of `urls`
        that is above it, or is this directory. It lists no links. So are the stores that it
        opens."""
        return self

    def without_links(self) -> Storage:
        """`reading_from` what the user named."""
        return self

    def with_links(self) -> Storage:
        """This directory as a store whose reads follow symbolic links, as those of caches are."""
        return self

    def of_one_version(self) -> Storage:
        """This directory as an object store that refuses to read on in a file that was replaced."""
        return self

    def holder(self, name: str) -> Storage:
        """The store of the one directory in which a file of this name is."""
        return self

    def path_of(self, name: str) -> str:
        """Where a file is, for messages."""
        return file_url(self.holder(name).url, name)

    def join(self, name: str) -> Storage:
        """The sub-directory `name`. It need not exist yet. "a/b" goes two levels down."""
        if name == ".." or name.startswith("../"):
            raise UsageError(
                f"{name!r} leads out of the directory", remedy="use join_url", path=self.url
            )
        return self.at(join_url(self.url, name))

    def at(self, url: str) -> Storage:
        """The store of another place, with this store's access."""
        return self if url == self.url else self.access.open(url)

    def close(self) -> None:  # noqa: B027
        """Close descriptors and connections. The object may be used again afterwards."""

    # -- for classes that implement a store --------------------------------------------------------

    def refuse_name(self, name: str) -> None:
        """Refuse a name that leads out of the directory. A name may come from a forged manifest.

        Raises:
            UsageError: it is not a plain file name.
        """
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            what, remedy = f"{name!r} is not a plain file name", "pass a name without directory"
            raise UsageError(what, remedy=remedy, path=self.url)


# -- which stores there are ---------------------------------------------------------------------

_OTHERS = "smckpt.storage.fsspec_store:FsspecStorage"  # for schemes without a store of their own
# Scheme → "module:name" of the factory of its stores, or the factory itself if a package brings it.
_STORES: Registry[Any] = Registry(
    "store",
    object,
    "smckpt.stores",
    {
        **dict.fromkeys(("", "file"), "smckpt.storage.disk.posix:PosixStorage"),
        "s3": "smckpt.storage.s3.storage:open_s3",
        "msc": "smckpt.storage.fsspec_store:open_msc",
        "keeper": "smckpt.storage.memory.store:KeeperStorage",
        "hyperpod": "smckpt.storage.memory.hyperpod:HyperPodStorage",
    },
)


def register_store(scheme: str, factory: str | Callable[[str, Access], Storage]) -> None:
    """Register the stores of `scheme` in this process and in the workers that it starts.

    Args:
        scheme: "myfs" for myfs://….
        factory: a class or function of a module, or its name as "module:name", because the worker
            imports it too. It is called with the URL and the access and returns the `Storage`.

    Raises:
        UsageError: the scheme has a store already, or the factory has no name in a module.
    """
    if not isinstance(factory, str):
        module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
        if not name.isidentifier() or module in ("", "__main__"):
            raise UsageError(
                f"the worker process cannot import {factory!r}, which makes the stores of "
                f"{scheme}://",
                remedy="pass a class or function of an importable module's top",
            )
        factory = f"{module}:{name}"
    _STORES.register(scheme.lower(), factory)


def _imported(scheme: str, factory: str) -> Callable[[str, Access], Storage]:
    module, _, name = factory.partition(":")
    try:
        make: Callable[[str, Access], Storage] = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is somebody else's
        raise UsageError(
            f"cannot import {factory}, which makes the stores of {scheme}://: "
            f"{type(error).__name__}: {error}",
            remedy="install what it needs, or put its module on PYTHONPATH",
        ) from error
    return make
