"""Four ranks, two of each tensor-parallel one, and full states that are taken of their models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from smckpt import FULL, FullStateDictConfig, ParallelState, errors, sm_state_dict_type
from tests.support.models.parallel_models import own_group, parallel_llama

__all__ = ["ON_RANK0", "TOKENS", "Job", "State", "differences", "raised", "taken"]

State = dict[str, torch.Tensor]
TOKENS = torch.arange(24).view(2, 12) * 5 % 120
ON_RANK0 = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)


class Job:
    """What the cases of one rank work with."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.degrees = ParallelState(4, tensor_parallel_degree=2)
        self.shard_group = own_group(self.degrees.ranker.get_fsdp_groups())
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        self.llama, self.config = self.saved("llama")

    def saved(self, family: str) -> tuple[State, dict[str, Any]]:
        state, config = torch.load(self.folder / f"{family}.pt")
        return state, config

    def model(self, how: str) -> Any:
        model = parallel_llama(self.config, self.llama, self.degrees)
        layers = list(model.model.layers)
        if how.startswith("fsdp1"):
            return FSDP(
                model,
                use_orig_params=how.endswith("original"),
                process_group=self.shard_group,
                auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
                device_id=torch.device("cpu"),
            )
        for part in (*layers, model):
            fully_shard(part, mesh=self.mesh["shard"])
        return model

    def cut(self, how: Callable[..., State], **more: Any) -> State:
        return how(self.llama, 2, self.degrees.tp_rank, **more)


def taken(model: nn.Module, how: Any = ON_RANK0, **more: Any) -> dict[str, Any]:
    with sm_state_dict_type(model, FULL, how, **more):
        return model.state_dict()


def differences(found: dict[str, Any], wanted: State) -> list[str]:
    """Names on one side only, or whose tensors are not plain, or not of equal bits."""
    bad = sorted(found.keys() ^ wanted.keys())
    for name in found.keys() & wanted.keys():
        if type(found[name]) is not torch.Tensor or not torch.equal(found[name], wanted[name]):
            bad.append(name)
    return bad


def raised(act: Callable[[], Any]) -> tuple[str, str]:
    try:
        act()
    except errors.CheckpointError as error:
        return type(error).__name__, str(error)
    return "", ""
