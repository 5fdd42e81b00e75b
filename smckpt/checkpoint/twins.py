"""Loading by key: each rank takes the arrays of a saved rank that held the same shard, its *twin*.

The array itself is the union of what all saved ranks with that shard wrote of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from smckpt.checkpoint.catalogue import Catalogue
from smckpt.checkpoint.mismatch import (
    ambiguous,
    other_degree,
    other_tensor,
    refuse_misfit,
    refuse_names,
    reshard,
)
from smckpt.checkpoint.places import ANYWHERE, Places
from smckpt.checkpoint.ranges import ReadPlan
from smckpt.checkpoint.rows import Row
from smckpt.errors import KeysMismatchError, TensorMismatchError, TopologyError
from smckpt.layout.entries import Entry, dotted
from smckpt.layout.geometry import BoxGeometry, FlatGeometry, Geometry, KeptGeometry, MeshGeometry
from smckpt.layout.mesh import Shape

__all__ = ["plan_local"]


def plan_local(
    catalogue: Catalogue,
    entries: Sequence[Entry],
    *,
    rank: int,
    group_ranks: Sequence[int],
    strict: bool = True,
    places: Places = ANYWHERE,
) -> ReadPlan:
    """Fill entries by key with the arrays of the saved ranks that held the same shard.

    Among several such ranks a rank takes what it kept for itself; where it saved nothing here,
    replica i takes what replica i mod n kept.

    Args:
        entries: this rank's arrays, the targets.
        rank: this global rank.
        group_ranks: the ranks that load together.
        strict: keys in only one of checkpoint and target are refused; else listed in the plan.
        places: whose tensors are meant, of ranks that saved their own under one key.

    Raises:
        TopologyError: the sharding differs; names both degrees and what to do.
        KeysMismatchError: also where a key is another parameter's.
        TensorMismatchError, CorruptCheckpointError: as for `plan_logical`.
    """
    for entry in entries:
        refuse_misfit(entry, rank)
    twins = places.of_own(_twins(catalogue, entries, rank, group_ranks))
    twin = rank
    if rank not in twins:
        twin = twins[_replica_index(entries, rank, group_ranks) % len(twins)]
    saved = {
        key: row for key, rows in catalogue.rows_by_key.items() for row in rows if twin in row.ranks
    }
    here = {entry.key for entry in entries}
    plan = ReadPlan(
        missing=tuple(sorted(here - saved.keys())),
        unexpected=tuple(sorted(saved.keys() - here)),
    )
    if strict:
        refuse_names(plan.missing, plan.unexpected, catalogue.url, rank)
    both = [
        (number, entry, saved[entry.key])
        for number, entry in enumerate(entries)
        if entry.key in saved
    ]
    for _, entry, row in both:
        places.refuse_guess(row, rank, catalogue.url)
        _refuse_other_parameter(catalogue, entries, entry, [row], rank)
        _check_shape(catalogue, entry, row, twin, rank)
    for number, entry, row in both:
        if entry.numel:
            holders = catalogue.pieces.holders(row)[row.coordinate(twin)]
            slots = catalogue.slots(row, holders)
            plan.add_range(slots, 0, entry.numel, entry.itemsize, number, 0)
    return plan


def _twins(
    catalogue: Catalogue, entries: Sequence[Entry], rank: int, group_ranks: Sequence[int]
) -> list[int]:
    """The saved ranks whose shards this rank's are; all saved ranks when nothing is sharded."""
    candidates = set(catalogue.parts)
    ruled = False
    taken: set[int] = set()  # ids of tuples, which most tensors share and the catalogue keeps alive
    for entry in entries:
        if isinstance(entry.geometry, KeptGeometry):
            continue
        rows = [r for r in catalogue.rows_by_key.get(entry.key, ()) if r.geometry is not None]
        if not rows:
            continue
        ruled = True
        same = _same_shard(catalogue, entries, entry, rows, rank)
        if len(same) == 1:
            if id(same[0]) in taken:
                continue
            taken.add(id(same[0]))
        candidates.intersection_update(itertools.chain.from_iterable(same))
    if not candidates:
        raise TopologyError(
            "no saved rank held all the shards that this rank holds",
            remedy=f"load from this rank's own group directory; or {reshard(catalogue)}",
            path=catalogue.url,
            rank=rank,
        )
    if not ruled and sorted(group_ranks) != sorted(catalogue.parts):
        _refuse_unruled(catalogue, entries, rank)
    return sorted(candidates)


def _same_shard(
    catalogue: Catalogue, entries: Sequence[Entry], entry: Entry, rows: list[Row], rank: int
) -> list[tuple[int, ...]]:
    """The saved ranks that held exactly this rank's shard of the entry, by the array they share.

    Raises:
        TopologyError: it is sharded otherwise, or no saved rank here did.
    """
    live = entry.geometry
    pieces = catalogue.pieces
    here = live.coordinate(rank)
    found = []
    for row in pieces.own_family(live, rows):
        assert row.geometry is not None
        if type(row.geometry) is not type(live):
            continue
        by_coordinate = pieces.holders(row)
        if here in by_coordinate and _same_rule(row.geometry, live):
            found.append((row, [by_coordinate[here]]))
            continue
        places = _places(live, rank)
        likely = [by_coordinate[here]] if here in by_coordinate else []
        # The mesh may have its dimensions in another order: the places decide.
        for holders in (likely, by_coordinate.values()):
            same = [h for h in holders if _places(row.geometry, h[0]) == places]
            if same:
                found.append((row, same))
                break
    if not found:
        _refuse_other_parameter(catalogue, entries, entry, rows, rank)
        raise _no_shard(catalogue, entry, rows, rank)
    for row, _ in found[1:]:
        if not pieces.one_tensor(row, found[0][0]):
            raise ambiguous(entry.key, found[0][0], row, catalogue.url, rank)
    return [holders for _, same in found for holders in same]


def _refuse_other_parameter(
    catalogue: Catalogue, entries: Sequence[Entry], entry: Entry, rows: Sequence[Row], rank: int
) -> None:
    """Optimizers number their parameters: one that got them in another order, or more of them, has
    under a key the state of another parameter. Where neither name is known to the other side they
    were renamed, and the key tells.

    Raises:
        KeysMismatchError: that is so.
    """
    live = entry.geometry.fqns
    if any(not set(live).isdisjoint(row.fqns) for row in rows):
        return
    known = any(entry.logical_name(fqn) in catalogue.logical for fqn in live)
    theirs = {dotted(row.logical_path(fqn)) for row in rows for fqn in row.fqns}
    if known or any(e.logical_name(f) in theirs for e in entries for f in e.geometry.fqns):
        raise KeysMismatchError(
            f"{entry.key!r} is of {list(live)[:4]} here, of {list(rows[0].fqns)[:4]} in the "
            "checkpoint: the optimizer has other parameters than were saved, or in another order",
            remedy="give the optimizer its parameters as they were; or take the target under "
            "sm_state_dict_type(model, SHARDED), which goes by name",
            path=catalogue.url,
            rank=rank,
        )


def _same_rule(saved: Geometry, live: Geometry) -> bool:
    """Whether equal coordinates certainly hold equal places; False: it has to be looked into."""
    return (
        isinstance(saved, MeshGeometry)
        and isinstance(live, MeshGeometry)
        and saved.fqn == live.fqn
        and saved.shape == live.shape
        and saved.placements == live.placements
        and saved.mesh.shape == live.mesh.shape
    )


def _places(geometry: Geometry, rank: int) -> list[object]:
    """Where each element of the local array belongs, for comparison."""
    return [geometry.fqns, *((p.name, p.box, p.start, p.strides) for p in geometry.pieces(rank))]


def _no_shard(
    catalogue: Catalogue, entry: Entry, rows: Sequence[Row], rank: int
) -> TopologyError | TensorMismatchError:
    """Why no saved rank has this rank's shard of the entry."""
    live = entry.geometry
    for row in rows:
        saved = row.geometry
        if saved is None or type(saved) is not type(live):
            continue
        if saved.shard_degree() != live.shard_degree():
            return other_degree(catalogue, rank, saved.shard_degree(), live.shard_degree())
        before, now = _whole_shape(saved), _whole_shape(live)
        if before != now:
            return other_tensor(entry.key, (row.dtype, before), (entry.dtype, now),
                                catalogue.url, rank)  # fmt: skip
        if live.coordinate(rank) not in catalogue.pieces.holders(row):
            return TopologyError(
                f"{entry.key}: no rank that saved here held the shard of this rank (coordinate "
                f"{list(live.coordinate(rank))} of its mesh)",
                remedy="load from this rank's own group directory, or from "
                f"{catalogue.above}, where all groups are found",
                path=catalogue.url,
                rank=rank,
            )
    assert rows[0].geometry is not None
    return TopologyError(
        f"{entry.key} is sharded otherwise: saved as {_described(rows[0].geometry)}, the target "
        f"is {_described(live)}",
        remedy=reshard(catalogue),
        path=catalogue.url,
        rank=rank,
    )


def _whole_shape(geometry: Geometry) -> Shape:
    if isinstance(geometry, FlatGeometry):
        return (sum(segment.numel for segment in geometry.unit.segments),)
    return geometry.shape


def _described(geometry: Geometry) -> str:
    if isinstance(geometry, MeshGeometry):
        dims = zip(geometry.mesh.dim_names, geometry.mesh.shape, geometry.placements, strict=True)
        return "a DTensor, " + " ".join(f"{name}={size}:{place}" for name, size, place in dims)
    if isinstance(geometry, FlatGeometry):
        return f"a 1/{geometry.shard_degree()} of a flat parameter of {list(geometry.fqns)[:4]}"
    return f"{type(geometry).__name__.removesuffix('Geometry').lower()} of {list(geometry.fqns)}"


def _refuse_unruled(catalogue: Catalogue, entries: Sequence[Entry], rank: int) -> None:
    """Arrays that carry no rule, of ranks that are not those that saved: whose are they?"""
    for entry in entries:
        for row in catalogue.rows_by_key.get(entry.key, ()):
            if row.geometry is None or row.geometry.shard_degree() == 1:
                continue
            if math.prod(row.local_shape(row.ranks[0])) != entry.numel:
                raise other_degree(catalogue, rank, row.geometry.shard_degree(), 1)
            raise TopologyError(
                f"{entry.key} was saved in shards, the target does not say which it holds, and "
                "other ranks load than saved",
                remedy="take the target's state inside sm_state_dict_type(model, LOCAL), together "
                "with the model's",
                path=catalogue.url,
                rank=rank,
            )


def _replica_index(entries: Sequence[Entry], rank: int, group_ranks: Sequence[int]) -> int:
    """The place of this rank among those that hold all the same shards."""
    ruled = [e.geometry for e in entries if not isinstance(e.geometry, (KeptGeometry, BoxGeometry))]
    if not ruled:
        return sorted(group_ranks).index(rank)
    # Geometries of one mesh give one tuple: each is looked through once.
    replicas = {id(found): found for g in ruled for found in (g.replicas(rank),)}
    alike = set.intersection(*map(set, replicas.values()))
    return sorted(alike).index(rank)


def _check_shape(catalogue: Catalogue, entry: Entry, row: Row, twin: int, rank: int) -> None:
    shape = row.local_shape(twin)
    if row.dtype == entry.dtype and shape == entry.shape:
        return
    kept_here, saved = isinstance(entry.geometry, KeptGeometry), row.geometry
    if kept_here != (saved is None) and row.dtype == entry.dtype:
        if math.prod(shape) == entry.numel:
            return  # the same bytes, seen flat by one side
        there = 1 if saved is None else saved.shard_degree()
        here = 1 if kept_here else entry.geometry.shard_degree()
        if there != here:
            raise other_degree(catalogue, rank, there, here)
    raise other_tensor(entry.key, (row.dtype, shape), (entry.dtype, entry.shape),
                       catalogue.url, rank)  # fmt: skip
