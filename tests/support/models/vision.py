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

from tests.support.models.references import (
    D,
    G,
    H,
    State,
    V,
    _chunk,
    _interleaved,
    hf_tp_part,
    padded,
    randomized,
)

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
    from transformers import AutoModelForImageTextToText

    return randomized(AutoModelForImageTextToText.from_config(config(family, **more)), 17)


def picture(family: str) -> dict[str, Tensor]:
    """Tokens with one picture of 4 × 4 patches among them."""
    torch.manual_seed(3)
    tokens = torch.arange(20) * 7 % 110
    tokens[5:9] = IMAGE  # 4 × 4 patches, merged 2 × 2
    given = {"input_ids": tokens[None]}
    if family == "gemma3":
        pixels = torch.randn(1, 3, 4 * PATCH, 4 * PATCH)
        return {
            **given,
            "pixel_values": pixels,
            "token_type_ids": (given["input_ids"] == IMAGE).long(),
        }
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
        whole = tower or (family == "qwen3_vl" and last != "lm_head")
        out[name] = tensor if whole else hf_tp_part(name, tensor, t, r)
    return out


def _language(family: str, hf: State) -> State:
    """The language model's tensors by the names of the family without a tower."""
    text = "language_model.model." if family == "gemma3" else "model."
    text = "model.language_model." if family.startswith("qwen3") else text
    return {n[len(text) :]: t for n, t in hf.items()
            if n.startswith(text) and not n.startswith("model.visual.")}  # fmt: skip


def _gated(own: State, kind: str, t: int, r: int) -> Tensor:
    return torch.cat([_chunk(own[f"mlp.{p}_proj.{kind}"], t, r) for p in ("gate", "up")])


def _megatron(
    family: str, hf: State, t: int, r: int, ep: int, er: int, posts: tuple[str, str]
) -> State:
    """The language model under Megatron's names. posts: those of Gemma's norms after attention and
    the MLP."""
    text = _language(family, hf)
    out = {
        "embedding.word_embeddings.weight": _chunk(padded(text["embed_tokens.weight"], 128), t, r),
        "decoder.final_layernorm.weight": text["norm.weight"],
    }
    gemma = family == "gemma3"
    head = hf.get("language_model.lm_head.weight" if gemma else "lm_head.weight")
    if head is not None:
        out["output_layer.weight"] = _chunk(padded(head, 128), t, r)
    for i in range(2):
        at = f"layers.{i}."
        own = {n[len(at) :]: x for n, x in text.items() if n.startswith(at)}
        layer = {
            "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            "self_attention.linear_proj.weight": _chunk(own["self_attn.o_proj.weight"], t, r, 1),
        }
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in own:
                parts = [own[f"self_attn.{p}_proj.{kind}"] for p in "qkv"]
                fused = _interleaved(*parts, H, G, D)
                layer[f"self_attention.linear_qkv.{kind}"] = _chunk(fused, t, r)
        for p in "qk":
            if f"self_attn.{p}_norm.weight" in own:
                layer[f"self_attention.{p}_layernorm.weight"] = own[f"self_attn.{p}_norm.weight"]
        norm2 = own[
            "pre_feedforward_layernorm.weight" if gemma else "post_attention_layernorm.weight"
        ]
        if gemma:
            layer[posts[0]] = own["post_attention_layernorm.weight"]
            layer[posts[1]] = own["post_feedforward_layernorm.weight"]
        if "mlp.gate.weight" in own:
            layer["pre_mlp_layernorm.weight"] = norm2
            layer["mlp.router.weight"] = own["mlp.gate.weight"]
            both, down = (own[f"mlp.experts.{n}"] for n in ("gate_up_proj", "down_proj"))
            each = len(both) // ep
            for e in range(each):  # released: inputs × outputs
                gate, up = both[er * each + e].T.chunk(2)
                fc1 = torch.cat([_chunk(gate, t, r), _chunk(up, t, r)])
                layer[f"mlp.experts.linear_fc1.weight{e}"] = fc1
                layer[f"mlp.experts.linear_fc2.weight{e}"] = _chunk(down[er * each + e].T, t, r, 1)
        else:
            layer["mlp.linear_fc1.layer_norm_weight"] = norm2
            layer["mlp.linear_fc1.weight"] = _gated(own, "weight", t, r)
            layer["mlp.linear_fc2.weight"] = _chunk(own["mlp.down_proj.weight"], t, r, 1)
        out |= {f"decoder.layers.{i}.{n}": x for n, x in layer.items()}
    return {f"language_model.{n}": x for n, x in out.items()}


def bridge(family: str, hf: State, t: int, r: int, ep: int = 1, er: int = 0) -> State:
    """As Megatron Bridge has it: the tower is Hugging Face's own module."""
    posts = ("self_attention.linear_proj.post_layernorm.weight",
             "mlp.linear_fc2.post_layernorm.weight")  # fmt: skip
    out = _megatron(family, hf, t, r, ep, er, posts)
    for name, tensor in hf.items():
        if name.startswith("model.visual."):  # Qwen3
            out[name.replace("model.visual.", "vision_model.")] = tensor
        elif name.startswith(("visual.", "vision_tower.")):
            out[name] = tensor
    if family == "gemma3":
        norm, weight = (hf[f"multi_modal_projector.mm_{n}"] for n in (
            "soft_emb_norm.weight", "input_projection_weight"))  # fmt: skip
        out["multi_modal_projector.mm_soft_embed_norm.weight"] = norm
        out["multi_modal_projector.proj.weight"] = _chunk(weight.T, t, r)
    return out


def mbridge(family: str, hf: State, t: int, r: int) -> State:
    """As mbridge has it: the tower is Megatron's, and cut."""
    posts = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    out = _megatron(family, hf, t, r, 1, 0, posts)
    return out | (_siglip(hf, t, r) if family == "gemma3" else _qwen(hf, t, r))


def _qwen(hf: State, t: int, r: int) -> State:
    merger = "vision_model.projection.encoder."
    out = {
        "vision_model.patch_embed.proj.weight": hf["visual.patch_embed.proj.weight"],
        "vision_model.decoder.final_layernorm.weight": hf["visual.merger.ln_q.weight"],
        f"{merger}linear_fc1.weight": _chunk(hf["visual.merger.mlp.0.weight"], t, r),
        f"{merger}linear_fc1.bias": _chunk(hf["visual.merger.mlp.0.bias"], t, r),
        f"{merger}linear_fc2.weight": _chunk(hf["visual.merger.mlp.2.weight"], t, r, 1),
        f"{merger}linear_fc2.bias": hf["visual.merger.mlp.2.bias"],
    }
    for i in range(3):
        at, to = f"visual.blocks.{i}.", f"vision_model.decoder.layers.{i}."
        own = {n[len(at) :]: x for n, x in hf.items() if n.startswith(at)}
        for kind in ("weight", "bias"):
            fused = _interleaved(*own[f"attn.qkv.{kind}"].chunk(3), HEADS, HEADS, 48 // HEADS)
            out[f"{to}self_attention.linear_qkv.{kind}"] = _chunk(fused, t, r)
            out[f"{to}mlp.linear_fc1.{kind}"] = _gated(own, kind, t, r)
        out[f"{to}self_attention.linear_qkv.layer_norm_weight"] = own["norm1.weight"]
        out[f"{to}mlp.linear_fc1.layer_norm_weight"] = own["norm2.weight"]
        out[f"{to}self_attention.linear_proj.weight"] = _chunk(own["attn.proj.weight"], t, r, 1)
        out[f"{to}self_attention.linear_proj.bias"] = own["attn.proj.bias"]
        out[f"{to}mlp.linear_fc2.weight"] = _chunk(own["mlp.down_proj.weight"], t, r, 1)
        out[f"{to}mlp.linear_fc2.bias"] = own["mlp.down_proj.bias"]
    return out


def _siglip(hf: State, t: int, r: int) -> State:
    tower, projector = "vision_tower.vision_model.", "vision_projection.mm_input_projection."
    weight = hf["multi_modal_projector.mm_input_projection_weight"].T
    out = {
        "vision_model.conv1.weight": hf[f"{tower}embeddings.patch_embedding.weight"],
        "vision_model.conv1.bias": hf[f"{tower}embeddings.patch_embedding.bias"],
        "vision_model.position_embeddings.weight": hf[
            f"{tower}embeddings.position_embedding.weight"],
        "vision_model.ln_post.weight": hf[f"{tower}post_layernorm.weight"],
        "vision_model.ln_post.bias": hf[f"{tower}post_layernorm.bias"],
        f"{projector}layer_norm_weight": hf["multi_modal_projector.mm_soft_emb_norm.weight"],
        f"{projector}weight": _chunk(weight, t, r),
    }  # fmt: skip
    for i in range(3):
        at, to = f"{tower}encoder.layers.{i}.", f"vision_model.decoder.layers.{i}."
        own = {n[len(at) :]: x for n, x in hf.items() if n.startswith(at)}
        for kind in ("weight", "bias"):
            parts = [own[f"self_attn.{p}_proj.{kind}"] for p in "qkv"]
            fused = _interleaved(*parts, HEADS, HEADS, 48 // HEADS)
            out[f"{to}self_attention.linear_qkv.{kind}"] = _chunk(fused, t, r)
            out[f"{to}self_attention.linear_qkv.layer_norm_{kind}"] = own[f"layer_norm1.{kind}"]
            out[f"{to}mlp.linear_fc1.layer_norm_{kind}"] = own[f"layer_norm2.{kind}"]
            out[f"{to}mlp.linear_fc1.{kind}"] = _chunk(own[f"mlp.fc1.{kind}"], t, r)
        out[f"{to}self_attention.linear_proj.weight"] = _chunk(
            own["self_attn.out_proj.weight"], t, r, 1)  # fmt: skip
        out[f"{to}self_attention.linear_proj.bias"] = own["self_attn.out_proj.bias"]
        out[f"{to}mlp.linear_fc2.weight"] = _chunk(own["mlp.fc2.weight"], t, r, 1)
        out[f"{to}mlp.linear_fc2.bias"] = own["mlp.fc2.bias"]
    return out
