"""A DCP save in two halves: planned on all ranks before the worker writes, finished after it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from smckpt.integrations.nvrx.async_ckpt.filesystem_async import FileSystemWriterAsync
from smckpt.meeting.group import torch_group_of

__all__ = [
    "CheckpointMetadataCache",
    "get_metadata_caching_status",
    "init_checkpoint_metadata_cache",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]


class CheckpointMetadataCache:
    """The plan and metadata of the last save. A save takes them where no rank's own plan, made of
    the state of now, differs from that of then; otherwise it plans anew."""

    def __init__(self) -> None:
        self.cached_central_plan: SavePlan | None = None
        self.cached_local_plan: SavePlan | None = None
        self.cached_global_metadata: Metadata | None = None  # on the coordinator
        self.validated_cache_reuse = False
        self.validated_loaded_metadata_reuse = False
        self.loaded_all_plans: list[SavePlan] | None = None
        self._planner: type[SavePlanner] | None = None

    def set_cached_global_metadata(self, cached_global_metadata: Metadata | None) -> None:
        """Of a loaded checkpoint. The first save is planned all the same."""
        self.loaded_all_plans = getattr(cached_global_metadata, "all_local_plans", None)

    def set_cache_metadata(
        self, central_plan: SavePlan, local_plan: SavePlan, global_md_verify_reuse: bool
    ) -> None:
        self.cached_central_plan, self.cached_local_plan = central_plan, local_plan
        self.validated_loaded_metadata_reuse = global_md_verify_reuse

    def get_cache_metadata(self) -> tuple[Any, Any, bool, Any]:
        reuse = self.validated_cache_reuse
        return self.cached_central_plan, self.cached_local_plan, reuse, self.loaded_all_plans

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """Whether the last save took the plan of the one before; False."""
        return self.validated_cache_reuse, self.validated_loaded_metadata_reuse

    def keeps(self, local_plan: SavePlan, planner: SavePlanner) -> bool:
        """Whether this rank's plan is that of the last save."""
        known = self.cached_central_plan is not None and self._planner is type(planner)
        try:
            return known and bool(self.cached_local_plan == local_plan)
        except Exception:  # values without a plain `==` in planner_data
            return False

    def take(
        self, central: SavePlan, local: SavePlan, metadata: Metadata | None, planner: SavePlanner
    ) -> None:
        """Keep what a save has planned."""
        self.set_cache_metadata(central, local, False)
        self.cached_global_metadata, self._planner = metadata, type(planner)


@dataclasses.dataclass
class _PlanProcess:
    """cache: what `init_checkpoint_metadata_cache` made."""

    cache: CheckpointMetadataCache | None = None


_PROCESS = _PlanProcess()


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Make the cache that saves with `enable_cache` use."""
    _PROCESS.cache = _PROCESS.cache or CheckpointMetadataCache()
    _PROCESS.cache.set_cached_global_metadata(cached_global_metadata)


def get_metadata_caching_status() -> tuple[bool, bool] | None:
    return None if _PROCESS.cache is None else _PROCESS.cache.get_metadata_caching_status()


def save_state_dict_async_plan(
    state_dict: Any,
    storage_writer: FileSystemWriterAsync,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]:
    """Plan a save with DCP's collectives; all ranks of the group call this.

    Args:
        enable_cache: skip the collective plan where nothing has changed on any rank.
        metadata_cache: the cache for it; None takes that of the process, if one was made.

    Returns:
        The arguments of `save_state_dict_async_finalize`.

    Raises:
        CheckpointException: the plan failed on a rank; on every rank.
    """
    ranks = _DistWrapper(torch_group_of(process_group), dist.is_initialized(), coordinator_rank)
    planner = DefaultSavePlanner() if planner is None else planner
    cache = (metadata_cache or _PROCESS.cache) if enable_cache else None
    planned = _Planned(state_dict, storage_writer, planner, ranks)
    central: SavePlan | None = None
    metadata: Metadata | None = None
    if cache is not None:
        cache.validated_cache_reuse = ranks.all_reduce(
            "plan", lambda: cache.keeps(planned.local(), planner), all
        )
        if cache.validated_cache_reuse:
            central = cache.cached_central_plan
            metadata = copy.copy(cache.cached_global_metadata)
            planned.uncommit()
    if central is None:
        central, metadata = planned.together()
        if cache is not None:
            cache.take(central, planned.local(), copy.copy(metadata), planner)
    storage_writer.prepare_write_data(planner.finish_plan(central), planner)
    return storage_writer, metadata, ranks


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: Any
) -> None:
    """Write the metadata once all ranks have written; all ranks of the group call this.

    Raises:
        CheckpointException: a rank failed; on every rank. There is no metadata then.
    """

    def written() -> Any:
        found = storage_writer.retrieve_write_results()
        if isinstance(found, tuple):
            raise found[0]
        return found

    def publish(results: list[Any]) -> None:
        assert global_metadata is not None
        storage_writer.finish(global_metadata, results)

    try:
        dist_wrapper.all_reduce("write", written, publish)
    except CheckpointException as error:
        if dist_wrapper.is_coordinator:
            raise
        failures = {}  # as the other ranks hear it: whose worker failed, and why
        for rank, (cause, trace) in error.failures.items():
            if reason := str(cause).partition("Worker failure: ")[2]:
                cause = RuntimeError(f"rank {rank} could not write: {reason}")
            failures[rank] = (cause, trace)
        raise CheckpointException("write", failures) from error


class _Planned:
    """A save while it is planned, on one rank."""

    def __init__(
        self, state_dict: Any, writer: FileSystemWriterAsync, planner: SavePlanner, ranks: Any
    ) -> None:
        self._state, self._writer, self._planner, self._ranks = state_dict, writer, planner, ranks
        self._local: SavePlan | None = None

    def local(self) -> SavePlan:
        """This rank's own plan, made once."""
        if self._local is None:
            leads = self._ranks.is_coordinator
            self._planner.set_up_planner(self._state, is_coordinator=leads)
            self._writer.set_up_storage_writer(leads)
            self._local = self._writer.prepare_local_plan(self._planner.create_local_plan())
        return self._local

    def uncommit(self) -> None:
        """What `prepare_global_plan` does to an older checkpoint, without a plan."""
        if self._ranks.is_coordinator:
            self._writer.prepare_global_plan([])

    def together(self) -> tuple[SavePlan, Metadata | None]:
        """This rank's part of the plan of all; on the coordinator, the metadata too."""
        made: list[Metadata] = []

        def of_all(plans: list[SavePlan]) -> list[SavePlan]:
            whole, metadata = self._planner.create_global_plan(plans)
            made.append(metadata)
            return self._writer.prepare_global_plan(whole)

        if not getattr(self._planner, "can_run_decentralized_global_plan", False):
            central = self._ranks.reduce_scatter("plan", self.local, of_all)
            return central, made[0] if made else None
        # Megatron-core's planner: each rank makes its part, the coordinator only the metadata
        self._ranks.all_reduce("plan", self.local, lambda plans: of_all(plans) and None)
        alone: Any = self._planner
        own = alone.create_decentralized_global_plan(self.local())
        return self._writer.prepare_decentralized_global_plan(own), made[0] if made else None
