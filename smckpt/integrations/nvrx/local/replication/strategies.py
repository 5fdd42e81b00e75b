"""Which ranks keep copies of which states, and how a lost one comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from smckpt.errors import CheckpointNotFoundError
from smckpt.integrations.nvrx.local.base_state_dict import TensorAwareStateDict
from smckpt.integrations.nvrx.local.replication.group_utils import (
    ExchangePlan,
    GroupWrapper,
    parse_group_sequence,
)

__all__ = [
    "CliqueReplicationStrategy",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
]


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
