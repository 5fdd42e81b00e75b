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
_NO_WEIGHTS = (
    r".*rotary_emb\.inv_freq",
    r".*\.attention\.(bias|masked_bias)",
)


def _llama(name: str, layer: tuple[Row, ...]) -> Layout:
    return Layout(name, _TOP + rows("model.layers.{i}.", layer), _NO_WEIGHTS)


FAMILIES: Mapping[str, Layout] = {
    **{name: _llama(name, _ATTENTION + _MLP) for name in ("llama", "mistral", "qwen2", "qwen3")},
    "mixtral": _llama("mixtral", _ATTENTION + _MIXTRAL_EXPERTS),
    "qwen3_moe": _llama("qwen3_moe", _ATTENTION + _MLP + _QWEN_EXPERTS),
    "gpt_neox": Layout(
        "gpt_neox", _NEOX_TOP + rows("gpt_neox.layers.{i}.", _NEOX_LAYER), _NO_WEIGHTS
    ),
}


def family_names(family: str) -> dict[str, str]:
    """What `{embed}`, `{head}` and so on stand for in the tables of layouts that keep Hugging
    Face's outer modules."""
    table = FAMILIES[family].rows
    names = {row.roles[0]: row.name for row in table if "{i}" not in row.name}
    layer = next(row.name for row in table if "{i}" in row.name)
    return {**names, "layers": layer.split(".{i}")[0]}
