"""Read plans, and how they are carried out: straight into the targets, with every block checked.

A plan is a list of copies out of stored arrays. If a copy has long contiguous runs, each run is
read straight to its place in the target. Otherwise a range of the stored array is read into
scratch, and the copy takes its elements from there.
"""

from __future__ import annotations

import math
import os
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from smckpt.calls import in_threads
from smckpt.checkpoint.reading.blocks import (
    SCRATCH_BYTES,
    Destination,
    HostMemory,
    SavedFile,
    Span,
    requests,
)
from smckpt.checkpoint.reading.catalogue import Stored
from smckpt.checkpoint.records.crc import BLOCK
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.strided import Box, Copy, elements
from smckpt.layout.strided import execute as copy_elements

Task = Callable[[], None]

# Bytes of a request, if the storage takes so many. Smaller requests cost more per byte, but even a
# small read should give each thread two requests.
_LEAST = 16 << 20

# Threads help while a read waits. If a rank has one processor and the bytes are in the page cache,
# several threads would only take the processor from each other, in the middle of a stretch that is
# in its caches. One thread then reads alone, and its requests may be large.
_ALONE = 64 << 20  # bytes of a request of one thread
_FEW_WAITS = 2  # a task with more waits than this has waited for data


# shorter contiguous runs go through scratch: a read of its own would cost more
RUN_BYTES = 64 << 10


class StoredCopy(NamedTuple):
    """A copy out of a stored array to target number `target`. Files hold the array in `slots`; an
    element has `itemsize` bytes."""

    slots: Sequence[Stored]
    copy: Copy
    target: int
    itemsize: int


@dataclass
class ReadPlan:
    """What one rank reads. Targets are numbered in the order of the entries.

    missing: names that only the target has. unexpected: names that only the checkpoint has. Both
        are empty in a strict plan.
    """

    copies: list[StoredCopy] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class SharedReads(Protocol):
    """Reads of one plan that ranks share. reads: what this rank reads for itself alone."""

    reads: Reads

    @property
    def heard(self) -> Exception | None:
        """The error of another rank, which ends the load here."""

    def tasks(self, ring: HostMemory | None) -> Sequence[Task]:
        """What this rank reads for itself and others."""

    def finish(self) -> None:
        """Wait until this rank has all from the others, and they have all from it."""


def execute(
    copies: Sequence[StoredCopy],
    buffers: Sequence[Span],
    *,
    threads: int = 4,
    preverify: bool = False,
    progress: Progress | None = None,
    ring: HostMemory | None = None,
    shared: SharedReads | None = None,
) -> int:
    """Carry out a read plan; how many bytes of blocks the stores were asked for.

    Args:
        copies: of a plan.
        buffers: the writable, contiguous bytes of each target's local array.
        threads: how many threads read and check.
        preverify: check all needed blocks first, so that a bad block leaves the targets untouched.
        progress: called with (requests done, requests in all), one call at a time.
        ring: fills the buffers that are a device's memory. No copy may scatter into those.
        shared: the reads of this plan that ranks share.

    Raises:
        CorruptCheckpointError: a block differs, or a file is cut short or missing. The targets are
            then undefined, unless `preverify` found the fault.
    """
    reads = Reads(copies, buffers) if shared is None else shared.reads
    files = {file for stored in copies for file, _ in stored.slots}
    before = sum(file.fetched for file in files)
    if preverify:
        in_threads(lambda check: check(), reads.checks(), threads, "smckpt-read")
    reads.fill(threads, progress, ring, shared)
    return sum(file.fetched for file in files) - before


class Reads:
    """A plan as reads: those that go straight to targets, by file, and copies whose source is first
    read into scratch."""

    def __init__(self, copies: Sequence[StoredCopy], buffers: Sequence[Span]) -> None:
        self.direct: dict[SavedFile, list[Destination]] = {}
        self.gathers: list[StoredCopy] = []
        self.buffers = buffers
        for stored in copies:
            slots, copy, number, itemsize = stored
            target = buffers[number]
            if _scatters(stored):
                self.gathers += _fitting(stored)
                continue
            for low, to, count in copy.runs():
                begin, end = low * itemsize, (low + count) * itemsize
                for at, file, offset, nbytes in ranges(slots, begin, end):
                    position = to * itemsize + at
                    segment = Destination(offset, target[position : position + nbytes])
                    self.direct.setdefault(file, []).append(segment)

    @property
    def nbytes(self) -> int:
        """Bytes that are read from files for targets and for the scratch of gathers."""
        return sum(nbytes for _, _, nbytes in self._all())

    def _all(self) -> Iterator[tuple[SavedFile, int, int]]:
        """File, offset and length of each read."""
        for file, segments in self.direct.items():
            yield from ((file, s.offset, len(s.buffer)) for s in segments)
        for stored in self.gathers:
            yield from ((file, offset, nbytes) for _, file, offset, nbytes in source_of(stored))

    def files(self) -> set[SavedFile]:
        return {file for file, _, nbytes in self._all() if nbytes}

    def needs(self) -> dict[str, list[int]]:
        """The bytes of all blocks that are read: path → the first byte and the end of each run of
        blocks, one after the other."""
        bounds: dict[SavedFile, list[tuple[int, int]]] = {}
        for file, offset, nbytes in self._all():
            if nbytes:
                end = min(-(-(offset + nbytes) // BLOCK) * BLOCK, file.record.size)
                bounds.setdefault(file, []).append((offset // BLOCK * BLOCK, end))
        needed: dict[str, list[int]] = {}
        for file, runs in bounds.items():
            joined = needed[file.path] = [*min(runs)]
            for low, high in sorted(runs):
                if low > joined[-1]:
                    joined += low, high
                joined[-1] = max(joined[-1], high)
        return needed

    def fill(
        self,
        threads: int,
        progress: Progress | None,
        ring: HostMemory | None,
        shared: SharedReads | None = None,
    ) -> None:
        repeated: list[tuple[Any, Any]] = []
        try:
            most = max(_LEAST, -(-self.nbytes // (2 * threads) // BLOCK) * BLOCK)
            # fewer than two processors, and all files on a file system
            crowded = (
                hasattr(resource, "RUSAGE_THREAD")
                and share_of_processors() < 2
                and all(file.storage.folder is not None for file, *_ in self._all())
            )
            least = _ALONE if crowded else ring.request_bytes if ring else 0
            tasks: Sequence[Task] = [
                *(shared.tasks(ring) if shared is not None else ()),
                *(
                    request
                    for file, segments in self.direct.items()
                    for layer in _disjoint(segments, repeated)
                    for request in requests(file, layer, most, least, ring)
                ),
                *(partial(_gather, stored, self.buffers[stored.target]) for stored in self.gathers),
            ]
            meter = Meter(progress, len(tasks))

            def carry_out(task: Task) -> None:
                task()
                meter.add(1)

            if crowded:
                tasks = _until_one_waits(tasks, carry_out)
            in_threads(carry_out, tasks, threads, "smckpt-read")
            if shared is not None:
                shared.finish()
            if ring is not None:
                ring.finish()
        except CorruptCheckpointError as error:
            if shared is not None and error is shared.heard:
                raise
            raise CorruptCheckpointError(
                f"{error.message}; the tensors of the target are now undefined",
                remedy=error.remedy,
                path=error.path,
            ) from error
        for source, target in repeated:
            target[:] = source

    def checks(self) -> Iterator[Task]:
        """Tasks that compare each wanted block with its checksum and store it nowhere."""
        needed: dict[SavedFile, set[int]] = {}
        for file, offset, nbytes in self._all():
            if nbytes:
                last = (offset + nbytes - 1) // BLOCK
                needed.setdefault(file, set()).update(range(offset // BLOCK, last + 1))
        for file, blocks in needed.items():
            most = max(file.storage.request_bytes // BLOCK, 1)
            for first, last in _stretches(sorted(blocks), most):
                low, high = first * BLOCK, min(last * BLOCK, file.size)
                yield partial(file.fill, low, high, [])


def _fitting(stored: StoredCopy) -> Iterator[StoredCopy]:
    """Cut a copy into parts whose source fits the scratch."""
    copy = stored.copy
    if copy.source.extent * stored.itemsize <= SCRATCH_BYTES or max(copy.sizes) == 1:
        yield stored
        return
    for part in halves(stored):
        yield from _fitting(part)


def halves(stored: StoredCopy) -> Iterator[StoredCopy]:
    """Both halves of a copy along the dimension with the widest reach."""
    sizes, strides = stored.copy.sizes, stored.copy.source.strides
    dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * strides[d])
    half = Box((0,) * len(sizes), (*sizes[:dim], sizes[dim] // 2, *sizes[dim + 1 :]))
    for box in (half, *Box.whole(sizes).subtract(half)):
        yield stored._replace(copy=stored.copy.part(box))


def source_of(stored: StoredCopy) -> Iterator[tuple[int, SavedFile, int, int]]:
    """Where the range that the copy's source spans is in files."""
    source, itemsize = stored.copy.source, stored.itemsize
    return ranges(stored.slots, source.start * itemsize, (source.start + source.extent) * itemsize)


def ranges(
    slots: Sequence[Stored], low: int, high: int
) -> Iterator[tuple[int, SavedFile, int, int]]:
    """Where bytes [low, high) of a stored array are in files: for each range the bytes before it,
    the file, the offset in it and the length."""
    done = low
    for file, slot in slots:
        start = slot.start if slot.start > done else done
        stop = slot.stop if slot.stop < high else high
        if stop > start:
            yield start - low, file, slot.offset + start - slot.start, stop - start
            done = stop


def same_bytes(
    one: tuple[Sequence[Stored], int], other: tuple[Sequence[Stored], int], nbytes: int
) -> bool:
    """Whether `nbytes` bytes of two stored arrays, each from its own start, are the same.

    If both arrays have the same offset within their blocks, equal checksums prove a block equal.
    Other blocks are read.
    """
    mine, theirs = (list(ranges(slots, low, low + nbytes)) for slots, low in (one, other))
    for at, file, offset, length in mine:
        for begin, matching, position, size in theirs:
            start = max(at, begin)
            common = min(at + length, begin + size) - start
            if common > 0 and not _same_range(
                file, offset + start - at, matching, position + start - begin, common
            ):
                return False
    return True


def _same_range(
    mine: SavedFile, start: int, theirs: SavedFile, other_start: int, nbytes: int
) -> bool:
    at, stop, shift = start, start + nbytes, other_start - start
    while at < stop:
        block = at // BLOCK
        end = min((block + 1) * BLOCK, stop)
        known = not shift and mine.stored_sum(block) == theirs.stored_sum(block)
        if not known and mine.read(at, end) != theirs.read(at + shift, end + shift):
            return False
        at = end
    return True


def scattered(copies: Sequence[StoredCopy]) -> frozenset[int]:
    """The targets that some copy fills in short runs, which go through scratch."""
    return frozenset(stored.target for stored in copies if _scatters(stored))


def _scatters(stored: StoredCopy) -> bool:
    outer, run = stored.copy.stretch()
    return run * stored.itemsize < RUN_BYTES and math.prod(stored.copy.sizes[:outer]) > 1


def share_of_processors() -> int:
    """How many of the host's processors this rank may count on."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    processors = os.cpu_count() or 1 if usable is None else len(usable)
    return processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _until_one_waits(tasks: Sequence[Task], carry_out: Callable[[Task], None]) -> Sequence[Task]:
    """Carry out tasks in this thread until one of them has waited for data. Returns the tasks that
    are left."""
    for done, task in enumerate(tasks, 1):
        before = _waits()
        carry_out(task)
        if _waits() - before > _FEW_WAITS:
            return tasks[done:]
    return ()


def _waits() -> int:
    """How often this thread gave up its processor to wait for data or a lock."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _disjoint(
    segments: list[Destination], repeated: list[tuple[Any, Any]]
) -> list[list[Destination]]:
    """Layers of segments that do not overlap. Bytes that several targets need whole (such as the
    step of a flat parameter) are read once and copied, within one kind of memory."""
    first: dict[tuple[int, int, type], Destination] = {}
    layers: list[list[Destination]] = [[]]
    for segment in sorted(segments, key=lambda s: (s.offset, s.end)):
        same = first.setdefault((segment.offset, segment.end, type(segment.buffer)), segment)
        if same is not segment:
            repeated.append((same.buffer, segment.buffer))
            continue
        for layer in layers:
            if not layer or layer[-1].end <= segment.offset:
                layer.append(segment)
                break
        else:
            layers.append([segment])
    return layers


def _stretches(blocks: Sequence[int], most: int) -> Iterable[tuple[int, int]]:
    """Runs [first, last) of consecutive numbers, at most `most` long."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1 or at - start >= most:
            yield blocks[start], blocks[at - 1] + 1
            start = at


def _gather(stored: StoredCopy, buffer: Span) -> None:
    """Read the range that the copy's source spans into scratch, and copy from there to `buffer`."""
    assert isinstance(buffer, memoryview)  # `scattered` has named it
    nbytes = stored.copy.source.extent * stored.itemsize
    scratch = stored.slots[0][0].scratch.take("gather", nbytes)
    for at, file, offset, length in source_of(stored):
        file.read_range(offset, scratch[at : at + length])
    source, target = (elements(data, stored.itemsize) for data in (scratch, buffer))
    copy_elements(stored.copy.from_start(), source, target)


Progress: TypeAlias = Callable[[int, int], None]  # called with bytes done and bytes in all


class Meter:
    """Counts bytes of several threads, and reports one count at a time."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
