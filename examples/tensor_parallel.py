"""A Llama whose attention and MLP are fused, tensor-parallel layers, over plain process groups.

Names and fusions are those of Transformer Engine's `TransformerLayer`: a norm is in the module of
the matrix after it, and gate and up are one matrix. Each rank holds plain tensors: its heads of
query, key and value, its rows of gate and then of up, its columns of the output matrices, and its
rows of the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Config = Mapping[str, Any]  # keys of config.json


class _Copy(torch.autograd.Function):
    """The input of the parallel part. Every rank has it, and each rank's gradient is a part of the
    sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """The output of the parallel part, of which each rank has a summand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Join(torch.autograd.Function):
    """The output of the parallel part, of which each rank has some columns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, x = group, x.contiguous()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


class NormAndQKV(nn.Module):
    """RMS norm, then this rank's heads of query, key and value."""

    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.eps = group, config["rms_norm_eps"]
        hidden, size = config["hidden_size"], config["head_dim"]
        queries = config["num_attention_heads"] * size // group.size()
        keys = config["num_key_value_heads"] * size // group.size()
        self.layer_norm_weight = _empty(hidden)
        self.query_weight = _empty(queries, hidden)
        self.key_weight = _empty(keys, hidden)
        self.value_weight = _empty(keys, hidden)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        x = _Copy.apply(x, self.group)
        return [F.linear(x, w) for w in (self.query_weight, self.key_weight, self.value_weight)]


class RowParallel(nn.Module):
    def __init__(self, inputs: int, outputs: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = _empty(outputs, inputs // group.size())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(F.linear(x, self.weight), self.group)


class Attention(nn.Module):
    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.head = config["head_dim"]
        self.layernorm_qkv = NormAndQKV(config, group)
        width = config["num_attention_heads"] * self.head
        self.proj = RowParallel(width, config["hidden_size"], group)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in self.layernorm_qkv(x)
        )
        q, k = _rotated(q, angles), _rotated(k, angles)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(x.transpose(1, 2).flatten(2))


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions in Hugging Face's order: a pair has one row in each half of a head."""
    low, high = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class NormAndMLP(nn.Module):
    """RMS norm and gated MLP. fc1 has this rank's rows of gate, and then those of up."""

    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.eps = group, config["rms_norm_eps"]
        hidden, width = config["hidden_size"], config["intermediate_size"] // group.size()
        self.layer_norm_weight = _empty(hidden)
        self.fc1_weight = _empty(2 * width, hidden)
        self.fc2_weight = _empty(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        gate, up = F.linear(_Copy.apply(x, self.group), self.fc1_weight).chunk(2, -1)
        return _Sum.apply(F.linear(F.silu(gate) * up, self.fc2_weight), self.group)


class Layer(nn.Module):
    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.self_attention = Attention(config, group)
        self.layernorm_mlp = NormAndMLP(config, group)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(x, angles)
        return x + self.layernorm_mlp(x)


class VocabularyRows(nn.Module):
    """This rank's rows of the embedding, or of the head."""

    def __init__(self, rows: int, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = _empty(rows // group.size(), hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        own = tokens - self.group.rank() * len(self.weight)
        inside = (own >= 0) & (own < len(self.weight))
        rows = F.embedding(own.clamp(0, len(self.weight) - 1), self.weight)
        return _Sum.apply(rows * inside.unsqueeze(-1), self.group)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return _Join.apply(F.linear(_Copy.apply(x, self.group), self.weight), self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x) if x.is_floating_point() else self.embed(x)


class Trunk(nn.Module):
    def __init__(self, config: Config, rows: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        self.theta, self.head = config["rope_parameters"]["rope_theta"], config["head_dim"]
        self.embed_tokens = VocabularyRows(rows, hidden, group)
        self.layers = nn.ModuleList(Layer(config, group) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)
        steps = torch.arange(0, self.head, 2, device=x.device) / self.head
        angles = torch.outer(positions, self.theta**-steps)
        for layer in self.layers:
            x = layer(x, angles)
        return self.norm(x)


class ParallelLlama(nn.Module):
    """A model from tokens to logits, which are equal on all ranks of the group.

    Args:
        rows: of the vocabulary, padding included.
        group: the tensor-parallel ranks.
    """

    def __init__(self, config: Config, rows: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, rows, group)
        self.lm_head = VocabularyRows(rows, config["hidden_size"], group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.model(tokens))
        # FSDP refuses views of a padded tensor
        return logits[..., : self.config["vocab_size"]].clone()
