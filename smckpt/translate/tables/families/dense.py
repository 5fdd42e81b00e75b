"""Models without experts: Llama and families with its modules, with a norm before attention and one
before a gated MLP; and GPT-NeoX, Falcon, GPT-2, GPT-J, OPT, BLOOM, StarCoder 2 and Nemotron, with
biases of norms and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smckpt.translate.tables.table import Family, pair, rows
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


# -- an MLP without a gate -------------------------------------------------------------------------

_OLDER_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_NEOX_TOP = (
    Row("gpt_neox.embed_in.weight", ("embed",)),
    *pair("gpt_neox.final_layer_norm", "final_norm"),
    Row("embed_out.weight", ("head",)),
)
_NEOX = (
    *pair("input_layernorm", "norm1"),
    *pair("post_attention_layernorm", "norm2"),
    Row("attention.query_key_value.weight", ("q", "k", "v"), "interleaved"),
    Row("attention.query_key_value.bias", ("q_b", "k_b", "v_b"), "interleaved",
        when="attention_bias"),
    Row("attention.dense.weight", ("o",)),
    Row("attention.dense.bias", ("o_b",), when="attention_bias"),
    *pair("mlp.dense_h_to_4h", "fc1"),
    *pair("mlp.dense_4h_to_h", "fc2"),
)  # fmt: skip
_NORM_BIAS = Row("model.norm.bias", ("final_norm_b",))
_FALCON_TOP = (
    Row("transformer.word_embeddings.weight", ("embed",)),
    *pair("transformer.ln_f", "final_norm"),
    Row("lm_head.weight", ("head",)),
)
_FALCON = tuple(
    row
    for kind, tail, linear in (("weight", "", None), ("bias", "_b", "bias"))
    for row in (
        Row(f"input_layernorm.{kind}", ("norm1" + tail,), when="not ln_attn"),
        Row(f"post_attention_layernorm.{kind}", ("norm2" + tail,), when="two_norms"),
        Row(f"ln_attn.{kind}", ("norm1" + tail,), when="ln_attn"),
        Row(f"ln_mlp.{kind}", ("norm2" + tail,), when="ln_attn"),
        Row(f"self_attention.query_key_value.{kind}",
            ("q" + tail, "k" + tail, "v" + tail), "interleaved", when=linear),
        Row(f"self_attention.dense.{kind}", ("o" + tail,), when=linear),
        Row(f"mlp.dense_h_to_4h.{kind}", ("fc1" + tail,), when=linear),
        Row(f"mlp.dense_4h_to_h.{kind}", ("fc2" + tail,), when=linear),
    )
)  # fmt: skip
_GPT2_TOP = (
    Row("transformer.wte.weight", ("embed",)),
    Row("transformer.wpe.weight", ("pos",)),
    *pair("transformer.ln_f", "final_norm"),
    Row("lm_head.weight", ("head",)),
)
_GPT2 = tuple(
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
_GPTJ_TOP = (
    Row("transformer.wte.weight", ("embed",)),
    *_GPT2_TOP[2:],
    Row("lm_head.bias", ("head_b",)),
)
_GPTJ = (  # attention and the MLP run side by side, after one norm
    *pair("ln_1", "norm1"),
    *(Row(f"attn.{part}_proj.weight", (part,)) for part in "qkv"),
    Row("attn.out_proj.weight", ("o",)),
    *pair("mlp.fc_in", "fc1"),
    *pair("mlp.fc_out", "fc2"),
)
_NORMED = "do_layer_norm_before, layer_norm_elementwise_affine"
_OPT_TOP = (
    Row("model.decoder.embed_tokens.weight", ("embed",)),
    Row("model.decoder.embed_positions.weight", ("pos",)),
    *(
        Row(f"model.decoder.final_layer_norm.{kind}", ("final_norm" + tail,),
            when=f"{_NORMED}, not _remove_final_layer_norm")
        for kind, tail in (("weight", ""), ("bias", "_b"))
    ),
    Row("lm_head.weight", ("head",)),
)  # fmt: skip
_OPT = tuple(
    row
    for kind, tail, linear in (("weight", "", None), ("bias", "_b", "enable_bias"))
    for row in (
        Row(f"self_attn_layer_norm.{kind}", ("norm1" + tail,), when=_NORMED),
        Row(f"final_layer_norm.{kind}", ("norm2" + tail,), when=_NORMED),
        *(Row(f"self_attn.{part}_proj.{kind}", (part + tail,), when=linear) for part in "qkv"),
        Row(f"self_attn.out_proj.{kind}", ("o" + tail,), when=linear),
        Row(f"fc1.{kind}", ("fc1" + tail,), when=linear),
        Row(f"fc2.{kind}", ("fc2" + tail,), when=linear),
    )
)
_BLOOM_TOP = (
    _FALCON_TOP[0],
    *pair("transformer.word_embeddings_layernorm", "embed_norm"),
    *_FALCON_TOP[1:],
)
_BLOOM = tuple(
    row
    for kind, tail in (("weight", ""), ("bias", "_b"))
    for row in (
        Row(f"input_layernorm.{kind}", ("norm1" + tail,)),
        Row(f"post_attention_layernorm.{kind}", ("norm2" + tail,)),
        Row(f"self_attention.query_key_value.{kind}",
            ("q" + tail, "k" + tail, "v" + tail), "interleaved"),
        Row(f"self_attention.dense.{kind}", ("o" + tail,)),
        Row(f"mlp.dense_h_to_4h.{kind}", ("fc1" + tail,)),
        Row(f"mlp.dense_4h_to_h.{kind}", ("fc2" + tail,)),
    )
)  # fmt: skip
_STARCODER2 = tuple(
    row
    for kind, tail, linear in (("weight", "", None), ("bias", "_b", "use_bias"))
    for row in (
        Row(f"input_layernorm.{kind}", ("norm1" + tail,)),
        Row(f"post_attention_layernorm.{kind}", ("norm2" + tail,)),
        *(Row(f"self_attn.{part}_proj.{kind}", (part + tail,), when=linear) for part in "qkvo"),
        Row(f"mlp.c_fc.{kind}", ("fc1" + tail,), when=linear),
        Row(f"mlp.c_proj.{kind}", ("fc2" + tail,), when=linear),
    )
)
# The weights of Nemotron's norms are stored minus one.
_NEMOTRON = (
    *(
        Row(f"{name}.{kind}", (role + tail,), shift=shift)
        for kind, tail, shift in (("weight", "", -1.0), ("bias", "_b", 0.0))
        for name, role in (("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2"))
    ),
    *ATTENTION,
    Row("mlp.up_proj.weight", ("fc1",)),
    Row("mlp.up_proj.bias", ("fc1_b",), when="mlp_bias"),
    Row("mlp.down_proj.weight", ("fc2",)),
    Row("mlp.down_proj.bias", ("fc2_b",), when="mlp_bias"),
)


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": config.get("n_inner") or 4 * config["hidden_size"]}


def _opt(config: Mapping[str, Any]) -> dict[str, Any]:
    """Two rows of positions lie before the first token's."""
    count = config["max_position_embeddings"]
    return {"max_position_embeddings": count + 2} if isinstance(count, int) else {}


def _falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    """Falcon's three forms: parallel attention and MLP with a norm each (40B), parallel with a
    shared norm (7B), or one after the other with a norm before each (RW)."""
    heads, new = config["num_attention_heads"], config.get("new_decoder_architecture")
    if new:
        groups = config.get("num_kv_heads") or heads
        norms = "one" if config.get("num_ln_in_parallel_attn") == 1 else "ln_attn"
    else:
        groups = 1 if config.get("multi_query", True) else heads
        norms = "one" if config.get("parallel_attn", True) else "two"
    return {
        "num_key_value_heads": groups,
        "intermediate_size": config.get("ffn_hidden_size") or 4 * config["hidden_size"],
        "ln_attn": norms == "ln_attn",
        "two_norms": norms == "two",
    }


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
    Family(
        "gpt_neox", _NEOX_TOP + rows("gpt_neox.layers.{i}.", _NEOX), NO_WEIGHTS,
        defaults={"attention_bias": True},
    ),
    Family(
        "starcoder2", (*TOP, _NORM_BIAS, *rows("model.layers.{i}.", _STARCODER2)), NO_WEIGHTS,
        defaults={"use_bias": True, "tie_word_embeddings": True},
    ),
    Family(
        "nemotron",
        (TOP[0], replace(TOP[1], shift=-1.0), TOP[2], _NORM_BIAS,
         *rows("model.layers.{i}.", _NEMOTRON)),
        NO_WEIGHTS,
    ),
    Family(
        "falcon", _FALCON_TOP + rows("transformer.h.{i}.", _FALCON), (),
        keys=_OLDER_KEYS, defaults={"tie_word_embeddings": True}, derive=_falcon, hf_tp=None,
    ),
    Family(
        "gpt2", _GPT2_TOP + rows("transformer.h.{i}.", _GPT2), NO_WEIGHTS,
        keys=_OLDER_KEYS, defaults={"tie_word_embeddings": True}, derive=_gpt2, hf_tp=None,
    ),
    Family(
        "gptj", _GPTJ_TOP + rows("transformer.h.{i}.", _GPTJ), NO_WEIGHTS,
        keys=_OLDER_KEYS, derive=_gpt2, hf_tp=None,
    ),
    Family(
        "opt", _OPT_TOP + rows("model.decoder.layers.{i}.", _OPT),
        keys={"intermediate_size": "ffn_dim"},
        defaults={
            "tie_word_embeddings": True, "enable_bias": True, "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True, "max_position_embeddings": 2048,
        },
        derive=_opt, hf_tp=None,
    ),
    Family(
        "bloom", _BLOOM_TOP + rows("transformer.h.{i}.", _BLOOM),
        keys={"hidden_size": "n_embed", "num_hidden_layers": "n_layer",
              "num_attention_heads": "n_head"},
        defaults={"tie_word_embeddings": True},
        derive=lambda config: {"intermediate_size": 4 * config["hidden_size"]}, hf_tp=None,
    ),
)  # fmt: skip
