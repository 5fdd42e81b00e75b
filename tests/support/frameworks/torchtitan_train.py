"""torchtitan's own trainer on CPUs: a tiny Llama 3 or DeepSeek-V3, FSDP2, and checkpoints.

Its arguments: the folder of all that it writes, and fields of the checkpoint's config as
`name=value`, where each value is JSON. Further ones: `steps=N`; `die=N` (SIGKILL to rank 0 after
step N); `stock=true` (the config of torchtitan's own manager); `door=true`
(`smckpt.run.provide`); `twice=true` (when the training has ended, a second trainer in the same
process loads and tells its state); `memory=N` (keep each N-th step in memory too); `replicate=N`,
`tensor=N`, `pipeline=N`; `expert=N` (DeepSeek-V3, its experts over N ranks). It tells each rank's
steps and losses, and the step that it began with.

On CPUs torchtitan trains only where it is told that the device is one, without its statistics of
the device's memory, with sums for gradients that gloo has, and with attention that needs no
compiler.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._utils
import torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"
# For GPUs, written for a compiler that is not here; nothing below calls them.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.utils  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

import smckpt  # noqa: E402
from smckpt.engine.api import _RUNTIME  # noqa: E402
from smckpt.run import provide  # noqa: E402
from tests.engine.test_prewarm import arenas, prewarmed  # noqa: E402

WORDS = ["the", "a", "fox", "dog", "hen", "runs", "eats", "sees", "to", "by", "old", "red", "home"]


class NoMemory:
    device_name, device_capacity_gib = "cpu", 1.0

    def reset_peak_stats(self) -> None:
        pass

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)


metrics.build_device_memory_monitor = NoMemory
torchtitan.distributed.utils.set_pg_timeouts = lambda *_, **__: None  # waits for a device


def make(base: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    (base / "data").mkdir(parents=True)
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(base / "tokenizer.json"))
    kind = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (base / "tokenizer_config.json").write_text(json.dumps(kind))
    order = torch.randint(len(WORDS), (64, 80), generator=torch.Generator().manual_seed(3))
    lines = [" ".join(WORDS[word] for word in line) for line in order.tolist()]
    texts = "\n".join(json.dumps({"text": line}) for line in lines)
    (base / "data" / "data.json").write_text(texts)


def config(folder: Path, given: dict[str, Any]) -> Any:
    experts = given.pop("expert", None)
    made = llama3_debugmodel() if experts is None else deepseek_v3_debugmodel()
    made.model_spec.model.layers = made.model_spec.model.layers[:2]
    for layer in made.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    base = folder.parent / "base"
    made.hf_assets_path, made.dump_folder = str(base), str(folder)
    made.training = TrainingConfig(
        local_batch_size=2, seq_len=32, steps=given.pop("steps", 6), mixed_precision_param="float32"
    )
    made.dataloader.dataset_path = str(base / "data")
    made.activation_checkpoint, made.validator.enable = None, False
    made.debug.seed = 7
    made.parallelism.spmd_backend = "partial_dtensor"
    made.parallelism.data_parallel_replicate_degree = given.pop("replicate", 1)
    made.parallelism.expert_parallel_degree = experts or 1
    made.parallelism.tensor_parallel_degree = given.pop("tensor", 1)
    made.parallelism.pipeline_parallel_degree = stages = given.pop("pipeline", 1)
    made.training.disable_cuda_graphs = stages > 1 or experts is not None  # torchtitan asks for it
    if given.pop("stock", False):
        kind = CheckpointManager
    else:
        from smckpt.integrations.torchtitan import SmckptCheckpointManager as kind
    if (memory := given.pop("memory", None)) is not None:
        given["smckpt_arguments"] = {"memory": smckpt.Memory(memory)}
    fields = {"enable": True, "interval": 2, "last_save_model_only": False, **given}
    made.checkpoint = kind.Config(**fields)
    return made


def build(made: Any) -> Any:
    trainer = made.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    schedule = getattr(trainer, "pp_schedule", None)
    if schedule is not None:
        schedule.step = functools.partial(step_by_microbatches, schedule)
    return trainer


def step_by_microbatches(
    schedule: Any,
    arg_mbs: Any,
    kwarg_mbs: Any,
    target_mbs: Any,
    losses: Any,
    loss_kwargs: Any,
    return_outputs: bool,
) -> None:
    """As the schedules of a later torch do, for which this release of torchtitan was made; those of
    torch 2.13 take a whole batch."""
    for stage in schedule._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)


def watch(trainer: Any, die: int | None, seen: dict[str, Any]) -> None:
    save, load = trainer.checkpointer.save, trainer.checkpointer.load
    log = trainer.metrics_processor.log

    def saving(step: int, *args: Any, **kwargs: Any) -> Any:
        done = save(step, *args, **kwargs)
        if step == 1 and list(_RUNTIME.queues(None, "default")):
            seen["memory of a new run"] = list(prewarmed("default"))
        if step == die and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def loading(*args: Any, **kwargs: Any) -> Any:
        seen["loaded"] = load(*args, **kwargs)
        seen["began"] = trainer.step
        if list(_RUNTIME.queues(None, "default")):
            seen["memory"] = list(prewarmed("default"))
        return seen["loaded"]

    def logging(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        seen["losses"][str(step)] = loss.hex()
        log(step, loss, *args, **kwargs)

    trainer.checkpointer.save, trainer.checkpointer.load = saving, loading
    trainer.metrics_processor.log = logging


def digest(trainer: Any) -> str:
    """Of all that a checkpoint of this rank would have."""
    sums = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                sums.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            sums.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            sums.update(repr(value).encode())

    for name, state in sorted(trainer.checkpointer.states.items()):
        sums.update(name.encode())
        add(state.state_dict())
    return sums.hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    given = {key: json.loads(value) for key, value in (each.split("=", 1) for each in sys.argv[2:])}
    rank = int(os.environ.get("RANK", "0"))
    base = folder.parent / "base"
    if not base.exists():
        raise SystemExit("make the base first: torchtitan_train.py FOLDER base=true")
    die, twice = given.pop("die", None), given.pop("twice", False)
    if given.pop("door", False):
        print(*provide(["torchtitan"]).lines, sep="\n", file=sys.stderr)
    seen: dict[str, Any] = {"rank": rank, "losses": {}, "warnings": []}
    trainer = build(config(folder, dict(given)))
    watch(trainer, die, seen)
    if given.get("create_seed_checkpoint"):
        trainer.checkpointer.save(0, last_step=True)
    else:
        trainer.train()
        seen["digest"] = digest(trainer)
        seen["memory after"] = list(arenas())
    trainer.close()
    if twice:
        again = build(config(folder, dict(given)))
        seen["again"] = again.checkpointer.load(step=-1)
        seen["step again"], seen["digest again"] = again.step, digest(again)
        again.close()
    print("told " + json.dumps(seen), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[2:] == ["base=true"]:
        make(Path(sys.argv[1]).parent / "base")
    else:
        main()
