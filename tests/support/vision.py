"""Vision-language models for the references: shards of their language models and towers, cut from a
released state dict by straight torch code that knows nothing of smckpt's tables.

Under transformers' own tensor parallelism and in Megatron Bridge each rank has the whole tower; in
mbridge the tower is Megatron's too, and cut. Names and cuts are those of transformers 5.23,
megatron-bridge 0.3.1 and mbridge 0.15.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.references import D, G, H, State, V, _chunk, _interleaved, padded

FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
HEADS = 4  # of a tower
IMAGE, PATCH = 119, 4  # the token of an image; pixels along the side of a patch
_TEXT: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": H, "num_key_value_heads": G, "vocab_size": V,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TOWER: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "patch_size": PATCH}
_ROTARY = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def config(family: str, **more: Any) -> Any:
    import transformers as tf

    if family == "gemma3":
        siglip = {"num_hidden_layers": 3, "num_attention_heads": HEADS, "image_size": 4 * PATCH}
        own = {"head_dim": D, "sliding_window": 8, "query_pre_attn_scalar": 16}
        return tf.Gemma3Config(
            text_config={**_TEXT, **own, "hidden_size": 64}, mm_tokens_per_image=4,
            vision_config={**_TOWER, **siglip, "vision_use_head": False},
            image_token_index=IMAGE, boi_token_index=117, eoi_token_index=118, **more,
        )  # fmt: skip
    qwen: dict[str, Any] = {"depth": 3, "num_heads": HEADS}
    tokens = {"image_token_id": IMAGE, "video_token_id": 118, "vision_start_token_id": 117,
              "vision_end_token_id": 116}  # fmt: skip
    if family == "qwen2_5_vl":
        tower = {**_TOWER, **qwen, "out_hidden_size": 128, "fullatt_block_indexes": [1],
                 "window_size": 16}  # fmt: skip
        return tf.Qwen2_5_VLConfig(
            text_config={**_TEXT, **_ROTARY}, vision_config=tower, **tokens, **more
        )
    tower = {**_TOWER, **qwen, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 2],
             "num_position_embeddings": 16}  # fmt: skip
    text = {**_TEXT, **_ROTARY, "hidden_size": 64, "head_dim": D}
    if family == "qwen3_vl":
        return tf.Qwen3VLConfig(text_config=text, vision_config=tower, **tokens, **more)
    text |= {**_EXPERTS, "tie_word_embeddings": False}
    return tf.Qwen3VLMoeConfig(text_config=text, vision_config=tower, **tokens, **more)


def model(family: str, **more: Any) -> Any:
    """Random in all of its parameters."""
    from transformers import AutoModelForImageTextToText

    made = AutoModelForImageTextToText.from_config(config(family, **more))
    torch.manual_seed(17)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made.eval()


def picture(family: str) -> dict[str, Tensor]:
    """Tokens with one picture of 4 × 4 patches among them."""
    torch.manual_seed(3)
    tokens = torch.arange(20) * 7 % 110
    tokens[5:9] = IMAGE  # 4 × 4 patches, merged 2 × 2
    given = {"input_ids": tokens[None]}
    if family == "gemma3":
        pixels = torch.randn(1, 3, 4 * PATCH, 4 * PATCH)
        return {**given, "pixel_values": pixels, "token_type_ids": (given["input_ids"] == IMAGE).long()}
    given["input_ids"][0, 4] = 117
    kind = {"mm_token_type_ids": (given["input_ids"] == IMAGE).int()}
    return {**given, **kind, "pixel_values": torch.randn(16, 3 * 2 * PATCH * PATCH),
            "image_grid_thw": torch.tensor([[1, 4, 4]])}  # fmt: skip


def released(made: Any, folder: Any) -> State:
    """As transformers writes it, but for the two things in which it differs from releases: the
    prefix of SigLIP, and the order of Qwen3-VL-MoE's experts."""
    from safetensors.torch import load_file, save_file

    made.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    if made.config.model_type == "qwen3_vl_moe":
        state = {n: t.mT.contiguous() if ".mlp.experts." in n else t for n, t in state.items()}
    state = {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return state


def hf_tp(family: str, made: Any, t: int, r: int) -> State:
    """What each rank holds under transformers' own plan, names as in memory. The plan of Qwen3-VL
    has the head alone."""
    out = {}
    for name, tensor in made.state_dict().items():
        last = name.split(".")[-2] if not name.endswith("_proj") else name.split(".")[-1]
        tower = "language_model." not in name and last != "lm_head"
        if tower or (family == "qwen3_vl" and last != "lm_head"):
            out[name] = tensor
        elif last in ("o_proj", "down_proj"):
            out[name] = _chunk(tensor, t, r, tensor.dim() - 1)
        elif last == "gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            out[name] = torch.cat([_chunk(gate, t, r, 1), _chunk(up, t, r, 1)], 1)
        elif last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens",
                      "lm_head"):  # fmt: skip
            out[name] = _chunk(tensor, t, r)
        else:
            out[name] = tensor
    return out
