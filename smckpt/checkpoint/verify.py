"""Verifying a whole checkpoint: every byte against its checksum, every tensor covered once."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.blocks import SavedFile, combined, not_missing
from smckpt.checkpoint.catalogue import Catalogue, open_catalogue
from smckpt.checkpoint.crc import BLOCK, hex64
from smckpt.checkpoint.replaced import replacement
from smckpt.checkpoint.sources import remaining_after, row_shape
from smckpt.errors import CheckpointError, CorruptCheckpointError
from smckpt.layout.geometry import Box
from smckpt.storage.pool import pool_here
from smckpt.storage.s3_config import s3_options, using_s3

__all__ = ["Problem", "Report", "verify_checkpoint"]

PIECE = 8 * BLOCK  # bytes that a thread reads at once

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong: in which file or directory, from which byte on (None: not in one
    place), and what."""

    path: str
    what: str
    offset: int | None = None


@dataclass(frozen=True)
class Report:
    """What was looked at, and what is wrong with it."""

    url: str
    identity: str
    files: int
    tensors: int
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def verify_checkpoint(
    url: str | os.PathLike[str],
    *,
    threads: int = 4,
    progress: Progress | None = None,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> Report:
    """Read everything that the newest commit at `url` names.

    Args:
        threads: that read and check.
        progress: called with (bytes done, bytes in all), from any thread, one call at a time.
        s3_region, s3client_config: as `smckpt.load` has them.

    Returns:
        A `Report`; all damage is listed there, not raised. Where the commit itself (a record or
        manifest) is damaged, that is all it lists.

    Raises:
        CheckpointNotFoundError, FormatVersionError: there is nothing to verify.
        CheckpointReplacedError: a newer save has swept it meanwhile.
    """
    directory = os.fspath(url)
    given = s3_region is not None or s3client_config is not None
    options = s3_options(directory, s3_region, s3client_config) if given else None
    with using_s3(options):  # else those in force hold
        return _verified(directory, threads, progress)


def _verified(url: str, threads: int, progress: Progress | None) -> Report:
    try:
        catalogue = open_catalogue(url)
    except CorruptCheckpointError as error:
        return Report(url, "", 0, 0, 0, (_problem(error, url),))
    files = [_FileCheck(catalogue, file) for file in catalogue.files]
    total = sum(check.file.record.size for check in files)
    tell = _Teller(progress, total)
    problems: list[Problem] = []
    with pool_here(threads, "smckpt-verify") as pool:
        reads = [pool.submit(check.read, low, tell) for check in files for low in check.starts()]
        parts = [pool.submit(_check_part, catalogue, rank) for rank in catalogue.object_ranks]
        for read in reads:
            read.result()
        for found in (*pool.map(_FileCheck.finish, files), *(part.result() for part in parts)):
            problems += found
    if problems and (replaced := replacement(url, catalogue.identity, "verify")) is not None:
        raise replaced
    damaged = {check.file.rank for check in files if check.problems}
    problems += [*_stored_once(catalogue, damaged), *_covered(catalogue)]
    return Report(
        url=url,
        identity=catalogue.identity,
        files=len(files),
        tensors=len(catalogue.logical),
        nbytes=total,
        problems=tuple(sorted(set(problems), key=lambda p: (p.path, p.offset or 0, p.what))),
    )


class _Teller:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _problem(error: CheckpointError, path: str) -> Problem:
    return Problem(error.path or path, error.message)


class _FileCheck:
    """One data file: its size, every block, the sidecar, the header. Thread-safe."""

    def __init__(self, catalogue: Catalogue, file: SavedFile) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self._catalogue = catalogue
        self._reader = catalogue.reader(file)
        self._sums: dict[int, int] = {}
        self._there = self._look()

    def starts(self) -> range:
        """Where the pieces begin that `read` reads."""
        return range(0, self.file.record.size, PIECE)

    def read(self, low: int, tell: _Teller) -> None:
        """Read a piece, as far as the file goes."""
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
        """Blocks that differ, where a network may have changed them on their way."""
        for _ in range(self._reader.storage.rereads):
            for block in self._differing(range(low // BLOCK, -(-stop // BLOCK))):
                start = block * BLOCK
                self._sums.update(self._reader.sums(start, min(start + BLOCK, stop)))

    def _differing(self, blocks: Iterable[int]) -> list[int]:
        return [n for n in blocks if self._sums[n] != self._reader.stored_sum(n)]

    def finish(self) -> list[Problem]:
        """Once all is read: what is wrong."""
        size = self.file.record.size
        try:
            bad = self._differing(sorted(self._sums))
        except CheckpointError as error:  # the sidecar: what the manifest says remains
            self.problems.append(_problem(error, self.file.path))
            sums = [value for _, value in sorted(self._sums.items())]
            if self._there == size and hex64(combined(sums, size)) != self.file.record.crc64:
                self.problems.append(Problem(self.file.path, "the checksum of the file differs"))
            return self.problems
        for block in bad:
            if (block + 1) * BLOCK <= self._there or self._there >= size:
                start, stop = block * BLOCK, min((block + 1) * BLOCK, size)
                what = f"bytes {start} to {stop} are not those that were written"
                self.problems.append(Problem(self.file.path, what, start))
        if not self.problems:
            self._check_header()
        return self.problems

    def _look(self) -> int:
        """The file's size as it is, 0 if it is missing."""
        try:
            with not_missing(self.file.path):
                size = self._reader.storage.size(self.file.record.name)
        except CheckpointError as error:
            self.problems.append(_problem(error, self.file.path))
            return 0
        written = self.file.record.size
        if size != written:
            what = f"has {size} bytes, {written} were written"
            self.problems.append(Problem(self.file.path, what, min(size, written)))
        return size

    def _check_header(self) -> None:
        try:
            header = self._catalogue.header(self.file)
        except CheckpointError as error:
            self.problems.append(_problem(error, self.file.path))
            return
        for key in header.entries:
            rows = self._catalogue.rows_by_key.get(key, [])
            if not any(self.file.rank in row.ranks for row in rows):
                what = f"holds {key!r}, of which the manifest does not know"
                self.problems.append(Problem(self.file.path, what))


def _check_part(catalogue: Catalogue, rank: int) -> list[Problem]:
    try:
        catalogue.part(rank)
    except CheckpointError as error:
        return [_problem(error, catalogue.parts[rank][0])]
    return []


def _stored_once(catalogue: Catalogue, damaged: set[int]) -> Iterator[Problem]:
    """Every stored array whole, without overlaps. What damaged files hold is not known."""
    for row in catalogue.rows:
        for holders in catalogue.holders(row):
            if not damaged.isdisjoint(holders):
                continue
            try:
                slots = catalogue.slots(row, holders)
            except CheckpointError as error:
                yield _problem(error, catalogue.url)
                continue
            numel = math.prod(row.local_shape(holders[0]))
            written = sum(slot.stop - slot.start for slot in slots)
            if written != numel:
                yield Problem(
                    catalogue.url,
                    f"{row.key!r} of ranks {list(holders)} has {numel} elements, {written} are "
                    "stored: some twice",
                )


def _covered(catalogue: Catalogue) -> Iterator[Problem]:
    """The pieces of every logical tensor make all of it."""
    if not catalogue.whole:
        return  # one group of several: its tensors are whole only together with the others'
    for name, rows in catalogue.pieces.by_name.items():
        if any(row.geometry is None for row, _ in rows):
            continue  # kept by each rank, whole
        shape = row_shape(*rows[0])
        if any(row_shape(row, fqn) != shape for row, fqn in rows):
            continue  # tensors of several meshes under one name: each is its own
        left = [Box.whole(shape)] if Box.whole(shape).numel else []
        for source in catalogue.sources(name):
            left = remaining_after(left, source.piece.box)
            if not left:
                break
        if left:
            missing = sum(box.numel for box in left)
            yield Problem(
                catalogue.url,
                f"{missing} elements of {name!r} {list(shape)} are in no shard (first at "
                f"{list(left[0].offsets)})",
            )
