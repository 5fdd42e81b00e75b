"""torchtitan's models and its own adapters for Hugging Face's names, on CPU.

Run with folders of Hugging Face models, each with `theirs/data-….safetensors`: the model by
torchtitan's names. Writes into each folder:

- the state of torchtitan's model that its adapter filled, and its logits: `titan1.pt`,
  `logits1.pt` with query, key and value in one module, `…0.pt` with three;
- the logits of a model that took `theirs`: `logits_theirs.pt`;
- `theirs` by Hugging Face's names, as the adapter has them: `hf.pt`;
- `dcp`: what torchtitan's checkpointer would have written.

Attention is torch's own for CPUs, and experts multiply in float32; torchtitan rounds what goes into
their products to bfloat16. GPT-OSS's adapter in 0.3.0 has other names for the experts than its
model has: straight torch code stands in for it there.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch.nn.attention.flex_attention import flex_attention

# For GPUs, written for a compiler that is not here; nothing below calls them.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()

from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3  # noqa: E402
from torchtitan.models.common import (  # noqa: E402
    ComplexRoPE,
    CosSinRoPE,
    Embedding,
    Linear,
    RMSNorm,
)
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.common.config_utils import make_gqa_config  # noqa: E402

State = dict[str, torch.Tensor]
INNER = "moe.routed_experts.inner_experts."
OSS = {  # GPT-OSS's experts in torchtitan → in Hugging Face's files; matrices are transposed
    f"layers.{{}}.{INNER}{ours}": f"model.layers.{{}}.mlp.experts.{theirs}"
    for ours, theirs in (
        ("mlp1_weight_EGD", "gate_up_proj"), ("mlp1_bias_EG", "gate_up_proj_bias"),
        ("mlp2_weight_EDF", "down_proj"), ("mlp2_bias_ED", "down_proj_bias"),
    )
}  # fmt: skip


def llama(hf: dict[str, Any], sizes: dict[str, Any], fused: bool) -> tuple[Any, Any]:
    turns = ComplexRoPE.Config(**rope(hf))
    made = llama3._build_llama3_layers(
        **sizes, hidden_dim=hf["intermediate_size"], attn_backend="flex", fuse_qkv=fused, rope=turns
    )
    wide = {key: value for key, value in sizes.items() if key != "n_layers"}
    for layer in made:
        layer.attention = make_gqa_config(
            **wide, head_dim=hf["head_dim"], wqkv_param_init={}, wo_param_init={}, rope=turns,
            inner_attention=layer.attention.inner_attention, fuse_qkv=fused,
        )  # fmt: skip
    return llama3.Llama3Model, made


def qwen(hf: dict[str, Any], sizes: dict[str, Any], fused: bool) -> tuple[Any, Any]:
    own = {**sizes, "attn_backend": "flex", "fuse_qkv": fused, "head_dim": hf["head_dim"],
           "rope": CosSinRoPE.Config(**rope(hf))}  # fmt: skip
    if hf["model_type"] == "qwen3":
        made = qwen3._build_qwen3_layers(**own, hidden_dim=hf["intermediate_size"])
    else:
        made = qwen3._build_qwen3_moe_layers(
            **own, moe_hidden_dim=hf["moe_intermediate_size"], num_experts=hf["num_local_experts"],
            top_k=hf["num_experts_per_tok"], moe_comm_backend="standard",
        )  # fmt: skip
    return qwen3.Qwen3Model, made


def oss(hf: dict[str, Any], sizes: dict[str, Any], fused: bool) -> tuple[Any, Any]:
    made = gpt_oss._build_gptoss_layers(
        dim=sizes["dim"], n_layers=sizes["n_layers"], hidden_dim=hf["intermediate_size"],
        num_experts=hf["num_local_experts"], top_k=hf["num_experts_per_tok"],
        load_balance_coeff=1e-3, attn_backend="flex", moe_comm_backend="standard",
        rope=CosSinRoPE.Config(**rope(hf)),
    )  # fmt: skip
    for i, layer in enumerate(made):
        layer.attention = gpt_oss._make_gptoss_attn_config(
            **{k: v for k, v in sizes.items() if k != "n_layers"}, layer_id=i,
            attn_backend="flex", head_dim=hf["head_dim"], fuse_qkv=fused, rope=layer.attention.rope,
            sliding_window_size=hf["sliding_window"] if i % 2 == 0 else None,
        )  # fmt: skip
    return gpt_oss.GptOssModel, made


def deepseek(hf: dict[str, Any], sizes: dict[str, Any], fused: bool) -> tuple[Any, Any]:
    third = hf["model_type"] == "deepseek_v3"
    groups = {"router_num_expert_groups": hf["n_group"],
              "router_num_limited_groups": hf["topk_group"]}  # fmt: skip
    made = deepseek_v3._build_dsv3_layers(
        n_layers=sizes["n_layers"], dim=sizes["dim"], n_heads=sizes["n_heads"],
        n_dense_layers=hf["first_k_dense_replace"], dense_hidden_dim=hf["intermediate_size"],
        q_lora_rank=hf["q_lora_rank"] or 0, moe_hidden_dim=hf["moe_intermediate_size"],
        **{k: hf[k] for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                              "v_head_dim")},
        mscale=1.0, num_experts=hf["n_routed_experts"], num_shared_experts=hf["n_shared_experts"],
        router_top_k=hf["num_experts_per_tok"], router_score_func="sigmoid" if third else "softmax",
        router_route_scale=hf["routed_scaling_factor"], router_route_norm=hf["norm_topk_prob"],
        **(groups if third else {}), attn_backend="flex", moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(**{**rope(hf), "dim": hf["qk_rope_head_dim"]}),
    )  # fmt: skip
    return deepseek_v3.DeepSeekV3Model, made


FAMILIES = {
    "llama": (llama, llama3.Llama3StateDictAdapter),
    "mistral": (llama, llama3.Llama3StateDictAdapter),
    "qwen3": (qwen, qwen3.Qwen3StateDictAdapter),
    "qwen3_moe": (qwen, qwen3.Qwen3StateDictAdapter),
    "gpt_oss": (oss, gpt_oss.GptOssStateDictAdapter),
    "deepseek_v2": (deepseek, deepseek_v3.DeepSeekV3StateDictAdapter),
    "deepseek_v3": (deepseek, deepseek_v3.DeepSeekV3StateDictAdapter),
}


def rope(hf: dict[str, Any]) -> dict[str, Any]:
    said = hf["rope_parameters"]
    out = {"dim": hf["head_dim"], "max_seq_len": hf["max_position_embeddings"],
           "theta": said["rope_theta"]}  # fmt: skip
    if said["rope_type"] == "yarn":
        out |= {"scaling": "yarn", "rope_factor": said["factor"], "truncate": said["truncate"],
                "original_seq_len": said["original_max_position_embeddings"],
                "beta_fast": said["beta_fast"], "beta_slow": said["beta_slow"]}  # fmt: skip
    return out


def config_of(hf: dict[str, Any], fused: bool) -> Any:
    """torchtitan's config of a whole model, made by its own functions for layers."""
    sizes = {"dim": hf["hidden_size"], "n_layers": hf["num_hidden_layers"],
             "n_heads": hf["num_attention_heads"],
             "n_kv_heads": hf["num_key_value_heads"]}  # fmt: skip
    kind, layers = FAMILIES[hf["model_type"]][0](hf, sizes, fused)
    made = kind.Config(
        dim=sizes["dim"], vocab_size=hf["vocab_size"], layers=layers,
        norm=RMSNorm.Config(normalized_shape=sizes["dim"]),
        tok_embeddings=Embedding.Config(
            num_embeddings=hf["vocab_size"], embedding_dim=sizes["dim"]
        ),
        lm_head=Linear.Config(in_features=sizes["dim"], out_features=hf["vocab_size"]),
        enable_weight_tying=bool(hf["tie_word_embeddings"]),
    )  # fmt: skip
    for part in parts(made):
        if isinstance(part, RMSNorm.Config):
            part.eps = hf["rms_norm_eps"]
        if hf["model_type"] != "gpt_oss" and hasattr(part, "inner_attention"):
            part.inner_attention = ScaledDotProductAttention.Config()
    return made


def parts(config: Any) -> Iterator[Any]:
    if isinstance(config, list):
        for each in config:
            yield from parts(each)
    elif dataclasses.is_dataclass(config):
        yield config
        for field in dataclasses.fields(config):
            yield from parts(getattr(config, field.name))


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) % 120
    masks = None
    if isinstance(model, gpt_oss.GptOssModel):
        masks = model.get_attention_masks(torch.arange(20).expand(2, 20))
    with (
        torch.no_grad(),
        mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor),
        mock.patch.object(FlexAttention, "_compiled_flex_attn", flex_attention),
    ):
        return model(tokens, attention_masks=masks)


def fill(model: Any, state: State) -> None:
    """All but what no file of Hugging Face has: the bias that balances experts stays zero, and a
    tied head is the embedding."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if model.enable_weight_tying else set()
    lost = [n for n in missing if n not in tied and not n.endswith("moe.expert_bias_E")]
    assert not unexpected and not lost, (lost, unexpected)


def from_hf(adapter: Any, hf: State) -> State:
    out = adapter.from_hf(dict(hf))
    if isinstance(adapter, gpt_oss.GptOssStateDictAdapter):
        out = {name: tensor for name, tensor in out.items() if INNER not in name}
        out |= renamed(hf, {theirs: ours for ours, theirs in OSS.items()})
    return out


def to_hf(adapter: Any, state: State) -> State:
    out = adapter.to_hf(dict(state))
    return {**out, **renamed(state, OSS)} if OSS.keys() & map(of_no_layer, state) else out


def renamed(state: State, names: dict[str, str]) -> State:
    out = {}
    for name, tensor in state.items():
        if of_no_layer(name) in names:
            (layer,) = re.findall(r"layers\.(\d+)\.", name)
            turned = tensor.mT.contiguous() if tensor.ndim == 3 else tensor
            out[names[of_no_layer(name)].format(layer)] = turned
    return out


def of_no_layer(name: str) -> str:
    return re.sub(r"layers\.\d+\.", "layers.{}.", name)


def save_as_trainer(model: Any, folder: Path) -> None:
    """As `_flattened_model_states_sd` puts it together: weights at the top, beside the rest."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
    )
    from torchtitan.components.checkpointer.base import ModelWrapper

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    others = {
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "train_state": {"step": torch.tensor(7)}, "lr_scheduler": {"last_epoch": 7},
    }  # fmt: skip
    dcp.save({**others, **ModelWrapper(model).state_dict()}, checkpoint_id=folder)


def main(folder: Path) -> None:
    hf = json.loads((folder / "config.json").read_text())
    released = load_file(folder / "model.safetensors")
    (file,) = (folder / "theirs").glob("data-*.safetensors")
    theirs = load_file(file)
    for fused in (True, False):
        model = config_of(hf, fused).build().eval()
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias_E"):
                buffer.zero_()
        adapter = FAMILIES[hf["model_type"]][1](model.config, None)
        fill(model, from_hf(adapter, released))
        torch.save(logits(model), folder / f"logits{int(fused)}.pt")
        torch.save({"model": model.state_dict()}, folder / f"titan{int(fused)}.pt")
    save_as_trainer(model, folder / "dcp")
    fill(model, theirs)
    torch.save(logits(model), folder / "logits_theirs.pt")
    torch.save(to_hf(adapter, theirs), folder / "hf.pt")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(Path(each))
