"""Mixtures of experts, with one tensor for each expert or one for all experts of a layer."""

from __future__ import annotations

from dataclasses import replace

from smckpt.translate.families.llama import ATTENTION, DENSE_MLP, NO_WEIGHTS, NORMS, TOP
from smckpt.translate.family import HF_TP, Family
from smckpt.translate.table import LayoutRow as Row
from smckpt.translate.table import rows

__all__ = ["FAMILIES"]

_MIXTRAL = (
    Row("block_sparse_moe.gate.weight", ("router",), when="sparse"),
    Row("block_sparse_moe.experts.{e}.w1.weight", ("e_gate",), when="sparse"),
    Row("block_sparse_moe.experts.{e}.w3.weight", ("e_up",), when="sparse"),
    Row("block_sparse_moe.experts.{e}.w2.weight", ("e_down",), when="sparse"),
)
_QWEN_EXPERTS = (
    Row("mlp.gate.weight", ("router",), when="sparse"),
    Row("mlp.experts.{e}.gate_proj.weight", ("e_gate",), when="sparse"),
    Row("mlp.experts.{e}.up_proj.weight", ("e_up",), when="sparse"),
    Row("mlp.experts.{e}.down_proj.weight", ("e_down",), when="sparse"),
)
_QWEN_NORMS = (
    Row("self_attn.q_norm.weight", ("q_norm",)),
    Row("self_attn.k_norm.weight", ("k_norm",)),
)
_GPT_OSS = (
    Row("self_attn.sinks", ("sinks",)),
    Row("mlp.router.weight", ("router",)),
    Row("mlp.router.bias", ("router_b",)),
    Row("mlp.experts.gate_up_proj", ("e_gate", "e_up"), "alternating", transposed=True,
        stacked=True),
    Row("mlp.experts.gate_up_proj_bias", ("e_gate_b", "e_up_b"), "alternating", stacked=True),
    Row("mlp.experts.down_proj", ("e_down",), transposed=True, stacked=True),
    Row("mlp.experts.down_proj_bias", ("e_down_b",), stacked=True),
)  # fmt: skip
_DEEPSEEK = (
    Row("self_attn.q_proj.weight", ("q",), when="not q_lora_rank"),
    Row("self_attn.q_a_proj.weight", ("q_down",), when="q_lora_rank"),
    Row("self_attn.q_a_layernorm.weight", ("q_down_norm",), when="q_lora_rank"),
    Row("self_attn.q_b_proj.weight", ("q_up",), when="q_lora_rank"),
    Row("self_attn.kv_a_proj_with_mqa.weight", ("kv_down",)),
    Row("self_attn.kv_a_layernorm.weight", ("kv_down_norm",)),
    Row("self_attn.kv_b_proj.weight", ("kv_up",)),
    Row("self_attn.o_proj.weight", ("o",)),
    Row("mlp.gate.e_score_correction_bias", ("router_shift",), when="sparse"),
    *(
        Row(f"mlp.shared_experts.{part}_proj.weight", (f"s_{part}",),
            when="sparse, n_shared_experts")
        for part in ("gate", "up", "down")
    ),
)  # fmt: skip
# transformers leaves DeepSeek's attention whole on each rank
_CUT = ("embed", "head", "gate", "up", "down", "s_gate", "s_up", "s_down")


def _mixture(name: str, *layer: Row) -> Family:
    return Family(name, TOP + rows("model.layers.{i}.", (*NORMS, *layer)), NO_WEIGHTS)


FAMILIES = (
    _mixture("mixtral", *ATTENTION, *_MIXTRAL),
    _mixture("qwen3_moe", *ATTENTION, *_QWEN_NORMS, *DENSE_MLP, *_QWEN_EXPERTS),
    replace(
        _mixture("gpt_oss", *ATTENTION, *_GPT_OSS),
        defaults={"attention_bias": True},
        fp32_beside_float16=("norm",),
        hf_tp=None,  # transformers has a plan only for its experts, which smckpt does not read yet
    ),
    replace(
        _mixture("deepseek_v3", *_DEEPSEEK, *DENSE_MLP, *_QWEN_EXPERTS),
        fp32=("e_score_correction_bias",),
        hf_tp={role: HF_TP[role] for role in _CUT},
    ),
)
