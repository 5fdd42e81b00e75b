"""Writing one rank's part: data files straight from the arena, checksums on the way, then the part.

Threads take chunks of the files; each checksums its chunk block by block, while the bytes are warm,
and writes it. Nothing is copied.
"""

from __future__ import annotations

import mmap
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from smckpt.checkpoint.crc import BLOCK, combine, crc64, hex64
from smckpt.checkpoint.format import crc_name, data_name, part_name, seal_json
from smckpt.errors import CheckpointError
from smckpt.storage import FileWriter, Storage, open_storage

__all__ = ["write_part"]

_CHUNK = 8 * BLOCK  # bytes per write: large enough for a device's full rate, small enough to share


@dataclass
class _File:
    """A file under way, its bytes in the arena, and the checksum of each of its blocks."""

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
        """Of the whole file, from those of its blocks."""
        return self._crc(0, self.data.nbytes)

    def _crc(self, start: int, stop: int) -> int:
        total = 0
        for at in range(start, stop, BLOCK):
            total = combine(total, self.crcs[at // BLOCK], min(BLOCK, stop - at))
        return total


def write_part(
    arena: mmap.mmap | None,
    *,
    threads: int,
    directory: str,
    attempt: str,
    rank: int,
    files: list[dict[str, int]],
    part: dict[str, Any],
) -> dict[str, Any]:
    """Write a rank's data files, their checksums and its part record; all durable on return.

    Args:
        arena: what `files` lie in; None if there are none.
        threads: that write.
        directory: URL of the checkpoint.
        attempt: of this save, in every file's name.
        rank: the writer.
        files: per file "arena_offset" and "size" in bytes.
        part: the record without "files".

    Returns:
        "part" (name), "crc64" (of the part record, hex), "bytes", "write_seconds".

    Raises:
        CheckpointError: the store refused; what was written is removed.
    """
    began = time.perf_counter()
    storage = open_storage(directory)
    undo: list[Callable[[], None]] = []
    try:
        under_way = [
            _begin(
                storage,
                data_name(attempt, rank, number),
                crc_name(attempt, rank, number),
                memoryview(arena)[file["arena_offset"] :][: file["size"]],
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
    return {
        "part": name,
        "crc64": hex64(crc64(body)),
        "bytes": sum(file.data.nbytes for file in under_way),
        "write_seconds": time.perf_counter() - began,
    }


def _begin(
    storage: Storage, name: str, beside: str, data: memoryview, undo: list[Callable[[], None]]
) -> _File:
    writer = storage.create_file(name, data.nbytes)
    undo.append(writer.abort)
    return _File(name, beside, data, writer, [0] * -(-data.nbytes // BLOCK))


def _write_all(files: list[_File], threads: int) -> None:
    """All chunks of all files, by `threads` threads; the first failure stops the others."""
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
    """Make the file and its block checksums durable; its record for the part."""
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
            # The failure that brought us here is the one to report; this goes to its log, and the
            # sweep of a later save finds what is left.
            print(error, file=sys.stderr)
