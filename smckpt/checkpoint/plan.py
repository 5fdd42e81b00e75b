"""Read plans: which bytes of which files go where in this rank's arrays. Only headers are read.

By logical name (`plan_logical`) from whatever mesh the state was saved on; by key (`plan_local`,
in `twins`) where the shard degree is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smckpt.checkpoint.catalogue import Catalogue, StoredSlot
from smckpt.checkpoint.mismatch import (
    ambiguous,
    other_tensor,
    refuse_misfit,
    refuse_names,
    uncovered,
)
from smckpt.checkpoint.places import ANYWHERE, Places
from smckpt.checkpoint.ranges import Direct, Gather, ReadPlan
from smckpt.checkpoint.rows import Row
from smckpt.checkpoint.sources import Source, remaining_after, row_shape
from smckpt.checkpoint.twins import plan_local
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import Box, KeptGeometry, MeshGeometry, Piece

__all__ = ["Direct", "Gather", "ReadPlan", "followed_rank", "plan_local", "plan_logical"]


@dataclass(frozen=True, slots=True)
class _Copy:
    """`box`, from a saved piece into a piece of target number `target`."""

    target: int
    itemsize: int
    piece: Piece
    source: Source
    box: Box


def plan_logical(
    catalogue: Catalogue,
    entries: Sequence[Entry],
    *,
    rank: int,
    group_ranks: Sequence[int],
    strict: bool = True,
    places: Places = ANYWHERE,
) -> ReadPlan:
    """Fill entries by logical name, from whatever mesh they were saved on.

    What ranks kept each for themselves follows a rank (`followed_rank`).

    Args:
        entries: this rank's arrays, the targets.
        rank: this global rank.
        group_ranks: the ranks that load together.
        strict: names in only one of checkpoint and target are refused; else listed in the plan.
        places: whose tensors are meant, of ranks that saved their own under one name.

    Raises:
        KeysMismatchError, TensorMismatchError: names, or global shapes and dtypes, differ.
        TopologyError: which of several saved tensors of one name is meant cannot be told.
        CorruptCheckpointError: an element would be left unwritten, or a header is damaged.
    """
    here = {e.logical_name(f) for e in entries for f in e.geometry.fqns}
    plan = ReadPlan(
        missing=tuple(sorted(here - catalogue.logical.keys())),
        unexpected=tuple(sorted(catalogue.logical.keys() - here)),
    )
    if strict:
        refuse_names(plan.missing, plan.unexpected, catalogue.url, rank)
    finder = _Finder(catalogue, rank, sorted(group_ranks), places)
    copies = [copy for number, entry in enumerate(entries) for copy in finder.copies(number, entry)]
    catalogue.read_headers(r for copy in copies for r in copy.source.holders)
    known: dict[tuple[int, tuple[int, ...]], list[StoredSlot]] = {}
    for copy in copies:
        row, holders = copy.source.row, copy.source.holders
        if (id(row), holders) not in known:
            known[id(row), holders] = catalogue.slots(row, holders)
        slots = known[id(row), holders]
        plan.add_box(slots, copy.source.piece, copy.target, copy.piece, copy.box, copy.itemsize)
    return plan


def followed_rank(saved: Iterable[int], rank: int, group_ranks: Sequence[int]) -> int:
    """The saved rank whose own values (RNG, buffers, counters) this rank takes: its own, if it was
    there; else the i-th rank of the group takes those of the i-th saved rank, modulo their number.
    """
    ordered = sorted(saved)
    return rank if rank in ordered else ordered[sorted(group_ranks).index(rank) % len(ordered)]


def _nothing_of(geometry: MeshGeometry) -> Piece:
    """The piece of a rank that holds no element of the tensor."""
    shape = geometry.shape
    return Piece(geometry.fqn, shape, Box((0,) * len(shape), (0,) * len(shape)), 0, shape)


class _Finder:
    """What of the saved arrays goes into this rank's."""

    def __init__(
        self, catalogue: Catalogue, rank: int, group_ranks: Sequence[int], places: Places
    ) -> None:
        self._places = places
        self._catalogue = catalogue
        self._rank = rank
        self._group_ranks = group_ranks
        self._pieces = catalogue.pieces

    def copies(self, number: int, entry: Entry) -> list[_Copy]:
        """The copies that fill all of the entry that the checkpoint has names for."""
        refuse_misfit(entry, self._rank)
        known = self._catalogue.logical
        pieces = entry.geometry.pieces(self._rank)
        if not pieces and isinstance(entry.geometry, MeshGeometry):
            pieces = [_nothing_of(entry.geometry)]
        pieces = [p for p in pieces if entry.logical_name(p.name) in known]
        if isinstance(entry.geometry, KeptGeometry):
            pieces = pieces[:1]  # one value, whatever number of names it stands for
        out = []
        for piece in pieces:
            if piece.box.numel:
                for source, box in self._cover(entry, piece):
                    out.append(_Copy(number, entry.itemsize, piece, source, box))
            else:
                self._candidates(entry, piece)  # shape and dtype are checked all the same
        return out

    def _cover(self, entry: Entry, piece: Piece) -> list[tuple[Source, Box]]:
        name = entry.logical_name(piece.name)
        sources = [
            source
            for row, fqn in self._candidates(entry, piece)
            for source in self._pieces.meeting(row, fqn, piece.box)
            if row.geometry is not None or source.holders == (self._followed(name),)
        ]
        self._refuse_ambiguous(entry, piece, sources)
        # What this rank wrote itself may still be in the page cache of its host.
        sources.sort(key=lambda source: self._rank not in source.holders)
        out, left = [], [piece.box]
        for source in sources:
            if not left:
                break
            out += [(source, c) for b in left if (c := b.intersect(source.piece.box)) is not None]
            left = remaining_after(left, source.piece.box)
        if left:
            raise uncovered(name, piece, left, self._catalogue, self._rank)
        return out

    def _candidates(self, entry: Entry, piece: Piece) -> list[tuple[Row, str]]:
        """The rows to look into, all of the piece's shape and dtype."""
        name = entry.logical_name(piece.name)
        rows = self._pieces.by_name[name]
        if any(row.geometry is None for row, _ in rows):
            chosen = self._followed(name)
            rows = [(r, f) for r, f in rows if r.geometry is not None or chosen in r.ranks]
        for row, _ in rows:
            self._places.refuse_guess(row, self._rank, self._catalogue.url)
        rows = self._of_place(rows)
        fqns = {id(row): fqn for row, fqn in rows}
        ours = self._pieces.own_family(entry.geometry, [row for row, _ in rows])
        rows = [(row, fqns[id(row)]) for row in ours]
        for row, fqn in rows:
            shape = row_shape(row, fqn)
            if row.dtype != entry.dtype or shape != piece.shape:
                raise other_tensor(name, (row.dtype, shape), (entry.dtype, piece.shape),
                                   self._catalogue.url, self._rank)  # fmt: skip
        return rows

    def _followed(self, name: str) -> int:
        """The saved rank whose own value of this name is taken."""
        rows = [(row, fqn) for row, fqn in self._pieces.by_name[name] if row.geometry is None]
        saved = {rank for row, _ in rows for rank in row.ranks}
        filled = {rank for row, fqn in rows for rank in self._pieces.filled(row, fqn)}
        own = self._places.of_own(saved & filled or saved)
        return followed_rank(own, self._rank, self._group_ranks)

    def _of_place(self, rows: list[tuple[Row, str]]) -> list[tuple[Row, str]]:
        """Of several rows those whose ranks stand where this one does, if there are such."""
        alike = self._places.alike
        if alike is None or len(rows) < 2:
            return rows
        return [(r, f) for r, f in rows if self._pieces.family(r) <= alike] or rows

    def _refuse_ambiguous(self, entry: Entry, piece: Piece, sources: list[Source]) -> None:
        rows = {id(source.row): source.row for source in sources}
        first = next(iter(rows.values()), None)
        if first is None or all(self._pieces.one_tensor(first, row) for row in rows.values()):
            return
        for index, one in enumerate(sources):
            for other in sources[:index]:
                if self._pieces.one_tensor(one.row, other.row):
                    continue
                common = one.piece.box.intersect(other.piece.box)
                if common is not None and common.intersect(piece.box) is not None:
                    name = entry.logical_name(piece.name)
                    raise ambiguous(name, one.row, other.row, self._catalogue.url, self._rank)
