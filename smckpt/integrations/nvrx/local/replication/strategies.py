"""Which ranks keep copies of which states, what they send each other, and how a lost one comes
back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.integrations.nvrx.local.basic_state_dict import TensorAwareStateDict
from smckpt.meeting.group import get_global_ranks

__all__ = [
    "CliqueReplicationStrategy",
    "ExchangePlan",
    "ExchangePlanEntry",
    "GroupWrapper",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "NoReplicasAvailableError",
    "ProcessGroupLike",
    "ReplicationStrategy",
    "batched",
    "parse_group_sequence",
    "zip_strict",
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


class NoReplicasAvailableError(CheckpointNotFoundError):
    """No rank of the group has the state."""


class ReplicationStrategy(ABC):
    @abstractmethod
    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Any
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """The states that this rank keeps, and their ids."""

    @abstractmethod
    def retrieve_plan(
        self, globally_available_ids: Sequence[Any] | Mapping[int, Any], wanted: Sequence[Any]
    ) -> ExchangePlan:
        """Who sends what to whom.

        Raises:
            NoReplicasAvailableError: nobody has it.
        """

    @abstractmethod
    def retrieve_execute(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Do it; what this rank got, by id."""


class CliqueReplicationStrategy(ReplicationStrategy):
    """Every rank of a group keeps the states of all.

    Args:
        local_group: a process group of this rank.
        target_device: of the copies.
    """

    def __init__(self, local_group: Any, target_device: Any = "cpu") -> None:
        self.local_group = GroupWrapper.wrap(local_group)
        self.target_device = target_device

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> CliqueReplicationStrategy:
        """Make the groups; all ranks of the job call this.

        Args:
            replication_jump: how far the ranks of a group are apart: as many as fail together. None
                takes the number of devices of a host, or 1.
            replication_factor: ranks in a group.
        """
        jump = replication_jump
        if jump is None:
            jump = max(torch.accelerator.device_count(), 1)
        cut = parse_group_sequence(jump, replication_factor, dist.get_world_size())
        return cls(GroupWrapper.from_list_of_groups([dist.new_group(list(g)) for g in cut]))

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: Any
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        tensors = local_ckpt.pop_tensors()
        try:
            hollow = self.local_group.all_gather_object((local_ckpt, id_))
            everyone = self.local_group.all_gather_batch(tensors, self.target_device)
        finally:
            local_ckpt.insert_tensors(tensors)
        for (state, _), received in zip(hollow, everyone, strict=True):
            state.insert_tensors(received)
        return [state for state, _ in hollow], [state_id for _, state_id in hollow]

    def retrieve_plan(
        self, globally_available_ids: Sequence[Any] | Mapping[int, Any], wanted: Sequence[Any]
    ) -> ExchangePlan:
        plan, ranks = ExchangePlan(self.local_group), self.local_group.ranks
        everyone = self.local_group.all_gather_object(list(wanted))
        turn = 0
        for receiver, ids in zip(ranks, everyone, strict=True):
            for id_ in ids:
                having = [rank for rank in ranks if id_ in globally_available_ids[rank]]
                if not having:
                    raise NoReplicasAvailableError(
                        f"no rank of {ranks} has {id_}", remedy="resume from a global checkpoint"
                    )
                sender = receiver if receiver in having else having[turn % len(having)]
                turn += sender != receiver  # the work is shared
                plan.plan(sender, receiver, id_)
        return plan

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return self.local_group.execute_plan(*args, **kwargs)


EagerT = TypeVar("EagerT", bound=ReplicationStrategy)


class LazyReplicationStrategyBuilder(ReplicationStrategy, Generic[EagerT]):
    """Makes its strategy, and so the process groups, when it is first used."""

    def __init__(self) -> None:
        self._made: EagerT | None = None

    @abstractmethod
    def _eager_build(self) -> EagerT:
        """Make the strategy."""

    @property
    def replication_strategy(self) -> EagerT:
        if self._made is None:
            self._made = self._eager_build()
        return self._made

    def replicate(self, local_ckpt: TensorAwareStateDict, id_: Any) -> Any:
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(self, globally_available_ids: Any, wanted: Sequence[Any]) -> ExchangePlan:
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return self.replication_strategy.retrieve_execute(*args, **kwargs)


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
    """`CliqueReplicationStrategy.from_replication_params`, on first use."""

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        super().__init__()
        self.replication_jump, self.replication_factor = replication_jump, replication_factor

    def _eager_build(self) -> CliqueReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(
            self.replication_jump, self.replication_factor
        )


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """`zip` of iterables of one length.

    Raises:
        AssertionError: their lengths differ, as in NVRx; at once, with the lengths.
    """
    lists = [list(each) for each in args]
    lengths = [len(each) for each in lists]
    if len(set(lengths)) > 1:
        raise AssertionError(f"the iterables have the lengths {lengths}")
    return zip(*lists, strict=True)
