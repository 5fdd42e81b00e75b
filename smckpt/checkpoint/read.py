"""Carrying out a read plan: straight into the targets, every block against its checksum."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.blocks import (
    SCRATCH_BYTES,
    BlockReader,
    Readers,
    SavedFile,
    Segment,
    requests,
)
from smckpt.checkpoint.crc import BLOCK
from smckpt.checkpoint.ranges import Direct, Gather, ReadPlan
from smckpt.errors import CorruptCheckpointError
from smckpt.storage.urls import is_s3_url

__all__ = ["ReadStats", "Readers", "execute"]

Task = Callable[[], None]

# Bytes of a request, if the storage takes so many: fewer cost more each, and what little there is
# to read should still keep all threads busy, twice.
_LEAST = 16 << 20

# Threads help who waits. Where a rank has one processor, and the bytes are in the page cache,
# several would take it from each other in the midst of a stretch that is in its caches; and nobody
# waits for a share, so that requests may be large.
_ALONE = 64 << 20  # bytes of a request then
_FEW_WAITS = 2  # of a task: above that it has waited for data


@dataclass(frozen=True)
class ReadStats:
    """Bytes wanted and seconds taken."""

    nbytes: int
    seconds: float


def execute(
    plan: ReadPlan,
    buffers: Sequence[memoryview],
    *,
    threads: int = 4,
    verify: bool = True,
    preverify: bool = False,
    readers: Readers | None = None,
) -> ReadStats:
    """Read everything that the plan says.

    Args:
        plan: made by `plan_local` or `plan_logical`.
        buffers: writable contiguous bytes of each target's local array.
        threads: that read and check.
        verify: check blocks against their checksums.
        preverify: check all needed blocks first, so that a bad one leaves the targets untouched.
        readers: kept open by the caller over many calls, which say then whether to verify.

    Raises:
        CorruptCheckpointError: a block differs, a file is cut short or missing. The targets are
            undefined then, unless `preverify` found it.
    """
    began = time.perf_counter()
    opened = readers or Readers(verify)
    try:
        if preverify:
            checking = opened if verify else Readers(verify=True)
            _run(list(_preverify_tasks(plan, checking)), threads)
        _fill(plan, buffers, opened, threads)
    finally:
        if readers is None:
            opened.close()
    return ReadStats(plan.nbytes, time.perf_counter() - began)


def _fill(plan: ReadPlan, buffers: Sequence[memoryview], readers: Readers, threads: int) -> None:
    copies: list[tuple[memoryview, memoryview]] = []
    try:
        most = max(_LEAST, -(-plan.nbytes // (2 * threads) // BLOCK) * BLOCK)
        crowded = _crowded(plan)
        tasks: Sequence[Task] = [
            *_direct_tasks(plan, buffers, readers, copies, most, _ALONE if crowded else 0),
            *(_gather_task(gather, buffers, readers) for gather in plan.gathers),
        ]
        if crowded:
            tasks = _run_until_one_waits(tasks)
        _run(tasks, threads)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error.message}; the targets are undefined now", remedy=error.remedy, path=error.path
        ) from error
    for source, target in copies:
        target[:] = source


def _crowded(plan: ReadPlan) -> bool:
    """Whether this rank has less than two processors, and reads from a file system."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return False
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    files = (read.file for read in itertools.chain(plan.directs, *(g.reads for g in plan.gathers)))
    return _processors() < 2 * ranks and not any(is_s3_url(file.directory) for file in files)


def _processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_until_one_waits(tasks: Sequence[Task]) -> Sequence[Task]:
    """Run tasks here for as long as none of them waits; gives back those that are left."""
    for done, task in enumerate(tasks, 1):
        before = _waits()
        task()
        if _waits() - before > _FEW_WAITS:
            return tasks[done:]
    return ()


def _waits() -> int:
    """How often this thread gave its processor up, for data or for a lock."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _run(tasks: Sequence[Task], threads: int) -> None:
    """Run all; the first failure cancels what has not begun, waits for the rest, and is raised."""
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


def _direct_tasks(
    plan: ReadPlan,
    buffers: Sequence[memoryview],
    readers: Readers,
    copies: list[tuple[memoryview, memoryview]],
    most: int,
    least: int,
) -> Iterable[Task]:
    by_file: dict[SavedFile, list[Direct]] = {}
    for direct in plan.directs:
        by_file.setdefault(direct.file, []).append(direct)
    for file, directs in by_file.items():
        segments = [Segment(d.offset, buffers[d.target][d.at : d.at + d.nbytes]) for d in directs]
        for layer in _disjoint(segments, copies):
            yield from requests(readers.of(file), layer, most, least)


def _disjoint(
    segments: list[Segment], copies: list[tuple[memoryview, memoryview]]
) -> list[list[Segment]]:
    """Layers of segments that do not overlap. Bytes that several targets want whole (a flat
    parameter's step) are read once and copied."""
    first: dict[tuple[int, int], Segment] = {}
    layers: list[list[Segment]] = [[]]
    for segment in sorted(segments, key=lambda s: (s.offset, s.end)):
        twin = first.setdefault((segment.offset, segment.end), segment)
        if twin is not segment:
            copies.append((twin.buffer, segment.buffer))
            continue
        for layer in layers:
            if not layer or layer[-1].end <= segment.offset:
                layer.append(segment)
                break
        else:
            layers.append([segment])
    return layers


def _preverify_tasks(plan: ReadPlan, readers: Readers) -> Iterable[Task]:
    needed: dict[SavedFile, set[int]] = {}
    for read in itertools.chain(plan.directs, *(g.reads for g in plan.gathers)):
        if read.nbytes:
            last = (read.offset + read.nbytes - 1) // BLOCK
            needed.setdefault(read.file, set()).update(range(read.offset // BLOCK, last + 1))
    for file, blocks in needed.items():
        reader = readers.of(file)
        most = min(reader.storage.request_bytes, SCRATCH_BYTES) // BLOCK
        for first, last in _stretches(sorted(blocks), most):
            yield _check(reader, first * BLOCK, min(last * BLOCK, reader.size))


def _stretches(blocks: Sequence[int], most: int) -> Iterable[tuple[int, int]]:
    """Runs [first, last) of consecutive numbers, at most `most` long."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1 or at - start >= most:
            yield blocks[start], blocks[at - 1] + 1
            start = at


def _check(reader: BlockReader, low: int, high: int) -> Task:
    return lambda: reader.fill(low, high, [])


def _gather_task(gather: Gather, buffers: Sequence[memoryview], readers: Readers) -> Task:
    chosen = [(readers.of(read.file), read) for read in gather.reads]

    def run() -> None:
        scratch = readers.scratch.take("gather", gather.nbytes)
        for reader, read in chosen:
            reader.read_range(read.offset, scratch[read.at : read.at + read.nbytes])
        _strided_copy(gather, scratch, buffers[gather.target])

    return run


def _strided_copy(gather: Gather, scratch: memoryview, target: memoryview) -> None:
    import numpy
    from numpy.lib.stride_tricks import as_strided

    kind = numpy.dtype(f"V{gather.itemsize}")
    if gather.itemsize in (1, 2, 4, 8):
        kind = numpy.dtype(f"u{gather.itemsize}")

    def view(data: memoryview, start: int, strides: Sequence[int]) -> Any:
        flat = numpy.frombuffer(data, dtype=kind)[start:]
        return as_strided(flat, gather.sizes, [s * gather.itemsize for s in strides])

    source = view(scratch, 0, gather.source_strides)
    view(target, gather.start, gather.strides)[...] = source
