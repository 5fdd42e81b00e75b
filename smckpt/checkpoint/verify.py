"""Verifying a whole checkpoint: every byte against its checksum, every tensor covered once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.catalogue import Catalogue, SavedFile, open_catalogue, remaining_after
from smckpt.checkpoint.crc import BLOCK
from smckpt.checkpoint.read import BlockReader
from smckpt.errors import CheckpointError
from smckpt.layout.geometry import Box

__all__ = ["Problem", "Report", "verify_checkpoint"]

PIECE = 8 * BLOCK

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong: where, and what."""

    path: str
    what: str


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


def verify_checkpoint(url: str, *, threads: int = 4, progress: Progress | None = None) -> Report:
    """Read everything that the newest commit at `url` names.

    Args:
        progress: called with (bytes done, bytes in all), from any thread, one call at a time.

    Returns:
        A `Report`; damage to data is listed there, all of it, not raised.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: the commit itself
            (record, manifest) is missing or cannot be read.
    """
    catalogue = open_catalogue(url)
    files = catalogue.files
    total = sum(f.record.size for f in files)
    tell = _Teller(progress, total)
    problems: list[Problem] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="smckpt-verify") as pool:
        futures = [
            pool.submit(_check_blocks, catalogue, file, low, tell)
            for file in files
            for low in range(0, file.record.size, PIECE)
        ]
        futures += [pool.submit(_check_file, catalogue, file) for file in files]
        futures += [pool.submit(_check_part, catalogue, rank) for rank in catalogue.object_ranks]
        for future in as_completed(futures):
            problems += future.result()
    problems += _coverage(catalogue)
    return Report(
        url=url,
        identity=catalogue.identity,
        files=len(files),
        tensors=len(catalogue.logical),
        nbytes=total,
        problems=tuple(sorted(set(problems), key=lambda p: (p.path, p.what))),
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


def _check_blocks(catalogue: Catalogue, file: SavedFile, low: int, tell: _Teller) -> list[Problem]:
    """Each block by itself, so that all bad ones are listed."""
    reader = BlockReader(catalogue.storage(file.directory), file, verify=True)
    high = min(low + PIECE, file.record.size)
    found = []
    for start in range(low, high, BLOCK):
        try:
            reader.fill(start, min(start + BLOCK, high), [])
        except CheckpointError as error:
            found.append(_problem(error, file.path))
    tell.add(high - low)
    return found


def _check_file(catalogue: Catalogue, file: SavedFile) -> list[Problem]:
    try:
        size = catalogue.storage(file.directory).size(file.record.name)
        if size != file.record.size:
            return [Problem(file.path, f"has {size} bytes, {file.record.size} were written")]
        catalogue.header(file)
    except CheckpointError as error:
        return [_problem(error, file.path)]
    return []


def _check_part(catalogue: Catalogue, rank: int) -> list[Problem]:
    try:
        catalogue.part(rank)
    except CheckpointError as error:
        return [_problem(error, catalogue.parts[rank][0])]
    return []


def _coverage(catalogue: Catalogue) -> Iterator[Problem]:
    """Every stored array whole, without overlaps; every logical tensor covered."""
    for row in catalogue.rows:
        for holders in catalogue.holders(row):
            numel = row.entry(holders[0]).numel
            try:
                slots = catalogue.slots(row, holders)
            except CheckpointError as error:
                yield _problem(error, catalogue.url)
                continue
            written = sum(slot.stop - slot.start for slot in slots)
            if written != numel:
                yield Problem(
                    catalogue.url,
                    f"{row.key!r} of ranks {list(holders)} has {numel} elements, {written} are "
                    "stored: some twice",
                )
    if not catalogue.whole:
        return  # one group of several: its tensors are whole only together with the others'
    for name, tensor in catalogue.logical.items():
        left = [Box.whole(tensor.shape)] if Box.whole(tensor.shape).numel else []
        for source in catalogue.sources(name):
            if not left:
                break
            if source.row.geometry is None and source.piece.shape != tensor.shape:
                continue  # values kept per rank may differ in shape
            left = remaining_after(left, source.piece.box)
        if left:
            missing = sum(box.numel for box in left)
            yield Problem(
                catalogue.url,
                f"{missing} elements of {name!r} {list(tensor.shape)} are in no shard (first at "
                f"{list(left[0].offsets)})",
            )
