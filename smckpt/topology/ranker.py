"""The groups of a grid of ranks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from smckpt.errors import TopologyError

__all__ = ["DEFAULT_ORDER", "Ranker"]

DEFAULT_ORDER = ("tp", "cp", "ep", "fsdp", "rep", "pp")

# The dimensions in which a group of each kind extends; all others are fixed.
_SHARD = ("cp", "fsdp")
_DATA = ("ep", "fsdp", "rep")


class Ranker:
    """Computes the groups of each kind.

    Args:
        sizes: (name, size) of the grid's dimensions, innermost first; their product is the world.

    Every `get_…_groups` returns all groups of the world, each ascending, ordered by their lowest
    rank; together they hold every rank once. `get_…_rank(rank)` is a rank's index in its group.
    """

    def __init__(self, sizes: Sequence[tuple[str, int]]) -> None:
        self._sizes = dict(sizes)
        strides = itertools.accumulate([1, *self._sizes.values()], operator.mul)
        self._strides = dict(zip(self._sizes, strides, strict=False))
        self._world = math.prod(self._sizes.values())

    def get_rep_groups(self) -> list[list[int]]:
        """Replication groups: ranks that hold the same shard and commit a LOCAL checkpoint."""
        return self._groups("rep")

    def get_fsdp_groups(self) -> list[list[int]]:
        """Shard groups: ranks that share one copy of the (tp, ep, pp) part of the model."""
        return self._groups(*_SHARD)

    def get_tp_groups(self) -> list[list[int]]:
        return self._groups("tp")

    def get_cp_groups(self) -> list[list[int]]:
        return self._groups("cp")

    def get_ep_groups(self) -> list[list[int]]:
        return self._groups("ep")

    def get_pp_groups(self) -> list[list[int]]:
        return self._groups("pp")

    def get_dp_groups(self) -> list[list[int]]:
        """Data-parallel groups: ranks that read different samples."""
        return self._groups(*_DATA)

    def get_rep_rank(self, rank: int) -> int:
        """0 for the replica that SMP's scripts let save a SHARDED checkpoint."""
        return self._index(rank, "rep")

    def get_fsdp_rank(self, rank: int) -> int:
        return self._index(rank, *_SHARD)

    def get_tp_rank(self, rank: int) -> int:
        return self._index(rank, "tp")

    def get_cp_rank(self, rank: int) -> int:
        return self._index(rank, "cp")

    def get_ep_rank(self, rank: int) -> int:
        return self._index(rank, "ep")

    def get_pp_rank(self, rank: int) -> int:
        return self._index(rank, "pp")

    def get_dp_rank(self, rank: int) -> int:
        return self._index(rank, *_DATA)

    def get_rep_group(self, rank: int) -> list[int]:
        """The replication group that a rank is in."""
        return self._group(rank, "rep")

    def get_fsdp_group(self, rank: int) -> list[int]:
        return self._group(rank, *_SHARD)

    def get_tp_group(self, rank: int) -> list[int]:
        return self._group(rank, "tp")

    def get_cp_group(self, rank: int) -> list[int]:
        return self._group(rank, "cp")

    def get_ep_group(self, rank: int) -> list[int]:
        return self._group(rank, "ep")

    def get_pp_group(self, rank: int) -> list[int]:
        return self._group(rank, "pp")

    def get_dp_group(self, rank: int) -> list[int]:
        return self._group(rank, *_DATA)

    @property
    def dp_size(self) -> int:
        """The size of each data-parallel group."""
        return math.prod(self._sizes[dim] for dim in _DATA)

    def _offsets(self, dims: Sequence[str]) -> list[int]:
        """The offsets of a group's ranks from its lowest one, ascending."""
        steps = [range(0, self._sizes[d] * self._strides[d], self._strides[d]) for d in dims]
        return sorted(map(sum, itertools.product(*steps)))

    def _groups(self, *dims: str) -> list[list[int]]:
        offsets = self._offsets(dims)
        lowest = self._offsets([dim for dim in self._sizes if dim not in dims])
        return [[low + offset for offset in offsets] for low in lowest]

    def _group(self, rank: int, *dims: str) -> list[int]:
        low = self._checked(rank) - self._above_lowest(rank, dims)
        return [low + offset for offset in self._offsets(dims)]

    def _index(self, rank: int, *dims: str) -> int:
        return self._offsets(dims).index(self._above_lowest(self._checked(rank), dims))

    def _above_lowest(self, rank: int, dims: Sequence[str]) -> int:
        return sum(rank // self._strides[d] % self._sizes[d] * self._strides[d] for d in dims)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self._world:
            raise TopologyError(
                f"rank {rank} is not in a world of {self._world}",
                remedy=f"pass a global rank from 0 to {self._world - 1}",
            )
        return rank
