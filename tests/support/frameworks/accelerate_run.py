"""A script that trains a tiny model with accelerate through smckpt.

Its arguments: OUT HOW WHAT. HOW: plain, fsdp1, fsdp2, or with whole state dicts fsdp1full,
fsdp2full; on the CPU, or with "-cuda". WHAT: "die"
(SIGKILL to itself in step 5), "resume" (go on in OUT, then train in OUT-straight without a stop,
then go on in OUT-stock from what accelerate's own class saved; print all as JSON), "stock"
(accelerate's own class trains to step 4), "back" (accelerate's own class goes on in OUT, then
trains in OUT-straight without a stop; print both), "loaded" (only load the newest in OUT, and print
what is not as it was saved). With ACCELERATE_ROOT in the environment checkpoints are
below it, and the last part of "resume" is left out; under FSDP1 too, where accelerate 1.15 does not
bring the moments back that it saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

import smckpt
from smckpt.integrations.accelerate import SmckptAccelerator
from tests.support.held import other_than

STEPS = 7


class Seen:
    """A registered object."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def made(out: str, how: str, kind: type[Accelerator]) -> Any:
    plugin = None
    how, _, device = how.partition("-")
    AcceleratorState._reset_state(reset_partial_state=True)
    if how != "plain":
        PartialState(cpu=not device)
        if not device:  # accelerate shards on accelerators only, unless it takes the CPUs for such
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            PartialState._shared_state["device"] = torch.device("cpu")  # FSDP1 refuses cpu:0
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(how[4]),
            auto_wrap_policy="size_based_wrap",
            min_num_params=100,
            state_dict_type=f"{'FULL' if how.endswith('full') else 'SHARDED'}_STATE_DICT",
            use_orig_params=True,
            sync_module_states=False,  # accelerate asks for an accelerator's memory then
            cpu_ram_efficient_loading=False,
        )
    configuration = ProjectConfiguration(
        project_dir=out, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = kind(cpu=not device, fsdp_plugin=plugin, project_config=configuration)
    root = os.environ.get("ACCELERATE_ROOT")
    if root and isinstance(accelerator, SmckptAccelerator):
        accelerator.smckpt_root = f"{root}/{os.path.basename(out)}"
    return accelerator


def train(
    accelerator: Any, resume: bool, last: int = STEPS, dies: int = 0, loaded: bool = False
) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 16)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    if resume:
        accelerator.load_state()
        accelerator.project_configuration.iteration = len(seen.steps) // 2
    if loaded:
        newest = smckpt.latest_checkpoint(accelerator.project_dir)
        assert newest is not None
        wrong = other_than(smckpt.load(checkpoint_id=newest), model, optimizer.optimizer.state)
        return {"step": seen.steps[-1], "wrong": wrong}
    losses = []
    for step in range(len(seen.steps) + 1, last + 1):
        # of the random numbers that come back
        loss = model(torch.randn(4, 16, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.steps.append(step)
        losses.append((step, loss.item()))
        if step == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            accelerator.save_state()
    # Not end_training, which destroys the process group: torch's store still has the addresses of
    # that one when the next is made, and the first collective would wait for them.
    smckpt.maybe_finalize_async_calls()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        slots = optimizer.optimizer.state.get(parameter, {})
        for tensor in (parameter, *(slots[name] for name in sorted(slots))):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return {
        "digest": digest.hexdigest(),
        "losses": losses,
        "lr": scheduler.get_last_lr(),
        "random": torch.rand(2, device=accelerator.device).tolist(),
        "sharded": type(next(model.parameters())).__name__,
        "seen": seen.steps,
    }


def main() -> None:
    out, how, what = sys.argv[1:]
    if what == "die":
        train(made(out, how, SmckptAccelerator), resume=False, dies=5)
        raise AssertionError("it lives")
    if what == "stock":
        train(made(out, how, Accelerator), resume=False, last=4)
        return
    if what == "back":
        resumed = train(made(out, how, Accelerator), resume=True)
        straight = train(made(f"{out}-straight", how, Accelerator), resume=False)
        print(f"told {json.dumps({'resumed': resumed, 'straight': straight})}", flush=True)
        return
    if what == "loaded":
        told = train(made(out, how, SmckptAccelerator), resume=True, loaded=True)
        print(f"told {json.dumps(told)}", flush=True)
        return
    resumed = train(made(out, how, SmckptAccelerator), resume=True)
    straight = train(made(f"{out}-straight", how, SmckptAccelerator), resume=False)
    told = {"resumed": resumed, "straight": straight}
    if how in ("plain", "fsdp2") and "ACCELERATE_ROOT" not in os.environ:
        train(made(f"{out}-stock", how, Accelerator), resume=False, last=4)
        told["stock"] = train(made(f"{out}-stock", how, SmckptAccelerator), resume=True)
    made(out, how, SmckptAccelerator).end_training()
    print(f"told {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
