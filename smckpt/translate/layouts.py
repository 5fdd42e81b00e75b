"""The source layouts: tables against the hub's roles, and the user's own beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from smckpt.errors import UsageError
from smckpt.translate.hub import FAMILIES, family_names
from smckpt.translate.table import ZERO_CENTRED, Layout, Row, rows

__all__ = ["LAYOUTS", "get_layout", "layouts_of", "register_layout"]

_QKV, _QKV_B = ("q", "k", "v"), ("q_b", "k_b", "v_b")
_EXTRA_STATE = (r".*\._extra_state\d*", r".*rotary_emb\.inv_freq", r".*rotary_pos_emb\.inv_freq")

# Hugging Face's modules around layers of another kind.
_OUTER = (
    Row("{embed}", ("embed",), "vocabulary", 0),
    Row("{pos}", ("pos",)),
    Row("{final_norm}", ("final_norm",)),
    Row("{final_norm_b}", ("final_norm_b",)),
    Row("{head}", ("head",), "vocabulary", 0),
)


def _te_layer(qkv: tuple[Row, ...]) -> tuple[Row, ...]:
    """Transformer Engine's TransformerLayer."""
    return (
        Row("self_attention.layernorm_qkv.layer_norm_weight", ("norm1",)),
        Row("self_attention.layernorm_qkv.layer_norm_bias", ("norm1_b",)),
        *rows("self_attention.layernorm_qkv.", qkv),
        Row("self_attention.proj.weight", ("o",), tp=1),
        Row("self_attention.proj.bias", ("o_b",)),
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


def _te(name: str, qkv: tuple[Row, ...]) -> Layout:
    table = _OUTER + rows("{layers}.{i}.", _te_layer(qkv))
    return Layout(name, table, _EXTRA_STATE, whole_groups=True)


def _te_fused(name: str, how: str) -> Layout:
    return _te(name, (Row("weight", _QKV, how, 0), Row("bias", _QKV_B, how, 0)))


_TE_SPLIT = tuple(
    Row(f"{word}_{kind}", (role + tail,), tp=0)
    for word, role in (("query", "q"), ("key", "k"), ("value", "v"))
    for kind, tail in (("weight", ""), ("bias", "_b"))
)

_MCORE_TOP = (
    Row("embedding.word_embeddings.weight", ("embed",), "vocabulary", 0),
    Row("embedding.position_embeddings.weight", ("pos",)),
    Row("decoder.final_layernorm.weight", ("final_norm",)),
    Row("decoder.final_layernorm.bias", ("final_norm_b",)),
    Row("output_layer.weight", ("head",), "vocabulary", 0),
)
_MCORE_LAYER = (
    Row("self_attention.linear_qkv.weight", _QKV, "interleaved", 0),
    Row("self_attention.linear_qkv.bias", _QKV_B, "interleaved", 0),
    Row("self_attention.linear_proj.weight", ("o",), tp=1),
    Row("self_attention.linear_proj.bias", ("o_b",)),
    Row("self_attention.q_layernorm.weight", ("q_norm",)),
    Row("self_attention.k_layernorm.weight", ("k_norm",)),
    Row("mlp.linear_fc1.weight", ("gate", "up"), "per_rank", 0),
    Row("mlp.linear_fc1.bias", ("gate_b", "up_b"), "per_rank", 0),
    Row("mlp.linear_fc2.weight", ("down",), tp=1),
    Row("mlp.linear_fc2.bias", ("down_b",)),
    Row("mlp.linear_fc1.weight", ("fc1",), tp=0),
    Row("mlp.linear_fc1.bias", ("fc1_b",), tp=0),
    Row("mlp.linear_fc2.weight", ("fc2",), tp=1),
    Row("mlp.linear_fc2.bias", ("fc2_b",)),
    Row("self_attention.core_attention.softmax_offset", ("sinks",), tp=0),
    Row("self_attention.linear_q_proj.weight", ("q",), tp=0, when="mla"),
    Row("self_attention.linear_q_up_proj.weight", ("q_up",), tp=0),
    Row("self_attention.linear_kv_up_proj.weight", ("kv_up",), tp=0),
    Row("pre_mlp_layernorm.weight", ("norm2",), when="sparse"),
    Row("mlp.router.weight", ("router",)),
    Row("mlp.router.bias", ("router_b",)),
    Row("mlp.router.expert_bias", ("router_shift",)),
    Row("mlp.shared_experts.linear_fc1.weight", ("s_gate", "s_up"), "per_rank", 0),
    Row("mlp.shared_experts.linear_fc2.weight", ("s_down",), tp=1),
)


def _experts(fc1: str, fc2: str) -> tuple[Row, ...]:
    """A tensor for each: names with {kind} and {e}."""
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
# The narrow layers of compressed attention are whole on each rank in Transformer Engine's spec, and
# cut in the local one.
_MCORE_TE_OWN = (
    Row("self_attention.linear_q_down_proj.weight", ("q_down",)),
    Row("self_attention.linear_kv_down_proj.weight", ("kv_down",)),
    Row("self_attention.linear_qkv.layer_norm_weight", ("norm1",), when="mha"),
    Row("input_layernorm.weight", ("norm1",), when="mla"),
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
    Row("input_layernorm.weight", ("norm1",)),
    Row("input_layernorm.bias", ("norm1_b",)),
    Row("self_attention.q_layernorm.weight", ("q_down_norm",)),
    Row("self_attention.kv_layernorm.weight", ("kv_down_norm",)),
    Row("pre_mlp_layernorm.weight", ("norm2",), when="dense"),
    Row("pre_mlp_layernorm.bias", ("norm2_b",), when="dense"),
)


def _mcore(name: str, own: tuple[Row, ...], experts: tuple[Row, ...]) -> Layout:
    layer = rows("decoder.layers.{i}.", _MCORE_LAYER + own + experts)
    return Layout(name, _MCORE_TOP + layer, _EXTRA_STATE)


_META = Layout(
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
                Row("attention.wq.weight", ("q",), "rotary", 0),
                Row("attention.wq.bias", ("q_b",), "rotary", 0),
                Row("attention.wk.weight", ("k",), "rotary", 0),
                Row("attention.wk.bias", ("k_b",), "rotary", 0),
                Row("attention.wv.weight", ("v",), tp=0),
                Row("attention.wv.bias", ("v_b",), tp=0),
                Row("attention.wo.weight", ("o",), tp=1),
                Row("attention.wo.bias", ("o_b",)),
                Row("feed_forward.w1.weight", ("gate",), tp=0),
                Row("feed_forward.w3.weight", ("up",), tp=0),
                Row("feed_forward.w2.weight", ("down",), tp=1),
            ),
        ),
    ),
    (r"rope\.freqs", r"freqs_cis", r".*rotary_emb\.inv_freq"),
)

# since its 0.3; before, torchtitan had Meta's names
_TORCHTITAN = _META.renamed(
    "torchtitan",
    *((f"attention.w{part}.", f"attention.qkv_linear.w{part}.") for part in "qkv"),
    ("output.weight", "lm_head.weight"),
)

_SMP_V1 = Layout(
    "smp_v1",
    (
        Row("word_embedding.weight", ("embed",), "vocabulary", 0),
        Row("layernorm.weight", ("final_norm",)),
        Row("layernorm.bias", ("final_norm_b",)),
        Row("lm_head.weight", ("head",), "vocabulary", 0),
        *rows(
            "transformer.seq_layers.{i}.",
            (
                Row("attention.pre_layernorm.weight", ("norm1",)),
                Row("attention.pre_layernorm.bias", ("norm1_b",)),
                *(
                    Row(f"attention.{word}.{kind}", (role + tail,), tp=0)
                    for word, role in (("query", "q"), ("key", "k"), ("value", "v"))
                    for kind, tail in (("weight", ""), ("bias", "_b"))
                ),
                Row("attention.dense.weight", ("o",), tp=1),
                Row("attention.dense.bias", ("o_b",)),
                Row("output.pre_layernorm.weight", ("norm2",)),
                Row("output.pre_layernorm.bias", ("norm2_b",)),
                Row("output.dense1.weight", ("fc1",), tp=0),
                Row("output.dense1.bias", ("fc1_b",), tp=0),
                Row("output.dense2.weight", ("fc2",), tp=1),
                Row("output.dense2.bias", ("fc2_b",)),
            ),
        ),
    ),
    (r".*\.(masked_)?bias_mask", r".*\.rotary_emb\.inv_freq"),
    families=frozenset({"gpt_neox"}),
)

# transformers' own tensor parallelism, with the names that models have in memory
_HF_CUT = {
    **dict.fromkeys(("embed", "head", "q", "k", "v", "gate", "up", "fc1"), 0),
    **dict.fromkeys(("q_b", "k_b", "v_b", "gate_b", "up_b", "fc1_b", "s_gate", "s_up"), 0),
    **dict.fromkeys(("o", "down", "fc2", "s_down"), 1),
}
_HF_MLP = ("embed", "head", "gate", "up", "down", "s_gate", "s_up", "s_down")
_HF_EXPERTS = (
    Row("{layers}.{i}.mlp.gate.weight", ("router",)),
    Row("{layers}.{i}.mlp.experts.gate_up_proj", ("e_gate", "e_up"), "per_rank", 0, stacked=True),
    Row("{layers}.{i}.mlp.experts.down_proj", ("e_down",), tp=1, stacked=True),
)
_ZERO_CENTRED = ("gemma2", "gemma3_text")
_NO_PLAN = ("falcon", "gpt2", "gpt_oss")  # transformers has no tensor parallelism for them


def _hf_tp(family: str) -> Layout:
    hub = FAMILIES[family]
    # DeepSeek's attention is not divided
    cut = {r: _HF_CUT[r] for r in _HF_MLP} if family == "deepseek_v3" else _HF_CUT
    dense = tuple(
        replace(row, tp=cut.get(row.roles[0]))
        for row in hub.rows
        if not row.of_experts and row.roles != ("router",)
    )
    return Layout("hf_tp", dense + _HF_EXPERTS, hub.drop, joined=False)


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        _te("te_split", _TE_SPLIT),
        _mcore("mcore_te", _MCORE_TE_OWN, _GROUPED),
        _mcore("mcore_te_legacy", _MCORE_TE_OWN, _LEGACY),
        _mcore("mcore_te_sequential", _MCORE_TE_OWN, _SEQUENTIAL),
        _mcore("mcore_local", _MCORE_LOCAL_OWN, _SEQUENTIAL),
        _te_fused("te_fused", "per_rank"),
        _te_fused("te_fused_interleaved", "interleaved"),
        _META,
        _TORCHTITAN,
        _SMP_V1,
    )
}


@dataclass(frozen=True)
class _Registry:
    """The user's layouts; for the life of the process, as its imports are."""

    own: dict[str, Layout] = field(default_factory=dict)


_REGISTRY = _Registry()


def register_layout(layout: Layout) -> None:
    """Make `layout` known: it is found from names like the built-in ones, and by its name.

    Raises:
        UsageError: another layout is called so.
    """
    known = _REGISTRY.own.get(layout.name)
    if layout.name in LAYOUTS or layout.name == "hf_tp" or known not in (None, layout):
        raise UsageError(
            f"there is a layout {layout.name!r} already", remedy="give yours another name"
        )
    _REGISTRY.own[layout.name] = layout


def layouts_of(family: str) -> dict[str, Layout]:
    """The layouts that a family may have, with its own names put in.

    Gemma's norms are zero-centred wherever it is trained, as they are on disk.
    """
    own = {} if family in _NO_PLAN else {"hf_tp": _hf_tp(family)}
    built_in = dict(LAYOUTS)
    if family in _ZERO_CENTRED:
        built_in = {n: replace(layout.zero_centred(), name=n) for n, layout in built_in.items()}
    return {
        name: _resolved(layout, family)
        for name, layout in {**own, **built_in, **_REGISTRY.own}.items()
        if layout.families is None or family in layout.families
    }


def get_layout(layout: str | Layout, family: str) -> Layout:
    """The layout of that name for a family; with `_zero_centred` behind it, its norms stored less
    one, which names do not tell.

    Raises:
        UsageError: there is none; says which there are.
    """
    if isinstance(layout, Layout):
        return _resolved(layout, family)
    found = layouts_of(family)
    plain = str(layout).removesuffix(ZERO_CENTRED)
    if plain != layout and plain in found and family not in _ZERO_CENTRED:
        return found[plain].zero_centred()
    if layout not in found:
        raise UsageError(
            f"layout={layout!r} is not known for {family}",
            remedy=f"pass one of {', '.join(sorted(found))}, or a Layout of your own",
        )
    return found[layout]


def _resolved(layout: Layout, family: str) -> Layout:
    names = family_names(family)
    out = []
    for row in layout.rows:
        name = row.name
        for word, value in names.items():
            name = name.replace(f"{{{word}}}", value)
        if "{" not in name.replace("{i}", "").replace("{e}", ""):
            out.append(replace(row, name=name))  # else the family has no such tensor
    return replace(layout, rows=tuple(out))
