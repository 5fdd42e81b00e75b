"""The ranks that save together, found from the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smckpt.engine.replicas import ReplicationGroup, replicas_of
from smckpt.errors import UsageError
from smckpt.manager.state import models_in
from smckpt.meeting.group import get_global_ranks
from smckpt.meeting.round import Meeting

__all__ = ["agreed_group"]

log = logging.getLogger("smckpt")


def agreed_group(meeting: Meeting, point: str, state: Any, timeout: float) -> ReplicationGroup:
    """Agree on the ranks that save together with this one. All ranks call it.

    Raises:
        UsageError: the ranks' models are sharded differently.
    """

    def mine() -> list[Any]:
        return list(_replicas(models_in(state)))

    def agreed(brought: Callable[[], dict[int, list[Any]]]) -> None:
        groups = {(tuple(ranks), name) for ranks, name in brought().values()}
        covered = sorted(rank for ranks, _ in groups for rank in ranks)
        if covered != list(get_global_ranks()):
            raise UsageError(
                f"the ranks' models are sharded differently: {sorted(groups)[:4]}",
                remedy="give all ranks a state with the same model, sharded on one mesh",
            )

    meeting.round(point, mine, agreed, timeout=timeout)
    ranks, name = _replicas(models_in(state))
    group = dist.new_group(list(ranks), use_local_synchronization=True) if name else None
    return ReplicationGroup(group, ranks, name)


def _replicas(models: list[torch.nn.Module]) -> tuple[tuple[int, ...], str]:
    """The ranks that commit together, and their directory: those that hold the same shards. All
    ranks commit together where each holds its own shards, or where the models do not tell."""
    everyone = tuple(get_global_ranks()), ""
    if len(models) != 1:
        return everyone
    try:
        ranks, name = replicas_of(models[0])
    except UsageError as error:
        log.info("all ranks commit together: %s", error.message)
        return everyone
    return (ranks, name) if len(ranks) > 1 else everyone
