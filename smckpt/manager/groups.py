"""The ranks that save together, found from the model or from the job's degrees."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from smckpt.checkpoint.commits.run_directory import Template
from smckpt.engine.groups import ReplicationGroup, named, replicas_of
from smckpt.errors import UsageError
from smckpt.manager.state import models_in
from smckpt.meeting.group import get_global_ranks, group_at, group_of
from smckpt.meeting.round import Meeting
from smckpt.topology import ParallelState, role_of

__all__ = ["agreed_group"]

log = logging.getLogger("smckpt")


def agreed_group(
    meeting: Meeting,
    point: str,
    state: Any,
    degrees: ParallelState | None,
    template: Template,
    timeout: float,
) -> ReplicationGroup:
    """Agree on the ranks that save together with this one. All ranks call it.

    Args:
        degrees: those of the job; None: the models in the state tell.
        template: may name the groups' directories.

    Raises:
        UsageError: the ranks' models are sharded differently, or the degrees are of another job.
    """

    def mine() -> list[Any]:
        return list(_replicas(models_in(state), degrees, template))

    def agreed(brought: Callable[[], dict[int, list[Any]]]) -> None:
        groups = {(tuple(ranks), name) for ranks, name in brought().values()}
        covered = sorted(rank for ranks, _ in groups for rank in ranks)
        if covered != list(get_global_ranks()):
            raise UsageError(
                f"the ranks' models are sharded differently: {sorted(groups)[:4]}",
                remedy="give all ranks a state with the same model, sharded on one mesh",
            )

    meeting.round(point, mine, agreed, timeout=timeout)
    ranks, name = _replicas(models_in(state), degrees, template)
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
