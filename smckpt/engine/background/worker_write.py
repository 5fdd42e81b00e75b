"""Write one rank's part straight from the arena: each thread takes a chunk of a file and writes it.

Nothing is copied. The checksums of what the trainer watches come out of the same pass as those of
the files' blocks.
"""

from __future__ import annotations

import bisect
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from smckpt.checkpoint.commits.part import PartWriter, SummedFile
from smckpt.checkpoint.records.crc import BLOCK
from smckpt.checkpoint.records.numbers import count_nonfinite
from smckpt.checkpoint.records.prefixes import open_spread
from smckpt.engine.background.commands import ArenaFile, PartWritten, Watched
from smckpt.storage import Access

_CHUNK = 8 * BLOCK  # bytes per write: enough for a device's full rate, and small enough to share


class _Counts:
    """Counts the NaN and infinite elements of what is watched in one file. Several threads may,
    each in stretches of its own."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = sorted(watched, key=lambda one: one.start)
        self._stops = [one.stop for one in self._watched]
        self._found: dict[Watched, dict[int, int]] = {one: {} for one in self._watched}
        self.marks = sorted({at for one in watched for at in (one.start, one.stop)})

    def see(self, at: int, data: memoryview) -> None:
        """Count those of a stretch that the marks have cut."""
        for one in self._watched[bisect.bisect_right(self._stops, at) :][:1]:
            if one.dtype and one.start <= at:
                self._found[one][at] = count_nonfinite(data, one.dtype)

    def of(self, watched: Watched) -> int:
        return sum(self._found[watched].values())


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
        access: its `spread` says under which prefixes the files are.
        directory: URL of the checkpoint.
        attempt: the attempt of this save, which is in every file's name.
        rank: the writer.
        files: where they are in the arena.
        part: what the record says beside the attempt and the files.
        watched: bytes whose checksums are told, by file and place, without overlaps.

    Raises:
        CheckpointError: the store refused. What was written is removed.
    """
    storage = open_spread(access, directory)
    writer = PartWriter(storage, attempt, rank)
    counts = [
        _Counts([one for one in watched if one.file == number]) for number in range(len(files))
    ]
    try:
        open_files = [
            (
                writer.file(file.size, of.marks, of.see),
                memoryview(arena)[file.arena_offset :][: file.size],
            )
            for file, of in zip(files, counts, strict=True)
            if arena is not None
        ]
        _write_all(open_files, max(threads, storage.write_threads))
        done = writer.finish(part)
    except BaseException:
        writer.abort()
        raise
    finally:
        storage.close()
    return PartWritten(
        part=done["part"],
        crc64=done["crc64"],
        bytes=sum(file.size for file, _ in open_files),
        checksums=tuple(open_files[one.file][0].crc_of(one.start, one.stop) for one in watched),
        nonfinite=tuple(counts[one.file].of(one) for one in watched),
        retries=storage.retries,
    )


def _write_all(files: Sequence[tuple[SummedFile, memoryview]], threads: int) -> None:
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
            file, start, data = chunk
            try:
                file.write_at(start, data)
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


def _chunks(
    files: Sequence[tuple[SummedFile, memoryview]],
) -> Iterator[tuple[SummedFile, int, memoryview]]:
    for file, data in files:
        chunk = file.piece or _CHUNK
        for start in range(0, file.size, chunk):
            yield file, start, data[start : start + chunk]
