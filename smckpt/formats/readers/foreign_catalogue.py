"""A checkpoint that others wrote as a catalogue, like one of ours: chosen, planned and read in the
same way.

Each saved box is the array of a rank of its own. What no checksum of ours covers is compared with
the CRC-32 of `torch.save`, where the file has one.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from smckpt.checkpoint.reading.blocks import Destination, OtherFile, SavedFile, Scratch, Stores
from smckpt.checkpoint.reading.catalogue import Catalogue, SavedPieces, Stored
from smckpt.checkpoint.reading.plan import WholeTensors
from smckpt.checkpoint.reading.read import Meter, Progress
from smckpt.checkpoint.records.headers import StoredSlot
from smckpt.checkpoint.records.objects import encode_object
from smckpt.checkpoint.upkeep.verify import Problem, Report
from smckpt.errors import CorruptCheckpointError, StateError, UsageError, few
from smckpt.formats.boxes import (
    ForeignCheckpoint,
    SavedBox,
    SavedTensor,
    SavedValue,
    refuse_gaps,
    stored_piece,
)
from smckpt.formats.readers.rank_sources import RankFilesFound, open_source
from smckpt.formats.readers.torch_files import open_state
from smckpt.formats.source_files import ArchiveRecord, SourceFiles
from smckpt.formats.torch_archive import StoredTensor
from smckpt.layout.containers import container_kind, items_of, joined
from smckpt.layout.entries import DTYPES, Entry, dotted
from smckpt.layout.entries import Path as StatePath
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.strided import Box, Copy, Strided, row_major_strides
from smckpt.storage import Storage, access_to
from smckpt.storage.faults import temporary_error

_MOST_LEAVES = 1 << 16  # of a value that holds arrays
# The step's names in states: at the top, and in what the manager and the frameworks keep below one.
_STEPS = (
    "step", "iteration", "global_step", "global_steps", "manager.step", "trainer.global_step",
    "lightning.global_step", "train_state.step",
)  # fmt: skip


def foreign_catalogue(storage: Storage) -> ForeignCatalogue | None:
    """What others wrote in a directory, or in a file; None: nothing that is known.

    Raises:
        UsageError: it is no whole state: the files of tensor-parallel ranks.
        CorruptCheckpointError: it is damaged, or a file is missing.
    """
    found = open_source(storage.url, storage.access)
    if isinstance(found, RankFilesFound):
        if not found.whole:
            raise UsageError(
                f"these are files of ranks ({found.format}), each with tensors of its own",
                remedy="make a Hugging Face model of them with `smckpt export`", path=storage.url,
            )  # fmt: skip
        (record,) = found.files.values()
        found = open_state([record], found.source)
    elif found is not None and found.parts:
        found = replace(open_state(found.parts, found.source), url=found.url, format=found.format)
    if found is None:
        return None
    for name, tensor in found.saved.items():
        if dotted(tensor.path) != name:
            raise CorruptCheckpointError(
                f"{name} is a tensor at another path, {dotted(tensor.path)}",
                remedy="fetch its metadata again, or use another checkpoint", path=found.url,
            )  # fmt: skip
        refuse_gaps(tensor, found.url)
    return ForeignCatalogue(found)


class ForeignCatalogue(Catalogue):
    """What others wrote; made by `foreign_catalogue`."""

    ours = False
    object_ranks = (0,)

    def __init__(self, source: ForeignCheckpoint) -> None:
        self.url = self.above = source.url
        self.stores: _ForeignStores = _ForeignStores(source.source)
        self.identity, self.source = source.format, self._with_arrays(source)
        self.metadata, self.optimizers = {}, {}
        self.nbytes = sum(
            math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in source.saved.values()
        )

    def _with_arrays(self, source: ForeignCheckpoint) -> ForeignCheckpoint:
        """The checkpoint with NumPy's arrays among its tensors, as a save of ours has them. Formats
        of torch have them among the values, alone or inside one."""
        saved, values, containers = dict(source.saved), dict(source.values), dict(source.containers)
        for name, value in source.values.items():
            kinds: dict[StatePath, str] = {}
            try:
                read = value.read()
                values[name] = SavedValue(value.path, partial(_itself, read))  # it is read once
                if not _holds_array(read, set()):
                    continue
                leaves = [*itertools.islice(_apart(value.path, read, kinds), _MOST_LEAVES)]
            except (StateError, RecursionError, CorruptCheckpointError):
                continue  # `unread` names it, or who asks for it hears that it is damaged
            if len(leaves) == _MOST_LEAVES:  # a forged value may hold one part many times
                continue
            del values[name]
            containers |= kinds
            for path, leaf in leaves:
                if _is_array(leaf):
                    box = SavedBox(Box.whole(leaf.shape), self.url, partial(self.stores.held, leaf))
                    tensor = SavedTensor(dotted(path), path, leaf.dtype.name, leaf.shape, (box,))
                    saved[tensor.name], containers[path] = tensor, "ndarray"
                else:
                    values[dotted(path)] = SavedValue(path, partial(_itself, leaf))
        return replace(source, saved=saved, values=values, containers=containers)

    @cached_property
    def step(self) -> int | None:
        """The step, where the state has it under a known name."""
        for name in _STEPS:
            above, _, key = name.rpartition(".")
            value: Any = None
            with contextlib.suppress(StateError, CorruptCheckpointError):
                if name in self.source.values:
                    value = self.source.values[name].read()
                elif above in self.source.values:  # a dict of values is one, in a file of torch
                    inner = self.source.values[above].read()
                    value = inner.get(key) if isinstance(inner, dict) else None
                elif name in self.source.saved:
                    value = self._whole_number(name)
            if type(value) is int and value >= 0:
                return value
        return None

    def _whole_number(self, name: str) -> int | None:
        """The value of a tensor that holds one."""
        reads = WholeTensors(self, 0, 1)
        (tensor,) = (one for one in reads.tensors if one.name == name)
        if tensor.shape or tensor.dtype not in ("int32", "int64"):
            return None
        memory = bytearray(tensor.nbytes)
        reads.read(tensor, Box.whole(()), memoryview(memory))
        return int.from_bytes(memory, "little", signed=True)

    def kinds(self, rank: int) -> dict[StatePath, str] | None:
        return dict(self.source.containers)

    def refuse_unread(
        self, left_out: Callable[[str], bool], remedy: str = "leave them out: ignore=[…]"
    ) -> None:
        unread = [name for name in sorted(self.unread) if not left_out(name)]
        if unread:
            why = self.unread[unread[0]].message
            raise StateError(
                f"{few(unread)} hold objects that are not plain data ({why})",
                remedy=remedy, path=self.url,
            )  # fmt: skip

    @cached_property
    def rows(self) -> tuple[Entry, ...]:
        """A row for each part."""
        rows = []
        for tensor in self.source.saved.values():
            path = tensor.path
            texts = [at for at, part in enumerate(path) if isinstance(part, str)]
            turn = texts[-1] if texts else 0
            before, after = path[:turn], path[turn + 1 :]
            for number, saved in enumerate(_boxes(tensor)):
                rule = BoxGeometry(str(path[turn]), tensor.shape, (saved.box,), (number,))
                rows.append(Entry(path, tensor.dtype, rule, before, after, (number,)))
        return tuple(rows)

    @cached_property
    def pieces(self) -> SavedPieces:
        return SavedPieces(
            self.rows, [range(1 + max((row.ranks[0] for row in self.rows), default=0))]
        )

    def read_headers(self, ranks: Iterable[int]) -> None:
        """Nothing: each part's header is read when its place is asked for."""

    def slots(self, row: Entry, holders: Sequence[int]) -> list[Stored]:
        tensor = self.source.saved[row.key]
        saved = _boxes(tensor)[holders[0]]
        return [self.stores.stored(tensor, saved)] if saved.box.numel else []

    def part(self, rank: int) -> dict[str, Any]:
        return {"objects": self._encoded[0], "optimizers": {}}

    def part_url(self, rank: int) -> str:
        return self.url

    @cached_property
    def unread(self) -> dict[str, StateError]:
        """The values that are not plain data, and why. They are not among the objects."""
        return self._values[1] | self._encoded[1]

    @cached_property
    def _values(self) -> tuple[dict[StatePath, Any], dict[str, StateError]]:
        values: dict[StatePath, Any] = {}
        unread: dict[str, StateError] = {}
        for name, value in self.source.values.items():
            try:
                values[value.path] = value.read()
            except StateError as error:
                unread[name] = error
        return values, unread

    @cached_property
    def _encoded(self) -> tuple[dict[str, Any], dict[str, StateError]]:
        leaves = joined(self._values[0], (tensor.path for tensor in self.source.saved.values()))
        objects, unread = {}, {}
        for path, value in leaves:
            name = dotted(path)
            try:
                objects[name] = {"path": list(path), "value": encode_object(value, path=name)}
            except StateError as error:
                unread[name] = error
        return objects, unread


def _itself(value: Any) -> Any:
    return value


def _is_array(value: Any) -> bool:
    """Whether a save takes it for a tensor: torch has no text and no times."""
    return type(value) is np.ndarray and value.dtype.isnative and value.dtype.name in DTYPES


def _apart(
    path: StatePath, value: Any, containers: dict[StatePath, str]
) -> Iterator[tuple[StatePath, Any]]:
    """The arrays of a value, and the largest parts without one."""
    items = [*(items_of(value) or ())]
    if not _holds_array(value, set()) or any(type(key) not in (str, int) for key, _ in items):
        yield path, value
        return
    if (kind := container_kind(value)) is not None:
        containers[path] = kind
    if _is_array(value):
        yield path, value
    for key, inner in items:
        yield from _apart((*path, key), inner, containers)


def _holds_array(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    return _is_array(value) or any(_holds_array(inner, seen) for _, inner in items_of(value) or ())


def _boxes(tensor: SavedTensor) -> Sequence[SavedBox]:
    """The parts of a tensor; of one without elements, a part that is empty."""
    if tensor.boxes:
        return tensor.boxes
    nowhere = StoredTensor(tensor.dtype, tensor.shape, (), 0, ArchiveRecord("", 0, 0))
    return [SavedBox.of(Box.whole(tensor.shape), nowhere)]


# -- the bytes -------------------------------------------------------------------------------------


class _ForeignStores(Stores):
    """Stores of files of others, whose records are compared with their own CRC-32."""

    def __init__(self, source: SourceFiles) -> None:
        super().__init__(source.access)
        self._records = _Records(source)
        self._stored: dict[tuple[str, Box], Stored] = {}
        self._files: dict[str, SavedFile] = {}
        self._guard = threading.Lock()
        self._spool: str | None = None

    def stored(self, tensor: SavedTensor, saved: SavedBox) -> Stored:
        """Where the elements of a part are, row-major.

        Raises:
            TensorMismatchError, CorruptCheckpointError: another tensor, or none, lies there.
        """
        key = tensor.name, saved.box
        with self._guard:
            if key not in self._stored:
                self._stored[key] = self._find_stored(tensor, saved)
            return self._stored[key]

    def held(self, array: Any) -> StoredTensor:
        """An array that is in memory, in a file as the others are."""
        path = self._spooled(max(array.nbytes, 1))
        target = np.memmap(path, array.dtype, "r+", shape=array.shape or (1,))
        target[...] = array
        target.flush()
        strides = row_major_strides(array.shape)
        record = ArchiveRecord(path, 0, array.nbytes)
        return StoredTensor(array.dtype.name, array.shape, strides, 0, record)

    def close(self) -> None:
        super().close()
        self._records.close()
        with self._guard:
            spool, self._spool = self._spool, None
            if spool is not None:
                self._stored.clear()
                shutil.rmtree(spool, ignore_errors=True)

    def _find_stored(self, tensor: SavedTensor, saved: SavedBox) -> Stored:
        piece, stored = stored_piece(tensor, saved)
        itemsize = DTYPES[tensor.dtype].itemsize
        nbytes = piece.box.numel * itemsize
        path, offset = stored.record.path, stored.record.offset + piece.start * itemsize
        dense = row_major_strides(piece.box.sizes)
        pairs = zip(piece.box.sizes, piece.strides, dense, strict=True)
        if all(stride == wanted for size, stride, wanted in pairs if size > 1):
            self._records.add(stored.record)
        else:
            # A part in another order (a transposed matrix) is read from a file with its elements in
            # row-major order. Memory: pages of both files, which the system drops.
            path, offset = self._spooled(max(nbytes, 1)), 0
            target = np.memmap(path, np.uint8, "r+", shape=nbytes)
            copy = Copy(piece.part(piece.box), Strided.whole(piece.box.sizes))
            self._records.files.copy(stored.record, copy, itemsize, target.data)
            target.flush()
        slot = StoredSlot(
            0, nbytes, offset, DTYPES[tensor.dtype].code or "U8", piece.box.sizes, False
        )
        if path not in self._files:
            directory, _, name = path.rpartition("/")
            record = OtherFile(name, self._records.files.whole(path).nbytes)
            self._files[path] = _OtherFile(
                self.storage(f"{directory}/"), record, 0, self.scratch, self._records
            )
        return self._files[path], slot

    def _spooled(self, nbytes: int) -> str:
        """A new file of this size in the temporary directory, which has room for it: a write
        through its map would kill the process (SIGBUS) on a full disk."""
        try:
            if self._spool is None:
                self._spool = tempfile.mkdtemp(prefix="smckpt-")
                weakref.finalize(self, shutil.rmtree, self._spool, ignore_errors=True)
            file, path = tempfile.mkstemp(dir=self._spool)
            try:
                os.posix_fallocate(file, 0, nbytes)
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(file)
        except OSError as error:
            raise temporary_error(error, "order a tensor's elements") from error
        return path


class _Records:
    """The records that are read from, by file. Each is compared with its CRC-32 once."""

    def __init__(self, source: SourceFiles) -> None:
        self.files = source
        self._lock = threading.Lock()
        self._known: dict[str, list[tuple[int, ArchiveRecord]]] = {}

    def add(self, record: ArchiveRecord) -> None:
        if record.crc is None:
            return
        with self._lock:
            known = self._known.setdefault(record.path, [])
            at = bisect.bisect_left(known, record.offset, key=lambda one: one[0])
            if at == len(known) or known[at][0] != record.offset:
                known.insert(at, (record.offset, record))

    def check(self, path: str, low: int, high: int) -> None:
        """
        Raises:
            CorruptCheckpointError: a record that has bytes in [low, high) differs from its CRC-32.
        """
        with self._lock:
            known = self._known.get(path, [])
            first = bisect.bisect_right(known, low, key=lambda one: one[0]) - 1
            last = bisect.bisect_left(known, high, key=lambda one: one[0])
            found = [record for _, record in known[max(first, 0) : last]]
        for record in found:
            if record.offset + record.nbytes > low:
                self.files.check(record)

    def close(self) -> None:
        self.files.close()


class _OtherFile(SavedFile):
    """A file of others. It is compared with the CRC-32 of its records."""

    def __init__(
        self, storage: Storage, record: OtherFile, rank: int, scratch: Scratch, records: _Records
    ) -> None:
        super().__init__(storage, record, rank, scratch)
        self._records = records

    def fill(self, low: int, high: int, segments: Sequence[Destination]) -> None:
        if segments:
            low, high = segments[0].offset, segments[-1].end
        self._records.check(self.path, low, high)
        if segments:
            self._fetch(low, high, segments)


_AT_ONCE = 64 << 20  # bytes


def verify_foreign(
    url: str | os.PathLike[str], *, threads: int = 4, progress: Progress | None = None
) -> Report | None:
    """Read every tensor of a checkpoint of torch DCP, `torch.save`, safetensors or Hugging Face.

    torch's files have a CRC-32 of each tensor, which the read compares. Safetensors have none:
    there only what is missing or short is found.

    Returns:
        A `Report`; None if nothing that others wrote is there.

    Raises:
        CheckpointError: its metadata or index cannot be read.
    """
    storage = access_to(url).open(url)
    catalogue = foreign_catalogue(storage)
    if catalogue is None:
        return None
    reads = WholeTensors(catalogue, catalogue.object_ranks[0], threads)
    tell = Meter(progress, sum(tensor.nbytes for tensor in reads.tensors))
    size = min(_AT_ONCE, max((tensor.nbytes for tensor in reads.tensors), default=0))
    buffer, problems = memoryview(bytearray(size)), []
    for tensor in reads.tensors:
        for box in tensor.chunks(_AT_ONCE) if tensor.nbytes else ():
            nbytes = box.numel * tensor.itemsize
            try:
                reads.read(tensor, box, buffer[:nbytes])
            except CorruptCheckpointError as error:
                problems.append(
                    Problem(error.path or storage.url, f"{tensor.name}: {error.message}")
                )
                break
            tell.add(nbytes)
    for value in catalogue.source.values.values():
        with contextlib.suppress(StateError):  # a load has to be told of its class, or to leave it
            try:
                value.read()
            except CorruptCheckpointError as error:
                problems.append(Problem(error.path or storage.url, error.message))
    return Report(
        url=os.fspath(url),
        identity=catalogue.identity,
        files=len(
            {b.file for saved in catalogue.source.saved.values() for b in saved.boxes}
            - {catalogue.url}
        )
        or 1,
        tensors=len(reads.tensors),
        nbytes=sum(tensor.nbytes for tensor in reads.tensors),
        problems=tuple(problems),
    )
