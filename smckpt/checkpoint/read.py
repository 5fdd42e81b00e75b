"""Carrying out a read plan: straight into the targets, every block against its checksum.

Files are read in whole blocks of one MiB, the unit of the checksums: the parts of a block that
targets want are read into them, the rest into scratch, and the checksum is chained over the pieces
right after the read, while they are in the cache.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.catalogue import SavedFile
from smckpt.checkpoint.crc import BLOCK, combine, crc64, hex64
from smckpt.checkpoint.plan import Direct, Gather, ReadPlan
from smckpt.errors import CorruptCheckpointError
from smckpt.storage import Storage, open_storage

__all__ = ["BlockReader", "ReadStats", "Readers", "execute", "read_range"]

REQUEST = 8 << 20  # bytes a thread reads at once


@dataclass(frozen=True)
class ReadStats:
    """Bytes wanted and seconds taken."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Segment:
    offset: int
    buffer: memoryview

    @property
    def end(self) -> int:
        return self.offset + len(self.buffer)


class BlockReader:
    """Reads of one file, checked block by block. Thread-safe."""

    def __init__(self, storage: Storage, file: SavedFile, verify: bool) -> None:
        self.storage = storage
        self.file = file
        self.size = file.record.size
        self._verify = verify
        self._lock = threading.Lock()
        self._sums: memoryview | None = None

    def fill(self, low: int, high: int, segments: Sequence[_Segment]) -> None:
        """Read bytes [low, high), block-aligned but at the file's end, into disjoint segments in
        order; what lies between them goes to scratch.

        Raises:
            CorruptCheckpointError: a block differs; names file and offset.
        """
        pieces: list[memoryview] = []
        at = low
        for segment in segments:
            if segment.offset > at:
                pieces.append(memoryview(bytearray(segment.offset - at)))
            pieces.append(segment.buffer)
            at = segment.end
        if at < high:
            pieces.append(memoryview(bytearray(high - at)))
        self.storage.read_into(self.file.record.name, low, pieces)
        if self._verify:
            self._check(low, pieces)

    def _check(self, low: int, pieces: Iterable[memoryview]) -> None:
        block, have, value = low // BLOCK, 0, 0
        for piece in pieces:
            at = 0
            while at < len(piece):
                take = min(BLOCK - have, len(piece) - at)
                value = crc64(piece[at : at + take], value)
                at, have = at + take, have + take
                if have == BLOCK:
                    self._compare(block, value)
                    block, have, value = block + 1, 0, 0
        if have:
            self._compare(block, value)

    def _compare(self, block: int, value: int) -> None:
        if value != self._sum(block):
            raise CorruptCheckpointError(
                f"bytes {block * BLOCK} to {min((block + 1) * BLOCK, self.size)} of "
                f"{self.file.record.name} are not those that were written (checksum differs)",
                remedy="the tensors loaded so far are undefined; use an older checkpoint, and "
                "check the disk",
                path=self.file.path,
            )

    def _sum(self, block: int) -> int:
        with self._lock:
            if self._sums is None:
                self._sums = self._load_sums()
        return int.from_bytes(self._sums[8 * block : 8 * block + 8], "little")

    def _load_sums(self) -> memoryview:
        """The sidecar, held against the file's own checksum in the manifest."""
        name = self.file.record.crc_name
        data = self.storage.read(name)
        blocks = -(-self.size // BLOCK)
        whole = 0
        for block in range(min(blocks, len(data) // 8)):
            length = min(BLOCK, self.size - block * BLOCK)
            whole = combine(
                whole, int.from_bytes(data[8 * block : 8 * block + 8], "little"), length
            )
        if len(data) != 8 * blocks or hex64(whole) != self.file.record.crc64:
            raise CorruptCheckpointError(
                f"the checksums in {name} are not those of {self.file.record.name}",
                remedy="use an older checkpoint, and check the disk",
                path=self.file.path.rsplit("/", 1)[0] + "/" + name,
            )
        return memoryview(data)


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
        buffers: writable contiguous bytes of each target's local array.
        verify: check blocks against their checksums.
        preverify: check all needed blocks first, so that a bad one leaves the targets untouched.
        readers: kept open by the caller over many calls, which say then whether to verify.

    Raises:
        CorruptCheckpointError: a block differs, a file is cut short.
    """
    began = time.perf_counter()
    opened = readers or Readers(verify)
    with ThreadPoolExecutor(threads, thread_name_prefix="smckpt-read") as pool:
        if preverify:
            _run(pool, _preverify_tasks(plan, opened))
        copies: list[tuple[memoryview, memoryview]] = []
        tasks = list(_direct_tasks(plan, buffers, opened, copies))
        tasks += [_gather_task(gather, buffers, opened) for gather in plan.gathers]
        _run(pool, tasks)
        for source, target in copies:
            target[:] = source
    if readers is None:
        opened.close()
    return ReadStats(plan.nbytes, time.perf_counter() - began)


class Readers:
    """One reader for each file, one storage for each directory. Thread-safe."""

    def __init__(self, verify: bool) -> None:
        self._verify = verify
        self._lock = threading.Lock()
        self._storages: dict[str, Storage] = {}
        self._readers: dict[str, BlockReader] = {}

    def of(self, file: SavedFile) -> BlockReader:
        with self._lock:
            if file.path not in self._readers:
                if file.directory not in self._storages:
                    self._storages[file.directory] = open_storage(file.directory)
                storage = self._storages[file.directory]
                self._readers[file.path] = BlockReader(storage, file, self._verify)
            return self._readers[file.path]

    def close(self) -> None:
        for storage in self._storages.values():
            storage.close()


def _run(pool: ThreadPoolExecutor, tasks: Iterable[Callable[[], Any]]) -> None:
    """Run all; the first failure cancels what has not begun and is raised."""
    futures: list[Future[Any]] = [pool.submit(task) for task in tasks]
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _direct_tasks(
    plan: ReadPlan,
    buffers: Sequence[memoryview],
    readers: Readers,
    copies: list[tuple[memoryview, memoryview]],
) -> Iterable[Callable[[], None]]:
    by_file: dict[str, list[Direct]] = {}
    for direct in plan.directs:
        by_file.setdefault(direct.file.path, []).append(direct)
    for directs in by_file.values():
        reader = readers.of(directs[0].file)
        segments = [_Segment(d.offset, buffers[d.target][d.at : d.at + d.nbytes]) for d in directs]
        for layer in _disjoint(segments, copies):
            yield from _requests(reader, layer)


def _disjoint(
    segments: list[_Segment], copies: list[tuple[memoryview, memoryview]]
) -> list[list[_Segment]]:
    """Layers of segments that do not overlap. Bytes that several targets want whole (a flat
    parameter's step) are read once and copied."""
    first: dict[tuple[int, int], _Segment] = {}
    layers: list[list[_Segment]] = [[]]
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


def _requests(reader: BlockReader, segments: list[_Segment]) -> Iterable[Callable[[], None]]:
    """Requests of whole blocks of at most REQUEST bytes that together fill the segments."""
    pending = [s for s in segments if len(s.buffer)]
    at = 0
    while at < len(pending):
        low = pending[at].offset // BLOCK * BLOCK
        high = min(low + REQUEST, reader.size)
        inside: list[_Segment] = []
        while at < len(pending) and pending[at].offset < high:
            segment = pending[at]
            if segment.end <= high:
                inside.append(segment)
                at += 1
                continue
            cut = high - segment.offset
            inside.append(_Segment(segment.offset, segment.buffer[:cut]))
            pending[at] = _Segment(high, segment.buffer[cut:])
            break
        end = min(-(-inside[-1].end // BLOCK) * BLOCK, reader.size)
        yield _request(reader, low, end, inside)


def _request(
    reader: BlockReader, low: int, high: int, segments: list[_Segment]
) -> Callable[[], None]:
    return lambda: reader.fill(low, high, segments)


def _preverify_tasks(plan: ReadPlan, readers: Readers) -> Iterable[Callable[[], None]]:
    reads = itertools.chain(plan.directs, *(g.reads for g in plan.gathers))
    blocks: dict[str, tuple[SavedFile, set[int]]] = {}
    for read in reads:
        if read.nbytes:
            needed = range(read.offset // BLOCK, (read.offset + read.nbytes - 1) // BLOCK + 1)
            blocks.setdefault(read.file.path, (read.file, set()))[1].update(needed)
    for file, needed_blocks in blocks.values():
        reader = readers.of(file)
        for block in sorted(needed_blocks):
            low = block * BLOCK
            yield _request(reader, low, min(low + BLOCK, reader.size), [])


def read_range(reader: BlockReader, offset: int, target: memoryview) -> None:
    """Fill `target` with the bytes from `offset`, all their blocks checked."""
    for request in _requests(reader, [_Segment(offset, target)]):
        request()


def _gather_task(
    gather: Gather, buffers: Sequence[memoryview], readers: Readers
) -> Callable[[], None]:
    chosen = [(readers.of(read.file), read) for read in gather.reads]

    def run() -> None:
        scratch = memoryview(bytearray(gather.nbytes))
        for reader, read in chosen:
            read_range(reader, read.offset, scratch[read.at : read.at + read.nbytes])
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

    source = view(scratch, gather.source, gather.source_strides)
    view(target, gather.start, gather.strides)[...] = source
