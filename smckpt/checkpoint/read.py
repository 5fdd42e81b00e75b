"""Read plans, and how they are carried out: straight into the targets, with every block checked.

A plan is a list of copies out of stored arrays. If a copy has long contiguous runs, each run is
read straight to its place in the target. Otherwise a range of the stored array is read into
scratch, and the copy takes its elements from there.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from smckpt.checkpoint.blocks import (
    SCRATCH_BYTES,
    BlockReader,
    Destination,
    Readers,
    SavedFile,
    requests,
)
from smckpt.checkpoint.catalogue import Stored
from smckpt.checkpoint.crc import BLOCK
from smckpt.errors import CorruptCheckpointError
from smckpt.layout.strided import Box, Copy, elements
from smckpt.layout.strided import execute as copy_elements

__all__ = ["ReadPlan", "ReadStats", "Readers", "StoredCopy", "execute", "same_bytes"]

Task = Callable[[], None]

# Bytes of a request, if the storage takes so many. Smaller requests cost more per byte, but even a
# small read should give each thread two requests.
_LEAST = 16 << 20

# Threads help while a read waits. If a rank has one processor and the bytes are in the page cache,
# several threads would only take the processor from each other, in the middle of a stretch that is
# in its caches. One thread then reads alone, and its requests may be large.
_ALONE = 64 << 20  # bytes of a request of one thread
_FEW_WAITS = 2  # a task with more waits than this has waited for data


RUN_BYTES = 64 << 10  # shorter contiguous runs go through scratch: own reads would cost more


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


@dataclass(frozen=True)
class ReadStats:
    """Bytes wanted and seconds taken."""

    nbytes: int
    seconds: float


def execute(
    plan: ReadPlan,
    buffers: Sequence[memoryview],
    readers: Readers,
    *,
    threads: int = 4,
    preverify: bool = False,
) -> ReadStats:
    """Carry out a read plan.

    Args:
        plan: made by `plan_local` or `plan_logical`.
        buffers: the writable, contiguous bytes of each target's local array.
        readers: read the plan's files, and know whether to compare blocks with their checksums.
            They stay open.
        threads: how many threads read and check.
        preverify: check all needed blocks first, so that a bad block leaves the targets untouched.

    Raises:
        CorruptCheckpointError: a block differs, or a file is cut short or missing. The targets are
            then undefined, unless `preverify` found the fault.
    """
    began = time.perf_counter()
    reads = _Reads(plan, buffers)
    if preverify:
        checking = readers if readers.verify else Readers(readers.access)
        _run(list(reads.checks(checking)), threads)
    reads.fill(readers, threads)
    return ReadStats(reads.nbytes, time.perf_counter() - began)


class _Gather(NamedTuple):
    """`reads` (with offsets in the scratch) fill the scratch with a range of a stored array. Then
    `copy` moves elements of `itemsize` bytes from there to `target`."""

    reads: list[tuple[int, _Range]]
    copy: Copy
    itemsize: int
    target: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of scratch that it needs."""
        return self.copy.source.extent * self.itemsize


class _Range(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file."""

    file: SavedFile
    offset: int
    nbytes: int


class _Reads:
    """A plan as reads: those that go straight to targets, by file, and those that are gathered."""

    def __init__(self, plan: ReadPlan, buffers: Sequence[memoryview]) -> None:
        self.direct: dict[SavedFile, list[Destination]] = {}
        self.gathers: list[_Gather] = []
        for slots, copy, number, itemsize in plan.copies:
            target = buffers[number]
            outer, run = copy.stretch()
            if run * itemsize < RUN_BYTES and math.prod(copy.sizes[:outer]) > 1:
                self.gathers += _gathers(slots, copy, itemsize, target)
                continue
            for low, to, count in copy.runs():
                begin, end = low * itemsize, (low + count) * itemsize
                for at, (file, offset, nbytes) in _ranges(slots, begin, end):
                    place = to * itemsize + at
                    segment = Destination(offset, target[place : place + nbytes])
                    self.direct.setdefault(file, []).append(segment)

    @property
    def nbytes(self) -> int:
        """Bytes that are read from files for targets and for the scratch of gathers."""
        return sum(found.nbytes for found in self._all())

    def _all(self) -> Iterator[_Range]:
        for file, segments in self.direct.items():
            yield from (_Range(file, s.offset, len(s.buffer)) for s in segments)
        for gather in self.gathers:
            yield from (found for _, found in gather.reads)

    def fill(self, readers: Readers, threads: int) -> None:
        repeated: list[tuple[memoryview, memoryview]] = []
        try:
            most = max(_LEAST, -(-self.nbytes // (2 * threads) // BLOCK) * BLOCK)
            crowded = self._crowded(readers)
            least = _ALONE if crowded else 0
            tasks: Sequence[Task] = [
                *(
                    request
                    for file, segments in self.direct.items()
                    for layer in _disjoint(segments, repeated)
                    for request in requests(readers.of(file), layer, most, least)
                ),
                *(_gather_task(gather, readers) for gather in self.gathers),
            ]
            if crowded:
                tasks = _run_until_one_waits(tasks)
            _run(tasks, threads)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"{error.message}; the tensors of the target are now undefined",
                remedy=error.remedy,
                path=error.path,
            ) from error
        for source, target in repeated:
            target[:] = source

    def checks(self, readers: Readers) -> Iterator[Task]:
        """Tasks that compare each wanted block with its checksum and store it nowhere."""
        needed: dict[SavedFile, set[int]] = {}
        for file, offset, nbytes in self._all():
            if nbytes:
                last = (offset + nbytes - 1) // BLOCK
                needed.setdefault(file, set()).update(range(offset // BLOCK, last + 1))
        for file, blocks in needed.items():
            reader = readers.of(file)
            most = max(reader.storage.request_bytes // BLOCK, 1)
            for first, last in _stretches(sorted(blocks), most):
                yield _check(reader, first * BLOCK, min(last * BLOCK, reader.size))

    def _crowded(self, readers: Readers) -> bool:
        """Whether this rank has fewer than two processors and reads from a file system."""
        if not hasattr(resource, "RUSAGE_THREAD"):
            return False
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        places = {found.file.directory for found in self._all()}
        return _processors() < 2 * ranks and all(
            readers.storage(place).is_file_system for place in places
        )


def _gathers(
    slots: Sequence[Stored], copy: Copy, itemsize: int, target: memoryview
) -> Iterator[_Gather]:
    """Cut a copy into parts whose source fits the scratch, by halving the dimension with the widest
    reach."""
    sizes, low, strides = copy.sizes, copy.source.start, copy.source.strides
    extent = copy.source.extent
    if extent * itemsize <= SCRATCH_BYTES or max(sizes) == 1:
        reads = list(_ranges(slots, low * itemsize, (low + extent) * itemsize))
        yield _Gather(reads, copy.from_start(), itemsize, target)
        return
    dim = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * strides[d])
    half = Box((0,) * len(sizes), (*sizes[:dim], sizes[dim] // 2, *sizes[dim + 1 :]))
    for box in (half, *Box.whole(sizes).subtract(half)):
        yield from _gathers(slots, copy.part(box), itemsize, target)


def _ranges(slots: Sequence[Stored], low: int, high: int) -> Iterator[tuple[int, _Range]]:
    """Where bytes [low, high) of a stored array are in files: for each range, the bytes before it
    and the range."""
    done = low
    for file, slot in slots:
        start = slot.start if slot.start > done else done
        stop = slot.stop if slot.stop < high else high
        if stop > start:
            yield start - low, _Range(file, slot.offset + start - slot.start, stop - start)
            done = stop


def same_bytes(
    one: tuple[Sequence[Stored], int],
    other: tuple[Sequence[Stored], int],
    nbytes: int,
    readers: Readers,
) -> bool:
    """Whether `nbytes` of two stored arrays, each from a byte on, are the same.

    Where both lie alike in their files, equal checksums of a block prove it. Other blocks are read.
    """
    mine, theirs = (list(_ranges(slots, low, low + nbytes)) for slots, low in (one, other))
    for at, found in mine:
        for begin, matching in theirs:
            start = max(at, begin)
            common = min(at + found.nbytes, begin + matching.nbytes) - start
            if common > 0 and not _same_range(
                _Range(found.file, found.offset + start - at, common),
                _Range(matching.file, matching.offset + start - begin, common),
                readers,
            ):
                return False
    return True


def _same_range(one: _Range, other: _Range, readers: Readers) -> bool:
    mine, theirs = readers.of(one.file), readers.of(other.file)
    at, stop, shift = one.offset, one.offset + one.nbytes, other.offset - one.offset
    while at < stop:
        block = at // BLOCK
        end = min((block + 1) * BLOCK, stop)
        known = not shift and mine.stored_sum(block) == theirs.stored_sum(block)
        if not known and mine.read(at, end) != theirs.read(at + shift, end + shift):
            return False
        at = end
    return True


def _processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_until_one_waits(tasks: Sequence[Task]) -> Sequence[Task]:
    """Run tasks in this thread as long as none of them waits. Returns the tasks that are left."""
    for done, task in enumerate(tasks, 1):
        before = _waits()
        task()
        if _waits() - before > _FEW_WAITS:
            return tasks[done:]
    return ()


def _waits() -> int:
    """How often this thread gave up its processor to wait for data or a lock."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _run(tasks: Sequence[Task], threads: int) -> None:
    """Run all tasks. The first failure cancels those that have not begun, waits for the others, and
    is raised."""
    if threads == 1 or not tasks:
        for task in tasks:
            task()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="smckpt-read") as pool:
        futures: list[Future[None]] = [pool.submit(task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _disjoint(
    segments: list[Destination], repeated: list[tuple[memoryview, memoryview]]
) -> list[list[Destination]]:
    """Layers of segments that do not overlap. Bytes that several targets need whole (such as the
    step of a flat parameter) are read once and copied."""
    first: dict[tuple[int, int], Destination] = {}
    layers: list[list[Destination]] = [[]]
    for segment in sorted(segments, key=lambda s: (s.offset, s.end)):
        same = first.setdefault((segment.offset, segment.end), segment)
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


def _check(reader: BlockReader, low: int, high: int) -> Task:
    return lambda: reader.fill(low, high, [])


def _gather_task(gather: _Gather, readers: Readers) -> Task:
    chosen = [(readers.of(found.file), at, found) for at, found in gather.reads]

    def run() -> None:
        scratch = readers.scratch.take("gather", gather.nbytes)
        for reader, at, (_, offset, nbytes) in chosen:
            reader.read_range(offset, scratch[at : at + nbytes])
        source, target = (elements(data, gather.itemsize) for data in (scratch, gather.target))
        copy_elements(gather.copy, source, target)

    return run
