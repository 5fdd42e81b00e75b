"""The ranks that save together, found from the model or from the job's degrees."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smckpt.engine.replicas import ReplicationGroup, replicas_of
from smckpt.errors import UsageError
from smckpt.manager.state import models_in
from smckpt.meeting.group import get_global_ranks, group_of
from smckpt.meeting.round import Meeting
from smckpt.topology import ParallelState

__all__ = ["agreed_group"]

log = logging.getLogger("smckpt")


def agreed_group(
    meeting: Meeting, point: str, state: Any, degrees: ParallelState | None, timeout: float
) -> ReplicationGroup:
    """Agree on the ranks that save together with this one. All ranks call it.

    Args:
        degrees: those of the job; None: the models in the state tell.

    Raises:
        UsageError: the ranks' models are sharded differently, or the degrees are of another job.
    """

    def mine() -> list[Any]:
        return list(_replicas(models_in(state), degrees))

    def agreed(brought: Callable[[], dict[int, list[Any]]]) -> None:
        groups = {(tuple(ranks), name) for ranks, name in brought().values()}
        covered = sorted(rank for ranks, _ in groups for rank in ranks)
        if covered != list(get_global_ranks()):
            raise UsageError(
                f"the ranks' models are sharded differently: {sorted(groups)[:4]}",
                remedy="give all ranks a state with the same model, sharded on one mesh",
            )

    meeting.round(point, mine, agreed, timeout=timeout)
    ranks, name = _replicas(models_in(state), degrees)
    group = dist.new_group(list(ranks), use_local_synchronization=True) if name else None
    return ReplicationGroup(group, ranks, name)


def _replicas(
    models: list[torch.nn.Module], degrees: ParallelState | None
) -> tuple[tuple[int, ...], str]:
    """The ranks that commit together, and their directory: those that hold the same shards. All
    ranks commit together where each holds its own shards, or where the models do not tell."""
    everyone = tuple(get_global_ranks()), ""
    if degrees is not None:
        if degrees.world_size != len(everyone[0]):
            raise UsageError(
                f"parallel_state has {degrees.world_size} ranks, the job {len(everyone[0])}",
                remedy="pass the ParallelState of this job",
            )
        return _coordinates(degrees) if degrees.rep_size > 1 else everyone
    if len(models) != 1:
        return everyone
    try:
        ranks, name = replicas_of(models[0])
    except UsageError as error:
        log.info("all ranks commit together: %s", error.message)
        return everyone
    return (ranks, name) if len(ranks) > 1 else everyone


def _coordinates(degrees: ParallelState) -> tuple[tuple[int, ...], str]:
    """The replication group of this rank, named by its coordinates: "pp1_tp0_shard3"."""
    group = group_of(None)
    assert group is not None
    rank, ranker = group.rank, degrees.ranker
    at = {
        "pp": (degrees.pp_size, ranker.get_pp_rank),
        "tp": (degrees.tp_size, ranker.get_tp_rank),
        "ep": (degrees.ep_size, ranker.get_ep_rank),
        "shard": (degrees.fsdp_size, ranker.get_fsdp_rank),
    }
    name = "_".join(f"{role}{index(rank)}" for role, (size, index) in at.items() if size > 1)
    return tuple(ranker.get_rep_group(rank)), name
