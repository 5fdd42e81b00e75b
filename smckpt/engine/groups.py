"""The groups that make a step together; and the replication group of this rank and its directory,
found from the model, or from the job's degrees.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smckpt.errors import UsageError
from smckpt.layout.entries import Entry
from smckpt.layout.mesh import Mesh
from smckpt.meeting.group import Group, get_global_ranks, group_at, group_of
from smckpt.storage.urls import file_url
from smckpt.topology import role_of

if TYPE_CHECKING:
    import torch

    from smckpt.checkpoint.commits.run_directory import Template
    from smckpt.meeting.round import Meeting
    from smckpt.topology import ParallelState


log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Partition:
    """The groups that make one step together. `mine` is the index of this rank's group."""

    groups: tuple[tuple[int, ...], ...]
    mine: int

    @property
    def alone(self) -> bool:
        return len(self.groups) == 1


def partition_of(group: Group, entries: Sequence[Entry], options: Any = None) -> Partition:
    """Find the groups that make a step, from what the options name, or from the geometry.

    Args:
        options: `SaveOptions` or `LoadOptions`; None names nothing.

    Raises:
        UsageError: the group is not among the given groups, or a rank is in two of them.
    """
    named = None if options is None else _named(options.groups, options.parallel_state)
    if named is not None:
        return _checked(group, named)
    if len(group.ranks) == group.world_size:
        return Partition((group.ranks,), 0)
    alone = Partition((group.ranks,), 0)
    cuts = cuts_of(entries)
    if not cuts:
        log.info(
            "nothing says which groups make a step, so process group %s saves a "
            "checkpoint by itself; pass options with parallel_state= or groups= if other ranks "
            "save the same step",
            group.ranks,
        )
        return alone
    cells = cells_of(cuts)
    covered = {rank for cell in cells for rank in cell}
    if group.ranks in cells:
        if len(covered) < group.world_size:
            log.warning(
                "the model's sharding covers only %d of %d ranks, so the step record covers only "
                "those; pass options with parallel_state= or groups= if other ranks save the step",
                len(covered),
                group.world_size,
            )
        return Partition(cells, cells.index(group.ranks))
    if all(set(cell) & set(group.ranks) for cell in cells):
        return alone  # every shard is in this group, so it is whole by itself
    log.warning(
        "process group %s is not among the groups of the model's sharding (%s …), so it "
        "saves a checkpoint by itself; pass options with groups= to commit the groups of a step "
        "together",
        group.ranks,
        cells[0],
    )
    return alone


def _named(groups: Any, parallel_state: Any) -> list[list[int]] | None:
    if groups is not None and parallel_state is not None:
        raise UsageError(
            "the options have both groups= and parallel_state=", remedy="give one of the two"
        )
    if groups is not None:
        return [sorted(int(r) for r in ranks) for ranks in groups]
    if parallel_state is not None:
        return [sorted(ranks) for ranks in parallel_state.ranker.get_rep_groups()]
    return None


def _checked(group: Group, named: list[list[int]]) -> Partition:
    flat = [rank for ranks in named for rank in ranks]
    if len(set(flat)) != len(flat):
        raise UsageError(f"a rank is in two of the groups {named}", remedy="make them disjoint")
    if len(group.ranks) == len(flat) and set(group.ranks) == set(flat):
        return Partition((group.ranks,), 0)  # one group that contains all of them
    ordered = tuple(sorted(tuple(ranks) for ranks in named))
    if group.ranks not in ordered:
        raise UsageError(
            f"the process group {group.ranks} is not among the groups {list(ordered)}",
            remedy="pass options with groups= or parallel_state= that contain this process group",
            rank=group.rank,
        )
    return Partition(ordered, ordered.index(group.ranks))


def cuts_of(entries: Sequence[Entry]) -> list[tuple[Mesh, tuple[int, ...]]]:
    """The meshes over which the entries are sharded, each with the dimensions that shard."""
    cuts: dict[int, tuple[Mesh, set[int]]] = {}
    for entry in entries:
        for mesh, dims in entry.geometry.cuts():
            cuts.setdefault(id(mesh), (mesh, set()))[1].update(dims)
    return [(mesh, tuple(sorted(dims))) for mesh, dims in cuts.values()]


def cells_of(cuts: Sequence[tuple[Mesh, tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Group the ranks that hold the same shards under every mesh; the groups are sorted."""
    ranks = sorted({rank for mesh, _ in cuts for rank in mesh.ranks})
    where: dict[tuple[Any, ...], list[int]] = {}
    for rank in ranks:
        signature = []
        for mesh, dims in cuts:
            coordinate = mesh.coordinate(rank) if rank in mesh else None
            signature.append(coordinate and tuple(coordinate[d] for d in dims))
        where.setdefault(tuple(signature), []).append(rank)
    return tuple(sorted(tuple(cell) for cell in where.values()))


def coordinator_of(group: Group, coordinator_rank: int | None) -> int:
    """The rank that publishes for the group; the lowest where the caller names none."""
    chosen = group.ranks[0] if coordinator_rank is None else coordinator_rank
    if chosen not in group.ranks:
        raise UsageError(
            f"coordinator_rank {chosen} is not a member of the process group {group.ranks}",
            remedy="pass the global rank of a member, such as min(get_global_ranks(group))",
            rank=group.rank,
        )
    return chosen


def other_than_lowest(group: Group, coordinator_rank: int | None) -> int | None:
    """The coordinator, if it is not the lowest rank. DCP always takes the lowest."""
    chosen = coordinator_of(group, coordinator_rank)
    return None if chosen == group.ranks[0] else chosen


@dataclass(frozen=True)
class ReplicationGroup:
    """The ranks that hold the same shards as this rank. They share the writing.

    Args:
        process_group: to pass to `async_save`, `load` and every other `process_group=` of smckpt.
            It names the ranks; torch's collectives cannot run over it. None: all ranks.
        ranks: global, ascending.
        name: distinguishes the groups of a step, such as "dp_shard0"; "" if there is only one
            group.
    """

    process_group: Group | None
    ranks: tuple[int, ...]
    name: str

    def directory(self, step: str | os.PathLike[str]) -> str:
        """The directory to which this group saves a step: below `step`, or `step` itself if there
        is only one group."""
        path = os.fspath(step)
        return file_url(path, self.name) if self.name else path


def replication_group(model: Any) -> ReplicationGroup:
    """Find the group of this rank from the model's sharding. No communication.

    Args:
        model: the model as it is trained: under FSDP1, FSDP2 with its device mesh, DDP, or plain.

    Raises:
        UsageError: the model's meshes do not cover all ranks of the job, as with pipeline stages.
    """
    ranks, at = replicas_of(model)
    return ReplicationGroup(group_at(ranks) if at else None, ranks, named(at))


def named(at: Sequence[tuple[str, int]]) -> str:
    """The usual name of a group, by the coordinates of its ranks: "dp_shard0_tp1"."""
    return "_".join(f"{dim}{index}" for dim, index in at)


def replicas_of(model: Any) -> tuple[tuple[int, ...], tuple[tuple[str, int], ...]]:
    """The ranks of that group, and their coordinate in each dimension that cuts the model. For a
    single group: all ranks and (). No communication.

    Raises:
        As `replication_group`.
    """
    import torch.distributed as dist

    from smckpt.state_dict.model_views import view_of
    from smckpt.state_dict.select import Selector

    world = tuple(get_global_ranks())
    if not (dist.is_available() and dist.is_initialized()):
        return world, ()
    rank = dist.get_rank()
    cuts = cuts_of(Selector(rank).select({"model": view_of(model).tensors("LOCAL")}).entries)
    if not cuts:
        return world, ()
    cells = cells_of(cuts)
    covered = {each for cell in cells for each in cell}
    if covered != set(world):
        raise UsageError(
            f"the model's sharding covers only {len(covered)} of {len(world)} ranks",
            remedy="make the groups with ranker.get_rep_groups() of a ParallelState that has all "
            "degrees of the job, and save with SaveOptions(parallel_state=)",
        )
    if len(cells) == 1:
        return world, ()
    (mine,) = (cell for cell in cells if rank in cell)
    at = [(mesh.dim_names[dim], mesh.coordinate(rank)[dim]) for mesh, dims in cuts for dim in dims]
    return mine, tuple(dict.fromkeys(at))


# -- the ranks that save together in a run of the manager's -------------------------------------


def agreed_group(
    meeting: Meeting,
    point: str,
    models: Callable[[], list[torch.nn.Module]],
    degrees: ParallelState | None,
    template: Template,
    timeout: float,
) -> ReplicationGroup:
    """Agree on the ranks that save together with this one. All ranks call it.

    Args:
        models: finds those of the state; what it raises, all ranks raise.
        degrees: those of the job; None: the models in the state tell.
        template: may name the groups' directories.

    Raises:
        UsageError: the ranks' models are sharded differently, or the degrees are of another job.
    """

    def mine() -> list[Any]:
        return list(_replicas(models(), degrees, template))

    def agreed(brought: Callable[[], dict[int, list[Any]]]) -> None:
        groups = {(tuple(ranks), name) for ranks, name in brought().values()}
        covered = sorted(rank for ranks, _ in groups for rank in ranks)
        if covered != list(get_global_ranks()):
            raise UsageError(
                f"the ranks' models are sharded differently: {sorted(groups)[:4]}",
                remedy="give all ranks a state with the same model, sharded on one mesh",
            )

    meeting.round(point, mine, agreed, timeout=timeout)
    ranks, name = _replicas(models(), degrees, template)
    return ReplicationGroup(group_at(ranks) if name else None, ranks, name)


def _replicas(
    models: list[torch.nn.Module], degrees: ParallelState | None, template: Template
) -> tuple[tuple[int, ...], str]:
    """The ranks that commit together, and their directory: those that hold the same shards. All
    ranks commit together where each holds its own shards and the template names no groups, or where
    the models do not tell."""
    everyone = tuple(get_global_ranks()), ""
    if degrees is not None:
        if degrees.world_size != len(everyone[0]):
            raise UsageError(
                f"parallel_state has {degrees.world_size} ranks, the job {len(everyone[0])}",
                remedy="pass the ParallelState of this job",
            )
        group = group_of(None)
        assert group is not None
        rank, ranker = group.rank, degrees.ranker
        sizes = {
            "pp": (degrees.pp_size, ranker.get_pp_rank),
            "tp": (degrees.tp_size, ranker.get_tp_rank),
            "ep": (degrees.ep_size, ranker.get_ep_rank),
            "shard": (degrees.fsdp_size, ranker.get_fsdp_rank),
        }
        ranks = tuple(ranker.get_rep_group(rank))
        at = tuple((role, index(rank)) for role, (size, index) in sizes.items() if size > 1)
    elif len(models) == 1:
        try:
            ranks, at = replicas_of(models[0])
        except UsageError as error:
            log.info("all ranks commit together: %s", error.message)
            return everyone
    else:
        return everyone
    if not at or (len(ranks) == 1 and not template.group):
        return everyone
    if not template.group:
        return ranks, named(at)
    roles = at if degrees is not None else [(role_of(dim) or dim, index) for dim, index in at]
    coordinates = {"fsdp" if role == "shard" else role: index for role, index in roles}
    return ranks, template.group_of(coordinates)
