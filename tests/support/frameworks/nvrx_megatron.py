"""A GPTModel of Megatron-core, tensor parallel over two ranks on CPUs, saved in the background as
Megatron-LM does with `--async-strategy nvrx --use-persistent-ckpt-worker --async-ckpt-use-cpu-shm`:
`dist_checkpointing.save` over a `TorchDistSaveShardedStrategy`, and the queue of its own
`megatron.training.async_utils`. Nothing here names smckpt.

Arguments: OUT; and "die" (rank 0 kills itself while the save of step 5 is under way), "resume", or
"stay" (the weights change in place, and Megatron is told that the structure never does).
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import __version__, dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.training import async_utils
from megatron.training.global_vars import set_args

STEPS, RANKS = 6, 2
ON_CPU = {
    "use_cpu_initialization": True, "masked_softmax_fusion": False, "bias_dropout_fusion": False,
    "apply_rope_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "attention_backend": AttnBackend.unfused,
}  # fmt: skip


class Training:
    def __init__(self) -> None:
        torch.manual_seed(7)
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64,
            tensor_model_parallel_size=RANKS, params_dtype=torch.float32, **ON_CPU,
        )  # fmt: skip
        self.model = GPTModel(config, get_gpt_layer_local_spec(), 64, 16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.iteration = 0

    def step(self) -> None:
        tokens = torch.randint(64, (2, 16))
        places = torch.arange(16).expand(2, 16)
        mask = torch.ones(1, 1, 16, 16).triu(1).bool()
        self.model(tokens, places, mask, labels=tokens.roll(-1, 1)).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.iteration += 1

    def state(self) -> dict[str, Any]:
        """What Megatron-LM's `generate_state_dict` makes: model, optimizer, random numbers."""
        rank = dist.get_rank()
        model = self.model.sharded_state_dict()
        live = self.optimizer.state_dict()
        optimizer = copy.deepcopy({"param_groups": live["param_groups"]})
        optimizer["steps"] = [moments["step"].item() for moments in live["state"].values()]
        optimizer["state"] = {
            number: {name: value for name, value in moments.items() if name != "step"}
            for number, moments in live["state"].items()
        }
        optim_state_to_sharding_state(
            optimizer, get_param_id_to_sharded_param_map(model, self.model.parameters())
        )
        random = ShardedObject("rng_state", [torch.get_rng_state()], (RANKS,), (rank,))
        return {
            "iteration": self.iteration, "model": model, "optimizer": optimizer, "random": random,
        }  # fmt: skip

    def take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        optimizer = state["optimizer"]
        for moments, step in zip(optimizer["state"].values(), optimizer.pop("steps"), strict=True):
            moments["step"] = torch.tensor(step)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(state["random"][0])
        self.iteration = state["iteration"]

    def warm(self) -> None:
        """Moments for the optimizer, to be loaded into."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            for tensor in (parameter.detach(), *(moments[name] for name in sorted(moments))):
                found.update(tensor.numpy().tobytes())
        return found.hexdigest()


class Saves:
    """As Megatron-LM's training saves: its own queue, and one strategy for the whole run."""

    def __init__(self, **options: Any) -> None:
        wanted = SimpleNamespace(
            async_save=True, async_strategy="nvrx", use_persistent_ckpt_worker=True,
            async_ckpt_use_cpu_shm=True, async_ckpt_cpu_priority=10, async_ckpt_io_priority=None,
        )  # fmt: skip
        set_args(wanted)
        async_utils.init_persistent_async_worker(dist.get_rank())
        self.strategy = TorchDistSaveShardedStrategy(cpu_shm_mode=True, **options)

    def schedule(self, training: Training, folder: Path) -> None:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        request = dist_checkpointing.save(
            training.state(), str(folder), self.strategy,
            async_sharded_save=True, async_strategy="nvrx",
        )  # fmt: skip
        async_utils.schedule_async_save(request)


def newest(out: Path) -> Path:
    found = [p for p in out.glob("iter_*") if dist_checkpointing.check_is_distributed_checkpoint(p)]
    return max(found, key=lambda path: path.name)


def train(out: Path, *, resume: bool, dies: bool = False) -> Training:
    training, saves = Training(), Saves(thread_count=2)
    if resume:
        training.warm()
        training.take(dist_checkpointing.load(training.state(), str(newest(out))))
    while training.iteration < STEPS:
        async_utils.maybe_finalize_async_save(blocking=False)
        training.step()
        if training.iteration in (2, 4):
            saves.schedule(training, out / f"iter_{training.iteration:07d}")
        if dies and training.iteration == 5:
            async_utils.maybe_finalize_async_save(blocking=True)
            saves.schedule(training, out / "iter_0000005")
            dist.barrier()
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
    async_utils.maybe_finalize_async_save(blocking=True, terminate=True)
    return training


def saved_anew(out: Path) -> dict[str, Any]:
    """Three saves of tensors at the same places in memory; each load, compared bit by bit."""
    training, saves = Training(), Saves(cached_metadata=True, separation_hint="optimizer")
    told: dict[str, Any] = {"same": [], "digests": []}
    for number in range(3):
        training.step()
        told["digests"].append(training.digest())
        saves.schedule(training, out / str(number))
        before = training.iteration
        training.step()  # while it is written
        async_utils.maybe_finalize_async_save(blocking=True)
        assert training.iteration == before + 1
    async_utils.reset_persistent_async_worker("nvrx")
    for number in range(3):
        loaded = Training()
        loaded.warm()
        loaded.take(dist_checkpointing.load(loaded.state(), str(out / str(number))))
        told["same"].append(loaded.digest() == told["digests"][number])
    return told


def main() -> None:
    out, what = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    # Megatron asks for the GPU on its way, also where it computes without one.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    get_cuda_rng_tracker().fork = lambda *_, **__: nullcontext()  # for dropout: there is none
    parallel_state.initialize_model_parallel(RANKS)
    if what == "die":
        train(out, resume=False, dies=True)
        raise AssertionError("it lives")
    told: dict[str, Any] = {"version": __version__}
    if what == "stay":
        told |= saved_anew(out)
    else:
        told["from"] = newest(out).name
        told["resumed"] = train(out, resume=True).digest()
        told["straight"] = train(Path(f"{out}-straight"), resume=False).digest()
    print(f"told {json.dumps(told)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
