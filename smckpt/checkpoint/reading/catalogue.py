"""What a checkpoint holds, by key and rank and by logical name, whoever wrote it.

A load, a comparison and a translation ask a `Catalogue`. `committed` answers for a commit of ours;
readers of other systems' checkpoints (`readers`) for theirs.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smckpt.checkpoint.commits.contents import one_group
from smckpt.checkpoint.reading.blocks import SavedFile, Stores
from smckpt.checkpoint.records.headers import StoredSlot
from smckpt.checkpoint.records.objects import decode_object
from smckpt.decoding import SENSELESS
from smckpt.errors import CheckpointError, CorruptCheckpointError
from smckpt.layout.containers import made, made_again
from smckpt.layout.entries import DTYPES, Entry, Path, dotted
from smckpt.layout.geometry import Geometry
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import Box, Piece

__all__ = [
    "Catalogue",
    "LogicalTensor",
    "SavedFile",
    "SavedPiece",
    "SavedPieces",
    "Stored",
    "are_groups",
    "nested",
    "under_names",
]


@dataclass(frozen=True, slots=True)
class SavedPiece:
    """A saved piece of a logical tensor, and the ranks that hold (and wrote) the array that it is
    part of."""

    piece: Piece
    row: Entry
    holders: tuple[int, ...]


class SavedPieces:
    """The rows of a checkpoint by logical name, and their pieces."""

    def __init__(self, rows: Sequence[Entry], groups: Iterable[Iterable[int]]) -> None:
        """`groups`: the ranks of each group that saved."""
        self._group_of = {rank: group for group in map(frozenset, groups) for rank in group}
        self.by_name: dict[str, list[tuple[Entry, str]]] = {}
        self._divided: dict[tuple[Path, str], list[Entry]] = {}
        for row in rows:
            for fqn in row.fqns:
                self.by_name.setdefault(row.logical_name(fqn), []).append((row, fqn))
                if not row.geometry.per_rank:
                    self._divided.setdefault((row.before, fqn), []).append(row)
        # Keys contain ids of objects that the rows keep alive.
        self._holders: dict[Any, dict[Shape, tuple[int, ...]]] = {}
        self._pieces: dict[Any, list[_Pieces]] = {}
        self._filled: dict[Any, frozenset[int]] = {}
        self._positions: dict[tuple[str, ...], dict[str, int]] = {}
        self._families: dict[int, frozenset[int]] = {}
        self._family_of: dict[frozenset[int], frozenset[int]] = {}

    def holders(self, row: Entry) -> dict[Shape, tuple[int, ...]]:
        """By shard coordinate: the ranks that share an array of this row."""
        key = (row.geometry.sharding(), id(row.ranks))
        if key not in self._holders:
            found: dict[Shape, list[int]] = {}
            for rank in row.ranks:
                found.setdefault(row.geometry.coordinate(rank), []).append(rank)
            self._holders[key] = {where: tuple(ranks) for where, ranks in found.items()}
        return self._holders[key]

    def family(self, row: Entry) -> frozenset[int]:
        """The ranks over which the tensor is sharded and replicated: those of its mesh.

        Explicit boxes name only the rank that has them, not the ranks that have the rest. They form
        one family.
        """
        if row.geometry.explicit:
            return frozenset()
        shared = row.geometry.ranks
        if id(shared) not in self._families:
            ranks = frozenset(shared)
            self._families[id(shared)] = self._family_of.setdefault(ranks, ranks)
        return self._families[id(shared)]

    # Ranks of one mesh hold parts or copies of one tensor. Ranks of two meshes that save under one
    # name may hold copies (tensors that FSDP + TP leaves out of the TP plan), or different tensors
    # (plain slices under TP, pipeline stages that number their layers alike).

    def one_tensor(self, a: Entry, b: Entry) -> bool:
        """Whether two rows with one name certainly belong to one tensor: they share a mesh, or the
        mesh of another tensor contains the ranks of both."""
        ranks, others = self.family(a), self.family(b)
        if a.geometry.explicit and b.geometry.explicit:  # then groups are all that is known
            ranks, others = self._group_of[a.ranks[0]], self._group_of[b.ranks[0]]
        return ranks is others or any(f >= ranks and f >= others for f in self.joined)

    @cached_property
    def joined(self) -> set[frozenset[int]]:
        """The ranks of each mesh."""
        rows = (row for named in self.by_name.values() for row, _ in named)
        return {self.family(row) for row in rows if not row.geometry.per_rank}

    def own_family(self, live: Geometry, rows: list[Entry]) -> list[Entry]:
        """Of the rows of several meshes, those of the live mesh; all, if none is of the live
        mesh."""
        if len(rows) < 2:
            return rows
        ours = frozenset(live.ranks)
        return [row for row in rows if self.family(row) == ours] or rows

    def meeting(self, row: Entry, fqn: str, box: Box) -> Iterator[SavedPiece]:
        """The pieces of `fqn` in this row that have elements in common with `box`."""
        key = _rule(row)
        if key not in self._pieces:
            found: list[list[tuple[tuple[int, ...], Piece]]] = [[] for _ in row.fqns]
            for ranks in self.holders(row).values():
                for piece in row.geometry.pieces(ranks[0]):
                    found[self._position(row, piece.name)].append((ranks, piece))
            self._pieces[key] = [_Pieces(items) for items in found]
        for holders, piece in self._pieces[key][self._position(row, fqn)].meeting(box):
            if piece.name != fqn:  # computed for a tensor of the same shape and sharding
                piece = Piece(fqn, piece.shape, piece.box, piece.start, piece.strides)
            yield SavedPiece(piece, row, holders)

    def filled(self, row: Entry, fqn: str) -> set[int]:
        """For a per-rank row of `fqn`, such as the optimizer's step: the ranks that hold elements
        of the sharded tensors beside it. Other ranks may have the row too, but they never
        stepped."""
        found: set[int] = set()
        for beside in self._divided.get((row.before, fqn), ()):
            key = _rule(beside), self._position(beside, fqn)
            if key not in self._filled:
                whole = Box.whole(beside.geometry.shape_of(fqn))
                of = self.meeting(beside, fqn, whole) if whole.numel else ()
                self._filled[key] = frozenset(rank for source in of for rank in source.holders)
            found |= self._filled[key]
        return found

    def all(self, name: str) -> list[SavedPiece]:
        """All saved pieces of a logical tensor. A per-rank row gives one for each rank."""
        out: list[SavedPiece] = []
        for row, fqn in self.by_name[name]:
            whole = Box.whole(row.geometry.shape_of(fqn))
            if whole.numel:
                out += self.meeting(row, fqn, whole)
        return out

    def _position(self, row: Entry, fqn: str) -> int:
        """The place of a name among those of a row, of which there may be a million."""
        names = row.fqns
        if len(names) == 1 and names[0] == fqn:
            return 0
        if names not in self._positions:
            self._positions[names] = {name: at for at, name in reversed([*enumerate(names)])}
        return self._positions[names][fqn]


class _Pieces:
    """Disjoint or equal boxes with their pieces, found by position."""

    def __init__(self, items: Sequence[tuple[tuple[int, ...], Piece]]) -> None:
        dims = range(len(items[0][1].box.offsets)) if items else range(0)
        # Sorted along the dimension that distinguishes most of them.
        self._dim = max(dims, key=lambda d: len({p.box.offsets[d] for _, p in items}), default=-1)
        d = self._dim
        self._items = sorted(items, key=lambda i: i[1].box.offsets[d]) if d >= 0 else [*items]
        self._lows = [piece.box.offsets[d] for _, piece in self._items] if d >= 0 else []
        self._widest = max((p.box.sizes[d] for _, p in self._items), default=0) if d >= 0 else 0

    def meeting(self, box: Box) -> Iterator[tuple[tuple[int, ...], Piece]]:
        first, last, d = 0, len(self._items), self._dim
        if d >= 0:
            low, high = box.offsets[d], box.offsets[d] + box.sizes[d]
            first = bisect.bisect_right(self._lows, low - self._widest)
            last = bisect.bisect_left(self._lows, high)
        for item in self._items[first:last]:
            if item[1].box.intersect(box) is not None:
                yield item


def _rule(row: Entry) -> object:
    """Everything in a rule that decides which pieces ranks hold, except the tensors' names."""
    return row.geometry.rule(), id(row.ranks)


Stored = tuple[SavedFile, StoredSlot]  # a part of a rank's array, and the file that has it


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor by its logical name; `shape` is the global one."""

    name: str
    path: Path
    dtype: str
    shape: Shape

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def chunks(self, nbytes: int) -> Iterator[Box]:
        """All of it in boxes of at most so many bytes, in row-major order."""
        return Box.whole(self.shape).chunks(max(1, nbytes // self.itemsize))


class Catalogue(ABC):
    """What one checkpoint holds. Thread-safe.

    A load asks for `identity`, then for names and boxes (`kind`, `object_ranks`, `rows` and what
    follows from them) and the values (`objects`, `optimizers_of`). It calls `read_headers` for the
    ranks from which it will read, and `slots` for each array, whose files it reads. Who opened the
    catalogue closes its stores.

    url: where it is.
    identity: tells it from others in the same directory. It is the same for all groups of a step.
    name: the file by which a peer finds it without a list, if there is one.
    ours: whether smckpt wrote it. Only then it records a step.
    kind: of state; SHARDED where names are those of whole tensors.
    whole: whether all groups of the step are here, and not one group of several.
    above: the directory from which all groups of the step can be opened.
    topology: the coordinates of the ranks that saved it, if they were recorded.
    metadata: what the caller of the save gave.
    nbytes: of all data files. No tensor has more, if all groups are here.
    stores: of its files, with their connections.
    object_ranks: the ranks that saved values, in order.
    optimizers: path → the names of its parameters, of each optimizer's state.
    """

    url: str
    identity: str
    name: str | None = None
    ours: bool
    kind: str | None = "SHARDED"
    whole: bool = True
    above: str
    topology: dict[str, Any] | None = None
    metadata: dict[str, Any]
    nbytes: int
    stores: Stores
    object_ranks: tuple[int, ...]
    optimizers: dict[str, Any]

    @property
    @abstractmethod
    def step(self) -> int | None: ...

    def refuse_one_group(self) -> None:
        """
        Raises:
            UsageError: not all groups of the step are here.
        """
        if not self.whole:
            raise one_group(self.url, self.above)

    # -- tensors -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rows(self) -> tuple[Entry, ...]:
        """The saved arrays: key, dtype and geometry, and the ranks that hold them."""

    @property
    @abstractmethod
    def pieces(self) -> SavedPieces:
        """The rows by logical name, and the boxes that ranks hold according to them."""

    @abstractmethod
    def read_headers(self, ranks: Iterable[int]) -> None:
        """Read what `slots` needs of these ranks, several files at a time.

        Raises:
            CorruptCheckpointError: a file is damaged, missing, or has another size.
        """

    @abstractmethod
    def slots(self, row: Entry, holders: Sequence[int]) -> list[Stored]:
        """Where the array of `row` that `holders` share is stored, in the order of its bytes.

        Raises:
            CorruptCheckpointError: some elements are in no file.
        """

    @cached_property
    def rows_by_key(self) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for row in self.rows:
            found.setdefault(row.key, []).append(row)
        return found

    @cached_property
    def logical(self) -> dict[str, LogicalTensor]:
        """All tensors by logical name."""
        out = {}
        for name, rows in self.pieces.by_name.items():
            row, fqn = rows[0]
            out[name] = LogicalTensor(
                name, row.logical_path(fqn), row.dtype, row.geometry.shape_of(fqn)
            )
        return out

    def held_empty(self, name: str) -> bool:
        """Whether one of the ranks that share a tensor holds none of its elements."""
        rows = [row for row, _ in self.pieces.by_name[name]]
        return any(0 in row.geometry.local_shape(rank) for row in rows for rank in row.ranks)

    # -- values that are not tensors -----------------------------------------------------------

    @abstractmethod
    def kinds(self, rank: int) -> dict[Path, str] | None:
        """Path → kind, for each container above tensors that is not a dict, as saved rank `rank`
        has it, and for tensors that ranks divide; None if an older writer recorded no kinds."""

    @abstractmethod
    def part(self, rank: int) -> dict[str, Any]:
        """What a rank saved beside its tensors, as it is written: "objects" and "optimizers".

        Raises:
            CorruptCheckpointError: it is missing, or differs from what was written.
        """

    @abstractmethod
    def part_url(self, rank: int) -> str:
        """The file of that, for errors."""

    def value_paths(self, rank: int) -> dict[str, str] | None:
        """As of a `PartRecord`; None if it is not known."""
        return None

    def optimizers_of(self, rank: int) -> dict[str, Any]:
        """The same, as saved rank `rank` has it. Ranks may number other parameters under one path:
        pipeline stages do, and `optimizers` has those of the lowest rank."""
        if len(self.object_ranks) == 1:
            return self.optimizers
        if rank not in self._optimizers:
            part = self.part(rank)
            owner = part.get("layout", {}).get("rank", rank)  # whose tables it has, if not its own
            self._optimizers[rank] = (part if owner == rank else self.part(owner))["optimizers"]
        return self._optimizers[rank]

    @cached_property
    def _optimizers(self) -> dict[int, dict[str, Any]]:
        return {}

    def objects(self, rank: int, *, unmade: bool = False) -> dict[str, tuple[Path, Any]]:
        """The values of saved rank `rank` that are not tensors: key → (path, value). They are read
        once, and the caller does not change them.

        Args:
            unmade: give an `Unmade` for a value of a class that is not registered, and not a name,
                tuple or dict in its place.

        Raises:
            CorruptCheckpointError: a value breaks the format.
            StateError: a value has a type that is not allowed here.
        """
        if rank not in self._objects:
            self._objects[rank] = self._decoded(rank)
        values = self._objects[rank]
        return values if unmade else {k: (path, made_again(v)) for k, (path, v) in values.items()}

    @cached_property
    def _objects(self) -> dict[int, dict[str, tuple[Path, Any]]]:
        return {}

    def _decoded(self, rank: int) -> dict[str, tuple[Path, Any]]:
        try:
            found = {
                key: (tuple(leaf["path"]), decode_object(leaf["value"]))
                for key, leaf in self.part(rank)["objects"].items()
            }
            for path, _ in found.values():
                rows = self.rows_by_key.get(dotted(path), ())
                if any(row.path == path and rank in row.ranks for row in rows):
                    raise CorruptCheckpointError(
                        f"rank {rank} has a value in the place of its tensor {dotted(path)!r}",
                        remedy="use an older checkpoint",
                    )
            return found
        except CheckpointError as error:
            error.path = error.path or self.part_url(rank)
            raise
        except SENSELESS as error:
            raise CorruptCheckpointError(
                f"the values beside the tensors cannot be decoded: {type(error).__name__} {error}",
                remedy="use an older checkpoint",
                path=self.part_url(rank),
            ) from error

    def refuse_unread(  # noqa: B027 (most have none)
        self, left_out: Callable[[str], bool], remedy: str = "leave them out: ignore=[…]"
    ) -> None:
        """
        Raises:
            StateError: the checkpoint has values that no reader of plain data can give; the message
                names them. Those that are left out do not count.
        """


# -- the state as nested containers, an optimizer's under the names of its parameters ------------

_Nodes = dict[Path, dict[Any, None]]  # container → its keys, in order


def nested(
    catalogue: Catalogue, leaves: Mapping[Path, Any], kinds: Mapping[Path, str] | None
) -> dict[str, Any]:
    """The containers around the leaves, the innermost made first, of these kinds."""
    nodes: _Nodes = {(): {}}
    for path in leaves:
        for depth in range(len(path)):
            nodes.setdefault(path[:depth], {})[path[depth]] = None
    found = dict(leaves)
    for path in sorted(nodes, key=len, reverse=True):
        if path in leaves and not (isinstance(leaves[path], dict) and not leaves[path]):
            continue  # one rank has a value where another has tensors below
        items = {key: found[at] for key in nodes[path] for at in [(*path, key)]}
        kind = (kinds or {}).get(path)
        if kinds is None:
            kind = "list" if _looks_like_list(catalogue, path, items) else None
        found[path] = made(kind, items)
    state: dict[str, Any] = found[()]
    return state


def _looks_like_list(catalogue: Catalogue, path: Path, items: Mapping[Any, Any]) -> bool:
    """For format 1.0 and 2.0, which do not record kinds: a container with the keys 0, 1, … was a
    list, unless it is the state of an optimizer, whose keys number its parameters."""
    of_optimizer = path[-1:] == ("state",) and dotted(path[:-1]) in catalogue.optimizers
    return (
        not of_optimizer
        and sorted(map(str, items)) == sorted(map(str, range(len(items))))
        and (all(type(key) is int for key in items))
    )


def under_names(optimizers: Mapping[str, Any], path: Path, value: Any) -> list[tuple[Path, Any]]:
    """A value of an optimizer that numbers its parameters, under their names. Any other value is
    unchanged.

    Args:
        optimizers: the saved names of each optimizer's parameters (`Catalogue.optimizers`).
        value: decoded, or in its stored form; the containers of param_groups look the same in both.
    """
    for at, part in enumerate(path):
        record = optimizers.get(dotted(path[:at])) or {}
        ids = [] if record.get("form") == "fqn" else record.get("ids", [])
        if not any(names != [str(index)] for index, names in enumerate(ids)):
            continue
        if part == "state" and len(path) > at + 1 and isinstance(owner := path[at + 1], int):
            names = ids[owner] if 0 <= owner < len(ids) else [owner]
            return [((*path[: at + 1], name, *path[at + 2 :]), value) for name in names]
        if part == "param_groups" and path[-1] == "params" and len(path) == at + 3:
            return [(path, _members(value, ids) if isinstance(value, list) else value)]
        if part == "param_groups" and len(path) == at + 1 and are_groups(value):
            return [(path, [{**g, "params": _members(g["params"], ids)} for g in value])]
    return [(path, value)]


def are_groups(value: Any) -> bool:
    """Whether these are param_groups; they may be in a container of somebody's own."""
    return isinstance(value, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in value
    )


def _members(params: Sequence[Any], ids: Sequence[Sequence[str]]) -> list[Any]:
    known = range(len(ids))
    return [n for p in params for n in (ids[p] if isinstance(p, int) and p in known else (p,))]
