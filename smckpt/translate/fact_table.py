"""The table of facts: what a trainer's arguments say, and what the config means by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smckpt.translate.fact_values import (
    activation,
    experts_of,
    gated,
    head_size,
    if_yarn,
    interleaved,
    kind_of_activation,
    mup_attention,
    mup_output,
    norm,
    or_absent,
    positions,
    softmax_scale,
    squared,
    swish,
    to_even,
    untied,
    whole_layers,
    without_rope,
    yarn_scale,
    yarn_turned,
)
from smckpt.translate.tables.dims import Dims

# Families that turn rows side by side, not the two halves of a head. Megatron has to do the same,
# because no layout has them in another order.
_SIDE_BY_SIDE = ("gptj", "cohere", "cohere2", "glm4")
_UNKNOWN_ORDER = ("llama4_text",)
# Where no key of the config says how experts are chosen.
_SIGMOIDS = ("deepseek_v3", "glm4_moe", "llama4_text")
_LONGEST = "max_position_embeddings"
_ORIGINAL = f"original_{_LONGEST}"
_NORMED_CHOICE = ("mixtral", "granitemoe", "gpt_oss", "minimax")
# The sizes of a model, which its trainer needs whatever the tensors are called.
_ANYWHERE = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "kv_lora_rank",
    "q_lora_rank", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "rotary_base",
})  # fmt: skip


@dataclass(frozen=True)
class MeantModel:
    """What the config means. rows: of the vocabulary, as they are stored."""

    dims: Dims
    config: Mapping[str, Any]
    rows: int | None

    @property
    def roles(self) -> frozenset[str]:
        return frozenset[str]().union(*self.dims.roles_of.values()) | self.dims.once

    @property
    def latent(self) -> bool:
        return self.dims.family.latent

    @property
    def rope(self) -> Mapping[str, Any] | None:
        """The rotary parameters of layers with full attention; None: positions are not rotary, or
        the config does not tell."""
        found = self.config.get("rope_parameters")
        own = isinstance(found, Mapping) and isinstance(found.get("full_attention"), Mapping)
        if own or self.config.get("rope_local_base_freq") is not None:
            return None  # each type of layer has its own
        scaling = self.config.get("rope_scaling")
        base = self.config.get("rope_theta", self.config.get("rotary_emb_base"))
        part = self.config.get("partial_rotary_factor", self.config.get("rotary_pct"))
        out = {
            "rope_theta": base, "partial_rotary_factor": part,
            **(scaling if isinstance(scaling, Mapping) else {}),
            **(found if isinstance(found, Mapping) else {}),
        }  # fmt: skip
        if "pos" in self.roles or out["rope_theta"] is None:
            return None
        return {**out, "rope_type": out.get("rope_type", out.get("type", "default"))}


@dataclass(frozen=True)
class Fact:
    """name: Megatron's. key: the config's. given: the value in the source; meant: the one that the
    config means; None of either: it is not known, and not compared. noted: a difference is a
    remark, because it changes no tensor. anywhere: also of a model that is not in Megatron's
    layouts, where Megatron's other arguments may be defaults that nothing reads."""

    name: str
    key: str
    meant: Callable[[MeantModel], Any]
    given: Callable[[Mapping[str, Any]], Any]
    noted: bool = False
    anywhere: bool = False


def _fact(
    name: str, key: str, meant: Callable[[MeantModel], Any],
    given: Callable[[Mapping[str, Any]], Any] | None = None, *, noted: bool = False,
) -> Fact:  # fmt: skip
    return Fact(
        name, key, meant, given or (lambda values: values.get(name)), noted, name in _ANYWHERE
    )


def equal_values(given: Any, meant: Any) -> bool:
    if isinstance(given, float) or isinstance(meant, float):
        return bool(
            isinstance(given, (int, float)) and isinstance(meant, (int, float))
            and math.isclose(given, meant, rel_tol=1e-6)
        )  # fmt: skip
    return bool(given == meant)


def _has_swish(m: MeantModel) -> bool | None:
    if m.dims.family.name == "gpt_oss":
        return False  # a sigmoid of its own, whatever the config says
    found = m.config.get("hidden_activation") or m.config.get("hidden_act")
    has_gate = {"gate", "e_gate"} & m.roles
    return found in ("silu", "swish") if isinstance(found, str) and has_gate else None


def _has_positions(m: MeantModel) -> str | None:
    if m.dims.family.name == "bloom" or m.config.get("alibi"):
        return "alibi"
    return "learned_absolute" if "pos" in m.roles else None if m.rope is None else "rope"


def _routed(meant: Callable[[MeantModel], Any]) -> Callable[[MeantModel], Any]:
    """Of how experts are chosen and weighed. PhiMoE has a rule that Megatron lacks."""
    return lambda m: meant(m) if m.dims.experts and m.dims.family.name != "phimoe" else None


def _scores(m: MeantModel) -> str:
    known = "sigmoid" if m.dims.family.name in _SIGMOIDS else "softmax"
    return str(m.config.get("scoring_func") or known)


def _before_choice(m: MeantModel) -> bool | None:
    """Whether the scores of all experts add up to one, and not those of the chosen ones."""
    if _scores(m) != "softmax":
        return None
    if m.dims.family.name == "deepseek_v2":
        return True
    if m.dims.family.name in _NORMED_CHOICE:
        return False
    found = m.config.get("norm_topk_prob")
    return not found if isinstance(found, bool) else None


def _grouped(m: MeantModel, key: str) -> Any:
    groups = 1 if m.config.get("topk_method") == "greedy" else m.config.get("n_group") or 1
    return 1 if groups == 1 else m.config.get(key)


def _softmax_scale(m: MeantModel) -> float | None:
    if m.latent:
        return None
    size = m.config.get("query_pre_attn_scalar") or m.dims.sizes["D"]
    return float(m.config.get("attention_multiplier") or size**-0.5)


def _has_activation(m: MeantModel) -> str | None:
    found = (m.config.get(key) for key in ("hidden_act", "activation_function", "activation"))
    return kind_of_activation(next(filter(None, found), None)) if "fc1" in m.roles else None


def _beside(m: MeantModel) -> bool | None:
    """Whether attention and MLP get the same input, so that their sums run side by side."""
    name = m.dims.family.name
    if name in ("falcon", "gptj", "cohere", "cohere2"):
        return None if name == "falcon" else True
    return name == "gpt_neox" and m.config.get("use_parallel_residual") is not False


def _is_squared(m: MeantModel) -> bool | None:
    found = m.config.get("hidden_act") or m.config.get("activation_function")
    return found == "relu2" if isinstance(found, str) and "fc1" in m.roles else None


def _is_without_rope(m: MeantModel) -> tuple[int, ...]:
    turned = m.config.get("no_rope_layers") or ()
    return tuple(layer for layer, one in enumerate(turned) if not one)


def _yarn(
    key: str, *, latent: bool, plain: Any = None, absent: Any = None
) -> Callable[[MeantModel], Any]:
    """A value of YaRN's. plain: the one of a model without it. absent: the default."""

    def meant(m: MeantModel) -> Any:
        if m.rope is None or m.latent != latent:
            return None
        if m.rope["rope_type"] != "yarn":
            return plain
        own = m.rope.get(key) if key != _ORIGINAL else m.rope.get(key) or m.config.get(key)
        return own if own is not None else m.config.get(absent, absent)

    return meant


def _yarn_turned(m: MeantModel, *, latent: bool) -> float | None:
    """What YaRN multiplies cosines and sines by, as transformers computes it."""
    if m.rope is None or m.latent != latent:
        return None
    if m.rope["rope_type"] != "yarn":
        return 1.0
    factor, up, down = (m.rope.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
    one, two = (yarn_scale(factor, by or 1.0) for by in ((up, down) if up and down else (1, 0)))
    if m.rope.get("attention_factor") is not None or one is None or two is None:
        return m.rope.get("attention_factor")
    return one / two if up and down else one


def _yarn_softmax(m: MeantModel) -> float | None:
    if m.rope is None or not m.latent:
        return None
    down = m.rope.get("mscale_all_dim") if m.rope["rope_type"] == "yarn" else None
    return (yarn_scale(m.rope.get("factor"), down) or 1.0) ** 2 if down else 1.0


def _turned_part(m: MeantModel) -> Any:
    """How much of a head is turned, from its first row on."""
    if m.rope is None or m.latent:
        return None
    part = m.rope.get("partial_rotary_factor")
    if part not in (None, 1) and m.rope["rope_type"] == "proportional":
        return f"{part} of the angles (proportional)"  # over the whole head
    return 1.0 if part is None else part


def _are_whole_layers(m: MeantModel) -> tuple[int, ...] | None:
    kinds = m.config.get("layer_types")
    if isinstance(kinds, (list, tuple)) and "sliding_attention" in kinds:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    pattern = m.config.get("sliding_window_pattern")
    if type(pattern) is int and pattern > 0:
        return tuple(range(pattern - 1, m.dims.layers, pattern))
    return None


def _has_bounds(m: MeantModel) -> tuple[Any, ...] | None:
    if m.rope is None or m.rope["rope_type"] != "llama3":
        return None
    return tuple(m.rope.get(key) for key in ("low_freq_factor", "high_freq_factor", _ORIGINAL))


def _full_rope(m: MeantModel) -> Mapping[str, Any]:
    """Of a model whose windows have rotary parameters of their own: those of the other layers."""
    found = m.config.get("rope_parameters")
    found = found if isinstance(found, Mapping) else {}
    own = found.get("full_attention")
    return own if isinstance(own, Mapping) else {**(m.config.get("rope_scaling") or {}), **found}


def _has_two_bases(m: MeantModel) -> tuple[Any, Any] | None:
    found = m.config.get("rope_parameters")
    window = found.get("sliding_attention") if isinstance(found, Mapping) else None
    local = (window or {}).get("rope_theta", m.config.get("rope_local_base_freq"))
    base = _full_rope(m).get("rope_theta", m.config.get("rope_theta"))
    return None if local is None or base is None else (local, base)


def _has_linear_factor(m: MeantModel) -> float | None:
    if _has_two_bases(m) is None:
        return None
    rope = _full_rope(m)
    return rope.get("factor") if rope.get("rope_type", rope.get("type")) == "linear" else 1.0


def _of_experts(letter: str) -> Callable[[MeantModel], Any]:
    return lambda m: m.dims.sizes[letter] if m.dims.experts else None


def _of_linear(key: str) -> Callable[[MeantModel], Any]:
    return lambda m: m.config.get(key) if "l_q" in m.roles else None


def _of_latent(key: str) -> Callable[[MeantModel], Any]:
    return lambda m: m.config.get(key) if m.latent else None


_LINEAR = tuple(
    f"linear_{what}"
    for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
)
_DIVIDED = ("linear", "proportional")  # these divide all angles by their factor
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_BOUNDS = (1, 4, 8192)  # as Megatron-core has them, which no argument changes
_BIASES = frozenset({"o_b", "fc1_b", "fc2_b", "gate_b", "up_b", "down_b"})
FACTS: Sequence[Fact] = (
    _fact("num_layers", "num_hidden_layers", lambda m: m.dims.layers),
    _fact("hidden_size", "hidden_size", lambda m: m.dims.sizes["X"]),
    _fact("ffn_hidden_size", "intermediate_size",
          lambda m: m.dims.sizes["F"] if {"down", "fc2"} & m.roles else None),
    _fact("num_attention_heads", "num_attention_heads", lambda m: m.dims.sizes["H"]),
    _fact("num_query_groups", "num_key_value_heads",
          lambda m: None if m.latent else m.dims.sizes["G"],
          lambda values: (values.get("group_query_attention") is not False
                          and values.get("num_query_groups")) or values.get("num_attention_heads")),
    _fact("kv_channels", "head_dim", lambda m: None if m.latent else m.dims.sizes["D"], head_size),
    _fact("multi_latent_attention", "model_type", lambda m: m.latent),
    _fact("qk_head_dim", "qk_nope_head_dim", _of_latent("qk_nope_head_dim")),
    _fact("qk_pos_emb_head_dim", "qk_rope_head_dim", _of_latent("qk_rope_head_dim")),
    _fact("v_head_dim", "v_head_dim", _of_latent("v_head_dim")),
    _fact("kv_lora_rank", "kv_lora_rank", _of_latent("kv_lora_rank")),
    _fact("q_lora_rank", "q_lora_rank", _of_latent("q_lora_rank")),
    _fact("num_experts", "num_local_experts, num_experts, n_routed_experts",
          lambda m: m.dims.experts, experts_of),
    _fact("moe_router_topk", "num_experts_per_tok",
          lambda m: m.config.get("num_experts_per_tok") if m.dims.experts else None),
    _fact("moe_ffn_hidden_size", "moe_intermediate_size", _of_experts("M")),
    _fact("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size",
          _of_experts("S")),
    _fact("untie_embeddings_and_output_weights", "tie_word_embeddings", lambda m: not m.dims.tied,
          untied),
    _fact("swiglu", "model_type", lambda m: bool({"gate", "e_gate"} & m.roles), gated),
    _fact("swiglu (SiLU)", "hidden_act", _has_swish, swish),
    _fact("add_bias_linear", "model_type, attention_bias, mlp_bias",
          lambda m: bool(_BIASES & m.roles)),
    _fact("add_qkv_bias", "model_type, attention_bias", lambda m: "q_b" in m.roles,
          lambda values: values["add_qkv_bias"] or bool(values.get("add_bias_linear"))
          if "add_qkv_bias" in values else None),
    _fact("normalization", "model_type", lambda m: "LayerNorm" if "final_norm_b" in m.roles
          else ("RMSNorm" if "rms_norm_eps" in m.config else None), norm),
    _fact("qk_layernorm", "model_type",
          lambda m: None if m.latent else bool({"q_norm", "q_norm_each", "q_norm_all"} & m.roles)),
    _fact("position_embedding_type", "model_type", _has_positions, positions),
    _fact("rotary_base", "rope_theta", lambda m: None if m.rope is None else m.rope["rope_theta"],
          lambda values: values.get("rotary_base") if positions(values) in (None, "rope")
          and not isinstance(values.get("rotary_base"), str) else None),
    _fact("rotary_percent", "partial_rotary_factor", _turned_part,
          lambda values: values.get("rotary_percent")
          if positions(values) in (None, "rope") else None),
    _fact("rotary_base (of windows, of others)", "rope_local_base_freq, rope_theta",
          _has_two_bases, lambda values: values.get("rotary_base")
          if isinstance(values.get("rotary_base"), tuple) else None),
    _fact("rotary_interleaved", "", lambda m: None if m.dims.family.name in _UNKNOWN_ORDER
          else m.dims.family.name in _SIDE_BY_SIDE),
    _fact("use_rope_scaling", "rope_type",
          lambda m: None if m.rope is None else m.rope["rope_type"] == "llama3",
          lambda values: values.get("use_rope_scaling", "old_context_len" in values or None)),
    _fact("old_context_len", "low_freq_factor, high_freq_factor, original_max_position_embeddings",
          _has_bounds, lambda values: tuple(map(
              values.get, ("low_freq_factor", "high_freq_factor", "old_context_len")))
          if "old_context_len" in values else None),
    _fact("rope_scaling_factor", "factor",
          lambda m: None if m.rope is None or m.rope["rope_type"] != "llama3"
          else m.rope.get("factor"),
          lambda values: values.get("rope_scaling_factor")
          if values.get("use_rope_scaling") or "old_context_len" in values else None),
    _fact("use_rope_scaling (bounds)", "low_freq_factor, high_freq_factor, "
          "original_max_position_embeddings", _has_bounds,
          lambda values: _BOUNDS if values.get("use_rope_scaling") else None, noted=True),
    _fact("rotary_seq_len_interpolation_factor", "factor of linear scaling",
          lambda m: None if m.rope is None or m.latent
          else (m.rope.get("factor", 1) if m.rope["rope_type"] in _DIVIDED else 1),
          lambda values: (values["rotary_seq_len_interpolation_factor"] or 1)
          if "rotary_seq_len_interpolation_factor" in values else None),
    _fact("rope_scaling_factor (linear)", "factor of linear scaling", _has_linear_factor,
          lambda values: values.get("rope_scaling_factor")
          if isinstance(values.get("rotary_base"), tuple) else None),
    _fact("attention_chunk_size", "attention_chunk_size",
          lambda m: m.config.get("attention_chunk_size")
          or (None if m.dims.family.name == "llama4_text" else 0),
          or_absent("attention_chunk_size", 0)),
    _fact("no_rope_freq", "no_rope_layers",
          lambda m: None if m.rope is None else _is_without_rope(m), without_rope),
    _fact("rotary_scaling_factor", "factor of YaRN", _yarn("factor", latent=True, plain=1),
          lambda values: 1 if values.get("rope_type") == "rope"
          else values.get("rotary_scaling_factor")),
    _fact("mscale (of cosines)", "mscale, mscale_all_dim, attention_factor",
          lambda m: _yarn_turned(m, latent=True), lambda values: yarn_turned(values, latent=True)),
    _fact("mscale_all_dim (of scores)", "mscale_all_dim", _yarn_softmax,
          lambda values: (yarn_scale(values.get("rotary_scaling_factor"),
                                     values.get("mscale_all_dim")) or 1.0) ** 2
          if values.get("mscale_all_dim") is not None and values.get("rope_type") != "rope"
          else None),
    _fact("beta_fast", "beta_fast", _yarn("beta_fast", latent=True, absent=32)),
    _fact("beta_slow", "beta_slow", _yarn("beta_slow", latent=True, absent=1)),
    _fact(_ORIGINAL, _ORIGINAL, _yarn(_ORIGINAL, latent=True, absent=_LONGEST)),
    _fact("yarn_rotary_scaling_factor", "factor of YaRN",
          _yarn("factor", latent=False, plain=1),
          if_yarn("yarn_rotary_scaling_factor", "rotary_scaling_factor")),
    _fact("yarn_mscale (of cosines)", "mscale, mscale_all_dim, attention_factor",
          lambda m: _yarn_turned(m, latent=False),
          lambda values: yarn_turned(values, latent=False)),
    _fact("yarn_beta_fast", "beta_fast", _yarn("beta_fast", latent=False, absent=32),
          if_yarn("yarn_beta_fast")),
    _fact("yarn_beta_slow", "beta_slow", _yarn("beta_slow", latent=False, absent=1),
          if_yarn("yarn_beta_slow")),
    _fact(f"yarn_{_ORIGINAL}", _ORIGINAL, _yarn(_ORIGINAL, latent=False, absent=_LONGEST),
          if_yarn(f"yarn_{_ORIGINAL}")),
    _fact("yarn_correction_range_round_to_int", "truncate",
          _yarn("truncate", latent=False, absent=True),
          if_yarn("yarn_correction_range_round_to_int")),
    _fact("mrope_section", "mrope_section",
          lambda m: None if m.rope is None else tuple(m.rope.get("mrope_section") or ()) or None),
    _fact("squared_relu", "hidden_act", _is_squared, squared),
    _fact("activation", "hidden_act", _has_activation, activation),
    _fact("glu_linear_offset", "model_type",
          lambda m: 1 if m.dims.family.name == "gpt_oss" else 0),
    _fact("activation_func_clamp_value", "swiglu_limit",
          lambda m: m.config.get("swiglu_limit") or 0, or_absent("activation_func_clamp_value", 0)),
    _fact("softmax_scale", "head_dim, query_pre_attn_scalar, attention_multiplier",
          _softmax_scale, softmax_scale),
    _fact("softmax_type", "model_type",
          lambda m: "learnable" if "sinks" in m.roles else "vanilla"),
    _fact("attn_logit_softcapping", "attn_logit_softcapping",
          lambda m: m.config.get("attn_logit_softcapping") or 0,
          or_absent("attn_logit_softcapping", 0)),
    _fact("final_logit_softcapping", "final_logit_softcapping",
          lambda m: m.config.get("final_logit_softcapping") or 0,
          or_absent("final_logit_softcapping", 0)),
    _fact("query_pre_attn_scalar", "query_pre_attn_scalar",
          lambda m: None if m.latent or m.config.get("attention_multiplier")
          else m.config.get("query_pre_attn_scalar") or m.dims.sizes["D"]),
    _fact("apply_embedding_scaling", "model_type",
          lambda m: m.dims.family.name.startswith("gemma")),
    _fact("use_mup", "model_type", lambda m: False,  # GPT-NeoX's, which knows other factors
          lambda values: True if values.get("use_mup") and "mup_attn_temp" in values else None),
    _fact("mup_embedding_mult", "embedding_multiplier",
          lambda m: float(m.config.get("embedding_multiplier") or 1),
          lambda values: values.get("mup_embedding_mult") if values.get("use_mup")
          else 1.0 if "use_mup" in values else None),
    _fact("mup_output_mult", "logits_scaling",
          lambda m: 1 / (m.config.get("logits_scaling") or 1), mup_output),
    _fact("mup_attn_scale_power", "attention_multiplier", _softmax_scale, mup_attention),
    _fact("qk_l2_norm", "model_type",
          lambda m: None if m.dims.family.name == "llama4_text" else False),
    _fact("apply_residual_connection_post_layernorm", "apply_residual_connection_post_layernorm",
          lambda m: bool(m.config.get("apply_residual_connection_post_layernorm"))),
    _fact("window_size", "sliding_window",
          lambda m: bool(m.config.get("sliding_window"))
          and m.config.get("use_sliding_window") is not False,
          lambda values: bool(values["window_size"]) if "window_size" in values else None,
          noted=True),
    _fact("window_size (keys)", "sliding_window",
          lambda m: to_even(m.config.get("sliding_window")),
          lambda values: to_even((values.get("window_size") or (0,))[0])
          if isinstance(values.get("window_size"), tuple) else None, noted=True),
    _fact("window_attn_skip_freq", "layer_types, sliding_window_pattern", _are_whole_layers,
          whole_layers, noted=True),
    _fact("interleaved_attn_pattern", "layer_types, sliding_window_pattern", _are_whole_layers,
          interleaved, noted=True),
    _fact("gpt_j_residual", "use_parallel_residual", _beside),
    _fact("transformer_block_type", "model_type",
          lambda m: None if {"post1", "post2"} & m.roles else "pre_ln"),
    _fact("normalize_attention_scores", "model_type", lambda m: True),
    _fact("attention_output_gate", "model_type", lambda m: "q_gate" in m.roles),
    *(_fact(name, name, _of_linear(name)) for name in _LINEAR),
    _fact("moe_router_load_balancing_type", "model_type", _routed(lambda m: "no sinkhorn"),
          lambda values: "sinkhorn"
          if "sinkhorn" in str(values.get("moe_router_load_balancing_type")) else None),
    _fact("moe_router_force_load_balancing", "model_type", _routed(lambda m: False)),  # by chance
    _fact("moe_expert_capacity_factor", "model_type", lambda m: 0 if m.dims.experts else None,
          or_absent("moe_expert_capacity_factor", 0), noted=True),
    _fact("moe_mlp_glu_interleave_size", "", lambda m: 0 if m.dims.experts else None,
          or_absent("moe_mlp_glu_interleave_size", 0)),
    _fact("moe_shared_expert_glu_interleave_size", "", lambda m: 0 if m.dims.experts else None,
          or_absent("moe_shared_expert_glu_interleave_size", 0)),
    _fact("moe_router_topk_limited_devices", "topk_group",
          _routed(lambda m: _grouped(m, "topk_group"))),
    _fact("moe_apply_probs_on_input", "model_type",
          _routed(lambda m: m.dims.family.name == "llama4_text")),
    _fact("moe_router_score_function", "scoring_func", _routed(_scores)),
    _fact("moe_router_pre_softmax", "norm_topk_prob", _routed(_before_choice)),
    _fact("moe_router_score_function (sum of the chosen)", "norm_topk_prob",
          _routed(lambda m: m.config.get("norm_topk_prob") if _scores(m) == "sigmoid" else None),
          lambda values: values.get("moe_router_topk", 2) > 1 or None
          if values.get("moe_router_score_function") == "sigmoid" else None),
    _fact("moe_router_topk_scaling_factor", "routed_scaling_factor",
          _routed(lambda m: m.config.get("routed_scaling_factor") or 1),
          or_absent("moe_router_topk_scaling_factor", 1)),
    _fact("moe_router_num_groups", "n_group", _routed(lambda m: _grouped(m, "n_group")),
          or_absent("moe_router_num_groups", 1)),
    _fact("moe_router_group_topk", "topk_group", _routed(lambda m: _grouped(m, "topk_group")),
          lambda values: values.get("moe_router_group_topk")
          if (values.get("moe_router_num_groups") or 1) > 1 else None),
    _fact("checkpoint_version", "", lambda m: 2),
    _fact("schedules_method", "", lambda m: "by stages",  # MindSpeed's: the second half backwards
          lambda values: values.get("schedules_method")
          if (values.get("pipeline_model_parallel_size") or 1) != 1 else None),
    _fact("padded_vocab_size", "", lambda m: m.rows),
    # with the token at the end, or without it
    _fact("vocab_size", "vocab_size", lambda m: m.dims.sizes["V"],
          lambda values: values["vocab_size"]  # Meta's params.json may say -1
          if type(values.get("vocab_size")) is int and values["vocab_size"] > 0 else None,
          noted=True),
    _fact("norm_epsilon", "rms_norm_eps", lambda m: next(
        (m.config[name] for name in _EPSILONS if m.config.get(name) is not None), None
    ), noted=True),
)  # fmt: skip
