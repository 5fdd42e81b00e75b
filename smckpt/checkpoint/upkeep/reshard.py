"""Write a checkpoint anew for another number of shards: `reshard_checkpoint`.

Each new rank's arrays are planned as a load plans them, read 64 MiB at a time, and written in the
order of the new file. A flat parameter of FSDP1 is read whole.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from smckpt.calls import alone
from smckpt.checkpoint.commits.commit import commit_alone, refuse_not_empty
from smckpt.checkpoint.commits.part import PartWriter, part_body
from smckpt.checkpoint.commits.sweep import discard_attempt
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan import Planner
from smckpt.checkpoint.reading.read import Meter, Progress, execute
from smckpt.checkpoint.records.format import new_attempt
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.checkpoint.upkeep.compare import tensors_apart
from smckpt.checkpoint.upkeep.difference import values_apart
from smckpt.errors import UsageError
from smckpt.layout.containers import FACTS, is_extra_state, of_object
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.geometry import BoxGeometry, Geometry, PerRankGeometry
from smckpt.layout.image import Layout, compile_layout
from smckpt.layout.mesh import Mesh
from smckpt.storage import Storage, StoreOptions, access_to

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
                    encode_rows(self._shapes.entries(rank), self._shapes.kinds(rank)),
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


@dataclass
class _LackedPart:
    """A part of the state that a new rank takes of saved rank `owner`, and not of the one that it
    follows. paths: of its tensors, or if there are none, of its values. shared: a tensor in it is
    divided between ranks, or it is an optimizer's. may_have: the rank may have it itself."""

    owner: int
    tensors: bool = False
    shared: bool = False
    may_have: bool = False
    paths: set[Path] = field(default_factory=set)


class _NewRank:
    """What a load would give new rank `rank` of `ranks`.

    rows, values: of the saved ranks, each with its part; None: it is of the followed rank, or all
    ranks share it. lost: keys of tensors that it does not take.
    """

    def __init__(
        self, catalogue: Catalogue, rank: int, ranks: int, kept: Mapping[str, list[Entry]]
    ) -> None:
        me = LoadingRank.of(catalogue, rank, range(ranks))
        self.rank, self.saved, self.kinds = rank, me.saved, me.kinds
        self.rows: list[tuple[Path | None, Entry]] = []
        self.values: list[tuple[Path, int, str]] = []
        self.lost: list[str] = []
        self.parts: dict[Path, _LackedPart] = {}
        self._own_paths = {path for path, _ in me.objects(me.saved).values()}
        tops: set[Path] = set()  # top keys of a model in stages
        order = {row.key: n for n, row in enumerate(catalogue.rows) if me.has(row)}
        for key, rows in sorted(
            kept.items(), key=lambda one: order.get(one[0], len(catalogue.rows))
        ):
            row, at = rows[0], None
            name = row.logical_name(row.fqns[0])
            alone, has = row.geometry.per_rank, any(map(me.has, rows))
            of_optimizer = me.is_of_optimizer(row.path)
            if not has and (
                not me.takes(name) or (me.stands_instead(row.path) and not of_optimizer)
            ):
                self.lost.append(key)
                continue
            if alone:
                source = me.source(name)
                row = next(row for row in rows if source in row.ranks)
                if has:
                    self._own_paths.add(row.path)
            if not has:
                at = me.part(row.path, row.ranks[0])
                if not alone or not me.of_optimizers.isdisjoint(row.fqns):
                    tops.add(row.path[:1])
                if at is not None:
                    part = self.parts.setdefault(at, _LackedPart(me.whose(at) or 0))
                    part.shared |= of_optimizer or not alone
                    if alone:
                        part.tensors = True
                        part.paths.add(row.path)
                if of_optimizer or not alone:
                    at = None
            self.rows.append((at, row))
        for at, of, key, path, _ in me.values_of_others():
            self.values.append((at, of, key))
            part = self.parts.setdefault(at, _LackedPart(of, shared=me.is_of_optimizer(path)))
            if not part.tensors:
                part.paths.add(path)
        for at, part in self.parts.items():
            part.may_have = (
                part.shared or len(at) == 1 or at[:1] in tops or _of_module(me, at, part)
            )

    def held(self, given: Collection[Path]) -> dict[Path, int]:
        """The paths of what is of one rank, with that saved rank."""
        found = dict.fromkeys(self._own_paths, self.saved)
        for at, part in self.parts.items():
            if at in given:
                found.update(dict.fromkeys(part.paths, part.owner))
        return found


def _of_module(me: LoadingRank, at: Path, part: _LackedPart) -> bool:
    """Whether the part is what a module gives: a tensor or extra state in an `OrderedDict` without
    other values."""
    kind = of_object((me.kinds or {}).get(at[:-1]))[1]
    values = [path for r in (me.saved, part.owner) for path, _ in me.objects(r).values()]
    return kind.endswith("ordered") and not any(
        len(path) >= len(at) and path[: len(at) - 1] == at[:-1] and not is_extra_state(path[-1])
        for path in values
    )


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
            if ranks != len(catalogue.object_ranks):
                self._refuse_parts_of_a_mesh(rank)
            for path, record in catalogue.optimizers_of(rank).items():
                first = self._optimizers.setdefault(path, record)
                if record.get("form") == first.get("form") == "fqn":
                    ids = dict.fromkeys(map(tuple, [*first["ids"], *record["ids"]]))
                    self._optimizers[path] = {**first, "ids": [*map(list, ids)]}
        self._followed: list[int] = []  # by new rank: the saved rank whose values it takes
        self._rows: list[list[Entry]] = []  # by new rank: the saved rows that it takes
        self._given: list[list[tuple[int, str]]] = []  # and the values of others: saved rank, key
        self._kinds: list[dict[Path, str] | None] = []
        self._choose()

    def _refuse_parts_of_a_mesh(self, rank: int) -> None:
        """Such tensors are recorded as in state_dict/parts.py."""
        for path, value in self._catalogue.objects(rank, unmade=True).values():
            of_mesh = path[-1:] == (FACTS,) and isinstance(value, Mapping) and "mesh" in value
            if of_mesh and not self._left_out(dotted(path[:-1])):
                raise self._refused(
                    f"{dotted(path[:-1])!r} is a {value.get('class')} of which each rank of a mesh "
                    "holds its own part, which cannot be cut anew",
                    "reshard it to as many ranks, or redistribute it to Replicate before the save",
                )

    def entries(self, rank: int) -> list[Entry]:
        return [self._entry(row, rank) for row in self._rows[rank]]

    def kinds(self, rank: int) -> dict[Path, str] | None:
        """Its kinds of containers and tensors."""
        kinds = self._kinds[rank]
        if kinds is None:
            return None
        paths = [row.path for row in self._rows[rank]]
        above = {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
        return {path: kind for path, kind in kinds.items() if path in above}

    def objects(self, rank: int) -> dict[str, Any]:
        """Its values."""
        saved = self._catalogue.part(self._followed[rank])["objects"]
        given = {key: self._catalogue.part(of)["objects"][key] for of, key in self._given[rank]}
        return {n: leaf for n, leaf in {**saved, **given}.items() if not self._left_out(n)}

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
        gets from the saved ones. A new rank has what the saved one has that it follows. A part that
        this one lacks stays with other new ranks, if a load would take it from the right one; else
        the rank gets it too, if a rank may have it: a model's, say, which stages share.

        Raises:
            UsageError: a rank may not have it, or no rank takes a tensor.
        """
        each = [
            _NewRank(self._catalogue, rank, self._ranks, self._kept) for rank in range(self._ranks)
        ]
        given: set[Path] = set()
        while True:
            held = [one.held(given) for one in each]
            holders: dict[Path, set[int]] = {}  # new ranks, by path
            for n, paths in enumerate(held):
                for path in paths:
                    holders.setdefault(path, set()).add(n)
            of_part: dict[tuple[Path, int], list[int]] = {}  # by the saved rank that lacks it
            more: dict[Path, _NewRank] = {}
            for one in each:
                for at, part in one.parts.items():
                    lacked, right = (at, one.saved), False
                    if lacked not in of_part:
                        of_part[lacked] = sorted(
                            set().union(*(holders.get(p, ()) for p in part.paths))
                        )
                    if (found := of_part[lacked]) and not part.shared:
                        other = held[found[one.rank % len(found) if part.tensors else 0]]
                        right = {other[p] for p in part.paths & other.keys()} == {part.owner}
                    if at not in given and not right:
                        more[at] = one
            if not more:
                break
            for at, one in more.items():
                if not one.parts[at].may_have:
                    raise self._of_others(dotted(at), [one.parts[at].owner], one)
            given |= more.keys()
        self._followed = [one.saved for one in each]
        self._kinds = [one.kinds for one in each]
        self._rows = [[row for at, row in one.rows if at is None or at in given] for one in each]
        self._given = [[(of, key) for at, of, key in one.values if at in given] for one in each]
        taken = {row.key for rows in self._rows for row in rows}
        for one in each:
            for key in one.lost:
                rows = self._kept[key]
                if key not in taken or not rows[0].geometry.per_rank:
                    raise self._of_others(key, sorted({r for row in rows for r in row.ranks}), one)

    def _of_others(self, name: str, ranks: Sequence[int], one: _NewRank) -> UsageError:
        return self._refused(
            f"{name!r} is of ranks {ranks[:8]} alone, and rank {one.saved}, which rank {one.rank} "
            f"of {self._ranks} follows, has none there",
            f"reshard it to {len(self._catalogue.object_ranks)} ranks, or load it as it is",
        )

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
    ranks = catalogue.object_ranks
    instead = set()  # what a load does not give to some ranks
    for rank in ranks:
        me = LoadingRank.of(catalogue, rank, ranks)
        instead |= {name for name in catalogue.logical if not me.takes(name)}
    me = LoadingRank.of(catalogue, ranks[0], ranks)
    values = me.values()
    instead |= {name for rank in ranks for name in me.objects(rank) if name not in values}
    return sorted({*values_apart(catalogue), *tensors_apart(catalogue), *instead})
