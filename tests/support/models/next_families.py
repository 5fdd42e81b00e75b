"""Llama 4 (text), Qwen3-Next, and layers that predict further tokens, for the references: shards
cut from a Hugging Face state dict by straight torch code that knows nothing of smckpt's tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models import families
from tests.support.models.references import D, G, H, State, V, _chunk, padded, randomized

FAMILIES = ("llama4_text", "qwen3_next")
KEYS, VALUES, KEY, VALUE = 4, 8, 8, 12  # heads of linear attention, and their sizes
LAYERS = 2


def config(family: str, **more: Any) -> Any:
    import transformers as tf

    common: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS,
        "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D, "vocab_size": V,
        "max_position_embeddings": 64, "rope_theta": 5e5, "tie_word_embeddings": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family == "llama4_text":
        own = {"intermediate_size": 48, "intermediate_size_mlp": 160, "num_local_experts": 8,
               "num_experts_per_tok": 1, "moe_layers": [1], "attention_chunk_size": 16}  # fmt: skip
        return tf.Llama4TextConfig(**{**common, **own, **more})
    own = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96, "partial_rotary_factor": 0.5,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES,
        "linear_key_head_dim": KEY, "linear_value_head_dim": VALUE,
    }  # fmt: skip
    return tf.Qwen3NextConfig(**{**common, **own, **more})


def model(family: str, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return randomized(AutoModelForCausalLM.from_config(config(family, **more)), 17)


def mcore(
    family: str, hf: State, t: int, r: int, ep: int = 1, er: int = 0, *, local: bool = False,
) -> State:  # fmt: skip
    """Megatron-core's GPTModel, as `families.mcore` has it."""
    if family == "llama4_text":
        return families.mcore(family, _by_mixtures_names(hf), t, r, ep, er, local=local)
    out = {"embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
           "output_layer.weight": hf["lm_head.weight"]}  # fmt: skip
    out = {name: _chunk(padded(tensor, 128), t, r) for name, tensor in out.items()}
    out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    for i in range(LAYERS):
        own = _under(hf, f"model.layers.{i}.")
        layer = _next_layer(own, t, r, ep, er, local)
        out |= {f"decoder.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return out


def _under(hf: State, prefix: str) -> State:
    return {n[len(prefix) :]: t for n, t in hf.items() if n.startswith(prefix)}


def _by_mixtures_names(hf: State) -> State:
    """Llama 4's experts one by one, as the other mixtures have them."""
    out: State = {}
    for name, tensor in hf.items():
        name = name.replace("feed_forward.", "mlp.").replace("mlp.router.", "mlp.gate.")
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                for part, half in zip(("gate", "up"), both.chunk(2, 1), strict=True):
                    out[name.replace("gate_up_proj", f"{e}.{part}_proj.weight")] = half.T
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = down.T
        else:
            out[name] = tensor
    return out


def _next_layer(own: State, t: int, r: int, ep: int, er: int, local: bool) -> State:
    first, at = own["input_layernorm.weight"], "self_attention."
    if "linear_attn.A_log" in own:
        out = {at + name: tensor for name, tensor in _delta_net(own, t, r).items()}
        out["input_layernorm.weight" if local else f"{at}in_proj.layer_norm_weight"] = first
    else:
        both = own["self_attn.q_proj.weight"].view(H, 2, D, -1)  # each head's query, its gate
        group = lambda x, n: x.reshape(G, n * D, x.shape[-1])  # noqa: E731
        key, value = (own[f"self_attn.{part}_proj.weight"] for part in "kv")
        fused = torch.cat(
            [group(both[:, 0], H // G), group(both[:, 1], H // G), group(key, 1), group(value, 1)],
            1,
        )
        out = {
            f"{at}linear_qkv.weight": _chunk(fused.flatten(0, 1), t, r),
            f"{at}linear_proj.weight": _chunk(own["self_attn.o_proj.weight"], t, r, 1),
            f"{at}q_layernorm.weight": own["self_attn.q_norm.weight"],
            f"{at}k_layernorm.weight": own["self_attn.k_norm.weight"],
        }
        out["input_layernorm.weight" if local else f"{at}linear_qkv.layer_norm_weight"] = first
    out["pre_mlp_layernorm.weight"] = own["post_attention_layernorm.weight"]
    return out | families._mcore_experts(own, families._each_expert(own), t, r, ep, er, local)


def _delta_net(own: State, t: int, r: int) -> State:
    """The gated delta net: each rank has its heads of all parts, one part after the other."""
    per = VALUES // KEYS
    sizes = [KEY, KEY, per * VALUE, per * VALUE]
    hidden = own["linear_attn.in_proj_qkvz.weight"].shape[-1]
    main = own["linear_attn.in_proj_qkvz.weight"].view(KEYS, sum(sizes), hidden).split(sizes, 1)
    small = own["linear_attn.in_proj_ba.weight"].view(KEYS, 2 * per, hidden).split([per, per], 1)
    conv = own["linear_attn.conv1d.weight"].split([KEYS * KEY, KEYS * KEY, VALUES * VALUE])
    return {
        "in_proj.weight": torch.cat([_chunk(p.flatten(0, 1), t, r) for p in (*main, *small)]),
        "conv1d.weight": torch.cat([_chunk(part, t, r) for part in conv]),
        "A_log": _chunk(own["linear_attn.A_log"], t, r),
        "dt_bias": _chunk(own["linear_attn.dt_bias"], t, r),
        "out_norm.weight": own["linear_attn.norm.weight"] - 1,
        "out_proj.weight": _chunk(own["linear_attn.out_proj.weight"], t, r, 1),
    }


def hf_tp(family: str, made: Any, t: int, r: int) -> State:
    """What each rank holds under transformers' own plan, names as in memory."""
    out = {}
    for name, tensor in made.state_dict().items():
        last = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
        if last == "gate_up_proj":
            along = 2 if family == "llama4_text" else 1
            gate, up = tensor.chunk(2, along)
            out[name] = torch.cat([_chunk(gate, t, r, along), _chunk(up, t, r, along)], along)
        elif last == "down_proj" and tensor.dim() == 3:
            out[name] = _chunk(tensor, t, r, 1 if family == "llama4_text" else 2)
        elif last in ("o_proj", "down_proj"):
            out[name] = _chunk(tensor, t, r, 1)
        elif last in (
            "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head",
            "in_proj_qkvz", "in_proj_ba", "out_proj",
        ):  # fmt: skip
            out[name] = _chunk(tensor, t, r)
        else:
            out[name] = tensor
    return out


# -- layers that predict further tokens ------------------------------------------------------------


def further(family: str, hf: State, count: int = 1) -> State:
    """The layers as a release has them: like the last one, and what joins them to the model."""
    generator = torch.Generator().manual_seed(23)
    like = lambda x: x + 0.1 * torch.randn(x.shape, generator=generator)  # noqa: E731
    hidden, out = hf["model.norm.weight"], {}
    join = torch.randn(len(hidden), 2 * len(hidden), generator=generator) / 8
    for m in range(count):
        number = LAYERS + m
        at = "mtp.layers.0." if family == "qwen3_next" else f"model.layers.{number}."
        last = _under(hf, f"model.layers.{LAYERS - 1}.")
        out |= {at + name: like(tensor) for name, tensor in last.items()}
        names = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "eh_proj.weight")
        if family == "qwen3_next":
            at = "mtp."
            names = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight",
                     "fc.weight")  # fmt: skip
        out |= {at + n: like(t) for n, t in zip(names, (hidden, hidden, hidden, join), strict=True)}
        if family != "qwen3_next":
            out[f"{at}embed_tokens.weight"] = hf["model.embed_tokens.weight"].clone()
            out[f"{at}shared_head.head.weight"] = hf["lm_head.weight"].clone()
    return out


def mcore_further(
    family: str, more: State, t: int, r: int, ep: int = 1, er: int = 0, *, local: bool = False,
) -> State:  # fmt: skip
    """Megatron-core's `mtp` of these layers."""
    out: State = {}
    for m in range(len([name for name in more if name.endswith(("eh_proj.weight", "fc.weight"))])):
        if family == "qwen3_next":
            own, inner = _under(more, "mtp."), _under(more, "mtp.layers.0.")
            layer = _next_layer(inner, t, r, ep, er, local)
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        else:
            own = _under(more, f"model.layers.{LAYERS + m}.")
            alone = {f"model.layers.0.{name}": tensor for name, tensor in own.items()}
            alone["model.embed_tokens.weight"] = own["embed_tokens.weight"]
            whole = families.mcore(family, alone, t, r, ep, er, local=local)
            layer = _under(whole, "decoder.layers.0.")
            names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        e, h, join, norm = (own[f"{name}.weight"] for name in names)
        at = f"mtp.layers.{m}."
        out |= {f"{at}transformer_layer.{name}": tensor for name, tensor in layer.items()}
        out |= {f"{at}enorm.weight": e, f"{at}hnorm.weight": h, f"{at}final_layernorm.weight": norm,
                f"{at}eh_proj.weight": _chunk(join, t, r)}  # fmt: skip
    return out


def predicted(folder: Path, monkeypatch: Any) -> Tensor:
    """The logits of a model, and behind them those of its further layer, by transformers 5."""
    from transformers import AutoModelForCausalLM, Glm4MoePreTrainedModel
    from transformers.modeling_layers import MtpModel
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

    number = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for kind in (Glm4MoePreTrainedModel, DeepseekV3PreTrainedModel):  # it finds the layer by this
        monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [rf"layers\.{number}\."])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    further = MtpModel.from_pretrained(model).eval()
    tokens = torch.arange(40).reshape(2, 20) % V
    places = torch.arange(1, 20)[None].expand(2, -1)
    with torch.no_grad():
        found = model(tokens, output_hidden_states=True)
        hidden = found.hidden_states[-1][:, :-1]
        last = further.forward_layer(0, hidden, places, None, input_ids=tokens[:, 1:])
        return torch.cat([found.logits, model.lm_head(last)], 1)
