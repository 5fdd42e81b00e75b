"""The sizes of a model, from its config: what shapes and formulas are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smckpt.errors import UsageError
from smckpt.layout.geometry import Shape
from smckpt.translate.runs import Heads

__all__ = ["ROLES", "Dims", "read_dims"]

# Shapes of the roles: X hidden, V vocabulary, F and M widths of the dense and the experts' MLP,
# Q and K rows of all query and all key heads, D a head, E experts.
ROLES: Mapping[str, str] = {
    "embed": "VX", "head": "VX", "final_norm": "X", "final_norm_b": "X",
    "norm1": "X", "norm1_b": "X", "norm2": "X", "norm2_b": "X",
    "q": "QX", "k": "KX", "v": "KX", "q_b": "Q", "k_b": "K", "v_b": "K",
    "o": "XQ", "o_b": "X", "q_norm": "D", "k_norm": "D",
    "gate": "FX", "up": "FX", "down": "XF", "gate_b": "F", "up_b": "F", "down_b": "X",
    "fc1": "FX", "fc1_b": "F", "fc2": "XF", "fc2_b": "X",
    "router": "EX", "e_gate": "MX", "e_up": "MX", "e_down": "XM",
}  # fmt: skip


@dataclass(frozen=True)
class Dims:
    """Sizes; `family` is the config's model_type. `roles` of all layers but for the MLP's."""

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

    def shape(self, role: str) -> Shape:
        return tuple(self.sizes[letter] for letter in ROLES[role])

    @property
    def experts(self) -> int:
        return self.sizes["E"]

    def roles(self, layer: int) -> frozenset[str]:
        return self.every | (self.sparse if layer in self.sparse_layers else self.dense)


_GATED = frozenset({"gate", "up", "down"})
_SPARSE = frozenset({"router", "e_gate", "e_up", "e_down"})
_ATTENTION = frozenset({"norm1", "norm2", "q", "k", "v", "o"})
_QKV_BIAS = frozenset({"q_b", "k_b", "v_b"})


def read_dims(config: Mapping[str, Any]) -> Dims:
    """The sizes of the model that `config` describes.

    Raises:
        UsageError: a size is missing, or sizes contradict each other.
    """
    family = str(config["model_type"])
    hidden, count = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    groups = int(config.get("num_key_value_heads") or count)
    if count % groups:
        raise UsageError(
            f"{count} attention heads are not a multiple of {groups} key/value heads",
            remedy="pass the config that the model was trained with",
        )
    head = int(config.get("head_dim") or hidden // count)
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    width = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
    every = set(_ATTENTION)
    once, dense = {"embed", "final_norm"}, set(_GATED)
    tied = bool(config.get("tie_word_embeddings", _TIED.get(family, False)))
    if not tied:
        once.add("head")
    if family == "gpt_neox":
        once.add("final_norm_b")
        every |= {"norm1_b", "norm2_b"}
        dense = {"fc1", "fc1_b", "fc2", "fc2_b"}
    if family == "qwen2" or config.get("attention_bias", family == "gpt_neox"):
        every |= _QKV_BIAS | (set() if family == "qwen2" else {"o_b"})
    if family in ("qwen3", "qwen3_moe"):
        every |= {"q_norm", "k_norm"}
    if config.get("mlp_bias"):
        dense |= {"gate_b", "up_b", "down_b"}
    layers = _size(config, "num_hidden_layers")
    sizes = {
        "X": hidden, "V": _size(config, "vocab_size"), "F": _size(config, "intermediate_size"),
        "M": width, "Q": count * head, "K": groups * head, "D": head, "E": experts,
    }  # fmt: skip
    return Dims(
        family, layers, sizes, Heads(groups, count // groups, head, _rotary(config, head)), tied,
        frozenset(once), frozenset(every), frozenset(dense), _SPARSE,
        _sparse_layers(config, family, layers, experts),
    )  # fmt: skip


_TIED = {"llama": False, "mistral": False, "gpt_neox": False, "mixtral": False}


def _sparse_layers(
    config: Mapping[str, Any], family: str, layers: int, experts: int
) -> frozenset[int]:
    if family not in ("mixtral", "qwen3_moe") or not experts:
        return frozenset()
    step = int(config.get("decoder_sparse_step") or 1)
    only_dense = set(config.get("mlp_only_layers") or ())
    return frozenset(i for i in range(layers) if i not in only_dense and (i + 1) % step == 0)


def _rotary(config: Mapping[str, Any], head: int) -> int:
    rope = config.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    for key in ("partial_rotary_factor", "rotary_pct"):
        if part is None:
            part = config.get(key)
    rotary = head if part is None else math.floor(head * float(part))
    if rotary % 2:
        raise UsageError(
            f"{rotary} of {head} rows of a head are rotary, an odd number",
            remedy="pass the config that the model was trained with",
        )
    return rotary


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UsageError(
            f"the config has {key}={value!r}", remedy="pass the model's own, complete config"
        )
    return value
