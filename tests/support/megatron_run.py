"""Megatron-core's GPTModel (local spec, CPU, gloo), filled and exported by mbridge.

A server, run by an interpreter that has both: importing them takes ten seconds of processor time,
so it is done once, and each job's ranks are forked. A job is a line of JSON on its input: `hf`, a
Hugging Face directory; `ranks`, what `import_hf` made of it; `tp`, `ep`, `etp`; `world`; `out`;
`seconds`. It is
answered with a line of JSON: an error's text, or null. In `out` are then `logits.pt`, each rank's
state as mbridge filled it (`filled<rank>.pt`, the names of Transformer Engine's spec,
`local<rank>.pt`, the local spec's) and, once the model has loaded `ranks`, strictly, what mbridge
exports of it (`exported.pt`). A family without a bridge is set up by hand, and loads `ranks` only.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What Megatron has only for GPUs is off; nothing here says where a weight lies.
ON_CPU = {
    "sequence_parallel": False, "use_cpu_initialization": True, "masked_softmax_fusion": False,
    "bias_dropout_fusion": False, "bias_activation_fusion": False, "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False, "persist_layer_norm": False, "attention_dropout": 0.0,
    "moe_grouped_gemm": False, "variable_seq_lengths": False, "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "allgather", "attention_backend": "unfused",
}  # fmt: skip
BRIDGED = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
NAMES = (  # the local spec's, Transformer Engine's
    (r"\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", r".\2.\3\1"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),  # of a dense layer
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),  # where there is one
    (r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_"),  # where there are
)


class TeNames:
    """A model of the local spec under the names that mbridge expects."""

    def __init__(self, model: Any) -> None:
        self.decoder, self._model, self._own = model.decoder, model, set(model.state_dict())

    def named(self, name: str) -> str:
        layer = ".".join(name.split(".")[:3])
        compressed = f"{layer}.self_attention.linear_kv_up_proj.weight" in self._own
        sparse = f"{layer}.mlp.router.weight" in self._own
        for (old, new), here in zip(
            NAMES, (True, not sparse, not compressed, compressed), strict=True
        ):
            name = re.sub(old, new, name) if here else name
        return name

    def named_parameters(self) -> Any:
        return ((self.named(name), p) for name, p in self._model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        return {self.named(n): t for n, t in tensors(self._model).items()}


class Attention(torch.nn.Module):
    """For DeepSeek: the local spec's own, in 0.16.1, knows no values of another width than keys."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, mask: Any, *_: Any, **__: Any) -> Any:
        heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]  # from length, batch, heads
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=self.scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


def bridge_of(hf: Path) -> Any:
    """mbridge's bridge for the model in that directory, for the CPU."""
    from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
    from mbridge.core.llm_bridge import LLMBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(hf)
    own: dict[str, Any] = {}
    if config.model_type == "mixtral":
        own["moe_router_pre_softmax"] = False  # mbridge 0.15.1 has True: other logits
    if config.model_type == "deepseek_v3":
        own["mtp_num_layers"] = None

    class OnCpu(_MODEL_REGISTRY[config.model_type]):  # type: ignore[misc]
        def _build_base_config(self, **given: Any) -> Any:
            given.pop("max_position_embeddings", None)  # Megatron 0.16 calls it otherwise
            return super()._build_base_config(**{**given, **ON_CPU, **own})

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = False
            spec = get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, normalization="RMSNorm"
            )
            if config.model_type == "deepseek_v3":
                for layer in spec.layer_specs:
                    layer.submodules.self_attention.submodules.core_attention = Attention
            return spec

        def _model_provider(self, callbacks: Any) -> Any:
            return LLMBridge._model_provider(self, callbacks)  # DeepSeek's own does not pad

        def _get_safetensor_io(self, path: str) -> Any:
            return Bridge._get_safetensor_io(self, path)  # DeepSeek's own reads float8 only

    return OnCpu(config, dtype=torch.float32, make_vocab_size_divisible_by=128)


def by_hand(hf: dict[str, Any], job: dict[str, Any]) -> Any:
    """A GPTModel of a family without a bridge, from its Hugging Face config."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    family, functional = hf["model_type"], torch.nn.functional
    hidden, heads = hf.get("hidden_size", hf.get("n_embd")), hf.get("num_attention_heads", 0)
    rope = hf.get("rope_parameters") or {}
    gated = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
             "activation_func": functional.silu}  # fmt: skip
    plain = {"normalization": "LayerNorm", "activation_func": functional.gelu}
    own: dict[str, dict[str, Any]] = {
        "phi3": gated,
        "gpt_neox": plain,
        "gpt2": {**plain, "activation_func": lambda x: functional.gelu(x, approximate="tanh")},
        "gpt_oss": {
            **gated, "add_bias_linear": True, "activation_func": quick_gelu,
            "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0,
            "softmax_type": "learnable", "num_moe_experts": hf.get("num_local_experts"),
            "moe_router_topk": hf.get("num_experts_per_tok"), "moe_router_pre_softmax": False,
            "moe_router_load_balancing_type": "none",
            "moe_ffn_hidden_size": hf.get("intermediate_size"),
        },
    }  # fmt: skip
    heads = heads or hf["n_head"]
    config = TransformerConfig(
        num_layers=hf.get("num_hidden_layers", hf.get("n_layer")), hidden_size=hidden,
        ffn_hidden_size=hf.get("intermediate_size", hf.get("n_inner")), num_attention_heads=heads,
        num_query_groups=hf.get("num_key_value_heads", heads), hidden_dropout=0.0,
        kv_channels=hf.get("head_dim", hidden // heads), tensor_model_parallel_size=job["tp"],
        expert_model_parallel_size=job["ep"], expert_tensor_parallel_size=job["etp"],
        params_dtype=torch.float32,
        layernorm_epsilon=hf.get("rms_norm_eps", hf.get("layer_norm_eps", 1e-5)),
        **{**ON_CPU, **own[family], "attention_backend": AttnBackend.unfused},
    )  # fmt: skip
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        ),
        vocab_size=128, max_sequence_length=64,
        position_embedding_type="learned_absolute" if family == "gpt2" else "rope",
        rotary_base=rope.get("rope_theta", 0), rotary_percent=rope.get("partial_rotary_factor", 1),
        share_embeddings_and_output_weights=bool(hf["tie_word_embeddings"]),
    )  # fmt: skip


def run(job: dict[str, Any], rank: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    tp, ep, out, hf = job["tp"], job["ep"], Path(job["out"]), Path(job["hf"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=job["world"]
    )
    # Megatron asks for the GPU on its way, also where it computes without one.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    get_cuda_rng_tracker().fork = lambda *_, **__: nullcontext()  # for dropout: there is none
    moe_utils.te_general_gemm = None  # which 0.16.1 asks for also where it could not import it
    multi_latent_attention.TELinear = type("NoSuch", (), {})  # as is this, for a class
    parallel_state.initialize_model_parallel(
        tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=job["etp"]
    )
    config = json.loads((hf / "config.json").read_text())
    (ranks,) = Path(job["ranks"]).glob(f"data-*-r{rank:05d}-0.safetensors")
    bridge = bridge_of(hf) if config["model_type"] in BRIDGED else None
    model = bridge._model_provider([])(True, True) if bridge else by_hand(config, job)
    model.eval()
    named = TeNames(model)
    with torch.no_grad():
        if bridge:
            bridge.load_weights([named], str(hf))
        else:
            load_strictly(model, ranks)
        logits = computed(model, tp)
        state = {n: t.clone() for n, t in tensors(model).items()}
        torch.save({"model": state}, out / f"local{rank}.pt")
        torch.save({"model": whole_where_te_has_it_whole(named)}, out / f"filled{rank}.pt")
        exported = {}
        if bridge:
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
            load_strictly(model, ranks)
            exported = dict(bridge.export_weights([named]))
    if rank == 0:
        torch.save(logits, out / "logits.pt")
        torch.save({n: t.clone() for n, t in exported.items()}, out / "exported.pt")
    dist.destroy_process_group()


def load_strictly(model: Any, path: Path) -> None:
    from safetensors.torch import load_file

    found = model.load_state_dict(load_file(path), strict=False)
    missing = [name for name in found.missing_keys if "_extra_state" not in name]
    assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)


def whole_where_te_has_it_whole(named: TeNames) -> dict[str, torch.Tensor]:
    """The local spec cuts the narrow layers of compressed attention; Transformer Engine's not."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group as group

    state = {n: t.clone() for n, t in named.state_dict().items()}
    for name in state:
        if name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight")):
            parts = [torch.empty_like(state[name]) for _ in range(group().size())]
            dist.all_gather(parts, state[name], group=group())
            state[name] = torch.cat(parts)
    return state


def computed(model: Any, tp: int) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = torch.arange(40).reshape(2, 20) % 120
    places = torch.arange(20)[None].expand(2, -1)
    mask = torch.triu(torch.ones(20, 20, dtype=torch.bool), 1)[None, None]
    logits = model(tokens, places, mask)
    return gather_from_tensor_model_parallel_region(logits) if tp > 1 else logits


def rank_main(job: dict[str, Any], rank: int) -> None:
    try:
        run(job, rank)
    except BaseException:
        (Path(job["out"]) / f"error{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)


def done(job: dict[str, Any]) -> str | None:
    """Runs a job's ranks; what went wrong."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(job, r)) for r in range(job["world"])]
    for process in ranks:
        process.start()
    until = time.monotonic() + job["seconds"]
    # one that fails leaves the others waiting for it
    while any(p.is_alive() for p in ranks) and not any(p.exitcode for p in ranks):
        if time.monotonic() > until:
            break
        multiprocessing.connection.wait([p.sentinel for p in ranks if p.is_alive()], 1)
    failed = any(p.exitcode != 0 for p in ranks)
    for process in ranks:
        process.kill()
        process.join()
    told = [path.read_text() for path in sorted(Path(job["out"]).glob("error*.txt"))]
    return "\n".join(told) or ("a rank died, or the time was over" if failed else None)


def main() -> None:
    import mbridge  # noqa: F401
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    for line in sys.stdin:
        print(json.dumps(done(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
