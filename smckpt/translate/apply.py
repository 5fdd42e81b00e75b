"""Bring a host's directory of a model to a publish, and check every byte of what changed."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from smckpt.calls import alone
from smckpt.checkpoint.crc import crc64
from smckpt.checkpoint.headers import StoredSlot, read_header
from smckpt.checkpoint.sealed import FORMAT_VERSION, open_json, seal_json
from smckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage, access_to
from smckpt.storage.faults import storage_error
from smckpt.storage.posix_write import sync_directory
from smckpt.storage.urls import file_url, is_local, local_path
from smckpt.translate.arguments import check_counts, check_paths
from smckpt.translate.published import (
    RECORD,
    Publish,
    PublishedFile,
    PublishedTensor,
    chain_to,
    spans,
    state_after,
)

__all__ = ["ApplyReport", "apply_published"]

log = logging.getLogger("smckpt")

LATEST = "latest"
_APPLIED = re.compile(r"\d{8,12}", re.ASCII)
_TEMPORARY = ".applying-"
_PIECE = 16 << 20


@dataclass(frozen=True)
class ApplyReport:
    """directory: the model. number: of the publish that it is. nbytes: read from the root."""

    directory: str
    number: int
    nbytes: int
    seconds: float


@alone()
def apply_published(
    root: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    number: int | None = None,
    keep: int = 2,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> ApplyReport:
    """Make `directory/latest` the model that was published, byte for byte.

    `latest` is a symbolic link to a directory of that publish, beside it. It changes at once, when
    the new directory is whole, durable and compared with its checksums. So a server that reads the
    old one is not disturbed. Files that did not change are hard links; of others only the changed
    blocks are read from `root`. If the directory there cannot serve as the base, all is read anew.

    Args:
        root: where `publish` writes, on disk or in S3.
        directory: a directory on this host, or on a file system with hard links and flock.
        number: of the publish; by default the newest.
        keep: how many publishes stay in the directory.
        s3_region: as in `smckpt.load`.
        s3client_config: as in `smckpt.load`.

    Raises:
        CheckpointNotFoundError: there is no such publish.
        CorruptCheckpointError: bytes of the root differ from what was published.
        StorageError: a store refused, or another process applies to this directory.
        UsageError: an argument is wrong.
    """
    began = time.monotonic()
    check_paths(root=root, directory=directory)
    check_counts(keep=keep)
    if not is_local(os.fspath(directory)):
        raise UsageError(
            "models are served from a file system", remedy="pass a local directory",
            path=os.fspath(directory),
        )  # fmt: skip
    place = os.path.abspath(local_path(os.fspath(directory)))
    access = access_to(root, s3_region=s3_region, s3client_config=s3client_config)
    source = access.open(root)
    with ExitStack() as cleanup:
        cleanup.callback(source.close)
        cleanup.enter_context(_locked(place))
        chain = chain_to(source, number)
        target = os.path.join(place, chain[-1].folder)
        nbytes = 0
        if _record_of(target) != chain[-1].identity:
            if os.path.exists(target) and os.path.realpath(os.path.join(place, LATEST)) == (
                os.path.realpath(target)
            ):
                raise UsageError(
                    f"the served directory is not publish {chain[-1].number} of this root",
                    remedy="give each root a directory of its own",
                    path=target,
                )
            nbytes = _made(source, chain, place, target)
        _point(place, chain[-1].folder)
        _forget_old(place, chain[-1].folder, keep)
    return ApplyReport(target, chain[-1].number, nbytes, time.monotonic() - began)


@contextmanager
def _locked(place: str) -> Iterator[None]:
    try:
        os.makedirs(place, exist_ok=True)
        fd = os.open(os.path.join(place, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage_error(error, place, "make") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                "another process applies a publish to this directory",
                remedy="wait for it, or give each its own directory",
                path=place,
            ) from error
        yield
    finally:
        os.close(fd)


def _record_of(directory: str) -> str | None:
    """The identity of the publish that is whole in a directory."""
    path = os.path.join(directory, RECORD)
    try:
        with open(path, "rb") as file:
            return str(open_json(file.read(1 << 16), path).get("identity"))
    except (OSError, CheckpointError):
        return None


def _made(source: Storage, chain: Sequence[Publish], place: str, target: str) -> int:
    """Make the directory `target`. Returns the bytes that were read from the root."""
    bases = [
        (at + 1, directory)
        for at, publish in enumerate(chain[:-1])
        if _record_of(directory := os.path.join(place, publish.folder)) == publish.identity
    ]
    if bases:
        done, base = bases[-1]
        try:
            return _made_from(source, chain, done, base, place, target)
        except (CorruptCheckpointError, OSError) as error:
            log.warning("%s is no base for publish %d: %s", base, chain[-1].number, error)
    try:
        return _made_from(source, chain, 0, None, place, target)
    except OSError as error:
        raise storage_error(error, target, "write") from error


def _made_from(
    source: Storage, chain: Sequence[Publish], done: int, base: str | None, place: str, target: str
) -> int:
    for name in os.listdir(place):  # of processes that were killed; the lock is ours
        if name.startswith(_TEMPORARY):
            shutil.rmtree(os.path.join(place, name))
    making = os.path.join(place, _TEMPORARY + secrets.token_hex(4))
    os.mkdir(making)
    with ExitStack() as on_failure:
        on_failure.callback(shutil.rmtree, making, ignore_errors=True)
        nbytes = 0
        for name, file in state_after(chain).items():
            writers = [(p, p.files[name]) for p in chain[done:] if name in p.files]
            path = os.path.join(making, name)
            if not writers and base is not None:
                os.link(os.path.join(base, name), path)
                continue
            nbytes += _make_file(source, writers, base, path, file)
        body = {"format": list(FORMAT_VERSION), "identity": chain[-1].identity}
        with open(os.path.join(making, RECORD), "wb") as record:
            record.write(seal_json(body))
            record.flush()
            os.fsync(record.fileno())
        sync_directory(making)
        if os.path.lexists(target):  # another publish had this number, or it is half removed
            os.rename(target, os.path.join(place, _TEMPORARY + secrets.token_hex(4)))
        os.rename(making, target)
        on_failure.pop_all()
        sync_directory(place)
    return nbytes


def _make_file(
    source: Storage,
    writers: Sequence[tuple[Publish, PublishedFile]],
    base: str | None,
    path: str,
    file: PublishedFile,
) -> int:
    """One file: its last whole copy, or the base's, and what changed since."""
    wholes = [at for at, (_, each) in enumerate(writers) if each.whole]
    nbytes, later = 0, writers
    with open(path, "xb+", buffering=0) as out:
        if wholes:
            publish, whole = writers[wholes[-1]]
            nbytes += _copy_whole(source, publish, os.path.basename(path), whole.size, out.fileno())
            later = writers[wholes[-1] + 1 :]
        elif base is not None:
            with open(os.path.join(base, os.path.basename(path)), "rb") as old:
                _copy_file(old, out)
        for publish, each in later:
            nbytes += _patch(source, publish, each.tensors, out.fileno())
        _check(out.fileno(), file, path)
        os.fsync(out.fileno())
    return nbytes


def _copy_whole(source: Storage, publish: Publish, name: str, size: int, fd: int) -> int:
    memory = memoryview(bytearray(min(_PIECE, max(size, 1))))
    with closing(source.join(publish.folder)) as storage:
        for low in range(0, size, len(memory)):
            view = memory[: min(len(memory), size - low)]
            storage.read_into(name, low, [view])
            _write(fd, view, low)
    return size


def _copy_file(old: BinaryIO, new: BinaryIO) -> None:
    """In the kernel, where a file system may share the blocks; otherwise byte by byte."""
    left = os.fstat(old.fileno()).st_size
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
        slots = _delta_slots(storage, name, size)
        for key, tensor in tensors.items():
            at = slots[key].offset if key in slots else size
            for number, low, length in spans(tensor.begin, tensor.end):
                if number not in tensor.blocks:
                    continue
                data = storage.read(name, at, length)
                if crc64(data) != tensor.blocks[number]:
                    raise CorruptCheckpointError(
                        f"{key!r}: bytes {at} to {at + length} differ from what was published",
                        remedy="publish in full, with delta=None",
                        path=file_url(storage.url, name),
                    )
                _write(fd, memoryview(data), low)
                at, nbytes = at + length, nbytes + length
    return nbytes


def _delta_slots(storage: Storage, name: str, size: int) -> Mapping[str, StoredSlot]:
    path = file_url(storage.url, name)
    return read_header(lambda low, high: storage.read(name, low, high - low), size, path).slots


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _check(fd: int, file: PublishedFile, path: str) -> None:
    """Read a finished file and compare it with its checksum."""
    value, size = 0, os.fstat(fd).st_size
    memory = memoryview(bytearray(min(_PIECE, max(size, 1))))
    at = 0
    while at < size and (count := os.preadv(fd, [memory], at)):
        value, at = crc64(memory[:count], value), at + count
    if (size, value) != (file.size, file.crc64):
        raise CorruptCheckpointError(
            f"the file has {size:,} bytes that are not those of the publish ({file.size:,})",
            remedy="publish in full, with delta=None",
            path=path,
        )


def _point(place: str, folder: str) -> None:
    """Let `latest` name another directory, at once."""
    link = os.path.join(place, LATEST)
    try:
        if os.path.islink(link) and os.readlink(link) == folder:
            return
        made = os.path.join(place, _TEMPORARY + "link")
        if os.path.lexists(made):
            os.unlink(made)
        os.symlink(folder, made)
        os.replace(made, link)
        sync_directory(place)
    except OSError as error:
        raise storage_error(error, link, "link") from error


def _forget_old(place: str, folder: str, keep: int) -> None:
    """Remove all but the newest directories; never the one that is served."""
    applied = sorted((name for name in os.listdir(place) if _APPLIED.fullmatch(name)), key=int)
    older = [name for name in applied if name != folder]
    for name in older[: max(len(older) - (keep - 1), 0)]:
        with ExitStack() as gone:  # first its record, so that a half removed one is no base
            gone.callback(shutil.rmtree, os.path.join(place, name), ignore_errors=True)
            os.unlink(os.path.join(place, name, RECORD))
    for name in os.listdir(place):
        if name.startswith(_TEMPORARY):
            shutil.rmtree(os.path.join(place, name), ignore_errors=True)
