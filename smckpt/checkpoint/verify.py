"""Verify a whole checkpoint: every byte has its checksum, and every tensor is covered once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.calls import alone
from smckpt.checkpoint.blocks import SavedFile, not_missing
from smckpt.checkpoint.committed import Committed, open_catalogue
from smckpt.checkpoint.crc import BLOCK, combined, hex64
from smckpt.checkpoint.meter import Meter, Progress
from smckpt.checkpoint.replaced import replacement
from smckpt.errors import CheckpointError, CorruptCheckpointError, StateError
from smckpt.layout.entries import DTYPES
from smckpt.layout.strided import Box, covered
from smckpt.storage import Storage, access_to

__all__ = ["Problem", "Report", "verify_catalogue", "verify_checkpoint"]

PIECE = 8 * BLOCK  # bytes that a thread reads at once


@dataclass(frozen=True)
class Problem:
    """A fault: the file or directory, the byte at which it begins (None: it has no single place),
    and what is wrong."""

    path: str
    what: str
    offset: int | None = None


@dataclass(frozen=True)
class Report:
    """What was verified, and what is wrong. quick: the data themselves were not read."""

    url: str
    identity: str
    files: int
    tensors: int
    nbytes: int
    problems: tuple[Problem, ...]
    quick: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


@alone()
def verify_checkpoint(
    url: str | os.PathLike[str],
    *,
    quick: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> Report:
    """Read and check everything that the newest commit at `url` names.

    Args:
        quick: do not read the data: check the record, manifests, parts, sizes, headers and files of
            checksums, that every tensor is covered, and the checksums that a store keeps itself.
            It finds what is missing, short or exchanged, and not a changed byte on a disk.
        threads: how many threads read and check.
        progress: called with (bytes done, bytes in total), from any thread, one call at a time.
        s3_region: as for `smckpt.load`.
        s3client_config: as for `smckpt.load`.

    Returns:
        A `Report`, which lists all damage; damage is not raised. If the commit itself (a record or
        manifest) is damaged, the report lists only that.

    Raises:
        CheckpointNotFoundError, FormatVersionError: there is nothing to verify.
        CheckpointReplacedError: a newer save swept the checkpoint meanwhile.
    """
    access = access_to(url, s3_region=s3_region, s3client_config=s3client_config)
    return _verified(access.open(url), os.fspath(url), threads, progress, quick)


def _verified(
    storage: Storage, url: str, threads: int, progress: Progress | None, quick: bool
) -> Report:
    try:
        catalogue = open_catalogue(storage)
    except CorruptCheckpointError as error:
        return Report(url, "", 0, 0, 0, (_problem(error, url),), quick)
    report = verify_catalogue(catalogue, url, threads, progress, quick=quick)
    if (
        report.problems
        and (replaced := replacement(storage, catalogue.identity, "verify")) is not None
    ):
        raise replaced
    return report


def verify_catalogue(
    catalogue: Committed,
    url: str,
    threads: int = 4,
    progress: Progress | None = None,
    *,
    quick: bool = False,
) -> Report:
    """`verify_checkpoint` for a catalogue that is open already."""
    files = [_FileCheck(catalogue, file, quick) for file in catalogue.files]
    total = sum(check.file.record.size for check in files)
    tell = Meter(progress, total)
    problems: list[Problem] = []
    with ThreadPoolExecutor(threads, "smckpt-verify") as pool:
        reads = [pool.submit(check.read, low, tell) for check in files for low in check.starts()]
        parts = [pool.submit(_check_part, catalogue, rank) for rank in catalogue.object_ranks]
        for read in reads:
            read.result()
        for found in (*pool.map(_FileCheck.finish, files), *(part.result() for part in parts)):
            problems += found
    damaged = {check.file.rank for check in files if check.problems}
    problems += [*_stored_once(catalogue, damaged), *_covered(catalogue)]
    return Report(
        url=url,
        identity=catalogue.identity,
        files=len(files),
        tensors=len(catalogue.logical),
        nbytes=total,
        problems=tuple(sorted(set(problems), key=lambda p: (p.path, p.offset or 0, p.what))),
        quick=quick,
    )


def _problem(error: CheckpointError, path: str) -> Problem:
    return Problem(error.path or path, error.message)


class _FileCheck:
    """One data file: its size, every block, its checksum file, the header. Thread-safe."""

    def __init__(self, catalogue: Committed, file: SavedFile, quick: bool) -> None:
        self.file = file
        self.quick = quick
        self.problems: list[Problem] = []
        self._catalogue = catalogue
        self._reader = catalogue.reader(file)
        self._sums: dict[int, int] = {}
        self._there = self._look()

    def starts(self) -> range:
        """The bytes at which the pieces for `read` begin."""
        stop = 0 if self.quick else min(self.file.record.size, self._there)
        return range(0, stop, PIECE)

    def read(self, low: int, tell: Meter) -> None:
        """Read a piece, up to the file's end."""
        high = min(low + PIECE, self.file.record.size)
        stop = min(high, self._there)
        try:
            if low < stop:
                self._sums.update(self._reader.sums(low, stop))
                self._read_again(low, stop)
        except CheckpointError as error:
            self.problems.append(_problem(error, self.file.path))
        tell.add(high - low)

    def _read_again(self, low: int, stop: int) -> None:
        """Read blocks that differ again, because a network may have changed them."""
        for _ in range(self._reader.storage.rereads):
            for block in self._differing(range(low // BLOCK, -(-stop // BLOCK))):
                start = block * BLOCK
                self._sums.update(self._reader.sums(start, min(start + BLOCK, stop)))

    def _differing(self, blocks: Iterable[int]) -> list[int]:
        return [n for n in blocks if self._sums[n] != self._reader.stored_sum(n)]

    def finish(self) -> list[Problem]:
        """What is wrong, after everything was read."""
        size = self.file.record.size
        try:
            if self.quick and self._there == size:
                self._check_kept(size)
            bad = self._differing(sorted(self._sums))
        # the checksum file is damaged; the manifest's checksum remains
        except CheckpointError as error:
            self.problems.append(_problem(error, self.file.path))
            sums = [value for _, value in sorted(self._sums.items())]
            if self._there == size and hex64(combined(sums, size)) != self.file.summed.crc64:
                self.problems.append(Problem(self.file.path, "the checksum of the file differs"))
            return self.problems
        for block in bad:
            if (block + 1) * BLOCK <= self._there or self._there >= size:
                start, stop = block * BLOCK, min((block + 1) * BLOCK, size)
                what = f"bytes {start} to {stop} differ from what was written"
                self.problems.append(Problem(self.file.path, what, start))
        if not self.problems:
            self._check_header()
        return self.problems

    def _check_kept(self, size: int) -> None:
        """Check the file of checksums, and the file's checksum if the store keeps one."""
        if size:
            self._reader.stored_sum(0)
        kept = self._reader.storage.stored_crc64(self.file.record.name)
        if kept is not None and hex64(kept) != self.file.summed.crc64:
            what = "the store keeps another checksum for it"
            self.problems.append(Problem(self.file.path, what))

    def _look(self) -> int:
        """The file's actual size, 0 if it is missing."""
        try:
            with not_missing(self.file.path):
                size = self._reader.storage.size(self.file.record.name)
        except CheckpointError as error:
            self.problems.append(_problem(error, self.file.path))
            return 0
        written = self.file.record.size
        if size != written:
            what = f"has {size} bytes, but {written} were written"
            self.problems.append(Problem(self.file.path, what, min(size, written)))
        return size

    def _check_header(self) -> None:
        try:
            header = self._catalogue.header(self.file)
        except CheckpointError as error:
            self.problems.append(_problem(error, self.file.path))
            return
        for key in header.slots:
            rows = self._catalogue.rows_by_key.get(key, [])
            if not any(self.file.rank in row.ranks for row in rows):
                what = f"holds {key!r}, which the manifest does not list"
                self.problems.append(Problem(self.file.path, what))


def _check_part(catalogue: Committed, rank: int) -> list[Problem]:
    try:
        catalogue.objects(rank)
    except StateError:  # the type must be allowed by the load, or a library is missing here
        return []
    except CheckpointError as error:
        return [_problem(error, catalogue.parts[rank][0])]
    return []


def _stored_once(catalogue: Committed, damaged: set[int]) -> Iterator[Problem]:
    """Check that every stored array is whole and has no overlaps. Damaged files are left out."""
    for row in catalogue.rows:
        for holders in catalogue.holders(row):
            if not damaged.isdisjoint(holders):
                continue
            try:
                slots = catalogue.slots(row, holders)
            except CheckpointError as error:
                yield _problem(error, catalogue.url)
                continue
            numel = math.prod(row.geometry.local_shape(holders[0]))
            written = sum(slot.nbytes for _, slot in slots) // DTYPES[row.dtype].itemsize
            if written != numel:
                yield Problem(
                    catalogue.url,
                    f"{row.key!r} of ranks {list(holders)} has {numel} elements, but {written} "
                    "are stored, so some are stored twice",
                )


def _covered(catalogue: Committed) -> Iterator[Problem]:
    """Check that the pieces of every logical tensor cover all of it."""
    if not catalogue.whole:
        return  # one group of several: its tensors are whole only together with those of the others
    for name, rows in catalogue.pieces.by_name.items():
        if any(row.geometry.per_rank for row, _ in rows):
            continue  # a per-rank tensor: each rank has it whole
        shape = rows[0][0].geometry.shape_of(rows[0][1])
        if any(row.geometry.shape_of(fqn) != shape for row, fqn in rows):
            continue  # several meshes under one name: each has a tensor of its own
        whole = Box.whole(shape)
        boxes = {source.piece.box: None for source in catalogue.sources(name)}
        try:
            missing = covered(whole, boxes).never
            first = whole.subtract(*boxes)[0] if missing else whole
        except CheckpointError as error:  # they overlap in too many ways
            yield Problem(catalogue.url, f"{name!r} {list(shape)}: {error.message}")
            continue
        if missing:
            yield Problem(
                catalogue.url,
                f"{missing} elements of {name!r} {list(shape)} are in no shard (first at "
                f"{list(first.offsets)})",
            )
