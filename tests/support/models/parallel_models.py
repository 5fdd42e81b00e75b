"""Models of tensor-parallel ranks, made of the states that `references` cuts."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smckpt import ParallelState
from tests.support.launch import ROOT
from tests.support.models import references as ref

State = dict[str, torch.Tensor]


class Named(nn.Module):
    """Parameters under dotted names, and nothing that computes."""

    def __init__(self, state: State, config: Any = None) -> None:
        super().__init__()
        self.config = config
        for name, tensor in state.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]  # type: ignore[assignment]
            if tensor.is_floating_point():
                owner.register_parameter(last, nn.Parameter(tensor.clone()))
            else:
                owner.register_buffer(last, tensor.clone())


def own_group(groups: list[list[int]]) -> Any:
    """Every rank makes every group; this rank's is returned."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def parallel_llama(config: dict[str, Any], state: State, degrees: ParallelState) -> nn.Module:
    """The tensor-parallel Llama of the examples, with the weights of `state`, Hugging Face's."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tensor_parallel import ParallelLlama

    model = ParallelLlama(config, 128, own_group(degrees.ranker.get_tp_groups()))
    cut = ref.te(state, degrees.tp_size, degrees.tp_rank)
    model.load_state_dict({n: t for n, t in cut.items() if not n.endswith("_extra_state")})
    return model
