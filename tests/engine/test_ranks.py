"""Several real processes: groups, steps, failures of one rank, restarts on a kept store."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import smckpt
from smckpt import errors
from smckpt.storage.disk.posix import PosixStorage
from tests.support.launch import run_ranks
from tests.support.limits import seconds


def model_on(mesh: Any, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded over `mesh` (FSDP2), after two deterministic steps; 5 rows do not divide by 2."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def taken(model: nn.Module, optimizer: Any, kind: Any, **more: Any) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, kind):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def full(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    out = {k: v.full_tensor().clone() for k, v in model.state_dict().items()}
    names = {p: n for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            out[f"{names[parameter]}/{key}"] = whole.clone()
    return out


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def replication_group(mesh: Any) -> Any:
    return mesh["replicate"].get_group()


def counted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The arguments of each call from here on."""
    calls: list[Any] = []
    method = getattr(owner, name)

    def seen(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return method(*args, **options)

    patch.setattr(owner, name, seen)
    return calls


# -- the step of several groups --------------------------------------------------------------


def hsdp_cycle(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = model_on(mesh)
    before = full(model, optimizer)
    shard = mesh["shard"].get_local_rank()
    group = replication_group(mesh)
    commits: list[int] = []
    for step in range(3):
        smckpt.async_save(
            taken(model, optimizer, smckpt.LOCAL, step=step, rank=dist.get_rank()),
            checkpoint_id=f"{folder}/run/fsdp{shard}",
            process_group=group,
            step=step,
            options=smckpt.SaveOptions(on_commit=lambda handle: commits.append(handle.number)),
        )
    done = smckpt.maybe_finalize_async_calls(process_group=group)
    other, fresh = model_on(mesh, seed=1)
    smckpt.init_optim_state(fresh)
    target = taken(other, fresh, smckpt.LOCAL, step=-1, rank=-1)
    refused = []
    for part in ("nowhere", "fsdp1"):  # for the groups of shard 1: not there, and then it is
        place = f"{folder}/run/{part if shard else 'fsdp0'}"
        with pytest.MonkeyPatch.context() as patch:
            listings = counted(patch, PosixStorage, "_scan")  # of a directory
            try:
                smckpt.load(
                    target,
                    checkpoint_id=place,
                    process_group=group,
                    options=smckpt.LoadOptions(timeout=20),
                )
            except errors.CheckpointError as error:
                refused.append((type(error).__name__, "nowhere" in str(error), target["step"]))
    found = smckpt.latest_checkpoint(folder)
    keys = []
    for _ in range(3):
        dist.barrier()
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
        smckpt.save(target, checkpoint_id=f"{folder}/keys/{shard}", process_group=group)
        smckpt.load(target, checkpoint_id=f"{folder}/keys/{shard}", process_group=group)
        smckpt.latest_checkpoint(folder)
    return {
        "keys": keys[1:],  # the first of them has made new connections
        "same": same(full(other, fresh), before),
        "step": target["step"],
        "rank": target["rank"],
        "done": done,
        "commits": commits,
        "refused": refused,
        "listings": len(listings),
        "found": (found.step, os.path.relpath(found.path, folder)) if found else None,
    }


def test_replication_groups_commit_one_step_together_and_resume_it(tmp_path: Path) -> None:
    results = run_ranks(hsdp_cycle, 4, str(tmp_path))
    for rank, result in enumerate(results):
        assert result["same"]
        assert (result["step"], result["rank"]) == (2, rank)
        assert result["done"] == [0, 1, 2]
        assert result["found"] == (2, "run")
        # both groups are told what one of them meets, at once and with nothing touched
        assert result["refused"] == [("CheckpointNotFoundError", True, -1)]
        assert bool(result["listings"]) == (rank in (0, 1))  # the others are told what was found
        assert result["commits"] == ([0, 1, 2] if rank in (0, 1) else [])
        assert result["keys"][0] == result["keys"][1]  # neither saves nor loads fill the store
    assert len(list((tmp_path / "run").glob("record-*"))) >= 1


def told_by_parallel_state(folder: str) -> Any:
    groups = [dist.new_group([0]), dist.new_group([1])]
    rank = dist.get_rank()

    def save(state: Any) -> None:
        smckpt.save(
            state,
            checkpoint_id=f"{folder}/run/part{rank}",
            process_group=groups[rank],
            options=smckpt.SaveOptions(
                parallel_state=smckpt.ParallelState(2, hybrid_shard_degree=2, rank=rank)
            ),
            step=4,
        )

    state = {"w": torch.full((3,), float(rank))}
    with pytest.raises(errors.CheckpointError, match="rank 0.*nothing to save"):
        save(state if rank else None)
    save(state)
    found = smckpt.latest_checkpoint(folder)
    assert found is not None
    others = [
        told_by_sharding(f"{folder}/other{without}/part{rank}", groups[rank], without)
        for without in (0, 1)
    ]
    return found.groups, others, saved_unequally(f"{folder}/apart", groups[rank])


def saved_unequally(folder: str, group: Any) -> str:
    """One group makes a save without the other, in the queue of those that they make together."""
    said, rank = "", dist.get_rank()
    for save in range(2):
        together: dict[str, Any] = {} if save == rank == 0 else {"groups": [[0], [1]]}
        try:
            smckpt.save(
                {"w": torch.zeros(2)},
                checkpoint_id=f"{folder}/{'together' if together else 'alone'}/part{rank}",
                process_group=group,
                options=smckpt.SaveOptions(timeout=30, queue="apart", **together),
            )
        except errors.SaveFailedError as error:
            said += f"{error}\n"
    return said


def told_by_sharding(where: str, group: Any, without: int) -> tuple[str, float]:
    """One of two groups has no state in the first save; in the second it knows the other."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    state = taken(*model_on(mesh), smckpt.LOCAL)
    more: dict[str, Any] = {"process_group": group, "checkpoint_id": where}
    more["options"] = smckpt.SaveOptions(timeout=30, queue=f"{without}")
    began, said = time.monotonic(), ""
    for first in (True, False):
        try:
            smckpt.async_save(None if first and dist.get_rank() == without else state, **more)
        except errors.CheckpointError as error:
            said += str(error)
    smckpt.maybe_finalize_async_calls()
    return said, time.monotonic() - began


def test_parallel_state_tells_which_groups_make_a_step_also_to_a_rank_without_state(
    tmp_path: Path,
) -> None:
    for rank, (told, others, unequal) in enumerate(
        run_ranks(told_by_parallel_state, 2, str(tmp_path))
    ):
        assert told == ("part0", "part1")
        assert "or made it without this group" in unequal or rank == 0
        assert "group [0] made 1 saves in this queue without the other groups" in unequal
        for without, (said, took) in enumerate(others):
            given_up = f"rank {without} gave up save 0"
            assert ("nothing to save" if rank == without else given_up) in said
            assert took < seconds(25)
    for run in ("run", "other0", "other1"):
        assert len(list((tmp_path / run).glob("record-*"))) == 1
    assert smckpt.latest_checkpoint(tmp_path / "apart/together") is None  # two moments, no step


def host_leaves_last(folder: str) -> str:
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_default_store()
        store.set("rank 1 is slow", "yes")
    smckpt.async_save({"a": torch.full((4 << 20,), 1.0)}, checkpoint_id=f"{folder}/c")
    dist.destroy_process_group()
    return "left without finalizing"


def test_a_normal_exit_drains_on_all_ranks_though_one_of_them_hosts_the_store(
    tmp_path: Path,
) -> None:
    run_ranks(host_leaves_last, 2, str(tmp_path))  # an exit status that is not 0 fails the test
    found = smckpt.latest_checkpoint(tmp_path)
    assert found is not None


# -- any other mesh ---------------------------------------------------------------------------


def save_on_two(folder: str, kind: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, optimizer = model_on(mesh)
    if kind == "LOCAL":
        groups = [dist.new_group([0]), dist.new_group([1])]
        smckpt.save(
            taken(model, optimizer, smckpt.LOCAL, step=7),
            checkpoint_id=f"{folder}/c/part{dist.get_rank()}",
            process_group=groups[dist.get_rank()],
        )
    else:
        smckpt.save(taken(model, optimizer, smckpt.SHARDED, step=7), checkpoint_id=f"{folder}/c")
    return full(model, optimizer)


def load_in_one(folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    smckpt.init_optim_state(optimizer)
    target = taken(model, optimizer, smckpt.SHARDED, step=0)
    smckpt.load(target, checkpoint_id=f"{folder}/c")
    assert target["step"] == 7
    assert optimizer.param_groups[0]["lr"] == 1e-2
    out = {k: v.clone() for k, v in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            out[f"{name}/{key}"] = value.clone()
    return out


def save_of_two_forms(folder: str) -> None:
    inner = torch.ones(2)
    smckpt.save({"x": {"y": inner} if dist.get_rank() else inner}, checkpoint_id=folder)


def test_a_tensor_of_one_rank_that_another_one_has_in_parts_is_refused_by_a_load_of_all(
    tmp_path: Path,
) -> None:
    run_ranks(save_of_two_forms, 2, str(tmp_path))
    assert smckpt.verify_checkpoint(tmp_path).ok
    with pytest.raises(errors.StateError, match=r"x.*one rank has a tensor and another"):
        smckpt.load(None, checkpoint_id=str(tmp_path))


@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED"])
def test_a_checkpoint_of_two_ranks_loads_in_one_plain_process(tmp_path: Path, kind: str) -> None:
    expected = run_ranks(save_on_two, 2, str(tmp_path), kind)[0]
    assert same(load_in_one(str(tmp_path)), expected)


def save_local(folder: str, wrapper: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    if wrapper == "fsdp2":
        fully_shard(model)
    else:
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=wrapper == "fsdp1", device_id=cpu)
    smckpt.save(taken_model(model), checkpoint_id=f"{folder}/c")
    return whole


def taken_model(model: nn.Module) -> dict[str, Any]:
    with smckpt.sm_state_dict_type(model, smckpt.LOCAL):
        return {"model": model.state_dict(), "step": 7}


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1", "fsdp1 flat"])
def test_a_local_checkpoint_of_two_ranks_loads_in_one_process_without_a_context(
    tmp_path: Path, wrapper: str
) -> None:
    expected = run_ranks(save_local, 2, str(tmp_path), wrapper)[0]
    for as_dict in (True, False):
        model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
        target = {"model": model.state_dict() if as_dict else model, "step": 0}
        smckpt.load(target, checkpoint_id=tmp_path / "c", no_dist=as_dict)
        assert same(model.state_dict(), expected) and target["step"] == 7


def local_load_at_another_degree(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, optimizer = model_on(mesh, seed=3)
    before = full(model, optimizer)
    try:
        smckpt.load(taken(model, optimizer, smckpt.LOCAL, step=0), checkpoint_id=f"{folder}/c")
    except errors.TopologyError as error:
        assert same(full(model, optimizer), before)
        return str(error)
    return "loaded"


def save_unsharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    model, optimizer = model_on(mesh)
    smckpt.save(taken(model, optimizer, smckpt.LOCAL, step=7), checkpoint_id=f"{folder}/c")


def test_a_local_load_at_another_shard_degree_names_both(tmp_path: Path) -> None:
    run_ranks(save_unsharded, 1, str(tmp_path))
    for text in run_ranks(local_load_at_another_degree, 2, str(tmp_path)):
        assert "degree 1" in text and "2" in text
        assert "SHARDED" in text


# -- one rank fails ---------------------------------------------------------------------------


def one_rank_fails(folder: str, how: str) -> list[str]:
    rank = dist.get_rank()
    said: list[str] = []
    state: Any = {"a": torch.full((1000,), float(rank)), "step": 1}
    smckpt.save(state, checkpoint_id=f"{folder}/c")
    broken = state
    if rank == 1:
        broken = {
            "code": {"a": state["a"], "hook": print},
            "nothing": None,
            "other id": state,
        }[how]
    astray = f"{folder}/elsewhere" if rank == 1 and how == "other id" else f"{folder}/c"
    for attempt, where in ((broken, astray), (state, f"{folder}/c"), (state, f"{folder}/c")):
        try:
            smckpt.async_save(attempt, checkpoint_id=where)
            smckpt.maybe_finalize_async_calls()
            said.append("fine")
        except errors.CheckpointError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize(
    ("how", "word"), [("code", "hook"), ("nothing", "nothing"), ("other id", "checkpoint")]
)
def test_what_one_rank_cannot_save_is_raised_by_all_and_the_next_save_is_fine(
    tmp_path: Path, how: str, word: str
) -> None:
    zero, one = run_ranks(one_rank_fails, 2, str(tmp_path), how)
    assert zero[0].startswith("SaveFailedError") and word in zero[0]
    assert word in one[0]
    if how != "other id":
        assert "rank 1" in zero[0]
    assert zero[-1] == one[-1] == "fine"


def a_peer_dies(folder: str) -> str:
    smckpt.save({"a": torch.ones(10)}, checkpoint_id=f"{folder}/c")
    if dist.get_rank() == 1:
        dist.get_rank()
        return "left"  # never saves again, as a dead peer
    began = time.monotonic()
    try:
        smckpt.save(
            {"a": torch.ones(10)},
            checkpoint_id=f"{folder}/c",
            options=smckpt.SaveOptions(timeout=1),
        )
    except errors.SaveFailedError as error:
        assert time.monotonic() - began < seconds(60)
        return str(error)
    return "committed"


def test_a_peer_that_never_comes_is_named_within_the_limit(tmp_path: Path) -> None:
    assert "rank 1" in run_ranks(a_peer_dies, 2, str(tmp_path))[0]


def a_rank_comes_late(folder: str) -> list[str]:
    store, rank, said = dist.distributed_c10d._get_default_store(), dist.get_rank(), []
    if rank == 1:
        store.wait(["given up"])
    for number in range(3):
        options = smckpt.SaveOptions(timeout=seconds(60) if rank or number else 1)
        try:
            smckpt.save({"a": torch.ones(10)}, checkpoint_id=f"{folder}/c", options=options)
            said.append("fine")
        except errors.SaveFailedError as error:
            said.append(str(error))
        store.set("given up", "yes")
    return said


def test_a_rank_that_comes_after_a_save_was_given_up_hears_so_and_keeps_step(
    tmp_path: Path,
) -> None:
    zero, one = run_ranks(a_rank_comes_late, 2, str(tmp_path))
    assert "rank 1 did not answer" in zero[0]
    assert "rank 0 gave up save 0" in one[0]
    assert zero[1:] == one[1:] == ["fine", "fine"]


def the_worker_of_this_rank() -> int:
    from smckpt.engine import api

    [queue] = api._RUNTIME.queues(None, "default")
    return queue._worker.pid


def a_worker_hangs(folder: str) -> tuple[str, float]:
    said = "committed"
    smckpt.save({"a": torch.ones(10)}, checkpoint_id=f"{folder}/c")
    if dist.get_rank() == 1:
        os.kill(the_worker_of_this_rank(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        options = smckpt.SaveOptions(timeout=seconds(4))
        smckpt.save({"a": torch.zeros(10)}, checkpoint_id=f"{folder}/c", options=options)
    except errors.SaveFailedError as error:
        said = str(error)
    took = time.monotonic() - began
    dist.barrier()
    smckpt.save({"a": torch.full((10,), 2.0)}, checkpoint_id=f"{folder}/c")  # by a new worker
    return said, took


@pytest.mark.long
def test_a_worker_that_hangs_fails_the_save_on_both_ranks_within_the_limit(tmp_path: Path) -> None:
    for said, took in run_ranks(a_worker_hangs, 2, str(tmp_path)):
        assert "rank 1" in said
        assert took < seconds(60)
    assert value_in(tmp_path / "c") == 2


def killed_in_mid_save(folder: str) -> tuple[str, float, int]:
    """Rank 1 is killed when its worker has begun a file: of 32 MiB, which it does not finish. If
    the worker was too quick, the next save is tried. The last number is that of the last commit."""
    os.environ["SMCKPT_EXIT_TIMEOUT"] = "1"  # rank 0 waits no longer for rank 1's good-bye
    rank, where = dist.get_rank(), Path(folder, "c")
    options = smckpt.SaveOptions(timeout=seconds(10))
    state = {"a": torch.zeros(10), "big": torch.zeros(16 << 20)}
    smckpt.save(state, checkpoint_id=where, options=options)
    for turn in range(1, 30):
        dist.barrier()
        before = set(where.iterdir())
        began = time.monotonic()
        state["a"].fill_(turn)
        smckpt.async_save(state, checkpoint_id=where, options=options)
        if rank == 1:
            worker = the_worker_of_this_rank()
            while not set(where.glob("data-*-r00001-*")) - before:
                pass  # the window is short: a wait might miss it
            os.kill(worker, signal.SIGSTOP)
            # not before a write to a busy disk has ended
            os.waitid(os.P_PID, worker, os.WSTOPPED | os.WNOWAIT)
            if not set(where.glob("part-*-r00001*")) - before:
                Path(folder, "stopped").write_text(str(worker))
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(worker, signal.SIGCONT)
        try:
            smckpt.maybe_finalize_async_calls()
        except errors.SaveFailedError as error:
            # stopped, it cannot end with its trainer
            os.kill(int(Path(folder, "stopped").read_text()), signal.SIGKILL)
            return str(error), time.monotonic() - began, turn - 1
    return "committed", 0, 29


def test_a_rank_killed_in_mid_save_is_named_and_the_old_checkpoint_loads(tmp_path: Path) -> None:
    zero, _ = run_ranks(killed_in_mid_save, 2, str(tmp_path), killed=(1,))
    said, took, committed = zero
    assert "rank 1" in said
    assert took < seconds(60)
    target = {"a": torch.zeros(10)}
    smckpt.load(target, checkpoint_id=tmp_path / "c", check_keys_matched=False)
    assert target["a"].tolist() == [committed] * 10


def value_in(place: Path) -> float:
    target = {"a": torch.zeros(10)}
    smckpt.load(target, checkpoint_id=place)
    return float(target["a"][0])


# -- alone, and collective-free -----------------------------------------------------------------


def one_takes_while_the_other_sleeps(folder: str) -> float:
    from tests.support.collectives import count_collectives

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, optimizer = model_on(mesh)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait(["rank 0 staged"])
    with count_collectives() as counted:
        smckpt.async_save(taken(model, optimizer, smckpt.LOCAL), checkpoint_id=f"{folder}/c")
        if dist.get_rank() == 0:
            store.set("rank 0 staged", "yes")
        smckpt.maybe_finalize_async_calls()
        target = taken(model, optimizer, smckpt.LOCAL)
        smckpt.load(target, checkpoint_id=f"{folder}/c")
    return counted.total


def test_one_rank_stages_while_its_peer_sleeps_and_no_collective_runs(tmp_path: Path) -> None:
    assert run_ranks(one_takes_while_the_other_sleeps, 2, str(tmp_path)) == [0, 0]


# -- who is who -------------------------------------------------------------------------------


def membership(folder: str) -> Any:
    first = dist.new_group([0])
    if dist.get_rank() == 1:
        state = {"a": torch.ones(1)}
        assert smckpt.async_save(state, checkpoint_id="x", process_group=first) is None
        assert smckpt.load(state, checkpoint_id="x", process_group=first) is None
        return smckpt.maybe_finalize_async_calls(process_group=first)
    handle = smckpt.async_save(
        {"a": torch.ones(1)},
        checkpoint_id=f"{folder}/c",
        process_group=first,
        options=smckpt.SaveOptions(groups=[[0]]),
    )
    return handle.number


def equal_group_finds_the_save(folder: str) -> list[int]:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    smckpt.async_save({"a": torch.ones(1)}, checkpoint_id=f"{folder}/c", process_group=groups[0])
    return smckpt.maybe_finalize_async_calls(process_group=groups[1])


def test_no_member_returns_at_once_and_an_equal_group_finds_the_save(tmp_path: Path) -> None:
    assert run_ranks(equal_group_finds_the_save, 2, str(tmp_path / "e")) == [[0], [0]]
    assert run_ranks(membership, 2, str(tmp_path / "m")) == [0, []]


def same_id_for_two_groups(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, optimizer = model_on(mesh)
    groups, rank = [dist.new_group([0]), dist.new_group([1])], dist.get_rank()

    def save(state: dict[str, Any], where: str) -> str:
        try:
            smckpt.save(state, checkpoint_id=f"{folder}/{where}", process_group=groups[rank])
        except errors.SaveFailedError as error:
            return str(error)
        return "committed"

    said = [save(taken(model, optimizer, smckpt.LOCAL), "sharded")]
    # Where nothing tells that the groups belong together, one may come long after the other.
    for turn in range(2):
        if turn == rank:
            said.append(save({"rank": rank, "stage": torch.ones(2)}, "plain"))
        dist.barrier()
    return said


def test_two_groups_with_one_checkpoint_id_are_refused(tmp_path: Path) -> None:
    first, second = run_ranks(same_id_for_two_groups, 2, str(tmp_path))
    for text in (first[0], second[0], second[1]):
        assert "one checkpoint_id" in text
    assert smckpt.latest_checkpoint(tmp_path / "sharded") is None
    assert first[1] == "committed"
    target = {"rank": -1, "stage": torch.zeros(2)}
    smckpt.load(target, checkpoint_id=tmp_path / "plain")
    assert target["rank"] == 0
