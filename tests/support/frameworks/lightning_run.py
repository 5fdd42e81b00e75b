"""A script that trains a tiny model with Lightning through smckpt.

Its arguments: OUT HOW WHAT. OUT: a directory or an s3:// URL. HOW: s3 (NeMo's plugin), disk (the
plugin for any place), fsdp1, fsdp2, tp (FSDP2 with tensor parallel pairs), hybrid1, hybrid2 (pairs
that shard, and hold replicas of each other), two (FSDP2, two optimizers that the module steps),
epochs (saves at the ends of epochs, a shuffled DataLoader);
"-sync" after it waits for each commit, "-wrapped" puts AsyncCheckpointIO around the plugin,
"-memory" saves each step in memory and none on disk. WHAT:
"die" (SIGKILL to itself in step 5), "resume" (go on in OUT, then train in OUT-straight without a
stop; print both as JSON), "loaded" (only load the last in OUT, and print what is not as it was
saved).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.device_mesh import init_device_mesh

import smckpt
from smckpt.integrations import lightning as ours
from tests.support.held import other_than

STEPS, PER_EPOCH = 9, 4


class Model(LightningModule):
    def __init__(self, width: int = 16, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers: Any = None
        self.losses: list[tuple[int, float]] = []
        self.pairs = False  # of ranks that shard, and hold replicas of each other

    @property
    def replicas(self) -> Any:
        if not self.pairs:
            return None
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        width = self.hparams["width"]
        layers = [torch.nn.Linear(width, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 16)]
        self.layers = torch.nn.Sequential(*layers)
        if type(self.trainer.strategy).__name__ == "SmckptFSDPStrategy":  # else refused on CPUs
            from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
            from torch.distributed.fsdp.wrap import ModuleWrapPolicy

            kind = "HYBRID_SHARD" if self.replicas else "FULL_SHARD"
            self.layers = FullyShardedDataParallel(
                self.layers, device_id=torch.device("cpu"), use_orig_params=True,
                auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
                device_mesh=self.replicas, sharding_strategy=ShardingStrategy[kind],
            )  # fmt: skip
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            if mesh["tensor_parallel"].size() > 1:
                tensor_parallel(self.layers, mesh["tensor_parallel"])
            for each in (layers[0], layers[2], self.layers):
                fully_shard(each, mesh=self.replicas or mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        # of the random numbers that come back
        loss = (self.layers(batch + torch.randn_like(batch)) - batch).square().mean()
        self.log("loss", loss, sync_dist=True)  # so that all ranks keep the same ones
        self.losses.append((self.global_step + 1, loss.item()))
        if not self.automatic_optimization:  # the optimizers take turns
            self.manual_backward(loss)
            self.optimizers()[index % 2].step()
            self.lr_schedulers()[index % 2].step()
            self.layers.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            optimizers: list[Any] = [
                torch.optim.AdamW(self.layers[0].parameters(), lr=self.hparams["rate"]),
                torch.optim.SGD(self.layers[2].parameters(), lr=1e-3, momentum=0.9),
            ]
            return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]
        optimizer = torch.optim.AdamW(self.layers.parameters(), lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def tensor_parallel(layers: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Batches:
    """A loader that Lightning can resume in the middle of an epoch.

    Args:
        alike: how many neighbouring ranks get the same batches.
    """

    def __init__(self, alike: int = 1) -> None:
        self.at = 0
        self.reader = int(os.environ.get("RANK", "0")) // alike

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < PER_EPOCH:
            self.at += 1
            made = torch.Generator().manual_seed(self.at + 100 * self.reader)
            yield torch.randn(4, 16, generator=made)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Seen(Callback):
    """A callback with a state; it kills the process in a step."""

    def __init__(self, dies: int) -> None:
        self.dies = dies
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)
        if trainer.global_step == self.dies:
            if isinstance(wrapper := trainer.strategy.checkpoint_io, AsyncCheckpointIO):
                wrapper._executor.submit(int).result()  # so that there is a checkpoint
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def whole(layers: Any) -> Any:
    """FSDP1's parameters, which are parts of this rank alone, as they are named without it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(layers, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(layers, writeback=False)
    return nullcontext()


class Loaded(Callback):
    """Looks at a run that has just resumed, and ends it."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        newest = smckpt.latest_checkpoint(trainer.checkpoint_callback.dirpath)
        assert newest is not None
        saved = smckpt.load(checkpoint_id=newest)
        with whole(module.layers):
            told = {"step": trainer.global_step, "wrong": other_than(saved, module)}
        print(f"told {json.dumps(told)}", flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        os._exit(0)  # all was looked at; Lightning would go on


def trainer(out: str, how: str, dies: int) -> Any:
    how, *more = how.split("-")
    kept: dict[str, Any] = {"every_n_train_steps": 2}
    if how == "epochs":
        kept = {"save_on_train_epoch_end": True}
    in_memory = [ours.SmckptMemory(smckpt.Memory(1))] if "memory" in more else []
    if in_memory:
        kept = {"every_n_train_steps": 100}
    saved = ModelCheckpoint(
        dirpath=out, filename="{step}", monitor="loss", save_top_k=2, save_last=True, **kept
    )
    waits = "sync" in more
    where: dict[str, Any] = {}
    if how == "s3":
        plugin = ours.S3CheckpointIO(out, None, None, None, async_checkpointing=not waits)
    elif how in ("disk", "epochs"):
        plugin = ours.SmckptCheckpointIO(async_checkpointing=not waits)
    if how in ("s3", "disk", "epochs"):
        where["plugins"] = [AsyncCheckpointIO(plugin) if "wrapped" in more else plugin]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        where["devices"] = int(os.environ["WORLD_SIZE"])
        where["strategy"] = strategy(how)
    elif how.startswith("fsdp"):
        where["strategy"] = strategy(how)
    # with max_steps Lightning itself miscounts after a resumption from the end of an epoch
    until = {"max_epochs": 3} if how == "epochs" else {"max_steps": STEPS}
    return ours.SmckptTrainer(
        accelerator="cpu", **until, callbacks=[Seen(dies), saved, *in_memory], logger=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        default_root_dir=tempfile.gettempdir(), **where,
    )  # fmt: skip


def strategy(how: str) -> Any:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if how == "tp":
        return ours.SmckptModelParallelStrategy(ranks // 2, 2)
    if how in ("fsdp2", "two", "hybrid2"):
        return ours.SmckptModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if how in ("fsdp1", "hybrid1"):
        return ours.SmckptFSDPStrategy()
    return "ddp"


def train(
    out: str, how: str, *, resume: bool, dies: int = 0, loaded: bool = False
) -> dict[str, Any]:
    seed_everything(7 if resume else 0, verbose=False)
    runs, model = trainer(out, how, dies), Model()
    if loaded:
        runs.callbacks.append(Loaded())
    model.pairs = how.startswith("hybrid")
    model.automatic_optimization = how != "two"
    data: Any = Batches(2 if how == "tp" else 1)
    if how.startswith("epochs"):
        made = torch.Generator().manual_seed(3)
        rows = torch.randn(4 * PER_EPOCH, 16, generator=made)
        data = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    runs.fit(model, data, ckpt_path="last" if resume else None)
    return ended(runs, model)


def ended(runs: Any, model: Model) -> dict[str, Any]:
    """What a run came to: this rank's weights and moments in a digest, the losses, the rate."""
    digest = hashlib.sha256()
    held = [each.state for each in runs.strategy.optimizers]
    for parameter in model.layers.parameters():
        slots = next((each[parameter] for each in held if parameter in each), {})
        for tensor in (parameter, *(slots[name] for name in sorted(slots))):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    seen, saved = runs.callbacks[0], runs.checkpoint_callback
    return {
        "digest": digest.hexdigest(),
        "losses": model.losses,
        "lr": [each.scheduler.get_last_lr() for each in runs.lr_scheduler_configs],
        "random": torch.rand(2).tolist(),
        "sharded": type(first := next(model.layers.parameters())).__name__,
        "placements": str(getattr(first, "placements", None)),
        "seen": seen.steps,
        "best": sorted((os.path.basename(k), v.item()) for k, v in saved.best_k_models.items()),
        "last": os.path.basename(saved.last_model_path),
        "epoch": runs.current_epoch,
        "hparams": dict(model.hparams),
    }


def main() -> None:
    out, how, what = sys.argv[1:]
    if what == "die":
        train(out, how, resume=False, dies=5 if not how.startswith("epochs") else 6)
        raise AssertionError("it lives")
    if what == "loaded":
        train(out, how, resume=True, loaded=True)
    resumed = train(out, how, resume=True)
    straight = train(f"{out}-straight", how, resume=False)
    print(f"told {json.dumps({'resumed': resumed, 'straight': straight})}", flush=True)


if __name__ == "__main__":
    main()
