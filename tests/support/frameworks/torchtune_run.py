"""torchtune's own recipes on CPUs, and the calls of its distributed checkpointer.

Its arguments: `units OUT`: the checkpointer by itself, on 2 ranks; a tiny Llama, its tokenizer,
data, `full.yaml` and `lora.yaml` are in OUT/made. Any other: the path of a recipe and the recipe's
arguments, before them `die=STEP` (SIGKILL to rank 0 after it) or `look=OUT` (each rank tells what
it has not loaded as the newest in OUT has it).

On CPUs torchtune trains only with three functions replaced: two ask for an accelerator's memory,
and `init_process_group` gets gloo alone, where recipes ask for NCCL, or for gloo twice.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torchtune import training
from torchtune.models import convert_weights
from torchtune.models.llama2 import llama2
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress
from torchtune.training.metric_logging import DiskLogger

import smckpt
from smckpt.integrations.torchtune import DistributedCheckpointer
from tests.support.held import other_than

SIZES = {"vocab_size": 300, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "dim": 32}  # of torchtune's converters
WORDS = ["the", "a", "fox", "dog", "hen", "runs", "eats", "sees", "to", "by", "old", "red", "home"]


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
    whole = convert_weights.tune_to_hf(model.state_dict(), **HEADS)
    save_file(
        {k: v.contiguous() for k, v in whole.items()}, base / "model-00001-of-00001.safetensors"
    )
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    (base / "config.json").write_text(json.dumps(sizes))
    OmegaConf.save(OmegaConf.create(config(folder)), folder / "full.yaml")
    lora = config(folder)
    lora["model"].update(
        _component_="torchtune.models.llama2.lora_llama2", lora_attn_modules=["q_proj", "v_proj"],
        apply_lora_to_mlp=False, lora_rank=4, lora_alpha=8,
    )  # fmt: skip
    OmegaConf.save(OmegaConf.create(lora), folder / "lora.yaml")


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
    stock = dist.init_process_group
    dist.init_process_group = lambda _: stock("gloo")  # type: ignore[assignment]


def dies_after(last: int) -> None:
    stock = DiskLogger.log_dict

    def log_dict(self: Any, payload: Any, step: int) -> None:
        stock(self, payload, step)
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    DiskLogger.log_dict = log_dict


def looks_at(out: str) -> None:
    stock = CheckpointClient.load_distributed_checkpoint

    def load(self: Any, model: Any, optimizer: Any) -> Any:
        loaded = stock(self, model, optimizer)
        newest = DistributedCheckpointer(out, out).get_latest_intermediate_checkpoint()
        saved = smckpt.load(checkpoint_id=newest)
        assert saved is not None
        slots = {str(number): each for number, each in saved["optimizer"]["state"].items()}
        names = [name for name, _ in model.named_parameters()]  # the optimizer counts them
        saved["optimizer"]["state"] = {name: slots[str(at)] for at, name in enumerate(names)}
        wrong = other_than(saved, model, optimizer.state)
        told = {"wrong": wrong, "epochs": [loaded["epochs_run"], saved["epochs_run"]]}
        print(f"told {json.dumps(told)}", flush=True)
        return loaded

    CheckpointClient.load_distributed_checkpoint = load


def recipe(path: str, arguments: list[str]) -> None:
    on_cpus()
    first, _, value = arguments[0].partition("=")
    if first in ("die", "look"):
        del arguments[0]
        dies_after(int(value)) if first == "die" else looks_at(value)
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
    place = {"checkpoint_dir": out, "output_dir": out}
    first = DistributedCheckpointer(**place, process_group=None)
    told: dict[str, Any] = {"at first": first.get_latest_intermediate_checkpoint()}
    model, optimizer = sharded(seed=1)
    for epoch in (0, 1):
        stepped(model, optimizer)
        first.save_checkpoint(taken(model, optimizer, epoch + 1), epoch=epoch, save_async=True)
        told[f"kept {epoch}"] = bits(model, optimizer)
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    torch.save(convert_weights.tune_to_hf(whole, **HEADS), f"{out}/hf-{dist.get_rank()}.pt")
    own = training.DistributedCheckpointer(f"{out}/own", f"{out}/own")
    Path(f"{out}/own").mkdir(exist_ok=True)
    own.save_checkpoint(taken(model, optimizer, 2), epoch=1, save_async=False)
    stepped(model, optimizer)  # the save has the state as it was
    smckpt.maybe_finalize_async_calls()

    second = DistributedCheckpointer(**place)
    told["latest"] = second.get_latest_intermediate_checkpoint()
    for epoch, path in ((1, None), (0, f"{out}/dist_epoch_0")):
        model, optimizer = sharded(seed=2)
        _init_optim_state(optimizer)
        loaded = second.load_checkpoint(taken(model, optimizer, 0), path)
        told[f"epochs {epoch}"] = loaded["epochs_run"]
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        told[f"loaded {epoch}"] = bits(model, optimizer)
    return told


def tiny(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"a": distribute_tensor(torch.full((4,), value), mesh), "epochs_run": int(value)}


def names(out: Path) -> list[str]:
    return sorted(str(Path(one.path).relative_to(out)) for one in smckpt.find_checkpoints(out))


def retention(out: Path) -> dict[str, Any]:
    told = {}
    for keep in (None, 0, 1, 2):
        its = out / str(keep)
        made = DistributedCheckpointer(str(its), str(its), keep_last_n_checkpoints=keep)
        for epoch in range(4):
            made.save_checkpoint(tiny(epoch), epoch, save_async=True)
        smckpt.maybe_finalize_async_calls()
        dist.barrier()
        told[str(keep)] = names(its) if its.exists() else None
        if keep == 2:
            (its / "dist_epoch_4").touch()  # so there can be no directory
            dist.barrier()
            made.save_checkpoint(tiny(4), 4, save_async=True)
            try:
                smckpt.maybe_finalize_async_calls()
            except smckpt.SaveFailedError as error:
                told["error"] = str(error)
            told["after a failure"] = names(its)
            dist.barrier()
            made.save_checkpoint(tiny(5), 5, save_async=False)
            dist.barrier()
            told["later"] = names(its)
    return told


def links(out: Path) -> dict[str, Any]:
    """A step to save is a link to somebody's directory; one that is to go was moved elsewhere."""
    made = DistributedCheckpointer(str(out), str(out), keep_last_n_checkpoints=1)
    victim, step, moved = out / "victim", out / "dist_epoch_0", out / "moved"
    if dist.get_rank() == 0:
        victim.mkdir(parents=True)
        (victim / "notes").touch()
        step.symlink_to(victim)
    dist.barrier()
    told: dict[str, Any] = {}
    try:
        made.save_checkpoint(tiny(0), 0, save_async=False)
    except smckpt.CheckpointError as error:
        told["error"] = str(error)
    told["victim"] = os.listdir(victim)
    dist.barrier()
    if dist.get_rank() == 0:
        step.unlink()
    dist.barrier()
    made.save_checkpoint(tiny(1), 0, save_async=False)
    dist.barrier()
    if dist.get_rank() == 0:
        step.rename(moved)
        step.symlink_to(moved)
    dist.barrier()
    for epoch in (1, 2):
        made.save_checkpoint(tiny(epoch), epoch, save_async=False)
    dist.barrier()
    told["moved"] = smckpt.verify_checkpoint(moved).ok
    return told


def adapters(out: Path) -> dict[str, Any]:
    made = DistributedCheckpointer(str(out), str(out), keep_last_n_checkpoints=1)
    for epoch in (0, 1):
        made.save_checkpoint(tiny(epoch), epoch, save_async=True, adapter_only=True)
        made.save_checkpoint(tiny(10 + epoch), epoch, save_async=True)
    made.save_checkpoint(tiny(7), 1, save_async=True, step=40, dir_prefix="step")
    smckpt.maybe_finalize_async_calls()
    dist.barrier()
    told: dict[str, Any] = {"names": names(out)}
    told["directories"] = sorted(one.name for one in out.iterdir())
    for adapter_only in (False, True):
        its = str(made.get_latest_intermediate_checkpoint(adapter_only))
        loaded = made.load_checkpoint(tiny(0), adapter_only=adapter_only)
        whole = loaded["a"].full_tensor().tolist()
        told[f"adapter_only={adapter_only}"] = [its.removeprefix(str(out)), whole]
    return told


def component(folder: Path, out: Path, **more: Any) -> DistributedCheckpointer:
    section = config(folder)["checkpointer"]
    del section["_component_"]
    return DistributedCheckpointer(**{**section, "output_dir": str(out), **more})


def by_rank_0(folder: Path, out: Path) -> dict[str, Any]:
    """What a LoRA recipe does: rank 0 saves whole tensors, and all ranks load them."""
    state = {
        "model": {"merged": torch.ones(3)},
        "adapter": {"layers.0.lora_a.weight": torch.arange(6.0).reshape(2, 3)},
        "optimizer": {"state": {"x": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.5}]},
        "epochs_run": 1,
        "max_steps_per_epoch": None,
    }
    told = {}
    for adapter_only in (True, False):
        its = out / str(adapter_only)
        made = component(folder, its, should_load_recipe_state=False)
        base = made.load_checkpoint()
        if dist.get_rank() == 0:
            made.save_checkpoint(
                {**state}, epoch=0, intermediate_checkpoint=True, adapter_only=adapter_only
            )
            smckpt.maybe_finalize_async_calls()
        dist.barrier()
        loaded = component(folder, its, should_load_recipe_state=True).load_checkpoint()
        assert torch.equal(
            loaded["adapter"]["layers.0.lora_a.weight"], torch.arange(6.0).view(2, 3)
        )
        assert loaded["model"].keys() == base["model"].keys()
        assert loaded["optimizer"]["state"]["x"]["step"] == 3
        assert loaded["optimizer"]["param_groups"] == [{"lr": 0.5}]
        assert loaded["max_steps_per_epoch"] is None
        told[str(adapter_only)] = sorted(smckpt.load(checkpoint_id=its / "dist_epoch_0") or {})
    return told


def formats(folder: Path, out: Path) -> dict[str, Any]:
    """The last checkpoint in the formats of torchtune's other checkpointers, which are
    loaded as base models again."""
    base = component(folder, out / "hf").load_checkpoint()["model"]
    whole = {name: tensor.clone() + 1 for name, tensor in base.items()}
    told = {}
    for name, write in (
        ("FullModelMetaCheckpointer", convert_weights.tune_to_meta),
        ("FullModelTorchTuneCheckpointer", lambda state: state),
    ):
        its = out / name
        (its / "base").mkdir(parents=True)
        (its / "base" / "config.json").write_text((folder / "base" / "config.json").read_text())
        torch.save(write(base), its / "base" / "model.pt")
        section = {
            "checkpoint_files": ["model.pt"],
            "model_type": "LLAMA2",
            "output_dir": str(its / "out"),
            "final_component": f"torchtune.training.{name}",
        }
        made = DistributedCheckpointer(checkpoint_dir=str(its / "base"), **section)
        first = made.load_checkpoint()["model"]
        state = {"model": {**whole}}
        made.save_checkpoint(state, epoch=3, intermediate_checkpoint=False)
        (written,) = (its / "out" / "epoch_3").glob("*.bin")
        section["checkpoint_files"] = [written.name]
        again = DistributedCheckpointer(checkpoint_dir=str(written.parent), **section)
        loaded = again.load_checkpoint()["model"]
        raw = torch.load(written, mmap=True, weights_only=True)
        told[name] = {
            "base": same(first, base),
            "again": same(loaded, whole),
            "written": sorted(raw) == sorted(write(whole)),
        }
    return told


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


def own_files(folder: Path, out: Path) -> dict[str, Any]:
    """What torchtune's own checkpointer saved in between, for the full model and for adapters,
    beside a newer checkpoint of ours."""
    made = component(folder, out)
    base = made.load_checkpoint()["model"]
    adapter = {"layers.0.attn.q_proj.lora_a.weight": torch.full((2, 32), 5.0)}
    progress = {"optimizer": {"state": {}, "param_groups": [{"lr": 0.25}]}, "epochs_run": 3}
    section = config(folder)["checkpointer"]
    del section["_component_"]
    stock = training.FullModelHFCheckpointer(**{**section, "output_dir": str(out)})
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    kept = {"adapter": adapter, "adapter_config": lora, **progress}
    if dist.get_rank() == 0:
        stock.save_checkpoint(
            {"model": {**base}, **kept}, epoch=2, intermediate_checkpoint=True, adapter_only=True
        )
        ours = {"model": base, "optimizer": {"state": {}, "param_groups": [{"lr": 1.0}]}}
        made.save_checkpoint({**ours, "epochs_run": 1}, 0, intermediate_checkpoint=True)
        smckpt.maybe_finalize_async_calls()
    dist.barrier()
    told = {}
    names = {"recipe_checkpoint": "recipe_state.pt", "adapter_checkpoint": "adapter_model.pt"}
    found = {key: str(next(out.rglob(name))) for key, name in names.items()}
    for name, given in (("named", found), ("not named", dict.fromkeys(names))):
        loader = component(folder, out, should_load_recipe_state=True, **given)
        loaded = loader.load_checkpoint()
        held = loaded.get("adapter", {})
        told[name] = {
            "epochs_run": loaded["epochs_run"],
            "lr": loaded["optimizer"]["param_groups"][0]["lr"],
            "adapter": {key: value.unique().tolist() for key, value in held.items()},
        }
    return told


def theirs(out: Path) -> dict[str, Any]:
    """torchtune's own checkpointer and ours save in turn: what ours loads after each."""
    made = DistributedCheckpointer(str(out), str(out))
    stock = training.DistributedCheckpointer(str(out), str(out))
    out.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    for turn, (epoch, by) in enumerate([(8, stock), (9, made), (10, stock), (10, made)]):
        metadata = out / f"dist_epoch_{epoch}" / ".metadata"
        before = metadata.read_bytes() if metadata.exists() else b""
        dist.barrier()
        by.save_checkpoint(tiny(5 + turn), epoch)
        dist.barrier()
        if before and dist.get_rank() == 0:  # as a kill between the commit and its removal does
            metadata.write_bytes(before)
        dist.barrier()
        found[f"{turn}"] = made.load_checkpoint(tiny(0))["a"].full_tensor().tolist()
        dist.barrier()
    made.save_checkpoint(tiny(9), 0, step=1, dir_prefix="step")
    found["step"] = made.load_checkpoint(tiny(0))["a"].full_tensor().tolist()
    return found


def refused(folder: Path, out: Path) -> dict[str, str]:
    plain = DistributedCheckpointer(str(out), str(out))
    its = str(out)
    tries = {
        "keep": lambda: DistributedCheckpointer(its, its, keep_last_n_checkpoints=-1),
        "argument": lambda: DistributedCheckpointer(its, its, smckpt_arguments={"timeout": 3}),
        "unknown": lambda: component(folder, out, enable_dcp=True),
        "prefix": lambda: plain.save_checkpoint({}, 0, dir_prefix="day"),
        "step": lambda: plain.save_checkpoint({}, 0, dir_prefix="step"),
        "final": lambda: plain.save_checkpoint({}, 0, intermediate_checkpoint=False),
        "adapters": lambda: plain.save_checkpoint(
            {"model": {}}, 0, intermediate_checkpoint=True, adapter_only=True
        ),
        "no target": lambda: plain.load_checkpoint(),
        "nothing": lambda: plain.load_checkpoint({"a": torch.ones(1)}),
    }
    told = {}
    for name, call in tries.items():
        try:
            call()
        except ValueError as error:
            told[name] = str(error)
    return told


def units(out: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make(out / "made")
    dist.barrier()
    told: dict[str, Any] = {
        "calls": calls(str(out / "calls")),
        "retention": retention(out / "retention"),
        "links": links(out / "links"),
        "adapters": adapters(out / "adapters"),
        "theirs": theirs(out / "theirs"),
        "by_rank_0": by_rank_0(out / "made", out / "by_rank_0"),
        "refused": refused(out / "made", out / "refused"),
        "own files": own_files(out / "made", out / "own files"),
        "formats": formats(out / "made", out / f"formats-{dist.get_rank()}"),
        "recipes": str(importlib.metadata.distribution("torchtune").locate_file("recipes")),
    }
    dist.barrier()
    dist.destroy_process_group()
    return told


if __name__ == "__main__":
    if sys.argv[1] == "units":
        print(f"told {json.dumps(units(Path(sys.argv[2])))}", flush=True)
    else:
        recipe(sys.argv[1], sys.argv[2:])
