"""Tiny models of families that people train, to see under which names their exports come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# heads of 32, the smallest that vLLM has on CPUs
_COMMON: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 120, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24, "v_head_dim": 32, "head_dim": 8, "moe_intermediate_size": 48,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_GATED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 48, "head_dim": 32, "partial_rotary_factor": 0.5,
}  # fmt: skip
_ROTARY = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14,
    "out_hidden_size": 128, "deepstack_visual_indexes": [1], "num_position_embeddings": 16,
}  # fmt: skip
_GROUPED = {"n_group": 2, "topk_group": 1}

# model_type → transformers' config class, and what it has more or otherwise than `_COMMON`
_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 8, "num_hidden_layers": 4}),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "n_group": None, "topk_group": None}),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, **_GROUPED}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 32},
    ),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {"head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
         "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_embd": 128, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", {"intermediate_size": 512}),
    "gpt_oss": (
        "GptOssConfig", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
                         "sliding_window": 8},
    ),
    "gptj": ("GPTJConfig", {"n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 8,
                            "n_positions": 64}),
    "granite": ("GraniteConfig", {}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "jamba": (
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 4,
         "use_mamba_kernels": False},
    ),
    "llama": ("LlamaConfig", {}),
    "llama4_text": (
        "Llama4TextConfig",
        {"head_dim": 32, "intermediate_size_mlp": 96, "num_local_experts": 4,
         "num_experts_per_tok": 1, "moe_layers": [1], "attention_chunk_size": 16},
    ),
    "minimax": ("MiniMaxConfig", {"num_local_experts": 4, "head_dim": 32, "block_size": 8,
                                  "layer_types": ["linear_attention", "full_attention"]}),
    "mistral": ("MistralConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "nemotron": ("NemotronConfig", {"head_dim": 32}),
    "olmo2": ("Olmo2Config", {}),
    "olmoe": (
        "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 64}),
    # with the biases of the release
    "phimoe": (
        "PhimoeConfig", {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_QWEN, "shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_QWEN, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3_next": ("Qwen3NextConfig", {**_QWEN, **_GATED}),
    "smollm3": ("SmolLM3Config", {}),
    "starcoder2": ("Starcoder2Config", {}),
}  # fmt: skip
_IMAGES: dict[str, Callable[[Any], Any]] = {
    "gemma3": lambda tf: tf.Gemma3Config(
        text_config=_text(tf, "gemma3_text"), mm_tokens_per_image=4,
        vision_config=tf.SiglipVisionConfig(**_VISION, vision_use_head=False),  # as in the release
    ),
    "llava": lambda tf: tf.LlavaConfig(
        text_config=_text(tf, "llama"), vision_config=tf.CLIPVisionConfig(**_VISION),
        image_token_index=119,
    ),
    "qwen2_5_vl": lambda tf: tf.Qwen2_5_VLConfig(
        text_config={**_COMMON, **_ROTARY}, image_token_id=118, video_token_id=119,
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                       "patch_size": 14, "out_hidden_size": 128, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": lambda tf: tf.Qwen3VLConfig(
        text_config={**_COMMON, **_ROTARY, "head_dim": 32}, image_token_id=118, video_token_id=119,
        vision_config=_TOWER,
    ),
    "qwen3_vl_moe": lambda tf: tf.Qwen3VLMoeConfig(
        text_config={**_COMMON, **_ROTARY, **_QWEN, "head_dim": 32, "tie_word_embeddings": False},
        image_token_id=118, video_token_id=119, vision_config=_TOWER,
    ),
}  # fmt: skip
FAMILIES = sorted(_TEXT | _IMAGES)
# those that transformers 5 holds otherwise in memory than released models are on disk
CONVERTED = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma3", "glm4_moe", "gpt_neox", "granitemoe",
    "jamba", "llava", "minimax", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
    "qwen3_next", "qwen3_vl_moe",
)  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12) * 5 % 119


def model(family: str) -> Any:
    """Random in all of its parameters, experts and biases too."""
    import transformers as tf

    image = family in _IMAGES
    auto = tf.AutoModelForImageTextToText if image else tf.AutoModelForCausalLM
    torch.manual_seed(7)
    made = auto.from_config(_IMAGES[family](tf) if image else _text(tf, family))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return made.eval()


def logits(made: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = made(input_ids=TOKENS).logits
    return found


def _text(tf: Any, family: str) -> Any:
    kind, own = _TEXT[family]
    given = {**_COMMON, **own}
    if family == "gpt_neox":  # has no groups, and would keep the key
        del given["num_key_value_heads"]
    return getattr(tf, kind)(**given)
