"""Replace damaged files of a committed checkpoint by whole ones, out of other places that have the
same bytes.

Nothing is changed in place. A file that is to be mended is written anew beside it, from its own
good blocks and those of donors, each compared with its checksum in the manifest's chain; it takes
the name in one step, and is read back. A file of which one block is nowhere stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from smckpt.calls import Threads
from smckpt.checkpoint.commits.contents import Contents, GroupContents
from smckpt.checkpoint.reading.blocks import SavedFile, Scratch
from smckpt.checkpoint.reading.read import Progress
from smckpt.checkpoint.records.crc import BLOCK, combined, crc64, hex64, packed_sums, unpacked_sums
from smckpt.checkpoint.records.format import FileRecord, PartRecord
from smckpt.checkpoint.records.prefixes import spread_over
from smckpt.checkpoint.records.sealed import MAX_JSON_BYTES, sound
from smckpt.checkpoint.upkeep.scan import ScannedFile, Sink, checksum_at, scan
from smckpt.errors import CheckpointError, CorruptCheckpointError, StorageError
from smckpt.storage import Storage
from smckpt.storage.urls import file_url

_BLOCK_FILES = 1 << 30  # bytes of a file of checksums: of a data file of 128 TiB

Ranges = tuple[tuple[int, int], ...]  # [start, stop) of bytes


_REMEDY = "repair the checkpoint from a copy: `smckpt repair STEP --from COPY`"


@dataclass(frozen=True)
class Damage:
    """A file of the checkpoint that differs from what was written.

    Args:
        storage: where it is, or should be.
        rank: that wrote it.
        what: "is missing", "has 3 of 4096 bytes", "differs".
        ranges: of bytes that are not what was written; of a data file.
        found: for each bad block the donor that has it; only if all were found.
        data: its true bytes, if it is a small file that was found or computed.
    """

    storage: Storage = field(repr=False)
    name: str
    rank: int
    what: str
    ranges: Ranges = ()
    record: FileRecord | None = None
    sums: tuple[int, ...] = field(default=(), repr=False)
    found: dict[int, Donor] = field(default_factory=dict, repr=False)
    data: bytes | None = field(default=None, repr=False)
    missing: Ranges = ()

    @property
    def path(self) -> str:
        return file_url(self.storage.url, self.name)

    @property
    def mendable(self) -> bool:
        return self.data is not None or (bool(self.sums) and not self.missing)

    @property
    def mended(self) -> Mended:
        """What mending it comes to."""
        nbytes = sum(high - low for low, high in self.ranges)
        sources = sorted({donor.path for donor in self.found.values()})
        return Mended(self.path, nbytes or len(self.data or b""), tuple(sources))


@dataclass(frozen=True)
class Mended:
    """A file that was mended, how many bytes of it, and the files that gave them."""

    path: str
    nbytes: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Donor:
    """A file that may have a block, at the same place."""

    storage: Storage
    name: str
    crc_name: str
    size: int

    @property
    def path(self) -> str:
        return file_url(self.storage.url, self.name)

    def block(self, number: int, length: int, value: int) -> memoryview | None:
        """The block, if it has this checksum."""
        data = memoryview(bytearray(length))
        try:
            self.storage.read_into(self.name, number * BLOCK, [data])
        except CheckpointError:  # not there, cut short, or damaged where we read
            return None
        return data if crc64(data) == value else None


class Donors:
    """Places that may have the bytes of a checkpoint's files: copies of it, which have files of the
    same names, and other checkpoints, whose checksums tell which of their blocks are equal.
    Thread-safe."""

    def __init__(self, copies: Sequence[Storage], others: Sequence[Contents]) -> None:
        self._copies = copies
        self._others = [
            (group.storage.holder(file.name), file)
            for contents in others
            for group in contents.groups
            for part in group.manifest.parts
            for file in part.files
        ]
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[int, ...]] = {}

    def small(
        self, group: GroupContents, name: str, right: Callable[[bytes], bool]
    ) -> bytes | None:
        """The bytes of a part, or of a file of checksums, that a copy has."""
        for storage in self._named(group, name):
            try:
                data = storage.read(name, most=MAX_JSON_BYTES)
            except CheckpointError:
                continue
            if right(data):
                return data
        return None

    def of_block(
        self, group: GroupContents, record: FileRecord, number: int, value: int
    ) -> Donor | None:
        """A file that has a block of `record`, and was read to make sure."""
        length = min(BLOCK, record.size - number * BLOCK)
        copies = ((storage, record) for storage in self._named(group, record.name))
        others = (other for other in self._others if other[1].name != record.name)
        for storage, file in chain(copies, others):
            donor = Donor(storage, file.name, file.crc_name, file.size)
            likely = donor.name == record.name or self._sum(donor, number) == value
            if likely and donor.block(number, length, value) is not None:
                return donor
        return None

    def _named(self, group: GroupContents, name: str) -> Iterator[Storage]:
        """Where the copies may have a rank's file: in the group's directory, under its prefixes, or
        all in one place."""
        for copy in self._copies:
            donor = copy.join(group.directory)
            found = (donor, spread_over(donor, [group.manifest.spread]).holder(name), copy)
            yield from {one.url: one for one in found}.values()

    def _sum(self, donor: Donor, number: int) -> int | None:
        """The checksum of a block according to the file of checksums beside it."""
        key = donor.storage.url, donor.crc_name
        with self._lock:
            known = self._known.get(key)
        if known is None:
            try:
                data = donor.storage.read(donor.crc_name, most=_BLOCK_FILES)
                known = unpacked_sums(data)
            except CheckpointError:
                known = ()
            with self._lock:
                self._known[key] = known
        return known[number] if number < len(known) else None


# -- finding -----------------------------------------------------------------------------------


def damages_of(
    contents: Contents, donors: Donors, *, threads: int, progress: Progress | None
) -> list[Damage]:
    """Read every file that the manifests name, and compare it with its checksums; what differs, and
    who has the true bytes."""
    found: list[Damage] = []
    saved: dict[SavedFile, GroupContents] = {}
    scratch = Scratch()
    for group in contents.groups:
        for part in group.manifest.parts:
            storage = group.storage.holder(part.name)
            found += _of_part(storage, group, part, donors)
            for file in part.files:
                saved[SavedFile(storage, file, part.rank, scratch)] = group
    scanned = _Scanned()
    scan(saved, [scanned], threads=threads, progress=progress)
    with Threads(threads, "smckpt-repair") as pool:
        for one, group in saved.items():
            found += _of_file(scanned.files[one], group, donors, pool)
    return found


class _Scanned(Sink):
    """Wants every byte, and keeps what the scan found out."""

    def __init__(self) -> None:
        self.files: dict[SavedFile, ScannedFile] = {}

    def end(self, file: ScannedFile) -> None:
        self.files[file.saved] = file


def _of_part(
    storage: Storage, group: GroupContents, part: PartRecord, donors: Donors
) -> Iterator[Damage]:
    def right(data: bytes) -> bool:
        return hex64(crc64(data)) == part.crc64

    def read() -> None:
        if not right(storage.read(part.name, most=MAX_JSON_BYTES)):
            raise CorruptCheckpointError("differs from what was written", remedy=_REMEDY)

    try:
        sound(storage, read)
        return
    except CheckpointError as error:
        what = error.message
    found = donors.small(group, part.name, right)
    yield Damage(storage, part.name, part.rank, what, data=found)


def _of_file(
    file: ScannedFile, group: GroupContents, donors: Donors, pool: Threads
) -> Iterator[Damage]:
    """What is wrong with a data file and with its checksums."""
    record, saved = file.record, file.saved
    whole = file.there == record.size
    count = -(-record.size // BLOCK)
    own = tuple(file.sums.get(number, -1) for number in range(count))
    storage = saved.storage
    damaged = partial(Damage, storage, record.name, saved.rank, record=record)
    sums: tuple[int, ...] | None
    if file.unproven is None:
        sums = unpacked_sums(saved.stored_sums())
    else:
        name = record.crc_name
        data = packed_sums(own) if whole and _belong(own, record) else None
        if data is None:
            data = donors.small(
                group, name,
                lambda data: len(data) == 8 * count and _belong(unpacked_sums(data), record),
            )  # fmt: skip
        yield Damage(storage, name, saved.rank, file.unproven.message, data=data)
        sums = None if data is None else unpacked_sums(data)
    if sums is None:  # no checksum tells which block is wrong
        if not whole or not _belong(own, record):
            what = "differs from what was written, and so does the file of its checksums"
            span = ((0, record.size),)
            yield damaged(what, span, missing=span)
        return
    bad = [number for number in range(count) if own[number] != sums[number]]
    if not bad and whole:
        return
    what = "differs from what was written"
    if file.there is None:
        what = "is missing"
    elif not whole:
        what = f"has {file.there} bytes, but {record.size} were written"
    donated = pool.map(lambda n: donors.of_block(group, record, n, sums[n]), bad)
    found = {n: donor for n, donor in zip(bad, donated, strict=True) if donor is not None}
    missing = _ranges(record, [number for number in bad if number not in found])
    yield damaged(what, _ranges(record, bad), sums=sums, found=found, missing=missing)


def _belong(sums: tuple[int, ...], record: FileRecord) -> bool:
    """Whether these are the checksums of the blocks of the file that the manifest names."""
    return -1 not in sums and hex64(combined(sums, record.size)) == record.crc64


def _ranges(record: FileRecord, blocks: Sequence[int]) -> Ranges:
    out: list[tuple[int, int]] = []
    for number in blocks:
        low, high = number * BLOCK, min((number + 1) * BLOCK, record.size)
        if out and out[-1][1] == low:
            out[-1] = (out[-1][0], high)
        else:
            out.append((low, high))
    return tuple(out)


# -- mending -----------------------------------------------------------------------------------


def mend(damage: Damage) -> Mended:
    """Write the file anew and give it its name, in one step.

    Raises:
        StorageError: the store refused, or gave back other bytes; or a donor is gone. The file
            under the name is the old one, or the whole one.
    """
    storage, name = damage.storage, damage.name
    storage.refuse_links()
    storage.discard_unfinished([name])  # of a repair that was killed
    if damage.data is not None:
        size, pieces = len(damage.data), iter([memoryview(damage.data)])
        expected = crc64(damage.data)
    else:
        assert damage.record is not None
        size, pieces = damage.record.size, _blocks(damage, damage.record)
        expected = combined(damage.sums, size)
    writer = storage.create_file(name, size, replace=True)
    try:
        at = 0
        for piece in pieces:
            writer.write_at(at, piece)
            at += len(piece)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    if checksum_at(storage, name, storage.size(name)) != expected:
        raise StorageError(
            "what was written reads back with other bytes: this disk, or what stands before it, "
            "is failing",
            remedy="copy the checkpoint to another place with `smckpt cp`, and repair it there",
            path=damage.path,
        )
    return damage.mended


def _blocks(damage: Damage, record: FileRecord) -> Iterator[memoryview]:
    own = Donor(damage.storage, record.name, record.crc_name, record.size)
    for number, value in enumerate(damage.sums):
        length = min(BLOCK, record.size - number * BLOCK)
        donor = damage.found.get(number, own)
        block = donor.block(number, length, value)
        if block is None:
            raise StorageError(
                f"bytes {number * BLOCK} to {number * BLOCK + length} of {donor.path} were right a "
                "moment ago, and are not now; the file was not changed",
                remedy="find out what changes files there, and repair again",
                path=damage.path,
            )
        yield block
