"""Replacements for calls of torch to which SMP's scripts pass arguments that stock torch refuses.

`smckpt.run` replaces torch's functions with them, and restores them at its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

from smckpt.errors import UsageError
from smckpt.meeting.group import torch_group_of

__all__ = ["either_order", "over_shard_groups", "with_process_group"]


def over_shard_groups(stock: Callable[..., None], groups: Callable[[], Any]) -> Callable[..., None]:
    """`FSDP.__init__`, which shards as SMP's degrees say where the script names no process group.

    SMP's page of hybrid sharding: "PyTorch FSDP calls can stay as is". With a `hybrid_shard_degree`
    of 2 and more any strategy but `_HYBRID_SHARD_ZERO2` becomes `HYBRID_SHARD`; with 1 there is
    no sharding; with 0 and no other degree, nothing changes.

    Args:
        groups: gives `torch.sagemaker.state`.
    """

    @functools.wraps(stock)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("post_param_init_fn", None) is not None:
            raise UsageError(
                "FSDP(post_param_init_fn=…) is not honoured: it belongs to SMP's delayed "
                "parameters, which smckpt lacks",
                remedy="initialise the parameters in param_init_fn",
            )
        state = groups()
        named = bool(args) or any(
            kwargs.get(name) is not None for name in ("process_group", "device_mesh")
        )
        if not named and state.parallel is not None:
            kwargs |= _sharded_by(state, kwargs.get("sharding_strategy"))
        stock(self, module, *args, **kwargs)

    return init


def _sharded_by(state: Any, strategy: ShardingStrategy | None) -> dict[str, Any]:
    """The arguments of FSDP for the degrees of `torch.sagemaker.init`."""
    parallel = state.parallel
    native = parallel.tp_size == parallel.ep_size == 1
    if parallel.hybrid_shard_degree == 0 and native:
        return {}
    zero2 = strategy in (ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.SHARD_GRAD_OP)
    if parallel.fsdp_size == 1:
        kept = ShardingStrategy.NO_SHARD
        return {"process_group": state.rep_process_group, "sharding_strategy": kept}
    if parallel.rep_size == 1:
        kept = ShardingStrategy.SHARD_GRAD_OP if zero2 else ShardingStrategy.FULL_SHARD
        return {"process_group": state.fsdp_process_group, "sharding_strategy": kept}
    kept = (
        ShardingStrategy._HYBRID_SHARD_ZERO2
        if strategy == ShardingStrategy._HYBRID_SHARD_ZERO2
        else ShardingStrategy.HYBRID_SHARD
    )
    both = (state.fsdp_process_group, state.rep_process_group)
    return {"process_group": both, "sharding_strategy": kept}


def either_order(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`FSDP.optim_state_dict_to_load`, also with the order of torch 2.0, the state dict first."""

    def optim_state_dict_to_load(*args: Any, **kwargs: Any) -> Any:
        if len(args) >= 3 and isinstance(args[0], Mapping):
            args = (*args[1:3], args[0], *args[3:])
        return stock(*args, **kwargs)

    return optim_state_dict_to_load


def with_process_group(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`load_sharded_optimizer_state_dict`, also with `process_group=`: the ranks that the state is
    sharded over. Stock torch 2.13 cuts it over all ranks of the job, replicas included."""

    def load_sharded_optimizer_state_dict(
        model_state_dict: Any,
        optimizer_key: str,
        storage_reader: Any,
        planner: Any = None,
        process_group: Any = None,
    ) -> dict[str, Any]:
        """Load the optimizer state that `FSDP.optim_state_dict` gave under SHARDED.

        Args:
            model_state_dict: of the model, SHARDED, loaded.
            optimizer_key: the key of the saved state.
            process_group: the shard group, `model.process_group`. None: all ranks, as in stock
                torch.

        Returns:
            `{optimizer_key: …}`, each tensor a ShardedTensor over the group; scalars are plain.

        Raises:
            UsageError: nothing is saved under the key.
        """
        if process_group is None:
            given: dict[str, Any] = stock(model_state_dict, optimizer_key, storage_reader, planner)
            return given
        process_group = torch_group_of(process_group)
        metadata = storage_reader.read_metadata()
        paths = metadata.planner_data or {}
        target = {
            name: _room(saved, process_group)
            for name, saved in metadata.state_dict_metadata.items()
            if paths[name][0] == optimizer_key
        }
        if not target:
            raise UsageError(
                f"the checkpoint has nothing under {optimizer_key!r}",
                remedy=f"it has {sorted({str(path[0]) for path in paths.values()})[:8]}",
            )
        state_dict_loader.load(
            target, storage_reader=storage_reader, planner=planner, process_group=process_group
        )
        found: dict[str, Any] = unflatten_state_dict(target, paths)
        return found

    return load_sharded_optimizer_state_dict


def _room(saved: Any, group: Any) -> Any:
    if isinstance(saved, BytesStorageMetadata):
        return "<bytes_io>"
    backend = dist.Backend.backend_capability.get(dist.get_backend(group), [])
    device = "cpu" if "cpu" in backend else torch.accelerator.current_accelerator()
    whole = torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
    if not saved.size:
        return whole
    return _create_chunk_sharded_tensor(
        whole,
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        num_devices_per_node=max(torch.accelerator.device_count(), 1),
        pg=group,
    )
