"""Verify a whole checkpoint: every byte has its checksum, and every tensor is covered once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.calls import alone, in_threads
from smckpt.checkpoint.commits.contents import replacement
from smckpt.checkpoint.reading.committed import CommittedCatalogue, open_catalogue
from smckpt.checkpoint.reading.read import Progress
from smckpt.checkpoint.records.crc import BLOCK, combined, hex64
from smckpt.checkpoint.upkeep.scan import ScannedFile, Sink, WantedBytes, scan
from smckpt.errors import CheckpointError, CorruptCheckpointError, StateError
from smckpt.layout.entries import DTYPES
from smckpt.layout.strided import Box, covered
from smckpt.storage import Storage, StoreOptions, access_to


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
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> Report:
    """Read and check everything that the newest commit at `url` names.

    Args:
        quick: do not read the data: check the record, manifests, parts, sizes, headers and files of
            checksums, that every tensor is covered, and the checksums that a store keeps itself.
            It finds what is missing, short or exchanged, and not a changed byte on a disk.
        threads: how many threads read and check.
        progress: called with (bytes done, bytes in total), from any thread, one call at a time.
        storage: as for `smckpt.load`.

    Returns:
        A `Report`, which lists all damage; damage is not raised. If the commit itself (a record or
        manifest) is damaged, the report lists only that.

    Raises:
        CheckpointNotFoundError, FormatVersionError: there is nothing to verify.
        CheckpointReplacedError: a newer save swept the checkpoint meanwhile.
    """
    access = access_to(url, storage=storage)
    return verify_storage(access.open(url), os.fspath(url), threads, progress, quick=quick)


def verify_storage(
    storage: Storage,
    url: str,
    threads: int = 4,
    progress: Progress | None = None,
    *,
    quick: bool = False,
    beside: Callable[[CommittedCatalogue], Sequence[Sink]] = lambda _: (),
) -> Report:
    """`verify_checkpoint` for a store.

    Args:
        beside: gives further sinks of the one pass over the files.
    """
    try:
        catalogue = open_catalogue(storage)
    except CorruptCheckpointError as error:
        return Report(url, "", 0, 0, 0, (_problem(error, url),), quick)
    sinks = beside(catalogue)
    report = verify_catalogue(catalogue, url, threads, progress, quick=quick, beside=sinks)
    if (
        report.problems
        and (replaced := replacement(storage, catalogue.identity, "verify")) is not None
    ):
        raise replaced
    return report


def verify_catalogue(
    catalogue: CommittedCatalogue,
    url: str,
    threads: int = 4,
    progress: Progress | None = None,
    *,
    quick: bool = False,
    beside: Sequence[Sink] = (),
) -> Report:
    """`verify_checkpoint` for a catalogue that is open already; `beside`: further sinks."""
    check = _FileChecks(catalogue, quick)
    scan(catalogue.files, [check, *beside], threads=threads, progress=progress)
    return check.report(url, threads)


def _problem(error: CheckpointError, path: str) -> Problem:
    return Problem(error.path or path, error.message)


class _FileChecks(Sink):
    """Checks data files: their sizes, every block, the files of checksums, the headers. `report`
    adds what else makes a checkpoint whole."""

    def __init__(self, catalogue: CommittedCatalogue, quick: bool = False) -> None:
        self.quick = quick
        self._catalogue = catalogue
        self._problems: list[Problem] = []
        self._damaged: set[int] = set()  # ranks

    def begin(self, file: ScannedFile) -> WantedBytes | None:
        return None if self.quick else super().begin(file)

    def end(self, file: ScannedFile) -> None:
        problems = [*self._of_bytes(file)] or [*self._of_header(file)]
        if problems:
            self._damaged.add(file.saved.rank)
            self._problems += problems

    def report(self, url: str, threads: int) -> Report:
        """After the scan: the report of the whole checkpoint."""
        catalogue = self._catalogue
        parts = in_threads(
            lambda rank: _check_part(catalogue, rank),
            catalogue.object_ranks, threads, "smckpt-verify",
        )  # fmt: skip
        found = {*self._problems, *(problem for part in parts for problem in part)}
        found |= {*_stored_once(catalogue, self._damaged), *_covered(catalogue)}
        return Report(
            url=url,
            identity=catalogue.identity,
            files=len(catalogue.files),
            tensors=len(catalogue.logical),
            nbytes=catalogue.nbytes,
            problems=tuple(sorted(found, key=lambda p: (p.path, p.offset or 0, p.what))),
            quick=self.quick,
        )

    def _of_bytes(self, file: ScannedFile) -> Iterator[Problem]:
        there, size = file.there, file.record.size
        if there is not None and there != size:
            what = f"has {there} bytes, but {size} were written"
            yield Problem(file.path, what, min(size, there))
        yield from (_problem(error, file.path) for error in file.faults)
        if self.quick:
            yield from self._kept(file)
        elif file.unproven is not None:
            yield _problem(file.unproven, file.path)
            sums = [value for _, value in sorted(file.sums.items())]
            if there == size and hex64(combined(sums, size)) != file.record.crc64:
                yield Problem(file.path, "the checksum of the file differs")
        for block in file.differing():
            start, stop = block * BLOCK, min((block + 1) * BLOCK, size)
            if stop <= (there or 0):
                what = f"bytes {start} to {stop} differ from what was written"
                yield Problem(file.path, what, start)

    def _kept(self, file: ScannedFile) -> Iterator[Problem]:
        """Check the file of checksums, and the file's checksum if the store keeps one."""
        if file.there != file.record.size:
            return
        if file.record.size and file.unproven is not None:
            yield _problem(file.unproven, file.path)
        try:
            kept = file.saved.storage.stored_crc64(file.record.name)
        except CheckpointError as error:
            yield _problem(error, file.path)
            return
        if kept is not None and hex64(kept) != file.record.crc64:
            yield Problem(file.path, "the store keeps another checksum for it")

    def _of_header(self, file: ScannedFile) -> Iterator[Problem]:
        saved = file.saved
        try:
            header = self._catalogue.header(saved)
        except CheckpointError as error:
            yield _problem(error, file.path)
            return
        for key in header.slots:
            rows = self._catalogue.rows_by_key.get(key, [])
            if not any(saved.rank in row.ranks for row in rows):
                yield Problem(file.path, f"holds {key!r}, which the manifest does not list")


def _check_part(catalogue: CommittedCatalogue, rank: int) -> list[Problem]:
    try:
        catalogue.objects(rank)
    except StateError:  # the type must be allowed by the load, or a library is missing here
        return []
    except CheckpointError as error:
        return [_problem(error, catalogue.parts[rank][0])]
    return []


def _stored_once(catalogue: CommittedCatalogue, damaged: set[int]) -> Iterator[Problem]:
    """Check that every stored array is whole and has no overlaps. Damaged files are left out."""
    for row in catalogue.rows:
        for holders in catalogue.pieces.holders(row).values():
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


def _covered(catalogue: CommittedCatalogue) -> Iterator[Problem]:
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
        boxes = {source.piece.box: None for source in catalogue.pieces.all(name)}
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
