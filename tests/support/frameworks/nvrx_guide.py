"""The loop of NVRx's usage guide (shared/references), with its calls, arguments and order.

Arguments: OUT, and "die" (rank 0 kills itself in step 6) or "resume" (go on from the newest file
that both ranks have, then train again without a stop; tell what came out).

The guide leaves names unbound: the prelude binds them. Its loop has no end: `done` ends it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt import TorchAsyncCheckpoint

STEPS = 8


class Training(torch.nn.Module):
    """A model, its optimizer's moments and its step, as one state dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-2)
        self.step = 0

    def get_extra_state(self) -> dict[str, Any]:
        random = torch.get_rng_state()
        return {"step": self.step, "optimizer": self.optimizer.state_dict(), "random": random}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])

    def iteration(self) -> None:
        self.step += 1
        loss = self.layer(torch.randn(8, 64)).square().mean()
        loss.backward()
        for parameter in self.layer.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def newest(folder: Path) -> Path | None:
    """The newest file that this rank and the others have."""
    mine = sorted(int(path.stem) for path in folder.glob("*.pt"))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    common = set.intersection(*map(set, everyone))
    return folder / f"{max(common)}.pt" if common else None


def train(out: Path, *, resume: bool, dies: int = 0) -> str:
    model = Training()
    folder = out / str(dist.get_rank())
    folder.mkdir(parents=True, exist_ok=True)
    found = newest(folder) if resume else None
    if resume:
        assert found is not None
        model.load_state_dict(torch.load(found))

    def save_condition() -> bool:
        return model.step % 2 == 0

    def done() -> bool:
        return model.step == STEPS

    # -- as in the guide -------------------------------------------------------------------
    async_impl = TorchAsyncCheckpoint
    # Training loop
    while True:
        async_impl.finalize_async_save(blocking=False)
        # Perform a training iteration
        model.iteration()
        if model.step == dies:
            async_impl.finalize_async_save(blocking=True)  # one is there; one is under way
            dist.barrier()
            async_impl.async_save(model.state_dict(), folder / "7.pt")
            children = [str(child.pid) for child in multiprocessing.active_children()]
            (folder / "worker").write_text(" ".join(children))
            dist.barrier()
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        # Save checkpoint if conditions are met
        if save_condition():
            ckpt_dir = folder / f"{model.step}.pt"
            async_impl.async_save(model.state_dict(), ckpt_dir)
        if done():
            break

    async_impl.finalize_async_save(blocking=True)
    # --------------------------------------------------------------------------------------
    digest = hashlib.sha256()
    for moment in model.optimizer.state_dict()["state"].values():
        for name in sorted(moment):
            digest.update(moment[name].numpy().tobytes())
    for parameter in model.layer.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    last = torch.load(folder / f"{STEPS}.pt")
    assert torch.equal(last["layer.weight"], model.layer.weight)
    return digest.hexdigest()


def main() -> None:
    out, what = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    if what == "die":
        train(out, resume=False, dies=6)
        raise AssertionError("it lives")
    resumed = train(out, resume=True)
    straight = train(Path(f"{out}-straight"), resume=False)
    print(f"told {json.dumps({'resumed': resumed, 'straight': straight})}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
