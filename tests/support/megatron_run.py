"""Megatron-core's GPTModel (local spec, CPU, gloo), filled and exported by mbridge.

A server, run by an interpreter that has both: importing them takes ten seconds of processor time,
so it is done once, and each job's ranks are forked. A job is a line of JSON on its input: `hf`, a
Hugging Face directory; `ranks`, what `import_hf` made of it; `tp`, `ep`; `out`; `seconds`. It is
answered with a line of JSON: an error's text, or null. In `out` are then `logits.pt`, each rank's
state as mbridge filled it (`filled<rank>.pt`, the names of Transformer Engine's spec,
`local<rank>.pt`, the local spec's) and, once the model has loaded `ranks`, strictly, what mbridge
exports of it (`exported.pt`).
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
    "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
NAMES = (  # the local spec's, Transformer Engine's
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", r".\2.\3\1"),
)


class TeNames:
    """A model of the local spec under the names that mbridge expects."""

    def __init__(self, model: Any) -> None:
        self.decoder, self._model = model.decoder, model

    def named(self, name: str) -> str:
        sparse = f"{'.'.join(name.split('.')[:3])}.mlp.router.weight" in self._known
        for old, new in NAMES:
            if not (sparse and "pre_mlp" in old):
                name = re.sub(old, new, name)
        return name

    @property
    def _known(self) -> Any:
        return self._model.state_dict()

    def named_parameters(self) -> Any:
        return ((self.named(name), p) for name, p in self._model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        state = self._model.state_dict()
        return {self.named(n): t for n, t in state.items() if isinstance(t, torch.Tensor)}


def bridge_of(hf: Path) -> Any:
    """mbridge's bridge for the model in that directory, for the CPU."""
    from mbridge.core.bridge import _MODEL_REGISTRY
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(hf)
    own: dict[str, Any] = {}
    if config.model_type == "mixtral":
        own["moe_router_pre_softmax"] = False  # mbridge 0.15.1 has True: other logits

    class OnCpu(_MODEL_REGISTRY[config.model_type]):  # type: ignore[misc]
        def _build_base_config(self, **given: Any) -> Any:
            return super()._build_base_config(**{**given, **ON_CPU, **own})

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = False
            return get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, normalization="RMSNorm"
            )

    return OnCpu(config, dtype=torch.float32, make_vocab_size_divisible_by=128)


def run(job: dict[str, Any], rank: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.moe import moe_utils
    from safetensors.torch import load_file

    tp, ep, out = job["tp"], job["ep"], Path(job["out"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=tp * ep
    )
    # Megatron asks for the GPU on its way, also where it computes without one.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    get_cuda_rng_tracker().fork = lambda *_, **__: nullcontext()  # for dropout: there is none
    moe_utils.te_general_gemm = None  # which 0.16.1 asks for also where it could not import it
    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
    bridge = bridge_of(Path(job["hf"]))
    model = bridge._model_provider([])(True, True).eval()
    named = TeNames(model)
    with torch.no_grad():
        bridge.load_weights([named], job["hf"])
        logits = computed(model, tp)
        keep = {n: t.clone() for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
        torch.save({"model": keep}, out / f"local{rank}.pt")
        torch.save({"model": dict(named.state_dict())}, out / f"filled{rank}.pt")
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        (own,) = Path(job["ranks"]).glob(f"data-*-r{rank:05d}-0.safetensors")
        state = load_file(own)
        found = model.load_state_dict(state, strict=False)
        missing = [name for name in found.missing_keys if "_extra_state" not in name]
        assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)
        exported = dict(bridge.export_weights([named]))
    if rank == 0:
        torch.save(logits, out / "logits.pt")
        torch.save({n: t.clone() for n, t in exported.items()}, out / "exported.pt")
    dist.destroy_process_group()


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
    ranks = [context.Process(target=rank_main, args=(job, r)) for r in range(job["tp"] * job["ep"])]
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
