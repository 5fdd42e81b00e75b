"""The rank that loads, and what it takes of each saved rank.

Tensor- and expert-parallel ranks and pipeline stages save plain tensors of their own under the same
names. Only the topology tells them apart.

A rank follows one saved rank. Of what that one lacks, a load, a conversion and a reshard take whole
parts, each from one other rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from smckpt.calls import in_threads
from smckpt.checkpoint.reading.catalogue import Catalogue
from smckpt.checkpoint.records.sealed import FILES_AT_ONCE
from smckpt.errors import TopologyError
from smckpt.layout.containers import is_closed, is_extra_state
from smckpt.layout.entries import Entry, Path, dotted
from smckpt.layout.mesh import memo
from smckpt.topology import ParallelState

Values = dict[str, tuple[Path, Any]]  # key → (path, value), of what is no tensor


@dataclass(frozen=True)
class LoadingRank:
    """A rank that loads, and what it knows about the ranks of the checkpoint.

    group: the ranks that load together, this one among them.
    alike: the saved ranks at its tensor-, expert- and pipeline-parallel coordinates; None if they
        are not known, or are not needed.
    unknown: if it is not known which of several saved ranks it follows, the reason.
    """

    catalogue: Catalogue
    rank: int
    group: Sequence[int]
    alike: frozenset[int] | None = None
    unknown: str = ""
    _held: dict[int, bool] = memo()  # by id of the ranks of rows
    _sources: dict[str, int] = memo()
    _taken: dict[str, bool] = memo()
    _whose: dict[Path, int] = memo()

    @classmethod
    def of(
        cls,
        catalogue: Catalogue,
        rank: int,
        group: Sequence[int],
        world_size: int | None = None,
        live: ParallelState | None = None,
    ) -> LoadingRank:
        """
        Args:
            world_size: of the job that loads; None: the group is the job.
            live: its degrees, if they were given.
        """
        one = cls(catalogue, rank, group)
        if catalogue.topology is None:
            return one
        saved = ParallelState.from_json(catalogue.topology)
        at = {r: _coordinates(saved, r) for r in catalogue.object_ranks}
        meshes = catalogue.pieces.joined
        if any(len({at[r] for r in mesh if r in at}) > 1 for mesh in meshes):
            return one  # tensors are distributed over these ranks, so plain tensors are copies
        degrees = _degrees(saved)
        if live is not None and _degrees(live) == degrees:
            own = _coordinates(live, rank)
            return replace(one, alike=frozenset(r for r in at if at[r] == own))
        if degrees == _degrees(ParallelState(1)):
            return one
        reason = "but parallel_state= was not given"
        if live is not None:
            reason = f"but this job has {_text(_degrees(live))}"
        elif (len(group) if world_size is None else world_size) == saved.world_size:
            return one  # each rank takes its own
        return replace(one, unknown=f"the checkpoint has {_text(degrees)}, {reason}")

    @property
    def first(self) -> bool:
        """Whether it is the lowest rank of its group, which logs for all."""
        return self.rank == min(self.group)

    @property
    def where(self) -> dict[str, Any]:
        """For errors."""
        return {"path": self.catalogue.url, "rank": self.rank}

    def of_own(self, ranks: Iterable[int]) -> list[int]:
        """Those of the saved ranks that have this rank's coordinates; all, if that is not known."""
        found = list(ranks)
        return [r for r in found if self.alike is None or r in self.alike] or found

    def followed(self, saved: Iterable[int]) -> int:
        """The saved rank whose per-rank values (RNG, buffers, counters) this rank takes: its own,
        if it was saved. Otherwise the i-th rank of the group takes those of the i-th saved rank,
        modulo their number."""
        ordered = sorted(saved)
        if self.rank in ordered:
            return self.rank
        return ordered[sorted(self.group).index(self.rank) % len(ordered)]

    def refuse_guess(self, row: Entry) -> None:
        """
        Raises:
            TopologyError: it is not known which saved rank's weights to take.
        """
        if not self.unknown or not row.geometry.per_rank or len(row.ranks) < 2:
            return
        if row.dtype.startswith(("float", "bfloat")) and row.shape:
            raise TopologyError(
                f"{row.key}: each rank saved a tensor of its own, and it is not known whose "
                f"tensor this rank needs: {self.unknown}",
                remedy="build the model with the degrees of the checkpoint, and pass them as "
                "LoadOptions(parallel_state=)",
                **self.where,
            )

    # -- parts of the state that the followed rank lacks ------------------------------------------
    #
    # A part is as large as can be: what is around it, the followed rank has. There are none in what
    # that rank has in another form, and none in its lists, which it has with all of their items.
    #
    # Tensors and values of a part are of one rank. But shards are of all ranks, and so are states
    # of optimizers and, where stages of a pipeline have other names, of models: there each name is
    # a part.

    @cached_property
    def saved(self) -> int:
        """The saved rank that it follows."""
        return self.followed(self.catalogue.object_ranks)

    def has(self, row: Entry) -> bool:
        """Whether the followed rank is one of the row's ranks, which rows share."""
        if id(row.ranks) not in self._held:
            self._held[id(row.ranks)] = self.saved in row.ranks
        return self._held[id(row.ranks)]

    def part(self, path: Path, other: int) -> Path | None:
        """The part in which saved rank `other` has something at `path`; None: in no part, because
        the followed rank has something else, or a list."""
        at = self._largest(path, other)
        return path if at is not None and path[:-1] in self._stages else at

    def whose(self, part: Path) -> int | None:
        """The saved rank of which a part is; None: there are no tensors in it, and it is of the
        lowest rank that has it."""
        if part not in self._whose and part in self.parts:
            rows = self.parts[part]
            alone = [row for row in rows if row.geometry.per_rank]
            holders = self._holders((row, fqn) for row in alone or rows for fqn in row.fqns)
            self._whose[part] = self.followed(holders)
        return self._whose.get(part)

    def takes(self, name: str) -> bool:
        """Whether the tensor that was saved under a logical name is of this rank's state."""
        if name not in self._taken:
            self._taken[name] = self._takes(name)
        return self._taken[name]

    def source(self, name: str) -> int:
        """The saved rank whose per-rank tensor of this name is taken."""
        if name not in self._sources:
            named = self.catalogue.pieces.by_name[name]
            rows = [(row, fqn) for row, fqn in named if row.geometry.per_rank]
            own = self._holders(rows)
            likely: int | None = self.saved
            if likely not in own:
                at = self.part(rows[0][0].path, rows[0][0].ranks[0])
                likely = None if at is None else self.whose(at)
            self._sources[name] = likely if likely in own else self.followed(own)
        return self._sources[name]

    def objects(self, rank: int) -> Values:
        """The values of a saved rank, unmade (`Catalogue.objects`), read once."""
        return self.catalogue.objects(rank, unmade=True)

    def values(
        self, around: Iterable[Path] | None = None, *, only: Collection[str] | None = None
    ) -> Values:
        """The values of the followed rank and of the parts, unmade; see `values_of_others`."""
        found = dict(self.objects(self.saved))
        for _, _, key, path, value in self.values_of_others(around, only=only):
            found.setdefault(key, (path, value))
        return found

    def values_of_others(
        self, around: Iterable[Path] | None = None, *, only: Collection[str] | None = None
    ) -> Iterator[tuple[Path, int, str, Path, Any]]:
        """The values of parts: part, the saved rank of which it is, key, path, and value, unmade.

        Args:
            around: the parts that have these paths are enough; None: all.
            only: the top keys of which parts are asked for; None: all.
        """
        wanted = [self.part(path, self.saved) for path in around or ()]
        parts = {at for at in wanted if at is not None}
        if around is not None:
            only = {str(at[0]) for at in parts}
        owners = {
            at: self.whose(at)
            for at in (self.parts if around is None else parts)
            if only is None or str(at[0]) in only
        }
        known = sorted({rank for rank in owners.values() if rank is not None})
        ranks = known
        if around is None or None in owners.values():
            saved = self.catalogue.object_ranks
            near = {*self.of_own(saved)}
            others = sorted({*saved} - {self.saved}, key=lambda r: (r not in near, r))
            ranks = self._with_other_paths(others, only)
        read: set[int] = set()
        for some, only_until_owned in ((ranks, around is not None), (known, False)):
            for rank in self._with_objects([r for r in some if r not in read]):
                read.add(rank)
                for key, (path, value) in self.objects(rank).items():
                    at = self.part(path, rank)
                    if at is None or (around is not None and at not in parts):
                        continue
                    if only is not None and str(at[0]) not in only:
                        continue
                    if owners.get(at) is None:
                        owners[at] = rank
                    if owners.get(at) == rank and self._numbers_alike(path, rank):
                        yield at, rank, key, path, value
                if only_until_owned and None not in owners.values():
                    break

    @cached_property
    def kinds(self) -> dict[Path, str] | None:
        """As `Catalogue.kinds` of the followed rank, and of the ranks of the parts."""
        own = self.catalogue.kinds(self.saved)
        found = dict(own or {})
        _, above = self._own
        for at, rows in self.parts.items() if own is not None else ():
            owner = self.whose(at)
            for row in rows:
                rank = owner if owner in row.ranks else row.ranks[0]
                if row.geometry.per_rank and rank != owner and not self.is_of_optimizer(row.path):
                    continue
                theirs = self.catalogue.kinds(rank) or {}
                for path in (row.path[:depth] for depth in range(1, len(row.path) + 1)):
                    if path in theirs and path not in above:
                        found.setdefault(path, theirs[path])
        return None if own is None else found

    @cached_property
    def parts(self) -> dict[Path, list[Entry]]:
        """The parts with tensors."""
        found: dict[Path, list[Entry]] = {}
        for row, _ in self._others:
            at = self.part(row.path, row.ranks[0])
            assert at is not None
            found.setdefault(at, []).append(row)
        return found

    def stands_instead(self, path: Path) -> bool:
        """Whether the followed rank has something at this path, or above or below it."""
        own, above = self._own
        return path in above or any(path[:depth] in own for depth in range(1, len(path)))

    def is_of_optimizer(self, path: Path) -> bool:
        known = self.catalogue.optimizers
        return bool(known) and any(dotted(path[:at]) in known for at in range(len(path)))

    @cached_property
    def _own(self) -> tuple[set[Path], set[Path]]:
        """The paths of what the followed rank has, and these with all that is above them."""
        own = {row.path for row in self.catalogue.rows if self.has(row)} | self._values
        every = own.union(path for path, _ in self.objects(self.saved).values())
        return own, {path[:depth] for path in every for depth in range(1, len(path) + 1)}

    @cached_property
    def _others(self) -> list[tuple[Entry, Path]]:
        """The rows that the followed rank lacks, each with the part around it."""
        lacked = [row for row in self.catalogue.rows if not self.has(row)]
        found = [(row, self._largest(row.path, row.ranks[0])) for row in lacked]
        return [(row, at) for row, at in found if at is not None]

    @cached_property
    def _stages(self) -> set[Path]:
        """The containers, in parts, that have tensors alone and a model's extra state, and in which
        ranks have other names, of stages of a model. Where one name is of some of them, as the
        weights that first and last stage share, an optimizer has names in it."""
        names: dict[Path, dict[int, set[Any]]] = {}
        for row, at in self._others:
            if len(at) < len(row.path) and not self.is_of_optimizer(row.path):
                for rank in row.ranks:
                    of = names.setdefault(row.path[:-1], {})
                    of.setdefault(rank, set()).add(row.path[-1])
        around = {at[:depth] for at in names for depth in range(1, len(at))}
        found = set()
        for at, of in names.items():
            each = {frozenset(one) for one in of.values()}
            every = frozenset[Any]().union(*each)
            apart = sum(map(len, each)) == len(every) or not self.of_optimizers.isdisjoint(every)
            if (
                len(each) > 1
                and apart
                and at not in around
                and not any(
                    path[: len(at)] == at and len(path) > len(at) and not is_extra_state(path[-1])
                    for rank in self._with_objects(sorted(of))
                    for path, _ in self.objects(rank).values()
                )
            ):
                found.add(at)
        return found

    @cached_property
    def of_optimizers(self) -> frozenset[Any]:
        """The names of the parameters that an optimizer has, on this rank or on one with parts."""
        ranks = sorted({self.saved, *(row.ranks[0] for row, _ in self._others)})
        found: set[Any] = set()
        for rank in self._with_objects(ranks):
            for record in self.catalogue.optimizers_of(rank).values():
                found.update(*record.get("names", record.get("ids", ())))
        return frozenset(found)

    def _largest(self, path: Path, other: int) -> Path | None:
        own, above = self._own
        known = next((n for n in range(len(path), 0, -1) if path[:n] in above), 0)
        at = path[:known]
        if known == len(path) or at in own:
            return None
        for rank in (self.saved, other) if known else ():
            if is_closed((self.catalogue.kinds(rank) or {}).get(at)):
                return None
        return path[: known + 1]

    def _takes(self, name: str) -> bool:
        rows = [row for row, _ in self.catalogue.pieces.by_name[name]]
        if any(map(self.has, rows)):
            return True
        path = self.catalogue.logical[name].path
        if not self._values.isdisjoint(path[:depth] for depth in range(1, len(path) + 1)):
            return False
        if not all(row.geometry.per_rank for row in rows):
            return True
        for row in rows:
            at = self.part(row.path, row.ranks[0])
            if self.is_of_optimizer(row.path):  # where numbers of two parameters may be equal
                if at is not None or row.path in self._own[0]:
                    return True
            elif at is not None and self.whose(at) in row.ranks:
                return True
        return False

    @cached_property
    def _values(self) -> set[Path]:
        """The paths of the followed rank's values. An optimizer without state yet has nothing in
        another form than others."""
        return {
            path
            for path, value in self.objects(self.saved).values()
            if not isinstance(value, dict) or value or not self.is_of_optimizer(path)
        }

    def _holders(self, rows: Iterable[tuple[Entry, str]]) -> list[int]:
        """The saved ranks that a per-rank tensor may be taken from."""
        pieces, saved, filled = self.catalogue.pieces, set[int](), set[int]()
        for row, fqn in rows:
            saved.update(row.ranks)
            filled |= pieces.filled(row, fqn)
        return self.of_own(saved & filled or saved)

    def _with_other_paths(self, ranks: Sequence[int], only: Collection[str] | None) -> list[int]:
        """The ranks that may have values, below the keys `only`, where neither the followed rank
        has any, nor one before it."""

        def paths(rank: int) -> frozenset[tuple[str, str]] | None:
            known = self.catalogue.value_paths(rank)
            if known is None:
                return None
            return frozenset(
                (top, digest) for top, digest in known.items() if only is None or top in (*only, "")
            )

        seen, found = {paths(self.saved)}, []
        for rank in ranks:
            own = paths(rank)
            if own is None or own not in seen:
                found.append(rank)
                seen.add(own)
        return found

    def _with_objects(self, ranks: Sequence[int]) -> Iterator[int]:
        """These ranks, after their values were read, of several ranks at once."""
        at, count = 0, 1
        while at < len(ranks):
            some = ranks[at : at + count]
            if len(some) > 1:
                in_threads(self.objects, some, len(some), "smckpt-values")
            yield from some
            at, count = at + count, FILES_AT_ONCE

    def _numbers_alike(self, path: Path, rank: int) -> bool:
        """Whether a rank numbers the parameters of an optimizer as the others do."""
        for at in (dotted(path[:depth]) for depth in range(len(path))):
            record = self.catalogue.optimizers.get(at)
            if record is not None and record.get("form") != "fqn":
                return bool(self.catalogue.optimizers_of(rank).get(at) == record)
        return True


def _degrees(state: ParallelState) -> tuple[int, int, int]:
    return state.tp_size, state.ep_size, state.pp_size


def _text(degrees: tuple[int, int, int]) -> str:
    return "tp {}, ep {}, pp {}".format(*degrees)


def _coordinates(state: ParallelState, rank: int) -> tuple[int, ...]:
    ranker = state.ranker
    return ranker.get_tp_rank(rank), ranker.get_ep_rank(rank), ranker.get_pp_rank(rank)
