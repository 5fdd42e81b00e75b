"""Write a checkpoint anew for another number of shards: `reshard_checkpoint`.

Each new rank's arrays are planned as a load plans them, read 64 MiB at a time, and written in the
order of the new file. A flat parameter of FSDP1 is read whole.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from smckpt.calls import alone
from smckpt.checkpoint.commits.commit import commit_alone, refuse_not_empty
from smckpt.checkpoint.commits.part import PartWriter, part_body
from smckpt.checkpoint.commits.sweep import discard_attempt
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.reading.plan import Planner
from smckpt.checkpoint.reading.plan_local import LoadingRank
from smckpt.checkpoint.reading.read import Meter, Progress, execute
from smckpt.checkpoint.records.format import new_attempt
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.checkpoint.upkeep.compare import tensors_apart
from smckpt.checkpoint.upkeep.difference import values_apart
from smckpt.errors import UsageError
from smckpt.layout.entries import Entry, dotted
from smckpt.layout.geometry import BoxGeometry, Geometry, PerRankGeometry
from smckpt.layout.image import Layout, compile_layout
from smckpt.layout.mesh import Mesh
from smckpt.storage import Storage, StoreOptions, access_to

__all__ = ["ReshardReport", "differing_names", "reshard_checkpoint", "write_resharded"]

_MAX_RANKS = 1 << 16
_AT_ONCE = 64 << 20  # bytes of an array


@dataclass(frozen=True)
class ReshardReport:
    """What was written."""

    source: str
    target: str
    identity: str
    kind: str
    ranks: int
    tensors: int
    nbytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@alone()
def reshard_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    shard: int,
    threads: int = 4,
    progress: Progress | None = None,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> ReshardReport:
    """Write the newest checkpoint at `source` as `shard` ranks would have saved it, to `target`.

    A tensor that was sharded in any way is sharded along its first dimension, a flat parameter
    as FSDP1 shards it, over one group of `shard` ranks. With 1, every tensor is whole (kind FULL).
    Rank i takes the per-rank values (random generators, data position) of saved rank i mod n, as a
    load does. Every block is compared with its checksum.

    Args:
        shard: the number of ranks.
        threads: how many threads read.
        progress: called with (bytes done, bytes in total), one call at a time.
        storage: as for `smckpt.load`; they apply to both places.

    Raises:
        UsageError: `target` is not empty, or `source` is one group of several.
        TopologyError: tensor-parallel ranks saved plain tensors of their own, which have no shards.
        CorruptCheckpointError: the source is damaged; nothing is committed.
    """
    access = access_to(source, target, storage=storage)
    catalogue, opened = open_catalogue(access.open(source)), access.open(target)
    return write_resharded(catalogue, opened, shard=shard, threads=threads, progress=progress)


def write_resharded(
    catalogue: Catalogue,
    storage: Storage,
    *,
    shard: int,
    ignore: Sequence[str] = (),
    threads: int = 4,
    progress: Progress | None = None,
) -> ReshardReport:
    """Write what a catalogue has as `shard` ranks would have saved it; see `reshard_checkpoint`.
    The catalogue's stores are closed.

    Args:
        ignore: globs of logical names of tensors, and of names of values, that are left out.
    """
    began = time.monotonic()
    if type(shard) is not int or not 1 <= shard <= _MAX_RANKS:
        raise UsageError(f"shard={shard!r}", remedy=f"pass a number from 1 to {_MAX_RANKS}")
    catalogue.refuse_one_group()
    refuse_not_empty(storage)
    writer = _Writer(catalogue, storage, shard, ignore, threads, progress)
    try:
        try:
            writer.write()
        except BaseException:
            discard_attempt(storage, writer.attempt)
            raise
        identity = commit_alone(storage, writer.attempt, writer.parts)
    finally:
        catalogue.stores.close()
    return ReshardReport(
        catalogue.url, storage.url, identity, writer.kind, shard, writer.tensors,
        writer.nbytes, time.monotonic() - began,
    )  # fmt: skip


class _Writer:
    """Writes the parts of ranks that never ran, as they would have written them."""

    def __init__(
        self, catalogue: Catalogue, storage: Storage, ranks: int, ignore: Sequence[str],
        threads: int, progress: Progress | None,
    ) -> None:  # fmt: skip
        self.attempt = new_attempt()
        self.kind = "FULL" if ranks == 1 else "SHARDED"
        self.nbytes = 0
        self._catalogue, self._storage, self._threads = catalogue, storage, threads
        self._group = tuple(range(ranks))
        self._shapes = _Shapes(catalogue, ranks, ignore)
        self._layouts = [
            compile_layout(self._shapes.entries(rank), rank=rank, group_ranks=self._group)
            for rank in self._group
        ]
        total = sum(file.size for layout in self._layouts for file in layout.files)
        self._meter = Meter(progress, total)
        self.parts: list[dict[str, str]] = []

    @property
    def tensors(self) -> int:
        """How many logical tensors there are."""
        return len(
            {e.logical_name(f) for one in self._layouts for e in one.entries for f in e.fqns}
        )

    def write(self) -> None:
        catalogue = self._catalogue
        for rank, layout in enumerate(self._layouts):
            planner = Planner(LoadingRank.of(catalogue, rank, self._group))
            part = PartWriter(self._storage, self.attempt, rank)
            try:
                for number, image in enumerate(layout.files):
                    file, at = part.file(image.size), 0
                    for piece in self._pieces(planner, layout, number):
                        file.write_at(at, piece)
                        at += len(piece)
                        self._meter.add(len(piece))
                    file.finish()
                    self.nbytes += file.size
                body = part_body(
                    layout,
                    encode_rows(self._shapes.entries(rank), catalogue.containers),
                    checkpoint_id=self._storage.url,
                    kind=self.kind,
                    step=catalogue.step,
                    objects=self._shapes.objects(rank),
                    optimizers=self._shapes.optimizers(),
                    metadata=catalogue.metadata,
                )
                self.parts.append(part.finish(body))
            except BaseException:
                part.abort()
                raise

    def _pieces(self, planner: Planner, layout: Layout, number: int) -> Iterator[memoryview]:
        yield memoryview(layout.files[number].header)
        for slot in layout.slots:
            if slot.file == number and slot.stop > slot.start:
                entry = layout.entries[slot.entry]
                at = 0
                for part in _chunks(entry, layout.rank):  # read out of the saved shards
                    low, high = max(slot.start - at, 0), min(slot.stop - at, part.numel)
                    if low < high:
                        data = memoryview(bytearray(part.nbytes))  # padding is zero
                        execute(planner.copies([part]), [data], threads=self._threads)
                        yield data[low * entry.itemsize : high * entry.itemsize]
                    at += part.numel


def _chunks(entry: Entry, rank: int) -> Iterator[Entry]:
    """A rank's array in parts of bounded size, in its order. One that is made of several pieces (a
    flat parameter) is one part."""
    pieces = entry.geometry.pieces(rank)
    whole = len(pieces) == 1 and pieces[0].box.numel == entry.numel
    if entry.geometry.per_rank or not whole:
        yield entry
        return
    (piece,) = pieces
    for box in piece.box.chunks(max(1, _AT_ONCE // entry.itemsize)):
        rule = BoxGeometry(piece.name, piece.shape, (box,), (rank,))
        yield replace(entry, geometry=rule)


class _Shapes:
    """What each of `ranks` new ranks holds."""

    def __init__(self, catalogue: Catalogue, ranks: int, ignore: Sequence[str]) -> None:
        self._catalogue = catalogue
        self._ignore = ignore
        self._ranks = ranks
        self._mesh = Mesh(("replicate", "shard"), (1, ranks), tuple(range(ranks)))
        self._rules: dict[str, Geometry] = {}

    def entries(self, rank: int) -> list[Entry]:
        return [
            self._entry(self._row(rows, rank), rank)
            for rows in self._catalogue.rows_by_key.values()
            if not self._left_out(dotted(rows[0].logical_path(rows[0].fqns[0])))
        ]

    def objects(self, rank: int) -> dict[str, Any]:
        """Its values: those of the saved rank that it follows, and what that one lacks of the
        lowest."""
        saved = self._catalogue.object_ranks
        of = self._catalogue.part
        both = {**of(saved[0])["objects"], **of(saved[rank % len(saved)])["objects"]}
        return {name: leaf for name, leaf in both.items() if not self._left_out(name)}

    def optimizers(self) -> dict[str, Any]:
        """Of all groups; of two with one name the first group's."""
        saved = [self._catalogue.optimizers_of(r) for r in self._catalogue.object_ranks]
        return {name: names for of in reversed(saved) for name, names in of.items()}

    def _left_out(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore)

    def _row(self, rows: list[Entry], rank: int) -> Entry:
        """The saved row of a key that a rank follows."""
        kinds = {(row.geometry.fqns, row.dtype, row.geometry.per_rank) for row in rows}
        if len(kinds) > 1:
            raise UsageError(
                f"{rows[0].key!r} is not the same tensor on all ranks",
                remedy="such a checkpoint can be loaded, but not resharded",
                path=self._catalogue.url,
            )
        if not rows[0].geometry.per_rank:
            return rows[0]
        ranks = range(self._ranks)
        me = LoadingRank(self._catalogue, rank, ranks)
        saved = me.followed({r for row in rows for r in row.ranks})
        return next(row for row in rows if saved in row.ranks)

    def _entry(self, row: Entry, rank: int) -> Entry:
        if row.geometry.per_rank:
            rule: Geometry = PerRankGeometry(row.fqns, row.geometry.whole_shape, (rank,))
        else:
            if row.key not in self._rules:
                self._rules[row.key] = row.geometry.over(self._mesh)
            rule = self._rules[row.key]
        return Entry(row.path, row.dtype, rule, row.before, row.after, (rank,))


def differing_names(catalogue: Catalogue) -> list[str]:
    """The names under which ranks have other tensors or values than the lowest rank: random
    generators, data positions, buffers, slices of tensor-parallel ranks. A value that only some
    ranks saved is not among them.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged.
    """
    return sorted({*values_apart(catalogue), *tensors_apart(catalogue)})
