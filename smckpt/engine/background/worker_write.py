"""Write one rank's part straight from the arena: each thread takes a chunk of a file and writes it.

Nothing is copied. The checksums of what the trainer watches come out of the same pass as those of
the files' blocks.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Iterator, Sequence

from smckpt.calls import in_threads
from smckpt.checkpoint.commits.part import PartWriter, SummedFile
from smckpt.checkpoint.records.crc import BLOCK
from smckpt.checkpoint.records.prefixes import open_spread
from smckpt.engine.background.commands import PartWritten, Watched, WritePart
from smckpt.layout.entries import count_nonfinite
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
    access: Access, arena: mmap.mmap | None, command: WritePart, *, threads: int = 4
) -> PartWritten:
    """Write a rank's data files, their checksums and its part record. All are durable on return.

    Args:
        access: its `spread` says under which prefixes the files are.
        arena: the memory that holds the files; None if there are none.
        threads: how many threads write, if the store does not say.

    Raises:
        CheckpointError: the store refused. What was written is removed.
    """
    files, watched = command.files, command.watched
    storage = open_spread(access, command.directory)
    writer = PartWriter(storage, command.attempt, command.rank)
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
        at_once = max(threads, storage.write_threads)
        in_threads(_write, _chunks(open_files), at_once, "smckpt-write")
        done = writer.finish(command.part)
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


def _write(chunk: tuple[SummedFile, int, memoryview]) -> None:
    file, start, data = chunk
    file.write_at(start, data)


def _chunks(
    files: Sequence[tuple[SummedFile, memoryview]],
) -> Iterator[tuple[SummedFile, int, memoryview]]:
    for file, data in files:
        chunk = file.piece or _CHUNK
        for start in range(0, file.size, chunk):
            yield file, start, data[start : start + chunk]
