"""Copy a committed checkpoint to another place, between any two stores.

Bytes are compared with the checkpoint's checksums on the way, so the copy is what was saved. Data
is copied first, then the manifests, then the record. A copy that was killed is not a checkpoint,
and the next copy skips the files that are already whole.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from smckpt.calls import alone
from smckpt.checkpoint.commits.choose import choose_commit, commits_at
from smckpt.checkpoint.commits.contents import (
    Contents,
    GroupContents,
    contents_of,
    noticing_replacement,
)
from smckpt.checkpoint.reading.blocks import SavedFile, Scratch, not_missing
from smckpt.checkpoint.reading.read import Progress
from smckpt.checkpoint.records.crc import BLOCK, hex64
from smckpt.checkpoint.records.format import FileRecord
from smckpt.checkpoint.records.prefixes import spread_over
from smckpt.checkpoint.records.sealed import read_body
from smckpt.checkpoint.upkeep.scan import (
    ScannedFile,
    ScannedPiece,
    Sink,
    WantedBytes,
    Workers,
    checksum_at,
    scan,
)
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    UsageError,
)
from smckpt.storage import FileWriter, Storage, StoreOptions, access_to
from smckpt.storage.urls import file_url

_PIECE = 16 << 20  # bytes that a thread copies at once, if the target does not say


log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class CopyReport:
    """What was copied, and how many files and bytes of data were already there."""

    source: str
    target: str
    identity: str
    files: int
    nbytes: int
    files_present: int
    nbytes_present: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@alone()
def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    threads: int = 4,
    progress: Progress | None = None,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> CopyReport:
    """Copy the newest committed checkpoint at `source` to the directory `target`, byte for byte.

    Only what its record and manifests name is copied. A file that the target already has with the
    size and checksum of the manifest is kept; a file that differs is replaced. Memory: for each
    thread one part of an upload (64 MiB), or 16 MiB between file systems. Every file appears whole.
    If two copies to one place run at once, both succeed or the earlier one fails, and neither
    damages what the other has committed.

    Args:
        threads: how many threads read, check and write.
        progress: called with (bytes done, bytes in total), from any thread, one call at a time.
        storage: as for `smckpt.load`; they apply to both places.

    Raises:
        UsageError: the places are the same, `source` is one group of several, or another
            checkpoint is at `target`.
        CorruptCheckpointError: the source is damaged; nothing was committed at the target.
        CheckpointReplacedError: a newer save has swept the source meanwhile; nothing was committed.
        StorageError: a store refused. The next call keeps what was already copied.
    """
    began = time.monotonic()
    access = access_to(source, target, storage=storage)
    contents = contents_of(access.open(source))
    with ExitStack() as cleanup:
        cleanup.enter_context(noticing_replacement(contents.storage, contents.identity, "copy"))
        copy = _Copy(contents, access.open(target))
        copy.refuse_another()
        cleanup.callback(copy.close)
        workers = cleanup.enter_context(Workers(threads))
        workers.do_all(copy.small_files())
        scan(copy.saved, [copy], threads=threads, progress=progress)
        workers.do_all(copy.manifests())
        copy.record()
    return CopyReport(
        source=contents.url,
        target=copy.target.url,
        identity=contents.identity,
        files=contents.files,
        nbytes=contents.commit.nbytes,
        files_present=copy.files_present,
        nbytes_present=copy.nbytes_present,
        seconds=time.monotonic() - began,
    )


class _Copy(Sink):
    """Puts what a scan reads into the target, and the small files around it. The steps are in the
    order of the methods; several threads may make the calls of a step."""

    def __init__(self, contents: Contents, target: Storage) -> None:
        source = contents.storage
        if source.url == target.url:
            raise UsageError(
                "source and target are the same place",
                remedy="choose another target",
                path=target.url,
            )
        self.contents, self.source, self.target = contents, source, target
        self.files_present = self.nbytes_present = 0
        self._lock = threading.Lock()
        scratch = Scratch()
        self._groups = [
            _GroupCopy(group, target.join(group.directory), scratch) for group in contents.groups
        ]
        self._files = {file.saved: file for group in self._groups for file in group.files}

    @property
    def saved(self) -> Collection[SavedFile]:
        return self._files

    def refuse_another(self) -> None:
        """Refuse a target with another commit, because one of the two would hide the other."""
        ours = {self.contents.identity, *(g.manifest_name for g in self.contents.groups)}
        for directory in [self.target, *(group.target for group in self._groups)]:
            if all(one.name in ours for one in commits_at(directory)):
                continue
            try:
                found = choose_commit(directory).identity
            except CheckpointNotFoundError:
                continue  # left by an unfinished save or copy
            except CheckpointError as error:
                found = f"it cannot be read ({error.message})"
            if found not in ours:
                raise UsageError(
                    f"the target already has another checkpoint: {found}",
                    remedy="choose an empty directory, or remove that checkpoint with `smckpt rm`",
                    path=directory.url,
                )

    def small_files(self) -> Iterator[Callable[[], None]]:
        """Calls that copy parts and checksums."""
        for group in self._groups:
            group.look()
            for part in group.group.manifest.parts:
                read = partial(_bytes, group.group.storage, part.name, part.crc64)
                yield partial(self._put, group, part.name, read)
            for file in group.files:
                sums = file.saved.stored_sums
                yield partial(self._put, group, file.record.crc_name, sums)

    def begin(self, file: ScannedFile) -> WantedBytes | None:
        """Begin a file that the target lacks."""
        copy = self._files[file.saved]
        if copy.present():
            self._count(file.record.size)
            return None
        step = copy.begin()
        return WantedBytes([(0, file.record.size)], step)

    def take(self, piece: ScannedPiece) -> None:
        self._files[piece.file.saved].writer.write_at(piece.low, piece.data, piece.crc64)

    def end(self, file: ScannedFile) -> None:
        """Make a file durable that was begun."""
        self._files[file.saved].finish()

    def manifests(self) -> Iterator[Callable[[], None]]:
        return (partial(self._manifest, group) for group in self._groups)

    def record(self) -> None:
        """Copy the record, which commits several groups."""
        name = self.contents.record
        if name is not None:
            data = _bytes(self.source, name)
            there = any(info.name == name for info in self.target.list(name))
            self._create(self.target, name, data, there)

    def close(self) -> None:
        """Abort unfinished files."""
        with ExitStack() as each:
            each.callback(self.source.close)
            each.callback(self.target.close)
            for group in self._groups:
                each.callback(group.group.storage.close)
                each.callback(group.to.close)
                for file in group.files:
                    each.callback(file.abort)

    # -- one file each ---------------------------------------------------------------------------

    def _put(self, group: _GroupCopy, name: str, read: Callable[[], bytes]) -> None:
        target, data = group.to, read()
        if group.there.get(name) == len(data) and target.read(name) == data:
            self._count(0)
            return
        if name in group.unfinished:
            target.discard_unfinished([name])
        target.overwrite(name, data)

    def _count(self, nbytes: int) -> None:
        """Count a file that is already there."""
        with self._lock:
            self.files_present += 1
            self.nbytes_present += nbytes

    def _manifest(self, group: _GroupCopy) -> None:
        name, crc = group.group.manifest_name, group.group.manifest_crc64
        data = _bytes(group.group.storage, name, crc)
        self._create(group.target, name, data, name in group.there)

    def _create(self, target: Storage, name: str, data: bytes, there: bool) -> None:
        if not target.put_exclusive(name, data) and _bytes(target, name) != data:
            raise StorageError(
                "a file with this name and other bytes is already there",
                remedy="remove it, or choose an empty directory",
                path=file_url(target.url, name),
            )
        if there:
            self._count(0)


class _GroupCopy:
    """The stores from which and to which a group's files are copied.

    there: the sizes of the target's files. unfinished: names of files that were begun there and not
        finished.
    """

    def __init__(self, group: GroupContents, target: Storage, scratch: Scratch) -> None:
        self.group, self.target = group, target
        self.there: dict[str, int] = {}
        self.unfinished: frozenset[str] = frozenset()
        # On a file system, files need not be spread over prefixes.
        self.to = spread_over(target, [group.manifest.spread if target.shards_prefixes else None])
        self.files = [
            _FileCopy(self, SavedFile(store, file, part.rank, scratch))
            for part in group.manifest.parts
            for file in part.files
            for store in [group.storage.holder(file.name)]
        ]

    def look(self) -> None:
        """Look which files the target has, whole or begun by a copy that was killed."""
        self.there = {info.name: info.size for info in self.to.list()}
        try:
            self.unfinished = frozenset(self.to.list_unfinished())
        # we may lack the right to list uploads, although we may write
        except StorageError as error:
            log.warning("unfinished uploads may stay and cost storage: %s", error)


class _FileCopy:
    """One data file at the target. writer: of a file that was begun."""

    writer: FileWriter

    def __init__(self, group: _GroupCopy, saved: SavedFile) -> None:
        self.saved = saved
        self.record: FileRecord = saved.summed
        self.target = group.to
        self._group = group
        self._unfinished = False

    def present(self) -> bool:
        """Whether the target has the whole file. Anything else with its name is replaced later,
        because another copy may still put the whole file there."""
        name, target = self.record.name, self.target
        if self._group.there.get(name) != self.record.size:
            return False
        there = checksum_at(target, name, self.record.size, self.saved.scratch, _PIECE)
        return hex64(there) == self.record.crc64

    def begin(self) -> int:
        """Begin the file. Returns how many bytes to write at once: whole parts of an upload, so
        that no part is gathered in memory again. A small file is one piece and one request."""
        name, target, size = self.record.name, self.target, self.record.size
        if name in self._group.unfinished:
            target.discard_unfinished([name])
        self.writer = target.create_file(name, size, replace=True)
        self._unfinished = True
        small = size if size <= self.saved.storage.request_bytes else 0
        return self.writer.piece or max(_PIECE, -(-small // BLOCK) * BLOCK)

    def finish(self) -> None:
        if self._unfinished:
            self.writer.finish()
            self._unfinished = False

    def abort(self) -> None:
        if self._unfinished:
            self.writer.abort()


def _bytes(storage: Storage, name: str, crc: str | None = None) -> bytes:
    """The bytes of a JSON file whose own checksum, and the given one, are right."""
    with not_missing(storage.path_of(name)):
        return read_body(storage, name, crc)[1]
