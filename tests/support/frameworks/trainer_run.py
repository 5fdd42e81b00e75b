"""A script that trains a tiny model with transformers' Trainer through smckpt.

Its arguments: OUT HOW WHAT [STEP]. HOW: plain, fsdp (FSDP2), fsdp1; on the CPU, or with "-cuda".
WHAT: "die" (SIGKILL to itself once STEP is done; with "between" behind it, once saves have
ended), "resume" (go on in OUT, then train in
OUT-straight without a stop; print both as JSON), "best" (train with an evaluation every other step,
and end with the best; print its digest and that of what its checkpoint holds), "loaded" (only load
the newest in OUT, and print what is not as it was saved), "begun" (only load, and print the step),
"whole" (train to the end in OUT). With TRAINER_ROOT in
the environment checkpoints are below it. With TRAINER_MEMORY each step is in memory, and the last
one alone on disk. With TRAINER_STOCK the script has no line of smckpt's.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import smckpt
from smckpt.integrations.transformers import SmckptTrainerMixin
from tests.support.held import other_than

STEPS = 7


OURS = () if os.environ.get("TRAINER_STOCK") else (SmckptTrainerMixin,)


class SavedTrainer(*OURS, Trainer):  # type: ignore[misc]
    """The one line that a script changes."""


class Loaded(TrainerCallback):
    """Looks at a run that has just resumed, and ends it."""

    def __init__(self, out: str) -> None:
        self.out = out

    def on_train_begin(self, args: Any, state: Any, control: Any, **its: Any) -> None:
        newest = smckpt.latest_checkpoint(self.out)
        assert newest is not None
        saved = smckpt.load(checkpoint_id=newest)
        told = {"step": state.global_step, "of": newest.step}
        told["wrong"] = other_than(saved, its["model"], its["optimizer"].state)
        print(f"told {json.dumps(told)}", flush=True)
        raise EOFError


class Begun(TrainerCallback):
    """Ends a run that has just resumed."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"told {json.dumps({'step': state.global_step})}", flush=True)
        raise EOFError


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (8,), generator=made)
        return {"input_ids": tokens, "labels": tokens}


class Dies(TrainerCallback):
    def __init__(self, step: int, between: str = "") -> None:
        self.step, self.between = step, between

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            if self.between:  # not in a save: the files beside it are written after its commit
                smckpt.maybe_finalize_async_calls(blocking=True)
            os.kill(os.getpid(), signal.SIGKILL)


def sharded(how: str, kind: str = "SHARDED_STATE_DICT") -> dict[str, Any]:
    """Arguments of the Trainer for "fsdp" (FSDP2) and "fsdp1"; none for "plain"."""
    config = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "sync_module_states": False,  # accelerate asks for an accelerator's memory then
        "cpu_ram_efficient_loading": False,
        "state_dict_type": kind,
    }
    if how == "fsdp1":
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": config | {"use_orig_params": True}}
    if how == "fsdp":
        os.environ["FSDP_VERSION"] = "2"  # how transformers 4.57 tells accelerate
        versions = {"version": 2, "fsdp_version": 2}
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": config | versions}
    return {}


def take_cpus() -> None:
    """accelerate shards on accelerators only, unless it takes the CPUs for such."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = torch.device("cpu")  # FSDP1 refuses cpu:0


def trainer(out: str, how: str, callbacks: list[Any], **more: Any) -> SavedTrainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, attention_dropout=0.2,
        )
    )  # fmt: skip
    how, _, device = how.partition("-")
    sharding = sharded(how)
    arguments = TrainingArguments(
        output_dir=out, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2,
        save_strategy="steps", save_steps=2, save_total_limit=2, logging_steps=1, report_to=[],
        lr_scheduler_type="cosine", use_cpu=not device, disable_tqdm=True, dataloader_num_workers=0,
        **sharding, **more,
    )  # fmt: skip
    if sharding and not device:
        assert arguments.device.type == "cpu"
        take_cpus()
    if in_memory := "TRAINER_MEMORY" in os.environ:
        arguments.save_steps = 100
    made = SavedTrainer(
        model=model, args=arguments, train_dataset=Tokens(), callbacks=callbacks,
        eval_dataset=Tokens() if more else None,
    )  # fmt: skip
    if in_memory:
        made.smckpt_arguments = {"memory": smckpt.Memory(1)}
    if root := os.environ.get("TRAINER_ROOT"):
        made.smckpt_root = f"{root}/{os.path.basename(out)}"
    return made


def digest_of(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def best(out: str, how: str) -> dict[str, Any]:
    """The highest loss is taken for the best, so that it is not the last."""
    trained = trainer(
        out, how, [], eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    trained.train()
    losses = {
        row["step"]: row["eval_loss"] for row in trained.state.log_history if "eval_loss" in row
    }
    chosen = trained.state.best_model_checkpoint
    other = trainer(f"{out}-other", how, [])
    held = {"model": other.model.state_dict()}
    smckpt.load(held, checkpoint_id=trained._checkpoints.url_of(chosen))
    return {
        "losses": sorted(losses.items()), "best": os.path.basename(chosen),
        "ended": digest_of(trained.model), "held": digest_of(other.model),
    }  # fmt: skip


def ended(trained: SavedTrainer) -> dict[str, Any]:
    """What a run came to: this rank's weights and moments in a digest, the losses, the rate."""
    digest = hashlib.sha256()
    for parameter in trained.model.parameters():
        slots = trained.optimizer.state.get(parameter, {})
        for tensor in (parameter, *(slots[name] for name in sorted(slots))):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    losses = [(row["step"], row["loss"]) for row in trained.state.log_history if "loss" in row]
    return {
        "sharded": type(next(trained.model.parameters())).__name__,
        "digest": digest.hexdigest(),
        "losses": losses,
        "lr": trained.lr_scheduler.get_last_lr(),
        "rng": torch.rand(2, device=trained.args.device).tolist(),
        "best": trained.state.best_model_checkpoint,
    }


def main() -> None:
    out, how, what, *rest = sys.argv[1:]
    if what == "die":
        trainer(out, how, [Dies(int(rest[0]), *rest[1:])]).train()
        raise AssertionError("it lives")
    if what == "best":
        print(f"told {json.dumps(best(out, how))}", flush=True)
        return
    if what == "whole":
        trainer(out, how, []).train()
        return
    if what == "begun":
        with suppress(EOFError):
            trainer(out, how, [Begun()]).train(resume_from_checkpoint=True)
        return
    if what == "loaded":
        with suppress(EOFError):
            trainer(out, how, [Loaded(out)]).train(resume_from_checkpoint=True)
        return
    again = trainer(out, how, [])
    again.train(resume_from_checkpoint=True if not rest else rest[0])
    resumed = ended(again)
    straight = trainer(f"{out}-straight", how, [])
    straight.train()
    told = {"resumed": resumed, "straight": ended(straight), "kept": sorted(os.listdir(out))}
    print(f"told {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
