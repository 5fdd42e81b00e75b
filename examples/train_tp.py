"""Train a tensor-parallel Llama, save it, export it, and compare the export with it.

    python examples/train_tp.py                      # starts itself under torchrun, 4 processes

A new Hugging Face model is imported into Transformer Engine's layout, as a checkpoint of two
tensor-parallel ranks. The training model loads it; FSDP shards each tensor-parallel rank over two
more. Every few steps a manager saves what each rank holds; a run that was killed resumes from the
newest step that is whole. One process exports the last step as a Hugging Face directory. Then the
script shows three things: transformers finds every tensor, each equals the checkpoint's bit for
bit, and the exported model's logits are those of the training model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import VOCABULARY, Batches, read_text
from launch import join, leave, run_torchrun, say, torchrun_command, under_torchrun
from tensor_parallel import ParallelLlama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smckpt import (
    LOCAL,
    CheckpointManager,
    ExportOptions,
    ImportOptions,
    LoadOptions,
    Parallel,
    ParallelState,
    SaveOptions,
    export_hf,
    find_checkpoints,
    import_hf,
    load,
    sm_state_dict_type,
    verify_hf,
)
from smckpt.run import ending

PADDED_TO = 64  # each rank's rows of the vocabulary are a multiple of it
CLOSE = 1e-5  # of logits in fp32: the order of sums over tensor-parallel ranks differs


def main() -> None:
    args = arguments()
    if not under_torchrun():
        ending.watch()
        sys.exit(run_torchrun(torchrun_command(args.tp * args.shard)))
    device = join()
    degrees = ParallelState(dist.get_world_size(), tensor_parallel_degree=args.tp)
    start = args.out / "ranks"
    if dist.get_rank() == 0 and not (start.exists() and find_checkpoints(start)):
        make_start(args)
    dist.barrier()
    model = load_model(start, degrees, device)
    train(args, model, degrees, device)
    same = export_and_compare(args, model, device)
    leave()
    sys.exit(0 if same else 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/tensor-parallel"), help="directory of the run")
    add("--tp", type=int, default=2, help="tensor-parallel degree (default 2)")
    add("--shard", type=int, default=2, help="ranks that FSDP shards over (default 2)")
    add("--steps", type=int, default=20)
    add("--save-every", type=int, default=5, help="steps (default 5)")
    add("--hidden", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--batch", type=int, default=4, help="windows per data-parallel rank (default 4)")
    add("--length", type=int, default=64, help="bytes in a window (default 64)")
    return parser.parse_args()


def make_start(args: argparse.Namespace) -> None:
    """Make a new model as transformers saves it, then a checkpoint of the tensor-parallel ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY + 1,  # one more than the bytes: an odd number, as tokenizers have
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.08,  # a small model learns faster from larger initial weights
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(args.out / "start")
    import_hf(
        args.out / "start", args.out / "ranks", Parallel("te_split", tp=args.tp), prefix="",
        options=ImportOptions(pad_vocab_to_multiple_of=PADDED_TO, overwrite=True),
    )  # fmt: skip


def load_model(start: Path, degrees: ParallelState, device: torch.device) -> nn.Module:
    """This rank's model: plain tensors of its tensor-parallel rank, which FSDP then shards."""
    mesh = init_device_mesh(
        device.type, (degrees.fsdp_size, degrees.tp_size), mesh_dim_names=("shard", "tp")
    )
    config: dict[str, Any] = json.loads((start / "config.json").read_text())
    step = PADDED_TO * degrees.tp_size
    rows = -(-config["vocab_size"] // step) * step
    with torch.device("meta"):
        model = ParallelLlama(config, rows, mesh["tp"].get_group())
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh["shard"])
    model.to_empty(device=device)
    with sm_state_dict_type(model, LOCAL):
        weights = model.state_dict()
    # the import has two ranks and the job has four; the degrees say which rank takes which tensors
    load(weights, checkpoint_id=start, options=LoadOptions(parallel_state=degrees))
    return model


def train(
    args: argparse.Namespace, model: nn.Module, degrees: ParallelState, device: torch.device
) -> None:
    """Train to the last step, from the newest one that is saved."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # ranks of one tensor-parallel group read the same batches, and draw the same numbers
    share = {"rank": degrees.fsdp_rank, "ranks": degrees.fsdp_size}
    batches = Batches(read_text([]), length=args.length, batch=args.batch, seed=1, **share)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(degrees.fsdp_rank)
    state = {"model": model, "optimizer": optimizer, "batches": batches}
    # parallel_state= says which rank is which, because their tensors have the same names
    options = SaveOptions(parallel_state=degrees)
    with CheckpointManager(
        args.out / "checkpoints", interval=args.save_every, options=options
    ) as manager:
        for step in range(manager.restore(into=state) + 1, args.steps + 1):
            tokens = batches.next().to(device)
            logits = model(tokens)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (1, args.steps):
                say(f"step {step}: loss {loss.item():.3f}")
            if manager.should_save(step) or step == args.steps:
                manager.save(step, state)


def export_and_compare(args: argparse.Namespace, model: nn.Module, device: torch.device) -> bool:
    """Whether the exported model is the trained one."""
    tokens = torch.tensor([list(b"import torch\n\n\ndef main() -> None:\n    ")])
    with torch.no_grad():
        trained = model(tokens.to(device)).cpu()  # all ranks take part
    if dist.get_rank():
        return True
    from transformers import AutoModelForCausalLM

    checkpoint = args.out / "checkpoints" / str(args.steps)
    exported = args.out / "exported"
    report = export_hf(
        checkpoint, exported, config=args.out / "start", options=ExportOptions(overwrite=True)
    )
    say(f"exported {report.tensors} tensors from the layout {report.layout} to {exported}")
    checked = verify_hf(exported, against=checkpoint)
    say(f"every tensor is found and is the checkpoint's: {checked.ok}")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(exported)(tokens).logits
    apart = float((logits - trained).abs().max())
    say(f"logits of the training model and of the exported one differ by at most {apart:.1e}")
    return bool(checked.ok) and apart <= CLOSE


if __name__ == "__main__":
    main()
