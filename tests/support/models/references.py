"""Shards of tensor-parallel layouts, cut from a Hugging Face state dict by the formulas of their
sources: straight torch code that knows nothing of smckpt's tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
H, G, D, V = 8, 4, 16, 120
Q = H // G


def config(family: str, **more: Any) -> Any:
    """Sizes at which faults show: heads wider than hidden / H, groups, an odd vocabulary."""
    import transformers as tf

    common: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D, "vocab_size": V,
        "rope_theta": 5e5,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    sparse = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    if family == "gpt_neox":
        common = {k: v for k, v in common.items() if k not in (
            "num_key_value_heads", "head_dim", "rope_theta")}  # fmt: skip
        return tf.GPTNeoXConfig(
            **{**common, "hidden_size": 128, "rotary_pct": 0.5, "rotary_emb_base": 50000, **more}
        )
    kinds = {
        "llama": (tf.LlamaConfig, {}), "mistral": (tf.MistralConfig, {"sliding_window": None}),
        "llama_biased": (tf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        "qwen2": (tf.Qwen2Config, {}), "qwen3": (tf.Qwen3Config, {}),
        "mixtral": (tf.MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
        "qwen3_moe": (tf.Qwen3MoeConfig, sparse),
    }  # fmt: skip
    kind, own = kinds[family]
    return kind(**{**common, **own, **more})


def model(family: str, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return randomized(AutoModelForCausalLM.from_config(config(family, **more)), 11)


def randomized(made: Any, seed: int) -> Any:
    """Random in all of its parameters: fresh biases are zero, norms one and experts alike."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made.eval()


def on_disk(made: Any, folder: Any) -> State:
    """The state as `save_pretrained` names it: experts one by one."""
    from safetensors.torch import load_file

    made.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def padded(weight: Tensor, rows: int) -> Tensor:
    """With rows of padding that are not zero, so that one that is kept would show."""
    return torch.cat([weight, torch.full((rows - len(weight), weight.shape[1]), 7.5)])


def _chunk(weight: Tensor, t: int, r: int, dim: int = 0) -> Tensor:
    return weight.chunk(t, dim)[r].contiguous()


def _interleaved(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int, size: int) -> Tensor:
    per = heads // groups
    rest = q.shape[1:]
    return torch.cat([
        q.view(groups, per * size, *rest), k.view(groups, size, *rest), v.view(groups, size, *rest),
    ], 1).reshape(-1, *rest)  # fmt: skip


def _parts(hf: State, layer: int) -> tuple[State, State, str]:
    """Attention's and norms' tensors of a layer by short names, the MLP's, and the prefix."""
    if any(name.startswith("gpt_neox.") for name in hf):
        at = f"gpt_neox.layers.{layer}."
        own = {n[len(at) :]: t for n, t in hf.items() if n.startswith(at)}
        heads = {"q": [], "k": [], "v": [], "q_b": [], "k_b": [], "v_b": []}  # type: ignore[var-annotated]
        for tail, kind in (("", "weight"), ("_b", "bias")):
            fused = own[f"attention.query_key_value.{kind}"]
            for i, part in enumerate("qkv"):
                split = fused.view(H, 3, D, *fused.shape[1:])[:, i]
                heads[part + tail] = split.reshape(-1, *fused.shape[1:])
        attention = {
            **heads, "o": own["attention.dense.weight"], "o_b": own["attention.dense.bias"],
            "norm1": own["input_layernorm.weight"], "norm1_b": own["input_layernorm.bias"],
            "norm2": own["post_attention_layernorm.weight"],
            "norm2_b": own["post_attention_layernorm.bias"],
        }  # fmt: skip
        mlp = {
            "fc1": own["mlp.dense_h_to_4h.weight"], "fc1_b": own["mlp.dense_h_to_4h.bias"],
            "fc2": own["mlp.dense_4h_to_h.weight"], "fc2_b": own["mlp.dense_4h_to_h.bias"],
        }  # fmt: skip
        return attention, mlp, "gpt_neox.layers"
    at = f"model.layers.{layer}."
    own = {n[len(at) :]: t for n, t in hf.items() if n.startswith(at)}
    attention = {"norm1": own["input_layernorm.weight"],
                 "norm2": own["post_attention_layernorm.weight"]}  # fmt: skip
    for name, tensor in own.items():
        if name.startswith("self_attn."):
            short = name.split(".")[1].removesuffix("_proj")
            attention[short + ("_b" if name.endswith("bias") else "")] = tensor
    mlp = {n.split(".")[1].removesuffix("_proj") + ("_b" if n.endswith("bias") else ""): t
           for n, t in own.items() if n.startswith("mlp.") and "experts" not in n}  # fmt: skip
    return attention, mlp, "model.layers"


def _experts(hf: State, layer: int) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """The router, and (gate, up, down) of each expert."""
    mixtral = f"model.layers.{layer}.block_sparse_moe."
    if mixtral + "gate.weight" in hf:
        router, names = hf[mixtral + "gate.weight"], ("w1", "w3", "w2")
        at = mixtral
    else:
        at = f"model.layers.{layer}.mlp."
        router, names = hf[at + "gate.weight"], ("gate_proj", "up_proj", "down_proj")
    return router, [
        tuple(hf[f"{at}experts.{e}.{n}.weight"] for n in names) for e in range(len(router))
    ]  # type: ignore[misc]


def _top(hf: State) -> State:
    neox = "gpt_neox.embed_in.weight" in hf
    names = {
        "embed": "gpt_neox.embed_in.weight" if neox else "model.embed_tokens.weight",
        "norm": "gpt_neox.final_layer_norm.weight" if neox else "model.norm.weight",
        "norm_b": "gpt_neox.final_layer_norm.bias",
        "head": "embed_out.weight" if neox else "lm_head.weight",
    }
    return {short: hf[name] for short, name in names.items() if name in hf}


def _layers(hf: State) -> int:
    return 1 + max(int(n.split("layers.")[1].split(".")[0]) for n in hf if "layers." in n)


def mcore(
    hf: State, t: int, r: int, ep: int = 1, er: int = 0, *, local: bool = False,
    sequential: bool = False, rows: int = 128, fault: str = "",
) -> State:  # fmt: skip
    """Megatron-core's GPTModel, with Transformer Engine's names or the local spec's."""
    top = _top(hf)
    out = {"embedding.word_embeddings.weight": _chunk(padded(top["embed"], rows), t, r),
           "decoder.final_layernorm.weight": top["norm"]}  # fmt: skip
    if "head" in top:
        out["output_layer.weight"] = _chunk(padded(top["head"], rows), t, r)
    if "norm_b" in top:
        out["decoder.final_layernorm.bias"] = top["norm_b"]
    for i in range(_layers(hf)):
        own, mlp, _ = _parts(hf, i)
        at = f"decoder.layers.{i}."
        groups = len(own["k"]) // D
        for tail, kind in (("", "weight"), ("_b", "bias")):
            if "q" + tail in own:
                fused = _interleaved(*(own[p + tail] for p in "qkv"), H, groups, D)
                if fault == "unsplit bias" and tail:
                    fused = torch.cat([own[p + tail] for p in "qkv"])
                if fault == "no permutation":
                    fused = torch.cat([own[p + tail] for p in "qkv"])
                out[f"{at}self_attention.linear_qkv.{kind}"] = _chunk(fused, t, r)
        out[at + "self_attention.linear_proj.weight"] = _chunk(own["o"], t, r, 1)
        if "o_b" in own:
            out[at + "self_attention.linear_proj.bias"] = own["o_b"]
        for part in "qk":
            if part + "_norm" in own:
                out[f"{at}self_attention.{part}_layernorm.weight"] = own[part + "_norm"]
        sparse = ("gate" in mlp and "up" not in mlp) or not mlp
        first = "input_layernorm." if local else "self_attention.linear_qkv.layer_norm_"
        second = "pre_mlp_layernorm." if local or sparse else "mlp.linear_fc1.layer_norm_"
        for tail, kind in (("", "weight"), ("_b", "bias")):
            if "norm1" + tail in own:
                out[at + first + kind] = own["norm1" + tail]
                out[at + second + kind] = own["norm2" + tail]
        if sparse:
            router, experts = _experts(hf, i)
            out[at + "mlp.router.weight"] = router
            each = len(experts) // ep
            for e in range(each):
                gate, up, down = experts[er * each + e]
                fc1 = torch.cat([_chunk(gate, t, r), _chunk(up, t, r)])
                if sequential:
                    out[f"{at}mlp.experts.local_experts.{e}.linear_fc1.weight"] = fc1
                    out[f"{at}mlp.experts.local_experts.{e}.linear_fc2.weight"] = _chunk(
                        down, t, r, 1)  # fmt: skip
                else:
                    out[f"{at}mlp.experts.linear_fc1.weight{e}"] = fc1
                    out[f"{at}mlp.experts.linear_fc2.weight{e}"] = _chunk(down, t, r, 1)
            continue
        for name, kind in (("", "weight"), ("_b", "bias")):
            if "gate" + name in mlp:
                joined = torch.cat(
                    [_chunk(mlp["gate" + name], t, r), _chunk(mlp["up" + name], t, r)]
                )
                if fault == "naive fc1":
                    joined = _chunk(torch.cat([mlp["gate" + name], mlp["up" + name]]), t, r)
                out[f"{at}mlp.linear_fc1.{kind}"] = joined
                second_part = mlp["down" + name]
            elif "fc1" + name in mlp:
                out[f"{at}mlp.linear_fc1.{kind}"] = _chunk(mlp["fc1" + name], t, r)
                second_part = mlp["fc2" + name]
            else:
                continue
            whole = kind == "bias"
            out[f"{at}mlp.linear_fc2.{kind}"] = (
                second_part if whole else _chunk(second_part, t, r, 1)
            )
    return out


def te(hf: State, t: int, r: int, *, fused: str = "", rows: int = 128) -> State:
    """Transformer Engine's TransformerLayer in Hugging Face's outer modules. `fused`: "per_rank"
    or "interleaved" where query, key and value are one tensor."""
    top, neox = _top(hf), "gpt_neox.embed_in.weight" in hf
    names = {"embed": "gpt_neox.embed_in.weight", "norm": "gpt_neox.final_layer_norm.weight",
             "norm_b": "gpt_neox.final_layer_norm.bias", "head": "embed_out.weight"} if neox else {
             "embed": "model.embed_tokens.weight", "norm": "model.norm.weight",
             "head": "lm_head.weight"}  # fmt: skip
    out = {}
    for short, tensor in top.items():
        cut = short in ("embed", "head")
        out[names[short]] = _chunk(padded(tensor, rows), t, r) if cut else tensor
    for i in range(_layers(hf)):
        own, mlp, prefix = _parts(hf, i)
        at = f"{prefix}.{i}."
        qkv = at + "self_attention.layernorm_qkv."
        for tail, kind in (("", "weight"), ("_b", "bias")):
            if "norm1" + tail in own:
                out[f"{qkv}layer_norm_{kind}"] = own["norm1" + tail]
                out[f"{at}layernorm_mlp.layer_norm_{kind}"] = own["norm2" + tail]
            if "q" + tail in own:
                parts = [own[p + tail] for p in "qkv"]
                if fused == "per_rank":
                    out[qkv + kind] = torch.cat([_chunk(p, t, r) for p in parts])
                elif fused == "interleaved":
                    out[qkv + kind] = _chunk(_interleaved(*parts, H, len(parts[1]) // D, D), t, r)
                else:
                    for word, part in zip(("query", "key", "value"), parts, strict=True):
                        out[f"{qkv}{word}_{kind}"] = _chunk(part, t, r)
            if "gate" + tail in mlp:
                out[f"{at}layernorm_mlp.fc1_{kind}"] = torch.cat(
                    [_chunk(mlp["gate" + tail], t, r), _chunk(mlp["up" + tail], t, r)])  # fmt: skip
                down = mlp["down" + tail]
                out[f"{at}layernorm_mlp.fc2_{kind}"] = _chunk(down, t, r, 1) if not tail else down
            if "fc1" + tail in mlp:
                out[f"{at}layernorm_mlp.fc1_{kind}"] = _chunk(mlp["fc1" + tail], t, r)
                down = mlp["fc2" + tail]
                out[f"{at}layernorm_mlp.fc2_{kind}"] = _chunk(down, t, r, 1) if not tail else down
        out[at + "self_attention.proj.weight"] = _chunk(own["o"], t, r, 1)
        if "o_b" in own:
            out[at + "self_attention.proj.bias"] = own["o_b"]
        for part in "qk":
            if part + "_norm" in own:
                out[f"{at}self_attention.{part}_norm.weight"] = own[part + "_norm"]
        out[at + "self_attention._extra_state"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    return out


def meta(hf: State, t: int, r: int, *, permuted: bool = True) -> State:
    """Meta's names and order of rotary rows (the inverse of transformers' conversion)."""

    def order(w: Tensor, heads: int) -> Tensor:
        rest = w.shape[1:]
        if not permuted:
            return w
        return w.view(heads, 2, D // 2, *rest).transpose(1, 2).reshape(-1, *rest)

    top = _top(hf)
    out = {"tok_embeddings.weight": _chunk(top["embed"], t, r), "norm.weight": top["norm"],
           "output.weight": _chunk(top["head"], t, r), "rope.freqs": torch.ones(4)}  # fmt: skip
    for i in range(_layers(hf)):
        own, mlp, _ = _parts(hf, i)
        at = f"layers.{i}."
        out[at + "attention_norm.weight"], out[at + "ffn_norm.weight"] = own["norm1"], own["norm2"]
        out[at + "attention.wq.weight"] = _chunk(order(own["q"], H), t, r)
        out[at + "attention.wk.weight"] = _chunk(order(own["k"], G), t, r)
        out[at + "attention.wv.weight"] = _chunk(own["v"], t, r)
        if "q_b" in own:
            out[at + "attention.wq.bias"] = _chunk(order(own["q_b"], H), t, r)
            out[at + "attention.wk.bias"] = _chunk(order(own["k_b"], G), t, r)
            out[at + "attention.wv.bias"] = _chunk(own["v_b"], t, r)
        out[at + "attention.wo.weight"] = _chunk(own["o"], t, r, 1)
        out[at + "feed_forward.w1.weight"] = _chunk(mlp["gate"], t, r)
        out[at + "feed_forward.w3.weight"] = _chunk(mlp["up"], t, r)
        out[at + "feed_forward.w2.weight"] = _chunk(mlp["down"], t, r, 1)
    return out


def smp_v1(hf: State, t: int, r: int) -> State:
    """SMP v1's public names, of a GPT-NeoX."""
    top = _top(hf)
    out = {"word_embedding.weight": _chunk(top["embed"], t, r),
           "layernorm.weight": top["norm"], "layernorm.bias": top["norm_b"],
           "lm_head.weight": _chunk(top["head"], t, r)}  # fmt: skip
    for i in range(_layers(hf)):
        own, mlp, _ = _parts(hf, i)
        at = f"transformer.seq_layers.{i}."
        for tail, kind in (("", "weight"), ("_b", "bias")):
            out[f"{at}attention.pre_layernorm.{kind}"] = own["norm1" + tail]
            out[f"{at}output.pre_layernorm.{kind}"] = own["norm2" + tail]
            for word, part in (("query", "q"), ("key", "k"), ("value", "v")):
                out[f"{at}attention.{word}.{kind}"] = _chunk(own[part + tail], t, r)
            for place, tensor in (("attention.dense", own["o" + tail]),
                                  ("output.dense2", mlp["fc2" + tail])):  # fmt: skip
                out[f"{at}{place}.{kind}"] = tensor if tail else _chunk(tensor, t, r, 1)
            out[f"{at}output.dense1.{kind}"] = _chunk(mlp["fc1" + tail], t, r)
    return out


def hf_tp(made: Any, t: int, r: int) -> State:
    """What each rank holds under transformers' own tensor parallelism, names as in memory."""
    return {name: hf_tp_part(name, held, t, r) for name, held in made.state_dict().items()}


def hf_tp_part(name: str, tensor: Tensor, t: int, r: int) -> Tensor:
    """A rank's part of one tensor."""
    last = name.split(".")[-2] if not name.endswith("_proj") else name.split(".")[-1]
    if last in ("o_proj", "down_proj") and not name.endswith("bias"):
        return _chunk(tensor, t, r, tensor.dim() - 1)
    if last == "gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        return torch.cat([_chunk(gate, t, r, 1), _chunk(up, t, r, 1)], 1)
    if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        return _chunk(tensor, t, r)
    return tensor


def each_rank(cut: Callable[[int, int], State], t: int, ep: int = 1) -> list[State]:
    """The states of all ranks: tensor parallelism innermost."""
    return [cut(r, e) for e in range(ep) for r in range(t)]
