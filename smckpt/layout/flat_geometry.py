"""The geometry of FSDP1: several parameters in one flat parameter, cut in equal shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from smckpt.layout.geometry import GeometryDefaults
from smckpt.layout.mesh import Interval, Mesh, Shape, remembered
from smckpt.layout.strided import Piece, boxes_of_range, row_major_strides


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter inside a flat parameter, or padding when `fqn` is None. `numel` in elements."""

    fqn: str | None
    shape: Shape
    numel: int


@dataclass(frozen=True)
class FlatUnit:
    """One FSDP1 flat parameter: its segments in order, cut in shards of `shard_numel` elements.

    Shard i holds elements [i * shard_numel, (i + 1) * shard_numel) of the concatenated segments;
    elements beyond the last segment are padding.
    """

    segments: tuple[Segment, ...]
    shard_numel: int

    def __post_init__(self) -> None:
        for segment in self.segments:
            if segment.fqn is not None and math.prod(segment.shape) != segment.numel:
                raise ValueError(
                    f"{segment.fqn}: shape {segment.shape} does not hold {segment.numel} elements"
                )

    @remembered
    def starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((s.numel for s in self.segments), initial=0))[:-1]

    @remembered
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @remembered
    def shapes(self) -> dict[str | None, Shape]:
        return {segment.fqn: segment.shape for segment in reversed(self.segments)}


@dataclass(frozen=True)
class FlatGeometry(GeometryDefaults):
    """A shard of an FSDP1 flat parameter (`member` None), or the part of it that belongs to
    segment number `member` (`use_orig_params=True`), or a state tensor of the same extent.

    mesh has the shape (replicate, shard).
    """

    kind = "flat parameter"
    flat = True

    unit: FlatUnit
    mesh: Mesh
    member: int | None = None

    def __post_init__(self) -> None:
        if len(self.mesh.shape) != 2:
            raise ValueError("a flat shard's mesh has the two dimensions (replicate, shard)")

    @remembered
    def fqns(self) -> tuple[str, ...]:
        chosen = self.unit.segments if self.member is None else (self.unit.segments[self.member],)
        return tuple(s.fqn for s in chosen if s.fqn is not None)

    def named(self, name: Callable[[str], str]) -> FlatGeometry:
        segments = tuple(
            s if s.fqn is None else replace(s, fqn=name(s.fqn)) for s in self.unit.segments
        )
        return replace(self, unit=replace(self.unit, segments=segments))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    @property
    def whole_shape(self) -> Shape:
        return (self.unit.numel,)

    def shape_of(self, fqn: str) -> Shape:
        return self.unit.shapes[fqn]

    def over(self, mesh: Mesh) -> FlatGeometry:
        unit = FlatUnit(self.unit.segments, max(1, -(-self.unit.numel // mesh.shape[1])))
        return FlatGeometry(unit, mesh, self.member)

    def coordinate(self, rank: int) -> Shape:
        return (self.mesh.coordinate(rank)[1],)

    def replicas(self, rank: int) -> tuple[int, ...]:
        return self.mesh.same_on(rank, (1,))

    def shard_degree(self) -> int:
        return self.mesh.shape[1]

    def _extent(self, rank: int) -> Interval:
        low = self.coordinate(rank)[0] * self.unit.shard_numel
        high = low + self.unit.shard_numel
        if self.member is None:
            return low, high
        start = self.unit.starts[self.member]
        stop = start + self.unit.segments[self.member].numel
        return max(low, start), max(min(high, stop), max(low, start))

    def local_shape(self, rank: int) -> Shape:
        low, high = self._extent(rank)
        return (high - low,)

    def pieces(self, rank: int) -> list[Piece]:
        low, high = self._extent(rank)
        out = []
        chosen = range(len(self.unit.segments)) if self.member is None else (self.member,)
        for number in chosen:
            begin, segment = self.unit.starts[number], self.unit.segments[number]
            if segment.fqn is None:
                continue
            a, b = max(low, begin), min(high, begin + segment.numel)
            if b <= a:
                continue
            at = a - low
            for box in boxes_of_range(segment.shape, a - begin, b - begin):
                strides = row_major_strides(box.sizes)
                out.append(Piece(segment.fqn, segment.shape, box, at, strides))
                at += box.numel
        return out

    def cuts(self) -> tuple[tuple[Mesh, Shape], ...]:
        return ((self.mesh, (1,)),) if self.shard_degree() > 1 else ()

    def named_coordinate(self, rank: int) -> tuple[tuple[str, int, int], ...]:
        return self.mesh.named_coordinate(rank)

    def sharding(self) -> Hashable:
        return id(self.mesh), "flat"

    def rule(self) -> Hashable:
        return id(self.mesh), id(self.unit), self.member

    def record(self) -> dict[str, Any]:
        return {"unit": self.unit, "mesh": self.mesh, "member": self.member}

    def __str__(self) -> str:
        return f"flat 1/{self.shard_degree()}"
