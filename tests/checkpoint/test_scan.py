"""One pass over data files: what each sink gets, what is read, and what is said of damage."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from smckpt.checkpoint.commits.part import PartWriter
from smckpt.checkpoint.reading.blocks import SavedFile, Scratch
from smckpt.checkpoint.records.crc import BLOCK
from smckpt.checkpoint.records.format import FileRecord, crc_name, data_name
from smckpt.checkpoint.upkeep.scan import ScannedFile, ScannedPiece, Sink, WantedBytes, scan
from smckpt.errors import CorruptCheckpointError
from smckpt.storage import open_storage
from smckpt.storage.disk.posix import PosixStorage
from tests.support.synthetic import flip

ATTEMPT = "0123456789ab-00000000"
SIZE = 20 * BLOCK + 100


class Counting(PosixStorage):
    """A disk that notes what is read of it."""

    reads: list[tuple[str, int, int]]

    def read_into(
        self, name: str, offset: int, buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:  # fmt: skip
        if name.endswith(".safetensors"):
            self.reads.append((name, offset, sum(map(len, buffers))))
        super().read_into(name, offset, buffers, seen)


@pytest.fixture
def disk(tmp_path: Path) -> Counting:
    found = Counting(str(tmp_path))
    found.reads = []
    return found


@pytest.fixture
def readers(disk: Counting) -> list[SavedFile]:
    """Of two files of a rank, with other bytes in each block."""
    writer, records = PartWriter(disk, ATTEMPT, 0), []
    for number in range(2):
        file = writer.file(SIZE)
        data = b"".join(bytes([number, at]) * (BLOCK // 2) for at in range(21))[:SIZE]
        file.write_at(0, memoryview(data))
        name, beside = data_name(ATTEMPT, 0, number), crc_name(ATTEMPT, 0, number)
        records.append((name, file, beside))
    writer.finish({})
    return [SavedFile(disk, FileRecord(n, SIZE, f.crc64, b), 0, Scratch()) for n, f, b in records]


class Takes(Sink):
    """Keeps what it gets."""

    def __init__(self, *ranges: tuple[int, int], step: int = 4 * BLOCK) -> None:
        self.ranges, self.step = ranges, step
        self.got: dict[str, dict[int, bytes]] = {}
        self.ended: list[str] = []

    def begin(self, file: ScannedFile) -> WantedBytes | None:
        return WantedBytes(self.ranges, self.step) if self.ranges else super().begin(file)

    def take(self, piece: ScannedPiece) -> None:
        self.got.setdefault(piece.file.record.name, {})[piece.low] = bytes(piece.data)

    def end(self, file: ScannedFile) -> None:
        self.ended.append(file.record.name)


def test_two_sinks_get_every_byte_and_each_is_read_once(
    disk: Counting, readers: list[SavedFile]
) -> None:
    sinks, told = [Takes(), Takes((0, SIZE), step=8 * BLOCK)], list[tuple[int, int]]()
    scan(readers, sinks, progress=lambda *done: told.append(done))
    for sink in sinks:
        for reader in readers:
            name = reader.record.name
            whole = b"".join(data for _, data in sorted(sink.got[name].items()))
            assert whole == Path(reader.path).read_bytes()
        assert sorted(sink.ended) == sorted(reader.record.name for reader in readers)
    assert sum(length for _, _, length in disk.reads) == 2 * SIZE
    assert {length for _, _, length in disk.reads} == {8 * BLOCK, SIZE - 16 * BLOCK}
    assert max(told) == told[-1] == (2 * SIZE, 2 * SIZE)


def test_of_ranges_their_blocks_are_read_once_and_nothing_else(
    disk: Counting, readers: list[SavedFile]
) -> None:
    one, other = Takes((5, 10), (BLOCK + 1, BLOCK + 2)), Takes((2 * BLOCK - 1, 2 * BLOCK + 1))
    last = Takes((SIZE - 1, SIZE))
    scan(readers[:1], [one, other, last], threads=1)
    blocks = sorted(
        number
        for _, offset, length in disk.reads
        for number in range(offset // BLOCK, -(-(offset + length) // BLOCK))
    )
    assert blocks == [0, 1, 2, 20]


def test_a_sink_that_wants_nothing_of_a_file_hears_that_it_ends_and_nothing_is_read(
    disk: Counting, readers: list[SavedFile]
) -> None:
    class Nothing(Takes):
        def begin(self, file: ScannedFile) -> None:
            return None

    sink, told = Nothing(), list[tuple[int, int]]()
    scan(readers, [sink], progress=lambda *done: told.append(done))
    assert len(sink.ended) == 2 and not sink.got and not disk.reads
    assert told[-1] == (2 * SIZE, 2 * SIZE)


def test_of_a_damaged_piece_its_good_blocks_are_given_and_the_bad_one_is_named(
    readers: list[SavedFile],
) -> None:
    flip(Path(readers[0].path), 2 * BLOCK + 7)
    seen: dict[str, object] = {}

    class Look(Sink):
        def take(self, piece: ScannedPiece) -> None:
            if piece.low == 0 and piece.file.record.name == readers[0].record.name:
                seen["good"] = bytes(piece.part(BLOCK, 2 * BLOCK))
                with pytest.raises(CorruptCheckpointError, match=f"bytes {2 * BLOCK} to"):
                    piece.part(BLOCK, 2 * BLOCK + 1)
                with pytest.raises(CorruptCheckpointError, match=f"bytes {2 * BLOCK} to"):
                    _ = piece.data

        def end(self, file: ScannedFile) -> None:
            seen[file.record.name] = file.differing()

    scan(readers, [Look()])
    assert seen["good"] == bytes([0, 1]) * (BLOCK // 2)
    assert [seen[reader.record.name] for reader in readers] == [[2], []]


def test_blocks_that_a_disk_cannot_read_leave_the_others(
    readers: list[SavedFile], disk: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PosixStorage.read_into

    def failing(self: PosixStorage, name: str, offset: int, buffers: Sequence[memoryview],
                seen: Callable[[memoryview], None] | None = None) -> None:  # fmt: skip
        bad = 3 * BLOCK + 5
        if name.endswith("-0.safetensors") and offset <= bad < offset + sum(map(len, buffers)):
            raise CorruptCheckpointError("a bad sector", remedy="check the disk")
        read(self, name, offset, buffers, seen)

    monkeypatch.setattr(PosixStorage, "read_into", failing)
    found: list[ScannedFile] = []

    class Look(Sink):
        def end(self, file: ScannedFile) -> None:
            found.append(file)

    scan(readers[:1], [Look()])
    assert sorted(found[0].sums) == [n for n in range(21) if n != 3]
    assert [fault.message for fault in found[0].faults] == ["a bad sector"]


def test_a_file_that_was_cut_is_read_to_its_end_and_one_that_is_missing_not_at_all(
    readers: list[SavedFile],
) -> None:
    os.truncate(readers[0].path, BLOCK + 9)
    os.unlink(readers[1].path)
    found: dict[str, ScannedFile] = {}

    class Look(Sink):
        def end(self, file: ScannedFile) -> None:
            found[file.record.name] = file

    scan(readers, [Look()])
    cut, missing = (found[reader.record.name] for reader in readers)
    assert (cut.there, sorted(cut.sums), cut.faults) == (BLOCK + 9, [0, 1], [])
    assert (missing.there, missing.sums) == (None, {})
    assert "missing" in missing.faults[0].message


def test_the_first_exception_of_a_sink_ends_the_scan_and_few_files_have_begun(
    readers: list[SavedFile],
) -> None:
    begun: list[str] = []

    class Fails(Sink):
        def begin(self, file: ScannedFile) -> WantedBytes | None:
            begun.append(file.record.name)
            return super().begin(file)

        def take(self, piece: ScannedPiece) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scan(readers * 50, [Fails()], threads=2)
    assert len(begun) <= 8
    assert not [one for one in threading.enumerate() if one.name.startswith("smckpt-scan")]


def test_checksums_of_what_is_marked_come_out_of_a_write_in_any_order(tmp_path: Path) -> None:
    from smckpt.checkpoint.records.crc import combined, crc64, hex64

    data = memoryview(os.urandom(3 * BLOCK + 777))
    marks = [10, BLOCK, BLOCK + 3, 2 * BLOCK + 5]
    seen: list[tuple[int, int]] = []
    file = PartWriter(open_storage(str(tmp_path)), ATTEMPT, 0).file(
        len(data), marks, lambda at, run: seen.append((at, len(run)))
    )
    for low, high in ((2 * BLOCK, len(data)), (0, BLOCK), (BLOCK, 2 * BLOCK)):
        file.write_at(low, data[low:high])
    file.finish()
    assert file.crc64 == hex64(crc64(data))
    assert file.blocks == [crc64(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    assert combined(file.blocks, len(data)) == crc64(data)
    for low in marks:
        for high in marks:
            if low < high:
                assert file.crc_of(low, high) == crc64(data[low:high]), (low, high)
    cuts = {0, *marks, *range(0, len(data), BLOCK), len(data)}
    assert {at for at, _ in seen} == cuts - {len(data)}
    assert sum(length for _, length in seen) == len(data)
