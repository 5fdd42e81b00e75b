"""Where the elements of roles lie in stored tensors: a table, made concrete for one model.

Both sides of a translation are a `Side`: the stored tensors of a layout at some degrees, and for
each role the pieces that hold it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from smckpt.errors import KeysMismatchError, TensorMismatchError, TopologyError
from smckpt.layout.mesh import Shape
from smckpt.translate.degrees import Degrees
from smckpt.translate.dims import Dims
from smckpt.translate.runs import Run, runs_of_rank
from smckpt.translate.table import Layout, Row

__all__ = [
    "Axis",
    "Held",
    "Key",
    "Piece",
    "Place",
    "RoleKey",
    "Side",
    "dropped",
    "folded",
    "places_of",
]


class Key(NamedTuple):
    """A stored tensor: of one tensor-parallel rank and column of ranks (an expert-parallel one, but
    see `Degrees`), or (-1, -1) one for all of them."""

    name: str
    tp: int = -1
    ep: int = -1


class RoleKey(NamedTuple):
    role: str
    layer: int  # -1: of no layer
    expert: int  # -1: of none


@dataclass(frozen=True, slots=True)
class Axis:
    """Index `role_at + k` of a role's dimension is `at + k * step` of dimension `dim` of the stored
    tensor, for k in [0, count)."""

    role_at: int
    count: int
    dim: int
    at: int
    step: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a role in a stored tensor: an axis for each of the role's dimensions; the other
    dimension of the tensor, if it has one, is the expert's: `index` of dimension 0."""

    key: Key
    axes: tuple[Axis, ...]
    index: int = -1


@dataclass(frozen=True)
class Place:
    """What a table says of one name: the row, its layer, the expert of the rank's own."""

    name: str
    row: Row
    layer: int
    expert: int


@dataclass(frozen=True)
class Held:
    """The stored tensors under one name: a shape for each rank, or one for all (`whole`)."""

    name: str
    dtype: str
    shards: Mapping[tuple[int, int], Shape]
    whole: Shape | None = None


@dataclass
class Side:
    """Tensors of a layout at some degrees, and the pieces of each role in them.

    copies: (key, other): tensors that must be equal, of which `key` alone is used. joined: those of
    which the mean or the sum is used, under the first one's key. padding: rows at the end of a
    tensor that hold nothing. rows: of the vocabulary in all ranks' tensors of a name, where they
    may be padded. shifts: what a tensor has more than its roles. stored: the shape that it says it
    has, where it is read in another.
    """

    layout: Layout
    dims: Dims
    degrees: Degrees
    shapes: dict[Key, Shape] = field(default_factory=dict)
    pieces: dict[RoleKey, list[Piece]] = field(default_factory=dict)
    copies: list[tuple[Key, Key]] = field(default_factory=list)
    joined: dict[Key, tuple[str, list[Key]]] = field(default_factory=dict)
    padding: dict[Key, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    shifts: dict[Key, float] = field(default_factory=dict)
    stored: dict[Key, Shape] = field(default_factory=dict)
    _original: dict[Key, Key] = field(default_factory=dict)
    _cut: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups, tp = self.dims.heads.groups, self.degrees.tp
        if self.layout.whole_groups and groups % tp:
            raise TopologyError(
                f"tensor-parallel degree {tp} does not divide the {groups} key/value groups, which "
                f"it must in the layout {self.layout.name} (Transformer Engine refuses another)",
                remedy="pass the degree that the model is trained with, and its own config",
            )

    def add(self, place: Place, held: Held) -> None:
        """Take in the tensors under one name.

        Raises:
            TensorMismatchError, TopologyError: shapes or degrees do not fit the model.
        """
        row, degrees = place.row, self.degrees
        tps, columns = self._ranks(place, held)
        shared = row.of_experts and held.whole is None
        cut = row.tp is not None and not self._repeated(row, held)
        if cut:
            self._cut[held.name] = self._along(row)
        vocabulary = self._vocabulary_rows(row, held, tps if cut else 1)
        if row.how == "vocabulary" and cut:
            self.rows[held.name] = vocabulary
        parts = (degrees.etp if shared else tps) if cut else 1
        eps = degrees.ep if shared else columns
        ours = self.local_shape(place, vocabulary, parts, eps)
        if held.whole is None and cut:
            self._refuse_cut_heads(row)
        if held.whole is not None and (row.folded or row.copies == "sum"):
            raise TopologyError(
                f"{held.name} is one distributed tensor, and the layout says that each rank has "
                "one of its own", remedy="export the ranks' plain tensors or files",
            )  # fmt: skip
        for column in range(columns):
            for tp in range(tps):
                key = Key(held.name, tp, column) if held.whole is None else Key(held.name)
                self._check(key, held, folded(row, ours), self._along(row) if cut else None)
                self.shapes[key] = ours if row.folded else held.whole or held.shards[tp, column]
                if row.folded:
                    self.stored[key] = folded(row, ours)
                if row.shift:
                    self.shifts[key] = row.shift
                part, ep = degrees.of_expert(tp, column) if shared else (tp, 0)
                part = part if cut else 0
                first = degrees.first_of(part, ep) if shared else (part, 0)
                if first == (tp, column):
                    self._add_pieces(place, key, (part, parts), (ep, eps), ours)
                elif held.whole is None:
                    self._add_copy(row, key, Key(held.name, *first))

    def _refuse_cut_heads(self, row: Row) -> None:
        """A rank's attention takes whole heads, whatever shapes allow."""
        heads = self.dims.heads.groups * self.dims.heads.per_group
        if heads % self.degrees.tp and not {"q", "q_up"}.isdisjoint(row.roles):
            raise TopologyError(
                f"tensor-parallel degree {self.degrees.tp} does not divide the {heads} heads of "
                f"{row.name}",
                remedy="pass the degree that the model is trained with, and its own config",
            )

    def _add_copy(self, row: Row, key: Key, first: Key) -> None:
        """Another rank's own of what `first` holds."""
        if row.copies != "equal" and row.of_experts and self.degrees.apart:
            raise TopologyError(
                f"copies={row.copies!r} of {key.name} is not for experts that are cut otherwise "
                f"than layers ({self.degrees})", remedy="leave out copies=, or etp=",
            )  # fmt: skip
        same_rank = Key(key.name, key.tp, first.ep)
        if row.copies != "equal" and key == same_rank:
            self.joined.setdefault(first, (row.copies, []))[1].append(key)
            return
        if row.copies != "equal":  # expert-parallel ranks hold the same parts of the sum or mean
            first = same_rank
        self.copies.append((first, key))
        self._original[key] = first

    def along(self, key: Key) -> int | None:
        """The dimension of a stored tensor along which the ranks' arrays are joined, if any."""
        return self._cut.get(key.name)

    def original(self, key: Key) -> Key:
        """The tensor that `key` is a copy of, or `key` itself."""
        return self._original.get(key, key)

    def local_shape(self, place: Place, vocabulary: int, tp: int, ep: int) -> Shape:
        """Of the tensor of one rank; `vocabulary` rows, padding included, in all ranks together."""
        row, axis = place.row, place.row.tp or 0
        shapes = [self.dims.shape(role) for role in row.roles]
        shape = list(shapes[0])
        shape[axis] = sum(s[axis] for s in shapes)
        if row.how == "vocabulary":
            shape[axis] = vocabulary
        if shape[axis] % tp:
            raise TopologyError(
                f"{tp} tensor-parallel ranks do not divide the {shape[axis]} of {place.name}",
                remedy="pass a degree that divides the model's sizes",
            )
        shape[axis] //= tp
        if row.transposed:
            shape.reverse()
        return (self.dims.experts // ep, *shape) if row.stacked else tuple(shape)

    def _ranks(self, place: Place, held: Held) -> tuple[int, int]:
        """How many tensor-parallel ranks and columns have a tensor under a name; one that is whole
        and in order counts as one rank's."""
        degrees = self.degrees
        if held.whole is None:
            return degrees.tp, degrees.columns
        if place.row.of_experts and degrees.apart:
            raise TopologyError(
                f"{place.name} is one tensor of all ranks, which cannot be: {degrees}",
                remedy="leave out etp=, or export the ranks' plain tensors or files",
            )
        if "{e}" in place.row.name and degrees.ep > 1:
            raise TopologyError(
                f"{place.name} is one tensor of all ranks, but expert-parallel ranks number their "
                "own experts",
                remedy="save expert-parallel parameters on meshes of their own ranks",
            )
        return (degrees.tp if self.layout.joined else 1), 1

    def _repeated(self, row: Row, held: Held) -> bool:
        """An embedding that each rank has whole: without padding, it has all of the vocabulary."""
        if row.how != "vocabulary" or held.whole is not None or self.degrees.tp == 1:
            return False
        return all(shape[0] == self.dims.sizes["V"] for shape in held.shards.values())

    def _vocabulary_rows(self, row: Row, held: Held, tp: int) -> int:
        size = self.dims.sizes["V"]
        if row.how != "vocabulary":
            return size
        shape = held.whole or held.shards.get((0, 0), (0,))
        found = shape[0] if held.whole is not None else shape[0] * tp
        if found < size:
            raise TensorMismatchError(
                f"{held.name} has {found} rows in all; the config says vocab_size={size}",
                remedy="pass the model's own config, and the files of all ranks",
            )
        return found

    def _check(self, key: Key, held: Held, ours: Shape, along: int | None) -> None:
        found, expected = held.whole, ours
        where = f"{key.name}"
        if found is None:
            found = held.shards.get((key.tp, key.ep))
            what = "rank" if self.degrees.apart else "expert-parallel rank"
            number = key.tp + self.degrees.tp * key.ep if self.degrees.apart else key.ep
            where += f" of tensor-parallel rank {key.tp}, {what} {number}"
        elif along is not None and self.layout.joined:
            expected = tuple(n * self.degrees.tp if d == along else n for d, n in enumerate(ours))
        if found != expected:
            raise TensorMismatchError(
                f"{where} has the shape {found}; the config and the layout {self.layout.name} at "
                f"{self.degrees} make it {expected}",
                remedy="check config=, tp=, ep=, layout= and, where experts are cut otherwise than "
                "layers (Megatron's expert_tensor_parallel_size), etp=",
            )

    @staticmethod
    def _along(row: Row) -> int:
        """The dimension of the stored tensor that the ranks cut."""
        axis = row.tp or 0
        return (1 if row.stacked else 0) + (1 - axis if row.transposed else axis)

    def _add_pieces(
        self, place: Place, key: Key, tp: tuple[int, int], ep: tuple[int, int], ours: Shape
    ) -> None:
        row, dims = place.row, self.dims
        axis = row.tp or 0
        sizes = [dims.shape(role)[axis] for role in row.roles]
        if row.how == "vocabulary":
            runs = self._vocabulary(key, ours[0], tp[0], sizes[0])
        else:
            runs = runs_of_rank(row.how, sizes, dims.heads, tp[1], tp[0])
        shift = tp[0] * ours[self._along(row)] if key.tp < 0 else 0
        experts = dims.experts // ep[1]
        for run in runs:
            shape = dims.shape(row.roles[run.role])
            axes = tuple(self._axis(row, d, n, run, shift) for d, n in enumerate(shape))
            for local in range(experts) if row.stacked else (place.expert,):
                expert = ep[0] * experts + local if row.of_experts else -1
                role = RoleKey(row.roles[run.role], place.layer, expert)
                piece = Piece(key, axes, local if row.stacked else -1)
                self.pieces.setdefault(role, []).append(piece)

    @staticmethod
    def _axis(row: Row, d: int, size: int, run: Run, shift: int) -> Axis:
        dim = (1 if row.stacked else 0) + (1 - d if row.transposed else d)
        if d != (row.tp or 0):
            return Axis(0, size, dim, 0, 1)
        return Axis(run.role_at, run.count, dim, run.at + shift, run.step)

    def _vocabulary(self, key: Key, held: int, rank: int, size: int) -> list[Run]:
        low = rank * held
        count = max(0, min(held, size - low))
        self.padding[key] = self.padding.get(key, 0) + held - count
        return [Run(0, 0, 1, low, count)] if count else []


def places_of(layout: Layout, dims: Dims, ep: int) -> Iterator[Place]:
    """Every tensor that a rank has in this layout, for this model.

    Raises:
        TopologyError: the experts are not divisible by their degree.
        KeysMismatchError: the layout has no row for something that the model has.
    """
    experts = dims.experts if dims.sparse_layers else 0
    if experts % ep or (ep > 1 and not experts):
        raise TopologyError(
            f"expert-parallel degree {ep} does not divide {experts} experts",
            remedy="pass ep= that the model was trained with",
        )
    missing: set[str] = set()
    for layer in range(-1, dims.layers):
        roles = dims.once if layer < 0 else dims.roles(layer)
        found: set[str] = set()
        for row in layout.rows:
            if not _applies(row, layer, dims, roles):
                continue
            found.update(row.roles)
            name = row.name.replace("{i}", str(layer))
            many = "{e}" in row.name
            for expert in range(experts // ep) if many else (-1,):
                yield Place(name.replace("{e}", str(expert)), row, layer, expert)
        missing |= roles - found
    if missing:
        raise KeysMismatchError(
            f"the layout {layout.name} says nothing of {sorted(missing)} of a {dims.family} model",
            remedy="choose another layout, or add rows for them to one of your own",
        )


def _applies(row: Row, layer: int, dims: Dims, roles: frozenset[str]) -> bool:
    if (layer >= 0) != ("{i}" in row.name) or not roles.issuperset(row.roles):
        return False
    kind = "sparse" if layer in dims.sparse_layers else "dense"
    return row.when in (None, kind) or row.when in dims.traits


def folded(row: Row, shape: Shape) -> Shape:
    """The shape that a stacked tensor (experts, a, b) says it has."""
    if row.folded == "columns":
        return (shape[1], shape[0] * shape[2])
    return (shape[0] * shape[1], shape[2]) if row.folded == "rows" else shape


def dropped(layout: Layout, name: str) -> bool:
    """Whether the table says that a tensor of this name holds no weights."""
    return any(re.fullmatch(pattern, name) for pattern in layout.drop)
