"""The hub: names on disk that transformers 4 and 5 both load, family by family.

These are tables like any layout's, of one rank. Experts have a tensor each: the fused ones that
transformers 5 keeps in memory do not load in 4.
"""

from __future__ import annotations

from collections.abc import Mapping

from smckpt.translate.table import Layout, Row, rows

__all__ = ["FAMILIES", "family_names"]

_TOP = (
    Row("model.embed_tokens.weight", ("embed",)),
    Row("model.norm.weight", ("final_norm",)),
    Row("lm_head.weight", ("head",)),
)
_ATTENTION = (
    Row("input_layernorm.weight", ("norm1",)),
    Row("post_attention_layernorm.weight", ("norm2",)),
    *(
        Row(f"self_attn.{part}_proj.{kind}", (part + tail,))
        for part in "qkvo"
        for kind, tail in (("weight", ""), ("bias", "_b"))
    ),
    Row("self_attn.q_norm.weight", ("q_norm",)),
    Row("self_attn.k_norm.weight", ("k_norm",)),
)
_MLP = tuple(
    Row(f"mlp.{part}_proj.{kind}", (part + tail,))
    for part in ("gate", "up", "down")
    for kind, tail in (("weight", ""), ("bias", "_b"))
)
_QWEN_EXPERTS = (
    Row("mlp.gate.weight", ("router",)),
    *(
        Row(f"mlp.experts.{{e}}.{part}_proj.weight", (f"e_{part}",))
        for part in ("gate", "up", "down")
    ),
)
_MIXTRAL_EXPERTS = (
    Row("block_sparse_moe.gate.weight", ("router",)),
    Row("block_sparse_moe.experts.{e}.w1.weight", ("e_gate",)),
    Row("block_sparse_moe.experts.{e}.w3.weight", ("e_up",)),
    Row("block_sparse_moe.experts.{e}.w2.weight", ("e_down",)),
)
_NEOX_LAYER = (
    Row("input_layernorm.weight", ("norm1",)),
    Row("input_layernorm.bias", ("norm1_b",)),
    Row("post_attention_layernorm.weight", ("norm2",)),
    Row("post_attention_layernorm.bias", ("norm2_b",)),
    Row("attention.query_key_value.weight", ("q", "k", "v"), "interleaved"),
    Row("attention.query_key_value.bias", ("q_b", "k_b", "v_b"), "interleaved"),
    Row("attention.dense.weight", ("o",)),
    Row("attention.dense.bias", ("o_b",)),
    Row("mlp.dense_h_to_4h.weight", ("fc1",)),
    Row("mlp.dense_h_to_4h.bias", ("fc1_b",)),
    Row("mlp.dense_4h_to_h.weight", ("fc2",)),
    Row("mlp.dense_4h_to_h.bias", ("fc2_b",)),
)
_NEOX_TOP = (
    Row("gpt_neox.embed_in.weight", ("embed",)),
    Row("gpt_neox.final_layer_norm.weight", ("final_norm",)),
    Row("gpt_neox.final_layer_norm.bias", ("final_norm_b",)),
    Row("embed_out.weight", ("head",)),
)
_SANDWICH = (  # a norm before and one after; all are stored less one
    Row("input_layernorm.weight", ("norm1",), shift=-1.0),
    Row("post_attention_layernorm.weight", ("post1",), shift=-1.0),
    Row("pre_feedforward_layernorm.weight", ("norm2",), shift=-1.0),
    Row("post_feedforward_layernorm.weight", ("post2",), shift=-1.0),
    *(row for row in _ATTENTION if row.name.endswith(("proj.weight", "proj.bias"))),
    Row("self_attn.q_norm.weight", ("q_norm",), shift=-1.0),
    Row("self_attn.k_norm.weight", ("k_norm",), shift=-1.0),
)
_PHI3_LAYER = (
    *_ATTENTION[:2],
    Row("self_attn.qkv_proj.weight", ("q", "k", "v")),
    Row("self_attn.o_proj.weight", ("o",)),
    Row("mlp.gate_up_proj.weight", ("gate", "up")),
    Row("mlp.down_proj.weight", ("down",)),
)
_GPT_OSS_EXPERTS = (
    Row("self_attn.sinks", ("sinks",)),
    Row("mlp.router.weight", ("router",)),
    Row("mlp.router.bias", ("router_b",)),
    Row("mlp.experts.gate_up_proj", ("e_gate", "e_up"), "alternating", transposed=True,
        stacked=True),
    Row("mlp.experts.gate_up_proj_bias", ("e_gate_b", "e_up_b"), "alternating", stacked=True),
    Row("mlp.experts.down_proj", ("e_down",), transposed=True, stacked=True),
    Row("mlp.experts.down_proj_bias", ("e_down_b",), stacked=True),
)  # fmt: skip
_DEEPSEEK_LAYER = (
    *_ATTENTION[:2],
    Row("self_attn.q_proj.weight", ("q",)),
    Row("self_attn.q_a_proj.weight", ("q_down",)),
    Row("self_attn.q_a_layernorm.weight", ("q_down_norm",)),
    Row("self_attn.q_b_proj.weight", ("q_up",)),
    Row("self_attn.kv_a_proj_with_mqa.weight", ("kv_down",)),
    Row("self_attn.kv_a_layernorm.weight", ("kv_down_norm",)),
    Row("self_attn.kv_b_proj.weight", ("kv_up",)),
    Row("self_attn.o_proj.weight", ("o",)),
    *_MLP,
    *_QWEN_EXPERTS,
    Row("mlp.gate.e_score_correction_bias", ("router_shift",)),
    *(Row(f"mlp.shared_experts.{p}_proj.weight", (f"s_{p}",)) for p in ("gate", "up", "down")),
)
_FALCON_TOP = (
    Row("transformer.word_embeddings.weight", ("embed",)),
    Row("transformer.ln_f.weight", ("final_norm",)),
    Row("transformer.ln_f.bias", ("final_norm_b",)),
    Row("lm_head.weight", ("head",)),
)
_FALCON_LAYER = tuple(
    row
    for kind, tail in (("weight", ""), ("bias", "_b"))
    for row in (
        Row(f"input_layernorm.{kind}", ("norm1" + tail,), when="ln_input"),
        Row(f"post_attention_layernorm.{kind}", ("norm2" + tail,), when="ln_input"),
        Row(f"ln_attn.{kind}", ("norm1" + tail,), when="ln_attn"),
        Row(f"ln_mlp.{kind}", ("norm2" + tail,), when="ln_attn"),
        Row(f"self_attention.query_key_value.{kind}",
            ("q" + tail, "k" + tail, "v" + tail), "interleaved"),
        Row(f"self_attention.dense.{kind}", ("o" + tail,)),
        Row(f"mlp.dense_h_to_4h.{kind}", ("fc1" + tail,)),
        Row(f"mlp.dense_4h_to_h.{kind}", ("fc2" + tail,)),
    )
)  # fmt: skip
_GPT2_TOP = (
    Row("transformer.wte.weight", ("embed",)),
    Row("transformer.wpe.weight", ("pos",)),
    Row("transformer.ln_f.weight", ("final_norm",)),
    Row("transformer.ln_f.bias", ("final_norm_b",)),
    Row("lm_head.weight", ("head",)),
)
_GPT2_LAYER = tuple(
    row
    for kind, tail, flip in (("weight", "", True), ("bias", "_b", False))
    for row in (
        Row(f"ln_1.{kind}", ("norm1" + tail,)),
        Row(f"ln_2.{kind}", ("norm2" + tail,)),
        Row(f"attn.c_attn.{kind}", ("q" + tail, "k" + tail, "v" + tail), transposed=flip),
        Row(f"attn.c_proj.{kind}", ("o" + tail,), transposed=flip),
        Row(f"mlp.c_fc.{kind}", ("fc1" + tail,), transposed=flip),
        Row(f"mlp.c_proj.{kind}", ("fc2" + tail,), transposed=flip),
    )
)
_NO_WEIGHTS = (
    r".*rotary_emb\.inv_freq",
    r".*\.attn(ention)?\.(bias|masked_bias)",
)


def _llama(name: str, layer: tuple[Row, ...]) -> Layout:
    return Layout(name, _TOP + rows("model.layers.{i}.", layer), _NO_WEIGHTS)


def _gemma(name: str) -> Layout:
    top = (_TOP[0], Row("model.norm.weight", ("final_norm",), shift=-1.0), _TOP[2])
    return Layout(name, top + rows("model.layers.{i}.", _SANDWICH + _MLP), _NO_WEIGHTS)


FAMILIES: Mapping[str, Layout] = {
    **{name: _llama(name, _ATTENTION + _MLP) for name in ("llama", "mistral", "qwen2", "qwen3")},
    "mixtral": _llama("mixtral", _ATTENTION + _MIXTRAL_EXPERTS),
    "qwen3_moe": _llama("qwen3_moe", _ATTENTION + _MLP + _QWEN_EXPERTS),
    "gpt_neox": Layout(
        "gpt_neox", _NEOX_TOP + rows("gpt_neox.layers.{i}.", _NEOX_LAYER), _NO_WEIGHTS
    ),
    "gemma2": _gemma("gemma2"),
    "gemma3_text": _gemma("gemma3_text"),
    "phi3": _llama("phi3", _PHI3_LAYER),
    "gpt_oss": _llama("gpt_oss", _ATTENTION + _GPT_OSS_EXPERTS),
    "deepseek_v3": _llama("deepseek_v3", _DEEPSEEK_LAYER),
    "falcon": Layout("falcon", _FALCON_TOP + rows("transformer.h.{i}.", _FALCON_LAYER), ()),
    "gpt2": Layout("gpt2", _GPT2_TOP + rows("transformer.h.{i}.", _GPT2_LAYER), _NO_WEIGHTS),
}


def family_names(family: str) -> dict[str, str]:
    """What `{embed}`, `{head}` and so on stand for in the tables of layouts that keep Hugging
    Face's outer modules."""
    table = FAMILIES[family].rows
    names = {row.roles[0]: row.name for row in table if "{i}" not in row.name}
    layer = next(row.name for row in table if "{i}" in row.name)
    return {**names, "layers": layer.split(".{i}")[0]}
