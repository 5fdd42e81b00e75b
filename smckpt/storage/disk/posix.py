"""A directory of a POSIX file system: local disk, NFS, FSx for Lustre, FUSE.

A verb that writes or deletes opens the directory first, without a link below the directory that
the user named, and goes on from its descriptor (`directory.py`). So does a read below one of
`Access.read_from`. On the path to that directory, a read follows links. A file that is read may be
no link itself, but in a store `with_links`.

Large files are written with O_DIRECT if the file system supports it. The bytes go from the arena to
the device without a copy through the page cache (on a virtual disk three to six times the rate of
buffered writes + fsync). Names are created exclusively. Files and directories are fsynced.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

from smckpt.errors import CorruptCheckpointError, UsageError
from smckpt.storage.base import Access, FileInfo, Storage
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.posix_read import Descriptor, Reading, is_a_link, not_a_file, open_file
from smckpt.storage.disk.posix_write import PosixWriter, publish, write_all
from smckpt.storage.faults import os_errors_at, refuse_size, storage_error, too_short
from smckpt.storage.urls import is_below, normal_url

TEMPORARY_SUFFIX = ".tmp"  # `.<name>.<random>.tmp` becomes `<name>` when it is whole
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp", re.A)
_OPEN_FILES = 64  # how many files stay open for reading
_ABSENT = (FileNotFoundError, NotADirectoryError)  # it is missing, or its parent is a file
# rmdir failed because the directory is not empty, is gone, is a mount point, or its rights forbid
# it.
_STAYS = (
    errno.ENOTEMPTY,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EBUSY,
    errno.EACCES,
    errno.EPERM,
)


class PosixStorage(Storage):
    """The directory `path`. Thread-safe.

    Args:
        folder: where the directory is, if `path` is a URL that does not say it.
    """

    def __init__(
        self, path: str, access: Access | None = None, *, folder: str | None = None
    ) -> None:
        super().__init__(path, access)
        self.folder: str = self.url if folder is None else normal_url(folder)
        self._named = self.url  # what the user named: this directory, or one above it
        self._below: tuple[str, ...] = ()  # the names from there to here
        self._go_from(self.access.named)
        from_ = _nearest(self.url, self.access.read_from)
        self._strict = from_ is not None  # whether no link is read through, nor listed
        self._read_below = () if from_ is None else _names_below(self.url, from_)
        self._links = False  # whether a file that is read may be a link
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Descriptor] = OrderedDict()

    def _go_from(self, named: Sequence[str]) -> None:
        """Know this directory as one below another that the user named: the nearest of them."""
        nearest = _nearest(self.url, named)
        if nearest is not None:
            self._named = nearest
            self._below = _names_below(self.url, nearest)

    def create_file(self, name: str, size: int, *, replace: bool = False) -> PosixWriter:
        refuse_size(size, self.folder)
        path = self._path(name)
        begun = _temporary(name) if replace else name
        with os_errors_at(path, "create the file"):
            directory, fd = self._created(begun)
        done = partial(self._forget, path)
        return PosixWriter(directory, begun, name, size, fd, self._directory, done)

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with os_errors_at(path, "write"), self._written(name, data) as directory:
            directory.sync()

    def put_exclusive(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        temporary = _temporary(name)
        with os_errors_at(path, "create exclusively"):
            with suppress(FileNotFoundError), self._directory() as directory:
                if directory.status(name) is not None:
                    return False
            with self._written(temporary, data) as directory:
                try:
                    created = publish(directory, temporary, name)
                finally:
                    with suppress(OSError):  # a later sweep removes the rest
                        directory.remove(temporary)
                action = "make the new name durable (it is visible, a power failure may remove it)"
                with os_errors_at(path, action):
                    if created:
                        directory.sync()
        return created

    def rename(self, name: str, new: str) -> None:
        path = self._path(new)
        self._forget(path)
        with os_errors_at(path, "name the finished file"), self._directory() as directory:
            directory.rename(os.path.basename(self._path(name)), new)
            directory.sync()

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        path = self._path(name)
        wanted = [b if b.format == "B" else b.cast("B") for b in buffers if b.nbytes]
        reading = Reading(offset, wanted, seen)
        with os_errors_at(path, "read"):
            try:
                complete = reading.run(self._descriptor(path))
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self._forget(path)  # NFS: the server restarted, and a new descriptor may work
                complete = reading.run(self._descriptor(path))
        if not complete:
            needed = offset + sum(b.nbytes for b in wanted)
            raise too_short(name, reading.offset, needed, path)

    def size(self, name: str) -> int:
        path = self._path(name)
        with os_errors_at(path, "look up the size"):
            if not self._read_below:
                found = os.stat(path, follow_symlinks=self._links)
            else:
                with self._reading() as directory:
                    found = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise is_a_link(path)
        if not stat.S_ISREG(found.st_mode):
            raise not_a_file(path)
        return found.st_size

    def list_unfinished(self) -> list[str]:
        return sorted({name for _, name in self._unfinished()})

    def discard_unfinished(self, names: Collection[str]) -> None:
        for temporary, name in self._unfinished() if names else ():
            if name in names:
                self.delete(temporary)

    def list_dirs(self) -> list[str]:
        with self._seen() as entries:
            return sorted(entry.name for entry in entries if _may_be_directory(entry))

    def list(self, prefix: str = "") -> list[FileInfo]:
        found = []
        with self._seen() as entries:
            for entry in entries:
                if not entry.name.startswith(prefix):
                    continue
                try:
                    if entry.is_file():
                        found.append(FileInfo(entry.name, entry.stat().st_size))
                except FileNotFoundError:
                    continue  # deleted after it was listed
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        continue  # a link that leads to nothing is not one of our files
                    raise storage_error(error, self._path(entry.name), "look up") from error
        return sorted(found, key=lambda info: info.name)

    def names(self, *prefixes: str, all_kinds: bool = False) -> Sequence[str]:
        with self._scan() if all_kinds else self._seen() as entries:
            named = [entry for entry in entries if entry.name.startswith(prefixes or "")]
            return sorted(entry.name for entry in named if all_kinds or _is_file(entry))

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._forget(path)
        with os_errors_at(path, "delete"), suppress(*_ABSENT), self._directory() as directory:
            directory.remove(name)

    def sync(self) -> None:
        action = "make the deletions durable"
        with os_errors_at(self.folder, action), suppress(*_ABSENT), self._directory() as directory:
            directory.sync()

    def remove_directory(self) -> None:
        self.refuse_links()  # rmdir of a link would only say that it stays
        try:
            if not self._below:
                os.rmdir(self.folder)
                return
            with Directory.open(self._above(self._below), self._below[:-1]) as parent:
                parent.remove_directory(self._below[-1])
        except OSError as error:
            if error.errno not in _STAYS:
                raise storage_error(error, self.folder, "remove the empty directory") from error

    def at(self, url: str) -> Storage:
        there = super().at(url)
        if isinstance(there, PosixStorage):
            there._go_from([*self.access.named, self._named])
            there._links = self._links
        return there

    def refuse_links(self) -> None:
        if self._below:  # where nothing is there, no link can lead elsewhere
            with os_errors_at(self.folder, "open the directory"), suppress(*_ABSENT):
                self._directory().close()

    def reading_from(self, *urls: str) -> Storage:
        return self._again(replace(self.access, read_from=(*self.access.read_from, *urls)))

    def without_links(self) -> Storage:
        return self.reading_from(self._named)

    def with_links(self) -> Storage:
        following = self._again(self.access)
        following._links = True
        return following

    def _again(self, access: Access) -> PosixStorage:
        again = PosixStorage(self.url, access, folder=self.folder)
        again._named, again._below = self._named, self._below
        return again

    def _directory(self, *, make: bool = False) -> Directory:
        return Directory.open(self._above(self._below), self._below, make=make)

    def _above(self, names: Sequence[str]) -> str:
        """The directory from which `names` lead here."""
        above = self.folder
        for _ in names:
            above = os.path.dirname(above)
        return above

    def _reading(self) -> Directory:
        """This directory, reached without a link below the one of `Access.read_from`."""
        try:
            return Directory.open(self._above(self._read_below), self._read_below)
        except UsageError as error:
            raise CorruptCheckpointError(
                error.message,
                remedy="put the directory itself in the place of the link",
                path=error.path,
            ) from None

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _path(self, name: str) -> str:
        self.refuse_name(name)
        return os.path.join(self.folder, name)

    def _unfinished(self) -> Sequence[tuple[str, str]]:
        """(temporary name, name) of each temporary file: the second is the one it was to get."""
        with self._scan() as entries:
            matches = [(entry.name, _TEMPORARY.fullmatch(entry.name)) for entry in entries]
        return [(temporary, match["name"]) for temporary, match in matches if match]

    @contextmanager
    def _seen(self) -> Iterator[Sequence[os.DirEntry[str]]]:
        """What is there; for a store without links, no links."""
        with self._scan() as entries:
            yield [e for e in entries if not (self._strict and e.is_symlink())]

    @contextmanager
    def _scan(self) -> Iterator[Sequence[os.DirEntry[str]]]:
        """All entries, which can be looked at in the block."""
        entries: Sequence[os.DirEntry[str]] = ()
        with ExitStack() as open_ones:
            with os_errors_at(self.folder, "list the directory"), suppress(FileNotFoundError):
                here: str | int = self.folder
                if self._read_below:
                    here = open_ones.enter_context(self._reading()).listable()
                    open_ones.callback(os.close, here)
                entries = [*open_ones.enter_context(os.scandir(here))]
            yield entries

    def _created(self, name: str) -> tuple[Directory, int]:
        """This directory, which is made if it is missing, and a new file in it."""
        try:
            return self._created_in(self._directory(), name)
        except FileNotFoundError:  # or somebody has removed it since
            return self._created_in(self._directory(make=True), name)

    def _created_in(self, directory: Directory, name: str) -> tuple[Directory, int]:
        try:
            return directory, directory.create(name)
        except BaseException:
            directory.close()
            raise

    def _written(self, name: str, data: bytes) -> Directory:
        """This directory, with a new file in it whose bytes are durable."""
        directory, fd = self._created(name)
        try:
            try:
                write_all(fd, memoryview(data), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            directory.remove(name)
            directory.close()
            raise
        return directory

    def _descriptor(self, path: str) -> Descriptor:
        with self._lock:
            found = self._open.get(path)
            if found is not None:
                self._open.move_to_end(path)
                return found
        if not self._read_below:  # a single call: nothing is between the directory and the file
            opened = Descriptor(open_file(path, links=self._links))
        else:
            with self._reading() as directory:
                opened = Descriptor(open_file(path, directory))
        with self._lock:
            opened = self._open.setdefault(path, opened)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return opened

    def _forget(self, path: str) -> None:
        with self._lock:
            self._open.pop(path, None)


def _nearest(url: str, above: Sequence[str]) -> str | None:
    """Of some locations, the nearest that is above `url`, or is `url`."""
    return max((each for each in above if is_below(url, each)), key=len, default=None)


def _names_below(url: str, above: str) -> tuple[str, ...]:
    return tuple(name for name in url[len(above) :].split("/") if name)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # links in a circle; entries that cannot be looked at
        return False


def _may_be_directory(entry: os.DirEntry[str]) -> bool:
    """Whether the entry may be a directory. An entry that cannot be looked at counts as one: the
    call that opens it raises the reason, and its neighbours are still found. A link that loops, or
    leads where this user has no rights, is not a directory."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno != errno.ELOOP and not (
            error.errno == errno.EACCES and entry.is_symlink()
        )


def _temporary(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
