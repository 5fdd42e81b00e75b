"""Meshes of ranks, and placements of tensors on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

MOST_DIMS = 64  # of a tensor that is read, and of a mesh; torch has no more
Shape: TypeAlias = tuple[int, ...]
Interval: TypeAlias = tuple[int, int]  # [start, stop)


def memo() -> Any:
    """A field of a frozen dataclass for what it has computed; two that are equal may differ in
    it."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """How one mesh dimension treats a tensor: DTensor's vocabulary, without torch.

    kind: "replicate"; "shard" (along `dim`, in chunks of ceil(n / size)); or "strided", torch's
    `_StridedShard`: `dim` is cut in `split` chunks, and each chunk is sharded. Where `split` is the
    number of shards that the mesh dimensions to its right make, those dimensions cut first.
    """

    kind: str
    dim: int = -1
    split: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("replicate", "shard", "strided"):
            raise ValueError(f"unknown placement kind {self.kind!r}")
        if self.kind != "replicate" and self.dim < 0:
            raise ValueError(f"placement {self.kind} needs a dim >= 0, got {self.dim}")
        if self.split < 1:
            raise ValueError(f"split must be >= 1, got {self.split}")

    def __str__(self) -> str:
        if self.kind == "replicate":
            return "R"
        return f"S{self.dim}" if self.kind == "shard" else f"SS{self.dim}/{self.split}"

    @classmethod
    @functools.lru_cache(maxsize=256)
    def parse(cls, text: str) -> Placement:
        """The inverse of `str`: "R", "S0", "SS0/2"."""
        if text == "R":
            return cls("replicate")
        if text.startswith("SS"):
            dim, split = text[2:].split("/")
            return cls("strided", int(dim), int(split))
        if text.startswith("S"):
            return cls("shard", int(text[1:]))
        raise ValueError(f"not a placement: {text!r}")


class Holding(NamedTuple):
    """What one rank holds of a tensor: index ranges per dimension, and the local shape."""

    intervals: tuple[tuple[Interval, ...], ...]
    shape: Shape


@dataclass(frozen=True)
class Mesh:
    """A named grid of global ranks, row-major, like torch's `DeviceMesh`."""

    dim_names: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]
    # At 16,384 ranks one pass over the mesh takes 10 ms, and there are 1,000 tensors of few shapes.
    _groups: dict[Shape, dict[Shape, tuple[int, ...]]] = memo()
    _holdings: dict[object, dict[int, Holding]] = memo()
    _coordinates: dict[Shape, dict[int, Shape]] = memo()

    def __post_init__(self) -> None:
        if len(self.dim_names) != len(self.shape):
            raise ValueError(f"{len(self.dim_names)} names for {len(self.shape)} mesh dimensions")
        if math.prod(self.shape) != len(self.ranks):
            raise ValueError(f"mesh shape {self.shape} does not hold {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError("a rank is in the mesh twice")

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    def __contains__(self, rank: object) -> bool:
        return rank in self._position

    def coordinate(self, rank: int) -> Shape:
        index = self._position[rank]
        out = []
        for size in reversed(self.shape):
            out.append(index % size)
            index //= size
        return tuple(reversed(out))

    def named_coordinate(self, rank: int) -> tuple[tuple[str, int, int], ...]:
        """Name, size and the rank's index of each dimension."""
        return tuple(zip(self.dim_names, self.shape, self.coordinate(rank), strict=True))

    def holdings(self, alike: object) -> dict[int, Holding]:
        """A memo by rank, shared by all tensors that the mesh cuts in the same way."""
        return self._holdings.setdefault(alike, {})

    def coordinates_on(self, dims: Shape) -> dict[int, Shape]:
        """A memo by rank, shared by all tensors that the mesh dimensions `dims` cut."""
        return self._coordinates.setdefault(dims, {})

    def groups_on(self, dims: Sequence[int]) -> dict[Shape, tuple[int, ...]]:
        """Coordinate on the mesh dimensions `dims` → the ranks there, ascending."""
        key = tuple(dims)
        if key not in self._groups:
            found: dict[Shape, list[int]] = {}
            for rank in sorted(self.ranks):
                full = self.coordinate(rank)
                found.setdefault(tuple(full[d] for d in key), []).append(rank)
            self._groups[key] = {c: tuple(ranks) for c, ranks in found.items()}
        return self._groups[key]

    def same_on(self, rank: int, dims: Sequence[int]) -> tuple[int, ...]:
        """The ranks, ascending, that share `rank`'s coordinate on each mesh dimension in `dims`."""
        here = self.coordinate(rank)
        return self.groups_on(dims)[tuple(here[d] for d in dims)]


T = TypeVar("T")


class remembered(Generic[T]):
    """`functools.cached_property` without the lock that it has before Python 3.12: a load computes
    thousands of these. Two threads may compute one value twice, so use it only for values whose
    identity does not matter.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> remembered[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> remembered[T] | T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


def runs_of(ranks: Sequence[int]) -> list[list[int]]:
    """(0, 1, 2, 3, 8, 10, 12) → [[0, 4, 1], [8, 3, 2]]; order is kept."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == 1:
            runs[-1][1:] = [2, rank - runs[-1][0]]
        elif runs and rank == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1, 1])
    return runs
