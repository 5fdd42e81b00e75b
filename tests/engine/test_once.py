"""The ranks of a load read each byte of storage once, and pass it on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smckpt
from smckpt import errors
from smckpt.engine import passing
from smckpt.storage.disk.posix import PosixStorage
from tests.support.launch import run_ranks
from tests.support.limits import seconds

WIDE = 700  # elements: rows of 2,800 bytes, so that shards end inside of blocks


def hosts_apart(patch: pytest.MonkeyPatch) -> None:
    """Each rank as if it were on a host of its own."""
    patch.setenv("LOCAL_WORLD_SIZE", "1")
    patch.setattr(passing, "_system", lambda: str(dist.get_rank()))


def mesh_of(sizes: tuple[int, int]) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def state_on(mesh: Any, seed: int) -> dict[str, Any]:
    """SHARDED state after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(3)), nn.Linear(WIDE, 3).double())
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    half = model[:3](torch.ones(2, WIDE))
    model[3](half.double()).square().sum().backward()
    optimizer.step()
    with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """This rank's tensors."""
    found: list[torch.Tensor] = []
    for value in state.values():
        if isinstance(value, dict):
            found += tensors_of(value)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found.append(local.detach().clone())
    return found


class Loaded(NamedTuple):
    """A load: this rank's tensors, its event, and the bytes of data files that the disk gave."""

    tensors: list[torch.Tensor]
    event: Any
    read: int


def loaded(folder: str, target: dict[str, Any], once: bool | None = True) -> Loaded:
    events: list[Any] = []
    counts: list[int] = []
    read_into = PosixStorage.read_into

    def counted(self: Any, name: str, offset: int, buffers: Any, seen: Any = None) -> None:
        if name.endswith(".safetensors"):
            counts.append(sum(map(len, buffers)))
        read_into(self, name, offset, buffers, seen)

    remove = smckpt.add_sink(events.append)
    options = smckpt.LoadOptions(timeout=seconds(40), read_once=once)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixStorage, "read_into", counted)
        smckpt.load(target, checkpoint_id=folder, options=options)
    remove()
    return Loaded(tensors_of(target), events[0], sum(counts))


def hsdp(folder: str, loading: tuple[int, int], apart: bool) -> tuple[bool, Any, Any]:
    smckpt.save(state_on(mesh_of((2, 2)), seed=0), checkpoint_id=folder)
    mesh = mesh_of(loading)
    alone = loaded(folder, state_on(mesh, seed=1), once=None)  # the default of a file system
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            hosts_apart(patch)
        together = loaded(folder, state_on(mesh, seed=1))
    same = len(together.tensors) > 12 and all(map(torch.equal, together.tensors, alone.tensors))
    # headers, which a load reads alone, are the same in both
    counted = together.read - together.event.fetched == alone.read - alone.event.fetched
    return same and counted, together.event, alone.event


@pytest.mark.parametrize(
    ("loading", "apart"), [((2, 2), False), ((4, 1), False), ((1, 4), False), ((2, 2), True)]
)
def test_each_byte_is_read_once(tmp_path: Path, loading: tuple[int, int], apart: bool) -> None:
    found = run_ranks(hsdp, 4, str(tmp_path), loading, apart)
    assert all(same for same, _, _ in found)  # bit by bit as ranks that read alone
    events = [event for _, event, _ in found]
    ratio = events[0].read_ratio
    assert 1 <= ratio <= 1.05
    assert {event.read_ratio for event in events} == {ratio}
    needed = sum(event.fetched for event in events) / ratio
    assert {alone.read_ratio for _, _, alone in found} == {None}
    assert sum(alone.fetched for _, _, alone in found) > 1.1 * needed
    if loading == (4, 1):  # all need all, and each reads its part
        assert max(event.fetched for event in events) < 0.35 * needed


def without_network(folder: str) -> tuple[bool, float | None]:
    """Two hosts of two ranks, and no address by which one reaches the other."""
    target = state_on(mesh_of((4, 1)), seed=0)
    smckpt.save(target, checkpoint_id=folder)
    other = state_on(mesh_of((4, 1)), seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setattr(passing, "_system", lambda: str(dist.get_rank() // 2))
        patch.setattr(passing, "own_address", lambda: "")
        found = loaded(folder, other)
    same = all(map(torch.equal, found.tensors, tensors_of(target)))
    return same, found.event.read_ratio


def test_hosts_that_cannot_reach_each_other_share_within_each(tmp_path: Path) -> None:
    found = run_ranks(without_network, 4, str(tmp_path))
    for same, ratio in found:
        assert same
        assert 2 <= ratio <= 2.1


def different_targets(folder: str) -> tuple[bool, float | None]:
    target = state_on(mesh_of((4, 1)), seed=0)
    smckpt.save(target, checkpoint_id=folder)
    rank = dist.get_rank()
    keys = [*target["model"]][rank:] if rank else [*target["model"]]
    part: dict[str, Any] = {"model": {key: torch.zeros_like(target["model"][key]) for key in keys}}
    event = loaded(folder, part).event
    same = all(
        torch.equal(part["model"][k].to_local(), target["model"][k].to_local()) for k in keys
    )
    return same, event.read_ratio


def test_ranks_with_different_targets_share_what_they_have_in_common(tmp_path: Path) -> None:
    for same, ratio in run_ranks(different_targets, 4, str(tmp_path)):
        assert same
        assert ratio == 1


def taking_late(patch: pytest.MonkeyPatch, folder: str) -> None:
    """Rank 0 takes what rank 1 passes on when rank 1 has failed, and closed its connections."""
    patch.setattr(passing, "portion_bytes", lambda _: 2 << 20)
    patch.setattr(passing, "_GOODBYE", 0.1)
    closed = Path(f"{folder}.closed")
    leave, take = passing.Passing.__exit__, passing.PortionTargets.take
    of_others: list[str] = []

    def left(self: Any, *error: Any) -> None:
        leave(self, *error)
        closed.write_text("")  # somebody has opened it to read

    def late(self: Any, *args: Any) -> None:
        if threading.current_thread().name == "smckpt-passing" and not of_others:
            of_others.append(closed.read_text())
        take(self, *args)

    if dist.get_rank() == 0:
        os.mkfifo(closed)
        patch.setattr(passing.PortionTargets, "take", late)
    else:
        patch.setattr(passing.Passing, "__exit__", left)
    dist.barrier()


def damaged(folder: str, late: bool) -> tuple[str, str, int]:
    mesh = mesh_of((dist.get_world_size(), 1))
    smckpt.save(state_on(mesh, seed=0), checkpoint_id=folder)
    if dist.get_rank() == 0:
        path = sorted(Path(folder).glob("data-*.safetensors"))[-1]
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - 9)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    target = state_on(mesh, seed=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if late:
                taking_late(patch, folder)
            loaded(folder, target)
    except errors.CheckpointError as error:
        passed_on = error.__cause__ or error  # on a rank that did not read it: what was sent
        assert isinstance(passed_on, errors.CorruptCheckpointError), (repr(error), repr(passed_on))
        assert passed_on.rank == error.rank
        assert passed_on.message.count("undefined") < 2
        return type(error).__name__, error.message, error.rank
    return "", "", -1


@pytest.mark.parametrize("late", [False, True])
def test_a_damaged_block_that_ranks_share_is_named_on_all(tmp_path: Path, late: bool) -> None:
    found = run_ranks(damaged, 2 if late else 4, str(tmp_path / "saved"), late)
    kind, message, _ = found[0]
    assert kind == "CorruptCheckpointError"
    assert "checksum differs" in message
    assert message.count("undefined") == 1
    assert len(set(found)) == 1  # of the one rank that read it


def killed(folder: str, apart: bool) -> tuple[str, str, float]:
    smckpt.save(state_on(mesh_of((4, 1)), seed=0), checkpoint_id=folder)
    target = state_on(mesh_of((4, 1)), seed=1)
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            hosts_apart(patch)
        if dist.get_rank() == 2:
            patch.setattr(
                passing.PortionTargets, "take", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
        began = time.monotonic()
        try:
            loaded(folder, target)
        except errors.CheckpointError as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


@pytest.mark.parametrize("apart", [False, True])
def test_a_rank_that_is_killed_in_the_middle_ends_the_load_of_the_others(
    tmp_path: Path, apart: bool
) -> None:
    found = run_ranks(killed, 4, str(tmp_path), apart, killed=(2,))
    for kind, message, took in found[:2] + found[3:]:
        assert kind == "PeerError"
        assert "rank 2" in message
        assert took < seconds(20)  # not the time limit of the load


def stopped_before(folder: str) -> tuple[str, str, float]:
    smckpt.save(state_on(mesh_of((4, 1)), seed=0), checkpoint_id=folder)
    target = state_on(mesh_of((4, 1)), seed=1)
    if dist.get_rank() == 3:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                passing.Passing, "_meet", lambda self: os.kill(os.getpid(), signal.SIGKILL)
            )
            loaded(folder, target)
    began = time.monotonic()
    try:
        loaded(folder, target)
    except errors.CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


def test_a_rank_that_is_killed_before_it_connects_ends_the_load_too(tmp_path: Path) -> None:
    for kind, message, took in run_ranks(stopped_before, 4, str(tmp_path), killed=(3,))[:3]:
        assert kind == "PeerError"
        assert "rank 3" in message
        assert took < seconds(20)


def manifests_read(folder: str) -> tuple[bool, int]:
    """How many manifests and records this rank reads in a load from the directory of two groups'
    step."""
    mesh = mesh_of((2, 2))
    state = state_on(mesh, seed=0)
    group = mesh["replicate"].get_group()
    number = mesh["shard"].get_local_rank()
    with pytest.MonkeyPatch.context() as patch:
        smckpt.save(state, checkpoint_id=f"{folder}/{number}", process_group=group)
        names: list[str] = []
        read = PosixStorage.read

        def counted(self: Any, name: str, *where: Any, **more: Any) -> bytes:
            names.append(name)
            return read(self, name, *where, **more)

        patch.setattr(PosixStorage, "read", counted)
        target = state_on(mesh, seed=1)
        smckpt.load(target, checkpoint_id=folder)
    same = all(map(torch.equal, tensors_of(target), tensors_of(state)))
    return same, sum(name.startswith(("manifest-", "record-")) for name in names)


def test_one_rank_reads_the_manifests_for_all(tmp_path: Path) -> None:
    found = run_ranks(manifests_read, 4, str(tmp_path))
    assert all(same for same, _ in found)
    assert [count for _, count in found] == [3, 0, 0, 0]  # a record, and each group's manifest
