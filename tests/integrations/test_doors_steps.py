"""Which step each framework's door resumes from, and which older ones its rotation removes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration

import smckpt
from smckpt.errors import CheckpointNotFoundError, StorageError
from smckpt.integrations.accelerate import SmckptAccelerator
from smckpt.integrations.lightning import SmckptCheckpointIO
from smckpt.integrations.replaced import keep_last, run_directory
from smckpt.integrations.sagemaker.checkpoint.utils import limit_num_subdirs
from smckpt.integrations.transformers.resume import Checkpoints
from tests.support.faults.copies import killed_at
from tests.support.faults.failing import failing
from tests.support.frameworks.lightning_state import checkpoint
from tests.support.frameworks.small_trainer import Begins, trainer

FILES = ("manifest-*", "part-*", "data-*.safetensors")


def saved(root: Path, template: str, *steps: int) -> None:
    for step in steps:
        smckpt.save(
            {"a": torch.ones(2)}, checkpoint_id=root / template.format(step=step), step=step
        )


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_the_last_steps_stay_and_what_killed_saves_left_goes(tmp_path: Path) -> None:
    saved(tmp_path, "step-{step}", 9, 1, 2, 3, 4)  # the run went back from step 9
    run = run_directory(str(tmp_path), "step-{step}", {})
    one = run.all()[0]
    assert killed_at(2, lambda: run.remove(one))
    (tmp_path / "step-x").mkdir()
    keep_last(run_directory(str(tmp_path), "step-{step}", {}), 2, 4)
    assert names(tmp_path) == ["step-3", "step-4", "step-9", "step-x"]


def test_a_rotation_leaves_what_a_reader_has_pinned(tmp_path: Path) -> None:
    saved(tmp_path, "step-{step}", 1, 2, 3)
    run = run_directory(str(tmp_path), "step-{step}", {})
    with smckpt.pinned(tmp_path / "step-1"):
        keep_last(run, 1, 3)
        assert names(tmp_path) == ["step-1", "step-3"]
    keep_last(run, 1, 3)
    assert names(tmp_path) == ["step-3"]


def test_a_rotation_removes_nothing_unless_the_newest_step_is_whole(tmp_path: Path) -> None:
    saved(tmp_path, "step-{step}", 1, 2, 3)
    next((tmp_path / "step-3").glob("data-*")).unlink()
    keep_last(run_directory(str(tmp_path), "step-{step}", {}), 1, 3)
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]
    saved(tmp_path, "step-{step}", 4)
    keep_last(run_directory(str(tmp_path), "step-{step}", {}), 2, 4)  # step 3 does not count
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[SmckptAccelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    named = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
    )
    made = SmckptAccelerator(cpu=True, project_config=named)
    made.prepare(torch.nn.Linear(2, 2))
    yield made
    made.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)


def fill(accelerator: SmckptAccelerator, value: float) -> None:
    with torch.no_grad():
        for parameter in accelerator._models[0].parameters():
            parameter.fill_(value)


def value(accelerator: SmckptAccelerator) -> float:
    return float(accelerator._models[0].weight.detach()[0, 0])


def two_saves(accelerator: SmckptAccelerator) -> None:
    for number in (0, 1):
        fill(accelerator, number)
        accelerator.save_state()
    smckpt.maybe_finalize_async_calls()
    fill(accelerator, 7)


@pytest.mark.parametrize("what", FILES[:1])
@pytest.mark.parametrize("passes", [True, False])
def test_accelerate_reads_a_step_again_before_it_takes_an_older_one(
    accelerator: SmckptAccelerator, tmp_path: Path, what: str, passes: bool
) -> None:
    two_saves(accelerator)
    (target,) = (tmp_path / "checkpoints" / "checkpoint_1").glob(what)
    with failing("preadv", errno.EIO, target, times=1 if passes else -1) as met:
        accelerator.load_state()
    assert met and value(accelerator) == (1 if passes else 0)


def test_total_limit_keeps_what_accelerate_keeps_where_numbers_begin_again(
    accelerator: SmckptAccelerator, tmp_path: Path
) -> None:
    folder, kept = tmp_path / "checkpoints", []
    for save_state in (accelerator.save_state, partial(Accelerator.save_state, accelerator)):
        shutil.rmtree(folder, ignore_errors=True)
        kept.append(list[list[str]]())
        for number in (5, 6, 0, 1, 7, 2):
            accelerator.project_configuration.iteration = number
            save_state()
            smckpt.maybe_finalize_async_calls()
            kept[-1].append(names(folder))
    assert kept[0] == kept[1]


def test_accelerate_takes_no_step_of_another_folder(
    accelerator: SmckptAccelerator, tmp_path: Path
) -> None:
    two_saves(accelerator)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "checkpoint_0", folder / "old" / "checkpoint_9")
    accelerator.load_state()
    assert value(accelerator) == 1
    accelerator.save_state()
    smckpt.maybe_finalize_async_calls()
    assert names(folder) == ["checkpoint_1", "checkpoint_2", "old"]


def test_accelerate_takes_its_own_checkpoint_where_that_is_newer(
    accelerator: SmckptAccelerator, tmp_path: Path
) -> None:
    two_saves(accelerator)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    Accelerator.save_state(accelerator, tmp_path / "checkpoints" / "checkpoint_2")
    accelerator.project_configuration.automatic_checkpoint_naming = True
    fill(accelerator, 8)
    accelerator.load_state()
    assert value(accelerator) == 7


def test_accelerates_rotation_leaves_a_pinned_step(
    accelerator: SmckptAccelerator, tmp_path: Path
) -> None:
    two_saves(accelerator)
    with smckpt.pinned(tmp_path / "checkpoints" / "checkpoint_0"):
        accelerator.save_state()
        smckpt.maybe_finalize_async_calls()
    found = smckpt.find_checkpoints(tmp_path / "checkpoints")
    assert [one.step for one in found] == [0, 1, 2]


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("asked", [True, "path"])
def test_the_trainer_takes_an_older_step_than_one_that_cannot_be_read(
    tmp_path: Path, what: str, asked: Any
) -> None:
    trainer(tmp_path).train()
    (target,) = (tmp_path / "checkpoint-4").glob(what)
    begins = Begins()
    with failing("open", errno.EIO, target) as met:
        trainer(tmp_path, 6, begins).train(True if asked is True else str(target.parent))
    assert met and begins.step == 2


def test_the_trainer_does_not_begin_anew_where_a_folder_cannot_be_listed(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    found = Checkpoints(str(tmp_path))
    with failing("scandir", errno.EIO, tmp_path / "checkpoint-4") as met:
        chosen = found.choose(True)
    assert met and chosen is not None and chosen.directory == str(tmp_path / "checkpoint-2")
    with ExitStack() as faults, pytest.raises(StorageError, match="checkpoint-4"):
        for step in found.steps(str(tmp_path)):
            faults.enter_context(failing("scandir", errno.EIO, tmp_path / f"checkpoint-{step}"))
        found.choose(True)


@pytest.mark.parametrize("of", ["file://", ""])
def test_a_root_has_what_the_trainer_names_below_its_output_dir(tmp_path: Path, of: str) -> None:
    found = Checkpoints(f"{of}{tmp_path}/out", "s3://b/run")
    assert found.url_of(f"{of}{tmp_path}/out") == "s3://b/run"
    assert found.url_of(f"{of}{tmp_path}/out/checkpoint-2") == "s3://b/run/checkpoint-2"


def test_the_trainers_rotation_leaves_a_pinned_step_with_all_that_is_beside_it(
    tmp_path: Path,
) -> None:
    for pinned in (True, False):
        root = tmp_path / str(pinned)
        trainer(root, save_total_limit=1).train()
        before = names(root / "checkpoint-4")
        with smckpt.pinned(root / "checkpoint-4") if pinned else nullcontext():
            trainer(root, 8, save_total_limit=1).train(True)
        assert (root / "checkpoint-4").exists() == pinned
        assert not pinned or names(root / "checkpoint-4") == before


def test_lightnings_rotation_leaves_a_pinned_step(tmp_path: Path) -> None:
    plugin = SmckptCheckpointIO()
    plugin.save_checkpoint(checkpoint(), tmp_path / "one.ckpt")
    smckpt.maybe_finalize_async_calls()
    with smckpt.pinned(tmp_path / "one.ckpt"):
        plugin.remove_checkpoint(tmp_path / "one.ckpt")
        assert plugin.load_checkpoint(tmp_path / "one.ckpt")["global_step"] == 4
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises((CheckpointNotFoundError, FileNotFoundError)):
        plugin.load_checkpoint(tmp_path / "one.ckpt")
    plugin.teardown()


def test_smps_rotation_leaves_a_pinned_step(tmp_path: Path) -> None:
    saved(tmp_path, "{step}steps", 1, 2, 3)
    with smckpt.pinned(tmp_path / "1steps"):
        assert limit_num_subdirs(tmp_path, 1) == ["2steps"]
    assert names(tmp_path) == ["1steps", "3steps"]
