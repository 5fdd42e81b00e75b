"""The replication group of this rank and its directory, found from the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smckpt.engine.groups import cells_of, cuts_of
from smckpt.errors import UsageError
from smckpt.meeting.group import Group, get_global_ranks, group_at
from smckpt.storage.urls import is_local

__all__ = ["ReplicationGroup", "named", "replicas_of", "replication_group"]


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
        if not self.name:
            return path
        whole = path.rstrip("/") if is_local(path) else path.removesuffix("/")
        return f"{whole}/{self.name}"


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
            "degrees of the job, and pass that as parallel_state= when you save",
        )
    if len(cells) == 1:
        return world, ()
    (mine,) = (cell for cell in cells if rank in cell)
    at = [(mesh.dim_names[dim], mesh.coordinate(rank)[dim]) for mesh, dims in cuts for dim in dims]
    return mine, tuple(dict.fromkeys(at))
