"""GPT-NeoX, Falcon, GPT-2, GPT-J, OPT, BLOOM, StarCoder 2 and Nemotron: norms with biases, an MLP
without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smckpt.translate.tables.families.llama import ATTENTION, NO_WEIGHTS, TOP
from smckpt.translate.tables.table import Family, pair, rows
from smckpt.translate.tables.table import LayoutRow as Row

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
