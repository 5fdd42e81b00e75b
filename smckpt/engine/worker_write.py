"""Write one rank's part: the data files straight from the arena, with checksums, then the part
record.

Each thread takes a chunk of a file, computes its checksums block by block while the bytes are in
the processor's cache, and writes it. Nothing is copied.
"""

from __future__ import annotations

import mmap
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from smckpt.checkpoint.crc import BLOCK, combine, crc64, hex64
from smckpt.checkpoint.format import crc_name, data_name, part_name
from smckpt.checkpoint.sealed import seal_json
from smckpt.engine.commands import ArenaFile, PartWritten
from smckpt.errors import CheckpointError
from smckpt.storage import Access, FileWriter, Storage

__all__ = ["write_part"]

_CHUNK = 8 * BLOCK  # bytes per write: enough for a device's full rate, and small enough to share


@dataclass
class _File:
    """A file that is being written, its bytes in the arena, and the checksum of each of its
    blocks."""

    name: str
    crc_name: str
    data: memoryview
    writer: FileWriter
    crcs: list[int]

    def write(self, start: int, stop: int) -> None:
        for at in range(start, stop, BLOCK):
            self.crcs[at // BLOCK] = crc64(self.data[at : min(at + BLOCK, stop)])
        known = self._crc(start, stop) if self.writer.piece else None
        self.writer.write_at(start, self.data[start:stop], known)

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

    Raises:
        CheckpointError: the store refused. What was written is removed.
    """
    began = time.perf_counter()
    storage = access.open(directory)
    undo: list[Callable[[], None]] = []
    try:
        under_way = [
            _begin(
                storage,
                data_name(attempt, rank, number),
                crc_name(attempt, rank, number),
                memoryview(arena)[file.arena_offset :][: file.size],
                undo,
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
    )


def _begin(
    storage: Storage, name: str, beside: str, data: memoryview, undo: list[Callable[[], None]]
) -> _File:
    writer = storage.create_file(name, data.nbytes)
    undo.append(writer.abort)
    return _File(name, beside, data, writer, [0] * -(-data.nbytes // BLOCK))


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
