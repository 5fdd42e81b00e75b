"""Saves and loads of each rank's own state; the newest that all ranks can have counts."""

from __future__ import annotations

import copy
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from smckpt.errors import CheckpointError
from smckpt.integrations.nvrx.async_ckpt.core import AsyncRequest
from smckpt.integrations.nvrx.local.base_state_dict import TensorAwareStateDict
from smckpt.integrations.nvrx.local.replication.group_utils import GroupWrapper
from smckpt.integrations.nvrx.local.replication.strategies import ReplicationStrategy

__all__ = [
    "BaseCheckpointManager",
    "CheckpointingException",
    "CkptID",
    "SameMachineReplicationException",
]

log = logging.getLogger("smckpt")

CkptID = tuple[int, int, Any]  # iteration, rank, session


class CheckpointingException(CheckpointError):
    """A local checkpoint is not whole, or is not there."""


class SameMachineReplicationException(CheckpointingException):
    """NVRx's error for a file that two ranks of one directory would write. Nothing here raises it;
    a `_save` of the user's may."""

    def __init__(self, ckpt_id: Any) -> None:
        super().__init__(f"checkpoint {ckpt_id} is on this machine already")


class BaseCheckpointManager(ABC):
    """A class of the user's has the abstract methods, or overrides `_save` and `_load`, as of NVRx.
    `_save` runs in the worker, on a copy of the object without the strategy.

    Args:
        session_id: what tells the checkpoints of one training from others in the place.
        repl_strategy: which ranks keep copies for each other; None: none do.
    """

    def __init__(self, session_id: str, repl_strategy: ReplicationStrategy | None = None) -> None:
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.latest_iteration = -1
        self.globally_available_ids: list[list[CkptID]] = []
        self._rank: int | None = None  # of the copy in the worker, where no process group is

    @property
    def rank(self) -> int:
        if self._rank is not None:
            return self._rank
        return dist.get_rank() if dist.is_initialized() else 0

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """What this rank has."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict: ...

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Write a state."""

    @abstractmethod
    def _cleanup(self, iteration: int) -> None:
        """Remove what is older than the checkpoint of an iteration, which is whole."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove what was written of an iteration."""

    def _save_fn(self, id_to_state_dict: dict[CkptID, TensorAwareStateDict]) -> None:
        for ckpt_id, state_dict in id_to_state_dict.items():
            self._save(state_dict, ckpt_id)

    def find_latest(self) -> int:
        """The newest iteration of which every rank can have its state, or -1; all ranks call
        this."""
        if self.latest_iteration == -1:
            self.latest_iteration = self._newest_written()
        return self.latest_iteration

    def _newest_written(self) -> int:
        """The newest iteration that `_save` has written for every rank, or -1; all ranks call
        this."""
        mine = list(self._my_ckpt_ids())
        if self.repl_strategy is None:
            mine = [one for one in mine if one[1] == self.rank]
        everyone = GroupWrapper()
        self.globally_available_ids = everyone.all_gather_object(mine)
        ranks_of = defaultdict(set)
        for iteration, rank, _ in (one for ids in self.globally_available_ids for one in ids):
            ranks_of[iteration].add(rank)
        # states of ranks that the job does not have are parts of a larger job's
        whole = [it for it, ranks in ranks_of.items() if ranks == set(everyone.ranks)]
        return max(whole, default=-1)

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """This rank's state of the iteration that `find_latest` has found, and its id; all ranks
        call this.

        Raises:
            CheckpointingException: `find_latest` has found none, or was not called.
            NoReplicasAvailableError: it is lost, with all copies.
        """
        if self.latest_iteration == -1:
            raise CheckpointingException(
                "there is no local checkpoint to load",
                remedy="call find_latest() first; -1 says that there is none",
            )
        wanted = self._ckpt_id(self.latest_iteration)
        if self.repl_strategy is None:
            state = self._load(wanted)
        else:
            plan = self.repl_strategy.retrieve_plan(self.globally_available_ids, [wanted])
            mine = {one: self._load(one) for one in plan.required_ids()}
            state = self.repl_strategy.retrieve_execute(plan, mine)[wanted]
        state.restore_tensor_device(non_blocking=False)
        return state, wanted

    def save(
        self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> AsyncRequest | None:
        """Save this rank's state; all ranks call this.

        Args:
            is_async: return a request for an AsyncCallsQueue, of either kind.

        Raises:
            CheckpointingException: there is a newer one; or not all ranks could write.
        """
        self._refuse_older(iteration)
        mine = self._ckpt_id(iteration)
        states = {mine: state_dict}
        if self.repl_strategy is not None:
            copies, ids = self.repl_strategy.replicate(state_dict, mine)
            states = dict(zip(ids, copies, strict=True))
        states[mine].copy_tensors_to_cpu(non_blocking=False)
        self.latest_iteration = -1
        if is_async:
            sent = copy.copy(self)
            sent.repl_strategy, sent.globally_available_ids, sent._rank = None, [], self.rank
            finalize = [lambda: self._finalize(iteration, True)]
            return AsyncRequest(sent._save_fn, (states,), finalize, {})
        failed: Exception | None = None
        try:
            self._save_fn(states)
        except Exception as error:  # the peers wait for this rank
            log.exception("a local checkpoint could not be written")
            failed = error
        if dist.is_initialized():
            dist.barrier()
        try:
            self._finalize(iteration, False)
        except CheckpointingException as error:
            raise error from failed
        return None

    def _refuse_older(self, iteration: int) -> None:
        if self.latest_iteration >= iteration:
            raise CheckpointingException(
                f"iteration {iteration} is not newer than {self.latest_iteration}",
                remedy="save iterations in order",
            )

    def _finalize(self, iteration: int, in_background: bool) -> None:
        began = time.monotonic()
        found, self.latest_iteration = self._newest_written(), -1
        remove = self._cleanup if found >= iteration else self._cleanup_failed_save
        if in_background:
            threading.Thread(target=remove, args=(iteration,), name="smckpt-local").start()
        else:
            remove(iteration)
        log.debug("finalize_fn took %.4fs", time.monotonic() - began)  # NVRx's own words
        if found < iteration:
            raise CheckpointingException(
                f"the local checkpoint of iteration {iteration} is not whole: the newest that is, "
                f"is {found} (-1: none)",
                remedy="see the log of the rank that could not write; is its disk full?",
            )

    def _ckpt_id(self, iteration: int) -> CkptID:
        if iteration < 0:
            raise CheckpointingException(f"iteration {iteration}", remedy="pass 0 or more")
        return iteration, self.rank, self.session_id
