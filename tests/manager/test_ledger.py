"""A ledger of samples: over kills and other numbers of ranks each is taken once an epoch. And what
random generators draw after a restore with another number of ranks."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smckpt import CheckpointManager
from tests.support import child
from tests.support.interpreters import torchtune
from tests.support.launch import ROOT, run_ranks

SIZE, BATCH, EPOCHS = 50, 2, 2


def printed() -> Any:
    """The class in docs/manager.md, as printed."""
    page = (ROOT / "docs" / "manager.md").read_text()
    (code,) = (
        code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "class Samples" in code
    )
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    return names["Samples"]


def train(folder: str, dies: int) -> int:
    """Train to the end, or until step `dies`; the step at which it began.

    Each rank writes (step, number of ranks, samples) to its ledger before the step is saved.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Linear(12, 12)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters())
    samples = printed()(SIZE, BATCH)
    state = {"model": model, "optimizer": optimizer, "samples": samples}
    ledger = Path(folder, f"ledger-{ranks}-{rank}.jsonl")
    with CheckpointManager(Path(folder, "run"), interval=3) as manager:
        step = began = manager.restore(into=state)
        while samples.taken < EPOCHS * SIZE:
            mine = samples.take(rank, ranks)
            batch = torch.tensor(mine, dtype=torch.float32).sum().expand(1, 12)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            with ledger.open("a") as file:
                file.write(json.dumps([step, mine]) + "\n")
            if step == dies:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if manager.should_save(step):
                manager.save(step, state).wait()
    return began


def rows(folder: Path, ranks: int) -> list[tuple[int, list[int]]]:
    return [
        (step, taken)
        for path in folder.glob(f"ledger-{ranks}-*.jsonl")
        for step, taken in map(json.loads, path.read_text().splitlines())
    ]


@pytest.mark.long
def test_over_kills_and_changes_of_world_every_sample_is_taken_once_an_epoch(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path)
    assert run_ranks(train, 4, folder, 5, killed=(0, 1, 2, 3)) == [None] * 4
    assert run_ranks(train, 2, folder, 10, killed=(0, 1)) == [None] * 2
    began = run_ranks(train, 3, folder, 0)
    assert began == [9, 9, 9]
    # what a later job did again was never saved by the one before
    kept = [taken for step, taken in rows(tmp_path, 4) if step <= 3]
    kept += [taken for step, taken in rows(tmp_path, 2) if 3 < step <= 9]
    kept += [taken for _, taken in rows(tmp_path, 3)]
    lost = [taken for step, taken in rows(tmp_path, 4) if step > 3]
    assert lost and min(step for step, _ in rows(tmp_path, 2)) == 4
    assert Counter(number for taken in kept for number in taken) == dict.fromkeys(
        range(SIZE), EPOCHS
    )


# -- positions that each rank counts for itself ------------------------------------------------

LOADERS = ROOT / "tests" / "support" / "loader_run.py"


def read(folder: Path, kind: str, ranks: int, stop: int = 0, *more: str) -> list[dict[str, Any]]:
    """What each rank told, by rank. torchdata and datasets are among torchtune's references."""
    done = child.script(
        LOADERS, str(folder), kind, str(stop), *more, ranks=ranks, python=torchtune(), torchrun=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = sorted(child.told(done), key=lambda rank: rank.get("rank", 0))
    assert len(told) == ranks
    return told


def exact(folder: Path, kind: str) -> None:
    """Two ranks end at step 5 with step 3 saved; the next two read what is left, and no more."""
    read(folder, kind, 2, 5)
    shutil.copytree(folder, folder.with_name("other"))
    whole = read(folder.with_name("whole"), kind, 2)
    resumed = read(folder, kind, 2)
    for rank, its in enumerate(resumed):
        assert its["began"] == 3
        after = {step: taken for step, taken in whole[rank]["ledger"].items() if int(step) > 3}
        assert its["ledger"] == after and len(after) == 9
    every = [n for rank in whole for taken in rank["ledger"].values() for n in taken]
    assert sorted(every) == list(range(48))


@pytest.mark.long
def test_torchdatas_loader_goes_on_exactly_and_is_refused_by_name_for_other_ranks(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    exact(folder, "map")
    (refused,) = read(tmp_path / "other", "map", 1)
    assert refused["refused"] == "TopologyError"
    for word in ("data.position", "StatefulDataLoader", "2 ranks have saved it", "class Samples"):
        assert word in refused["text"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["map2", "iterable", "loaded iterable"])
def test_workers_and_datasets_that_are_read_in_order_go_on_exactly_too(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "run"
    exact(folder, kind)
    (refused,) = read(tmp_path / "other", kind, 1)
    assert refused["refused"] == "TopologyError" and "data.position" in refused["text"]
    (without,) = read(tmp_path / "other", kind, 1, 4, "without")
    assert without["began"] == 3


# -- random generators -------------------------------------------------------------------------


def drawn(folder: str) -> list[list[float]]:
    """Two draws of each generator, after each of two restores."""
    found = []
    for _ in range(2):
        with CheckpointManager(Path(folder, "run")) as manager:
            assert manager.restore(into={"value": 0}) == 1
        found.append(
            [
                *(random.random(), random.random()),
                *map(float, np.random.rand(2)),
                *torch.rand(2, dtype=torch.float64).tolist(),
            ]
        )
    return found


def test_with_other_ranks_each_generator_of_each_rank_draws_its_own_numbers_again_and_again(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"value": 1}).wait()
    told = run_ranks(drawn, 3, str(tmp_path))
    for first, second in told:
        assert first == second  # the step, the rank and the number of ranks decide
    draws = [number for first, _ in told for number in first]
    assert len(set(draws)) == len(draws) == 18
    assert not set(draws) & set(drawn(str(tmp_path))[0])  # as many ranks as before: as saved
