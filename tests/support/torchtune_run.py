"""torchtune's own recipes on CPUs, and the calls of its distributed checkpointer.

Its arguments: `make FOLDER` writes a tiny Llama, its tokenizer, data and `config.yaml`, and prints
where torchtune's recipes are. `calls OUT`: the checkpointer by itself, on 2 ranks. Any other: the
path of a recipe and the recipe's arguments, before them `die=STEP` (SIGKILL to rank 0 after it).

torchtune trains on CPUs only without three of its functions, which are replaced here: two ask for
an accelerator's memory, and one names the backend of CPUs twice.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import _init_optim_state, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchtune import training
from torchtune.models import convert_weights
from torchtune.models.llama2 import llama2
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress
from torchtune.training.metric_logging import DiskLogger

import smckpt
from smckpt.integrations.torchtune import DistributedCheckpointer

SIZES = {"vocab_size": 300, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
WORDS = "the a fox dog hen runs eats sees to by old red small big home road field sun".split()


def make(folder: Path) -> None:
    import sentencepiece
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    base = folder / "base"
    base.mkdir(parents=True)
    torch.manual_seed(3)
    order = torch.randint(len(WORDS), (16, 24)).tolist()
    lines = [" ".join(WORDS[word] for word in line) for line in order]
    (folder / "data.json").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    (folder / "words.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(base / "tokenizer"),
        vocab_size=SIZES["vocab_size"], byte_fallback=True, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    model = llama2(**SIZES, max_seq_len=64)
    whole = convert_weights.tune_to_hf(model.state_dict(), num_heads=4, num_kv_heads=2, dim=32)
    save_file({k: v.contiguous() for k, v in whole.items()}, base / "model-00001-of-00001.safetensors")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    (base / "config.json").write_text(json.dumps(sizes))
    OmegaConf.save(OmegaConf.create(config(folder)), folder / "config.yaml")
    named = importlib.metadata.distribution("torchtune")
    print("told", json.dumps({"recipes": str(named.locate_file("recipes"))}))


def config(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(folder / "base" / "tokenizer.model"),
            "max_seq_len": 48,
        },
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": str(folder / "data.json"),
        },
        "seed": 7,
        "shuffle": True,
        "model": {"_component_": "torchtune.models.llama2.llama2", **SIZES, "max_seq_len": 64},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder / "base"),
            "checkpoint_files": ["model-00001-of-00001.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": "${output_dir}",
            "model_type": "LLAMA2",
        },
        "resume_from_checkpoint": False,
        "enable_async_checkpointing": True,
        "batch_size": 2,
        "epochs": 4,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2, "fused": False},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 2,
        },
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": 1.0,
        "device": "cpu",
        "dtype": "fp32",
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
            "filename": "log.txt",
        },
        "log_every_n_steps": 1,
    }


def on_cpus() -> None:
    training.get_memory_stats = lambda device, reset_stats=True: dict.fromkeys(
        ("peak_memory_active", "peak_memory_alloc", "peak_memory_reserved"), 0.0
    )
    training.cleanup_before_training = lambda: None
    training.get_distributed_backend = lambda device_type, offload_ops_to_cpu=False: "gloo"


def dies_after(last: int) -> None:
    stock = DiskLogger.log_dict

    def log_dict(self: Any, payload: Any, step: int) -> None:
        stock(self, payload, step)
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    DiskLogger.log_dict = log_dict


def recipe(path: str, arguments: list[str]) -> None:
    on_cpus()
    if arguments[0].startswith("die="):
        dies_after(int(arguments.pop(0).partition("=")[2]))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def sharded(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = llama2(**SIZES, max_seq_len=64)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def stepped(model: Any, optimizer: Any) -> None:
    tokens = torch.arange(16).reshape(2, 8) + dist.get_rank()
    model(tokens).logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def taken(model: Any, optimizer: Any, epochs: int) -> dict[str, Any]:
    """What torchtune's client saves, and the target that it loads into."""
    progress = TrainingProgress(seed=7, epochs_run=epochs, total_epochs=9, max_steps_per_epoch=3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {**progress.state_dict(), **state}


def bits(model: Any, optimizer: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        slots = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(slots[name] for name in sorted(slots))):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def calls(out: str) -> dict[str, Any]:
    """The calls of torchtune's pull request 2006, in its order."""
    dist.init_process_group("gloo")
    place = {"checkpoint_dir": out, "output_dir": out}
    first = DistributedCheckpointer(**place, process_group=None)
    told: dict[str, Any] = {"at first": first.get_latest_intermediate_checkpoint()}
    model, optimizer = sharded(seed=1)
    stepped(model, optimizer)
    first.save_checkpoint(taken(model, optimizer, 1), epoch=0, save_async=True)
    told["kept 0"] = bits(model, optimizer)
    stepped(model, optimizer)
    first.save_checkpoint(taken(model, optimizer, 2), epoch=1, save_async=True)
    told["kept 1"] = bits(model, optimizer)
    stepped(model, optimizer)  # the save has the state as it was
    smckpt.maybe_finalize_async_calls()

    second = DistributedCheckpointer(**place)
    told["latest"] = second.get_latest_intermediate_checkpoint()
    for name, path in (("loaded 1", None), ("loaded 0", f"{out}/dist_epoch_0")):
        model, optimizer = sharded(seed=2)
        _init_optim_state(optimizer)
        target = {**taken(model, optimizer, 0), "dataloader": None}
        loaded = second.load_checkpoint(target, path)
        told[f"{name} epochs"] = loaded["epochs_run"]
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        told[name] = bits(model, optimizer)
    dist.barrier()
    dist.destroy_process_group()
    return told


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    elif sys.argv[1] == "calls":
        print("told", json.dumps(calls(sys.argv[2])), flush=True)
    else:
        recipe(sys.argv[1], sys.argv[2:])
