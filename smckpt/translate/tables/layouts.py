"""The built-in tensor-parallel layouts, and the registry of the user's own."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from smckpt.errors import UsageError
from smckpt.registry import Registry
from smckpt.translate.tables.families import family_of
from smckpt.translate.tables.table import ZERO_CENTRED, Family, TensorLayout, pair, predicting, rows
from smckpt.translate.tables.table import LayoutRow as Row

# Parts of names that no model of transformers has.
_TRANSFORMED = re.compile(
    r"\.layernorm_qkv\.|\.layernorm_mlp\.|self_attention\.linear_(qkv|proj)\.|\._extra_state"
    r"|decoder\.layers\.\d+\.mlp\.linear_fc\d\.|\.seq_layers\."
    r"|(^|\.)layers\.\d+\.attention\.(qkv_linear\.)?w[qkvo]\."
    r"|(^|\.)layers\.\d+\.sa_norm\.scale$"
)

_QKV, _QKV_B = ("q", "k", "v"), ("q_b", "k_b", "v_b")
_EXTRA_STATE = (r".*\._extra_state\d*", r".*rotary_emb\.inv_freq", r".*rotary_pos_emb\.inv_freq")

# Hugging Face's modules around another library's layers.
_OUTER = (
    Row("{embed}", ("embed",), "vocabulary", 0),
    Row("{embed_norm}", ("embed_norm",)),
    Row("{embed_norm_b}", ("embed_norm_b",)),
    Row("{pos}", ("pos",)),
    Row("{final_norm}", ("final_norm",)),
    Row("{final_norm_b}", ("final_norm_b",)),
    Row("{head}", ("head",), "vocabulary", 0),
    Row("{head_b}", ("head_b",), "vocabulary", 0),
)


def _te(name: str, qkv: tuple[Row, ...]) -> TensorLayout:
    """Transformer Engine's TransformerLayer."""
    layer = (
        Row("self_attention.layernorm_qkv.layer_norm_weight", ("norm1",)),
        Row("self_attention.layernorm_qkv.layer_norm_bias", ("norm1_b",)),
        *rows("self_attention.layernorm_qkv.", qkv),
        *pair("self_attention.proj", "o", tp=1),
        Row("self_attention.q_norm.weight", ("q_norm",)),
        Row("self_attention.k_norm.weight", ("k_norm",)),
        Row("layernorm_mlp.layer_norm_weight", ("norm2",)),
        Row("layernorm_mlp.layer_norm_bias", ("norm2_b",)),
        Row("layernorm_mlp.fc1_weight", ("gate", "up"), "per_rank", 0),
        Row("layernorm_mlp.fc1_bias", ("gate_b", "up_b"), "per_rank", 0),
        Row("layernorm_mlp.fc2_weight", ("down",), tp=1),
        Row("layernorm_mlp.fc2_bias", ("down_b",)),
        Row("layernorm_mlp.fc1_weight", ("fc1",), tp=0),
        Row("layernorm_mlp.fc1_bias", ("fc1_b",), tp=0),
        Row("layernorm_mlp.fc2_weight", ("fc2",), tp=1),
        Row("layernorm_mlp.fc2_bias", ("fc2_b",)),
    )
    table = _OUTER + rows("{layers}.{i}.", layer)
    return TensorLayout(name, table, _EXTRA_STATE, whole_groups=True)


def _te_fused(name: str, how: str) -> TensorLayout:
    return _te(name, (Row("weight", _QKV, how, 0), Row("bias", _QKV_B, how, 0)))


_TE_SPLIT = tuple(
    Row(f"{word}_{kind}", (role + tail,), tp=0)
    for word, role in (("query", "q"), ("key", "k"), ("value", "v"))
    for kind, tail in (("weight", ""), ("bias", "_b"))
)

_MCORE_TOP = (
    Row("embedding.word_embeddings.weight", ("embed",), "vocabulary", 0),
    Row("embedding.position_embeddings.weight", ("pos",)),
    *pair("decoder.final_layernorm", "final_norm"),
    Row("output_layer.weight", ("head",), "vocabulary", 0),
    # GPTModel has neither of these. The bias is called so in Megatron-core's BertModel, the norm in
    # MindSpeed-LLM and BigScience's Megatron, which trained BLOOM.
    Row("output_layer.bias", ("head_b",), "vocabulary", 0),
    *pair("embedding.word_embeddings.norm", "embed_norm"),
)
_MCORE_LAYER = (
    Row("self_attention.linear_qkv.weight", _QKV, "interleaved", 0, when="not gated"),
    Row("self_attention.linear_qkv.weight", ("q", "q_gate", "k", "v"), "interleaved", 0),
    Row("self_attention.linear_qkv.bias", _QKV_B, "interleaved", 0),
    *pair("self_attention.linear_proj", "o", tp=1),
    Row("self_attention.q_layernorm.weight", ("q_norm",)),
    Row("self_attention.k_layernorm.weight", ("k_norm",)),
    *pair("mlp.linear_fc1", "gate", "up", how="per_rank", tp=0),
    *pair("mlp.linear_fc2", "down", tp=1),
    *pair("mlp.linear_fc1", "fc1", tp=0),
    *pair("mlp.linear_fc2", "fc2", tp=1),
    Row("self_attention.core_attention.softmax_offset", ("sinks",), tp=0),
    Row("self_attention.linear_q_proj.weight", ("q",), tp=0, when="latent"),
    Row("self_attention.linear_q_up_proj.weight", ("q_up",), tp=0),
    Row("self_attention.linear_kv_up_proj.weight", ("kv_up",), tp=0),
    *pair("pre_mlp_layernorm", "norm2", when="sparse"),
    *pair("mlp.router", "router"),
    Row("mlp.router.expert_bias", ("router_shift",)),
    Row("mlp.shared_experts.linear_fc1.weight", ("s_gate", "s_up"), "per_rank", 0),
    Row("mlp.shared_experts.linear_fc2.weight", ("s_down",), tp=1),
    Row("mlp.shared_experts.gate_weight", ("s_router",)),
    # the gated delta net
    Row("self_attention.in_proj.weight", ("l_q", "l_k", "l_v", "l_gate", "l_beta", "l_alpha"),
        "per_rank", 0),
    Row("self_attention.conv1d.weight", ("l_conv_q", "l_conv_k", "l_conv_v"), "per_rank", 0),
    Row("self_attention.A_log", ("l_decay",), tp=0),
    Row("self_attention.dt_bias", ("l_step",), tp=0),
    Row("self_attention.out_norm.weight", ("l_norm",)),
    Row("self_attention.out_proj.weight", ("l_o",), tp=1),
)  # fmt: skip
# of a layer that predicts further tokens, around a layer like the others
_MCORE_FURTHER = (
    Row("enorm.weight", ("mtp_embed_norm",)),
    Row("hnorm.weight", ("mtp_hidden_norm",)),
    Row("eh_proj.weight", ("mtp_join",), tp=0),
    Row("final_layernorm.weight", ("mtp_norm",)),
)


def _experts(fc1: str, fc2: str) -> tuple[Row, ...]:
    """One row for each kind of tensor and expert: names with {kind} and {e}."""
    return (
        Row(fc1.replace("{kind}", "weight"), ("e_gate", "e_up"), "per_rank", 0),
        Row(fc1.replace("{kind}", "bias"), ("e_gate_b", "e_up_b"), "per_rank", 0),
        Row(fc2.replace("{kind}", "weight"), ("e_down",), tp=1),
        Row(fc2.replace("{kind}", "bias"), ("e_down_b",)),
    )


_GROUPED = _experts("mlp.experts.linear_fc1.{kind}{e}", "mlp.experts.linear_fc2.{kind}{e}")
_SEQUENTIAL = _experts(
    "mlp.experts.local_experts.{e}.linear_fc1.{kind}",
    "mlp.experts.local_experts.{e}.linear_fc2.{kind}",
)
_LEGACY = (
    Row("mlp.experts.weight1", ("e_gate", "e_up"), "per_rank", 0, transposed=True, stacked=True,
        folded="columns"),
    Row("mlp.experts.weight2", ("e_down",), tp=1, transposed=True, stacked=True, folded="rows"),
)  # fmt: skip
# Each rank has the narrow layers of latent attention whole in Transformer Engine's spec. The local
# spec cuts them.
_MCORE_TE_OWN = (
    Row("self_attention.linear_q_down_proj.weight", ("q_down",)),
    Row("self_attention.linear_kv_down_proj.weight", ("kv_down",)),
    Row("self_attention.linear_qkv.layer_norm_weight", ("norm1",), when="not latent, not linear"),
    Row("self_attention.in_proj.layer_norm_weight", ("norm1",), when="linear"),
    Row("input_layernorm.weight", ("norm1",), when="latent"),
    Row("self_attention.linear_q_up_proj.layer_norm_weight", ("q_down_norm",)),
    Row("self_attention.linear_kv_up_proj.layer_norm_weight", ("kv_down_norm",)),
    Row("self_attention.linear_proj.post_layernorm.weight", ("post1",)),
    Row("mlp.linear_fc2.post_layernorm.weight", ("post2",)),
    Row("self_attention.linear_qkv.layer_norm_bias", ("norm1_b",)),
    Row("mlp.linear_fc1.layer_norm_weight", ("norm2",), when="dense"),
    Row("mlp.linear_fc1.layer_norm_bias", ("norm2_b",), when="dense"),
)
_MCORE_LOCAL_OWN = (
    Row("self_attention.linear_q_down_proj.weight", ("q_down",), tp=0),
    Row("self_attention.linear_kv_down_proj.weight", ("kv_down",), tp=0),
    *pair("input_layernorm", "norm1"),
    Row("self_attention.q_layernorm.weight", ("q_down_norm",)),
    Row("self_attention.kv_layernorm.weight", ("kv_down_norm",)),
    *pair("pre_mlp_layernorm", "norm2", when="dense"),
)


# Vision towers as mbridge names and cuts them: SigLIP's, and Qwen2.5's, whose outputs are merged.
_MCORE_TOWER = (
    Row("vision_model.patch_embed.proj.weight", ("patch_3d",)),
    Row("vision_model.decoder.final_layernorm.weight", ("final_norm",), when="spatial_merge_size"),
    *rows(
        "vision_model.projection.encoder.",
        (
            *pair("linear_fc1", "merge1", tp=0),
            Row("linear_fc2.weight", ("merge2",), tp=1, when="spatial_merge_size"),
            Row("linear_fc2.bias", ("merge2_b",)),
        ),
    ),
    Row("vision_model.conv1.weight", ("patch_2d",)),
    Row("vision_model.conv1.bias", ("patch_b",)),
    Row("vision_model.position_embeddings.weight", ("pos",)),
    Row("vision_model.ln_post.weight", ("final_norm",), when="not spatial_merge_size"),
    Row("vision_model.ln_post.bias", ("final_norm_b",)),
    Row("vision_projection.mm_input_projection.layer_norm_weight", ("merge_norm",)),
    Row("vision_projection.mm_input_projection.weight", ("merge2",), tp=0,
        when="not spatial_merge_size"),
    *rows("vision_model.decoder.layers.{i}.", _MCORE_LAYER + _MCORE_TE_OWN),
)  # fmt: skip


def _mcore(name: str, own: tuple[Row, ...], experts: tuple[Row, ...]) -> TensorLayout:
    layer = _MCORE_LAYER + own + experts
    further = predicting("mtp.layers.{m}.transformer_layer.", layer)
    further += predicting("mtp.layers.{m}.", _MCORE_FURTHER)
    table = _MCORE_TOP + rows("decoder.layers.{i}.", layer) + further
    return TensorLayout(name, rows("{language}", table), _EXTRA_STATE)


_MCORE_LANGUAGE = _mcore("", _MCORE_TE_OWN, ()).renamed(
    "mcore_te_tower",
    (".self_attention.linear_proj.post_layernorm.", ".post_attention_layernorm."),
    (".mlp.linear_fc2.post_layernorm.", ".post_feedforward_layernorm."),
)
_MCORE_WITH_TOWER = replace(
    _MCORE_LANGUAGE,
    rows=_MCORE_LANGUAGE.rows + rows("", _MCORE_TOWER, "vision"),
    families=frozenset({"qwen2_5_vl", "gemma3"}),
)


_META = TensorLayout(
    "meta",
    (
        Row("tok_embeddings.weight", ("embed",), "vocabulary", 0),
        Row("norm.weight", ("final_norm",)),
        Row("output.weight", ("head",), "vocabulary", 0),
        *rows(
            "layers.{i}.",
            (
                Row("attention_norm.weight", ("norm1",)),
                Row("ffn_norm.weight", ("norm2",)),
                *pair("attention.wq", "q", how="rotary", tp=0),
                *pair("attention.wk", "k", how="rotary", tp=0),
                *pair("attention.wv", "v", tp=0),
                *pair("attention.wo", "o", tp=1),
                Row("feed_forward.w1.weight", ("gate",), tp=0),
                Row("feed_forward.w3.weight", ("up",), tp=0),
                Row("feed_forward.w2.weight", ("down",), tp=1),
            ),
        ),
    ),
    (r"rope\.freqs", r"freqs_cis", r".*rotary_emb\.inv_freq"),
)


def _rotated(name: str, role: str, *halves: str) -> tuple[Row, ...]:
    """Weight and bias in Meta's order; in Hugging Face's for the families `halves`."""
    return tuple(
        row
        for kind, tail in (("weight", ""), ("bias", "_b"))
        for row in (
            Row(f"{name}.{kind}", (role + tail,), "rotary", 0,
                when=", ".join(f"not {family}" for family in ("latent", *halves))),
            *(Row(f"{name}.{kind}", (role + tail,), tp=0, when=family) for family in halves),
        )
    )  # fmt: skip


# since its 0.3; before, torchtitan had Meta's names
_TITAN_HALVES = ("qwen3", "qwen3_moe", "gpt_oss")  # torchtitan's CosSinRoPE
_TITAN_EXPERTS = rows(
    "moe.routed_experts.inner_experts.",
    (
        Row("w1_EFD", ("e_gate",), tp=0, stacked=True, when="not gpt_oss"),
        Row("w3_EFD", ("e_up",), tp=0, stacked=True, when="not gpt_oss"),
        Row("w2_EDF", ("e_down",), tp=1, stacked=True, when="not gpt_oss"),
        Row("mlp1_weight_EGD", ("e_gate", "e_up"), "alternating", 0, stacked=True, when="gpt_oss"),
        Row("mlp1_bias_EG", ("e_gate_b", "e_up_b"), "alternating", 0, stacked=True),
        Row("mlp2_weight_EDF", ("e_down",), tp=1, stacked=True, when="gpt_oss"),
        Row("mlp2_bias_ED", ("e_down_b",), stacked=True),
    ),
)
_TORCHTITAN = TensorLayout(
    "torchtitan",
    (
        Row("tok_embeddings.weight", ("embed",), "vocabulary", 0),
        Row("norm.weight", ("final_norm",)),
        Row("lm_head.weight", ("head",), "vocabulary", 0),
        *rows(
            "layers.{i}.",
            (
                Row("attention_norm.weight", ("norm1",)),
                Row("ffn_norm.weight", ("norm2",)),
                *_rotated("attention.qkv_linear.wq", "q", *_TITAN_HALVES),
                *_rotated("attention.qkv_linear.wk", "k", *_TITAN_HALVES),
                *pair("attention.qkv_linear.wv", "v", tp=0),
                Row("attention.q_norm.weight", ("q_norm",)),
                Row("attention.k_norm.weight", ("k_norm",)),
                Row("attention.sinks", ("sinks",), tp=0),
                Row("attention.wq.weight", ("q",), tp=0, when="latent"),
                Row("attention.wq_a.weight", ("q_down",)),
                Row("attention.q_norm.weight", ("q_down_norm",)),
                Row("attention.wq_b.weight", ("q_up",), tp=0),
                Row("attention.wkv_a.weight", ("kv_down",)),
                Row("attention.kv_norm.weight", ("kv_down_norm",)),
                Row("attention.wkv_b.weight", ("kv_up",), tp=0),
                *pair("attention.wo", "o", tp=1),
                Row("feed_forward.w1.weight", ("gate",), tp=0),
                Row("feed_forward.w3.weight", ("up",), tp=0),
                Row("feed_forward.w2.weight", ("down",), tp=1),
                *pair("moe.router.gate", "router"),
                Row("moe.expert_bias_E", ("router_shift",)),
                Row("moe.shared_experts.w1.weight", ("s_gate",), tp=0),
                Row("moe.shared_experts.w3.weight", ("s_up",), tp=0),
                Row("moe.shared_experts.w2.weight", ("s_down",), tp=1),
                *_TITAN_EXPERTS,
            ),
        ),
    ),
    # of families whose router has no place for it, as torchtitan's own adapters leave it out
    (*_META.drop, r"layers\.\d+\.moe\.expert_bias_E"),
    families=frozenset({"llama", "mistral", "deepseek_v2", "deepseek_v3", *_TITAN_HALVES}),
)

_TUNE_HALVES = ("qwen2", "phi3")
_TORCHTUNE = TensorLayout(
    "torchtune",
    (
        Row("tok_embeddings.weight", ("embed",), "vocabulary", 0),
        Row("norm.scale", ("final_norm",), when="not gemma2"),
        Row("norm.rms_norm.scale", ("final_norm",), when="gemma2"),
        Row("output.weight", ("head",), "vocabulary", 0),
        *rows(
            "layers.{i}.",
            (
                Row("sa_norm.scale", ("norm1",)),
                Row("mlp_norm.scale", ("norm2",), when="not gemma2"),
                # as torchtune's converter has them; its layer uses them the other way round
                Row("mlp_norm.scale", ("post2",)),
                Row("mlp_scale.scale", ("norm2",), when="gemma2"),
                Row("sa_scale.scale", ("post1",)),
                *_rotated("attn.q_proj", "q", *_TUNE_HALVES),
                *_rotated("attn.k_proj", "k", *_TUNE_HALVES),
                *pair("attn.v_proj", "v", tp=0),
                Row("attn.output_proj.weight", ("o",), tp=1),
                Row("mlp.w1.weight", ("gate",), tp=0),
                Row("mlp.w3.weight", ("up",), tp=0),
                Row("mlp.w2.weight", ("down",), tp=1),
            ),
        ),
    ),
    families=frozenset({"llama", "mistral", "gemma", "gemma2", *_TUNE_HALVES}),
)

_SMP_V1 = TensorLayout(
    "smp_v1",
    (
        Row("word_embedding.weight", ("embed",), "vocabulary", 0),
        *pair("layernorm", "final_norm"),
        Row("lm_head.weight", ("head",), "vocabulary", 0),
        *rows(
            "transformer.seq_layers.{i}.",
            (
                *pair("attention.pre_layernorm", "norm1"),
                *(
                    Row(f"attention.{word}.{kind}", (role + tail,), tp=0)
                    for word, role in (("query", "q"), ("key", "k"), ("value", "v"))
                    for kind, tail in (("weight", ""), ("bias", "_b"))
                ),
                *pair("attention.dense", "o", tp=1),
                *pair("output.pre_layernorm", "norm2"),
                *pair("output.dense1", "fc1", tp=0),
                *pair("output.dense2", "fc2", tp=1),
            ),
        ),
    ),
    (r".*\.(masked_)?bias_mask", r".*\.rotary_emb\.inv_freq"),
    families=frozenset({"gpt_neox"}),
)

_WITH_TOWER = "mcore_te"  # its models may have a vision tower, as in Megatron Bridge
_BUILT_IN = {
    layout.name: layout
    for layout in (
        _te("te_split", _TE_SPLIT),
        _mcore(_WITH_TOWER, _MCORE_TE_OWN, _GROUPED),
        _mcore("mcore_te_legacy", _MCORE_TE_OWN, _LEGACY),
        _mcore("mcore_te_sequential", _MCORE_TE_OWN, _SEQUENTIAL),
        _mcore("mcore_local", _MCORE_LOCAL_OWN, _SEQUENTIAL),
        _MCORE_WITH_TOWER,
        _te_fused("te_fused", "per_rank"),
        _te_fused("te_fused_interleaved", "interleaved"),
        _META,
        _TORCHTITAN,
        _TORCHTUNE,
        _SMP_V1,
    )
}
_LAYOUTS = Registry("layout", TensorLayout, "smckpt.layouts", _BUILT_IN)
_LIVE = "hf_tp"  # transformers' tensor parallelism; each family has its own


def register_layout(layout: TensorLayout) -> None:
    """Register `layout` for the life of the process. It is found from tensor names, like the
    built-in layouts, and by its name.

    An installed package registers one through an entry point of the group `smckpt.layouts`, named
    as the layout.

    Raises:
        UsageError: another layout has this name.
    """
    if layout.name == _LIVE:
        raise UsageError(f"the layout {_LIVE!r} exists already", remedy="give yours another name")
    _LAYOUTS.register(layout.name, layout)


def layouts_of(family: Family) -> dict[str, TensorLayout]:
    """The layouts that a family may have, with the family's names filled in.

    If a family's norms are zero-centred on disk, they are zero-centred in all layouts.
    """
    shifted = family.zero_centred
    live = {} if family.live is None else {_LIVE: family.live}
    known = {
        name: replace(layout.zero_centred(), name=name) if shifted and name in _BUILT_IN else layout
        for name, layout in _LAYOUTS.all().items()
    }
    # The family's towers have Hugging Face's own modules, whole on each rank. What is a transposed
    # parameter there is a linear layer of Megatron's in the bridge.
    towers = tuple(
        replace(row, transposed=False, tp=0) if row.transposed else row for row in family.tower_rows
    )
    plain = known[_WITH_TOWER]
    named = replace(plain, rows=towers).renamed(plain.name, *family.in_bridge)
    known[_WITH_TOWER] = replace(plain, rows=plain.rows + named.rows)
    return {
        name: _resolved(layout, family)
        for name, layout in {**live, **known}.items()
        if layout.families is None or family.name in layout.families
    }


def get_layout(layout: str | TensorLayout, family: str | Family) -> TensorLayout:
    """The layout of that name for a family. The suffix `_zero_centred` means that norms are stored
    minus one, which names do not show.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    family = family_of(family) if isinstance(family, str) else family
    if isinstance(layout, TensorLayout):
        return _resolved(layout, family)
    found = layouts_of(family)
    plain = str(layout).removesuffix(ZERO_CENTRED)
    if plain != layout and plain in found and not family.zero_centred:
        return found[plain].zero_centred()
    if layout not in found:
        raise UsageError(
            f"layout={layout!r} is not known for {family.name}",
            remedy=f"pass one of {', '.join(sorted(found))}, or a TensorLayout of your own",
        )
    return found[layout]


def looks_transformed(names: Collection[str]) -> bool:
    """Whether some names belong to a tensor-parallel layout other than transformers' own."""
    return any(_TRANSFORMED.search(name) for name in names)


def _resolved(layout: TensorLayout, family: Family) -> TensorLayout:
    out = []
    for row in layout.rows:
        name = row.name
        for word, value in family.words.items():
            name = name.replace(f"{{{word}}}", value)
        if "{" not in re.sub(r"\{[iem]\}", "", name):
            out.append(replace(row, name=name))  # otherwise the family has no such tensor
    return replace(layout, rows=tuple(out))
