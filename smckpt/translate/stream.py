"""The bytes of an export: chunks read, verified, cast and written by a few threads.

Memory: per thread one chunk as written and, for casts, one as read, however large the tensors.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from smckpt.errors import UsageError
from smckpt.storage.pool import pool_here
from smckpt.translate.cast import cast, stored_type
from smckpt.translate.files import Output, aligned
from smckpt.translate.targets import Chunk, OutputFile, Range

__all__ = ["CHUNK", "ChunkSource", "write_chunks"]

CHUNK = 16 << 20  # bytes: large enough for a disk's full rate, small beside any model
CAST = 1 << 18  # elements cast at once: their intermediate arrays stay in the processor's cache


class ChunkSource(Protocol):
    """What chunks are read from."""

    def plans_of(self, chunks: Sequence[Chunk]) -> Sequence[Any]:
        """A plan for each chunk; made by one thread."""

    def read(self, plan: Any, buffers: Sequence[memoryview]) -> None:
        """Fill a buffer for each range of a chunk, in the source's dtype; by several threads."""


def write_chunks(
    source: ChunkSource,
    output: Output,
    files: Sequence[OutputFile],
    threads: int,
    progress: Callable[[int, int], None] | None,
    look: Callable[[str, str, memoryview], None] | None = None,
) -> None:
    """All chunks of all files, in order, by `threads` workers; the first failure ends it.

    look: shown name, dtype and bytes of everything before it is written; by several threads.
    """
    meter = _Meter(sum(file.data_bytes for file in files), progress)
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
        pool = pool_here(threads, "smckpt-export")
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
            _finished(before)  # while this file is planned and begun, not three at a time
            before = now
        _finished(before)


def _finished(futures: Sequence[Future[None]]) -> None:
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()


class _Scratch:
    """The memory of one worker: a chunk as it is written and, for casts, one as it is read."""

    def __init__(self) -> None:
        self._out = aligned(CHUNK)
        self._raw = aligned(0)

    def fill(self, source: ChunkSource, chunk: Chunk, plan: Any) -> memoryview:
        """The bytes of a chunk: its ranges read, those that need it cast."""
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
                _cast_into(item, view, self._out)
        return self._out[: chunk.length]


def _cast_into(item: Range, raw: memoryview, memory: memoryview) -> None:
    """Cast a range into its place, in pieces: NumPy's intermediate arrays are large."""
    target = item.target
    values = np.frombuffer(raw, stored_type(target.source_dtype))
    out = np.frombuffer(memory, np.uint8)[item.offset : item.offset + item.nbytes]
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


class _Meter:
    """Bytes done, told one call at a time."""

    def __init__(self, total: int, tell: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._tell = tell
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._done.put(0)

    def add(self, nbytes: int) -> None:
        done = self._done.get() + nbytes
        try:
            if self._tell is not None:
                self._tell(done, self._total)
        finally:
            self._done.put(done)
