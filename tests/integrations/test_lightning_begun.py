"""A run that Lightning's own classes began goes on here, under both names of the package."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

import smckpt
from smckpt.engine.api import _RUNTIME
from smckpt.engine.saving.queue import SaveQueue
from smckpt.integrations import ANY_VERSION
from smckpt.integrations.lightning import SmckptCheckpointIO, SmckptTrainer
from tests.engine.test_prewarm import arenas, prewarmed
from tests.support import child
from tests.support.interpreters import run, torchtitan, torchtune

PLAIN: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False, "limit_train_batches": 4, "limit_val_batches": 0,
}  # fmt: skip


class Begins(Callback):  # type: ignore[misc]
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.global_step
        self.weights = {name: one.clone() for name, one in pl_module.state_dict().items()}


def fit(
    kind: Any, folder: Path, epochs: int, at: Any = None, save_last: Any = True, begins: Any = None
) -> Any:
    begins = begins or Begins()
    saved = ModelCheckpoint(dirpath=folder, save_top_k=-1, save_last=save_last)
    plugins = [SmckptCheckpointIO()] if kind is SmckptTrainer else []
    made = kind(max_epochs=epochs, callbacks=[saved, begins], plugins=plugins, **PLAIN)
    model = BoringModel()
    made.fit(model, ckpt_path=at)
    begins.ended = {name: one.clone() for name, one in model.state_dict().items()}
    return begins


@pytest.mark.parametrize("before", [True, "link"])
@pytest.mark.parametrize("after", [True, "link"])
@pytest.mark.parametrize("at", ["last", "last.ckpt", "epoch=0-step=4.ckpt"])
def test_a_run_that_lightning_began_goes_on(
    tmp_path: Path, before: Any, after: Any, at: str
) -> None:
    begun = fit(Trainer, tmp_path, 1, save_last=before)
    path = at if at == "last" else str(tmp_path / at)
    went_on = fit(SmckptTrainer, tmp_path, 3, path, save_last=after)
    assert went_on.step == 4
    assert all(torch.equal(one, begun.ended[name]) for name, one in went_on.weights.items())
    newest = max(smckpt.find_checkpoints(tmp_path), key=lambda one: one.step or 0)
    assert newest.step == 12
    if before is after is True and at != "epoch=0-step=4.ckpt":  # they have one path
        assert [path.name for path in tmp_path.glob("last*")] == ["last.ckpt"]
        assert (tmp_path / "last.ckpt").is_dir()
    again = fit(SmckptTrainer, tmp_path, 4, "last", save_last=after)
    assert again.step == 12


def test_a_resumed_run_has_the_memory_of_its_first_save_before_it(tmp_path: Path) -> None:
    fit(SmckptTrainer, tmp_path, 1)
    _RUNTIME.drop("lightning", 60)  # as in a new process
    others, before = arenas(), dict[int, int]()

    class Looks(Begins):
        def on_train_batch_start(self, *_: Any) -> None:
            before.update(before or prewarmed("lightning"))

    fit(SmckptTrainer, tmp_path, 2, "last", begins=Looks())
    assert len(before) == len(others) + 1
    assert arenas() == before


def test_a_new_run_has_the_memory_of_its_first_save_after_its_first_step(tmp_path: Path) -> None:
    _RUNTIME.drop("lightning", 60)  # as in a new process
    others, found = arenas(), list[dict[int, int]]()

    class Looks(Begins):
        def on_train_batch_start(self, *_: Any) -> None:
            if len(found) < 2:
                found.append(prewarmed("lightning") if found else arenas())

    fit(SmckptTrainer, tmp_path, 1, begins=Looks())
    assert found[0] == others and len(found[1]) == len(others) + 1
    assert arenas() == found[1]


class Raises(Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise EOFError


def began(kind: Any, folder: Path, at: Any, saves_steps: bool, *callbacks: Any) -> int:
    """The step at which a run begins that saves its errors."""
    begins, saved = Begins(), [OnExceptionCheckpoint(str(folder / "error"))]
    if saves_steps:
        saved.append(ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_last=True))
    plugins = [SmckptCheckpointIO()] if kind is SmckptTrainer else []
    made = kind(max_epochs=1, callbacks=[*saved, begins, *callbacks], plugins=plugins, **PLAIN)
    made.fit(BoringModel(), ckpt_path=at)
    return int(begins.step)


@pytest.mark.parametrize("by", [Trainer, SmckptTrainer])  # who has saved it
@pytest.mark.parametrize("at", [None, "last"])
@pytest.mark.parametrize("saves_steps", [True, False], ids=["beside steps", "alone"])
def test_what_was_saved_when_training_raised_is_the_last(
    tmp_path: Path, by: Any, at: Any, saves_steps: bool
) -> None:
    with pytest.raises(EOFError):
        began(by, tmp_path, None, saves_steps, Raises())
    assert began(SmckptTrainer, tmp_path, at, saves_steps) == 3


@pytest.mark.parametrize("at", [None, "last"])
@pytest.mark.parametrize("saves_steps", [True, False], ids=["beside steps", "alone"])
def test_a_run_that_was_killed_while_it_saved_an_error_goes_on(
    tmp_path: Path, at: Any, saves_steps: bool
) -> None:
    with pytest.raises(EOFError):
        began(SmckptTrainer, tmp_path, None, saves_steps, Raises())
    path = tmp_path / "error" / "on_exception.ckpt"
    for one in path.iterdir():  # what was committed, and a file of a save that was not
        one.unlink()
    (path / "probe-0123456789ab.json").touch()
    assert began(SmckptTrainer, tmp_path, at, saves_steps) == (2 if saves_steps else 0)


def test_what_lightning_wrote_is_found_until_the_save_over_it_is_committed(tmp_path: Path) -> None:
    fit(Trainer, tmp_path, 1)
    plugin = SmckptCheckpointIO()
    plugin.saves.make_room(str(tmp_path / "last.ckpt"))  # and then the job was killed
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "probe-0123456789ab.json").touch()
    assert fit(SmckptTrainer, tmp_path, 2, "last").step == 4


def test_the_newer_of_both_writers_is_the_last(tmp_path: Path) -> None:
    fit(SmckptTrainer, tmp_path, 1)
    fit(Trainer, tmp_path, 2)
    assert fit(SmckptTrainer, tmp_path, 3, "last").step == 8


OLD = """
import importlib, importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.9.1" if name == sys.argv[1] else real(name)
try:
    importlib.import_module(f"smckpt.integrations.{sys.argv[1]}")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "python"),
    [("torchtitan", torchtitan), pytest.param("torchtune", torchtune, marks=pytest.mark.long)],
)
def test_an_import_in_its_own_environment_refuses_such_a_version(
    package: str, python: Callable[[], str]
) -> None:
    assert f"{package} 0.9.1 was not tested" in run(python(), "-c", OLD, package)


@pytest.mark.parametrize(
    "package",
    [
        "lightning",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("transformers", "accelerate")),
    ],
)
def test_an_import_refuses_a_version_that_was_not_tested(package: str) -> None:
    importlib.import_module(f"smckpt.integrations.{package}")  # this version was
    refused = child.run(OLD, package)
    assert f"{package} 0.9.1 was not tested" in refused and ANY_VERSION in refused
    assert child.run(OLD, package, **{ANY_VERSION: "1"}) == ""


def test_the_packages_other_name_saves_through_smckpt_too(tmp_path: Path) -> None:
    if importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("needs pytorch_lightning")
    script = tmp_path / "train.py"
    script.write_text(
        """
import sys
import lightning.pytorch
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_fabric.utilities.seed import seed_everything
assert pl.Trainer is lightning.pytorch.Trainer
seed_everything(1)
saved = ModelCheckpoint(dirpath=sys.argv[1], save_last=True)
made = pl.Trainer(max_epochs=int(sys.argv[2]), callbacks=[saved], accelerator="cpu", logger=False,
    limit_train_batches=4, limit_val_batches=0, enable_progress_bar=False)
made.fit(BoringModel(), ckpt_path="last")
print("ended at", made.global_step)
"""
    )
    by = ("-m", "smckpt.run", "--for", "lightning")
    for epochs in (1, 2):
        done = child.script(script, str(tmp_path / "run"), str(epochs), by=by)
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"ended at {4 * epochs}" in done.stdout
        found = smckpt.find_checkpoints(tmp_path / "run")
        assert max(one.step or 0 for one in found) == 4 * epochs


def names_after_each_epoch(kind: Any, folder: Path) -> list[set[str]]:
    """Of two runs, the second of which resumes from the last checkpoint of the first."""
    found = []
    for epochs in (1, 2):
        saved = ModelCheckpoint(
            dirpath=folder, save_top_k=1, save_last="link", every_n_train_steps=2
        )
        plugins = [SmckptCheckpointIO()] if kind is SmckptTrainer else []
        made = kind(max_epochs=epochs, callbacks=[saved], plugins=plugins, **PLAIN)
        made.fit(BoringModel(), ckpt_path="last" if epochs > 1 else None)
        found.append({path.name for path in folder.iterdir()})
    return found


def test_a_link_to_the_last_leaves_what_lightning_leaves_in_a_new_directory(tmp_path: Path) -> None:
    wanted = names_after_each_epoch(Trainer, tmp_path / "stock")
    assert names_after_each_epoch(SmckptTrainer, tmp_path / "ours") == wanted
    assert (tmp_path / "ours" / "last.ckpt").is_symlink()


@pytest.mark.parametrize("folder", ["weights", "."])  # of their own, and that of all
def test_the_last_is_one_that_fit_can_resume_from(tmp_path: Path, folder: str) -> None:
    """A callback may save the weights alone, and more often than another one saves all."""
    for batches, at in ((3, None), (4, "last")):
        alone = ModelCheckpoint(
            tmp_path / folder, "weights-{step}", every_n_train_steps=1, save_top_k=-1,
            save_weights_only=True,
        )  # fmt: skip
        whole, begins = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_last=True), Begins()
        made = SmckptTrainer(
            max_epochs=1, callbacks=[whole, alone, begins], plugins=[SmckptCheckpointIO()],
            **{**PLAIN, "limit_train_batches": batches},
        )  # fmt: skip
        made.fit(BoringModel(), ckpt_path=at)
    assert begins.step == 2


class Requeued(Begins):
    """Saves as Lightning does before it has SLURM queue the job again."""

    def __init__(self) -> None:
        self.committed: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        root = trainer.default_root_dir
        trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(root))
        self.committed.append(len(smckpt.find_checkpoints(root)))


@pytest.mark.parametrize("at", [None, "hpc"])
def test_what_is_saved_for_slurm_is_committed_before_the_job_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Any
) -> None:
    monkeypatch.setattr(SLURMEnvironment, "detect", lambda: True)
    saves = Requeued()
    for kept, resumes in ((saves, None), (Begins(), at)):
        made = SmckptTrainer(
            max_epochs=2, callbacks=[kept], plugins=[SmckptCheckpointIO(), LightningEnvironment()],
            enable_checkpointing=False, default_root_dir=tmp_path, **PLAIN,
        )  # fmt: skip
        if kept is saves:
            made.fit_loop.max_epochs = 1
        else:  # a kill in the middle of a later save
            (tmp_path / "hpc_ckpt_5.ckpt").mkdir()
            (tmp_path / "hpc_ckpt_5.ckpt" / "probe-0123456789ab.json").touch()
        made.fit(BoringModel(), ckpt_path=resumes)
    assert saves.committed == [1, 2, 3, 4]
    assert kept.step == 4


def test_slurms_signal_in_the_middle_of_a_save_saves_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.chdir(tmp_path)  # where Lightning saves it
    real, before = SaveQueue.submit, signal.getsignal(signal.SIGUSR1)
    due = iter([signal.SIGUSR1])

    def submit(*args: Any, **kwargs: Any) -> Any:
        for number in due:
            signal.raise_signal(number)
        return real(*args, **kwargs)

    class Listens(Begins):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            saves = trainer._signal_connector._slurm_sigusr_handler_fn
            signal.signal(signal.SIGUSR1, _HandlersCompose(saves))

    monkeypatch.setattr(SaveQueue, "submit", submit)
    try:
        fit(SmckptTrainer, tmp_path, 1, begins=Listens())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert smckpt.find_checkpoints(tmp_path / "hpc_ckpt_1.ckpt")
