"""The sizes of a model, from its config: what shapes and formulas are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smckpt.errors import UsageError
from smckpt.layout.mesh import Shape
from smckpt.translate.runs import Heads

__all__ = ["ROLES", "Dims", "read_dims"]

# Shapes of the roles: X hidden, V vocabulary, P positions, F, M and S widths of the dense, the
# experts' and the shared experts' MLP, H heads, Q and K rows of all query and all key heads, O what
# the output projection takes, D a head, E experts; of compressed attention A and R the ranks of
# query and key/value, B, C and U rows of its other projections.
ROLES: Mapping[str, str] = {
    "embed": "VX", "pos": "PX", "head": "VX", "final_norm": "X", "final_norm_b": "X",
    "norm1": "X", "norm1_b": "X", "norm2": "X", "norm2_b": "X", "post1": "X", "post2": "X",
    "q": "QX", "k": "KX", "v": "KX", "q_b": "Q", "k_b": "K", "v_b": "K",
    "o": "XO", "o_b": "X", "q_norm": "D", "k_norm": "D", "sinks": "H",
    "q_down": "AX", "q_down_norm": "A", "q_up": "BA",
    "kv_down": "CX", "kv_down_norm": "R", "kv_up": "UR",
    "gate": "FX", "up": "FX", "down": "XF", "gate_b": "F", "up_b": "F", "down_b": "X",
    "fc1": "FX", "fc1_b": "F", "fc2": "XF", "fc2_b": "X",
    "router": "EX", "router_b": "E", "router_shift": "E",
    "e_gate": "MX", "e_up": "MX", "e_down": "XM", "e_gate_b": "M", "e_up_b": "M", "e_down_b": "X",
    "s_gate": "SX", "s_up": "SX", "s_down": "XS",
}  # fmt: skip


@dataclass(frozen=True)
class Dims:
    """Sizes; `family` is the config's model_type. `roles` of all layers but for the MLP's.

    traits: what rows may depend on: "mha" or "mla" (compressed attention), "ln_attn" or
    "ln_input" (what the first norm of a Falcon is called).
    """

    family: str
    layers: int
    sizes: Mapping[str, int]
    heads: Heads
    tied: bool
    once: frozenset[str]
    every: frozenset[str]
    dense: frozenset[str]
    sparse: frozenset[str]
    sparse_layers: frozenset[int]
    traits: frozenset[str]

    def shape(self, role: str) -> Shape:
        return tuple(self.sizes[letter] for letter in ROLES[role])

    @property
    def experts(self) -> int:
        return self.sizes["E"]

    def roles(self, layer: int) -> frozenset[str]:
        return self.every | (self.sparse if layer in self.sparse_layers else self.dense)


_GATED = frozenset({"gate", "up", "down"})
_PLAIN_MLP = frozenset({"fc1", "fc2"})
_SPARSE = frozenset({"router", "e_gate", "e_up", "e_down"})
_QKV_BIAS = frozenset({"q_b", "k_b", "v_b"})
_COMPRESSED = frozenset({"kv_down", "kv_down_norm", "kv_up", "o"})
_WITH_BIASES = ("gpt_neox", "gpt2")  # in all linear layers and norms
_TIED = ("gemma2", "gemma3_text", "gpt2", "falcon")  # where the config does not say it
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")


def read_dims(config: Mapping[str, Any]) -> Dims:
    """The sizes of the model that `config` describes.

    Raises:
        UsageError: a size is missing, or sizes contradict each other.
    """
    family = str(config["model_type"])
    hidden = _size(config, "hidden_size", "n_embd")
    layers = _size(config, "num_hidden_layers", "n_layer")
    width = _width(config, family, hidden)
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
    expert_width = _number(config, "moe_intermediate_size") or width
    heads = _heads(config, family, hidden)
    q, k = heads.groups * heads.per_group * heads.size, heads.groups * heads.size
    sizes = {
        "X": hidden, "V": _size(config, "vocab_size"), "P": _number(config, "n_positions"),
        "F": width, "M": expert_width, "Q": q, "K": k, "O": q, "D": heads.size, "E": experts,
        "S": _number(config, "n_shared_experts") * expert_width,
        "H": heads.groups * heads.per_group, **_compressed(config, family),
    }  # fmt: skip
    tied = bool(config.get("tie_word_embeddings", family in _TIED))
    mla = family == "deepseek_v3"
    two = family == "falcon" and _norms_of_falcon(config) == "ln_attn"
    return Dims(
        family, layers, sizes, heads, tied, _once(family, tied), _every(config, family),
        _dense(config, family), _sparse(config, family),
        _sparse_layers(config, family, layers, experts),
        frozenset({"mla" if mla else "mha", "ln_attn" if two else "ln_input"}),
    )  # fmt: skip


# -- roles -----------------------------------------------------------------------------------------


def _once(family: str, tied: bool) -> frozenset[str]:
    once = {"embed", "final_norm"} | (set() if tied else {"head"})
    if family in (*_WITH_BIASES, "falcon"):
        once.add("final_norm_b")
    return frozenset(once | {"pos"} if family == "gpt2" else once)


def _every(config: Mapping[str, Any], family: str) -> frozenset[str]:
    if family == "deepseek_v3":
        down = {"q_down", "q_down_norm", "q_up"} if config.get("q_lora_rank") else {"q"}
        return frozenset(_COMPRESSED | down | {"norm1", "norm2"})
    every = {"norm1", "norm2", "q", "k", "v", "o"}
    if family in _WITH_BIASES or family == "falcon":
        every |= {"norm1_b", "norm2_b"}
    if family == "falcon" and _norms_of_falcon(config) == "one":
        every -= {"norm2", "norm2_b"}
    if family in ("gemma2", "gemma3_text"):
        every |= {"post1", "post2"}
    if family == "gpt_oss":
        every.add("sinks")
    if family in _HEAD_NORMS:
        every |= {"q_norm", "k_norm"}
    biased = config.get("bias") if family == "falcon" else family == "gpt2"
    if biased or config.get("attention_bias", family in ("gpt_neox", "gpt_oss")):
        every |= _QKV_BIAS | {"o_b"}
    if family == "qwen2":
        every |= _QKV_BIAS
    return frozenset(every)


def _dense(config: Mapping[str, Any], family: str) -> frozenset[str]:
    if family in (*_WITH_BIASES, "falcon"):
        biased = family != "falcon" or config.get("bias")
        return _PLAIN_MLP | (frozenset({"fc1_b", "fc2_b"}) if biased else frozenset())
    return _GATED | (
        frozenset({"gate_b", "up_b", "down_b"}) if config.get("mlp_bias") else frozenset()
    )


def _sparse(config: Mapping[str, Any], family: str) -> frozenset[str]:
    if family == "gpt_oss":
        return _SPARSE | {"router_b", "e_gate_b", "e_up_b", "e_down_b"}
    if family == "deepseek_v3":
        shared = {"s_gate", "s_up", "s_down"} if config.get("n_shared_experts") else set()
        return _SPARSE | {"router_shift"} | shared
    return _SPARSE


def _sparse_layers(
    config: Mapping[str, Any], family: str, layers: int, experts: int
) -> frozenset[int]:
    if family not in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3") or not experts:
        return frozenset()
    if family == "deepseek_v3":
        return frozenset(range(_number(config, "first_k_dense_replace"), layers))
    step = int(config.get("decoder_sparse_step") or 1)
    only_dense = set(config.get("mlp_only_layers") or ())
    return frozenset(i for i in range(layers) if i not in only_dense and (i + 1) % step == 0)


def _norms_of_falcon(config: Mapping[str, Any]) -> str:
    """ "one": attention and MLP share it. "ln_attn": two, for both at once. "two": one after the
    other."""
    if config.get("new_decoder_architecture"):
        return "one" if config.get("num_ln_in_parallel_attn") == 1 else "ln_attn"
    return "one" if config.get("parallel_attn", True) else "two"


# -- sizes -----------------------------------------------------------------------------------------


def _heads(config: Mapping[str, Any], family: str, hidden: int) -> Heads:
    count = _size(config, "num_attention_heads", "n_head")
    groups = _number(config, "num_key_value_heads") or count
    if family == "falcon" and config.get("new_decoder_architecture"):
        groups = _number(config, "num_kv_heads") or count
    elif family == "falcon":
        groups = 1 if config.get("multi_query", True) else count
    if family == "deepseek_v3":
        head = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
        return Heads(count, 1, head, head)
    if count % groups:
        raise UsageError(
            f"{count} attention heads are not a multiple of {groups} key/value heads",
            remedy="pass the config that the model was trained with",
        )
    head = _number(config, "head_dim") or hidden // count
    return Heads(groups, count // groups, head, _rotary(config, head))


def _compressed(config: Mapping[str, Any], family: str) -> dict[str, int]:
    """DeepSeek's attention, whose query and key/value go through a narrow layer."""
    if family != "deepseek_v3":
        return {}
    heads, rotary = _size(config, "num_attention_heads"), _size(config, "qk_rope_head_dim")
    plain, value = _size(config, "qk_nope_head_dim"), _size(config, "v_head_dim")
    rank = _size(config, "kv_lora_rank")
    return {
        "A": _number(config, "q_lora_rank"), "B": heads * (plain + rotary), "R": rank,
        "C": rank + rotary, "U": heads * (plain + value), "O": heads * value,
    }  # fmt: skip


def _width(config: Mapping[str, Any], family: str, hidden: int) -> int:
    if family in ("gpt2", "falcon"):
        return _number(config, "n_inner", "ffn_hidden_size") or 4 * hidden
    return _size(config, "intermediate_size")


def _rotary(config: Mapping[str, Any], head: int) -> int:
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    for key in ("partial_rotary_factor", "rotary_pct"):
        if part is None:
            part = config.get(key)
    if part is not None and (not isinstance(part, (int, float)) or not 0 <= part <= 1):
        raise _no_number("partial_rotary_factor", part)
    rotary = head if part is None else math.floor(head * part)
    if rotary % 2:
        raise UsageError(
            f"{rotary} of {head} rows of a head are rotary, an odd number",
            remedy="pass the config that the model was trained with",
        )
    return rotary


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """The first of them that is there, else 0."""
    for key in keys:
        value = config.get(key)
        number = isinstance(value, (int, float)) and value is not True
        if value and not (number and int(value) == value):
            raise _no_number(key, value)
        if value:
            return int(value)
    return 0


def _no_number(key: str, value: Any) -> UsageError:
    return UsageError(
        f"the config has {key}={value!r}", remedy="pass the model's own, complete config"
    )


def _size(config: Mapping[str, Any], *keys: str) -> int:
    key = next((key for key in keys if key in config), keys[0])
    value = config.get(key)
    if not isinstance(value, int) or value is True or value < 1:
        raise _no_number(key, value)
    return value
