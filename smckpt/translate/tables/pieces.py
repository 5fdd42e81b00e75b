"""Where the elements of roles are in stored tensors: a layout's table, made concrete for one model.

Both sides of a translation are a `Side`: the stored tensors of a layout at some degrees, and for
each role its pieces. A piece is a box of the role, and the elements of a stored tensor that hold
it. The two sides are compiled to block copies, which are proven on shapes before any data moves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from smckpt.errors import KeysMismatchError, TensorMismatchError, TopologyError
from smckpt.formats.degrees import Degrees
from smckpt.formats.tensors import Block, RankTensors, TensorKey
from smckpt.layout.mesh import Shape
from smckpt.layout.strided import (
    Box,
    Copy,
    Coverage,
    Piece,
    Strided,
    coverage,
    meet,
    row_major_strides,
)
from smckpt.translate.tables.dims import Dims
from smckpt.translate.tables.table import AxisRun, LayoutRow, TensorLayout, holds, runs_of_rank


class RoleKey(NamedTuple):
    role: str
    layer: int  # -1: outside the layers
    expert: int  # -1: no expert
    tower: str = ""


@dataclass(frozen=True)
class LayoutTensor:
    """A row of a table for one name: the row, its layer, and the rank's own number of the
    expert."""

    name: str
    row: LayoutRow
    layer: int
    expert: int


@dataclass
class Side:
    """Tensors of a layout at some degrees, and the pieces of each role in them.

    copies: (key, other): tensors that must be equal; only `key` is used. joined: tensors whose mean
        or sum is used, under the key of the first. padding: rows at the end of a tensor that hold
        nothing. rows: how many vocabulary rows all ranks' tensors of a name have, if they may be
        padded. shifts: the number that a tensor adds to its roles. stored: the shape in the file,
        if the tensor is read in another shape.
    """

    layout: TensorLayout
    dims: Dims
    degrees: Degrees
    shapes: dict[TensorKey, Shape] = field(default_factory=dict)
    pieces: dict[RoleKey, list[tuple[TensorKey, Piece]]] = field(default_factory=dict)
    copies: list[tuple[TensorKey, TensorKey]] = field(default_factory=list)
    joined: dict[TensorKey, tuple[str, list[TensorKey]]] = field(default_factory=dict)
    padding: dict[TensorKey, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    shifts: dict[TensorKey, float] = field(default_factory=dict)
    stored: dict[TensorKey, Shape] = field(default_factory=dict)
    _original: dict[TensorKey, TensorKey] = field(default_factory=dict)
    _cut: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups, tp = self.dims.heads.groups, self.degrees.tp
        if self.layout.whole_groups and groups % tp:
            raise TopologyError(
                f"tensor-parallel degree {tp} does not divide the {groups} key/value groups, as "
                f"the layout {self.layout.name} needs (Transformer Engine refuses others too)",
                remedy="pass the degree that the model is trained with, and its own config",
            )

    def add(self, tensor: LayoutTensor, held: RankTensors) -> None:
        """Add the tensors under one name.

        Raises:
            TensorMismatchError, TopologyError: shapes or degrees do not fit the model.
        """
        row, degrees = tensor.row, self.degrees
        tps, columns = self._ranks(tensor, held)
        shared = row.of_experts and held.whole is None
        # each rank may have the whole embedding: all of the vocabulary, without padding
        repeated = row.how == "vocabulary" and held.whole is None and degrees.tp > 1 and all(
            shape[0] == self.dims.sizes["V"] for shape in held.shards.values()
        )  # fmt: skip
        cut = row.tp is not None and not repeated
        if cut:
            self._cut[held.name] = _dimension(row, row.tp or 0)
        vocabulary = size = self.dims.sizes["V"]
        if row.how == "vocabulary":
            vocabulary = (held.whole or held.shards.get((0, 0), (0,)))[0]
            if held.whole is None and cut:
                vocabulary *= tps
            if vocabulary < size:
                raise TensorMismatchError(
                    f"{held.name} has {vocabulary} rows in total, but the config says "
                    f"vocab_size={size}",
                    remedy="pass the model's own config, and the files of all ranks",
                )
        if row.how == "vocabulary" and cut:
            self.rows[held.name] = vocabulary
        parts = (degrees.etp if shared else tps) if cut else 1
        eps = degrees.ep if shared else columns
        ours = self.local_shape(tensor, vocabulary, parts, eps)
        if held.whole is None and cut:
            # a rank's attention needs whole heads, even if the shapes would fit
            own = self.dims.of(row.tower).heads
            heads = own.groups * own.per_group
            if "l_q" in row.roles and row.how == "per_rank":
                heads = own.linear
            if heads % self.degrees.tp and not {"q", "q_up", "l_q"}.isdisjoint(row.roles):
                raise TopologyError(
                    f"tensor-parallel degree {self.degrees.tp} does not divide the {heads} heads "
                    f"of {row.name}",
                    remedy="pass the degree that the model is trained with, and its own config",
                )
        if held.whole is not None and (row.folded or row.copies == "sum"):
            raise TopologyError(
                f"{held.name} is one distributed tensor, but in this layout each rank has a "
                "tensor of its own", remedy="export the ranks' plain tensors or files",
            )  # fmt: skip
        for column in range(columns):
            for tp in range(tps):
                key = (
                    TensorKey(held.name, tp, column) if held.whole is None else TensorKey(held.name)
                )
                self._check(
                    key, held, folded(row, ours), _dimension(row, row.tp or 0) if cut else None
                )
                self.shapes[key] = ours if row.folded else held.whole or held.shards[tp, column]
                if row.folded:
                    self.stored[key] = folded(row, ours)
                if row.shift:
                    self.shifts[key] = row.shift
                part, ep = degrees.of_expert(tp, column) if shared else (tp, 0)
                part = part if cut else 0
                first = degrees.first_of(part, ep) if shared else (part, 0)
                if row.predicts and self.dims.once.issuperset(row.roles):
                    # the model's embedding or head, which this row holds again
                    outer = next(
                        r.name for r in self.layout.rows if r.roles == row.roles and not r.of_layers
                    )
                    self._add_copy(row, key, key._replace(name=outer))
                elif first == (tp, column):
                    self._add_pieces(tensor, key, (part, parts), (ep, eps), ours)
                elif held.whole is None:
                    self._add_copy(row, key, TensorKey(held.name, *first))

    def _add_copy(self, row: LayoutRow, key: TensorKey, first: TensorKey) -> None:
        """Add another rank's copy of what `first` holds."""
        if row.copies != "equal" and row.of_experts and self.degrees.apart:
            raise TopologyError(
                f"copies={row.copies!r} of {key.name} does not work for experts that are cut "
                f"differently from layers ({self.degrees})", remedy="leave out copies=, or etp=",
            )  # fmt: skip
        same_rank = TensorKey(key.name, key.tp, first.ep)
        if row.copies != "equal" and key == same_rank:
            self.joined.setdefault(first, (row.copies, []))[1].append(key)
            return
        if row.copies != "equal":  # expert-parallel ranks hold the same parts of the sum or mean
            first = same_rank
        self.copies.append((first, key))
        self._original[key] = first

    def along(self, key: TensorKey) -> int | None:
        """The dimension of a stored tensor along which the ranks' arrays are joined, if any."""
        return self._cut.get(key.name)

    def original(self, key: TensorKey) -> TensorKey:
        """The tensor that `key` is a copy of, or `key` itself."""
        return self._original.get(key, key)

    def local_shape(self, tensor: LayoutTensor, vocabulary: int, tp: int, ep: int) -> Shape:
        """The shape of one rank's tensor. All ranks together have `vocabulary` rows, padding
        included."""
        row, axis = tensor.row, tensor.row.tp or 0
        shapes = [self.dims.of(row.tower).shape(role) for role in row.roles]
        shape = list(shapes[0])
        shape[axis] = sum(s[axis] for s in shapes)
        if row.how == "vocabulary":
            shape[axis] = vocabulary
        if shape[axis] % tp:
            raise TopologyError(
                f"{tensor.name} has the size {shape[axis]}, which {tp} tensor-parallel ranks do "
                "not divide",
                remedy="pass a degree that divides the model's sizes",
            )
        shape[axis] //= tp
        if row.transposed:
            shape.reverse()
        return (self.dims.experts // ep, *shape) if row.stacked else tuple(shape)

    def _ranks(self, tensor: LayoutTensor, held: RankTensors) -> tuple[int, int]:
        """How many tensor-parallel ranks and columns have a tensor under a name. A tensor that is
        whole and in order counts as that of one rank."""
        degrees = self.degrees
        if held.whole is None:
            return degrees.tp, degrees.columns
        if tensor.row.of_experts and degrees.apart:
            raise TopologyError(
                f"{tensor.name} is one tensor of all ranks, which is not possible with {degrees}",
                remedy="leave out etp=, or export the ranks' plain tensors or files",
            )
        if "{e}" in tensor.row.name and degrees.ep > 1:
            raise TopologyError(
                f"{tensor.name} is one tensor of all ranks, but each expert-parallel rank numbers "
                "its "
                "own experts",
                remedy="save expert-parallel parameters on meshes of their own ranks",
            )
        return (degrees.tp if self.layout.joined else 1), 1

    def _check(self, key: TensorKey, held: RankTensors, ours: Shape, along: int | None) -> None:
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
                f"{where} has the shape {found}, but with the config and the layout "
                f"{self.layout.name} at {self.degrees} it should be {expected}",
                remedy="check config=, tp=, ep=, layout= and, if experts are cut differently "
                "from layers (Megatron's expert_tensor_parallel_size), etp=",
            )

    def _add_pieces(
        self,
        tensor: LayoutTensor,
        key: TensorKey,
        tp: tuple[int, int],
        ep: tuple[int, int],
        ours: Shape,
    ) -> None:
        row, dims = tensor.row, self.dims.of(tensor.row.tower)
        axis = row.tp or 0
        sizes = [dims.shape(role)[axis] for role in row.roles]
        if row.how == "vocabulary":
            low = tp[0] * ours[0]
            count = max(0, min(ours[0], sizes[0] - low))
            self.padding[key] = self.padding.get(key, 0) + ours[0] - count
            runs = [AxisRun(0, 0, 1, low, count)] if count else []
        else:
            runs = runs_of_rank(row.how, sizes, dims.heads, tp[1], tp[0])
        shift = tp[0] * ours[_dimension(row, row.tp or 0)] if key.tp < 0 else 0
        experts = dims.experts // ep[1]
        strides = row_major_strides(self.shapes[key])
        along = [_dimension(row, d) for d in range(len(dims.shape(row.roles[0])))]
        for run in runs:
            name = row.roles[run.role]
            shape = dims.shape(name)
            offsets, counts, steps = [0] * len(shape), [*shape], [strides[d] for d in along]
            offsets[axis], counts[axis] = run.role_at, run.count
            start = (run.at + shift) * steps[axis]
            steps[axis] *= run.step
            box = Box(tuple(offsets), tuple(counts))
            for local in range(experts) if row.stacked else (tensor.expert,):
                expert = ep[0] * experts + local if row.of_experts else -1
                at = start + (local * strides[0] if row.stacked else 0)
                piece = Piece(name, shape, box, at, tuple(steps))
                role = RoleKey(name, tensor.layer, expert, row.tower)
                self.pieces.setdefault(role, []).append((key, piece))


def _dimension(row: LayoutRow, axis: int) -> int:
    """The dimension of the stored tensor to which a role's dimension maps."""
    return (1 if row.stacked else 0) + (1 - axis if row.transposed else axis)


def tensors_of(layout: TensorLayout, dims: Dims, ep: int) -> Iterator[LayoutTensor]:
    """Every tensor that a rank has in this layout, for this model.

    Raises:
        TopologyError: the expert-parallel degree does not divide the experts.
        KeysMismatchError: the layout lacks a row for a part of the model.
    """
    experts = dims.experts if any("sparse" in kind for kind in dims.kinds) else 0
    if experts % ep or (ep > 1 and not experts):
        raise TopologyError(
            f"expert-parallel degree {ep} does not divide {experts} experts",
            remedy="pass the ep= with which the model was trained",
        )
    missing: set[str] = set()
    for tower in ("", *dims.towers):
        own = dims.of(tower)
        table = [row for row in layout.rows if row.tower == tower]
        for layer in range(-1, len(own.kinds)):
            roles, words = own.roles(layer), own.words(layer)
            found: set[str] = set()
            for row in table:
                if row.of_layers != (layer >= 0) or row.predicts != ("predicts" in words):
                    continue
                here = roles | own.once if row.predicts else roles
                if not here.issuperset(row.roles) or not holds(row.when, words):
                    continue
                found.update(row.roles)
                name = row.name.replace("{i}", str(layer)).replace("{m}", str(layer - own.layers))
                many = "{e}" in row.name
                for expert in range(experts // ep) if many else (-1,):
                    yield LayoutTensor(name.replace("{e}", str(expert)), row, layer, expert)
            missing |= {f"{tower}.{role}" if tower else role for role in roles - found}
    if missing:
        raise KeysMismatchError(
            f"the layout {layout.name} has no row for {sorted(missing)} of a {dims.family.name} "
            "model",
            remedy="choose another layout, or add these rows to a layout of your own",
        )


def folded(row: LayoutRow, shape: Shape) -> Shape:
    """The shape under which a stacked tensor (experts, a, b) is stored."""
    if row.folded == "columns":
        return (shape[1], shape[0] * shape[2])
    return (shape[0] * shape[1], shape[2]) if row.folded == "rows" else shape


def dropped(layout: TensorLayout, name: str) -> bool:
    """Whether the table drops a tensor of this name because it holds no weights."""
    return any(re.fullmatch(pattern, name) for pattern in layout.drop)


def compile_blocks(source: Side, target: Side) -> dict[TensorKey, list[Block]]:
    """Target tensor → the blocks that fill it.

    It proves that each target element is written once and each source element is used once, except
    for padding of the vocabulary.

    Raises:
        KeysMismatchError, TensorMismatchError: the proof fails; the message lists what is left
            over.
    """
    blocks: dict[TensorKey, list[Block]] = {key: [] for key in target.shapes}
    for role, pieces in target.pieces.items():
        for to, piece in pieces:
            for key, other in source.pieces.get(role, ()):
                copy = meet(other, piece)
                if copy is not None:
                    blocks[to].append(Block(key, copy))
    proof = _Proof()
    used: dict[TensorKey, list[Strided]] = {key: [] for key in source.shapes}
    for held in blocks.values():
        for block in held:
            used[block.source].append(block.copy.source)
    repeated = {other for _, other in source.copies}
    repeated.update(other for _, others in source.joined.values() for other in others)
    wrong = []
    for key, parts in used.items():
        if key not in repeated:
            fault = proof.fault(source.shapes[key], parts, source.padding.get(key, 0))
            if fault:
                wrong.append(f"{key.name} {source.shapes[key]}: {fault}")
    if wrong:
        raise TensorMismatchError(
            f"{len(wrong)} tensors of the source would not be used exactly once: "
            f"{'; '.join(wrong[:8])}",
            remedy="check layout= and config=, which do not describe this source",
        )
    for first, (how, others) in target.joined.items():
        # a mean is written to all ranks, a sum to one rank and zeros to the others
        for rank in others:
            blocks[rank] = blocks[first] if how == "mean" else []
            target.padding[rank] = 0 if how == "mean" else target.shapes[rank][0]
    for first, copied in target.copies:
        blocks[copied] = blocks[first]
    wrong = []
    for key, shape in target.shapes.items():
        filled = (block.copy.target for block in blocks[key])
        fault = proof.fault(shape, filled, target.padding.get(target.original(key), 0))
        if fault:
            wrong.append(f"{key.name} {shape}: {fault}")
    if wrong:
        raise KeysMismatchError(
            f"{len(wrong)} tensors would not be filled exactly once: {'; '.join(wrong[:8])}",
            remedy="the source lacks parts of these tensors, or has some twice: check layout= "
            "and config=",
        )
    return blocks


def prove_copies(
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    parts: Mapping[str, Sequence[tuple[str, Copy]]],
) -> None:
    """Prove that the parts of each target, which are copies out of sources, fill it exactly once,
    and that they use each element of each source exactly once.

    Raises:
        KeysMismatchError: they do not; the message lists what is left over.
    """
    proof = _Proof()
    used: dict[str, list[Strided]] = {name: [] for name in sources}
    wrong = []
    for name, shape in targets.items():
        for source, copy in parts[name]:
            used[source].append(copy.source)
        fault = proof.fault(shape, (copy.target for _, copy in parts[name]), 0)
        wrong += [f"{name} {shape}: {fault}"] if fault else []
    for name, shape in sources.items():
        fault = proof.fault(shape, used[name], 0)
        wrong += [f"{name} {shape} of the source: {fault}"] if fault else []
    if wrong:
        raise KeysMismatchError(
            f"{len(wrong)} tensors would not be used or filled exactly once: "
            f"{'; '.join(wrong[:8])}",
            remedy="pass the model's own config; ExportOptions(naming='module') keeps the names",
        )


# -- the proof ---------------------------------------------------------------------------------


class _Proof:
    """Proves that parts cover tensors exactly. Equal layers are checked once."""

    def __init__(self) -> None:
        self._coverage = functools.cache(coverage)

    def fault(self, shape: Shape, parts: Iterable[Strided], padding: int) -> str:
        """The fault, or "" if each element is covered once, except the last `padding` rows."""
        filled = (shape[0] - padding, *shape[1:]) if padding else shape
        found: Coverage = self._coverage(filled, tuple(parts))
        if found.outside:
            return (
                "padding is used as vocabulary" if padding else "a part reaches beyond the tensor"
            )
        if found.exact:
            return ""
        return f"{found.never} elements are not covered, {found.often} are covered more than once"
