"""What one rank writes: data files, their checksums, and the record that names them.

Every part is written here: that of a save and of torch's DCP, and those of ranks that never ran (a
reshard, an import). Each file's checksums come out of the pass that writes it.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

from smckpt._version import __version__
from smckpt.checkpoint.records.crc import BLOCK, combine, combined, hex64, packed_sums
from smckpt.checkpoint.records.crc import crc64 as crc
from smckpt.checkpoint.records.format import (
    PART_VERSION,
    FileRecord,
    crc_name,
    data_name,
    part_name,
    save_of,
)
from smckpt.checkpoint.records.sealed import seal_json
from smckpt.errors import CheckpointError
from smckpt.layout.image import Layout
from smckpt.layout.mesh import runs_of
from smckpt.storage import FileWriter, Storage

log = logging.getLogger("smckpt")

_MOST_KEYS = 32  # top keys of a state whose values a part tells apart


def part_body(
    layout: Layout,
    rows: Mapping[str, Any],
    *,
    checkpoint_id: str,
    kind: str | None,
    step: int | None,
    objects: Mapping[str, Any] | None = None,
    optimizers: Mapping[str, Any] | None = None,
    topology: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a part's record says beside the attempt and the files; see `format.Part`.

    Args:
        rows: the table of the rank's tensors, as `encode_rows` gives it.
        versions: of more than smckpt and Python.
    """
    return {
        "format": list(PART_VERSION),
        "checkpoint_id": checkpoint_id,
        "kind": kind,
        "rank": layout.rank,
        "host": socket.gethostname(),
        "group_ranks": runs_of(layout.group_ranks),
        "fingerprint": layout.fingerprint,
        "classes": layout.classes,
        "layout": rows,
        "objects": objects or {},
        "value_paths": value_paths(objects or {}),
        "optimizers": optimizers or {},
        "topology": topology,
        "versions": {
            "smckpt": __version__,
            **(versions or {}),
            "python": platform.python_version(),
        },
        "step": step,
        "metadata": metadata or {},
    }


def value_paths(objects: Mapping[str, Any]) -> dict[str, str]:
    """As of a `format.PartRecord`: of ranks with equal ones none has a value that another lacks, so
    that a load need not read the parts of all."""
    paths: dict[str, list[str]] = {}
    for saved in objects.values():
        paths.setdefault(str(saved["path"][0]), []).append(json.dumps(saved["path"]))
    if len(paths) > _MOST_KEYS:
        paths = {"": [path for below in paths.values() for path in below]}
    return {
        top: hashlib.sha256("".join(sorted(below)).encode()).hexdigest()[:16]
        for top, below in sorted(paths.items())
    }


def tables_digest(layout: Mapping[str, Any], optimizers: Mapping[str, Any]) -> str:
    """Identifies what parts of different ranks may have alike, and large: the table of tensors and
    the optimizers' parameters."""
    return hashlib.sha256(json.dumps([layout, optimizers]).encode()).hexdigest()[:32]


def table_of(rank: int, digest: str) -> dict[str, Any]:
    """In place of a part's table: the rank of the same attempt whose part has it. That part has the
    same optimizers, so this one lists none."""
    return {"rank": rank, "digest": digest}


class PartWriter:
    """Writes a rank's part: `file` begins each data file, `finish` makes them a part, `abort`
    removes what was written. All is durable when `finish` returns. One thread calls these; several
    may write to the files."""

    def __init__(self, storage: Storage, attempt: str, rank: int) -> None:
        self.storage = storage
        self._attempt = attempt
        self._rank = rank
        self._files: list[SummedFile] = []
        self._undo: list[Callable[[], None]] = []

    def file(
        self,
        size: int,
        marks: Sequence[int] = (),
        seen: Callable[[int, memoryview], None] | None = None,
    ) -> SummedFile:
        """Begin the next data file; the arguments are those of `SummedFile`."""
        name = data_name(self._attempt, self._rank, len(self._files))
        file = SummedFile(self.storage.create_file(name, size), size, marks, seen)
        self._undo.append(file.abort)
        self._files.append(file)
        return file

    def finish(self, body: Mapping[str, Any]) -> dict[str, str]:
        """Finish the files, then write the record: `body`, the attempt and the files.

        Returns:
            "part" (name), "crc64" (hex, of the record).

        Raises:
            StorageError: the store refused.
        """
        records = []
        for number, file in enumerate(self._files):
            file.finish()
            beside = crc_name(self._attempt, self._rank, number)
            self._put(beside, packed_sums(file.blocks))
            name = data_name(self._attempt, self._rank, number)
            records.append(asdict(FileRecord(name, file.size, file.crc64, beside)))
        session, count = save_of(self._attempt)
        saved = {"attempt": self._attempt, "session": session, "number": count}
        data = seal_json({**body, **saved, "files": records})
        name = part_name(self._attempt, self._rank)
        self._put(name, data)
        return {"part": name, "crc64": hex64(crc(data))}

    def abort(self) -> None:
        """Remove what was written, as far as the store allows; a later sweep removes the rest."""
        for step in reversed(self._undo):
            try:
                step()
            except CheckpointError as error:  # the first failure is the one to report
                log.warning("%s", error)

    def _put(self, name: str, data: bytes) -> None:
        self._undo.append(partial(self.storage.delete, name))
        self.storage.put(name, data)


class SummedFile(FileWriter):
    """A file that is being written, and the checksums of what was written, in any order.

    Args:
        marks: ascending bytes at which checksums are cut, so that `crc_of` can start and stop
            there. Those of blocks are combined.
        seen: called with the offset and the bytes of each stretch between two cuts, while they are
            in the processor's cache.
    """

    def __init__(
        self,
        writer: FileWriter,
        size: int,
        marks: Sequence[int] = (),
        seen: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        self.piece = writer.piece
        self.size = size
        self._writer = writer
        self._marks = marks
        self._seen = seen
        self._runs: dict[int, tuple[int, int]] = {}  # offset → length within a block, checksum
        self._finished = False

    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        at, stop, whole = offset, offset + len(data), 0
        mark = bisect.bisect_right(self._marks, offset)
        while at < stop:
            end = min(at - at % BLOCK + BLOCK, stop)
            if mark < len(self._marks) and self._marks[mark] <= end:
                end, mark = self._marks[mark], mark + 1
            run = data[at - offset : end - offset]
            value = crc(run)
            self._runs[at] = len(run), value
            whole = combine(whole, value, len(run))
            if self._seen is not None:
                self._seen(at, run)
            at = end
        self._writer.write_at(offset, data, whole)

    def finish(self) -> None:
        """Make the file durable, once."""
        if not self._finished:
            self._writer.finish()
            self._finished = True

    def abort(self) -> None:
        self._writer.abort()

    # What was written; to be asked when all is.

    @cached_property
    def blocks(self) -> list[int]:
        """The checksum of each block."""
        out = [0] * -(-self.size // BLOCK)
        for at in self._starts:
            length, value = self._runs[at]
            out[at // BLOCK] = combine(out[at // BLOCK], value, length)
        return out

    @property
    def crc64(self) -> str:
        """The checksum of the file, in hex."""
        return hex64(combined(self.blocks, self.size))

    def crc_of(self, start: int, stop: int) -> int:
        """The checksum of bytes [start, stop), two of the marks."""
        total = 0
        for at in self._starts[bisect.bisect_left(self._starts, start) :]:
            if at >= stop:
                break
            length, value = self._runs[at]
            total = combine(total, value, length)
        return total

    @cached_property
    def _starts(self) -> list[int]:
        return sorted(self._runs)
