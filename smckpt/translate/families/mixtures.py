"""Mixtures of experts, with one tensor for each expert or one for all experts of a layer."""

from __future__ import annotations

from dataclasses import replace

from smckpt.translate.families.llama import (
    ATTENTION,
    DENSE_MLP,
    HEAD_NORMS,
    NO_WEIGHTS,
    NORMS,
    QKV_BIASES,
    TOP,
    WIDE_NORMS,
)  # fmt: skip
from smckpt.translate.family import HF_TP, Family, in_memory
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
_QWEN2_SHARED = (
    *(
        Row(f"mlp.shared_expert.{part}_proj.weight", (f"s_{part}",), when="sparse")
        for part in ("gate", "up", "down")
    ),
    Row("mlp.shared_expert_gate.weight", ("s_router",), when="sparse"),
)
_QKV_BIASES = tuple(replace(row, when="qkv_bias") if row.when else row for row in QKV_BIASES)
_GLM_HEAD_NORMS = tuple(replace(row, when="use_qk_norm") for row in HEAD_NORMS)
_GRANITE = (
    Row("block_sparse_moe.router.layer.weight", ("router",)),
    Row("block_sparse_moe.input_linear.weight", ("e_gate", "e_up"), stacked=True),
    Row("block_sparse_moe.output_linear.weight", ("e_down",), stacked=True),
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
_SHARED = (
    Row("mlp.gate.e_score_correction_bias", ("router_shift",), when="sparse"),
    *(
        Row(f"mlp.shared_experts.{part}_proj.weight", (f"s_{part}",),
            when="sparse, n_shared_experts")
        for part in ("gate", "up", "down")
    ),
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
)
_PHIMOE_TOP = (
    *TOP,
    Row("model.norm.bias", ("final_norm_b",)),
    Row("lm_head.bias", ("head_b",), when="lm_head_bias"),
)
_PHIMOE = (
    Row("input_layernorm.bias", ("norm1_b",)),
    Row("post_attention_layernorm.bias", ("norm2_b",)),
    *_MIXTRAL,
)
# transformers leaves attention whole on each rank: beside experts, it cuts only these
_ENDS = dict.fromkeys(("embed", "head", "head_b"), 0)
# and of DeepSeek these
_CUT = ("embed", "head", "gate", "up", "down", "s_gate", "s_up", "s_down")


def _mixture(name: str, *layer: Row) -> Family:
    return Family(name, TOP + rows("model.layers.{i}.", (*NORMS, *layer)), NO_WEIGHTS)


FAMILIES = (
    _mixture("mixtral", *ATTENTION, *_MIXTRAL),
    _mixture("qwen3_moe", *ATTENTION, *HEAD_NORMS, *DENSE_MLP, *_QWEN_EXPERTS),
    replace(
        _mixture("gpt_oss", *ATTENTION, *_GPT_OSS),
        defaults={"attention_bias": True},
        fp32_beside_float16=("norm",),
        hf_tp={"head": 0},  # experts are cut by expert parallelism alone
        packed=rows("{layers}.{i}.", _GPT_OSS[1:]),
    ),
    replace(
        _mixture("deepseek_v3", *_DEEPSEEK, *_SHARED, *DENSE_MLP, *_QWEN_EXPERTS),
        fp32=("e_score_correction_bias",),
        hf_tp={role: HF_TP[role] for role in _CUT},
    ),
    replace(
        _mixture("deepseek_v2", *_DEEPSEEK, *_SHARED[1:], *DENSE_MLP, *_QWEN_EXPERTS),
        hf_tp={**HF_TP, "q_up": 0, "kv_up": 0},
    ),
    replace(
        _mixture("glm4_moe", *QKV_BIASES, *_GLM_HEAD_NORMS, *_SHARED, *DENSE_MLP, *_QWEN_EXPERTS),
        fp32=("e_score_correction_bias",),
    ),
    replace(
        _mixture("qwen2_moe", *_QKV_BIASES, *_QWEN2_SHARED, *DENSE_MLP, *_QWEN_EXPERTS),
        defaults={"qkv_bias": True},
        hf_tp={role: at for role, at in HF_TP.items() if not role.startswith("s_")},
    ),
    _mixture("olmoe", *ATTENTION, *WIDE_NORMS, *_QWEN_EXPERTS),
    replace(
        _mixture("granitemoe", *ATTENTION, *_GRANITE),
        hf_tp=_ENDS,
        packed=in_memory("block_sparse_moe", "router"),
    ),
    Family(
        "phimoe",
        _PHIMOE_TOP + rows("model.layers.{i}.", (*NORMS, *ATTENTION, *_PHIMOE)),
        NO_WEIGHTS,
        hf_tp=_ENDS,
        packed=in_memory(router="router"),
    ),
)
