"""Llama and families with its modules: a norm before attention, and one before a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from smckpt.translate.tables.table import Family, rows
from smckpt.translate.tables.table import LayoutRow as Row

NO_WEIGHTS = (r".*rotary_emb\.inv_freq", r".*\.att(entio)?n\.(bias|masked_bias)")

TOP = (
    Row("model.embed_tokens.weight", ("embed",)),
    Row("model.norm.weight", ("final_norm",)),
    Row("lm_head.weight", ("head",)),
)
NORMS = (
    Row("input_layernorm.weight", ("norm1",)),
    Row("post_attention_layernorm.weight", ("norm2",)),
)
ATTENTION = (
    *(Row(f"self_attn.{part}_proj.weight", (part,)) for part in "qkvo"),
    *(Row(f"self_attn.{part}_proj.bias", (f"{part}_b",), when="attention_bias") for part in "qkvo"),
)
DENSE_MLP = tuple(
    Row(f"mlp.{part}_proj.{kind}", (part + tail,), when=when)
    for part in ("gate", "up", "down")
    for kind, tail, when in (("weight", "", "dense"), ("bias", "_b", "dense, mlp_bias"))
)
HEAD_NORMS = (
    Row("self_attn.q_norm.weight", ("q_norm",)),
    Row("self_attn.k_norm.weight", ("k_norm",)),
)
WIDE_NORMS = (  # over all heads at once
    Row("self_attn.q_norm.weight", ("q_norm_all",)),
    Row("self_attn.k_norm.weight", ("k_norm_all",)),
)
QKV_BIASES = (  # of queries, keys and values alone
    *ATTENTION[:4],
    *(Row(f"self_attn.{part}_proj.bias", (f"{part}_b",), when="attention_bias") for part in "qkv"),
)
_QKV_BIASES = (
    *ATTENTION[:4],
    *(Row(f"self_attn.{part}_proj.bias", (f"{part}_b",)) for part in "qkv"),
    Row("self_attn.o_proj.bias", ("o_b",), when="attention_bias"),
)
_FUSED = (
    Row("self_attn.qkv_proj.weight", ("q", "k", "v")),
    Row("self_attn.o_proj.weight", ("o",)),
    Row("mlp.gate_up_proj.weight", ("gate", "up")),
    Row("mlp.down_proj.weight", ("down",)),
)
# OLMo 2
_NORMS_AFTER = (
    Row("post_attention_layernorm.weight", ("post1",)),
    Row("post_feedforward_layernorm.weight", ("post2",)),
)
_GLM_NORMS = (
    Row("input_layernorm.weight", ("norm1",)),
    Row("post_self_attn_layernorm.weight", ("post1",)),
    Row("post_attention_layernorm.weight", ("norm2",)),
    Row("post_mlp_layernorm.weight", ("post2",)),
)
# Gemma 2 and 3: norms before and after each block. All norms are stored minus one.
_GEMMA_TOP = (TOP[0], Row("model.norm.weight", ("final_norm",), shift=-1.0), TOP[2])
_SANDWICH = (
    Row("input_layernorm.weight", ("norm1",), shift=-1.0),
    Row("post_attention_layernorm.weight", ("post1",), shift=-1.0),
    Row("pre_feedforward_layernorm.weight", ("norm2",), shift=-1.0),
    Row("post_feedforward_layernorm.weight", ("post2",), shift=-1.0),
)
_GEMMA_HEAD_NORMS = (
    Row("self_attn.q_norm.weight", ("q_norm",), shift=-1.0),
    Row("self_attn.k_norm.weight", ("k_norm",), shift=-1.0),
)
# Cohere: one norm before attention and the MLP, which run side by side.
_COHERE_HEAD_NORMS = (
    Row("self_attn.q_norm.weight", ("q_norm_each",), when="use_qk_norm"),
    Row("self_attn.k_norm.weight", ("k_norm_each",), when="use_qk_norm"),
)
_TIED = {"tie_word_embeddings": True}


def _llama(name: str, *layer: Row) -> Family:
    return Family(name, TOP + rows("model.layers.{i}.", layer), NO_WEIGHTS)


def _gemma(name: str, norms: tuple[Row, ...], *layer: Row) -> Family:
    table = _GEMMA_TOP + rows("model.layers.{i}.", (*norms, *ATTENTION, *DENSE_MLP, *layer))
    return Family(name, table, NO_WEIGHTS, defaults=_TIED)


def _cohere(name: str, *layer: Row) -> Family:
    """`derive`: rotated pairs are side by side in the released files, as in Meta's order."""
    made = _llama(name, NORMS[0], *ATTENTION, *layer, *DENSE_MLP)
    return replace(made, defaults=_TIED, derive=lambda _: {"partial_rotary_factor": 0})


FAMILIES = (
    _llama("llama", *NORMS, *ATTENTION, *DENSE_MLP),
    _llama("mistral", *NORMS, *ATTENTION, *DENSE_MLP),
    _llama("qwen2", *NORMS, *_QKV_BIASES, *DENSE_MLP),
    _llama("qwen3", *NORMS, *ATTENTION, *HEAD_NORMS, *DENSE_MLP),
    _llama("phi3", *NORMS, *_FUSED),
    _llama("granite", *NORMS, *ATTENTION, *DENSE_MLP),
    replace(_llama("smollm3", *NORMS, *ATTENTION, *DENSE_MLP), defaults=_TIED),
    _llama("olmo2", *_NORMS_AFTER, *ATTENTION, *WIDE_NORMS, *DENSE_MLP),
    _llama("glm4", *_GLM_NORMS, *QKV_BIASES, *_FUSED[2:]),
    _gemma("gemma", tuple(replace(row, shift=-1.0) for row in NORMS)),
    _gemma("gemma2", _SANDWICH),
    _gemma("gemma3_text", _SANDWICH, *_GEMMA_HEAD_NORMS),
    _cohere("cohere", *_COHERE_HEAD_NORMS),
    _cohere("cohere2"),
)
