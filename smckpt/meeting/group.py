"""The ranks that meet: those of a torch process group, by their global numbers."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smckpt.errors import UsageError

__all__ = ["Group", "get_global_ranks", "group_of", "inherited_store", "ranks_digest"]


@dataclass(frozen=True)
class Group:
    """The ranks that commit together.

    ranks: global, ascending. rank: this one. store: the job's default c10d store, or None without a
    process group, where this process is the whole job.
    """

    ranks: tuple[int, ...]
    rank: int
    world_size: int
    store: Any = field(default=None, compare=False, repr=False)

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    def same_life(self, other: Group) -> bool:
        """Whether both groups come from one initialisation of the job's process group."""
        return self == other and self.store is other.store


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
            f"{process_group!r} is not a process group of this job",
            remedy="pass a group from dist.new_group or a DeviceMesh, not yet destroyed, or None",
        ) from error


def group_of(process_group: Any, no_dist: bool = False) -> Group | None:
    """The group, or None for a process outside it. no_dist: this process is a group by itself.

    Raises:
        UsageError: both are given.
    """
    import torch.distributed as dist

    if no_dist and process_group is not None:
        raise UsageError(
            "process_group= and no_dist=True contradict each other",
            remedy="leave one out: no_dist=True means this process alone",
        )
    if not (dist.is_available() and dist.is_initialized()):
        return Group((0,), 0, 1)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    rank = dist.get_rank()
    ranks = (rank,) if no_dist else tuple(get_global_ranks(process_group))
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


def inherited_store() -> Any:
    """The job's store that this process had before it was forked; None without one. Call it in the
    child, at once."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _default_store()


def ranks_digest(groups: Iterable[Sequence[int]]) -> str:
    """A name for a set of groups, the same on all ranks."""
    text = ";".join(",".join(map(str, ranks)) for ranks in groups)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
