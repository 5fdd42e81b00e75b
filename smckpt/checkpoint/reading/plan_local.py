"""Plan a load by key: each rank takes the arrays of its *source rank*, which held the same shard.

All saved ranks with that shard wrote parts of the array; together they are the whole.

What does not fit (names, shapes, meshes) is an error of this module, in both plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.read import ReadPlan, StoredCopy
from smckpt.errors import (
    CorruptCheckpointError,
    KeysMismatchError,
    TensorMismatchError,
    TopologyError,
)
from smckpt.layout.entries import Entry, Path
from smckpt.layout.geometry import Geometry
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Piece, Strided


def plan_local(
    me: LoadingRank,
    entries: Sequence[Entry],
    *,
    strict: bool = True,
    asked: Callable[[Path], bool] = lambda _: True,
) -> ReadPlan:
    """Plan to fill entries by key, with the arrays of the saved ranks that held the same shard.

    Per-rank tensors come from the rank itself, if it saved some here. Otherwise replica i takes
    those of replica i mod n.

    Args:
        entries: this rank's arrays, the targets.
        strict: refuse keys that are in only one of checkpoint and target. If False, the plan lists
            them.
        asked: whether the target asks for the values that were saved at a path. Others are ignored.

    Raises:
        TopologyError: the sharding differs; the message names both degrees.
        KeysMismatchError: the keys differ, or a key belongs to another parameter.
        TensorMismatchError, CorruptCheckpointError: as for `plan_logical`.
    """
    catalogue, source = me.catalogue, me.rank
    sources = me.of_own(_source_ranks(me, entries))
    if source not in sources:
        source = sources[_replica_index(me, entries) % len(sources)]
    here = {entry.key for entry in entries}
    saved: dict[str, tuple[Entry, int]] = {}  # the row, and the rank whose array is taken
    for key, rows in catalogue.rows_by_key.items():
        own = next((row for row in rows if source in row.ranks), None)
        if own is not None and (key in here or asked(own.path)):
            saved[key] = own, source
        elif own is None and key in here and all(row.geometry.per_rank for row in rows):
            name = rows[0].logical_name(rows[0].fqns[0])  # one rank may have saved it for all
            if me.takes(name):
                whose = me.source(name)
                saved[key] = next(row for row in rows if whose in row.ranks), whose
    plan = ReadPlan(
        missing=tuple(sorted(here - saved.keys())),
        unexpected=tuple(sorted(saved.keys() - here)),
    )
    if strict:
        refuse_names(plan.missing, plan.unexpected, me)
    both = [
        (number, entry, *saved[entry.key])
        for number, entry in enumerate(entries)
        if entry.key in saved
    ]
    for _, entry, row, whose in both:
        me.refuse_guess(row)
        _refuse_other_parameter(me, entries, entry, [row])
        _check_shape(me, entry, row, whose)
    for number, entry, row, whose in both:
        if entry.numel:
            holders = catalogue.pieces.holders(row)[row.geometry.coordinate(whose)]
            whole = Strided((entry.numel,), 0, (1,))
            slots = catalogue.slots(row, holders)
            plan.copies.append(StoredCopy(slots, Copy(whole, whole), number, entry.itemsize))
    return plan


def _source_ranks(me: LoadingRank, entries: Sequence[Entry]) -> list[int]:
    """The saved ranks that held the same shards as this rank; all saved ranks if nothing is
    sharded."""
    catalogue = me.catalogue
    candidates = set(catalogue.object_ranks)
    ruled = False
    taken: set[int] = set()  # ids of tuples, which the catalogue keeps alive
    for entry in entries:
        if entry.geometry.per_rank:
            continue
        rows = [r for r in catalogue.rows_by_key.get(entry.key, ()) if not r.geometry.per_rank]
        if not rows:
            continue
        ruled = True
        same = _same_shard(me, entries, entry, rows)
        if len(same) == 1:
            if id(same[0]) in taken:
                continue
            taken.add(id(same[0]))
        candidates.intersection_update(itertools.chain.from_iterable(same))
    if not candidates:
        raise TopologyError(
            "no saved rank held all the shards that this rank holds",
            remedy=f"load from this rank's own group directory; or {reshard(me.catalogue)}",
            **me.where,
        )
    if not ruled and sorted(me.group) != list(catalogue.object_ranks):
        _refuse_unruled(me, entries)
    return sorted(candidates)


def _same_shard(
    me: LoadingRank, entries: Sequence[Entry], entry: Entry, rows: list[Entry]
) -> list[tuple[int, ...]]:
    """The saved ranks that held exactly this rank's shard of the entry, by the array that they
    share.

    Raises:
        TopologyError: the entry is sharded differently, or no saved rank here held this shard.
    """
    live, rank = entry.geometry, me.rank
    pieces = me.catalogue.pieces
    here = live.coordinate(rank)
    found = []
    for row in pieces.own_family(live, rows):
        if row.geometry.kind != live.kind:
            continue
        by_coordinate = pieces.holders(row)
        if here in by_coordinate and row.geometry.same_as(live):
            found.append((row, [by_coordinate[here]]))
            continue
        # Without a name on both sides, the parameters were renamed, or a copy of the optimizer's
        # state has the key's names alone: the key decides.
        named = not set(live.fqns).isdisjoint(row.fqns)
        positions = _positions(live, rank, named)
        likely = [by_coordinate[here]] if here in by_coordinate else []
        # The mesh's dimensions may be in another order, so compare the places of the elements.
        for holders in (likely, by_coordinate.values()):
            same = [h for h in holders if _positions(row.geometry, h[0], named) == positions]
            if same:
                found.append((row, same))
                break
    if not found:
        _refuse_other_parameter(me, entries, entry, rows)
        raise _no_shard(me, entry, rows)
    for row, _ in found[1:]:
        if not pieces.one_tensor(row, found[0][0]):
            raise ambiguous(entry.key, found[0][0], row, me)
    return [holders for _, same in found for holders in same]


def _refuse_other_parameter(
    me: LoadingRank, entries: Sequence[Entry], entry: Entry, rows: Sequence[Entry]
) -> None:
    """Refuse the optimizer state of another parameter. Optimizers number their parameters. So with
    another order, or more parameters, a key belongs to another parameter. If neither side has the
    other's name, the parameters were renamed, and the key decides.

    Raises:
        KeysMismatchError: the key belongs to another parameter.
    """
    live = entry.geometry.fqns
    if any(not set(live).isdisjoint(row.fqns) for row in rows):
        return
    known = any(entry.logical_name(fqn) in me.catalogue.logical for fqn in live)
    theirs = {row.logical_name(fqn) for row in rows for fqn in row.fqns}
    if known or any(e.logical_name(f) in theirs for e in entries for f in e.geometry.fqns):
        raise KeysMismatchError(
            f"{entry.key!r} is the state of {list(live)[:4]} here, but of "
            f"{list(rows[0].fqns)[:4]} in the checkpoint: the optimizer has other parameters than "
            "the saved one, or in another order",
            remedy="give the optimizer the same parameters in the same order; or take the target "
            "under sm_state_dict_type(model, SHARDED), which goes by name",
            **me.where,
        )


def _positions(geometry: Geometry, rank: int, named: bool) -> list[object]:
    """Where each element of the local array belongs, for comparison: with the names, or only in
    which of the tensors, by number."""
    names = {fqn: fqn if named else number for number, fqn in enumerate(geometry.fqns)}
    pieces = geometry.pieces(rank)
    return [*names.values(), *((names[p.name], p.box, p.start, p.strides) for p in pieces)]


def _no_shard(
    me: LoadingRank, entry: Entry, rows: Sequence[Entry]
) -> TopologyError | TensorMismatchError:
    """The error that says why no saved rank has this rank's shard of the entry."""
    live, catalogue = entry.geometry, me.catalogue
    for row in rows:
        saved = row.geometry
        if saved.kind != live.kind:
            continue
        if saved.shard_degree() != live.shard_degree():
            return other_degree(me, saved.shard_degree(), live.shard_degree())
        before, now = saved.whole_shape, live.whole_shape
        if before != now:
            return other_tensor(entry.key, (row.dtype, before), (entry.dtype, now), me)
        if live.coordinate(me.rank) not in catalogue.pieces.holders(row):
            return TopologyError(
                f"{entry.key}: no saved rank in this directory held this rank's shard (coordinate "
                f"{list(live.coordinate(me.rank))} of its mesh)",
                remedy="load from this rank's own group directory, or from "
                f"{catalogue.above}, where all groups are found",
                **me.where,
            )
    return TopologyError(
        f"{entry.key} is sharded differently: it was saved as {_described(rows[0].geometry)}, the "
        "target "
        f"is {_described(live)}",
        remedy=reshard(me.catalogue),
        **me.where,
    )


def _described(geometry: Geometry) -> str:
    return f"{geometry.kind} of {list(geometry.fqns)[:4]}, {geometry}"


def _refuse_unruled(me: LoadingRank, entries: Sequence[Entry]) -> None:
    """Refuse arrays without a sharding rule if the ranks that load are not those that saved:
    nothing says which rank's array is needed."""
    for entry in entries:
        for row in me.catalogue.rows_by_key.get(entry.key, ()):
            if row.geometry.per_rank or row.geometry.shard_degree() == 1:
                continue
            if math.prod(row.geometry.local_shape(row.ranks[0])) != entry.numel:
                raise other_degree(me, row.geometry.shard_degree(), 1)
            raise TopologyError(
                f"{entry.key} was saved in shards, but the target does not say which shard "
                "it holds, and the ranks that load are not those that saved",
                remedy="take the target's state inside sm_state_dict_type(model, LOCAL), together "
                "with the model's",
                **me.where,
            )


def _replica_index(me: LoadingRank, entries: Sequence[Entry]) -> int:
    """The position of this rank among the ranks that hold exactly the same shards."""
    ruled = [e.geometry for e in entries if not (e.geometry.per_rank or e.geometry.explicit)]
    if not ruled:
        return sorted(me.group).index(me.rank)
    # Geometries of one mesh share one tuple, so each tuple is searched once.
    replicas = {id(found): found for g in ruled for found in (g.replicas(me.rank),)}
    alike = set.intersection(*map(set, replicas.values()))
    return sorted(alike).index(me.rank)


def _check_shape(me: LoadingRank, entry: Entry, row: Entry, source: int) -> None:
    shape = row.geometry.local_shape(source)
    if row.dtype == entry.dtype and shape == entry.shape:
        return
    saved, live = row.geometry, entry.geometry
    if live.per_rank != saved.per_rank and row.dtype == entry.dtype:
        if math.prod(shape) == entry.numel:
            return  # the same bytes; one side sees them flat
        there = 1 if saved.per_rank else saved.shard_degree()
        here = 1 if live.per_rank else live.shard_degree()
        if there != here:
            raise other_degree(me, there, here)
    raise other_tensor(entry.key, (row.dtype, shape), (entry.dtype, entry.shape), me)


SHOWN = 12  # how many names a message shows
AS_BEFORE = "build the model and optimizer as they were when the state was saved"


def refuse_names(missing: Sequence[str], unexpected: Sequence[str], me: LoadingRank) -> None:
    """
    Raises:
        KeysMismatchError: a name is in only one of checkpoint and target.
    """
    if not missing and not unexpected:
        return
    raise KeysMismatchError(
        differing_names(missing, unexpected),
        remedy="give the target the keys that were saved (for an optimizer without state "
        "call init_optim_state), or pass check_keys_matched=False to load only the "
        "names that both have",
        **me.where,
    )


def differing_names(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """A text for the names that are in only one of checkpoint and target."""

    def listed(names: Sequence[str]) -> str:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"{list(names[:SHOWN])}{more}"

    lacks = [f"the checkpoint lacks {listed(missing)}"] if missing else []
    lacks += [f"the target lacks {listed(unexpected)}"] if unexpected else []
    return "; ".join(lacks)


def other_tensor(
    name: str, saved: tuple[str, Shape], live: tuple[str, Shape], me: LoadingRank
) -> TensorMismatchError:
    """The error for a tensor that differs. `saved` and `live` are (dtype, shape)."""
    return TensorMismatchError(
        f"{name}: it was saved as {saved[0]} {list(saved[1])}, but the target is {live[0]} "
        f"{list(live[1])}",
        remedy=AS_BEFORE,
        **me.where,
    )


def uncovered(
    name: str, piece: Piece, left: Sequence[Box], me: LoadingRank
) -> CorruptCheckpointError:
    catalogue = me.catalogue
    if catalogue.whole:
        remedy = "use an older checkpoint"
    else:
        remedy = f"{catalogue.url} is one group of several: load from {catalogue.above}"
    return CorruptCheckpointError(
        f"{name}: the checkpoint lacks {sum(box.numel for box in left)} of the {piece.box.numel} "
        f"elements that this rank needs (the first at {list(left[0].offsets)})",
        remedy=remedy,
        **me.where,
    )


def ambiguous(name: str, one: Entry, other: Entry, me: LoadingRank) -> TopologyError:
    def ranks(row: Entry) -> str:
        return str(list(row.geometry.ranks)[:8])

    return TopologyError(
        f"{name} was saved by ranks {ranks(one)} and separately by ranks {ranks(other)}: the "
        "checkpoint does not say whether these are copies of one tensor or different tensors",
        remedy="load each group from its own directory, on the ranks and meshes that saved it; "
        "to be able to reshard, save with SaveOptions(parallel_state=), save DTensors, or include "
        "the replicas in the mesh",
        **me.where,
    )


def reshard(catalogue: Catalogue) -> str:
    """The remedy if a LOCAL load does not fit."""
    return (
        "take the target under sm_state_dict_type(model, SHARDED) and load it from "
        f"{catalogue.above}, which reshards"
    )


def other_degree(me: LoadingRank, saved: int, live: int) -> TopologyError:
    return TopologyError(
        f"the checkpoint was saved with shard degree {saved}, but the model has shard degree "
        f"{live}: a LOCAL load needs the same degree",
        remedy=reshard(me.catalogue),
        **me.where,
    )
