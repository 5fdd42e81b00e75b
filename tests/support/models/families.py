"""More families for the references: shards of Gemma, Phi-3, GPT-OSS, DeepSeek-V3, Falcon, GPT-2 and
others, cut from a Hugging Face state dict by straight torch code that knows nothing of smckpt's
tables.
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
    _layers,
    padded,
    randomized,
)

SPARSE = ("gpt_oss", "deepseek_v3", "deepseek_v2", "glm4_moe", "granitemoe", "olmoe", "qwen2_moe",
          "phimoe")  # fmt: skip
FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "glm4", "granite", "nemotron", "olmo2", "phi3", "smollm3",
    "starcoder2", "falcon", "falcon_7b", "falcon_rw", "gpt2", "gptj", "opt", "bloom", "cohere",
    "cohere_normed", "cohere2", *SPARSE,
)  # fmt: skip
# over all heads at once, or with weights for each head, which Megatron-core does not have
WIDE_NORMS = ("olmo2", "olmoe", "cohere_normed")


_WIDE = {"hidden_size": 128}  # of families whose heads have the hidden size together
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {}),
    "glm4": ("Glm4", {"attention_bias": True}),
    "granite": ("Granite", {**_WIDE, "attention_bias": True}),
    "nemotron": ("Nemotron", {}),
    "olmo2": ("Olmo2", _WIDE),
    "smollm3": ("SmolLM3", _WIDE),
    "starcoder2": ("Starcoder2", _WIDE),
    "cohere": ("Cohere", _WIDE),
    "cohere_normed": ("Cohere", {**_WIDE, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("Cohere2", {**_WIDE, "sliding_window": 8,
                            "layer_types": ["sliding_attention", "full_attention"]}),
    "phimoe": ("Phimoe", {**_WIDE, "intermediate_size": 48, "num_local_experts": 8,
                          "num_experts_per_tok": 2, "attention_bias": True,
                          "lm_head_bias": True}),
    "glm4_moe": ("Glm4Moe", {**_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2,
                             "first_k_dense_replace": 1, "attention_bias": True,
                             "use_qk_norm": True}),
    "granitemoe": ("GraniteMoe", {**_WIDE, "intermediate_size": 48, "num_local_experts": 8,
                                  "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {**_WIDE, "intermediate_size": 48, "num_experts": 8,
                        "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_WIDE, **_EXPERTS, "num_experts": 8, "mlp_only_layers": [0],
                               "shared_expert_intermediate_size": 96}),
}  # fmt: skip


def config(family: str, **more: Any) -> Any:
    import transformers as tf

    common: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D, "vocab_size": V,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    falcon = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": H,
              "vocab_size": V, "ffn_hidden_size": 160, "bos_token_id": 1,
              "eos_token_id": 2}  # fmt: skip
    if family == "gpt2":
        return tf.GPT2Config(n_embd=128, n_layer=2, n_head=H, n_inner=160, vocab_size=V,
                             n_positions=64, bos_token_id=1, eos_token_id=2, **more)  # fmt: skip
    if family == "gptj":
        return tf.GPTJConfig(n_embd=128, n_layer=2, n_head=H, n_inner=160, vocab_size=V,
                             n_positions=64, rotary_dim=8, bos_token_id=1, eos_token_id=2,
                             **more)  # fmt: skip
    if family == "opt":
        return tf.OPTConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=H,
                            ffn_dim=160, vocab_size=V, max_position_embeddings=64, pad_token_id=0,
                            bos_token_id=1, eos_token_id=2, **more)  # fmt: skip
    if family == "bloom":
        return tf.BloomConfig(hidden_size=128, n_layer=2, n_head=H, vocab_size=V, **more)
    if family == "falcon":
        return tf.FalconConfig(
            **falcon, new_decoder_architecture=True, num_kv_heads=G, bias=True, **more
        )
    if family == "falcon_7b":
        return tf.FalconConfig(**falcon, multi_query=True, parallel_attn=True, **more)
    if family == "falcon_rw":
        return tf.FalconConfig(
            **falcon, multi_query=False, parallel_attn=False, bias=True, alibi=True, **more
        )
    theta: dict[str, Any] = {"rope_theta": 5e5}
    if family == "gemma2":
        return tf.Gemma2Config(**common, **theta, sliding_window=8, query_pre_attn_scalar=16)
    if family == "gemma3_text":
        return tf.Gemma3TextConfig(**common, sliding_window=8, query_pre_attn_scalar=16)
    if family == "phi3":
        own = {**common, "hidden_size": 128}
        del own["head_dim"]
        return tf.Phi3Config(**own, **theta, original_max_position_embeddings=64, **more)
    if family == "gpt_oss":
        oss = {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2,
               "sliding_window": 8}  # fmt: skip
        return tf.GptOssConfig(**{**common, **oss, **more})
    if family in _MORE:
        name, own = _MORE[family]
        if "hidden_size" in own:
            del common["head_dim"]
        return getattr(tf, f"{name}Config")(**{**common, **theta, **own, **more})
    common = {k: v for k, v in common.items() if k not in ("head_dim", "num_key_value_heads")}
    deepseek = {
        **theta, "num_key_value_heads": H, "moe_intermediate_size": 48, "n_shared_experts": 2,
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 12, "first_k_dense_replace": 1,
    }  # fmt: skip
    kind = tf.DeepseekV3Config if family == "deepseek_v3" else tf.DeepseekV2Config
    if family == "deepseek_v2":
        deepseek["topk_method"] = "group_limited_greedy"
    return kind(**{**common, **deepseek, **more})


def model(family: str, **more: Any) -> Any:
    """Random in all of its parameters and in the buffers that are saved."""
    from transformers import AutoModelForCausalLM

    made = randomized(AutoModelForCausalLM.from_config(config(family, **more)), 13)
    with torch.no_grad():
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape))
    return made


def _top(hf: State) -> State:
    """The tensors outside the layers, by short names."""
    names = {
        "embed": ("model.embed_tokens.weight", "transformer.word_embeddings.weight",
                  "transformer.wte.weight", "model.decoder.embed_tokens.weight"),
        "embed_norm": ("transformer.word_embeddings_layernorm.weight",),
        "embed_norm_b": ("transformer.word_embeddings_layernorm.bias",),
        "pos": ("transformer.wpe.weight", "model.decoder.embed_positions.weight"),
        "norm": ("model.norm.weight", "transformer.ln_f.weight",
                 "model.decoder.final_layer_norm.weight"),
        "norm_b": ("transformer.ln_f.bias", "model.norm.bias",
                   "model.decoder.final_layer_norm.bias"),
        "head": ("lm_head.weight",), "head_b": ("lm_head.bias",),
    }  # fmt: skip
    return {short: hf[n] for short, many in names.items() for n in many if n in hf}


def _layer(hf: State, i: int) -> State:
    for at in (f"model.layers.{i}.", f"transformer.h.{i}.", f"model.decoder.layers.{i}."):
        own = {n[len(at) :]: t for n, t in hf.items() if n.startswith(at)}
        if own:
            return own
    raise AssertionError(i)


def _attention(family: str, own: State) -> State:
    """Query, key, value and output, weights and biases, and norms, by short names."""
    out: State = {}
    others: dict[str, tuple[tuple[str, str], ...]] = {  # names that mean what Llama's do
        "gptj": (("attn.", "self_attn."), ("out_proj", "o_proj"), ("ln_1", "input_layernorm")),
        "opt": (("out_proj", "o_proj"), ("self_attn_layer_norm", "input_layernorm"),
                ("final_layer_norm", "post_attention_layernorm")),
    }  # fmt: skip
    for old, new in others.get(family, ()):
        own = {name.replace(old, new): tensor for name, tensor in own.items()}
    for kind, tail in (("weight", ""), ("bias", "_b")):
        if family == "gpt2":
            fused = own[f"attn.c_attn.{kind}"]
            fused = fused if tail else fused.T
            parts = [p.contiguous() for p in fused.chunk(3)]
            o = own[f"attn.c_proj.{kind}"]
            out["o" + tail] = o if tail else o.T.contiguous()
            out["norm1" + tail], out["norm2" + tail] = own[f"ln_1.{kind}"], own[f"ln_2.{kind}"]
        elif family.startswith(("falcon", "bloom")):
            first, second = "input_layernorm", "post_attention_layernorm"
            if "ln_attn.weight" in own:
                first, second = "ln_attn", "ln_mlp"
            out["norm1" + tail] = own[f"{first}.{kind}"]
            if f"{second}.{kind}" in own:
                out["norm2" + tail] = own[f"{second}.{kind}"]
            if f"self_attention.dense.{kind}" not in own:
                continue
            groups = {"falcon": G, "falcon_7b": 1, "falcon_rw": H, "bloom": H}[family]
            fused = own[f"self_attention.query_key_value.{kind}"]
            cut = fused.view(groups, H // groups + 2, D, *fused.shape[1:])
            flat = lambda x: x.reshape(-1, *x.shape[3:])  # noqa: E731
            parts = [flat(cut[:, :-2]), flat(cut[:, -2:-1]), flat(cut[:, -1:])]
            out["o" + tail] = own[f"self_attention.dense.{kind}"]
        elif family == "phi3":
            if tail:
                continue
            parts = list(own["self_attn.qkv_proj.weight"].split([H * D, G * D, G * D]))
            out["o"] = own["self_attn.o_proj.weight"]
        else:
            if f"self_attn.o_proj.{kind}" in own:
                out["o" + tail] = own[f"self_attn.o_proj.{kind}"]
            if f"self_attn.k_proj.{kind}" not in own:
                continue
            parts = [own[f"self_attn.{p}_proj.{kind}"] for p in "qkv"]
        out |= {p + tail: part.contiguous() for p, part in zip("qkv", parts, strict=True)}
    for short, name in (
        ("norm1", "input_layernorm.weight"), ("norm2", "post_attention_layernorm.weight"),
        ("q_norm", "self_attn.q_norm.weight"), ("k_norm", "self_attn.k_norm.weight"),
        ("sinks", "self_attn.sinks"), ("norm1_b", "input_layernorm.bias"),
        ("norm2_b", "post_attention_layernorm.bias"),
    ):  # fmt: skip
        if name in own and short not in out:
            out[short] = own[name]
    if "post_self_attn_layernorm.weight" in own:  # GLM: before and after
        out["post1"] = own["post_self_attn_layernorm.weight"]
        out["post2"] = own["post_mlp_layernorm.weight"]
    if "pre_feedforward_layernorm.weight" in own:  # Gemma: before and after
        out["post1"] = out["norm2"]
        out["norm2"] = own["pre_feedforward_layernorm.weight"]
        out["post2"] = own["post_feedforward_layernorm.weight"]
    return out


def _mlp(own: State) -> State:
    """The dense MLP by short names."""
    out: State = {}
    if "mlp.gate_up_proj.weight" in own:
        gate, up = own["mlp.gate_up_proj.weight"].chunk(2)
        return {"gate": gate, "up": up, "down": own["mlp.down_proj.weight"]}
    for short, names in (
        ("gate", ("gate_proj",)), ("up", ("up_proj",)), ("down", ("down_proj",)),
        ("fc1", ("dense_h_to_4h", "c_fc", "fc_in")), ("fc2", ("dense_4h_to_h", "c_proj", "fc_out")),
    ):  # fmt: skip
        for name in names:
            for kind, tail in (("weight", ""), ("bias", "_b")):
                tensor = own.get(f"mlp.{name}.{kind}", own.get(f"{short}.{kind}"))  # or OPT's
                if tensor is not None:
                    flip = "attn.c_attn.weight" in own and not tail  # GPT-2
                    out[short + tail] = tensor.T.contiguous() if flip else tensor
    if "up" in out and "gate" not in out:  # Nemotron
        out = {"fc1": out["up"], "fc2": out["down"]}
    return out


def _each_expert(own: State) -> list[State]:
    if "mlp.experts.gate_up_proj" in own:  # GPT-OSS: gate and up alternate, transposed
        both, bias = own["mlp.experts.gate_up_proj"], own["mlp.experts.gate_up_proj_bias"]
        return [
            {"gate": both[e, :, ::2].T, "up": both[e, :, 1::2].T, "gate_b": bias[e, ::2],
             "up_b": bias[e, 1::2], "down": own["mlp.experts.down_proj"][e].T,
             "down_b": own["mlp.experts.down_proj_bias"][e]}
            for e in range(len(both))
        ]  # fmt: skip
    if "block_sparse_moe.input_linear.weight" in own:  # Granite: gate over up
        both, down = (own[f"block_sparse_moe.{p}_linear.weight"] for p in ("input", "output"))
        return [{"gate": both[e].chunk(2)[0], "up": both[e].chunk(2)[1], "down": down[e]}
                for e in range(len(both))]  # fmt: skip
    if "block_sparse_moe.gate.weight" in own:  # Phi
        names = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        return [{p: own[f"block_sparse_moe.experts.{e}.{w}.weight"] for p, w in names}
                for e in range(len(own["block_sparse_moe.gate.weight"]))]  # fmt: skip
    count = len(own["mlp.gate.weight"]) if "mlp.gate.weight" in own else 0
    return [
        {p: own[f"mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")}
        for e in range(count)
    ]


def _gated(part: State, t: int, r: int, tail: str = "") -> Tensor:
    return torch.cat([_chunk(part["gate" + tail], t, r), _chunk(part["up" + tail], t, r)])


def mcore(
    family: str, hf: State, t: int, r: int, ep: int = 1, er: int = 0, *, local: bool = False,
) -> State:  # fmt: skip
    """Megatron-core's GPTModel: with Transformer Engine's names and grouped experts, or the local
    spec's and experts one by one."""
    top = _top(hf)
    out = {"embedding.word_embeddings.weight": _chunk(padded(top["embed"], 128), t, r)}
    for short, name in (("pos", "embedding.position_embeddings.weight"),
                        ("embed_norm", "embedding.word_embeddings.norm.weight"),
                        ("embed_norm_b", "embedding.word_embeddings.norm.bias"),
                        ("norm", "decoder.final_layernorm.weight"),
                        ("norm_b", "decoder.final_layernorm.bias")):  # fmt: skip
        if short in top:
            out[name] = top[short]
    if "head" in top:
        out["output_layer.weight"] = _chunk(padded(top["head"], 128), t, r)
    if "head_b" in top:
        out["output_layer.bias"] = _chunk(padded(top["head_b"][:, None], 128)[:, 0], t, r)
    for i in range(_layers(hf) if any("layers." in n for n in hf) else 2):
        own = _layer(hf, i)
        layer = _mcore_attention(family, own, t, r, local)
        experts = _each_expert(own)
        mlp = _mlp(own)
        attention = _attention(family, own)
        for kind, tail in (("weight", ""), ("bias", "_b")):
            if "norm2" + tail in attention:
                inside = f"mlp.linear_fc1.layer_norm_{kind}"
                apart = f"pre_mlp_layernorm.{kind}"
                layer[apart if local or experts else inside] = attention["norm2" + tail]
            if "fc1" + tail in mlp:
                layer[f"mlp.linear_fc1.{kind}"] = _chunk(mlp["fc1" + tail], t, r)
                fc2 = mlp["fc2" + tail]
                layer[f"mlp.linear_fc2.{kind}"] = fc2 if tail else _chunk(fc2, t, r, 1)
        if not experts and "gate" in mlp:
            layer["mlp.linear_fc1.weight"] = _gated(mlp, t, r)
            layer["mlp.linear_fc2.weight"] = _chunk(mlp["down"], t, r, 1)
        if "post2" in attention:
            layer["mlp.linear_fc2.post_layernorm.weight"] = attention["post2"]
        if experts:
            layer |= _mcore_experts(own, experts, t, r, ep, er, local)
        out |= {f"decoder.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return out


def _mcore_attention(family: str, own: State, t: int, r: int, local: bool) -> State:
    part = _attention(family, own)
    mla = "self_attn.kv_a_proj_with_mqa.weight" in own
    out: State = {"self_attention.linear_proj.weight": _chunk(part["o"], t, r, 1)}
    for kind, tail in (("weight", ""), ("bias", "_b")):
        if "q" + tail in part:
            fused = _interleaved(*(part[p + tail] for p in "qkv"), H, len(part["k"]) // D, D)
            out[f"self_attention.linear_qkv.{kind}"] = _chunk(fused, t, r)
        if "norm1" + tail in part:
            inside = f"self_attention.linear_qkv.layer_norm_{kind}"
            out[f"input_layernorm.{kind}" if local or mla else inside] = part["norm1" + tail]
    for short, name in (("o_b", "linear_proj.bias"), ("q_norm", "q_layernorm.weight"),
                        ("k_norm", "k_layernorm.weight"),
                        ("post1", "linear_proj.post_layernorm.weight")):  # fmt: skip
        if short in part:
            out["self_attention." + name] = part[short]
    if "sinks" in part:
        out["self_attention.core_attention.softmax_offset"] = _chunk(part["sinks"], t, r)
    if mla:
        norms = (
            ("q_layernorm.weight", "kv_layernorm.weight")
            if local
            else ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight")
        )
        at = "self_attention."
        for part, name in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
            down = own[f"self_attn.{name}.weight"]  # cut by the local spec only
            out[f"{at}linear_{part}_down_proj.weight"] = _chunk(down, t, r) if local else down
        out[at + norms[0]] = own["self_attn.q_a_layernorm.weight"]
        out[at + "linear_q_up_proj.weight"] = _chunk(own["self_attn.q_b_proj.weight"], t, r)
        out[at + norms[1]] = own["self_attn.kv_a_layernorm.weight"]
        out[at + "linear_kv_up_proj.weight"] = _chunk(own["self_attn.kv_b_proj.weight"], t, r)
    return out


def _mcore_experts(
    own: State, experts: list[State], t: int, r: int, ep: int, er: int, local: bool
) -> State:
    routers = ("mlp.router.weight", "mlp.gate.weight", "block_sparse_moe.router.layer.weight",
               "block_sparse_moe.gate.weight")  # fmt: skip
    out = {"mlp.router.weight": next(own[name] for name in routers if name in own)}
    if "mlp.router.bias" in own:
        out["mlp.router.bias"] = own["mlp.router.bias"]
    if "mlp.gate.e_score_correction_bias" in own:
        out["mlp.router.expert_bias"] = own["mlp.gate.e_score_correction_bias"]
    shared = {p: own[n] for p in ("gate", "up", "down")
              for at in ("shared_experts", "shared_expert")
              if (n := f"mlp.{at}.{p}_proj.weight") in own}  # fmt: skip
    if "mlp.shared_expert_gate.weight" in own:
        out["mlp.shared_experts.gate_weight"] = own["mlp.shared_expert_gate.weight"]
    if shared:
        out["mlp.shared_experts.linear_fc1.weight"] = _gated(shared, t, r)
        out["mlp.shared_experts.linear_fc2.weight"] = _chunk(shared["down"], t, r, 1)
    each = len(experts) // ep
    for e in range(each):
        expert = experts[er * each + e]
        at = f"mlp.experts.local_experts.{e}." if local else "mlp.experts."
        end = "" if local else str(e)
        out[f"{at}linear_fc1.weight{end}"] = _gated(expert, t, r)
        out[f"{at}linear_fc2.weight{end}"] = _chunk(expert["down"], t, r, 1)
        if "gate_b" in expert:
            out[f"{at}linear_fc1.bias{end}"] = _gated(expert, t, r, "_b")
            out[f"{at}linear_fc2.bias{end}"] = expert["down_b"].contiguous()
    return out


def te(family: str, hf: State, t: int, r: int) -> State:
    """Transformer Engine's TransformerLayer, split, in Hugging Face's outer modules."""
    prefixes = ("model.layers", "transformer.h", "model.decoder.layers")
    prefix = next(p for p in prefixes if any(n.startswith(f"{p}.") for n in hf))
    out: State = {}
    for name, tensor in hf.items():
        if f"{prefix}." not in name:
            cut = name.endswith(("embed_tokens.weight", "word_embeddings.weight", "wte.weight",
                                 "lm_head.weight"))  # fmt: skip
            out[name] = _chunk(padded(tensor, 128), t, r) if cut else tensor
    for i in range(2):
        own = _layer(hf, i)
        part, mlp = _attention(family, own), _mlp(own)
        layer = {"self_attention.proj.weight": _chunk(part["o"], t, r, 1)}
        if "o_b" in part:
            layer["self_attention.proj.bias"] = part["o_b"]
        for kind, tail in (("weight", ""), ("bias", "_b")):
            for word, short in (("query", "q"), ("key", "k"), ("value", "v")):
                if short + tail in part:
                    layer[f"self_attention.layernorm_qkv.{word}_{kind}"] = _chunk(
                        part[short + tail], t, r)  # fmt: skip
            if "norm1" + tail in part:
                layer[f"self_attention.layernorm_qkv.layer_norm_{kind}"] = part["norm1" + tail]
            if "norm2" + tail in part:
                layer[f"layernorm_mlp.layer_norm_{kind}"] = part["norm2" + tail]
            if "fc1" + tail in mlp:
                layer[f"layernorm_mlp.fc1_{kind}"] = _chunk(mlp["fc1" + tail], t, r)
                fc2 = mlp["fc2" + tail]
                layer[f"layernorm_mlp.fc2_{kind}"] = fc2 if tail else _chunk(fc2, t, r, 1)
        if "gate" in mlp:
            layer["layernorm_mlp.fc1_weight"] = _gated(mlp, t, r)
            layer["layernorm_mlp.fc2_weight"] = _chunk(mlp["down"], t, r, 1)
        out |= {f"{prefix}.{i}.{name}": tensor for name, tensor in layer.items()}
    return out


def hf_tp(family: str, made: Any, t: int, r: int, *, experts: bool = False) -> State:
    """What each rank holds under transformers' own plan, names as in memory. `experts`: under its
    plan of expert parallelism too."""
    out = {}
    for name, tensor in made.state_dict().items():
        parts = name.split(".")
        last = parts[-2] if not name.endswith("_proj") else parts[-1]
        whole = {  # what the plan leaves out
            "deepseek_v3": (".self_attn.",), "phimoe": (".self_attn.",),
            "granitemoe": (".self_attn.",), "qwen2_moe": (".shared_expert.",),
            "gpt_oss": (".self_attn.", "embed_tokens", ".experts."),
        }.get(family, ())  # fmt: skip
        if experts and ".experts." in name:
            out[name] = _chunk(tensor, t, r)
        elif any(part in name for part in whole):
            out[name] = tensor
        elif last in ("o_proj", "down_proj", "c_proj"):
            biased = parts[-1] == "bias"
            out[name] = tensor if biased else _chunk(tensor, t, r, tensor.dim() - 1)
        elif last == "gate_up_proj" and tensor.dim() == 3:
            gate, up = tensor.chunk(2, 1)
            out[name] = torch.cat([_chunk(gate, t, r, 1), _chunk(up, t, r, 1)], 1)
        elif last in (
            "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head",
            "qkv_proj", "gate_up_proj", "c_fc", "q_b_proj", "kv_b_proj",
        ):  # fmt: skip
            out[name] = _chunk(tensor, t, r)
        else:
            out[name] = tensor
    return out
