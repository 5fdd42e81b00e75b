"""Who commits together, and which groups make a step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smckpt.errors import UsageError
from smckpt.layout.entries import Entry
from smckpt.layout.geometry import FlatGeometry, MeshGeometry
from smckpt.layout.mesh import Mesh

__all__ = ["Group", "Partition", "get_global_ranks", "group_of", "partition_of", "ranks_digest"]

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Group:
    """The ranks that commit together.

    ranks: global, ascending. rank: this one. store: the job's default c10d store, or None where no
    process group was made and this process is a world of its own.
    """

    ranks: tuple[int, ...]
    rank: int
    world_size: int
    store: Any = field(default=None, compare=False, repr=False)

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    def same_life(self, other: Group) -> bool:
        """Whether both stand in one life of the job's process group."""
        return self == other and self.store is other.store


@dataclass(frozen=True)
class Partition:
    """The groups that make one step together; `mine` is the index of this rank's."""

    groups: tuple[tuple[int, ...], ...]
    mine: int

    @property
    def alone(self) -> bool:
        return len(self.groups) == 1


def get_global_ranks(process_group: Any = None) -> list[int]:
    """The global ranks of a process group, ascending; of all processes for None."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    if process_group is None:
        return list(range(dist.get_world_size()))
    try:
        return sorted(dist.get_process_group_ranks(process_group))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{process_group!r} is no process group of this job",
            remedy="pass what dist.new_group or a DeviceMesh gave, not yet destroyed, or None",
        ) from error


def group_of(process_group: Any) -> Group | None:
    """The group, or None for a process that is no member of it."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Group((0,), 0, 1)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    rank = dist.get_rank()
    ranks = tuple(get_global_ranks(process_group))
    if rank not in ranks:
        return None
    return Group(ranks, rank, dist.get_world_size(), _default_store())


def _default_store() -> Any:
    from torch.distributed import distributed_c10d

    getter = getattr(distributed_c10d, "_get_default_store", None)
    if getter is None:
        import torch

        raise UsageError(
            f"torch {torch.__version__} has no distributed_c10d._get_default_store",
            remedy="use a torch between 2.11 and 2.13, or report this version",
        )
    return getter()


def ranks_digest(groups: Iterable[Sequence[int]]) -> str:
    """A name for a set of groups, the same wherever it is computed."""
    text = ";".join(",".join(map(str, ranks)) for ranks in groups)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def partition_of(
    group: Group,
    entries: Sequence[Entry],
    *,
    groups: Any = None,
    parallel_state: Any = None,
) -> Partition:
    """Which groups make a step: told by `groups`, by `parallel_state`, or by the geometry.

    Raises:
        UsageError: the group is none of those that were told, or a rank stands in two.
    """
    told = _told(groups, parallel_state)
    if told is not None:
        return _checked(group, told)
    if len(group.ranks) == group.world_size:
        return Partition((group.ranks,), 0)
    return _from_geometry(group, entries)


def _told(groups: Any, parallel_state: Any) -> list[list[int]] | None:
    if groups is not None and parallel_state is not None:
        raise UsageError(
            "both groups= and parallel_state= were given", remedy="give one of the two"
        )
    if groups is not None:
        return [sorted(int(r) for r in ranks) for ranks in groups]
    if parallel_state is not None:
        return [sorted(ranks) for ranks in parallel_state.ranker.get_rep_groups()]
    return None


def _checked(group: Group, told: list[list[int]]) -> Partition:
    flat = [rank for ranks in told for rank in ranks]
    if len(set(flat)) != len(flat):
        raise UsageError(f"a rank stands in two of the groups {told}", remedy="make them disjoint")
    if len(group.ranks) == len(flat) and set(group.ranks) == set(flat):
        return Partition((group.ranks,), 0)  # one group that holds them all
    ordered = tuple(sorted(tuple(ranks) for ranks in told))
    if group.ranks not in ordered:
        raise UsageError(
            f"the process group {group.ranks} is none of the groups {list(ordered)}",
            remedy="pass groups= (or a parallel_state=) that has this process group in it",
            rank=group.rank,
        )
    return Partition(ordered, ordered.index(group.ranks))


def _from_geometry(group: Group, entries: Sequence[Entry]) -> Partition:
    alone = Partition((group.ranks,), 0)
    cuts: dict[int, tuple[Mesh, set[int]]] = {}
    for entry in entries:
        geometry = entry.geometry
        if isinstance(geometry, MeshGeometry):
            cuts.setdefault(id(geometry.mesh), (geometry.mesh, set()))[1].update(
                geometry.shard_dims
            )
        elif isinstance(geometry, FlatGeometry) and geometry.mesh.shape[1] > 1:
            cuts.setdefault(id(geometry.mesh), (geometry.mesh, set()))[1].add(1)
    if not cuts:
        log.info(
            "nothing tells which groups make a step, so the checkpoint of process group %s stands "
            "alone; pass parallel_state= or groups= if other ranks save the same step",
            group.ranks,
        )
        return alone
    cells = _cells([(mesh, tuple(sorted(dims))) for mesh, dims in cuts.values()])
    covered = {rank for cell in cells for rank in cell}
    if group.ranks in cells:
        if len(covered) < group.world_size:
            log.warning(
                "the model's sharding speaks of %d of %d ranks, so the step record covers those "
                "only; pass parallel_state= or groups= if other ranks save the same step",
                len(covered),
                group.world_size,
            )
        return Partition(cells, cells.index(group.ranks))
    if all(set(cell) & set(group.ranks) for cell in cells):
        return alone  # every shard is in this group: it is whole by itself
    log.warning(
        "process group %s is none of the groups that the model's sharding makes (%s …): its "
        "checkpoint stands alone; pass groups= so that the groups of a step are committed together",
        group.ranks,
        cells[0],
    )
    return alone


def _cells(cuts: Sequence[tuple[Mesh, tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold the same shards under every mesh, as sorted groups."""
    ranks = sorted({rank for mesh, _ in cuts for rank in mesh.ranks})
    where: dict[tuple[Any, ...], list[int]] = {}
    for rank in ranks:
        signature = []
        for mesh, dims in cuts:
            coordinate = mesh.coordinate(rank) if rank in mesh else None
            signature.append(coordinate and tuple(coordinate[d] for d in dims))
        where.setdefault(tuple(signature), []).append(rank)
    return tuple(sorted(tuple(cell) for cell in where.values()))
