"""Training loops in the words of other checkpoint systems. Each saves every step, under FSDP on all
ranks, and goes on after the newest step that is committed.

Arguments: PLACE LOOP. PLACE: a directory or URL. LOOP: one of `LOOPS`; "-fsdp1" after it shards by
FSDP1. At the end each rank tells the step that it went on after, its losses, and a digest of its
weights, moments, schedule, random numbers and place in the data.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from smckpt import find_checkpoints
from smckpt.storage import open_storage

STEPS, ROWS = 10, 200


class Training:
    """What a checkpoint has to bring back. The random numbers draw the dropout, and how far each
    rank reads in its data."""

    def __init__(self, fsdp: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(24, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 24)]
        net = torch.nn.Sequential(*layers)
        self.model: Any = wrapped_fsdp1(net) if fsdp == 1 else wrapped_fsdp2(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.name = f"rank{dist.get_rank()}"
        made = torch.Generator().manual_seed(7 + dist.get_rank())
        self.rows = torch.randn(ROWS, 24, generator=made)
        self.step = self.read = 0
        self.losses = torch.zeros(STEPS)
        torch.manual_seed(100 + dist.get_rank())

    def iteration(self) -> None:
        count = int(torch.randint(2, 9, ()))
        batch = self.rows[self.read : self.read + count]
        self.read += count
        loss = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses[self.step] = loss.detach()
        self.step += 1

    def rest(self) -> dict[str, Any]:
        """All but model and optimizer. DCP keeps one value for a name: what a rank has alone is
        under a name of its own."""
        own = {"random": torch.get_rng_state(), "read": self.read, "losses": self.losses.clone()}
        return {"scheduler": self.scheduler.state_dict(), "step": self.step, self.name: own}

    def take_rest(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        own = state[self.name]
        self.read, self.losses = own["read"], own["losses"].clone()
        torch.set_rng_state(own["random"])

    def state(self) -> dict[str, Any]:
        """With the names of torch's `get_state_dict`."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, **self.rest()}

    def take(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip
        self.take_rest(state)

    def told(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for tensor in (*self.local_tensors(), torch.get_rng_state()):
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {
            "digest": digest.hexdigest(), "losses": self.losses.tolist(), "read": self.read,
            "scheduler": repr(self.scheduler.state_dict()), "rank": dist.get_rank(),
        }  # fmt: skip

    def local_tensors(self) -> Iterable[torch.Tensor]:
        for parameter in self.model.parameters():
            slots = self.optimizer.state[parameter]
            for tensor in (parameter, *(slots[name] for name in sorted(slots))):
                yield (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def wrapped_fsdp2(net: torch.nn.Sequential) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return net


def wrapped_fsdp1(net: torch.nn.Sequential) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        net, device_id=torch.device("cpu"), use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
    )  # fmt: skip


def newest(place: str, loop: str) -> int:
    """The newest step that is committed; 0: there is none."""
    if not loop.startswith("nvrx"):
        return max((one.step or 0 for one in find_checkpoints(place)), default=0)
    store = open_storage(place)
    if loop == "nvrx_torch":  # a file for each rank, which has its name when it is whole
        files = [name.partition("-") for name in store.names() if name.endswith(".pt")]
        whole = [int(step) for step, _, _ in files]
        return max((step for step in whole if whole.count(step) == 2), default=0)
    steps = [name for name in store.list_dirs() if ".metadata" in store.join(name).names()]
    return max(map(int, steps), default=0)


def manager(training: Training, place: str, found: int) -> None:
    """smckpt's own words."""
    from smckpt import CheckpointManager

    with CheckpointManager(place, keep_last_n=2, random=False) as steps:
        state = training.state()
        assert steps.restore(state) == found
        if found:
            training.take(state)
        while training.step < STEPS:
            training.iteration()
            steps.save(training.step, training.state())


def dcp(training: Training, place: str, found: int) -> None:
    """As it stands in a script of torch's, for `smckpt run --for dcp`."""
    import torch.distributed.checkpoint as dcp

    dcp_loop(training, place, found, dcp.async_save, dcp.load)


def dcp_calls(training: Training, place: str, found: int) -> None:
    from smckpt.integrations.dcp.calls import async_save, load

    dcp_loop(training, place, found, async_save, load)


def dcp_loop(training: Training, place: str, found: int, async_save: Any, load: Any) -> None:
    if found:
        state = training.state()
        load(state, checkpoint_id=f"{place}/{found}")
        training.take(state)
    saving = None
    while training.step < STEPS:
        training.iteration()
        if saving is not None:
            saving.result()
        saving = async_save(training.state(), checkpoint_id=f"{place}/{training.step}")
    if saving is not None:
        saving.result()


def smp(training: Training, place: str, found: int) -> None:
    """LOCAL state, as on SMP's page, with its writer and reader."""
    from torch.sagemaker import state
    from torch.sagemaker.distributed.checkpoint.filesystem import (
        DistributedFileSystemReader,
        DistributedFileSystemWriter,
    )
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import (
        async_save,
        maybe_finalize_async_calls,
    )
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
        SMStateDictType,
        init_optim_state,
        sm_state_dict_type,
    )

    sub_dir = f"tp{state.tp_rank}_ep{state.ep_rank}_fsdp{state.fsdp_rank}"
    group = {
        "process_group": state.rep_process_group,
        "coordinator_rank": min(state.ranker.get_rep_group(dist.get_rank())),
    }
    model, optimizer = training.model, training.optimizer
    if found:
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            state_dict = {"model": model.state_dict(), **training.rest()}
            init_optim_state(optimizer, skip_empty_param=True)
            state_dict["optimizer"] = optimizer.state_dict()
        storage_reader = DistributedFileSystemReader(f"{place}/{found}/{sub_dir}")
        load(state_dict=state_dict, storage_reader=storage_reader, **group)
        training.take_rest(state_dict)
    while training.step < STEPS:
        training.iteration()
        maybe_finalize_async_calls(blocking=True, process_group=group["process_group"])
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            state_dict = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                **training.rest(),
            }
        storage_writer = DistributedFileSystemWriter(f"{place}/{training.step}/{sub_dir}")
        async_save(state_dict, storage_writer=storage_writer, **group)
    maybe_finalize_async_calls(blocking=True, process_group=group["process_group"])


def nvrx(training: Training, place: str, found: int) -> None:
    """DCP's files, as in NVRx's usage guide."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
        CachedMetadataFileSystemReader,
    )
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
        FileSystemWriterAsync,
    )
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )
    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, load

    if found:
        state_dict = training.state()
        reader = CachedMetadataFileSystemReader(f"{place}/{found}")
        load(state_dict=state_dict, storage_reader=reader, planner=DefaultLoadPlanner())
        training.take(state_dict)
    async_queue = AsyncCallsQueue()
    while training.step < STEPS:
        async_queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        training.iteration()
        writer = FileSystemWriterAsync(
            f"{place}/{training.step}", thread_count=2, use_msc="://" in place
        )
        planned = save_state_dict_async_plan(
            training.state(), writer, None, 0, planner=DefaultSavePlanner()
        )
        save_fn, preload_fn, save_args = writer.get_save_function_and_args()

        def finalize_fn(planned: Any = planned) -> None:
            save_state_dict_async_finalize(*planned)
            dist.barrier()

        request = AsyncRequest(save_fn, save_args, [finalize_fn], preload_fn=preload_fn)
        async_queue.schedule_async_request(request)
    async_queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    async_queue.close()


def nvrx_torch(training: Training, place: str, found: int) -> None:
    """A file of `torch.save` for each rank, with its own shards, as in NVRx's usage guide."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt import TorchAsyncCheckpoint

    def path(step: int) -> str:
        return f"{place}/{step}-{dist.get_rank()}.pt"

    if found:
        whole, _, name = path(found).rpartition("/")
        training.take(torch.load(io.BytesIO(open_storage(whole).read(name)), weights_only=False))
    async_impl = TorchAsyncCheckpoint
    while training.step < STEPS:
        async_impl.finalize_async_save(blocking=False)
        training.iteration()
        async_impl.async_save(training.state(), path(training.step))
    async_impl.finalize_async_save(blocking=True)


LOOPS = {each.__name__: each for each in (manager, dcp, dcp_calls, smp, nvrx, nvrx_torch)}


def main() -> None:
    place, loop = sys.argv[1:]
    dist.init_process_group("gloo")
    name, _, kind = loop.partition("-")
    if name == "smp":  # before the model, which is wrapped as it says
        import torch.sagemaker as tsm

        tsm.init({"hybrid_shard_degree": dist.get_world_size()})
    training = Training(1 if kind else 2)
    found = newest(place, name)
    dist.barrier()  # no rank saves before all have looked
    LOOPS[name](training, place, found)
    print(f"told {json.dumps({**training.told(), 'began': found})}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
