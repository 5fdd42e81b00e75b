"""Vision-language models: a language model of another family, and a vision tower with sizes of its
own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smckpt.translate.tables.families.dense import FAMILIES as TEXT
from smckpt.translate.tables.families.mixtures import FAMILIES as MIXTURES
from smckpt.translate.tables.table import HF_TP, Family, pair, rows
from smckpt.translate.tables.table import LayoutRow as Row

_TEXT = {family.name: family for family in (*TEXT, *MIXTURES)}
_KEYS = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
_VIDEO = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}


_FUSED = (
    *pair("attn.qkv", "q", "k", "v"),
    *pair("attn.proj", "o"),
)
_QWEN2_5 = (
    Row("visual.patch_embed.proj.weight", ("patch_3d",)),
    Row("visual.merger.ln_q.weight", ("final_norm",)),
    *pair("visual.merger.mlp.0", "merge1"),
    *pair("visual.merger.mlp.2", "merge2"),
    *rows(
        "visual.blocks.{i}.",
        (
            Row("norm1.weight", ("norm1",)),
            Row("norm2.weight", ("norm2",)),
            *_FUSED,
            *(row for part in ("gate", "up", "down") for row in pair(f"mlp.{part}_proj", part)),
        ),
    ),
)
_MERGER = (*pair("linear_fc1", "merge1"), *pair("linear_fc2", "merge2"))
_QWEN3 = rows(
    "model.visual.",
    (
        Row("patch_embed.proj.weight", ("patch_3d",)),
        Row("patch_embed.proj.bias", ("patch_b",)),
        Row("pos_embed.weight", ("pos",)),
        *pair("merger.norm", "final_norm"),
        *rows("merger.", _MERGER),
        *rows(
            "blocks.{i}.",
            (
                *pair("norm1", "norm1"),
                *pair("norm2", "norm2"),
                *_FUSED,
                *pair("mlp.linear_fc1", "fc1"),
                *pair("mlp.linear_fc2", "fc2"),
            ),
        ),
    ),
)
# one for each of the tower's layers whose outputs go to the first layers of the language model
_DEEPSTACK = rows(
    "model.visual.deepstack_merger_list.{i}.", (*pair("norm", "merge_norm"), *_MERGER)
)
_SIGLIP = rows(
    "vision_tower.vision_model.",
    (
        Row("embeddings.patch_embedding.weight", ("patch_2d",)),
        Row("embeddings.patch_embedding.bias", ("patch_b",)),
        Row("embeddings.position_embedding.weight", ("pos",)),
        *pair("post_layernorm", "final_norm"),
        *rows(
            "encoder.layers.{i}.",
            (
                *pair("layer_norm1", "norm1"),
                *pair("layer_norm2", "norm2"),
                *(row for part in "qkv" for row in pair(f"self_attn.{part}_proj", part)),
                *pair("self_attn.out_proj", "o"),
                *pair("mlp.fc1", "fc1"),
                *pair("mlp.fc2", "fc2"),
            ),
        ),
    ),
)
# Its norm is stored minus one, as Gemma's others, and so in training.
_PROJECTOR = (
    Row("multi_modal_projector.mm_soft_emb_norm.weight", ("merge_norm",)),
    Row("multi_modal_projector.mm_input_projection_weight", ("merge2",), transposed=True),
)


def _siglip(config: Mapping[str, Any]) -> dict[str, Any]:
    """A picture is square; the projector's output has the language model's size."""
    side, patch, text = (config.get(k) for k in ("image_size", "patch_size", "text_config"))
    sizes: dict[str, Any] = {}
    if isinstance(side, int) and isinstance(patch, int) and patch > 0:
        sizes["max_position_embeddings"] = (side // patch) ** 2
    if isinstance(text, Mapping):
        sizes["out_hidden_size"] = text.get("hidden_size")
    return sizes


_GEMMA_TEXT = tuple((name, f"language_model.{name}") for name in ("model.", "lm_head."))


def _renamed(family: str, *changes: tuple[str, str]) -> tuple[Row, ...]:
    """The language model's table under the names that it has beside a tower."""
    return _TEXT[family].hub.renamed(family, *changes).rows


_TOWER_OF_QWEN3 = {
    "vision": Family("Qwen3's vision tower", _QWEN3, keys=_KEYS, defaults=_VIDEO,
                     derive=lambda config: {
                         "max_position_embeddings": config.get("num_position_embeddings")
                     }, section="vision_config"),
    "deepstack": Family("Qwen3's deepstack", _DEEPSTACK, keys=_KEYS, defaults=_VIDEO,
                        derive=lambda config: {
                            "num_hidden_layers": len(layers) if isinstance(
                                layers := config.get("deepstack_visual_indexes"), list
                            ) else 0
                        }, section="vision_config"),
}  # fmt: skip
_QWEN3_TEXT = ("model.", "model.language_model.")
_QWEN3_EXPERTS = (
    Row("mlp.experts.gate_up_proj", ("e_gate", "e_up"), transposed=True, stacked=True,
        when="sparse"),
    Row("mlp.experts.down_proj", ("e_down",), transposed=True, stacked=True, when="sparse"),
)  # fmt: skip

FAMILIES = (
    Family(
        "qwen2_5_vl", _TEXT["qwen2"].rows, _TEXT["qwen2"].drop, section="text_config",
        towers={"vision": Family("Qwen2.5's vision tower", _QWEN2_5, keys=_KEYS, defaults=_VIDEO,
                                section="vision_config")},
        in_memory=(("model.", "model.language_model."), ("visual.", "model.visual.")),
    ),
    Family(
        "qwen3_vl", _renamed("qwen3", _QWEN3_TEXT), _TEXT["qwen3"].drop, section="text_config",
        towers=_TOWER_OF_QWEN3, hf_tp={"head": 0}, in_bridge=(("model.visual.", "vision_model."),),
    ),
    Family(
        "qwen3_vl_moe",
        (
            *(row for row in _renamed("qwen3_moe", _QWEN3_TEXT) if not row.of_experts),
            *rows("model.language_model.layers.{i}.", _QWEN3_EXPERTS),
        ),
        _TEXT["qwen3_moe"].drop, section="text_config", towers=_TOWER_OF_QWEN3, hf_tp=HF_TP,
        in_bridge=(("model.visual.", "vision_model."),),
    ),
    Family(
        "gemma3", _renamed("gemma3_text", *_GEMMA_TEXT), _TEXT["gemma3_text"].drop,
        section="text_config",
        defaults={"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "head_dim": 256, "vocab_size": 262208},  # which releases leave out
        towers={"vision": Family("SigLIP", (*_SIGLIP, *_PROJECTOR), derive=_siglip,
                                defaults={"num_channels": 3}, keys={"in_channels": "num_channels"},
                                section="vision_config")},
        in_memory=(
            ("language_model.lm_head.", "lm_head."),
            ("language_model.model.", "model.language_model."),
            ("vision_tower.vision_model.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ),
        in_bridge=(("mm_soft_emb_norm", "mm_soft_embed_norm"),
                   ("mm_input_projection_weight", "proj.weight")),
    ),
)  # fmt: skip
