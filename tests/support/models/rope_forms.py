"""Configs of each rope type, as both versions of transformers write them."""

from __future__ import annotations

from typing import Any

__all__ = ["NEW", "OLD", "TINY"]

TINY = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FACTORS = {"short_factor": [1.0 + n / 8 for n in range(16)],
           "long_factor": [2.0 + n for n in range(16)]}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
BASE = {"rope_theta": 5e5}
NEOX = {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")}
NEOX["intermediate_size"] = 512  # mlx-lm has no other
MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6]}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32,
         "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}  # fmt: skip
# model type and more → version 5's rope_parameters
NEW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"model_type": "llama"}, {"rope_type": "default", **BASE}),
    "linear": ({"model_type": "llama"}, {"rope_type": "linear", "factor": 4.0, **BASE}),
    "dynamic": ({"model_type": "llama"}, {"rope_type": "dynamic", "factor": 4.0, **BASE}),
    "llama3": ({"model_type": "llama"}, {"rope_type": "llama3", **LLAMA3, **BASE}),
    "yarn": ({"model_type": "qwen2"}, {"rope_type": "yarn", **YARN, **BASE}),
    "yarn, qwen3": ({"model_type": "qwen3"}, {"rope_type": "yarn", **YARN, **BASE}),
    "longrope, phi3": (
        {"model_type": "phi3", "original_max_position_embeddings": 64},
        {"rope_type": "longrope", **FACTORS, **BASE, "original_max_position_embeddings": 64,
         "partial_rotary_factor": 1.0},
    ),
    "plain, phi3": ({"model_type": "phi3"}, {"rope_type": "default", **BASE}),
    "longrope, phimoe": (
        {"model_type": "phimoe", "num_local_experts": 4, "attention_bias": True,
         "lm_head_bias": True, "original_max_position_embeddings": 64},
        {"rope_type": "longrope", **FACTORS, **BASE, "original_max_position_embeddings": 64,
         "factor": 4.0, "short_mscale": 1.0, "long_mscale": 1.0},
    ),
    "longrope, llama": (
        {"model_type": "llama"},
        {"rope_type": "longrope", **FACTORS, **BASE, "original_max_position_embeddings": 64,
         "factor": 4.0},
    ),
    "gpt_neox": (
        {**NEOX, "model_type": "gpt_neox"},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    ),
    "gemma3_text": (
        {"model_type": "gemma3_text", **GEMMA},
        {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
         "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}},
    ),
    "mrope, qwen2_5_vl_text": ({"model_type": "qwen2_5_vl_text"}, {**MROPE, **BASE}),
}  # fmt: skip
OLD: dict[str, dict[str, Any]] = {
    "linear": {"model_type": "llama", **BASE, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"model_type": "llama", **BASE, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "su": {"model_type": "phi3", **BASE, "original_max_position_embeddings": 64,
           "rope_scaling": {"type": "su", **FACTORS}},
    "longrope": {"model_type": "phi3", **BASE, "original_max_position_embeddings": 64,
                 "rope_scaling": {"type": "longrope", **FACTORS}},
    "yarn of phi3": {"model_type": "phi3", **BASE, "original_max_position_embeddings": 64,
                     "rope_scaling": {"type": "yarn", **FACTORS}},
    "dynamic": {"model_type": "llama", **BASE, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "yarn": {"model_type": "qwen2", **BASE, "rope_scaling": {"type": "yarn", **YARN}},
    "mrope": {"model_type": "qwen2_5_vl_text", **BASE,
              "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "gemma3_text": {"model_type": "gemma3_text", **GEMMA, "rope_theta": 1e6,
                    "rope_local_base_freq": 5e3,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gpt_neox": {**NEOX, "model_type": "gpt_neox", "rotary_emb_base": 50000, "rotary_pct": 0.5},
}  # fmt: skip
