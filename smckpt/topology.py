"""Parallel degrees, the order of ranks, and the groups that follow from them.

The world is a grid of six dimensions. Innermost first, by default:

    tp    tensor parallel: the parts of one layer
    cp    context parallel: the parts of one sequence
    ep    expert parallel: the experts of one layer
    fsdp  the rest of the FSDP shard group, which is made of cp × fsdp ranks
    rep   hybrid sharding's replicas
    pp    pipeline stages

so that `world = pp × rep × shard_degree × ep × tp`, with `shard_degree = fsdp × cp`.

The meanings are those of SMP v2. `hybrid_shard_degree`: "SMP v2 core feature configuration
parameters" in the SageMaker developer guide (distributed-model-parallel-v2-reference). Expert
parallelism is a dimension beside the shard group, and context parallelism one inside it: SMP's
published scripts name one sharded checkpoint `tp{tp_rank}_ep{ep_rank}` per FSDP process group, so
ep_rank is the same in all of it, and AWS's training adapter for NeMo (its function
`validate_distributed_degrees`) demands that shard × tp × ep divide the world and that cp is at most
the shard degree. Combinations that SMP itself cannot run (ep with tp, any pp) work here too.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from smckpt.errors import TopologyError, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "DEFAULT_ORDER",
    "ParallelState",
    "Ranker",
    "order_of",
    "rank_in_job",
    "role_of",
    "roles_of",
]

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


# The fields of a topology, and those whose product must divide the world.
_FACTORS = (
    "tensor_parallel_degree",
    "expert_parallel_degree",
    "pipeline_parallel_degree",
    "hybrid_shard_degree",
)
_DEGREES = ("world_size", *_FACTORS[:2], "context_parallel_degree", *_FACTORS[2:])


@dataclass(frozen=True)
class ParallelState:
    """The parallel degrees of a job and the groups that follow from them.

    Args:
        world_size: number of ranks.
        tensor_parallel_degree: ranks that share each layer.
        expert_parallel_degree: ranks that share the experts; a dimension beside the shard group.
        context_parallel_degree: ranks that share a sequence; divides the shard degree, because
            they are ranks of one shard group.
        pipeline_parallel_degree: stages.
        hybrid_shard_degree: 0: shard over all ranks that the other degrees leave, as native
            FSDP's FULL_SHARD does. 1: no sharding. 2 or more: shard over that many ranks and
            replicate over the rest; pass it for a native HYBRID_SHARD.
        rank: this process's global rank; by default torchrun's RANK, where its WORLD_SIZE is
            `world_size`. Only the properties that end in `_rank` need one.
        order: the grid's dimensions, innermost (neighbouring ranks) first.

    Raises:
        UsageError: a degree is not a whole number in its range, or the order is no permutation.
        TopologyError: the degrees do not fit the world; the arithmetic is in the message.
    """

    world_size: int
    _: KW_ONLY
    tensor_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    context_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    hybrid_shard_degree: int = 0
    rank: int | None = None
    order: tuple[str, ...] = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for name in _DEGREES:
            least = 0 if name == "hybrid_shard_degree" else 1
            object.__setattr__(self, name, _count(name, getattr(self, name), least))
        names = self.order if isinstance(self.order, (list, tuple)) else ()
        if sorted(map(repr, names)) != sorted(map(repr, DEFAULT_ORDER)):
            raise UsageError(
                f"order is {self.order!r}",
                remedy=f"pass a permutation of {DEFAULT_ORDER}, innermost dimension first",
            )
        object.__setattr__(self, "order", tuple(self.order))
        factors = [(name, getattr(self, name)) for name in _FACTORS]
        # 0 means all remaining ranks, so it is not part of the product
        shown = [(name, value) for name, value in factors if value > 1] or factors[:1]
        product = math.prod(value for _, value in shown)
        if self.world_size % product:
            text = " × ".join(f"{name} {value}" for name, value in shown)
            text += f" = {product}" if len(shown) > 1 else ""
            raise TopologyError(
                f"{text} does not divide world_size {self.world_size}",
                remedy="choose degrees whose product divides the number of ranks",
            )
        if self.shard_degree % self.context_parallel_degree:
            raise TopologyError(
                f"context_parallel_degree {self.context_parallel_degree} does not divide the shard "
                f"degree {self.shard_degree} (world {self.world_size} = pp "
                f"{self.pipeline_parallel_degree} × replicas {self.replication_degree} × shard "
                f"{self.shard_degree} × ep {self.expert_parallel_degree} × tp "
                f"{self.tensor_parallel_degree})",
                remedy="context-parallel ranks are ranks of one shard group: raise "
                "hybrid_shard_degree to a multiple of the context degree, or pass 0",
            )
        rank = self.rank
        if rank is None and self.world_size == 1:
            rank = 0
        elif rank is None and os.environ.get("WORLD_SIZE") == str(self.world_size):
            rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
        if rank is not None:
            rank = _count("rank", rank, 0)
            if rank >= self.world_size:
                raise TopologyError(
                    f"rank {rank} is not in a world of {self.world_size}",
                    remedy="pass the world size of the whole job",
                )
        object.__setattr__(self, "rank", rank)

    @property
    def shard_degree(self) -> int:
        """Ranks that share one copy of the parameters: hybrid_shard_degree with 0 resolved."""
        if self.hybrid_shard_degree:
            return self.hybrid_shard_degree
        return self.world_size // (
            self.tensor_parallel_degree
            * self.expert_parallel_degree
            * self.pipeline_parallel_degree
        )

    @property
    def replication_degree(self) -> int:
        """Copies of each shard: the size of a replication group."""
        return self.world_size // (
            self.shard_degree
            * self.tensor_parallel_degree
            * self.expert_parallel_degree
            * self.pipeline_parallel_degree
        )

    @cached_property
    def ranker(self) -> Ranker:
        """The groups of this world."""
        sizes = {
            "tp": self.tensor_parallel_degree,
            "cp": self.context_parallel_degree,
            "ep": self.expert_parallel_degree,
            "fsdp": self.shard_degree // self.context_parallel_degree,
            "rep": self.replication_degree,
            "pp": self.pipeline_parallel_degree,
        }
        return Ranker([(dim, sizes[dim]) for dim in self.order])

    @property
    def tp_size(self) -> int:
        return self.tensor_parallel_degree

    @property
    def cp_size(self) -> int:
        return self.context_parallel_degree

    @property
    def ep_size(self) -> int:
        return self.expert_parallel_degree

    @property
    def pp_size(self) -> int:
        return self.pipeline_parallel_degree

    @property
    def fsdp_size(self) -> int:
        return self.shard_degree

    @property
    def rep_size(self) -> int:
        return self.replication_degree

    @property
    def dp_size(self) -> int:
        """Ranks that read different samples: world / (tp × cp × pp)."""
        return self.ranker.dp_size

    @property
    def tp_rank(self) -> int:
        return self.ranker.get_tp_rank(self._own_rank())

    @property
    def cp_rank(self) -> int:
        return self.ranker.get_cp_rank(self._own_rank())

    @property
    def ep_rank(self) -> int:
        return self.ranker.get_ep_rank(self._own_rank())

    @property
    def pp_rank(self) -> int:
        return self.ranker.get_pp_rank(self._own_rank())

    @property
    def fsdp_rank(self) -> int:
        return self.ranker.get_fsdp_rank(self._own_rank())

    @property
    def rep_rank(self) -> int:
        return self.ranker.get_rep_rank(self._own_rank())

    @property
    def dp_rank(self) -> int:
        return self.ranker.get_dp_rank(self._own_rank())

    def _own_rank(self) -> int:
        if self.rank is None:
            raise UsageError(
                "this ParallelState was made without a rank",
                remedy="pass rank=, or start under torchrun with the same world size",
            )
        return self.rank

    def to_json(self) -> dict[str, Any]:
        """The record for a manifest, the same on every rank."""
        return {
            **{name: getattr(self, name) for name in _DEGREES},
            "shard_degree": self.shard_degree,
            "replication_degree": self.replication_degree,
            "order": list(self.order),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, rank: int | None = None) -> ParallelState:
        """The inverse of `to_json`, for `rank`. Absent fields have their defaults."""
        degrees = {name: data[name] for name in _DEGREES if name in data}
        return cls(order=tuple(data.get("order", DEFAULT_ORDER)), rank=rank, **degrees)

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, names: Mapping[str, str] | None = None
    ) -> ParallelState:
        """The state that a mesh over the whole world describes.

        Args:
            mesh: with named dimensions, over ranks 0 to n - 1 in any regular order.
            names: role ("tp", "cp", "ep", "fsdp", "rep", "pp") → name of its mesh dimension. Other
                dimensions are found by their usual names ("dp_shard", "dp_replicate", …). The
                "fsdp" and "cp" dimensions together form the shard group.

        Raises:
            UsageError: a dimension of the mesh has no role, or a role no dimension.
            TopologyError: the mesh leaves ranks out or numbers them irregularly.
        """
        dims = roles_of(tuple(mesh.mesh_dim_names or ()), names or {})
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        own_rank = rank_in_job(len(ranks))
        shape = tuple(int(size) for size in mesh.mesh.shape)
        sizes = dict(zip(dims, shape, strict=True))
        return cls(
            len(ranks),
            tensor_parallel_degree=sizes.get("tp", 1),
            expert_parallel_degree=sizes.get("ep", 1),
            context_parallel_degree=sizes.get("cp", 1),
            pipeline_parallel_degree=sizes.get("pp", 1),
            hybrid_shard_degree=sizes.get("fsdp", 1) * sizes.get("cp", 1),
            order=order_of(dims, shape, ranks),
            rank=own_rank,
        )


def _count(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UsageError(
            f"{name} is {value!r}", remedy=f"pass a whole number that is at least {least}"
        )
    return number


# The names of mesh dimensions in the examples of torch, torchtitan and transformers.
_USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "fsdp": ("fsdp", "dp_shard", "shard", "dp"),
    "rep": ("rep", "dp_replicate", "replicate", "ddp"),
    "pp": ("pp",),
}


def rank_in_job(mesh_size: int) -> int | None:
    """This process's rank, after a check that the mesh spans its job."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_world_size() != mesh_size:
        raise TopologyError(
            f"the mesh has {mesh_size} of the job's {dist.get_world_size()} ranks",
            remedy="pass the mesh over all ranks from which the others were cut",
        )
    return dist.get_rank()


def roles_of(dim_names: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    """The role of each mesh dimension."""
    for role, dim in names.items():
        if role not in DEFAULT_ORDER:
            raise UsageError(f"names has no role {role!r}", remedy=f"roles are {DEFAULT_ORDER}")
        if dim not in dim_names:
            raise UsageError(
                f"names gives {role} to mesh dimension {dim!r}",
                remedy=f"the mesh has {dim_names}: name one of them",
            )
    given = {dim: role for role, dim in names.items()}
    for dim in dim_names:
        if dim not in given and role_of(dim) is None:
            raise UsageError(
                f"mesh dimension {dim!r} of {dim_names} has no known role",
                remedy=f"pass names={{role: {dim!r}}} with a role out of {DEFAULT_ORDER}",
            )
    roles = tuple(given.get(dim) or str(role_of(dim)) for dim in dim_names)
    if not roles or len(set(roles)) < len(roles):
        raise UsageError(
            f"mesh dimensions {dim_names} play the roles {roles}",
            remedy="give the mesh named dimensions, one for each role; pass names= to tell them",
        )
    return roles


def role_of(dim: str) -> str | None:
    """The role of a mesh dimension with a usual name."""
    return next((role for role, usual in _USUAL_NAMES.items() if dim in usual), None)


def order_of(dims: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> tuple[str, ...]:
    """The rank order of a mesh: the dimension along which ranks step by 1 is innermost."""
    steps: dict[str, int] = {}
    below = 1  # ranks between two neighbours along the dimension, in the flattened mesh
    for dim, size in reversed(list(zip(dims, shape, strict=True))):
        steps[dim] = ranks[below] - ranks[0] if size > 1 else 0
        below *= size
    # dimensions of size 1 have no step: they keep their place in the default order
    large = sorted((dim for dim in dims if steps[dim]), key=lambda dim: steps[dim])
    positions = iter(large)
    order = tuple(next(positions) if dim in large else dim for dim in DEFAULT_ORDER)
    # the flattened, row-major ranks that the mesh would have if this order numbered them
    sizes = dict(zip(dims, shape, strict=True))
    counts = itertools.accumulate([1, *(sizes.get(dim, 1) for dim in order)], operator.mul)
    strides = dict(zip(order, counts, strict=False))
    spans = (range(0, sizes[dim] * strides[dim], strides[dim]) for dim in dims)
    if list(ranks) != [*map(sum, itertools.product(*spans))]:
        raise TopologyError(
            f"the mesh {sizes} numbers its ranks {list(ranks)}",
            remedy="pass a mesh over all ranks of the job, numbered by some nesting of its "
            "dimensions",
        )
    return order
