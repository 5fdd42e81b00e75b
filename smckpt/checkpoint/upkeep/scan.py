"""One pass over data files: each wanted block is read once and compared with its checksum, and goes
to every sink that wants it.

Files begin in order, and so do their pieces; several threads read. A scan raises nothing about the
bytes. What is missing, cut, unreadable or different, the `ScannedFile` says, and the piece of it.
The first exception of a sink ends the scan.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from smckpt.calls import Threads
from smckpt.checkpoint.reading.blocks import SavedFile, Scratch, not_missing
from smckpt.checkpoint.reading.read import Meter, Progress
from smckpt.checkpoint.records.crc import BLOCK, combine, crc64
from smckpt.checkpoint.records.format import FileRecord
from smckpt.errors import CheckpointError
from smckpt.storage import Storage

PIECE = 8 * BLOCK  # bytes that a thread reads at once, if no sink wants more

T = TypeVar("T")


class ScannedFile:
    """A data file, and what a scan has found out about it. Thread-safe.

    sums: number of a block → its checksum as it is now. faults: why bytes could not be read.
    """

    def __init__(self, saved: SavedFile) -> None:
        self.saved = saved
        self.record: FileRecord = saved.summed
        self.sums: dict[int, int] = {}
        self.faults: list[CheckpointError] = []
        # found out once; two threads may do it at once, and without a lock for all files
        self._there: tuple[int | None] | None = None
        self._unproven: tuple[CheckpointError | None] | None = None

    @property
    def path(self) -> str:
        return self.saved.path

    @property
    def there(self) -> int | None:
        """How many bytes the file has; None if it is missing, which is one of the faults then."""
        if self._there is None:
            size: int | None = None
            try:
                with not_missing(self.path):
                    size = self.saved.storage.size(self.record.name)
            except CheckpointError as error:
                self.faults.append(error)
            self._there = (size,)
        return self._there[0]

    @property
    def stop(self) -> int:
        """Where reading ends: at the recorded size, or where a sink saw that the file ends."""
        size = self.record.size
        return size if self._there is None else min(size, self._there[0] or 0)

    @property
    def unproven(self) -> CheckpointError | None:
        """Why no checksum tells which block is wrong: the file of checksums is damaged."""
        if self._unproven is None:
            error: CheckpointError | None = None
            try:
                self.saved.stored_sums()
            except CheckpointError as found:
                error = found
            self._unproven = (error,)
        return self._unproven[0]

    def differing(self, blocks: Iterable[int] | None = None) -> list[int]:
        """Those blocks that were read and are not what was written; by default of all."""
        if self.unproven is not None:
            return []
        seen = sorted(self.sums) if blocks is None else blocks
        return [n for n in seen if n in self.sums and self.sums[n] != self.saved.stored_sum(n)]

    def read(self, low: int, data: memoryview) -> CheckpointError | None:
        """Fill `data` with the bytes from `low`, a block's first; why they are not what was
        written."""
        blocks = range(low // BLOCK, -(-(low + len(data)) // BLOCK))
        try:
            self.sums.update(self.saved.sums(low, data))
            for _ in range(self.saved.storage.rereads):  # a network may have changed them
                for number in self.differing(blocks):
                    at = number * BLOCK - low
                    self.sums.update(self.saved.sums(low + at, data[at : at + BLOCK]))
        except CheckpointError as error:
            if self.saved.storage.folder is not None and len(data) > BLOCK:
                # a bad sector leaves the other blocks
                parts = range(0, len(data), BLOCK)
                each = [self.read(low + at, data[at : at + BLOCK]) for at in parts]
                return next((fault for fault in each if fault is not None), None)
            self.faults.append(error)
            return error
        if self.unproven is not None:
            return self.unproven
        return next((self.saved.wrong(number) for number in self.differing(blocks)), None)


@dataclass(frozen=True)
class ScannedPiece:
    """Bytes of a file, from `low`. The memory is valid during the call that gets it."""

    file: ScannedFile
    low: int
    fault: CheckpointError | None
    _read: memoryview = field(repr=False)

    def __len__(self) -> int:
        return len(self._read)

    def part(self, low: int, high: int) -> memoryview:
        """Bytes [low, high) of the file, which are in this piece.

        Raises:
            CheckpointError: they are not what was written, or could not be read.
        """
        if self.fault is not None:
            blocks = range(low // BLOCK, -(-high // BLOCK))
            if self.file.unproven is not None or any(n not in self.file.sums for n in blocks):
                raise self.fault
            for number in self.file.differing(blocks):
                raise self.file.saved.wrong(number)
        return self._read[low - self.low : high - self.low]

    @property
    def data(self) -> memoryview:
        """All bytes of the piece; raises as `part`."""
        return self.part(self.low, self.low + len(self))

    @property
    def crc64(self) -> int:
        """The checksum of the bytes, if they are what was written."""
        value, stop = 0, self.low + len(self._read)
        for at in range(self.low, stop, BLOCK):
            value = combine(value, self.file.sums[at // BLOCK], min(BLOCK, stop - at))
        return value


@dataclass(frozen=True)
class WantedBytes:
    """Ascending ranges [start, stop) of a file's bytes that a sink wants, and how many at once: a
    multiple of a block. The pieces that it gets begin and end at blocks."""

    ranges: Sequence[tuple[int, int]]
    step: int = PIECE


class Sink:
    """What takes the bytes of a scan. For each file `begin` is called, then `take` for each piece
    if it wants some, then `end`; by several threads."""

    def begin(self, file: ScannedFile) -> WantedBytes | None:
        """What it wants of a file; by default all that is there. None: nothing."""
        return WantedBytes([(0, file.there or 0)])

    def take(self, piece: ScannedPiece) -> None:
        """Take a piece of a file, in any order."""

    def end(self, file: ScannedFile) -> None:
        """All that is wanted of a file has been taken."""


def scan(
    saved: Iterable[SavedFile],
    sinks: Sequence[Sink],
    *,
    threads: int = 4,
    progress: Progress | None = None,
) -> None:
    """Read what the sinks want of each file, once.

    Args:
        threads: how many threads read and call the sinks.
        progress: called with (bytes done, bytes of all files), one call at a time. Bytes that no
            sink wants are done when their file begins.
    """
    files = [ScannedFile(file) for file in saved]
    meter = Meter(progress, sum(file.record.size for file in files))
    begin = partial(_Reading, sinks=sinks, meter=meter)
    with Workers(threads) as workers:
        begun = workers.do(partial(begin, file) for file in files)
        workers.do_all(
            partial(reading.piece, low, high) for reading in begun for low, high in reading.pieces
        )


class _Reading:
    """A file that is being scanned."""

    def __init__(self, file: ScannedFile, *, sinks: Sequence[Sink], meter: Meter) -> None:
        self._file, self._sinks, self._meter = file, sinks, meter
        asked = [(sink, sink.begin(file)) for sink in sinks]
        self._taking = [sink for sink, wanted in asked if wanted is not None]
        wanted = [each for _, each in asked if each is not None]
        step = max((each.step for each in wanted), default=PIECE)
        # whole blocks that cover all ranges, each once, in pieces of the largest step
        self.pieces: list[tuple[int, int]] = []
        at = 0
        for start, stop in sorted(pair for each in wanted for pair in each.ranges):
            low, high = max(start // BLOCK * BLOCK, at), min(-(-stop // BLOCK) * BLOCK, file.stop)
            if stop > start:
                self.pieces += ((each, min(each + step, high)) for each in range(low, high, step))
                at = max(at, high)
        self._left = len(self.pieces)
        self._lock = threading.Lock()
        unwanted = file.record.size - sum(high - low for low, high in self.pieces)
        if not self.pieces:
            self._end()
        if unwanted:
            meter.add(unwanted)

    def piece(self, low: int, high: int) -> None:
        data = self._file.saved.scratch.take("pieces", high - low)
        piece = ScannedPiece(self._file, low, self._file.read(low, data), data)
        for sink in self._taking:
            sink.take(piece)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._end()
        self._meter.add(high - low)

    def _end(self) -> None:
        for sink in self._sinks:
            sink.end(self._file)


def checksum_at(
    storage: Storage, name: str, size: int, scratch: Scratch | None = None, piece: int = PIECE
) -> int:
    """The checksum of a file as it is in the store now: as the store computed it, or of what reads
    back. `scratch`: memory to read into. `piece`: how many bytes a read has."""
    value = storage.stored_crc64(name)
    if value is None:
        value, scratch = 0, scratch or Scratch()
        for low in range(0, size, piece):
            data = scratch.take("pieces", min(piece, size - low))
            storage.read_into(name, low, [data])
            value = crc64(data, value)
    return value


class Workers:
    """Threads that make calls. Only as many calls begin as keep them busy, because a file that is
    copied stays open from its first piece on."""

    def __init__(self, threads: int) -> None:
        self._pool = Threads(threads, "smckpt-scan")
        self._most = 2 * threads

    def do(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Make calls, a few of them ahead of what is asked for. Gives what they return, in order.
        The first failure ends this."""
        pending: deque[Future[T]] = deque()
        try:
            for call in calls:
                pending.append(self._pool.submit(call))
                if len(pending) > self._most:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def do_all(self, calls: Iterable[Callable[[], None]]) -> None:
        """Make all calls. The first failure ends this."""
        for _ in self.do(calls):
            pass

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
