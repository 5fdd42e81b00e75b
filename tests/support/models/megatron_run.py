"""Megatron-core's GPTModel (local spec, CPU, gloo), filled and exported by mbridge.

A server, run by an interpreter that has both: importing them takes ten seconds of processor time,
so it is done once, and each job's ranks are forked. A job is a line of JSON on its input: `hf`, a
Hugging Face directory; `ranks`, what `import_hf` made of it; `tp`, `ep`, `etp`; `world`; `out`;
`seconds`. It is
answered with a line of JSON: an error's text, or null. In `out` are then `logits.pt`, each rank's
state as mbridge filled it (`filled<rank>.pt`, the names of Transformer Engine's spec,
`local<rank>.pt`, the local spec's) and, once the model has loaded `ranks`, strictly, what mbridge
exports of it (`exported.pt`). A family without a bridge is set up by hand, and loads `ranks` only.
Where there is `dist`, the model is saved there as Megatron-core's distributed checkpoint.
Where there is `mtp`, the model has a layer that predicts a further token, and the logits of that
layer follow those of the model.
Where there is `legacy`, what `import_hf` made in that layout, the same model with Megatron's legacy
experts loads it, strictly: `legacy<rank>.pt` and `legacy-logits.pt` are that model's.
Where there is `whole`, what `import_hf` made for one rank, the model is a vision-language one,
which mbridge builds for GPUs only: it fills and exports tensors of the shapes that `import_hf`
wrote.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
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
BRIDGED = (
    "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "qwen2_moe", "glm4_moe",
)  # fmt: skip
TOWERS = ("gemma3", "qwen2_5_vl")
FIRST = {"opt": 2}  # the row of positions that the first token has
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
        # the further layers' own is one name deeper
        layer = ".".join(name.split(".")[: 4 if name.startswith("mtp.") else 3])
        compressed = f"{layer}.self_attention.linear_kv_up_proj.weight" in self._own
        sparse = f"{layer}.mlp.router.weight" in self._own
        for (old, new), here in zip(
            NAMES, (True, not sparse, not compressed, compressed), strict=True
        ):
            name = re.sub(old, new, name) if here else name
        if f"{layer}.self_attention.in_proj.weight" in self._own:  # of the gated delta net
            name = name.replace(".linear_qkv.layer_norm_", ".in_proj.layer_norm_")
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


class Alibi(Attention):
    """For Falcon RW and BLOOM: the local spec's own takes no biases of places."""

    scaled = True  # with the scores, as in Falcon

    def forward(self, query: Any, key: Any, value: Any, mask: Any, *_: Any, **__: Any) -> Any:
        from megatron.core.parallel_state import get_tensor_model_parallel_group as group

        here, width = query.shape[2], query.shape[3]
        number = torch.arange(here) + here * group().rank() + 1
        slopes = 2.0 ** (-8 * number / (here * group().size()))
        heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]  # from length, batch, heads
        places = (slopes[:, None, None] * torch.arange(len(key)))[None]
        places = places / width**0.5 if self.scaled else places
        bias = places.masked_fill(mask, -torch.inf)
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=bias)
        return out.permute(2, 0, 1, 3).flatten(2)


class Held:
    """What mbridge asks of a vision-language model, over the tensors of a rank's file. A tensor of
    another shape than `whole` has it is cut, and says along which dimension, as Megatron's do."""

    def __init__(self, path: Path, whole: Path) -> None:
        from safetensors.torch import load_file

        self._own = {name: torch.nn.Parameter(t) for name, t in load_file(path).items()}
        for name, tensor in load_file(whole).items():
            apart = [d for d, n in enumerate(tensor.shape) if self._own[name].shape[d] != n]
            self._own[name].tensor_model_parallel = bool(apart)  # type: ignore[attr-defined]
            self._own[name].partition_dim = apart[0] if apart else -1  # type: ignore[attr-defined]
        named = [name.split(".") for name in self._own]
        count = 1 + max(
            int(n[3]) for n in named if n[:3] == ["language_model", "decoder", "layers"]
        )
        layers = [SimpleNamespace(layer_number=1 + number) for number in range(count)]
        self.language_model = SimpleNamespace(decoder=SimpleNamespace(layers=layers))

    def state_dict(self) -> dict[str, Any]:
        return self._own

    def named_parameters(self) -> Any:
        return self._own.items()


def run_held(job: dict[str, Any], bridge: Any, path: Path, rank: int) -> None:
    out = Path(job["out"])
    (whole,) = Path(job["whole"]).glob("data-*-r00000-0.safetensors")
    model = Held(path, whole)
    with torch.no_grad():
        for parameter in model.state_dict().values():
            parameter.fill_(float("nan"))
        bridge.load_weights([model], job["hf"])
        torch.save({n: t.data for n, t in model.named_parameters()}, out / f"filled{rank}.pt")
        exported = dict(bridge.export_weights([Held(path, whole)]))
    if rank == 0:
        torch.save({n: t.clone() for n, t in exported.items()}, out / "exported.pt")


class BloomsAlibi(Alibi):
    scaled = False


class WithoutBias:
    """Cohere's norm."""

    def __new__(cls, config: Any, hidden_size: int, eps: float, **_: Any) -> Any:
        return torch.nn.LayerNorm(hidden_size, eps, bias=False)


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


def bridge_of(hf: Path, further: bool) -> Any:
    """mbridge's bridge for the model in that directory, for the CPU."""
    from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
    from mbridge.core.llm_bridge import LLMBridge
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(hf)
    own: dict[str, Any] = {}
    if config.model_type == "mixtral":
        own["moe_router_pre_softmax"] = False  # mbridge 0.15.1 has True: other logits
    if config.model_type == "deepseek_v3" or further:
        own["mtp_num_layers"] = 1 if further else None
    if config.model_type == "qwen2_moe":
        own["moe_shared_expert_gate"] = True  # mbridge maps its weight, and leaves it out

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

        def _get_gptmodel_args(self) -> dict[str, Any]:
            given: dict[str, Any] = super()._get_gptmodel_args()
            if further:
                layers = self._get_transformer_layer_spec()
                given["mtp_block_spec"] = get_gpt_mtp_block_spec(self.config, layers, False)
            return given

        def _model_provider(self, callbacks: Any) -> Any:
            return LLMBridge._model_provider(self, callbacks)  # DeepSeek's own does not pad

        def _get_safetensor_io(self, path: str) -> Any:
            return Bridge._get_safetensor_io(self, path)  # DeepSeek's own reads float8 only

    bridge = OnCpu(config, dtype=torch.float32, make_vocab_size_divisible_by=128)
    if config.model_type in TOWERS:  # as their models set it: nothing of a tower's joint is gated
        plain = SimpleNamespace(gated_linear_unit=False)
        if config.model_type == "gemma3":
            bridge.vision_config = bridge.vision_projection_config = plain
        else:  # mbridge 0.15.1 takes Qwen's merger for a gated one
            own_config = bridge._get_mcore_config_by_name
            bridge._get_mcore_config_by_name = lambda name: (
                plain if ".projection." in name else own_config(name)
            )
    return bridge


def grouped_product(rows: Any, matrices: Any, counts: Any, trans_b: bool) -> Any:
    """`ops.gmm` of the package grouped_gemm, which is for GPUs: as its own test has it, the first
    `counts[0]` rows by the first matrix, the next `counts[1]` by the second, and so on."""
    assert not trans_b  # Megatron transposes nothing
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def with_legacy_experts(bridge: Any) -> Any:
    """The bridge's model, local spec, with the experts that Megatron calls legacy: `GroupedMLP`."""
    from megatron.core.transformer.moe import experts, grouped_gemm_util

    grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops = SimpleNamespace(gmm=grouped_product)
    bridge.config = copy.copy(bridge.config)
    bridge.config.moe_grouped_gemm = bridge.config.moe_use_legacy_grouped_gemm = True
    model = bridge._model_provider([])(True, True)
    for layer in model.decoder.layers:
        own = layer.mlp.experts
        assert type(own) is experts.GroupedMLP
        own.config = copy.copy(own.config)
        own.config.bf16 = True  # which its forward asks for, and then casts nothing
    return model.eval()


def beside() -> type:
    """Megatron's layer, summed otherwise: attention and the MLP both read the layer's input."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class Beside(TransformerLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Any, **given: Any) -> Any:
            attended, context = self._forward_attention(hidden_states, **given)  # with the residual
            return attended + self._forward_mlp(hidden_states) - hidden_states, context

        def _forward_pre_mlp_layernorm(self, hidden_states: Any) -> Any:
            one = isinstance(self.pre_mlp_layernorm, IdentityOp)
            return (self.input_layernorm if one else self.pre_mlp_layernorm)(hidden_states)

    return Beside


def attention_with(biases: bool) -> type:
    """Megatron's attention, with other biases than the MLP or the experts have: in GPT-J only the
    MLP has them, in PhiMoE only attention."""
    from megatron.core.transformer.attention import SelfAttention

    class Biased(SelfAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **given: Any) -> None:
            config = copy.copy(config)
            config.add_bias_linear = biases
            super().__init__(config, *args, **given)

    return Biased


def with_embedding_norm(embedding: Any, hidden: int) -> None:
    """Inside the embedding, as in BigScience's Megatron."""
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from megatron.core.transformer.utils import sharded_state_dict_default

    class Normed(VocabParallelEmbedding):  # type: ignore[misc]
        def forward(self, ids: Any) -> Any:
            return self.norm(super().forward(ids))

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            own = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            norm = sharded_state_dict_default(
                self.norm, f"{prefix}norm.", sharded_offsets, metadata, tp_group=self.tp_group
            )
            return {**own, **norm}

    embedding.norm = torch.nn.LayerNorm(hidden, 1e-5)
    embedding.__class__ = Normed


def with_sparse_mixer(model: Any, jitter: float) -> None:
    """PhiMoE's choice of experts, which is transformers'; its router's weights are Megatron's."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    def routing(logits: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        scores = logits.view(-1, logits.shape[-1])
        weights, chosen = sparsemixer(scores, jitter, False)
        probabilities = torch.zeros_like(scores).scatter(1, chosen, weights)
        return probabilities, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)

    for layer in model.decoder.layers:
        layer.mlp.router.routing = routing


def spec_by_hand(hf: dict[str, Any], config: Any) -> Any:
    """The local spec's layers, and what the family has otherwise."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    family, new = hf["model_type"], hf.get("new_decoder_architecture")
    shared = (hf.get("parallel_attn") and not new) or family in ("gptj", "cohere", "cohere2")
    for layer in spec.layer_specs:
        if new or shared or hf.get("use_parallel_residual"):
            layer.module = beside()
        if shared:
            layer.submodules.pre_mlp_layernorm = IdentityOp  # one norm for both
        if hf.get("alibi") or family == "bloom":
            core = BloomsAlibi if family == "bloom" else Alibi
            layer.submodules.self_attention.submodules.core_attention = core
        if family in ("gptj", "phimoe"):
            layer.submodules.self_attention.module = attention_with(biases=family == "phimoe")
        if family.startswith("cohere"):
            layer.submodules.input_layernorm = spec.layer_norm = WithoutBias
    return spec


def by_hand(hf: dict[str, Any], job: dict[str, Any]) -> Any:
    """A GPTModel of a family without a bridge, from its Hugging Face config."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    if hf["model_type"] in ("llama4_text", "qwen3_next"):
        import megatron_next  # beside this script

        return megatron_next.model(hf, job, ON_CPU)
    family, functional = hf["model_type"], torch.nn.functional
    hidden, heads = hf.get("hidden_size", hf.get("n_embd")), hf.get("num_attention_heads", 0)
    rope = hf.get("rope_parameters") or {}
    gated = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
             "activation_func": functional.silu}  # fmt: skip
    plain = {"normalization": "LayerNorm", "activation_func": functional.gelu}
    by_tanh = {**plain, "activation_func": lambda x: functional.gelu(x, approximate="tanh")}
    mixture = {
        "num_moe_experts": hf.get("num_local_experts"),
        "moe_router_topk": hf.get("num_experts_per_tok"), "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": hf.get("intermediate_size"),
    }  # fmt: skip
    cohere = {**gated, "normalization": "LayerNorm", "rotary_interleaved": True}
    own: dict[str, dict[str, Any]] = {
        "phi3": gated,
        "gpt_neox": plain,
        "falcon": {**plain, "add_bias_linear": hf.get("bias")},
        "gpt2": by_tanh, "starcoder2": by_tanh, "bloom": by_tanh,
        "gptj": {**by_tanh, "rotary_interleaved": True},
        "opt": {**plain, "activation_func": functional.relu},
        "cohere": cohere,
        "cohere2": {
            **cohere,
            "no_rope_freq": [int(kind == "full_attention") for kind in hf.get("layer_types", ())],
        },
        "phimoe": {**gated, **mixture, "normalization": "LayerNorm"},
        "gpt_oss": {
            **gated, "add_bias_linear": True, "activation_func": quick_gelu,
            "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0,
            "softmax_type": "learnable", **mixture,
        },
    }  # fmt: skip
    heads = heads or hf["n_head"]
    groups = hf.get("num_key_value_heads", hf.get("num_kv_heads", heads))
    if family == "falcon" and hf["multi_query"] and not hf["new_decoder_architecture"]:
        groups = 1
    places = {"gpt2": "learned_absolute", "opt": "learned_absolute", "bloom": "none"}.get(
        family, "none" if hf.get("alibi") else "rope"
    )
    inner = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
    if family == "gptj":
        rope = {"rope_theta": 10000, "partial_rotary_factor": hf["rotary_dim"] * heads / hidden}
    config = TransformerConfig(
        num_layers=hf.get("num_hidden_layers", hf.get("n_layer")), hidden_size=hidden,
        ffn_hidden_size=next((hf[name] for name in inner if name in hf), 4 * hidden),
        num_attention_heads=heads,
        num_query_groups=groups, hidden_dropout=0.0,
        kv_channels=hf.get("head_dim", hidden // heads), tensor_model_parallel_size=job["tp"],
        expert_model_parallel_size=job["ep"], expert_tensor_parallel_size=job["etp"],
        params_dtype=torch.float32,
        layernorm_epsilon=hf.get("rms_norm_eps", hf.get("layer_norm_eps", 1e-5)),
        **{**ON_CPU, **own[family], "attention_backend": AttnBackend.unfused},
    )  # fmt: skip
    model = GPTModel(
        config, spec_by_hand(hf, config),
        vocab_size=128, max_sequence_length=64 + FIRST.get(family, 0),
        position_embedding_type=places,
        rotary_base=rope.get("rope_theta", 0), rotary_percent=rope.get("partial_rotary_factor", 1),
        share_embeddings_and_output_weights=bool(hf["tie_word_embeddings"]),
    )  # fmt: skip
    if family == "gptj" or hf.get("lm_head_bias"):
        model.output_layer = ColumnParallelLinear(
            hidden, 128, config=config, init_method=config.init_method, bias=True,
            skip_bias_add=False, gather_output=False,
        )  # fmt: skip
    if family == "bloom":
        with_embedding_norm(model.embedding.word_embeddings, hidden)
    if family == "phimoe":
        with_sparse_mixer(model, hf["router_jitter_noise"])
    return model


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
    bridged = config["model_type"] in (*BRIDGED, *TOWERS)
    bridge = bridge_of(hf, job.get("mtp", False)) if bridged else None
    if job.get("whole"):
        run_held(job, bridge, ranks, rank)
        dist.destroy_process_group()
        return
    model = bridge._model_provider([])(True, True) if bridge else by_hand(config, job)
    if job.get("mtp"):  # otherwise it asks for labels, and gives the loss of further tokens
        model.config = copy.copy(model.config)
        model.config.mtp_num_layers = None
    model.eval()
    named = TeNames(model)
    with torch.no_grad():
        if bridge:
            bridge.load_weights([named], str(hf))
        else:
            load_strictly(model, ranks)
        logits = computed(model, tp, FIRST.get(config["model_type"], 0))
        logits *= config.get("logit_scale", 1)
        state = {n: t.clone() for n, t in tensors(model).items()}
        torch.save({"model": state}, out / f"local{rank}.pt")
        torch.save({"model": whole_where_te_has_it_whole(named)}, out / f"filled{rank}.pt")
        if job["dist"]:
            save_distributed(model, Path(job["dist"]), rank)
        exported = {}
        if bridge:
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
            load_strictly(model, ranks)
            exported = dict(bridge.export_weights([named]))
        if job["legacy"]:
            (ranks,) = Path(job["legacy"]).glob(f"data-*-r{rank:05d}-0.safetensors")
            model = with_legacy_experts(bridge)
            named = TeNames(model)
            load_strictly(model, ranks, named.named)
            torch.save({"model": named.state_dict()}, out / f"legacy{rank}.pt")
            legacy = computed(model, tp)
            if rank == 0:
                torch.save(legacy, out / "legacy-logits.pt")
    if rank == 0:
        torch.save(logits, out / "logits.pt")
        torch.save({n: t.clone() for n, t in exported.items()}, out / "exported.pt")
    dist.destroy_process_group()


def save_distributed(model: Any, folder: Path, rank: int) -> None:
    """What Megatron-LM's `save_checkpoint` does for `torch_dist`, without an optimizer."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    torch.cuda.synchronize = lambda *_: None  # which it asks for where nothing is on a GPU
    # its own is started anew on each rank, and imports torch: 2 s of a processor
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    state = {
        "args": SimpleNamespace(tensor_model_parallel_size=2), "iteration": 10,
        **model.sharded_state_dict(),
    }  # fmt: skip
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1))


def load_strictly(model: Any, path: Path, named: Callable[[str], str] = str) -> None:
    """A file under the model's names, or what `named` makes of them."""
    from safetensors.torch import load_file

    own = {named(name): name for name in model.state_dict()}
    held = {own.get(name, name): tensor for name, tensor in load_file(path).items()}
    found = model.load_state_dict(held, strict=False)
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


def computed(model: Any, tp: int, first: int = 0) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = torch.arange(40).reshape(2, 20) % 120
    places = torch.arange(first, first + 20)[None].expand(2, -1)
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
    os.environ["TORCHDYNAMO_DISABLE"] = (
        "1"  # Megatron compiles small functions, which takes seconds
    )
    import mbridge  # noqa: F401
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    for line in sys.stdin:
        print(json.dumps(done(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
