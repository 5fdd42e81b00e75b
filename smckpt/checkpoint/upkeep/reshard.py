"""Write a checkpoint anew for another number of shards: `reshard_checkpoint`.

Each new rank's arrays are planned as a load plans them, read 64 MiB at a time, and written in the
order of the new file. A flat parameter of FSDP1 is read whole.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from smckpt.layout.entries import Entry, Path, dotted
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
        catalogue, saved = self._catalogue, self._catalogue.object_ranks
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
                kinds = catalogue.kinds(saved[rank % len(saved)])
                body = part_body(
                    layout,
                    encode_rows(self._shapes.entries(rank), kinds),
                    checkpoint_id=self._storage.url,
                    kind=self.kind,
                    step=catalogue.step,
                    objects=self._shapes.objects(rank),
                    optimizers=self._shapes.optimizers(rank),
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
        self._kept: dict[str, list[Entry]] = {}  # by key
        for key, rows in catalogue.rows_by_key.items():
            if not self._left_out(dotted(rows[0].logical_path(rows[0].fqns[0]))):
                self._kept[key] = rows
                each = {(r.fqns, r.geometry.per_rank or r.dtype) for r in rows}
                if len(each) > 1:
                    raise self._refused(
                        f"{key!r} is not the same tensor on all ranks",
                        "it can be loaded, but not resharded",
                    )
        self._optimizers: dict[str, Any] = {}
        for rank in catalogue.object_ranks:
            for path, record in catalogue.optimizers_of(rank).items():
                first = self._optimizers.setdefault(path, record)
                if record.get("form") == first.get("form") == "fqn":
                    ids = dict.fromkeys(map(tuple, [*first["ids"], *record["ids"]]))
                    self._optimizers[path] = {**first, "ids": [*map(list, ids)]}
        self._followed: list[int] = []  # by new rank: the saved rank whose values it takes
        self._shared: dict[tuple[Path, int, int], bool] = {}
        self._rows: list[list[Entry]] = []  # by new rank: the saved rows that it takes
        self._choose()

    def entries(self, rank: int) -> list[Entry]:
        return [self._entry(row, rank) for row in self._rows[rank]]

    def objects(self, rank: int) -> dict[str, Any]:
        """Its values: those of the saved rank that it follows. What that one lacks, a load takes
        from the lowest rank, here as there."""
        saved = self._catalogue.part(self._followed[rank])["objects"]
        return {name: leaf for name, leaf in saved.items() if not self._left_out(name)}

    def optimizers(self, rank: int) -> dict[str, Any]:
        """Of all groups; of several with one name that of the saved rank that it follows, or else
        the first group's. Where the state has names, those of all groups are in it."""
        every, own = self._optimizers, self._catalogue.optimizers_of(self._followed[rank])
        forms = {
            path: {record.get("form"), every[path].get("form")} for path, record in own.items()
        }
        return {**every, **{path: own[path] for path, form in forms.items() if form != {"fqn"}}}

    def _left_out(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._ignore)

    def _choose(self) -> None:
        """Find what each new rank takes, so that a load of as many ranks gets from them what it
        gets from the saved ones: ranks may have tensors where others have none, or other values.

        Raises:
            UsageError: it would not.
        """
        catalogue, ranks = self._catalogue, range(self._ranks)
        takers: dict[str, list[int]] = {key: [] for key in self._kept}  # the saved ranks they take
        others: dict[str, dict[int, int | None]] = {}  # by new rank without it: what a load takes
        for rank in ranks:
            me = LoadingRank.of(catalogue, rank, ranks)
            follows, planner = me.followed(catalogue.object_ranks), Planner(me)
            rows_of = list[Entry]()
            has: Callable[[Path], bool] | None = None
            for key, rows in self._kept.items():
                row, lacks = rows[0], all(follows not in row.ranks for row in rows)
                source = follows
                if row.geometry.per_rank:
                    source = planner.followed(row.logical_name(row.fqns[0]))
                    row = next(row for row in rows if source in row.ranks)
                if lacks:
                    has = has or catalogue.held(follows)
                    if has(row.path):
                        others.setdefault(key, {})[rank] = None
                        continue
                    if row.geometry.per_rank and not self._is_shared(row, source, follows):
                        others.setdefault(key, {})[rank] = source
                        continue
                takers[key].append(source)
                rows_of.append(row)
            self._followed.append(follows)
            self._rows.append(rows_of)
        for key, lacking in others.items():
            first, found = self._kept[key][0], takers[key]
            for rank, taken in lacking.items():
                same = taken is None or (found and found[rank % len(found)] == taken)
                if not found or not same or not first.geometry.per_rank:
                    saved = sorted({r for row in self._kept[key] for r in row.ranks})
                    raise self._refused(
                        f"{key!r} is a tensor of ranks {saved[:8]} alone, and rank "
                        f"{self._followed[rank]}, which rank {rank} of {self._ranks} follows, has "
                        "none there",
                        f"reshard it to {len(catalogue.object_ranks)} ranks, or load it as it is",
                    )

    def _is_shared(self, row: Entry, source: int, follows: int) -> bool:
        """Whether a rank without this tensor needs it all the same: a model's or an optimizer's,
        which a stage of a pipeline lacks, or a rank without elements of the parameter. Another
        object is as its rank saved it."""
        above = [row.path[:depth] for depth in range(1, len(row.path))]
        if any(dotted(path) in self._catalogue.optimizers for path in above):
            return True
        kinds = self._catalogue.kinds(source) or {}
        if any(kinds.get(path, "").startswith("ordered") for path in above):
            return True  # what a module gives
        asked = row.path[:1], source, follows
        if asked not in self._shared:
            named = {name for of in self._optimizers.values() for ids in of["ids"] for name in ids}
            self._shared[asked] = any(
                any(source in row.ranks for row in rows)
                and all(follows not in row.ranks for row in rows)
                and (not rows[0].geometry.per_rank or not named.isdisjoint(rows[0].fqns))
                for rows in self._kept.values()
                if rows[0].path[:1] == row.path[:1]
            )
        return self._shared[asked]

    def _refused(self, why: str, remedy: str) -> UsageError:
        return UsageError(why, remedy=remedy, path=self._catalogue.url)

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
    generators, data positions, buffers, slices of tensor-parallel ranks, or tensors where another
    has a value. What only some ranks saved, and others nothing instead of it, is not among them.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged.
    """
    instead = set()  # of tensors that some ranks have not
    for rank in catalogue.object_ranks:
        held = catalogue.held(rank)
        for rows in catalogue.rows_by_key.values():
            if all(rank not in row.ranks for row in rows) and held(rows[0].path):
                instead.add(dotted(rows[0].logical_path(rows[0].fqns[0])))
    return sorted({*values_apart(catalogue), *tensors_apart(catalogue), *instead})
