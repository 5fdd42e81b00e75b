"""NVRx's example of a DCP save in Multi-Storage Client's places, as in its usage guide.

Its two functions are the guide's own; the prelude below binds `YourModel` and the path. Arguments:
PATH, and "die" (rank 0 kills itself while step 3 is written) or "resume".
"""

from __future__ import annotations

import json
import os
import signal
import sys

import multistorageclient as msc
import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, load
from torch.distributed.fsdp import fully_shard


def async_save_checkpoint(checkpoint_path, state_dict, thread_count=2):
    """
    Save checkpoint asynchronously to MSC storage.
    """
    # Create async queue
    async_queue = AsyncCallsQueue()

    # Create writer with MSC enabled
    writer = FileSystemWriterAsync(checkpoint_path, thread_count=thread_count, use_msc=True)
    coordinator_rank = 0
    planner = DefaultSavePlanner()

    # Plan the save operation
    save_state_dict_ret = save_state_dict_async_plan(
        state_dict, writer, None, coordinator_rank, planner=planner
    )

    # Create async request with finalization
    save_fn, preload_fn, save_args = writer.get_save_function_and_args()

    def finalize_fn():
        """Finalizes async checkpointing and synchronizes processes."""
        save_state_dict_async_finalize(*save_state_dict_ret)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    async_request = AsyncRequest(save_fn, save_args, [finalize_fn], preload_fn=preload_fn)

    # Schedule the request and return the queue for later checking
    async_queue.schedule_async_request(async_request)
    return async_queue


def load_checkpoint(checkpoint_path, state_dict):
    """
    Load checkpoint from MSC storage into the state_dict.
    """
    # Create reader with MSC path
    reader = msc.torch.MultiStorageFileSystemReader(checkpoint_path, thread_count=2)

    # Load the checkpoint into the state_dict
    load(
        state_dict=state_dict,
        storage_reader=reader,
        planner=DefaultLoadPlanner(),
    )
    return state_dict


def YourModel() -> torch.nn.Module:
    torch.manual_seed(0)
    return fully_shard(torch.nn.Linear(33, 31))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    model(torch.randn(4, 33)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: torch.nn.Module) -> list[float]:
    return [p.to_local().double().sum().item() for p in model.parameters()]  # type: ignore[attr-defined]


def main() -> None:
    place, what = sys.argv[1:]
    torch.distributed.init_process_group("gloo")
    # Initialize your model and get state_dict
    model = YourModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "die":
        for number in (1, 2):
            step(model, optimizer, number)
        state_dict = model.state_dict()
        # Save checkpoint asynchronously
        checkpoint_path = f"{place}/iteration-0002"
        async_queue = async_save_checkpoint(checkpoint_path, state_dict)
        step(model, optimizer, 3)  # the save has the state of step 2
        async_queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
        async_save_checkpoint(f"{place}/iteration-0003", model.state_dict())
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()
        raise AssertionError("it lives")
    assert not msc.is_file(f"{place}/iteration-0003/.metadata")
    # Load checkpoint synchronously
    state_dict = model.state_dict()
    loaded_state_dict = load_checkpoint(f"{place}/iteration-0002", state_dict.copy())
    model.load_state_dict(loaded_state_dict)
    step(model, optimizer, 3)
    straight = YourModel()
    optimizer = torch.optim.SGD(straight.parameters(), lr=0.1)
    for number in (1, 2, 3):
        step(straight, optimizer, number)
    told = {"resumed": digest(model), "straight": digest(straight)}
    print(f"told {json.dumps(told)}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
