"""What a manager does before its first save, so that the save need not wait for it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import smckpt
from smckpt import CheckpointManager, find_checkpoints
from smckpt.engine.api import _RUNTIME
from smckpt.engine.saving.save import Saver
from smckpt.errors import StateError
from smckpt.manager.manager import QUEUE
from tests.engine.test_prewarm import arenas, prewarmed
from tests.manager.test_manager import objects
from tests.support.launch import run_ranks
from tests.support.limits import seconds


def test_the_worker_of_the_first_save_starts_while_the_run_restores(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, signals=()) as manager:
        assert not _RUNTIME.queues(None, QUEUE)
        manager.restore(into=objects(0))
        (queue,) = _RUNTIME.queues(None, QUEUE)
        worker = queue._worker  # type: ignore[attr-defined]
        first = worker.pid
        assert worker.alive
        manager.save(1, objects(0)).wait()
        assert worker.pid == first
    assert not worker.alive


FIRST = """
import sys, torch
from smckpt import CheckpointManager
with CheckpointManager(sys.argv[1], signals=()) as manager:
    manager.restore(into={"w": torch.ones(3)})
    before = set(sys.modules)
    manager.save(1, {"w": torch.ones(3)}).wait()
    print(sorted(set(sys.modules) - before))
"""


def test_the_first_save_imports_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
    assert ended.stdout == "[]\n", ended.stdout + ended.stderr


def connections() -> int:
    """Those of this rank to the job's store."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            found += one.getpeername()[1:2] == (int(os.environ["MASTER_PORT"]),)
    return found


def first_and_last(folder: str) -> tuple[bool, int]:
    """Whether the ranks meet before the first save; connections that stay."""
    before = connections()
    with CheckpointManager(folder, signals=()) as manager:
        manager.restore(into=objects(0))
        (queue,) = _RUNTIME.queues(None, QUEUE)
        until = time.monotonic() + seconds(60)
        membership = queue.membership  # type: ignore[attr-defined]
        while not (met := bool(membership._meetings)) and time.monotonic() < until:
            time.sleep(0.01)
        manager.save(1, objects(0)).wait()
        manager.restore(into=objects(0))
        return met, connections() - before


def test_the_ranks_meet_before_the_first_save_over_one_connection_a_thread(tmp_path: Path) -> None:
    found = run_ranks(first_and_last, 2, str(tmp_path))
    assert [met for met, _ in found] == [True, True]
    assert found[1][1] == 3  # of two threads, and the one on which nobody waits


def cut_short(folder: str) -> None:
    """A life that is killed as soon as it has asked for a second save."""
    with CheckpointManager(folder, signals=()) as manager:
        step = manager.restore(into=objects(0))
        for number in (step + 1, step + 2):
            manager.save(number, objects(number))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_life_that_is_killed_at_its_second_save_has_gone_forward(
    tmp_path: Path, world: int
) -> None:
    begun = []
    for _ in range(3):
        run_ranks(cut_short, world, str(tmp_path), killed=tuple(range(world)))
        begun.append(max(one.step or 0 for one in find_checkpoints(tmp_path)))
    assert begun[0] >= 1 and begun[1] > begun[0] and begun[2] > begun[1], begun


def trained(step: int) -> dict[str, Any]:
    state = objects(step)
    state["model"](torch.ones(2, 5)).sum().backward()
    state["training"]["optimizer"].step()
    return {**state, "large": torch.full((1 << 18,), float(step))}


class Mean:
    """A mean of the weights, as users keep one."""

    def __init__(self) -> None:
        self.weights = torch.zeros(1 << 18)
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])


def before_and_after(folder: str, saves: int) -> tuple[dict[int, int], dict[int, int]]:
    """The arenas after a restore, and after the saves."""
    with CheckpointManager(folder, signals=()) as manager:
        step = manager.restore(into=trained(0))
        before = prewarmed(QUEUE)
        for number in range(step + 1, step + 1 + saves):
            manager.save(number, trained(number)).wait()
        return before, arenas()


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_a_restored_run_has_the_memory_of_its_first_save_before_the_save(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    first, again = ranks
    for before, after in run_ranks(before_and_after, first, str(tmp_path), 1):
        assert not before  # the state of a fresh optimizer is not there yet
        assert len(after) == 1
    for before, after in run_ranks(before_and_after, again, str(tmp_path), 2):
        assert sum(before.values()) >= 4 << 18 // again  # the kernel has provided the pages
        assert after == before  # and the saves took no others


def begun(folder: str) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """The arenas of a new run before the first step, after it, and after the saves."""
    with CheckpointManager(folder, signals=(), interval=3) as manager:
        state = {**objects(0), "large": torch.zeros(2 << 18)}
        assert manager.restore(into=state) == 0
        found = []
        for step in range(1, 7):
            if step > 1:
                state["model"](torch.ones(2, 5)).sum().backward()
                state["training"]["optimizer"].step()
            if manager.should_save(step):
                manager.save(step, state).wait()
            found.append(prewarmed(QUEUE))
        return found[0], found[1], found[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_run_gets_the_memory_of_its_first_save_after_the_first_step(
    tmp_path: Path, ranks: int
) -> None:
    for before, after, last in run_ranks(begun, ranks, str(tmp_path)):
        assert not before  # an optimizer that has not stepped has no state
        assert sum(after.values()) >= (8 << 18) // ranks
        assert last == after


class Computes:
    """An object that computes what it gives, as an average of weights does."""

    def state_dict(self) -> dict[str, Any]:
        weights = torch.ones(2, 2, requires_grad=True)
        return {"product": weights @ weights, "gradients": (weights * 1).requires_grad}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_first_save_takes_objects_as_the_others_do(tmp_path: Path) -> None:
    state = {"computes": Computes(), **objects(0)}
    with CheckpointManager(tmp_path, signals=()) as manager, torch.autocast("cpu", torch.bfloat16):
        manager.restore(into=state)
        for step in (1, 2):
            manager.save(step, state).wait()
    for step in (1, 2):
        found = smckpt.load(checkpoint_id=tmp_path / str(step))["computes"]
        assert (found["product"].dtype, found["gradients"]) == (torch.bfloat16, True), step


@pytest.mark.parametrize("restored", [False, True])
def test_a_first_save_takes_the_state_of_each_object_once(tmp_path: Path, restored: bool) -> None:
    state = trained(1) | {"mean": Mean()}
    if restored:
        with CheckpointManager(tmp_path, signals=()) as manager:
            manager.save(1, state).wait()
    with CheckpointManager(tmp_path, signals=()) as manager:
        assert manager.restore(into=state) == int(restored)
        manager.should_save(2)
        before = state["mean"].asked
        manager.save(2, state).wait()
        assert state["mean"].asked == before + 1


class Recipe:
    """torch's recipe for an application's state, whose `state_dict` steps a fresh optimizer."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.both = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self.both)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(*self.both, model_state_dict=model, optim_state_dict=optimizer)


@pytest.mark.parametrize("beside", [False, True])
def test_an_object_of_the_user_is_not_asked_before_the_first_save(
    tmp_path: Path, beside: bool
) -> None:
    """A scaler may leave out the first step, and a program may ask before it steps."""
    trained = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        recipe = OrderedDict(recipe=[Recipe(model, optimizer)])
        state: dict[str, Any] = {"parts": deque([{"recipe": recipe}])}
        if beside:  # steps first
            other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
            state["other"] = other
        with CheckpointManager(tmp_path, signals=(), interval=100) as manager:
            assert manager.restore(into=state) == 0
            for step in range(6):
                model(torch.ones(1, 4)).sum().backward()
                if beside:
                    other.param_groups[0]["params"][0].grad = torch.ones(2)
                    other.step()
                if step:
                    optimizer.step()
                optimizer.zero_grad()
                if asks:
                    assert not manager.should_save(step + 1)
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


class Gathered:
    """An object that has to ask the other ranks for its state."""

    def state_dict(self) -> dict[str, Any]:
        everyone = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.ones(1))
        return {"everyone": torch.cat(everyone)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def of_a_frozen_stage(folder: str) -> list[bool]:
    model = torch.nn.Linear(4, 4).requires_grad_(dist.get_rank() == 1)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    stages = smckpt.ParallelState(2, pipeline_parallel_degree=2)
    options, due = smckpt.SaveOptions(parallel_state=stages), []
    with CheckpointManager(folder, signals=(), interval=3, options=options) as manager:
        manager.restore(into={**state, "gathered": Gathered()})
        for step in range(1, 5):
            if dist.get_rank() == 1:
                model(torch.ones(2, 4)).sum().backward()
            state["optimizer"].step()  # type: ignore[operator]
            due.append(manager.should_save(step))
            dist.all_reduce(torch.ones(1))  # the training's
            if due[-1]:
                manager.save(step, {**state, "gathered": Gathered()}).wait()
    return due


def test_ranks_of_which_one_has_no_state_yet_ask_no_object_that_gathers(tmp_path: Path) -> None:
    assert (
        run_ranks(of_a_frozen_stage, 2, str(tmp_path), timeout=60)
        == [[False, False, True, False]] * 2
    )


def test_a_program_without_an_optimizer_gets_no_memory(tmp_path: Path) -> None:
    """It only evaluates."""
    others, model = arenas(), torch.nn.Linear(512, 512)
    with CheckpointManager(tmp_path, signals=()) as manager:
        manager.save(1, {"model": model}).wait()
    with CheckpointManager(tmp_path, signals=()) as manager:
        assert manager.restore(into={"model": model}) == 1
        assert prewarmed(QUEUE) == others


def test_a_state_whose_size_nobody_finds_is_restored_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = objects(0)
    with CheckpointManager(tmp_path, signals=()) as manager:
        manager.save(1, state).wait()

    def refuse(*_: Any) -> int:
        raise StateError("two tensors have one name", remedy="rename one")

    monkeypatch.setattr(Saver, "needs", refuse)
    again = objects(1)
    with CheckpointManager(tmp_path, signals=()) as manager:
        assert manager.restore(into=again) == 1
    assert torch.equal(again["model"].weight, state["model"].weight)
