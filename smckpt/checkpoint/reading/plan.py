"""Read plans: which bytes of which files go where in this rank's arrays. To plan, only headers are
read.

`plan_logical` plans by logical name, from any mesh that the state was saved on. `plan_local`
(module `plan_local`) plans by key, if the shard degree is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from smckpt.checkpoint.reading.catalogue import Catalogue, LogicalTensor, SavedPiece, Stored
from smckpt.checkpoint.reading.loading_rank import LoadingRank
from smckpt.checkpoint.reading.plan_local import (
    ambiguous,
    other_tensor,
    plan_local,
    uncovered,
)
from smckpt.checkpoint.reading.read import ReadPlan, StoredCopy, execute, same_bytes
from smckpt.errors import CorruptCheckpointError, TopologyError
from smckpt.layout.entries import DTYPES, Entry
from smckpt.layout.geometry import BoxGeometry
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Copy, Piece, covered

__all__ = ["Planner", "ReadPlan", "WholeTensors", "plan_local", "plan_logical"]


def plan_logical(me: LoadingRank, entries: Sequence[Entry]) -> ReadPlan:
    """Plan to fill entries by logical name, from any mesh that they were saved on. The plan lists
    the names that are in only one of checkpoint and target.

    A per-rank tensor is taken from one saved rank (`LoadingRank.source`).

    Args:
        entries: this rank's arrays, the targets.

    Raises:
        TensorMismatchError: global shapes or dtypes differ.
        TopologyError: several saved tensors have one name, and nothing says which one is meant.
        CorruptCheckpointError: an element would not be written, or a header is damaged.
    """
    here = {e.logical_name(f) for e in entries for f in e.geometry.fqns}
    there = me.catalogue.logical.keys()
    missing = {name for name in here if name not in there or not me.takes(name)}
    unexpected = tuple(sorted(there - here))
    return ReadPlan(Planner(me).copies(entries), tuple(sorted(missing)), unexpected)


class Planner:
    """Plans entries by logical name, as `plan_logical` does, and remembers what it finds out. So
    many small plans cost no more than a large one."""

    def __init__(self, me: LoadingRank) -> None:
        self._me = me
        self._catalogue = me.catalogue
        self._rank = me.rank
        self._pieces = me.catalogue.pieces
        self._same_ranks = set(me.catalogue.object_ranks) <= set(me.group)
        self._metadata_only = False
        self._slots: dict[tuple[int, tuple[int, ...]], list[Stored]] = {}
        self._cuts: dict[tuple[Box, tuple[Box, ...]], list[tuple[int, Box]] | None] = {}

    def copies(self, entries: Sequence[Entry]) -> list[StoredCopy]:
        """The copies that fill those entries whose names the checkpoint has for this rank.

        Raises:
            As `plan_logical`, for any other fault than a missing name.
        """
        found = [
            (source, copy, number, entry.itemsize)
            for number, entry in enumerate(entries)
            for source, copy in self._copies(entry)
        ]
        self._catalogue.read_headers({r for source, *_ in found for r in source.holders})
        out = []
        for source, copy, number, itemsize in found:
            array = id(source.row), source.holders
            if array not in self._slots:
                self._slots[array] = self._catalogue.slots(source.row, source.holders)
            out.append(StoredCopy(self._slots[array], copy, number, itemsize))
        return out

    def tensors(self) -> Iterator[LogicalTensor]:
        """All tensors that this rank can load whole, each with the path by which it is found: those
        of the followed rank first, in its order."""
        rows = [row for row in self._catalogue.rows if self._me.has(row)]
        own = dict.fromkeys(row.logical_name(fqn) for row in rows for fqn in row.fqns)
        for name in filter(self._me.takes, dict.fromkeys((*own, *self._catalogue.logical))):
            row, fqn = self._rows(name)[0]
            # Where name and path agree, the row's own path is used: a fqn is text, but a key may
            # be a number.
            path = row.path if row.key == name else row.logical_path(fqn)
            yield LogicalTensor(name, path, row.dtype, row.geometry.shape_of(fqn))

    def form(self, name: str) -> tuple[str, Shape]:
        """The dtype and the shape of the tensor that this rank would follow under a name.

        Raises:
            TopologyError: it is not known whose tensor that is.
        """
        row, fqn = self._rows(name)[0]
        return row.dtype, row.geometry.shape_of(fqn)

    def check(self, entry: Entry) -> None:
        """Plan an entry by metadata alone, without headers and values.

        Raises:
            As `copies`. Boxes without a mesh that overlap count as ambiguous.
        """
        self._metadata_only = True
        self._copies(entry)

    # -- which elements of the saved arrays go into this rank's arrays ---------------------------

    def _copies(self, entry: Entry) -> list[tuple[SavedPiece, Copy]]:
        """The copies that fill those tensors of the entry whose names the checkpoint has."""
        names = {fqn: entry.logical_name(fqn) for fqn in entry.geometry.fqns}
        saved, takes = self._catalogue.logical, self._me.takes
        known = {name for name in names.values() if name in saved and takes(name)}
        pieces = entry.geometry.pieces(self._rank)
        here = {piece.name for piece in pieces}
        for fqn, name in names.items():
            if fqn not in here and name in known:
                self._candidates(entry, fqn, name)  # this checks shape and dtype
        pieces = [piece for piece in pieces if names[piece.name] in known]
        if entry.geometry.per_rank:
            pieces = pieces[:1]  # one value serves any number of names
        out = []
        for piece in pieces:
            name = names[piece.name]
            rows = self._candidates(entry, piece.name, name)
            if piece.box.numel:
                for source, box in self._cover(entry, piece, name, rows):
                    out.append((source, Copy(source.piece.part(box), piece.part(box))))
        return out

    def _cover(
        self, entry: Entry, piece: Piece, name: str, rows: Sequence[tuple[Entry, str]]
    ) -> list[tuple[SavedPiece, Box]]:
        sources = [
            source
            for row, fqn in rows
            for source in self._pieces.meeting(row, fqn, piece.box)
            if not row.geometry.per_rank or source.holders == (self._me.source(name),)
        ]
        self._refuse_ambiguous(entry, piece, name, sources)
        # Prefer files that this rank wrote: they may still be in its host's page cache. Of several
        # meshes take only this rank's own: two meshes may hold the experts of two ranks.
        sources.sort(
            key=lambda source: (
                self._rank not in self._pieces.family(source.row),
                self._rank not in source.holders,
            )
        )
        boxes = tuple(source.piece.box for source in sources)
        # The layers of a model are cut in the same way, so each cut is proven once.
        cut = piece.box, boxes
        try:
            if cut not in self._cuts:
                found = piece.box.shared(boxes)
                exact = covered(piece.box, (part for _, part in found)).exact
                self._cuts[cut] = found if exact else None
            shares = self._cuts[cut]
            left = [] if shares is not None else piece.box.subtract(*boxes)
        except CorruptCheckpointError as error:  # they overlap in too many ways
            error.path = self._catalogue.url
            raise
        if shares is None:
            raise uncovered(name, piece, left, self._me)
        return [(sources[number], part) for number, part in shares]

    def _candidates(self, entry: Entry, wanted: str, name: str) -> list[tuple[Entry, str]]:
        """The rows that may hold a tensor: the entry's `wanted`, by its logical name. All have its
        shape and dtype."""
        whole, rows = entry.geometry.shape_of(wanted), self._rows(name)
        fqns = {id(row): fqn for row, fqn in rows}
        ours = self._pieces.own_family(entry.geometry, [row for row, _ in rows])
        rows = [(row, fqns[id(row)]) for row in ours]
        for row, fqn in rows:
            shape = row.geometry.shape_of(fqn)
            if row.dtype != entry.dtype or shape != whole:
                raise other_tensor(name, (row.dtype, shape), (entry.dtype, whole), self._me)
        return rows

    def _rows(self, name: str) -> list[tuple[Entry, str]]:
        """The rows of a name that this rank may follow."""
        rows = self._pieces.by_name[name]
        if any(row.geometry.per_rank for row, _ in rows):
            chosen = self._me.source(name)
            rows = [(r, f) for r, f in rows if not r.geometry.per_rank or chosen in r.ranks]
        for row, _ in rows:
            self._me.refuse_guess(row)
        # those of ranks with this rank's coordinates, if there are any
        alike = self._me.alike
        if alike is None or len(rows) < 2:
            return rows
        families = [
            frozenset(row.ranks) if row.geometry.explicit else self._pieces.family(row)
            for row, _ in rows
        ]
        mine = [one for one, family in zip(rows, families, strict=True) if family <= alike]
        return mine or rows

    def _refuse_ambiguous(
        self, entry: Entry, piece: Piece, name: str, sources: list[SavedPiece]
    ) -> None:
        """
        Raises:
            TopologyError: sources overlap, and it is not known whether they are copies.
        """
        rows = [*{id(source.row): source.row for source in sources}.values()]
        if all(self._one_tensor(rows[0], row) for row in rows[1:]):
            return
        if entry.geometry.explicit and self._same_ranks:
            saved = (source.piece.box for source in sources if self._rank in source.holders)
            if piece.box in saved:
                return  # this rank saved this box, and the ranks that load are those that saved
        if not self._metadata_only:
            self._catalogue.read_headers({r for source in sources for r in source.holders})
        boxes: dict[Box, SavedPiece] = {}
        for source in sources:
            like = boxes.setdefault(source.piece.box, source)
            if not self._one_tensor(like.row, source.row) and not self._same_values(like, source):
                raise self._ambiguous(name, like, source)
        common = {box: box.intersect(piece.box) for box in boxes}
        if sum(part.numel for part in common.values() if part is not None) == piece.box.numel:
            return  # they do not overlap, or leave a hole, which the proof finds later
        for one, other in itertools.combinations(boxes.values(), 2):
            part = common[one.piece.box]
            overlap = part is not None and part.intersect(other.piece.box) is not None
            if overlap and not self._one_tensor(one.row, other.row):
                raise self._ambiguous(name, one, other)

    def _ambiguous(self, name: str, one: SavedPiece, other: SavedPiece) -> TopologyError:
        return ambiguous(name, one.row, other.row, self._me)

    def _one_tensor(self, one: Entry, other: Entry) -> bool:
        """Whether two rows certainly belong to one tensor. Boxes without a mesh do not show it: a
        group may hold replicas, or the shards of several tensor-parallel ranks. Without coordinates
        only the values can tell."""
        boxes = one.geometry.explicit and other.geometry.explicit
        if boxes and self._me.alike is None:
            return one is other
        return self._pieces.one_tensor(one, other)

    def _same_values(self, one: SavedPiece, other: SavedPiece) -> bool:
        """Whether equal boxes without a mesh have the same values, so that either can be used."""
        if self._metadata_only or not (one.row.geometry.explicit and other.row.geometry.explicit):
            return False
        itemsize = DTYPES[one.row.dtype].itemsize
        mine, theirs = (
            (self._catalogue.slots(source.row, source.holders), source.piece.start * itemsize)
            for source in (one, other)
        )
        nbytes = one.piece.box.numel * itemsize
        return same_bytes(mine, theirs, nbytes)


class WholeTensors:
    """Reads a checkpoint as rank `rank` of the ranks that saved it would load it without a target.
    Every block is compared with its checksum."""

    def __init__(self, catalogue: Catalogue, rank: int, threads: int) -> None:
        """
        Raises:
            TopologyError: ranks saved tensors of their own, and it is not known whose is wanted.
        """
        self.me = LoadingRank.of(catalogue, rank, catalogue.object_ranks)
        self._planner = Planner(self.me)
        self._threads, self._rank = threads, rank
        self.tensors = [*self._planner.tensors()]

    def read(self, tensor: LogicalTensor, box: Box, target: memoryview) -> None:
        """Fill `target` with the elements of a box, row-major.

        Raises:
            CorruptCheckpointError: a block differs, or elements are in no file.
        """
        name = str(tensor.path[-1])
        rule = BoxGeometry(name, tensor.shape, (box,), (self._rank,))
        entry = Entry(tensor.path, tensor.dtype, rule, tensor.path[:-1], (), (self._rank,))
        execute(self._planner.copies([entry]), [target], threads=self._threads)
