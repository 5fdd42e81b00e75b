"""The ranks that keep copies for each other, and what they send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from smckpt.errors import UsageError
from smckpt.meeting.group import get_global_ranks

__all__ = [
    "ExchangePlan",
    "ExchangePlanEntry",
    "GroupWrapper",
    "ProcessGroupLike",
    "batched",
    "parse_group_sequence",
]


@dataclass(frozen=True)
class ExchangePlanEntry:
    """One state, from one rank to another, by their global numbers."""

    sender: int
    receiver: int
    id_: Any


@dataclass
class ExchangePlan:
    """What the ranks of a group send each other, in one order on all of them."""

    group: GroupWrapper
    _entries: list[ExchangePlanEntry] = field(default_factory=list)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._entries.append(ExchangePlanEntry(*args, **kwargs))

    @property
    def entries(self) -> tuple[ExchangePlanEntry, ...]:
        return tuple(self._entries)

    def required_ids(self, rank: int | None = None) -> set[Any]:
        """What a rank has to send, this one by default."""
        rank = dist.get_rank() if rank is None else rank
        return {entry.id_ for entry in self._entries if entry.sender == rank}


def batched(iterable: Iterable[Any], n: int) -> Iterator[tuple[Any, ...]]:
    """Tuples of `n` items; the last one may be shorter.

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError("n must be at least one")
    items = iter(iterable)
    while some := tuple(islice(items, n)):
        yield some


def parse_group_sequence(
    replication_jump: int, replication_factor: int, world_size: int
) -> list[tuple[int, ...]]:
    """Groups of `replication_factor` ranks that are `replication_jump` apart.

    Raises:
        UsageError: the ranks cannot be cut so.
    """
    if min(replication_jump, replication_factor) < 1 or world_size % (
        replication_jump * replication_factor
    ):
        raise UsageError(
            f"{world_size} ranks cannot be cut into groups of {replication_factor} that are "
            f"{replication_jump} apart",
            remedy="replication_jump times replication_factor divides the world size",
        )
    block = replication_jump * replication_factor
    return sorted(
        tuple(range(start + first, start + block, replication_jump))
        for start in range(0, world_size, block)
        for first in range(replication_jump)
    )


class GroupWrapper:
    """A process group; None is that of all ranks."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    @staticmethod
    def wrap(group: Any) -> GroupWrapper:
        """
        Raises:
            UsageError: it is no process group.
        """
        if isinstance(group, dist.ProcessGroup):
            return GroupWrapper(group)
        if not isinstance(group, GroupWrapper):
            raise UsageError(
                f"{group!r} is no process group", remedy="pass one, or GroupWrapper() for all ranks"
            )
        return group

    @staticmethod
    def from_list_of_groups(list_of_groups: Sequence[Any]) -> GroupWrapper:
        """The group that has this rank.

        Raises:
            UsageError: not exactly one has.
        """
        mine = [group for group in list_of_groups if dist.get_rank() in get_global_ranks(group)]
        if len(mine) != 1:
            raise UsageError(
                f"{len(mine)} groups have this rank", remedy="pass groups of which one has"
            )
        return GroupWrapper(mine[0])

    @property
    def ranks(self) -> list[int]:
        return get_global_ranks(self.group)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def my_global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def my_group_rank(self) -> int:
        return self.ranks.index(self.my_global_rank)

    def all_gather_object(self, my_obj: Any) -> list[Any]:
        everyone: list[Any] = [my_obj]
        if dist.is_initialized():
            everyone = [None] * self.world_size
            dist.all_gather_object(everyone, my_obj, group=self.group)
        return everyone

    def all_gather_batch(
        self, my_tensors: Sequence[torch.Tensor], target_device: Any = None
    ) -> list[list[torch.Tensor]]:
        """The tensors of each rank, on all ranks."""
        known = dist.Backend.backend_capability.get(dist.get_backend(self.group), [])
        device: Any = "cpu" if "cpu" in known else torch.accelerator.current_accelerator()
        shapes = self.all_gather_object([(t.shape, t.dtype) for t in my_tensors])
        everyone = []
        for rank, theirs in zip(self.ranks, shapes, strict=True):
            mine, got = rank == self.my_global_rank, []
            for index, (shape, dtype) in enumerate(theirs):
                if mine:
                    tensor = my_tensors[index].detach().to(device).contiguous()
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(tensor, rank, group=self.group)
                got.append(tensor if target_device is None else tensor.to(target_device))
            everyone.append(got)
        return everyone

    def execute_plan(
        self, exchange_plan: ExchangePlan, my_data: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        """Send and receive; what this rank got, by id.

        Raises:
            UsageError: something that this rank has to send is not in `my_data`.
        """
        if missing := exchange_plan.required_ids() - my_data.keys():
            raise UsageError(f"{missing} are not there to send", remedy="load them first")
        got, me = {}, self.my_global_rank
        for entry in exchange_plan.entries:
            if entry.sender == entry.receiver == me:
                got[entry.id_] = my_data[entry.id_]
            elif entry.sender == me:
                dist.send_object_list([my_data[entry.id_]], entry.receiver, group=self.group)
            elif entry.receiver == me:
                into: list[Any] = [None]
                dist.recv_object_list(into, entry.sender, group=self.group)
                got[entry.id_] = into[0]
        return got


ProcessGroupLike = GroupWrapper | dist.ProcessGroup
