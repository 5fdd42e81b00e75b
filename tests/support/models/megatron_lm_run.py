"""Megatron-LM's own `save_checkpoint`, on CPU, of models that its builder makes of its arguments.

Run by an interpreter that has Megatron-core's needs, with Megatron-LM's checkout (core_v0.16.1) and
triton in PYTHONPATH: `megatron_lm_run.py JOBS`. JOBS is a list in JSON; of a job, `arguments` are
what its command line has more, `world` are its ranks (gloo), `weights` is a directory with each
rank's weights, layers numbered through, and `save` is where it saves, in the format "torch".

Not its own, because nothing here is on a GPU: what torch.cuda says of the device, the state of its
random numbers, and the optimizer, which Megatron's own makes on GPUs: torch's AdamW after a step.
And there is no training: the arguments are parsed and checked, the groups are Megatron-core's, but
`initialize_megatron` and `pretrain` are not run, nor is a tokenizer built.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron_stages import filled, on_forked_ranks

TINY = """
    --hidden-size 64 --ffn-hidden-size 160 --num-layers 4 --num-attention-heads 8 --kv-channels 16
    --group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
    --seq-length 64 --max-position-embeddings 64 --vocab-size 128 --tokenizer-type NullTokenizer
    --micro-batch-size 1 --transformer-impl local --use-cpu-initialization --ckpt-format torch
    --attention-backend unfused --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
    --no-persist-layer-norm --lr 0.1 --train-iters 10 --save-interval 10
""".split()  # noqa: SIM905


def rank_main(job: dict[str, Any], rank: int, place: str) -> None:
    from gpt_builders import gpt_builder
    from megatron.core import parallel_state
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import save_checkpoint
    from megatron.training.global_vars import set_args

    sys.argv[1:] = [*TINY, "--save", job["save"], *job["arguments"]]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job["world"])}
    args = validate_args(parse_args())
    args.padded_vocab_size = 128  # as its tokenizer's builder sets it
    set_args(args)
    dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=job["world"])
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )  # fmt: skip
    own = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    weights = torch.load(f"{job['weights']}/{own[0]}-{own[1]}.pt")
    chunks = args.virtual_pipeline_model_parallel_size
    models = []
    for number in range(chunks) if chunks else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
        models.append(filled(gpt_builder(args, first, last, vp_stage=number), weights))
    save_checkpoint(10, models, optimizer_of(models), None, 0)
    dist.destroy_process_group()


def optimizer_of(models: list[Any]) -> Any:
    """Its rate is 0, so the weights stay."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=0.0)
    optimizer.step()
    optimizer.is_stub_optimizer = False  # type: ignore[attr-defined]  # which Megatron's have
    return optimizer


def main() -> None:
    import gpt_builders  # noqa: F401

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=10)
    for job in json.loads(sys.argv[1]):
        on_forked_ranks(rank_main, job, job["world"])


if __name__ == "__main__":
    main()
