"""Mixtures of experts, with one tensor for each expert or one for all experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smckpt.translate.tables.families.dense import (
    ATTENTION,
    DENSE_MLP,
    HEAD_NORMS,
    NO_WEIGHTS,
    NORMS,
    QKV_BIASES,
    TOP,
    WIDE_NORMS,
)  # fmt: skip
from smckpt.translate.tables.table import HF_TP, Family, packed_experts, pair, predicting, rows
from smckpt.translate.tables.table import LayoutRow as Row

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
    *pair("mlp.router", "router"),
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
# Of a layer that predicts further tokens. It follows the model's own, and holds the embedding and
# the head again.
_FURTHER = (
    Row("enorm.weight", ("mtp_embed_norm",)),
    Row("hnorm.weight", ("mtp_hidden_norm",)),
    Row("eh_proj.weight", ("mtp_join",)),
    Row("shared_head.norm.weight", ("mtp_norm",)),
    Row("embed_tokens.weight", ("embed",)),
    Row("shared_head.head.weight", ("head",)),
)
# Qwen3-Next: its norms are stored minus one, but for that of the gated delta net.
_GATED_DELTA = (
    *(replace(row, shift=-1.0) for row in NORMS),
    Row("self_attn.q_proj.weight", ("q", "q_gate"), "by_head", when="not linear"),
    *(Row(f"self_attn.{part}_proj.weight", (part,), when="not linear") for part in "kvo"),
    *(replace(row, shift=-1.0, when="not linear") for row in HEAD_NORMS),
    *(
        replace(row, name=f"linear_attn.{row.name}", when="linear")
        for row in (
            Row("in_proj_qkvz.weight", ("l_q", "l_k", "l_v", "l_gate"), "by_linear_head"),
            Row("in_proj_ba.weight", ("l_beta", "l_alpha"), "by_linear_head"),
            Row("conv1d.weight", ("l_conv_q", "l_conv_k", "l_conv_v")),
            Row("A_log", ("l_decay",)),
            Row("dt_bias", ("l_step",)),
            Row("norm.weight", ("l_norm",)),
            Row("out_proj.weight", ("l_o",)),
        )
    ),
)
_NEXT_LAYER = (*_GATED_DELTA, *_QWEN2_SHARED, *DENSE_MLP, *_QWEN_EXPERTS)
_NEXT = (
    TOP[0], replace(TOP[1], shift=-1.0), TOP[2], *rows("model.layers.{i}.", _NEXT_LAYER),
    *predicting("mtp.layers.{m}.", _NEXT_LAYER),
    *predicting("mtp.", (
        Row("pre_fc_norm_embedding.weight", ("mtp_embed_norm",), shift=-1.0),
        Row("pre_fc_norm_hidden.weight", ("mtp_hidden_norm",), shift=-1.0),
        Row("fc.weight", ("mtp_join",)),
        Row("norm.weight", ("mtp_norm",), shift=-1.0),
    )),
)  # fmt: skip
_LLAMA4 = (
    *(replace(row, name=row.name.replace("mlp.", "feed_forward.")) for row in DENSE_MLP[::2]),
    Row("feed_forward.router.weight", ("router",), when="sparse"),
    Row("feed_forward.experts.gate_up_proj", ("e_gate", "e_up"), transposed=True, stacked=True,
        when="sparse"),
    Row("feed_forward.experts.down_proj", ("e_down",), transposed=True, stacked=True,
        when="sparse"),
    *(
        Row(f"feed_forward.shared_expert.{part}_proj.weight", (f"s_{part}",), when="sparse")
        for part in ("gate", "up", "down")
    ),
)  # fmt: skip
_LLAMA4_PACKED = (
    Row("feed_forward.router.weight", ("router",)),
    Row("feed_forward.experts.gate_up_proj", ("e_gate", "e_up"), "per_rank", 0, transposed=True,
        stacked=True),
    Row("feed_forward.experts.down_proj", ("e_down",), tp=1, transposed=True, stacked=True),
)  # fmt: skip
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


def _with_further(name: str, *layer: Row) -> Family:
    """A mixture that may have layers that predict further tokens."""
    found = _mixture(name, *layer)
    further = predicting("model.layers.{i}.", (*NORMS, *layer, *_FURTHER))
    return replace(found, rows=found.rows + further)


def _next(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, each = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    types = config.get("layer_types") or [
        "full_attention" if (i + 1) % each == 0 else "linear_attention" for i in range(layers)
    ]
    return {"layer_types": types}


def _llama4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 4 calls the width of experts `intermediate_size`. Its rotary rows are in Meta's order
    on disk as well, so no layout has them in another."""
    width, layers = config["intermediate_size"], config["num_hidden_layers"]
    sparse, step = config.get("moe_layers"), config.get("interleave_moe_layer_step") or 1
    if sparse is None:
        sparse = range(step - 1, layers, step)
    return {
        "intermediate_size": config.get("intermediate_size_mlp") or width,
        "moe_intermediate_size": width, "shared_expert_intermediate_size": width,
        "mlp_only_layers": [i for i in range(layers) if i not in sparse],
        "partial_rotary_factor": 0,
    }  # fmt: skip


FAMILIES = (
    _mixture("mixtral", *ATTENTION, *_MIXTRAL),
    _mixture("qwen3_moe", *ATTENTION, *HEAD_NORMS, *DENSE_MLP, *_QWEN_EXPERTS),
    replace(
        _mixture("gpt_oss", *ATTENTION, *_GPT_OSS),
        defaults={"attention_bias": True},
        fp32_beside_float16=("norm",),
        hf_tp={"head": 0},  # experts are cut by expert parallelism alone
        packed=_GPT_OSS[1:],
    ),
    replace(
        _with_further("deepseek_v3", *_DEEPSEEK, *_SHARED, *DENSE_MLP, *_QWEN_EXPERTS),
        fp32=("e_score_correction_bias",),
        hf_tp={role: HF_TP[role] for role in _CUT},
    ),
    replace(
        _mixture("deepseek_v2", *_DEEPSEEK, *_SHARED[1:], *DENSE_MLP, *_QWEN_EXPERTS),
        hf_tp={**HF_TP, "q_up": 0, "kv_up": 0},
    ),
    replace(
        _with_further(
            "glm4_moe", *QKV_BIASES, *_GLM_HEAD_NORMS, *_SHARED, *DENSE_MLP, *_QWEN_EXPERTS
        ),
        fp32=("e_score_correction_bias",),
    ),
    replace(
        _mixture("qwen2_moe", *_QKV_BIASES, *_QWEN2_SHARED, *DENSE_MLP, *_QWEN_EXPERTS),
        defaults={"qkv_bias": True},
        hf_tp={role: at for role, at in HF_TP.items() if not role.startswith("s_")},
    ),
    Family(
        "qwen3_next",
        _NEXT,
        NO_WEIGHTS,
        derive=_next,
        hf_tp={**HF_TP, "l_q": 0, "l_beta": 0, "l_o": 0},
    ),
    replace(_mixture("llama4_text", *ATTENTION, *_LLAMA4), derive=_llama4, packed=_LLAMA4_PACKED),
    _mixture("olmoe", *ATTENTION, *WIDE_NORMS, *_QWEN_EXPERTS),
    replace(
        _mixture("granitemoe", *ATTENTION, *_GRANITE),
        hf_tp=_ENDS,
        packed=packed_experts("block_sparse_moe", "router"),
    ),
    Family(
        "phimoe",
        _PHIMOE_TOP + rows("model.layers.{i}.", (*NORMS, *ATTENTION, *_PHIMOE)),
        NO_WEIGHTS,
        hf_tp=_ENDS,
        packed=packed_experts(router="router"),
    ),
)
