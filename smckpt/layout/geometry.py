"""Which part of which logical tensor a rank's local array holds.

A *geometry* is a rule. For a given rank it tells which *pieces* of logical tensors the rank's
local array holds, and which ranks hold the same array (its *replicas*). A manifest records rules,
so its size grows with the number of tensors and not with tensors times ranks. Every tool can
evaluate them offline, without torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from smckpt.layout.mesh import Holding, Interval, Mesh, Placement, Shape, remembered
from smckpt.layout.strided import Box, Piece, row_major_strides


class Geometry(Protocol):
    """What every rule answers."""

    @property
    def fqns(self) -> tuple[str, ...]:
        """The logical tensors that the array holds parts of."""

    def named(self, name: Callable[[str], str]) -> Geometry:
        """The same rule for tensors of other names."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a part."""

    @property
    def kind(self) -> str:
        """The kind of rule in a word or two, different for each kind."""

    @property
    def per_rank(self) -> bool:
        """Whether each rank has a tensor of its own under the name, so that nothing is divided."""

    @property
    def explicit(self) -> bool:
        """Whether it lists only the parts of some ranks, without the holders of the rest."""

    @property
    def flat(self) -> bool:
        """Whether the local array has one dimension for every shape of the tensor."""

    def shape_of(self, fqn: str) -> Shape:
        """The global shape of one of the tensors."""

    @property
    def whole_shape(self) -> Shape:
        """The shape of the tensor or flat parameter that the ranks divide."""

    def coordinate(self, rank: int) -> Shape:
        """The shard coordinate: equal for two ranks exactly when they hold the same array."""

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same array as `rank`, ascending."""

    def shard_degree(self) -> int:
        """How many different arrays there are; 0 if one rank cannot know."""

    def local_shape(self, rank: int) -> Shape: ...

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces in the rank's array, without empty ones."""

    def cuts(self) -> tuple[tuple[Mesh, Shape], ...]:
        """The mesh, if there is one, and its dimensions that shard the tensor."""

    def named_coordinate(self, rank: int) -> tuple[tuple[str, int, int], ...]:
        """Name, size and the rank's index of each dimension of the mesh; () without one."""

    def over(self, mesh: Mesh) -> Geometry:
        """The rule of the same tensors on a mesh (replicate, shard): cut along the first dimension,
        or whole if they are not cut here. A flat parameter is cut as FSDP1 cuts it."""

    def sharding(self) -> Hashable:
        """Equal for two rules under which the same ranks share an array. It may hold the `id` of
        a mesh or of the rule, so the caller keeps these alive while it compares."""

    def rule(self) -> Hashable:
        """Equal for two rules whose pieces differ in the names of tensors only. It holds an `id`
        as `sharding` does."""

    def same_as(self, other: Geometry) -> bool:
        """Whether equal coordinates certainly hold equal pieces. False: the caller compares."""

    def record(self) -> dict[str, Any]:
        """Its fields under the format's names, without the ranks of a per-rank rule. Meshes, flat
        units and ranks stay objects."""

    def __str__(self) -> str:
        """For people: "dp_replicate=2:R dp_shard=4:S0", "flat 1/4"."""


class GeometryDefaults:
    """The answers that most rules share."""

    per_rank = explicit = flat = False

    fqn: str
    shape: Shape

    @property
    def whole_shape(self) -> Shape:
        return self.shape

    def shape_of(self, fqn: str) -> Shape:
        del fqn
        return self.shape

    def cuts(self) -> tuple[tuple[Mesh, Shape], ...]:
        return ()

    def named_coordinate(self, rank: int) -> tuple[tuple[str, int, int], ...]:
        del rank
        return ()

    def named(self, name: Callable[[str], str]) -> Any:
        return replace(self, fqn=name(self.fqn))  # type: ignore[type-var]

    def sharding(self) -> Hashable:
        return id(self)

    def rule(self) -> Hashable:
        return id(self)

    def same_as(self, other: Geometry) -> bool:
        del other
        return False


@dataclass(frozen=True)
class MeshGeometry(GeometryDefaults):
    """A tensor placed on a mesh (DTensor, DDP, FSDP2, TP): `fqn` with global `shape`."""

    kind = "DTensor"

    fqn: str
    shape: Shape
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise ValueError(f"{len(self.placements)} placements on mesh {self.mesh.shape}")
        for placement in self.placements:
            if placement.kind != "replicate" and placement.dim >= len(self.shape):
                raise ValueError(f"{placement} of a tensor of shape {self.shape}")

    @property
    def fqns(self) -> tuple[str, ...]:
        return (self.fqn,)

    @remembered
    def shard_dims(self) -> tuple[int, ...]:
        """Mesh dimensions that shard the tensor."""
        return tuple(
            i
            for i, p in enumerate(self.placements)
            if p.kind != "replicate" and self.mesh.shape[i] > 1
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    def coordinate(self, rank: int) -> Shape:
        """The shard coordinate: equal for two ranks exactly when they hold the same array."""
        found = self._coordinates.get(rank)
        if found is None:
            whole = self.mesh.coordinate(rank)
            found = self._coordinates[rank] = tuple(map(whole.__getitem__, self.shard_dims))
        return found

    @remembered
    def _coordinates(self) -> dict[int, Shape]:
        return self.mesh.coordinates_on(self.shard_dims)

    def replicas(self, rank: int) -> tuple[int, ...]:
        return self.mesh.same_on(rank, self.shard_dims)

    def shard_degree(self) -> int:
        return math.prod(self.mesh.shape[d] for d in self.shard_dims)

    @remembered
    def _cuts(self) -> tuple[tuple[int, Placement], ...]:
        """Mesh dimensions that cut the tensor, and how, in the order in which they cut.

        The order is left to right. A strided dimension that means "the dimensions to my right cut
        first" (FSDP over TP) comes after those, as plain chunks. torch's own function takes it
        from left to right; for uneven sizes `fully_shard` does otherwise.
        """
        first: list[tuple[int, Placement]] = []
        last: list[tuple[int, Placement]] = []
        pairs = list(zip(self.placements, self.mesh.shape, strict=True))
        for index, (placement, _) in enumerate(pairs):
            right = math.prod(n for p, n in pairs[index + 1 :] if p.dim == placement.dim)
            if placement.kind == "strided" and placement.split == right:
                last.insert(0, (index, Placement("shard", placement.dim)))
            elif placement.kind != "replicate":
                first.append((index, placement))
        return (*first, *last)

    def intervals(self, rank: int) -> tuple[tuple[Interval, ...], ...]:
        """Per tensor dimension, the index ranges held, in the order of the local array."""
        return self._of(rank).intervals

    def local_shape(self, rank: int) -> Shape:
        return self._of(rank).shape

    def _of(self, rank: int) -> Holding:
        found = self._held.get(rank)
        if found is None:
            intervals = tuple(map(tuple, self._intervals(rank)))
            shape = tuple(sum(b - a for a, b in dim) for dim in intervals)
            found = self._held[rank] = Holding(intervals, shape)
        return found

    @remembered
    def _held(self) -> dict[int, Holding]:
        return self.mesh.holdings((self.shape, self.placements))

    def _intervals(self, rank: int) -> list[list[Interval]]:
        held: list[list[Interval]] = [[(0, n)] if n else [] for n in self.shape]
        where = self.mesh.coordinate(rank)
        for dim, placement in self._cuts:
            index, size = where[dim], self.mesh.shape[dim]
            if placement.kind == "shard":
                held[placement.dim] = _chunk(held[placement.dim], size, index)
            else:
                parts = (
                    _chunk(_chunk(held[placement.dim], placement.split, k), size, index)
                    for k in range(placement.split)
                )
                held[placement.dim] = _merge(itertools.chain.from_iterable(parts))
        return held

    def pieces(self, rank: int) -> list[Piece]:
        held = self.intervals(rank)
        strides = row_major_strides(self.local_shape(rank))
        placed = []  # per dimension: (global offset, size, local offset)
        for dim in held:
            at = itertools.accumulate((b - a for a, b in dim), initial=0)
            placed.append([(a, b - a, start) for (a, b), start in zip(dim, at, strict=False)])
        out = []
        for combo in itertools.product(*placed):
            box = Box(tuple(c[0] for c in combo), tuple(c[1] for c in combo))
            start = sum(c[2] * s for c, s in zip(combo, strides, strict=True))
            out.append(Piece(self.fqn, self.shape, box, start, strides))
        return out

    def cuts(self) -> tuple[tuple[Mesh, Shape], ...]:
        return ((self.mesh, self.shard_dims),)

    def named_coordinate(self, rank: int) -> tuple[tuple[str, int, int], ...]:
        return self.mesh.named_coordinate(rank)

    def over(self, mesh: Mesh) -> Geometry:
        return _over(self.fqn, self.shape, mesh, divided=bool(self.shard_dims))

    def sharding(self) -> Hashable:
        return id(self.mesh), self.shard_dims

    def rule(self) -> Hashable:
        return id(self.mesh), self.placements, self.shape

    def same_as(self, other: Geometry) -> bool:
        return isinstance(other, MeshGeometry) and (
            (self.fqn, self.shape, self.placements, self.mesh.shape)
            == (other.fqn, other.shape, other.placements, other.mesh.shape)
        )

    def record(self) -> dict[str, Any]:
        return {
            "mesh": self.mesh,
            "placements": [str(p) for p in self.placements],
            "fqn": self.fqn,
            "shape": list(self.shape),
        }

    def __str__(self) -> str:
        dims = zip(self.mesh.dim_names, self.mesh.shape, self.placements, strict=True)
        return " ".join(f"{name}={size}:{placement}" for name, size, placement in dims)


@dataclass(frozen=True)
class BoxGeometry(GeometryDefaults):
    """Explicit boxes of one tensor on each of `holders`, for a sharding that no rule describes.

    The boxes are in the local array one after the other, each in row-major order.
    """

    kind = "boxes"
    explicit = True

    fqn: str
    shape: Shape
    boxes: tuple[Box, ...]
    holders: tuple[int, ...]

    @property
    def fqns(self) -> tuple[str, ...]:
        return (self.fqn,)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.holders

    def coordinate(self, rank: int) -> Shape:
        return tuple(itertools.chain.from_iterable(b.offsets + b.sizes for b in self.boxes))

    def replicas(self, rank: int) -> tuple[int, ...]:
        return self.holders

    def shard_degree(self) -> int:
        return 0  # unknown to one rank

    def local_shape(self, rank: int) -> Shape:
        one = len(self.boxes) == 1
        return self.boxes[0].sizes if one else (sum(box.numel for box in self.boxes),)

    def pieces(self, rank: int) -> list[Piece]:
        out, at = [], 0
        for box in self.boxes:
            if box.numel:
                out.append(Piece(self.fqn, self.shape, box, at, row_major_strides(box.sizes)))
            at += box.numel
        return out

    def over(self, mesh: Mesh) -> Geometry:
        return _over(self.fqn, self.shape, mesh, divided=True)

    def record(self) -> dict[str, Any]:
        return {
            "boxes": [[list(b.offsets), list(b.sizes)] for b in self.boxes],
            "holders": self.holders,
            "fqn": self.fqn,
            "shape": list(self.shape),
        }

    def __str__(self) -> str:
        return "boxes"


@dataclass(frozen=True)
class PerRankGeometry(GeometryDefaults):
    """A tensor without sharding; each of `ranks` has its own: a buffer, RNG state, a scalar.

    Every rank writes its own. `fqns` are the logical names that the array stands for: a flat
    parameter's `step` is the step of each of its members.
    """

    kind = "per-rank tensor"
    per_rank = True

    fqns: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]

    def named(self, name: Callable[[str], str]) -> PerRankGeometry:
        return replace(self, fqns=tuple(map(name, self.fqns)))

    def coordinate(self, rank: int) -> Shape:
        return (rank,)

    def replicas(self, rank: int) -> tuple[int, ...]:
        return (rank,)

    def shard_degree(self) -> int:
        return 0

    def local_shape(self, rank: int) -> Shape:
        del rank
        return self.shape

    def pieces(self, rank: int) -> list[Piece]:
        del rank
        return [Piece.whole(fqn, self.shape) for fqn in self.fqns]

    def over(self, mesh: Mesh) -> Geometry:
        return PerRankGeometry(self.fqns, self.shape, mesh.ranks)

    def sharding(self) -> Hashable:
        return None

    def rule(self) -> Hashable:
        return self.kind, self.shape, len(self.fqns)

    def record(self) -> dict[str, Any]:
        return {"kept": list(self.fqns), "shape": list(self.shape)}

    def __str__(self) -> str:
        return "by its rank" if len(self.ranks) == 1 else f"by each of {len(self.ranks)} ranks"


def _over(fqn: str, shape: Shape, mesh: Mesh, *, divided: bool) -> MeshGeometry:
    cut = Placement("shard", 0) if divided and shape else Placement("replicate")
    return MeshGeometry(fqn, shape, mesh, (Placement("replicate"), cut))


def _chunk(held: list[Interval], count: int, index: int) -> list[Interval]:
    """Chunk `index` of `count` of the held indices, as `torch.chunk` cuts: ceil(n / count) each."""
    total = sum(b - a for a, b in held)
    size = -(-total // count)
    low, high = min(index * size, total), min((index + 1) * size, total)
    out, at = [], 0
    for a, b in held:
        start, stop = max(low - at, 0), min(high - at, b - a)
        if stop > start:
            out.append((a + start, a + stop))
        at += b - a
    return out


def _merge(intervals: Iterator[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for a, b in intervals:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out
