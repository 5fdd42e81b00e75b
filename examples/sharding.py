"""A small Llama, distributed over the ranks with FSDP2, FSDP1 or DDP, and tensor parallelism."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from smckpt import ParallelState

# Which linear layers of a decoder layer are cut by columns and by rows. Embedding, norms and head
# stay whole on every tensor-parallel rank.
TENSOR_PARALLEL_PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}


def llama_config(vocabulary: int, *, hidden: int, layers: int, length: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * length,
        initializer_range=0.08,  # a small model learns faster from larger initial weights
        attention_dropout=0.1,  # so that the losses depend on torch's generators
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def build(
    config: LlamaConfig, parallel: str, degrees: ParallelState, device: torch.device, seed: int
) -> nn.Module:
    """The model with the same initial weights everywhere, wrapped.

    Args:
        parallel: "fsdp2" and "fsdp1" shard over `degrees.shard_degree` ranks and replicate over
            the rest (hybrid sharding); "ddp" replicates everything.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(device)
    if parallel == "ddp":
        model = DistributedDataParallel(model)
        # After its first backward, DDP groups the gradients in another way, and the sums then
        # differ in the last bits. So one backward runs before training, in first and resumed runs.
        tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
        return model
    mesh = device_mesh(degrees, device)
    if parallel == "fsdp1":
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh["replicate", "shard"],
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
            ),
            use_orig_params=True,  # the optimizer's groups refer to these parameters
            device_id=device,
        )
    for layer in model.model.layers:
        if degrees.tp_size > 1:
            parallelize_module(layer, mesh["tp"], TENSOR_PARALLEL_PLAN)
        fully_shard(layer, mesh=mesh["replicate", "shard"])
    return fully_shard(model, mesh=mesh["replicate", "shard"])


def device_mesh(degrees: ParallelState, device: torch.device) -> DeviceMesh:
    """Dimensions replicate × shard × tp; neighbours are in one tensor-parallel group."""
    sizes = (degrees.rep_size, degrees.fsdp_size, degrees.tp_size)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard", "tp"))
