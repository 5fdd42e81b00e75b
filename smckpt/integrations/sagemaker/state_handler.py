"""`torch.sagemaker.state`: the degrees from `init`, and the groups that follow from them; what of
SMP's layers is refused; and replacements for calls of torch to which SMP's scripts pass arguments
that stock torch refuses. `smckpt.run` puts these in place, and restores torch's at its end.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

from smckpt.errors import UsageError
from smckpt.full.context import extend_torch_config, is_extended
from smckpt.meeting.group import get_global_ranks, torch_group_of
from smckpt.topology import ParallelState

__all__ = [
    "MoEConfig",
    "State",
    "clip_grad_norm_",
    "either_order",
    "init",
    "is_initialized",
    "over_shard_groups",
    "setup_transformer_engine_cp_groups",
    "state",
    "with_process_group",
]


log = logging.getLogger("smckpt")

_DEGREES = (
    "hybrid_shard_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
)
# Other parameters of SMP, and the value that has no effect here; None: any value has none.
_OTHERS: dict[str, Any] = {
    "sm_activation_offloading": False,
    "activation_loading_horizon": None,  # for offloading
    "fsdp_cache_flush_warnings": None,  # for a warning that smckpt does not give
    "allow_empty_shards": None,  # torch's own FSDP allows them
    "random_seed": None,  # for SMP's layers, which smckpt lacks
}
_VARIABLE = "SM_HP_MP_PARAMETERS"  # SageMaker's launcher puts the configuration there


class State:
    """The attributes of `torch.sagemaker.state`: everything of a `ParallelState` (`ranker`,
    `tp_rank`, `tp_size`, `hybrid_shard_degree`, …), and this rank's process groups
    `tp_process_group`, `cp_process_group`, `ep_process_group`, `fsdp_process_group`,
    `rep_process_group` and `world_process_group`.
    """

    def __init__(self) -> None:
        self.parallel: ParallelState | None = None
        self._groups: dict[str, Any] = {}
        self._undo: Callable[[], None] | None = None

    def reset(self) -> None:
        """Undo `init`. The process groups remain until the job's process group ends."""
        self.parallel = None
        self._groups = {}
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self.parallel is None:
            raise UsageError(
                f"torch.sagemaker.state.{name} was read before torch.sagemaker.init()",
                remedy="call init() after the job's process group is initialised",
            )
        if name.endswith("_process_group"):
            if name not in self._groups:
                raise AttributeError(f"torch.sagemaker.state has no {name}")
            return self._groups[name]
        return getattr(self.parallel, name)

    def set_up(self, parallel: ParallelState) -> None:
        """Take the degrees and make this rank's process groups. Every rank of the job calls it."""

        self.parallel, ranker = parallel, parallel.ranker
        rank = dist.get_rank()
        # Every rank makes every group, in one order: torch counts them, and names them by the
        # count (see meeting/group.py). There are many groups of one rank, so those are made once.
        alone: dict[tuple[int, ...], Any] = {}
        for dim in ("tp", "cp", "ep", "fsdp", "rep"):
            groups = getattr(ranker, f"get_{dim}_groups")()
            if len(groups) == parallel.world_size:
                alone = alone or {tuple(ranks): dist.new_group(ranks) for ranks in groups}
                self._groups[f"{dim}_process_group"] = alone[(rank,)]
                continue
            for ranks in groups:
                group = dist.new_group(ranks)
                if rank in ranks:
                    self._groups[f"{dim}_process_group"] = group
        self._groups["world_process_group"] = dist.group.WORLD
        # torch's own FullStateDictConfig takes translate_on_save from now on, as with SMP
        if not is_extended():
            self._undo = extend_torch_config(parallel_state=lambda: self.parallel).undo

    def of_step(self, process_group: Any) -> dict[str, Any]:
        """The groups of a step with this one, as options of a save or a load."""
        if self.parallel is None:
            return {}
        ranks, ranker = get_global_ranks(process_group), self.parallel.ranker
        if len(ranks) == self.parallel.world_size or ranks in ranker.get_rep_groups():
            return {"parallel_state": self.parallel}
        if ranks in ranker.get_fsdp_groups():
            # SMP's scripts let one replica save: its shard groups are those of one step.
            replica = ranker.get_rep_rank(ranks[0])
            groups = ranker.get_fsdp_groups()
            return {"groups": [g for g in groups if ranker.get_rep_rank(g[0]) == replica]}
        return {}


state = State()  # SMP's scripts import it by name, before init() fills it


def init(config: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> None:
    """Set up the topology. Collective: every rank makes its process groups here. torch's
    `FullStateDictConfig` takes `translate_on_save` from then on, until `state.reset()`.

    Args:
        config: SMP's configuration as a mapping, or the path of a JSON file with it. None: from
            SM_HP_MP_PARAMETERS, which SageMaker's launcher sets, or degrees of 1.

    Raises:
        UsageError: a parameter is unknown, or needs SMP's layers; or the job has no process group
            and no launcher.
        TopologyError: degrees do not fit the world.
    """

    given = _read(config)
    for name, value in given.items():
        if name in _DEGREES:
            continue
        if name not in _OTHERS:
            raise UsageError(
                f"{name} is not a known parameter of SMP",
                remedy=f"the known parameters are {', '.join((*_DEGREES, *_OTHERS))}",
            )
        if _OTHERS[name] is not None and value != _OTHERS[name]:
            raise UsageError(
                f"{name}={value!r} is not honoured: it belongs to SMP's layers, which smckpt lacks",
                remedy=f"pass {_OTHERS[name]!r}",
            )
        log.info("%s=%r has no effect here", name, value)
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise UsageError(
                "torch.sagemaker.init() was called without a process group",
                remedy="start under torchrun, or call dist.init_process_group() first",
            )
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    degrees = {name: given[name] for name in _DEGREES if name in given}
    state.set_up(ParallelState(dist.get_world_size(), rank=dist.get_rank(), **degrees))


def is_initialized() -> bool:
    """Whether `init` was called, without a `state.reset()` since."""
    return state.parallel is not None


def _read(config: Any) -> dict[str, Any]:
    if config is None:
        text, where = os.environ.get(_VARIABLE, "{}"), _VARIABLE
    elif isinstance(config, Mapping):
        return dict(config)
    else:
        where = os.fspath(config)
        try:
            text = Path(where).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"SMP's configuration cannot be read: {error.strerror}",
                remedy="pass a mapping, or the path of a JSON file",
                path=where,
            ) from error
    try:
        read = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"SMP's configuration is not JSON: {error}", remedy="write an object", path=where
        ) from error
    if not isinstance(read, dict):
        raise UsageError("SMP's configuration is not an object", remedy="write {…}", path=where)
    return read


def clip_grad_norm_(model: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The model's own `clip_grad_norm_`, which FSDP has.

    Returns:
        The norm of the gradients before they were clipped.

    Raises:
        UsageError: tensor or expert parallelism: which parameters their ranks hold twice, only
            SMP's layers know.
    """
    parallel = state.parallel
    if parallel is not None and parallel.tp_size * parallel.ep_size > 1:
        raise UsageError(
            "torch.sagemaker.grad_norm.clip_grad_norm_ does not exist here for tensor or expert "
            "parallelism: it needs SMP's layers",
            remedy="clip the gradients in the script",
        )
    norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
    return norm


class MoEConfig:
    """The configuration of SMP's expert layers.

    Raises:
        UsageError: always. smckpt has no expert layers.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "torch.sagemaker.moe.MoEConfig does not exist here: smckpt has no layers of SMP",
            remedy="build the expert-parallel model yourself, over "
            "torch.sagemaker.state.ep_process_group",
        )


def setup_transformer_engine_cp_groups(*_: Any, **__: Any) -> NoReturn:
    """
    Raises:
        UsageError: always. smckpt does not change layers.
    """
    raise UsageError(
        "torch.sagemaker.context_parallel does not exist here: smckpt has no layers of SMP",
        remedy="give torch.sagemaker.state.cp_process_group to Transformer Engine's layers "
        "yourself (set_context_parallel_group)",
    )


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
