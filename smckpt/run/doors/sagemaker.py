"""Provides smckpt as the absent `torch.sagemaker`, and replaces four calls of torch."""

from __future__ import annotations

import importlib
import pkgutil

from smckpt.run.places import Provided, refuse_shadow, refuse_version

__all__ = ["TESTED", "put"]

TESTED = ("2.13",)  # versions of torch, whose calls this replaces
_OURS, _THEIRS = "smckpt.integrations.sagemaker", "torch.sagemaker"


def put(provided: Provided, *, force: bool, shadow: bool) -> None:
    """
    Raises:
        UsageError: torch is of another version, or has a `torch.sagemaker`.
    """
    import torch

    refuse_version("torch", torch.__version__.partition("+")[0], TESTED, force)
    refuse_shadow(_THEIRS, shadow)
    package = importlib.import_module(_OURS)
    below = pkgutil.walk_packages(package.__path__, f"{_OURS}.")
    for name in (_OURS, *(found.name for found in below)):
        provided.module(_THEIRS + name.removeprefix(_OURS), importlib.import_module(name))
    _torch_calls(provided)


def _torch_calls(provided: Provided) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import optimizer
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    import smckpt
    from smckpt.full import is_extended
    from smckpt.integrations.sagemaker import state
    from smckpt.integrations.torch_calls import either_order, over_shard_groups, with_process_group

    name = "load_sharded_optimizer_state_dict"
    loads = with_process_group(optimizer.load_sharded_optimizer_state_dict)
    for owner in (optimizer, checkpoint):
        provided.attribute(owner, name, loads, "takes process_group=")
    name = "optim_state_dict_to_load"
    orders = staticmethod(either_order(FSDP.optim_state_dict_to_load))
    provided.attribute(FSDP, name, orders, "also takes the state dict as its first argument")
    shards = over_shard_groups(FSDP.__init__, lambda: state)
    provided.attribute(FSDP, "__init__", shards, "shards as torch.sagemaker.init() says")
    if is_extended():  # the script's own call, or torch.sagemaker.init() before
        return
    extension = smckpt.extend_torch_config(parallel_state=lambda: state.parallel)
    provided.by(
        extension.undo,
        *(
            f"replaced {name}: takes translate_on_save"
            for name in (
                "torch.distributed.fsdp.api.FullStateDictConfig",
                f"{FSDP.__module__}.{FSDP.__qualname__}.state_dict_type",
            )
        ),
    )
