"""Move the bytes of an export: a few threads read, verify, cast and write chunks.

Memory: per thread one chunk to write and, for casts, one chunk as read, for tensors of any size.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from smckpt.calls import Threads
from smckpt.checkpoint.reading.read import Meter, Progress
from smckpt.errors import TensorMismatchError, UsageError
from smckpt.layout.entries import DTYPES
from smckpt.translate.cast import Array, cast, stored_type
from smckpt.translate.files import Chunk, Output, OutputFile, Range, Target, aligned
from smckpt.translate.tables.hub import find_ties

CHUNK = 16 << 20  # bytes; large enough for a disk's full rate, small compared with a model
CAST = 1 << 18  # elements cast at once: their intermediate arrays stay in the processor's cache


class ChunkSource(Protocol):
    """A source of chunks."""

    @property
    def url(self) -> str: ...

    def plans_of(self, chunks: Sequence[Chunk]) -> Sequence[Any]:
        """Make a plan for each chunk. One thread calls it."""

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        """Fill a buffer for each range of a chunk, in the source's dtype. Several threads may call
        it."""

    def close(self) -> None: ...


def write_chunks(
    source: ChunkSource,
    output: Output,
    files: Sequence[OutputFile],
    threads: int,
    progress: Progress | None,
    look: Callable[[str, str, memoryview], None] | None = None,
) -> None:
    """Write all chunks of all files, in order, with `threads` threads. The first failure ends it.

    look: called with name, dtype and bytes of each range before it is written, by several threads.
    """
    meter = Meter(progress, sum(file.data_bytes for file in files))
    idle: queue.SimpleQueue[_Scratch] = queue.SimpleQueue()
    for _ in range(threads):
        idle.put(_Scratch())

    def one(file: OutputFile, chunk: Chunk, plan: Any, count: int) -> None:
        scratch = idle.get()
        try:
            data = scratch.fill(source, chunk, plan)
            if look is not None:
                for item in chunk.ranges:
                    view = data[item.offset : item.offset + item.nbytes]
                    look(item.target.name, item.target.dtype, view)
            output.writer(file, count).write_at(chunk.offset, data)
        finally:
            idle.put(scratch)
        output.chunk_done(file)
        meter.add(chunk.length)

    with ExitStack() as stack:
        pool = Threads(threads, "smckpt-export")
        stack.callback(pool.shutdown, cancel_futures=True)
        before: list[Future[None]] = []
        for file in files:
            chunks = list(file.chunks(CHUNK))
            if not chunks:
                output.writer(file, 0)
            plans = source.plans_of(chunks)
            now = [
                pool.submit(one, file, chunk, plan, len(chunks))
                for chunk, plan in zip(chunks, plans, strict=True)
            ]
            _finished(before)  # at most two files at once: this one begins while the last one ends
            before = now
        _finished(before)


def equal(source: ChunkSource, a: Target, b: Target) -> bool:
    """Whether two targets are bitwise equal before any cast; at most two chunks are held."""
    if (a.source_dtype, tuple(a.shape)) != (b.source_dtype, tuple(b.shape)):
        return False
    return all(np.array_equal(x, y) for *_, x, y in side_by_side((source, a), (source, b)))


def side_by_side(
    *tensors: tuple[ChunkSource, Target],
) -> Iterator[tuple[int, int, Array, Array]]:
    """The elements of two tensors of one shape, in each one's own dtype, a chunk at a time: the
    first element, the one behind the last, and the bytes of both, until the next chunk is read."""
    sizes = [DTYPES[target.source_dtype].itemsize for _, target in tensors]
    numel, step = math.prod(tensors[0][1].shape), CHUNK // max(sizes)
    memory = [aligned(min(numel, step) * size) for size in sizes]
    for start in range(0, numel, step):
        stop = min(numel, start + step)
        one, two = (data[: (stop - start) * n] for data, n in zip(memory, sizes, strict=True))
        for (source, target), view in zip(tensors, (one, two), strict=True):
            _read(source, target, start, stop, view)
        yield start, stop, np.frombuffer(one, np.uint8), np.frombuffer(two, np.uint8)


def read_elements(source: ChunkSource, target: Target, start: int, stop: int) -> memoryview:
    """Elements [start, stop) of a target, in its source's dtype."""
    memory = aligned((stop - start) * DTYPES[target.source_dtype].itemsize)
    _read(source, target, start, stop, memory)
    return memory


def _read(source: ChunkSource, target: Target, start: int, stop: int, memory: memoryview) -> None:
    (plan,) = source.plans_of([Chunk(0, 0, (Range(target, start, stop, 0),))])
    source.read(plan, [memory])


def tied_names(source: ChunkSource, targets: Iterable[Target]) -> tuple[str, ...]:
    """Names of targets that the config ties to another target. Only the other one is written.

    Raises:
        TensorMismatchError: two that are tied differ.
    """
    by_name = {target.name: target for target in targets}
    ties = find_ties(by_name)
    for tie in ties:
        if not equal(source, by_name[tie.kept], by_name[tie.left_out]):
            raise TensorMismatchError(
                f"tie_word_embeddings is true, but {tie.left_out} and {tie.kept} differ",
                remedy="set tie_word_embeddings to false in the config if the model was "
                "trained with both; otherwise these are not the files of this model",
            )
    return tuple(tie.left_out for tie in ties)


def _finished(futures: Sequence[Future[None]]) -> None:
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()


class _Scratch:
    """The memory of one worker: a chunk to write and, for casts, a chunk as read."""

    def __init__(self) -> None:
        self._out = aligned(CHUNK)
        self._raw = aligned(0)

    def fill(self, source: ChunkSource, chunk: Chunk, plan: Any) -> memoryview:
        """The bytes of a chunk: reads its ranges and casts those that need it."""
        need = sum(r.source_bytes for r in chunk.ranges if r.casts)
        if need > len(self._raw):
            self._raw = aligned(need)
        views, at = [], 0
        for item in chunk.ranges:
            if item.casts:
                views.append(self._raw[at : at + item.source_bytes])
                at += item.source_bytes
            else:
                views.append(self._out[item.offset : item.offset + item.nbytes])
        source.read(plan, views)
        for item, view in zip(chunk.ranges, views, strict=True):
            if item.casts:
                # in pieces, because NumPy's intermediate arrays are large
                target = item.target
                values = np.frombuffer(view, stored_type(target.source_dtype))
                out = np.frombuffer(self._out, np.uint8)[item.offset : item.offset + item.nbytes]
                out = out.view(stored_type(target.dtype))
                try:
                    for at in range(0, len(values), CAST):
                        piece = values[at : at + CAST]
                        out[at : at + CAST] = cast(piece, target.source_dtype, target.dtype)
                except OverflowError as error:
                    raise UsageError(
                        f"{target.name} cannot be exported as {target.dtype}: {error}",
                        remedy="export it as bfloat16 or float32",
                    ) from error
        return self._out[: chunk.length]
