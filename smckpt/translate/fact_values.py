"""What a trainer's arguments say of a model, whatever they call it (`fact_table.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def head_size(values: Mapping[str, Any]) -> Any:
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if values.get("kv_channels") is not None or not heads or not hidden:
        return values.get("kv_channels")
    return hidden // heads


def gated(values: Mapping[str, Any]) -> bool | None:
    for name in ("gated_linear_unit", "swiglu", "quick_geglu", "geglu", "glu_activation"):
        if values.get(name):
            return True
    activation = values.get("activation")
    if isinstance(activation, str):
        return activation.endswith("glu")
    return False if {"gated_linear_unit", "swiglu"} & values.keys() else None


def swish(values: Mapping[str, Any]) -> bool | None:
    """Whether the gate's activation is SiLU, where it is known that there is a gate."""
    function = values.get("activation_func")
    if isinstance(function, str) and values.get("gated_linear_unit"):
        return function in ("silu", "swish")
    activation = str(values.get("glu_activation") or values.get("activation"))
    if values.get("swiglu") or activation.endswith("swiglu"):
        return True
    return (
        False
        if values.get("quick_geglu") or values.get("geglu") or activation.endswith("glu")
        else None
    )


def untied(values: Mapping[str, Any]) -> bool | None:
    for name, turned in (
        ("untie_embeddings_and_output_weights", False), ("no_weight_tying", False),
        ("share_embeddings_and_output_weights", True),
    ):  # fmt: skip
        if isinstance(values.get(name), bool):
            return bool(values[name]) != turned
    return None


def norm(values: Mapping[str, Any]) -> str | None:
    found = values.get("normalization", values.get("norm"))
    if not isinstance(found, str):
        return None
    kinds = {"rms": "RMSNorm", "layer": "LayerNorm"}  # GPT-NeoX has a scalenorm too
    return next((kind for part, kind in kinds.items() if part in found.lower()), found)


def positions(values: Mapping[str, Any]) -> str | None:
    if values.get("use_rotary_position_embeddings"):
        return "rope"
    found = values.get("position_embedding_type", values.get("pos_emb"))
    if not isinstance(found, str):
        return None
    found = {"rotary": "rope", "yarn": "rope", "mrope": "rope"}.get(found, found)
    return "learned_absolute" if found == "learned" else found


def kind_of_activation(found: Any) -> str | None:
    """Forms of GELU are near each other, and trainers do not say which they compute."""
    if not isinstance(found, str) or found.endswith("glu") or found == "quick_gelu":
        return None
    found = found.replace("-", "_").removeprefix("fast_").removeprefix("openai_")
    known = {"swish": "silu", "squared_relu": "relu2"}
    return "gelu" if "gelu" in found else known.get(found, found)


def activation(values: Mapping[str, Any]) -> str | None:
    """That of an MLP without a gate."""
    if gated(values) is not False:
        return None
    if (found := values.get("activation", values.get("activation_func"))) is not None:
        return kind_of_activation(found)
    # Megatron-LM's: it is GELU unless another is named
    return "gelu" if "openai_gelu" in values and not values.get("squared_relu") else None


def experts_of(values: Mapping[str, Any]) -> Any:
    found = values.get("num_experts")
    if isinstance(found, tuple) and len(set(found)) == 1:  # Megatron-DeepSpeed's, of each layer
        found = found[0] if found[0] > 1 else 0
    return (found or 0) if "num_experts" in values else None


def to_even(size: Any) -> int | None:
    """Of a window, for trainers do not agree on whether it counts the query itself."""
    return size + size % 2 if type(size) is int and size > 0 else None


def squared(values: Mapping[str, Any]) -> bool | None:
    found = values.get("activation", values.get("activation_func"))
    if isinstance(found, str):
        return found.replace("_", "-") == "squared-relu"
    return values.get("squared_relu")


def without_rope(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers that Megatron does not turn."""
    found, layers = values.get("no_rope_freq", 0), values.get("num_layers")
    if isinstance(found, int) and found > 0 and layers:
        return tuple(range(found - 1, layers, found))
    if isinstance(found, tuple):
        return tuple(layer for layer, left in enumerate(found) if left)
    return () if "no_rope_freq" in values else None


def if_yarn(name: str, also: str = "") -> Callable[[Mapping[str, Any]], Any]:
    """A value of YaRN's without latent attention. also: what newer versions call it."""
    return lambda values: (
        values.get(name, values.get(also))
        if values.get("position_embedding_type") == "yarn"
        and not values.get("multi_latent_attention")
        else None
    )


def yarn_scale(factor: Any, by: Any = 1.0) -> float | None:
    """YaRN's correction of attention for a context that is `factor` times longer."""
    if not isinstance(factor, (int, float)) or not isinstance(by, (int, float)):
        return None
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def yarn_turned(values: Mapping[str, Any], *, latent: bool) -> float | None:
    """What YaRN multiplies cosines and sines by."""
    if values.get("rope_type" if latent else "position_embedding_type") != "yarn" and (
        not latent or values.get("rope_type") == "rope"
    ):
        return None
    lead = "" if latent or "yarn_rotary_scaling_factor" not in values else "yarn_"
    factor, up, down = (
        values.get(f"{lead}{name}")
        for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")
    )
    if up is None or down is None:
        return yarn_scale(factor)
    one, two = yarn_scale(factor, up), yarn_scale(factor, down)
    return None if one is None or two is None else one / two


def mup_attention(values: Mapping[str, Any]) -> float | None:
    """The factor of attention's scores under muP."""
    size, power = values.get("kv_channels"), values.get("mup_attn_scale_power")
    if not values.get("use_mup") or not size or not isinstance(power, (int, float)):
        return None
    return float(math.sqrt(values.get("mup_base_head_dim") or 1.0) / size**power)


def softmax_scale(values: Mapping[str, Any]) -> float | None:
    """The factor of attention's scores; None in its place means one by the head's root."""
    size = head_size(values)
    scaled = values.get("use_mup") or values.get("query_pre_attn_scalar") is not None
    if values.get("softmax_scale") is not None or scaled or not size:
        return values.get("softmax_scale")
    return float(size**-0.5) if "softmax_scale" in values else None


def mup_output(values: Mapping[str, Any]) -> float | None:
    """The factor of the logits under muP."""
    found = values.get("mup_output_mult")
    if "use_mup" in values and not values["use_mup"]:
        return 1.0
    if not values.get("use_mup") or not isinstance(found, (int, float)):
        return None
    base, size = values.get("mup_base_hidden_size"), values.get("hidden_size")
    return base / size if found == 1.0 and base and size else float(found)


def whole_layers(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose attention has no window."""
    found, layers = values.get("window_attn_skip_freq"), values.get("num_layers")
    if isinstance(found, int) and found > 0 and isinstance(layers, int):
        return tuple(range(found - 1, layers, found))
    if isinstance(found, tuple):
        return tuple(layer for layer, windowed in enumerate(found) if not windowed)
    return None


def interleaved(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The same, of a pattern: so many layers with a window, then one without."""
    found, layers = values.get("interleaved_attn_pattern"), values.get("num_layers")
    if not isinstance(found, tuple) or len(found) != 2 or not sum(found) or type(layers) is not int:
        return None
    return tuple(range(sum(found) - 1, layers, sum(found)))


def or_absent(name: str, absent: Any) -> Callable[[Mapping[str, Any]], Any]:
    """absent: what None, and zero, mean where the name is there."""
    return lambda values: (values[name] or absent) if name in values else None
