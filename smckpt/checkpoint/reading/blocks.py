"""Data files are read in blocks of one MiB. Each block is compared with its checksum as it is read.

The wanted parts of a block are read straight to where they belong, the rest into scratch. The
checksum is taken right after the read, while the bytes are in the processor's cache.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from smckpt.checkpoint.records.crc import BLOCK, combined, crc64, hex64, unpacked_sums
from smckpt.checkpoint.records.format import FileRecord
from smckpt.checkpoint.records.sealed import sound
from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from smckpt.storage import Access, Storage
from smckpt.storage.urls import file_url

SCRATCH_BYTES = 16 << 20  # per thread, for bytes that are read but not wanted
DISK = "use an older checkpoint, and check the disk"


@dataclass(frozen=True)
class OtherFile:
    """A file of another system, without checksums of ours."""

    name: str
    size: int


class Span(Protocol):
    """Bytes that a load fills: a memoryview, or a device's memory, which `HostMemory` fills."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Span: ...


class Destination(NamedTuple):
    """Where the bytes from `offset` of a file belong."""

    offset: int
    buffer: Span

    @property
    def end(self) -> int:
        return self.offset + len(self.buffer)


class HostMemory(Protocol):
    """Host memory for the time of a read, in place of a device's (`smckpt.staging.ring`).

    request_bytes: how many bytes one read should ask for.
    """

    request_bytes: int

    def lent(
        self, segments: Sequence[Destination]
    ) -> AbstractContextManager[Sequence[Destination]]: ...

    def finish(self) -> None: ...


@contextmanager
def not_missing(path: str) -> Iterator[None]:
    """Turn "not found" into damage: the manifest names the file, so the checkpoint exists."""
    try:
        yield
    except CheckpointNotFoundError as error:
        raise CorruptCheckpointError(
            "a file of the checkpoint is missing",
            remedy="find out what deletes files there; use an older checkpoint",
            path=path,
        ) from error


class Scratch(threading.local):
    """Reusable memory of one thread, by purpose. Fresh pages would cost more than the copy. It is
    page-aligned, which direct writes need."""

    def __init__(self) -> None:
        self._memory: dict[str, memoryview] = {}

    def take(self, purpose: str, size: int) -> memoryview:
        """`size` bytes with undefined content, valid until this thread's next call."""
        have = self._memory.get(purpose)
        if have is None or len(have) < size:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            have = memoryview(mmap.mmap(-1, max(size, 1), flags=private))
            self._memory[purpose] = have
        return have[:size]


class _WrongBytesError(CorruptCheckpointError):
    """A block differs from what was written, or was changed on its way here."""


class SavedFile:
    """A data file, and the rank that wrote it. What is read of it is checked block by block. A
    catalogue makes one of each file, so they are compared by identity. Thread-safe."""

    def __init__(
        self, storage: Storage, record: FileRecord | OtherFile, rank: int, scratch: Scratch
    ) -> None:
        self.storage = storage
        self.record = record
        self.rank = rank
        self.size = record.size
        self.scratch = scratch
        self.fetched = 0  # bytes of the file that the store was asked for
        self._counting = threading.Lock()
        self._lock = threading.Lock()
        self._sums: tuple[bytes, Sequence[int]] | None = None

    @cached_property
    def path(self) -> str:
        return file_url(self.storage.url, self.record.name)

    @property
    def summed(self) -> FileRecord:
        """The record of a file of ours, which names its checksums."""
        assert isinstance(self.record, FileRecord)
        return self.record

    def fill(self, low: int, high: int, segments: Sequence[Destination]) -> None:
        """Read bytes [low, high) into disjoint, ordered segments. The range is aligned to blocks,
        except at the file's end. Bytes between the segments go to scratch.

        Raises:
            CorruptCheckpointError: a block differs; names file and offset.
        """
        for tries_left in reversed(range(1 + self.storage.rereads)):
            sums = _BlockSums(low, self._compare, self._compare_run)
            try:
                self._fetch(low, high, segments, sums.add)
                sums.end()
                return
            except _WrongBytesError as error:
                if not tries_left:
                    raise CorruptCheckpointError(
                        error.message, remedy=error.remedy, path=error.path
                    ) from None

    def sums(self, low: int, target: memoryview) -> list[tuple[int, int]]:
        """Fill `target` with the bytes from `low`, a block's first; (number, checksum) of each of
        the blocks as it is now. Nothing is compared."""
        found: list[tuple[int, int]] = []
        sums = _BlockSums(low, lambda block, value: found.append((block, value)))
        name = self.record.name
        with not_missing(self.path):
            if len(target) == self.size <= self.storage.request_bytes:  # in one request
                self.storage.fetch(name, target)
                sums.add(target)
            else:
                self.storage.read_into(name, low, [target], sums.add)
        sums.end()
        return found

    def read(self, start: int, stop: int) -> bytearray:
        """The bytes [start, stop). All their blocks are checked."""
        data = bytearray(stop - start)
        self.read_range(start, memoryview(data))
        return data

    def read_range(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset`. All their blocks are checked."""
        for request in requests(self, [Destination(offset, target)]):
            request()

    def stored_sum(self, block: int) -> int:
        """The checksum that was recorded for a block.

        Raises:
            CorruptCheckpointError: the file of checksums is damaged or missing.
        """
        return self._stored()[1][block]

    def stored_sums(self) -> bytes:
        """The file of checksums, compared with the manifest's checksum of the whole data file.

        Raises:
            CorruptCheckpointError: it is damaged or missing.
        """
        return self._stored()[0]

    def _stored(self) -> tuple[bytes, Sequence[int]]:
        known = self._sums  # no lock once it is known: each block asks for it
        if known is None:
            with self._lock:
                known = self._sums = self._sums or self._load_sums()
        return known

    def _fetch(
        self,
        low: int,
        high: int,
        segments: Sequence[Destination],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        """Read as `fill` does, and compare nothing; `seen` gets what was read."""
        with self._counting:
            self.fetched += high - low
        wanted = sum(len(segment.buffer) for segment in segments)
        spare = self.scratch.take("gaps", high - low - wanted)
        pieces: list[memoryview] = []
        at, used = low, 0
        for segment in segments:
            if segment.offset > at:
                gap = segment.offset - at
                pieces.append(spare[used : used + gap])
                used += gap
            assert isinstance(segment.buffer, memoryview)  # a ring has put it there
            pieces.append(segment.buffer)
            at = segment.end
        if at < high:
            pieces.append(spare[used:])
        with not_missing(self.path):
            self.storage.read_into(self.record.name, low, pieces, seen)

    def _compare(self, block: int, value: int) -> None:
        if value == self.stored_sum(block):
            return
        raise self.wrong(block)

    def _compare_run(self, block: int, count: int, value: int) -> bool:
        """Whether that is the checksum of `count` whole blocks together."""
        return value == combined(self._stored()[1][block : block + count], count * BLOCK)

    def wrong(self, block: int) -> CorruptCheckpointError:
        """What is raised of a block that differs."""
        return _WrongBytesError(
            f"bytes {block * BLOCK} to {min((block + 1) * BLOCK, self.size)} of "
            f"{self.record.name} differ from what was written (checksum differs)",
            remedy=DISK,
            path=self.path,
        )

    def _load_sums(self) -> tuple[bytes, Sequence[int]]:
        """The bytes of the checksum file, and the checksum of each block. The file is compared with
        the data file's checksum in the manifest."""
        name = self.summed.crc_name
        path = file_url(self.storage.url, name)
        blocks = -(-self.size // BLOCK)

        def read() -> tuple[bytes, Sequence[int]]:
            data = self.storage.read(name, most=8 * blocks)
            sums = unpacked_sums(data)
            right = self.summed.crc64
            if len(data) != 8 * blocks or hex64(combined(sums, self.size)) != right:
                raise CorruptCheckpointError(
                    f"the checksums in {name} do not belong to {self.record.name}",
                    remedy=DISK,
                    path=path,
                )
            return data, sums

        with not_missing(path):
            return sound(self.storage, read)


class Stores:
    """The stores from which the files of a checkpoint are read, one for each directory.
    Thread-safe."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.scratch = Scratch()
        self._lock = threading.Lock()
        self._storages: dict[str, Storage] = {}

    def storage(self, directory: str) -> Storage:
        with self._lock:
            if directory not in self._storages:
                self._storages[directory] = self.access.open(directory)
            return self._storages[directory]

    def file(self, directory: str, record: FileRecord, rank: int) -> SavedFile:
        return SavedFile(self.storage(directory), record, rank, self.scratch)

    @property
    def retries(self) -> int | None:
        """How many requests were sent again; None if the stores do not count them."""
        with self._lock:
            counts = [storage.retries for storage in self._storages.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def close(self) -> None:
        with self._lock:
            for storage in self._storages.values():
                storage.close()


def requests(
    file: SavedFile,
    segments: Sequence[Destination],
    most: int | None = None,
    least: int = 0,
    ring: HostMemory | None = None,
) -> Iterable[Callable[[], None]]:
    """Requests of whole blocks that together fill the disjoint, ordered segments. Each request has
    at most `most` bytes, and at most what the storage takes well at once (or `least`, if that is
    more). Segments on a device need a ring."""
    limit = max(min(most or file.storage.request_bytes, file.storage.request_bytes), least)
    pending = [s for s in segments if len(s.buffer)]
    at = 0
    while at < len(pending):
        low = pending[at].offset // BLOCK * BLOCK
        high = min(low + limit, file.size)
        inside: list[Destination] = []
        unwanted = 0
        while at < len(pending) and pending[at].offset < high:
            segment = pending[at]
            if inside:
                # Blocks that nobody wants, between two distant segments, are left out.
                if segment.offset // BLOCK > -(-inside[-1].end // BLOCK):
                    break
                unwanted += segment.offset - inside[-1].end
                if unwanted > SCRATCH_BYTES:
                    break
            if segment.end <= high:
                inside.append(segment)
                at += 1
                continue
            cut = high - segment.offset
            inside.append(Destination(segment.offset, segment.buffer[:cut]))
            pending[at] = Destination(high, segment.buffer[cut:])
            break
        end = min(-(-inside[-1].end // BLOCK) * BLOCK, file.size)
        yield _request(file, low, end, inside, ring)


def _request(
    file: SavedFile, low: int, high: int, segments: list[Destination], ring: HostMemory | None
) -> Callable[[], None]:
    if ring is None:
        return lambda: file.fill(low, high, segments)

    def run() -> None:
        with ring.lent(segments) as hosts:
            file.fill(low, high, hosts)

    return run


class _BlockSums:
    """Computes the checksums of blocks from consecutive stretches that begin at byte `low`. As soon
    as a block is complete, `done` gets its number and checksum.

    Args:
        same: whether the blocks from a number on, so many, have a checksum together. Several blocks
            at once cost threads fewer waits for the interpreter; `done` gets those that differ.
    """

    def __init__(
        self,
        low: int,
        done: Callable[[int, int], None],
        same: Callable[[int, int, int], bool] | None = None,
    ) -> None:
        self._block = low // BLOCK
        self._done, self._same = done, same
        self._have = 0
        self._value = 0

    def add(self, stretch: memoryview) -> None:
        at, size = 0, len(stretch)
        if self._have + size <= BLOCK:  # the usual case needs no slicing
            self._value = crc64(stretch, self._value)
            self._have += size
            if self._have == BLOCK:
                self.end()
            return
        if self._same is not None and not self._have:
            blocks = size // BLOCK
            if self._same(self._block, blocks, crc64(stretch[: blocks * BLOCK])):
                self._block, at = self._block + blocks, blocks * BLOCK
        while at < size:
            take = min(BLOCK - self._have, size - at)
            self._value = crc64(stretch[at : at + take], self._value)
            at, self._have = at + take, self._have + take
            if self._have == BLOCK:
                self.end()

    def end(self) -> None:
        """Finish the last block, which is shorter than the others."""
        if self._have:
            self._done(self._block, self._value)
            self._block, self._have, self._value = self._block + 1, 0, 0
