"""What the tests of the door to NVRx run on two ranks. `run_ranks` calls these by name."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

from smckpt import Memory
from smckpt.errors import CheckpointError, SaveFailedError, StorageError, UsageError
from smckpt.integrations.nvrx.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from smckpt.integrations.nvrx.async_ckpt.core import (
    AsyncCallFailedError,
    AsyncCallsQueue,
    AsyncRequest,
)
from smckpt.integrations.nvrx.async_ckpt.filesystem_async import FileSystemWriterAsync
from smckpt.integrations.nvrx.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from smckpt.integrations.nvrx.local.basic_state_dict import BasicTensorAwareStateDict
from smckpt.integrations.nvrx.local.ckpt_managers.local_manager import LocalCheckpointManager
from smckpt.integrations.nvrx.local.replication.strategies import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
)
from smckpt.storage import open_storage


def schedule(
    queue: AsyncCallsQueue,
    place: str,
    state: dict[str, Any],
    cache: CheckpointMetadataCache | None = None,
    **options: Any,
) -> None:
    writer = FileSystemWriterAsync(place, **options)
    planned = save_state_dict_async_plan(
        state, writer, None, 0, enable_cache=cache is not None, metadata_cache=cache
    )
    function, preload, arguments = writer.get_save_function_and_args()
    finalize = [lambda: save_state_dict_async_finalize(*planned)]
    queue.schedule_async_request(
        AsyncRequest(function, arguments, finalize, async_fn_kwargs={}, preload_fn=preload)
    )


def sharded(value: float) -> torch.nn.Module:
    model = fully_shard(torch.nn.Linear(9, 7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values(reader: Any, state: dict[str, Any]) -> list[float]:
    """What comes back, one number for each entry that is one number."""
    target = {k: torch.zeros_like(v) for k, v in state.items() if isinstance(v, torch.Tensor)}
    load(target, storage_reader=reader)
    found = []
    for value in target.values():
        local = value.to_local() if hasattr(value, "to_local") else value
        assert (local == local.reshape(-1)[0]).all()
        found.append(local.reshape(-1)[0].item())
    return found


def each_save_has_the_state_of_its_moment(folder: str) -> dict[str, Any]:
    """Caches on: the same tensors with new values, then new names, then an older place again."""
    queue, cache = AsyncCallsQueue(cpu_shm_mode=True), CheckpointMetadataCache()
    caches: dict[str, Any] = {
        "use_cached_data_structure": True,
        "use_cpu_shm_for_gpu_tensors": True,
        "is_multiproc_io": True,
        "cache": cache,
        "thread_count": 2,
    }
    model, told, reused = sharded(0.0), {}, []
    state: dict[str, Any] = dict(model.state_dict())
    for number in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        place = f"{folder}/{number}"
        schedule(queue, place, state, **caches)
        with torch.no_grad():  # the next step comes before the write
            for parameter in model.parameters():
                parameter.fill_(-1.0)
        assert queue.maybe_finalize_async_calls(blocking=True) == [number - 1]
        told[number] = values(FileSystemReader(place), state)
        reused.append(cache.get_metadata_caching_status()[0])
    state["late"] = torch.full((3,), 7.0)
    schedule(queue, f"{folder}/4", state, **caches)
    queue.maybe_finalize_async_calls(blocking=True)
    reused.append(cache.get_metadata_caching_status()[0])
    told[4] = values(FileSystemReader(f"{folder}/4"), {"late": state["late"]})
    told["before"] = values(CachedMetadataFileSystemReader(f"{folder}/1"), state | {"late": 0})
    schedule(queue, f"{folder}/1", state, **caches)
    queue.maybe_finalize_async_calls(blocking=True)
    told["after"] = values(CachedMetadataFileSystemReader(f"{folder}/1"), state)
    queue.close()
    return {"told": told, "reused": reused}


class Refuses:
    """`open`, but for the files that end so."""

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def __call__(self, path: str, mode: str) -> Any:
        if path.endswith(self.ending):
            raise OSError(28, "No space left on device")
        return open(path, mode)


def a_failure_is_told_on_both_ranks(folder: str) -> dict[str, Any]:
    queue = AsyncCallsQueue()
    state = dict(sharded(1.0).state_dict())
    told: dict[str, Any] = {}
    schedule(queue, f"{folder}/dcp", state)
    queue.maybe_finalize_async_calls(blocking=True)
    # the second of rank 1's threads, whose error DCP's own writer loses
    for name, place in (("dcp", f"{folder}/dcp"), ("fresh", f"{folder}/fresh")):
        schedule(queue, place, state, thread_count=2, open_file=Refuses("__1_1.distcp"))
        told[name] = raised(lambda: queue.maybe_finalize_async_calls(blocking=True))
    for no_dist in (False, True):
        finalized: list[int] = []
        arguments = (Path(folder, f"{dist.get_rank()}"), dist.get_rank() == 1)
        request = AsyncRequest(writes, arguments, [lambda f=finalized: f.append(1)])
        queue.schedule_async_request(request)
        told[f"own {no_dist}"] = raised(
            lambda n=no_dist: queue.maybe_finalize_async_calls(blocking=True, no_dist=n)
        )
        told[f"finalized {no_dist}"] = finalized
    told["then"] = raised(lambda: queue.maybe_finalize_async_calls(blocking=True))
    queue.close()
    return told


def writes(path: Path, fails: bool) -> None:
    if fails:
        raise OSError(28, "No space left on device")
    path.write_text("written")


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointException as error:
        own = isinstance(error, AsyncCallFailedError) and isinstance(error, SaveFailedError)
        return f"{'own' if own else 'dcp'}: {error}"
    except UsageError as error:
        return f"usage: {error}"
    return ""


def a_worker_dies(folder: str) -> dict[str, Any]:
    """Rank 1's is killed in the middle of a function; the next request has another."""
    queue, rank = AsyncCallsQueue(), dist.get_rank()
    told: dict[str, Any] = {}
    for number in (0, 1):
        path = Path(folder, f"{rank}-{number}")
        dies = rank == 1 and number == 0
        queue.schedule_async_request(AsyncRequest(killed_or_writes, (path, dies), []))
        told[str(number)] = raised(lambda: queue.maybe_finalize_async_calls(blocking=True))
        told[f"written {number}"] = path.exists()
    state = dict(sharded(2.0).state_dict())
    writer = FileSystemWriterAsync(f"{folder}/dcp")
    planned = save_state_dict_async_plan(state, writer)
    _, preload, arguments = writer.get_save_function_and_args()
    function = kills if rank == 1 else nothing
    finalize = [lambda: save_state_dict_async_finalize(*planned)]
    queue.schedule_async_request(AsyncRequest(function, arguments, finalize, {}, preload))
    told["dcp"] = raised(lambda: queue.maybe_finalize_async_calls(blocking=True, no_dist=True))
    told["metadata"] = Path(folder, "dcp", ".metadata").exists()
    queue.close()
    return told


def killed_or_writes(path: Path, dies: bool) -> None:
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_text("written")


def kills(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nothing(*_: Any) -> None:
    pass


def ranks_at_different_calls() -> str:
    queue = AsyncCallsQueue()
    if dist.get_rank() == 1:
        queue.schedule_async_request(AsyncRequest(None, (), []))
        queue.maybe_finalize_async_calls(no_dist=True)
    queue.schedule_async_request(AsyncRequest(None, (), []))
    return raised(lambda: queue.maybe_finalize_async_calls())


def a_rank_that_lost_its_disk_gets_its_state_from_a_copy(folder: str, persistent: bool) -> Any:
    """Saves two iterations; rank 1 loses its directory; both load the newest. Without a persistent
    worker the lazy strategy makes the copies."""
    rank = dist.get_rank()
    place = f"{folder}/node{rank}"
    copies: Any = LazyCliqueReplicationStrategy(replication_jump=1)
    if persistent:
        copies = CliqueReplicationStrategy.from_replication_params(replication_jump=1)
    manager = LocalCheckpointManager(place, "session", copies)
    queue = AsyncCallsQueue(persistent=persistent)
    live = torch.zeros(5)
    for iteration in (3, 4):
        live.fill_(10 * iteration + rank)
        state = BasicTensorAwareStateDict({"a": live, "b": [live[:2].bfloat16(), iteration]})
        request = manager.save(state, iteration, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
        live.fill_(-1)
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    for thread in threading.enumerate():
        if thread.name == "smckpt-local":  # it removes what is older
            thread.join()
    names = sorted(path.name for path in manager.local_ckpt_dir.iterdir())
    dist.barrier()
    if rank == 1:
        shutil.rmtree(place)
    alone = LocalCheckpointManager(place, "session").find_latest()
    manager = LocalCheckpointManager(place, "session", copies)
    found = manager.find_latest()
    loaded, id_ = manager.load()
    assert isinstance(loaded, BasicTensorAwareStateDict)
    values = [loaded.state_dict["a"].tolist(), loaded.state_dict["b"][0].tolist()]
    if rank == 0:
        for path in manager.local_ckpt_dir.iterdir():
            path.unlink()
    dist.barrier()
    lost = LocalCheckpointManager(place, "session", copies)
    assert lost.find_latest() == -1
    try:
        lost.load()
    except CheckpointError as error:
        refused = str(error)
    broken = Path(folder, f"file{rank}")
    if rank == 1:
        broken.touch()  # no directory: rank 1 cannot write
    manager = LocalCheckpointManager(broken)
    whole = BasicTensorAwareStateDict({"a": live})
    try:
        manager.save(whole, 5)
    except CheckpointError as error:
        refused += str(error)
    except OSError as error:
        refused += f"os {error}"
    return names, alone, found, id_, values, refused


class Stuck(BasicTensorAwareStateDict):
    def pop_tensors(self) -> Any:
        raise RuntimeError("the tensors are stuck")


def a_state_that_one_rank_cannot_take_apart(is_stuck: bool) -> str:
    arguments = {"memory": Memory(1)}
    manager = LocalCheckpointManager("/of/no/disk", "pickled", smckpt_arguments=arguments)
    state, error = BasicTensorAwareStateDict({"w": torch.ones(3)}), ""
    if dist.get_rank() == 1:
        odd = {"odd": threading.Lock()}
        state = Stuck({"w": torch.ones(3)}) if is_stuck else BasicTensorAwareStateDict(odd)
    try:
        manager.save(state, 1)
    except Exception as failed:
        error = str(failed)
    dist.barrier()
    return error


def a_later_job_saves_in_memory() -> list[str]:
    """The error of each save; rank 0 alone knows of that job."""
    arguments = {"memory": Memory(1)}
    manager = LocalCheckpointManager("/of/no/disk", "claimed", smckpt_arguments=arguments)
    queue, errors = AsyncCallsQueue(cpu_priority=None), list[str]()
    for iteration in (1, 2, 3):
        request = manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), iteration, True)
        assert request is not None
        queue.schedule_async_request(request)
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except CheckpointError as error:
            errors.append(str(error))
        assert manager._kept is not None and manager._kept._tier._rivals is not None
        if dist.get_rank() == 0:
            manager._kept._tier._rivals._over = StorageError("a later job has saved step 9")
    queue.close()
    return errors


def a_rank_does_not_write_before_a_newer_one_is_in_memory(folder: str) -> tuple[str, int]:
    """The error of that iteration, and the one that is found without memory afterwards."""

    def state() -> BasicTensorAwareStateDict:
        return BasicTensorAwareStateDict({"w": torch.ones(3)})

    memory = {"memory": Memory(2)}
    manager = LocalCheckpointManager(folder, "s", smckpt_arguments=memory)
    manager.save(state(), 9)
    request = manager.save(state(), 11, is_async=True)
    assert request is not None and request.async_fn is not None
    if dist.get_rank() == 0:
        request.async_fn(*request.async_fn_args)
    manager.save(state(), 12)
    error = ""
    try:
        for finalize in request.finalize_fns:
            finalize()
    except CheckpointError as failed:
        error = str(failed)
    for thread in threading.enumerate():
        if thread.name == "smckpt-local":
            thread.join()
    dist.barrier()
    return error, LocalCheckpointManager(folder, "s").find_latest()


def what_memory_has_does_not_load(folder: str) -> list[Any]:
    """What is found, before and after a load that fails; and what is loaded then."""
    memory = {"memory": Memory(2)}
    manager = LocalCheckpointManager(folder, "s", smckpt_arguments=memory)
    for iteration in (1, 2):
        manager.save(BasicTensorAwareStateDict({"w": torch.full((999,), iteration)}), iteration)
    assert manager._kept is not None
    if dist.get_rank() == 0:
        store = open_storage(manager._kept._tier.root)
        for directory, names in store.tree().items():  # type: ignore[attr-defined]
            for name in names:
                if name.endswith(".safetensors"):
                    there = store.join(directory)
                    size = there.size(name)
                    there.delete(name)
                    there.put(name, bytes(size))
    dist.barrier()
    found: list[Any] = [manager.find_latest()]
    try:
        manager.load()
    except CheckpointError as error:
        found.append(str(error))
    found.append(manager.find_latest())
    state, _ = manager.load()
    assert isinstance(state, BasicTensorAwareStateDict)
    return [*found, state.state_dict["w"].unique().tolist()]


def a_jump_of_no_ranks() -> bool:
    try:
        CliqueReplicationStrategy.from_replication_params(replication_jump=0)
    except UsageError as error:
        return "0 apart" in str(error)
    return False


def saves_with_a_hint(folder: str) -> None:
    queue = AsyncCallsQueue()
    state = {"model": {"w": torch.ones(4)}, "optimizer": {"w": torch.full((4,), 2.0)}}
    schedule(queue, folder, state, separation_hint="model", thread_count=2)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    found = {"model": {"w": torch.zeros(4)}, "optimizer": {"w": torch.zeros(4)}}
    load(found, storage_reader=FileSystemReader(folder))
    assert found["model"]["w"].eq(1).all() and found["optimizer"]["w"].eq(2).all()
