"""Bring a host's directory of a model to a publish, and check every byte of what changed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from smckpt.calls import alone
from smckpt.checkpoint.records.crc import crc64
from smckpt.checkpoint.records.format import FORMAT_VERSION
from smckpt.checkpoint.records.sealed import decode_body, open_json, seal_json
from smckpt.errors import CheckpointError, CorruptCheckpointError, StorageError, UsageError
from smckpt.formats.degrees import check_counts, check_flags, check_paths
from smckpt.storage import Storage, StoreOptions, access_to
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.posix_read import open_file
from smckpt.storage.faults import os_errors_at
from smckpt.storage.urls import file_url, path_on_disk
from smckpt.translate.publishing.published import (
    NEW_RECORD,
    PUBLISH_IN_FULL,
    RECORD,
    Name,
    Publish,
    PublishedFile,
    PublishedTensor,
    chain_to,
    header_of,
    is_folder,
    spans,
    state_after,
)

log = logging.getLogger("smckpt")

LATEST = "latest"
_NEW_LINK = ".applying-link"
_TEMPORARY = re.compile(r"\.applying-([0-9a-f]{8}|link)", re.ASCII)
_MAX_RECORD = 1 << 24  # bytes; it names the files
_PIECE = 16 << 20


@dataclass(frozen=True)
class ApplyReport:
    """directory: the model. number: of the publish that it is. nbytes: read from the root. mended:
    the files that were made anew in the directory that is served, because they differed."""

    directory: str
    number: int
    nbytes: int
    seconds: float
    mended: tuple[str, ...] = ()


@alone()
def apply_published(
    root: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    number: int | None = None,
    keep: int = 2,
    quick: bool = False,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> ApplyReport:
    """Make `directory/latest` the model that was published, byte for byte.

    `latest` is a symbolic link to a directory of that publish, beside it. It changes at once, when
    the new directory is whole, durable and compared with its checksums. So a server that reads the
    old one is not disturbed. Files that did not change are hard links; of others only the changed
    blocks are read from `root`. If the directory there cannot serve as the base, all is read anew.

    If that publish is served already, its files are compared too. One that differs is made anew and
    takes the other one's name at once; a server that has read the other one has to load again.

    Args:
        root: where `publish` writes, on disk or in S3.
        directory: a directory on this host, or on a file system with hard links and flock.
        number: of the publish; by default the newest.
        keep: how many publishes stay in the directory.
        quick: of a publish that is served already, read only the files that have another size, or
            were changed after it was made. For a loop that waits for the next publish.
        storage: as in `smckpt.load`.

    Raises:
        CheckpointNotFoundError: there is no such publish.
        CorruptCheckpointError: bytes of the root differ from what was published.
        StorageError: a store refused, or another process applies to this directory.
        UsageError: an argument is wrong.
    """
    began = time.monotonic()
    check_paths(root=root, directory=directory)
    check_counts(keep=keep)
    check_flags(quick=quick)
    path = path_on_disk(directory, "models are served from a file system", "pass a local directory")
    access = access_to(root, storage=storage)
    with ExitStack() as cleanup:
        source = access.open(root).without_links()
        cleanup.callback(source.close)
        if not os.path.lexists(os.path.join(path, _LOCK)):
            # nothing is made where there is nothing to apply
            chain_to(source, number)
        with os_errors_at(path, "write"):
            host = cleanup.enter_context(_locked(path))
            chain = chain_to(source, number)
            publish = chain[-1]
            served = False
            with suppress(OSError):  # `latest` leads nowhere, or there is none
                there, latest = host.status(publish.folder), os.stat(LATEST, dir_fd=host.fd)
                served = there is not None and os.path.samestat(there, latest)
            _clear(host)
            nbytes = 0
            mended: tuple[str, ...] = ()
            record = _record_of(host, publish.folder)
            if served and record.identity is None:  # damaged; whose directory it is, its files say
                state = state_after(chain)
                with host.below(publish.folder) as unknown:
                    if not any(_differing(unknown, state)):
                        record = _Record(publish.identity, tuple(state))
                        _put_record(unknown, record)
            if not served or record.identity != publish.identity:
                if served:
                    raise UsageError(
                        f"the served directory is not publish {publish.number} of this root",
                        remedy="give each root a directory of its own",
                        path=os.path.join(host.path, publish.folder),
                    )
                if not _is_whole(host, chain):
                    nbytes = _made(source, chain, host)
                if host.link_at(LATEST) != publish.folder:
                    host.remove(_NEW_LINK)
                    host.link_to(publish.folder, _NEW_LINK)
                    host.rename(_NEW_LINK, LATEST)  # at once
                    host.sync()
            else:
                nbytes, mended = _mended(source, chain, host, quick=quick)
            # What has no record of ours is somebody else's. The directory that is served stays.
            records = {name: _record_of(host, name) for name in host.names() if is_folder(name)}
            applied = [name for name, record in records.items() if record != _Record()]
            # of a removal that was killed
            over = [name for name in applied if records[name].identity is None]
            older = sorted((n for n in applied if n != publish.folder and n not in over), key=int)
            for name in (*over, *older[: max(len(older) - (keep - 1), 0)]):
                _remove_ours(host, name, state_after(chain))
            _clear(host)
    target = os.path.join(path, chain[-1].folder)
    return ApplyReport(target, chain[-1].number, nbytes, time.monotonic() - began, mended)


_LOCK = ".lock"


@contextmanager
def _locked(path: str) -> Iterator[Directory]:
    with Directory.open(path, make=True) as host:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(_LOCK, flags, 0o644, dir_fd=host.fd)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise StorageError(
                    "another process applies a publish to this directory",
                    remedy="wait for it, or give each its own directory",
                    path=path,
                ) from error
            yield host
        finally:
            os.close(fd)


def _clear(host: Directory) -> None:
    """Remove what processes left that were killed; the lock is ours."""
    for name in host.names():
        if _TEMPORARY.fullmatch(name):
            host.remove_all(name)


# -- the record of a directory ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """identity: of the publish that is whole in a directory; None: none is. files: those that were
    written there, except the record; None: nobody says."""

    identity: str | None = None
    files: tuple[Name, ...] | None = None

    def sealed(self) -> bytes:
        body = {"format": list(FORMAT_VERSION), "identity": self.identity, "files": self.files}
        return seal_json(body)


def _record_of(host: Directory, folder: str) -> _Record:
    path = os.path.join(host.path, folder, RECORD)
    try:
        with host.below(folder) as directory, _opened(directory, RECORD) as file:
            return decode_body(_Record, open_json(file.read(_MAX_RECORD), path), path)
    except (OSError, CheckpointError):
        return _Record()


def _put_record(directory: Directory, record: _Record) -> None:
    """Write the record, or replace it at once."""
    directory.remove(NEW_RECORD)
    with os.fdopen(directory.create(NEW_RECORD), "wb") as file:
        file.write(record.sealed())
        file.flush()
        os.fsync(file.fileno())
    directory.rename(NEW_RECORD, RECORD)
    directory.sync()


def _opened(directory: Directory, name: str) -> BinaryIO:
    """A regular file of a directory, open for reading.

    Raises:
        CorruptCheckpointError, OSError: it is a link, or something else.
    """
    return open(open_file(os.path.join(directory.path, name), directory), "rb")


# -- making a directory ----------------------------------------------------------------------------


def _is_whole(host: Directory, chain: Sequence[Publish]) -> bool:
    """Whether a directory beside the served one is the last publish of a chain: each file is
    compared, since it lay there for some time."""
    folder = chain[-1].folder
    if _record_of(host, folder).identity != chain[-1].identity:
        return False
    with host.below(folder) as directory:
        for name, error in _differing(directory, state_after(chain)):
            log.warning("%s is made anew: %s: %s", directory.path, name, error)
            return False
    return True


def _differing(
    directory: Directory, state: Mapping[Name, PublishedFile], since: int | None = None
) -> Iterator[tuple[Name, Exception]]:
    """The files that are not what was published, and why.

    Args:
        since: a file of the right size that was not changed after this moment (ns) is not read.
    """
    for name, file in state.items():
        try:
            with _opened(directory, name) as there:
                found = os.fstat(there.fileno())
                if since is None or found.st_size != file.size or found.st_mtime_ns > since:
                    _check(there.fileno(), file, os.path.join(directory.path, name))
        except (CorruptCheckpointError, OSError) as error:
            yield name, error


def _mended(
    source: Storage, chain: Sequence[Publish], host: Directory, *, quick: bool
) -> tuple[int, tuple[str, ...]]:
    """Make the files of the served directory anew that are not what was published. Returns the
    bytes that were read from the root, and the files."""
    state, nbytes = state_after(chain), 0
    begun = f".applying-{secrets.token_hex(4)}"
    with ExitStack() as cleanup:
        served = cleanup.enter_context(host.below(chain[-1].folder))
        written = served.status(RECORD)
        since = written.st_mtime_ns if quick and written is not None else None
        bad = dict(_differing(served, state, since))
        if not bad:
            return 0, ()
        cleanup.callback(host.remove_all, begun)
        making = cleanup.enter_context(host.make(begun))
        for name, error in bad.items():
            log.warning("%s of %s, which is served, is made anew: %s", name, served.path, error)
            nbytes += _NewFile(source, chain, name, state[name], making).made_from(None, 0)
        for name in bad:
            try:
                os.rename(name, name, src_dir_fd=making.fd, dst_dir_fd=served.fd)  # at once
            except IsADirectoryError as error:
                raise _foreign(os.path.join(served.path, name)) from error
        # what was changed after the record is read again by the next quick call
        _put_record(served, _Record(chain[-1].identity, tuple(state)))
    return nbytes, tuple(bad)


def _made(source: Storage, chain: Sequence[Publish], host: Directory) -> int:
    """Make the directory of the last publish. Returns the bytes that were read from the root."""
    bases = [
        (at + 1, publish.folder)
        for at, publish in enumerate(chain[:-1])
        if _record_of(host, publish.folder).identity == publish.identity
    ]
    done, folder = bases[-1] if bases else (0, "")
    state = state_after(chain)
    begun = f".applying-{secrets.token_hex(4)}"
    with ExitStack() as cleanup:
        cleanup.callback(host.remove_all, begun)
        making = cleanup.enter_context(host.make(begun))
        base = cleanup.enter_context(host.below(folder)) if folder else None
        nbytes = 0
        for name, file in state.items():
            work = _NewFile(source, chain, name, file, making)
            if base is not None:
                try:
                    nbytes += work.made_from(base, done)
                    continue
                except (CorruptCheckpointError, OSError) as error:
                    log.warning(
                        "%s of %s is no base for publish %d: %s",
                        name, base.path, chain[-1].number, error,
                    )  # fmt: skip
                    making.remove(name)
            nbytes += work.made_from(None, 0)
        _put_record(making, _Record(chain[-1].identity, tuple(state)))
        _remove_ours(host, chain[-1].folder, state)
        served = chain[-1].folder
        try:
            host.rename(begun, served)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise _foreign(os.path.join(host.path, served)) from error
        host.sync()
    return nbytes


def _foreign(path: str) -> UsageError:
    return UsageError(
        "files are there that no publish brought",
        remedy="move them elsewhere; smckpt removes only what it has written",
        path=path,
    )


@dataclass(frozen=True)
class _NewFile:
    """One file of the new directory."""

    source: Storage
    chain: Sequence[Publish]
    name: str
    file: PublishedFile
    making: Directory

    def made_from(self, base: Directory | None, done: int) -> int:
        """Make it: its last whole copy, or the base's, and what changed since. Returns the bytes
        that were read from the root. Every byte of it is compared, also of one that is linked.

        Args:
            done: how many publishes of the chain the base has.
        """
        path = os.path.join(self.making.path, self.name)
        writers = [(p, p.files[self.name]) for p in self.chain[done:] if self.name in p.files]
        if not writers and base is not None:
            os.link(
                self.name, self.name, src_dir_fd=base.fd, dst_dir_fd=self.making.fd,
                follow_symlinks=False,
            )  # fmt: skip
            with _opened(self.making, self.name) as there:
                _check(there.fileno(), self.file, path)
            return 0
        wholes = [at for at, (_, each) in enumerate(writers) if each.whole]
        nbytes, later = 0, writers
        with open(self.making.create(self.name, read=True), "rb+", buffering=0) as out:
            if wholes:
                publish, whole = writers[wholes[-1]]
                memory = memoryview(bytearray(min(_PIECE, max(whole.size, 1))))
                with closing(self.source.join(publish.folder)) as storage:
                    for low in range(0, whole.size, len(memory)):
                        view = memory[: min(len(memory), whole.size - low)]
                        storage.read_into(self.name, low, [view])
                        _write(out.fileno(), view, low)
                nbytes += whole.size
                later = writers[wholes[-1] + 1 :]
            elif base is not None:
                with _opened(base, self.name) as old:
                    # patches change no size
                    _copy_file(old, out, self.file.size, os.path.join(base.path, self.name))
            for publish, each in later:
                nbytes += _patch(self.source, publish, each.tensors, out.fileno())
            _check(out.fileno(), self.file, path)
            os.fsync(out.fileno())
        return nbytes


def _copy_file(old: BinaryIO, new: BinaryIO, size: int, path: str) -> None:
    """In the kernel, where a file system may share the blocks; otherwise byte by byte."""
    left = os.fstat(old.fileno()).st_size
    if left != size:  # a sparse file may be larger by terabytes
        raise _other_bytes(path, left, size)
    try:
        while left and (copied := os.copy_file_range(old.fileno(), new.fileno(), left)):
            left -= copied
    except OSError:  # not on this file system
        pass
    if left:
        old.seek(0)
        new.seek(0)
        shutil.copyfileobj(old, new, _PIECE)


def _patch(
    source: Storage, publish: Publish, tensors: Mapping[str, PublishedTensor], fd: int
) -> int:
    """Write a publish's changed blocks into a file."""
    assert publish.delta is not None
    name, size = publish.delta
    nbytes = 0
    with closing(source.join(publish.folder)) as storage:
        slots = header_of(storage, name, size).slots
        for key, tensor in tensors.items():
            at = slots[key].offset if key in slots else size
            for number, low, length in spans(tensor.begin, tensor.end):
                if number not in tensor.blocks:
                    continue
                data = storage.read(name, at, length)
                if crc64(data) != tensor.blocks[number]:
                    raise CorruptCheckpointError(
                        f"{key!r}: bytes {at} to {at + length} differ from what was published",
                        remedy=PUBLISH_IN_FULL,
                        path=file_url(storage.url, name),
                    )
                _write(fd, memoryview(data), low)
                at, nbytes = at + length, nbytes + length
    return nbytes


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _check(fd: int, file: PublishedFile, path: str) -> None:
    """Read a finished file and compare it with its checksum."""
    value, size = 0, os.fstat(fd).st_size
    memory = memoryview(bytearray(min(_PIECE, max(size, 1))))
    at = 0
    # a file of another size, which a sparse one may be by terabytes, is not read
    while at < size == file.size and (count := os.preadv(fd, [memory], at)):
        value, at = crc64(memory[:count], value), at + count
    if (size, value) != (file.size, file.crc64):
        raise _other_bytes(path, size, file.size)


def _other_bytes(path: str, size: int, published: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the file has {size:,} bytes that are not those of the publish ({published:,})",
        remedy=PUBLISH_IN_FULL,
        path=path,
    )


def _remove_ours(host: Directory, folder: str, otherwise: Collection[str]) -> None:
    """Remove the files that were written to the directory of a publish, and the directory if it is
    empty then. The record goes last; without an identity it is no base meanwhile.

    Args:
        otherwise: the names of the files, if the record does not have them, as older ones do not.
    """
    record = _record_of(host, folder)
    if record == _Record():
        return
    files = tuple(otherwise) if record.files is None else record.files
    with host.below(folder) as directory:
        _put_record(directory, _Record(None, files))
        for name in files:
            with suppress(IsADirectoryError, PermissionError):  # a user's directory
                directory.remove(name)
        directory.sync()
        for name in (NEW_RECORD, RECORD):
            directory.remove(name)
    with suppress(OSError):  # a user's files are there
        host.remove_directory(folder)
