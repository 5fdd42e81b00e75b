"""Megatron-core's GPTModel as Llama 4 (text) and as Qwen3-Next, set up by hand on the CPU, for
`megatron_run`, whose interpreter imports it.

Megatron has the gated delta net for Transformer Engine's spec alone. Its module stands here between
the local spec's linear layers. The package that it takes the norm of queries and keys from is for
GPUs: torch code stands in, and its own torch code computes the rest. The local spec has no norms
whose weights are stored minus one: these are here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


class ZeroCentred(torch.nn.Module):
    """`RMSNorm` with `zero_centered_gamma`."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def model(hf: dict[str, Any], job: dict[str, Any], on_cpu: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    layers = range(hf["num_hidden_layers"])
    if hf["model_type"] == "llama4_text":
        own: dict[str, Any] = {
            "ffn_hidden_size": hf["intermediate_size_mlp"],
            "moe_ffn_hidden_size": hf["intermediate_size"],
            "moe_shared_expert_intermediate_size": hf["intermediate_size"],
            "moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True,
            "moe_layer_freq": [int(i in hf["moe_layers"]) for i in layers],
            "num_moe_experts": hf["num_local_experts"], "qk_l2_norm": True,
            "rotary_interleaved": True,
        }  # fmt: skip
    else:
        own = {
            "ffn_hidden_size": hf["intermediate_size"], "num_moe_experts": hf["num_experts"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True, "moe_router_pre_softmax": False, "qk_layernorm": True,
            "attention_output_gate": True, "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(t == "linear_attention") for t in hf["layer_types"]],
            "deterministic_mode": True,
            **{name: hf[name] for name in hf if name.startswith("linear_")},
        }  # fmt: skip
    rope = hf["rope_parameters"]
    config = TransformerConfig(
        num_layers=len(layers), hidden_size=hf["hidden_size"], hidden_dropout=0.0,
        num_attention_heads=hf["num_attention_heads"], kv_channels=hf["head_dim"],
        num_query_groups=hf["num_key_value_heads"], layernorm_epsilon=hf["rms_norm_eps"],
        tensor_model_parallel_size=job["tp"], expert_model_parallel_size=job["ep"],
        expert_tensor_parallel_size=job["etp"], params_dtype=torch.float32,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, moe_router_topk=hf["num_experts_per_tok"],
        moe_router_load_balancing_type="none",
        **{**on_cpu, **own, "attention_backend": AttnBackend.unfused},
    )  # fmt: skip
    return GPTModel(
        config, spec(config), vocab_size=128, max_sequence_length=64,
        position_embedding_type="rope", rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1),
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    found = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )  # fmt: skip
    if config.experimental_attention_variant is None:
        return found
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
    net = ModuleSpec(
        module=gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=ZeroCentred, out_proj=RowParallelLinear
        ),
    )
    found.layer_norm = ZeroCentred
    found.layer_specs = [
        copy.deepcopy(layer) for layer in found.layer_specs
    ]  # some were one object
    for layer, linear in zip(found.layer_specs, config.linear_attention_freq, strict=True):
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ZeroCentred
        if linear:
            layer.submodules.self_attention = net
        else:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = ZeroCentred
    return found
