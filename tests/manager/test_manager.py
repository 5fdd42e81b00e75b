"""`CheckpointManager` on real ranks: what is saved comes back, also when the newest is bad."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from smckpt import (
    LOCAL,
    CheckpointManager,
    ParallelState,
    SaveFailedError,
    SaveOptions,
    find_checkpoints,
    verify_checkpoint,
)
from smckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    KeysMismatchError,
    UsageError,
)
from smckpt.manager.retention import Best, Every
from smckpt.manager.state import taken
from tests.support.launch import run_ranks


class Loader:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at} if self.at else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state.get("at", 0)


def objects(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = Loader()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return {
        "model": model,
        "training": {"optimizer": optimizer, "others": [scheduler, loader, scaler]},
        "seen": 0,
        "history": {"loss": [1.0]},
    }


def train(state: dict[str, Any]) -> float:
    optimizer = state["training"]["optimizer"]
    scheduler, loader, scaler = state["training"]["others"]
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    loss = (state["model"](torch.ones(2, 5) * noise) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
    loader.at += 1
    state["seen"] += 2
    state["history"]["loss"].append(loss.item())
    return loss.item()


# -- one process ---------------------------------------------------------------------------------


def test_everything_goes_on_where_it_was(tmp_path: Path) -> None:
    state = objects(0)
    with CheckpointManager(tmp_path, interval=3) as manager:
        assert manager.restore(into=state) == 0
        for step in range(1, 4):
            train(state)
            if manager.should_save(step):
                manager.save(step, state)
        expected = [train(state) for _ in range(3)]
    other = objects(7)
    kept = other["history"]
    with CheckpointManager(tmp_path, interval=3) as manager:
        assert manager.restore(into=other) == 3
        assert [train(other) for _ in range(3)] == expected
    assert other["history"] is kept and len(kept["loss"]) == 7
    assert other["seen"] == state["seen"] == 12
    assert other["training"]["others"][1].at == 6
    scales = [one["training"]["others"][2].state_dict() for one in (other, state)]
    assert scales[0] == scales[1] and scales[0]["scale"] == 64.0  # doubled after each two steps
    for ours, theirs in zip(other["model"].parameters(), state["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def trains(of: str, seed: int, wrap: Any = lambda model: model) -> dict[str, Any]:
    """Two models, a free parameter, and an optimizer of some of them."""
    torch.manual_seed(seed)
    actor, critic = wrap(torch.nn.Linear(4, 4)), wrap(torch.nn.Linear(4, 2))
    alpha = torch.nn.Parameter(torch.full((3,), float(seed)))
    parts = {
        "both models": [*critic.parameters(), *actor.parameters()],
        "a model and none": [alpha, *critic.parameters()],
        "no model": [alpha],
        "no model, none saved": [alpha],
    }
    state = {"models": [actor, critic], "alpha": alpha, "optim": torch.optim.AdamW(parts[of], 0.1)}
    if of == "no model, none saved":
        del state["models"]
    return state


def stepped(state: dict[str, Any]) -> list[Any]:
    """The values after a step."""
    optimizer = state["optim"]
    for parameter in (trained := optimizer.param_groups[0]["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = [value for each in trained for value in (each, *optimizer.state[each].values())]
    return [getattr(each, "full_tensor", each.detach)().tolist() for each in found]


OF = ("both models", "a model and none", "no model", "no model, none saved")


@pytest.mark.parametrize("of", OF)
def test_an_optimizer_comes_back_in_a_new_process_whatever_it_trains(
    tmp_path: Path, of: str
) -> None:
    state, other = trains(of, 1), trains(of, 2)
    kept = taken(state, LOCAL)["optim"] is state["optim"]
    assert kept == (of != "a model and none")  # the form that older checkpoints have
    stepped(state)
    with CheckpointManager(tmp_path, interval=1) as manager:
        manager.save(1, state)
    with CheckpointManager(tmp_path, interval=1) as manager:
        assert manager.restore(into=other) == 1
    assert stepped(other) == stepped(state)


def test_an_older_checkpoint_lacks_newer_keys_and_they_stay_as_they_are(tmp_path: Path) -> None:
    old = objects(0)
    with CheckpointManager(tmp_path) as manager:
        train(old)
        manager.save(1, old)
    new = {**objects(1), "samples": 7, "ema": torch.nn.Linear(2, 2), "counter": Loader()}
    new["counter"].at = 3
    ema = new["ema"].weight.detach().clone()
    del new["seen"]  # and one that the program no longer has
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(KeysMismatchError, match="ema"):
            manager.restore(into=new)
        assert manager.restore(into=new, check_keys_matched=False) == 1
    assert (new["samples"], new["counter"].at) == (7, 3) and "seen" not in new
    assert torch.equal(new["ema"].weight, ema)
    assert torch.equal(new["model"].weight, old["model"].weight)
    assert new["training"]["others"][1].at == 1


def test_metrics_are_recorded_and_the_best_is_found(tmp_path: Path) -> None:
    state = objects(0)
    rules: dict[str, Any] = {"keep_last_n": 1, "keep": [Every(10), Best("loss")]}
    first = torch.tensor(2.0, requires_grad=True)  # as a loss is
    with CheckpointManager(tmp_path, **rules) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, loss in ((1, first), (2, 1.0), (3, float("nan")), (4, np.float32(5))):
            manager.save(step, state, metrics={"loss": loss}, metadata={"note": "x"}).wait()
        best = manager.best()
    assert best is not None and best.step == 2
    with CheckpointManager(tmp_path, **rules) as manager:
        found = manager.all()
        assert manager.best() == best
        assert manager.latest() == found[-1]
    assert [one.step for one in found] == [2, 4]
    assert [one.metadata["metrics"] for one in found] == [{"loss": 1.0}, {"loss": 5.0}]
    assert found[0].metadata["note"] == "x"


def test_the_run_that_goes_on_deletes_what_its_predecessor_saved(tmp_path: Path) -> None:
    state = objects(0)
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state)
    with CheckpointManager(tmp_path, keep_last_n=2) as manager:  # another run, as it restored none
        manager.save(4, state)
    assert [one.step for one in find_checkpoints(tmp_path)] == [1, 2, 3, 4]
    with CheckpointManager(tmp_path, keep_last_n=2) as manager:
        assert manager.restore(into=state) == 4
        manager.save(5, state)
        manager.save(6, state)
    assert [one.step for one in find_checkpoints(tmp_path)] == [1, 2, 3, 5, 6]


def test_failures_that_are_allowed_end_no_run(tmp_path: Path) -> None:
    state = objects(0)
    (tmp_path / "1").write_text("in the way")
    (tmp_path / "2").write_text("in the way")
    patient = SaveOptions(timeout=100, max_consecutive_failures=2)
    with CheckpointManager(tmp_path, options=patient) as manager:
        for step in (1, 2, 3):
            manager.save(step, state)
    assert [one.step for one in find_checkpoints(tmp_path)] == [3]


def test_a_failed_save_is_told_and_nothing_is_deleted(tmp_path: Path) -> None:
    state = objects(0)
    manager = CheckpointManager(tmp_path, keep_last_n=1)
    manager.save(1, state).wait()
    (tmp_path / "2").write_text("in the way")
    with pytest.raises(SaveFailedError):
        manager.save(2, state)
        manager.close()
    assert [one.step for one in find_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0}, {"interval": 2.5}, {"interval": "often"},
        {"interval": datetime.timedelta(0)}, {"root": "run/{epoch}"}, {"root": "run/{step:8d}"},
        {"options": SaveOptions(queue="mine")},  # the manager has a queue of its own
        {"keep_last_n": -1}, {"keep": [Every(2)]}, {"keep_last_n": 1, "keep": Every(2)},
        {"keep_last_n": 1, "keep": [Every]}, {"keep_last_n": 1, "keep": [1000]},
        {"signals": "SIGTERM"}, {"signals": ["SIGMUND"]},
    ],
)  # fmt: skip
def test_an_argument_that_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CheckpointManager(**{"root": tmp_path, **wrong})


def test_a_manager_has_few_arguments() -> None:
    assert len(inspect.signature(CheckpointManager).parameters) <= 10


def test_a_call_that_cannot_be_is_refused(tmp_path: Path) -> None:
    state = objects(0)
    with CheckpointManager(tmp_path) as manager:
        for step, given, more in (
            (-1, state, {}),
            (1, {}, {}),
            (1, {**state, "manager": 1}, {}),
            (1, state, {"metrics": {"loss": "low"}}),
            (1, state, {"metadata": {"metrics": 1}}),
        ):
            with pytest.raises(UsageError):
                manager.save(step, given, **more)
        with pytest.raises(UsageError, match="needs a metric"):
            manager.best()
        manager.save(2, state)  # and it goes on
    assert [one.step for one in find_checkpoints(tmp_path)] == [2]
    with pytest.raises(UsageError, match="closed"):
        manager.save(3, state)


def damage(place: str | Path) -> None:
    """One bit of the first data file."""
    data = sorted(Path(place).rglob("data-*.safetensors"))[0]
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(content)


def test_where_nothing_loads_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    state = objects(0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.save(2, state)
    damage(tmp_path / "1")
    next((tmp_path / "2").glob("manifest-*")).write_text("{}")
    with CheckpointManager(tmp_path) as manager, pytest.raises(CorruptCheckpointError) as told:
        manager.restore(into=state)
    assert "step 2" in str(told.value) and "step 1" in str(told.value)


def test_a_program_that_does_not_fit_is_no_reason_to_take_an_older_step(tmp_path: Path) -> None:
    state = objects(0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {**state, "more": torch.ones(3)})
        manager.save(2, state)
    with CheckpointManager(tmp_path) as manager, pytest.raises(KeysMismatchError):
        manager.restore(into={**state, "more": torch.ones(3)})


# -- ranks ---------------------------------------------------------------------------------------


def sharded(replicas: int, seed: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shards = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 6))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(100 * seed + dist.get_rank())
    return {"model": model, "optimizer": optimizer, "rank": dist.get_rank()}


def sharded_step(state: dict[str, Any]) -> float:
    loss = (state["model"](torch.rand(4, 6)) ** 2).mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return float(loss)


def save_steps(root: str, replicas: int, keep: int | None) -> list[float]:
    """Steps 1 to 4, saved after each; the losses of the two that follow step 3."""
    state = sharded(replicas, 1)
    losses = []
    with CheckpointManager(root, keep_last_n=keep) as manager:
        for step in (1, 2, 3, 4):
            losses.append(sharded_step(state))
            manager.save(step, state, metrics={"loss": losses[-1]})
        losses.append(sharded_step(state))
    return losses[3:]


def go_on(root: str, replicas: int, keep: int | None) -> tuple[int, list[float], int, list[Any]]:
    state = sharded(replicas, 2)
    with CheckpointManager(root, keep_last_n=keep) as manager:
        step = manager.restore(into=state)
        losses = [sharded_step(state), sharded_step(state)]
        mine = state["rank"]
        manager.save(step + 1, state)
        manager.save(step + 2, state)
        found = manager.all()
    return step, losses, mine, [one.step for one in found]


def test_the_newest_is_bad_and_all_ranks_go_on_from_the_one_before(tmp_path: Path) -> None:
    root = tmp_path / "run"
    expected = run_ranks(save_steps, 4, str(root), 2, 2)
    assert sorted(os.listdir(root)) == ["3", "4"]
    assert {"shard0", "shard1"} < set(os.listdir(root / "4"))
    shutil.copytree(root, tmp_path / "smaller")
    damage(root / "4" / "shard1")
    told = run_ranks(go_on, 4, str(root), 2, 1)
    for rank, (step, losses, mine, _) in enumerate(told):
        assert (step, losses, mine) == (3, expected[rank], rank)
    assert [one.step for one in find_checkpoints(root)] == [5]
    assert verify_checkpoint(root / "5").ok
    # with fewer ranks
    told = run_ranks(go_on, 2, str(tmp_path / "smaller"), 1, None)
    assert [each[0] for each in told] == [4, 4]
    assert told[0][1] != told[1][1]  # each rank has random numbers of its own


def of_sharded(root: str, loads: bool, flat: bool) -> dict[str, list[Any]]:
    def wrap(model: Any) -> Any:
        kind = FullyShardedDataParallel
        return kind(model, device_id=torch.device("cpu")) if flat else fully_shard(model)

    values = {}
    for of in ("both models", "no model"):
        state = trains(of, 2 + loads, wrap)
        with CheckpointManager(f"{root}/{of}", interval=1) as manager:
            if loads:
                assert manager.restore(into=state) == 1
            else:
                stepped(state)
                manager.save(1, state)
        values[of] = stepped(state)
    return values


@pytest.mark.parametrize(("flat", "ranks"), [(False, 1), (True, 2)])
def test_optimizers_of_two_sharded_models_come_back(tmp_path: Path, flat: bool, ranks: int) -> None:
    saved = run_ranks(of_sharded, 2, str(tmp_path), False, flat)
    assert run_ranks(of_sharded, ranks, str(tmp_path), True, flat) == saved[:ranks]


def sliced(degrees: Any, seed: int) -> dict[str, Any]:
    """Plain tensors, others on each tensor-parallel rank and the same on its replicas."""
    torch.manual_seed(10 * seed + degrees.tp_rank)
    model = torch.nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def save_slices(root: str) -> list[Any]:
    degrees = ParallelState(4, tensor_parallel_degree=2, hybrid_shard_degree=1)
    state = sliced(degrees, 1)
    with CheckpointManager(root, options=SaveOptions(parallel_state=degrees)) as manager:
        manager.save(1, state)
    return state["model"].weight.tolist()


def restore_slices(root: str, replicas: int, ranks: int) -> list[Any] | str:
    degrees = ParallelState(ranks, tensor_parallel_degree=ranks // replicas, hybrid_shard_degree=1)
    state = sliced(degrees, 2)
    with CheckpointManager(root, options=SaveOptions(parallel_state=degrees)) as manager:
        try:
            assert manager.restore(into=state) == 1
        except CheckpointError as error:
            return str(error)
        return state["model"].weight.tolist()


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ("{step}", {"tp0", "tp1"}),
        pytest.param(
            "{step}/tp{tp}_ep{ep}_fsdp{fsdp}",
            {"tp0_ep0_fsdp0", "tp1_ep0_fsdp0"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_ranks_that_hold_plain_slices_save_with_their_replicas_by_the_degrees(
    tmp_path: Path, names: str, groups: set[str]
) -> None:
    root = f"{tmp_path}/run/{names}"
    saved = run_ranks(save_slices, 4, root)
    assert saved[0] != saved[1] and saved[:2] == saved[2:]
    assert groups < set(os.listdir(tmp_path / "run" / "1"))
    assert run_ranks(restore_slices, 4, root, 2, 4) == saved
    assert run_ranks(restore_slices, 2, root, 1, 2) == saved[:2]  # without replicas
    if names != "{step}":  # a run that names its groups otherwise
        assert run_ranks(restore_slices, 4, str(tmp_path / "run"), 2, 4) == saved
    for told in run_ranks(restore_slices, 4, root, 4, 4):  # without slices
        assert "build the model with the degrees of the checkpoint" in told


SMP = "llama_v2-{step}steps/tp{tp}_ep{ep}_fsdp{fsdp}"


def save_as_smp(root: str) -> list[float]:
    """Each rank is a group; the losses of the two steps that follow step 1."""
    state = sharded(1, 1)
    with CheckpointManager(f"{root}/{SMP}", keep_last_n=1) as manager:
        manager.save(0, state).wait()
        sharded_step(state)
        manager.save(1, state)
        losses = [sharded_step(state), sharded_step(state)]
        with pytest.raises(UsageError, match=r"differ in \['fsdp'\] too"):
            CheckpointManager(root + "/other/{step}/tp{tp}").save(1, state)
    return losses


def go_on_as_smp(root: str) -> list[float]:
    state = sharded(1, 2)
    with CheckpointManager(f"{root}/{SMP}") as manager:
        assert manager.restore(into=state) == 1
        losses = [sharded_step(state), sharded_step(state)]
        manager.save(3, state)
    return losses


@pytest.mark.long
def test_groups_are_named_as_in_smps_published_example(tmp_path: Path) -> None:
    saved = run_ranks(save_as_smp, 2, str(tmp_path))
    step = tmp_path / "llama_v2-1steps"
    assert {"tp0_ep0_fsdp0", "tp0_ep0_fsdp1"} < set(os.listdir(step))
    assert not (tmp_path / "llama_v2-0steps").exists()  # retention knows these names
    assert run_ranks(go_on_as_smp, 2, str(tmp_path)) == saved
    assert [one.step for one in find_checkpoints(tmp_path)] == [1, 3]
    assert verify_checkpoint(step).ok


def test_the_degrees_of_another_job_are_refused(tmp_path: Path) -> None:
    state = objects(0)
    with (
        CheckpointManager(
            tmp_path, options=SaveOptions(parallel_state=ParallelState(8, rank=0))
        ) as manager,
        pytest.raises(UsageError, match="8 ranks, the job 1"),
    ):
        manager.save(1, state)


def one_rank_cannot(root: str) -> list[str]:
    import torch.distributed as dist

    state, rank = sharded(2, 1), dist.get_rank()
    told = []
    manager = CheckpointManager(root, timeout=60)
    for step, given in (
        (1, {**state, "model": 7} if rank == 2 else state),  # then the groups are not known yet
        (2, state),
        (-1 if rank == 3 else 3, state),
        (4, {**state, "model": 7, "optimizer": object()} if rank == 2 else state),
    ):
        try:
            manager.save(step, given).wait()
            told.append("saved")
        except Exception as error:
            told.append(str(error))
    with contextlib.suppress(SaveFailedError):  # told already
        manager.close()
    return told


def test_what_one_rank_cannot_save_all_ranks_hear_of(tmp_path: Path) -> None:
    for one, two, three, four in run_ranks(one_rank_cannot, 4, str(tmp_path)):
        assert "sharded differently" in one
        assert two == "saved"
        assert "step is -1" in three
        assert "optimizer" in four
    assert [one.step for one in find_checkpoints(tmp_path)] == [2]
