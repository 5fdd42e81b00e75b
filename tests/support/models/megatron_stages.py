"""Pipeline stages that Megatron-core (local spec, CPU) makes and cuts itself.

Run by an interpreter that has it: `megatron_stages.py WHOLE OUT JOBS`. WHOLE is a safetensors file
with a whole tiny Llama by the local spec's names. JOBS is a list in JSON; each job is written below
OUT by its number, as Megatron-LM's `save_checkpoint` would write it. For each rank a process group
of torch's "fake" backend says that there are others. Which layers a stage or chunk has is what
Megatron's own layers say (`layer_number`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from limits import seconds
from megatron_run import ON_CPU
from safetensors.torch import load_file

LAYERS = "decoder.layers."


def on_forked_ranks(
    rank_main: Callable[[dict[str, Any], int, str], None], job: dict[str, Any], world: int
) -> None:
    """Run a rank in each of `world` processes, forked so that they import nothing anew. They meet
    by a file beside what the job saves."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=rank_main, args=(job, rank, f"{job['save']}.meet"))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds(120))
    for process in ranks:
        process.kill()
    assert not any(process.exitcode for process in ranks), job


def config_of(job: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    own = {**ON_CPU, "attention_backend": AttnBackend.unfused}
    return TransformerConfig(
        hidden_size=64, ffn_hidden_size=160, num_attention_heads=8, num_query_groups=4,
        kv_channels=16, gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm",
        activation_func=torch.nn.functional.silu, params_dtype=torch.float32,
        pipeline_dtype=torch.float32, **{**own, **job},
    )  # fmt: skip


def chunk_of(config: Any, stage: int, number: int | None, whole: dict[str, Any]) -> Any:
    """A chunk, with the weights of the layers that Megatron says it has."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    chunks = config.virtual_pipeline_model_parallel_size or 1
    last = stage == config.pipeline_model_parallel_size - 1
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=number
    )
    model = GPTModel(
        config, spec, vocab_size=128, max_sequence_length=64, position_embedding_type="rope",
        pre_process=stage == 0 and not number,
        post_process=last and (number or 0) == chunks - 1, vp_stage=number,
    )  # fmt: skip
    return filled(model, whole)


def filled(model: Any, whole: dict[str, Any]) -> Any:
    """The model, once it has loaded its own part of the whole state."""
    own = {n: t for n, t in whole.items() if not n.startswith(LAYERS)}
    for place, layer in enumerate(model.decoder.layers):
        at, here = f"{LAYERS}{layer.layer_number - 1}.", f"{LAYERS}{place}."
        own |= {n.replace(at, here): t for n, t in whole.items() if n.startswith(at)}
    wanted = model.state_dict()
    model.load_state_dict({n: own.get(n, t) for n, t in wanted.items()}, strict=True)
    lost = [n for n, t in wanted.items() if isinstance(t, torch.Tensor) and n not in own]
    assert not lost, lost
    return model


def tensors(model: Any) -> dict[str, Any]:
    return {n: t.clone() for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


def save(job: dict[str, Any], whole: dict[str, Any], folder: Path) -> None:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = config_of(job)
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    for stage in range(pp):
        dist.init_process_group("fake", rank=stage, world_size=pp, store=FakeStore())
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            create_gloo_process_groups=False,
        )
        if vpp is None:
            held: dict[str, Any] = {"model": tensors(chunk_of(config, stage, None, whole))}
        else:
            held = {f"model{v}": tensors(chunk_of(config, stage, v, whole)) for v in range(vpp)}
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        place = folder / "iter_0000010" / f"mp_rank_00_{stage:03d}"
        place.mkdir(parents=True)
        args = argparse.Namespace(pipeline_model_parallel_size=pp)
        torch.save({"args": args, "iteration": 10, **held}, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")


def main() -> None:
    whole = load_file(sys.argv[1])
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    for number, job in enumerate(json.loads(sys.argv[3])):
        save(job, whole, Path(sys.argv[2]) / str(number))


if __name__ == "__main__":
    main()
