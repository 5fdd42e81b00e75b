"""Write one rank's part: the data files straight from the arena, with checksums, then the part
record.

Each thread takes a chunk of a file, computes its checksums block by block while the bytes are in
the processor's cache, and writes it. Nothing is copied. Where the trainer watches bytes of a file,
their checksums come out of the same pass: the checksum of a block is combined from those of its
parts.
"""

from __future__ import annotations

import bisect
import mmap
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smckpt.checkpoint.crc import BLOCK, combine, crc64, hex64
from smckpt.checkpoint.format import crc_name, data_name, part_name
from smckpt.checkpoint.numbers import count_nonfinite
from smckpt.checkpoint.sealed import seal_json
from smckpt.engine.commands import ArenaFile, PartWritten, Watched
from smckpt.errors import CheckpointError
from smckpt.storage import Access, FileWriter, Storage

__all__ = ["write_part"]

_CHUNK = 8 * BLOCK  # bytes per write: enough for a device's full rate, and small enough to share


@dataclass
class _Look:
    """What was seen of watched bytes. parts: offset → length and checksum of those that one block
    has. Threads look at different parts."""

    of: Watched
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def see(self, data: memoryview, at: int) -> int:
        """The checksum of bytes from `at` on."""
        crc = crc64(data)
        self.parts[at] = data.nbytes, crc
        if self.of.dtype:
            self.counts[at] = count_nonfinite(data, self.of.dtype)
        return crc

    def crc(self) -> int:
        total = 0
        for _, (length, crc) in sorted(self.parts.items()):
            total = combine(total, crc, length)
        return total


@dataclass
class _File:
    """A file that is being written, its bytes in the arena, the checksum of each of its blocks, and
    what is watched in it, in order."""

    name: str
    crc_name: str
    data: memoryview
    writer: FileWriter
    crcs: list[int]
    looks: list[_Look]

    def write(self, start: int, stop: int) -> None:
        for at in range(start, stop, BLOCK):
            self.crcs[at // BLOCK] = self._block(at, min(at + BLOCK, stop))
        known = self._crc(start, stop) if self.writer.piece else None
        self.writer.write_at(start, self.data[start:stop], known)

    def _block(self, start: int, stop: int) -> int:
        """The checksum of a block."""
        at, total = start, 0
        first = bisect.bisect_right(self.looks, start, key=lambda look: look.of.stop)
        for look in self.looks[first:]:
            if look.of.start >= stop:
                break
            low, high = max(look.of.start, at), min(look.of.stop, stop)
            if at < low:
                total = combine(total, crc64(self.data[at:low]), low - at)
            total = combine(total, look.see(self.data[low:high], low), high - low)
            at = high
        if at == start:
            return crc64(self.data[start:stop])
        return combine(total, crc64(self.data[at:stop]), stop - at) if at < stop else total

    def crc(self) -> int:
        """The checksum of the whole file, from those of its blocks."""
        return self._crc(0, self.data.nbytes)

    def _crc(self, start: int, stop: int) -> int:
        total = 0
        for at in range(start, stop, BLOCK):
            total = combine(total, self.crcs[at // BLOCK], min(BLOCK, stop - at))
        return total


def write_part(
    access: Access,
    arena: mmap.mmap | None,
    *,
    threads: int,
    directory: str,
    attempt: str,
    rank: int,
    files: Sequence[ArenaFile],
    part: dict[str, Any],
    watched: Sequence[Watched] = (),
) -> PartWritten:
    """Write a rank's data files, their checksums and its part record. All are durable on return.

    Args:
        arena: the memory that holds `files`; None if there are none.
        threads: how many threads write.
        directory: URL of the checkpoint.
        attempt: the attempt of this save, which is in every file's name.
        rank: the writer.
        files: where they are in the arena.
        part: the record without "files".
        watched: bytes whose checksums are told, by file and place, without overlaps.

    Raises:
        CheckpointError: the store refused. What was written is removed.
    """
    began = time.perf_counter()
    storage = access.open(directory)
    undo: list[Callable[[], None]] = []
    looks = [_Look(each) for each in watched]
    try:
        under_way = [
            _begin(
                storage,
                data_name(attempt, rank, number),
                crc_name(attempt, rank, number),
                memoryview(arena)[file.arena_offset :][: file.size],
                undo,
                [look for look in looks if look.of.file == number],
            )
            for number, file in enumerate(files)
            if arena is not None
        ]
        _write_all(under_way, max(threads, storage.write_threads))
        records = [_finish(storage, file, undo) for file in under_way]
        name = part_name(attempt, rank)
        body = seal_json({**part, "files": records})
        undo.append(partial(storage.delete, name))
        storage.put(name, body)
    except BaseException:
        _take_back(undo)
        raise
    finally:
        storage.close()
    return PartWritten(
        part=name,
        crc64=hex64(crc64(body)),
        bytes=sum(file.data.nbytes for file in under_way),
        write_seconds=time.perf_counter() - began,
        checksums=tuple(look.crc() for look in looks),
        nonfinite=tuple(sum(look.counts.values()) for look in looks),
        retries=storage.retries,
    )


def _begin(
    storage: Storage,
    name: str,
    beside: str,
    data: memoryview,
    undo: list[Callable[[], None]],
    looks: list[_Look],
) -> _File:
    writer = storage.create_file(name, data.nbytes)
    undo.append(writer.abort)
    return _File(name, beside, data, writer, [0] * -(-data.nbytes // BLOCK), looks)


def _write_all(files: list[_File], threads: int) -> None:
    """Write all chunks of all files with `threads` threads. The first failure stops the others."""
    chunks = _chunks(files)
    failures: list[BaseException] = []
    turn = threading.Lock()

    def work() -> None:
        while not failures:
            with turn:
                chunk = next(chunks, None)
            if chunk is None:
                return
            file, start, stop = chunk
            try:
                file.write(start, stop)
            except BaseException as error:
                failures.append(error)

    count = min(threads, sum(1 for _ in _chunks(files)))
    pool = [threading.Thread(target=work) for _ in range(count - 1)]
    for thread in pool:
        thread.start()
    work()
    for thread in pool:
        thread.join()
    if failures:
        raise failures[0]


def _chunks(files: list[_File]) -> Iterator[tuple[_File, int, int]]:
    for file in files:
        chunk = file.writer.piece or _CHUNK
        for start in range(0, file.data.nbytes, chunk):
            yield file, start, min(start + chunk, file.data.nbytes)


def _finish(storage: Storage, file: _File, undo: list[Callable[[], None]]) -> dict[str, Any]:
    """Make the file and its block checksums durable. Returns its record for the part."""
    file.writer.finish()
    undo.append(partial(storage.delete, file.crc_name))
    storage.put(file.crc_name, struct.pack(f"<{len(file.crcs)}Q", *file.crcs))
    return {
        "name": file.name,
        "size": file.data.nbytes,
        "crc64": hex64(file.crc()),
        "crc_name": file.crc_name,
    }


def _take_back(undo: list[Callable[[], None]]) -> None:
    for step in reversed(undo):
        try:
            step()
        except CheckpointError as error:
            # The first failure is the one to report. This one is only logged, and a later sweep
            # removes what is left.
            print(error, file=sys.stderr)
