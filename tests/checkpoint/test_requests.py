"""How what is wanted of a file becomes requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from smckpt.checkpoint.reading.blocks import (
    SCRATCH_BYTES,
    Destination,
    SavedFile,
    Scratch,
)
from smckpt.checkpoint.reading.blocks import requests as requests_of
from smckpt.checkpoint.records.format import FileRecord, crc_name, data_name
from smckpt.storage.disk.posix import PosixStorage

MIB = 1 << 20
ATTEMPT = "000000000000-00000001"
DATA, CRC = data_name(ATTEMPT, 0, 0), crc_name(ATTEMPT, 0, 0)


class TakesMuch(PosixStorage):
    """A disk that wants requests as large as an object store's."""

    request_bytes = 64 * MIB  # type: ignore[assignment]


class Unchecked(SavedFile):
    """Of files without checksums."""

    def fill(self, low: int, high: int, segments: Sequence[Destination]) -> None:
        self._fetch(segments[0].offset, segments[-1].end, segments)


def reader_of(folder: Path, size: int) -> SavedFile:
    (folder / DATA).touch()
    os.truncate(folder / DATA, size)
    record = FileRecord(DATA, size, "0" * 16, CRC)
    return Unchecked(TakesMuch(str(folder)), record, 0, Scratch())


def test_a_request_is_no_larger_than_the_caller_or_the_store_wants(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, 100 * MIB)
    wanted = [Destination(0, memoryview(bytearray(100 * MIB)))]
    assert len(list(requests_of(reader, wanted))) == 2
    assert len(list(requests_of(reader, wanted, 10 * MIB))) == 10


def test_what_nobody_wants_of_a_request_takes_bounded_memory(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, 64 * MIB)
    wanted = [Destination(at, memoryview(bytearray(4096))) for at in range(0, 64 * MIB, MIB)]
    for request in requests_of(reader, wanted):
        request()
    assert len(reader.scratch.take("gaps", 0)) == 0
    assert len(reader.scratch._memory["gaps"]) <= SCRATCH_BYTES
