"""What the doors write or delete is below the directory that the user named, whatever links are
there, or come at any moment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import smckpt
from smckpt import Parallel, import_hf
from smckpt.errors import CheckpointError, UsageError
from smckpt.formats.conversion.convert import convert
from smckpt.integrations.accelerate import merge_fsdp_weights
from smckpt.integrations.lightning.plugin import SmckptCheckpointIO
from smckpt.integrations.nvrx.async_ckpt import save_whole
from smckpt.integrations.nvrx.local.basic_state_dict import BasicTensorAwareStateDict
from smckpt.integrations.nvrx.local.ckpt_managers.local_manager import LocalCheckpointManager
from smckpt.integrations.replaced import remove_or_keep, remove_stale, stamps
from smckpt.integrations.transformers.files import replace_file
from tests.support.faults.swaps import below, swap, swapped_at
from tests.support.frameworks.trainer_run import trainer
from tests.support.models import references

NAMES = (
    *("trainer_state.json", "config.json", "training_args.bin", "model.safetensors"),
    *("optimizer.pt", "iter_0000003_0_local.pt", "iter_0000002_0_local.pt", "state.pt"),
    *("iter_0000004_0_local.pt.0.tmp", "state.pt.0.tmp", "pytorch_model.bin", "notes"),
)


def _victim(top: Path) -> Path:
    """Somebody's directory, with names that the doors write or delete, and a checkpoint in it."""
    victim = top / "victim"
    smckpt.save({"w": torch.ones(3)}, checkpoint_id=victim, no_dist=True)
    for inner in (victim, victim / "0", victim / "adapter"):
        inner.mkdir(exist_ok=True)
        for name in NAMES:
            (inner / name).write_bytes(b"precious")
    return victim


class FilesOfTheTrainer:
    """What the Trainer's door writes beside a commit, and removes of what was there before."""

    links = ("run/checkpoint-4", "run/checkpoint-4/adapter")
    swaps = links

    def __init__(self, top: Path) -> None:
        self.step = top / "run" / "checkpoint-4"
        (self.step / "adapter").mkdir(parents=True)
        for name in NAMES:
            (self.step / name).write_bytes(b"old")
        self.before = stamps(str(self.step))

    def act(self) -> None:
        for name in ("config.json", "trainer_state.json", "adapter/config.json"):
            replace_file(str(self.step), name, b"new")
        remove_stale(str(self.step), self.before)


class Trainers:
    """A run of the Trainer that saves its last step over an older one of its own."""

    links = ("run/checkpoint-7",)
    swaps = ()

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "run").mkdir()

    def act(self) -> None:
        ran = trainer(str(self.top / "run"), "plain", [])
        ran.train()
        smckpt.maybe_finalize_async_calls()


class Lightnings:
    """A save in place of an older one, which is removed; and a removal."""

    links = ("run/a.ckpt", "run/b.ckpt")
    swaps = links

    def __init__(self, top: Path) -> None:
        self.top, self.plugin = top, SmckptCheckpointIO()
        (top / "run").mkdir()
        for name in ("a.ckpt", "b.ckpt"):
            self._save(name)

    def _save(self, name: str) -> None:
        self.plugin.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, self.top / "run" / name)
        self.plugin.teardown()

    def act(self) -> None:
        try:
            self._save("a.ckpt")
            self.plugin.remove_checkpoint(self.top / "run" / "b.ckpt")
        finally:
            self.plugin.teardown()


class Removal:
    """Of a step by the Trainer's or accelerate's rule."""

    links = ("run/checkpoint-4",)
    swaps = links

    def __init__(self, top: Path) -> None:
        self.step = str(top / "run" / "checkpoint-4")
        smckpt.save({"w": torch.ones(3)}, checkpoint_id=self.step, no_dist=True)

    def act(self) -> None:
        remove_or_keep(self.step, {})


class WholeFile:
    """NVRx's torch.save in the background. The user named the directory; the file that is written
    before it has its name is no link's."""

    links = ("run/state.pt", "run/state.pt.0.tmp", "hard")
    swaps = ()

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "run").mkdir()

    def act(self) -> None:
        if (self.top / "hard").is_symlink():
            os.link(self.top / "victim" / "notes", self.top / "run" / "state.pt.0.tmp")
        save_whole({"w": torch.ones(3)}, self.top / "run" / "state.pt")


class LocalCheckpoints:
    """NVRx's, of a session and a rank below the directory that the user named."""

    links = ("run/session", "run/session/0", "run/session/0/iter_0000004_0_local.pt.0.tmp")
    swaps = ("run/session", "run/session/0")

    def __init__(self, top: Path) -> None:
        self.manager = LocalCheckpointManager(top / "run", "session")
        self.manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), 3)

    def act(self) -> None:
        self.manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), 4)
        self.manager.find_latest()


class Merge:
    """accelerate's file of weights."""

    links = ("run/model.safetensors",)
    swaps = ()

    def __init__(self, top: Path) -> None:
        self.top = top
        smckpt.save({"model": {"w": torch.ones(3)}}, checkpoint_id=top / "saved", no_dist=True)
        (top / "run").mkdir()

    def act(self) -> None:
        merge_fsdp_weights(self.top / "saved", self.top / "run")


class Convert:
    """One file, or a directory, in place of nothing."""

    links = ("run/one.pt", "run/dcp")
    swaps = ()

    def __init__(self, top: Path) -> None:
        self.top = top
        smckpt.save({"model": {"w": torch.ones(3)}}, checkpoint_id=top / "saved", no_dist=True)
        (top / "run").mkdir()

    def act(self) -> None:
        for to, name in (("torch", "one.pt"), ("dcp", "dcp")):
            with suppress(CheckpointError):
                convert(self.top / "saved", self.top / "run" / name, to=to)


class Import:
    """Over an older import."""

    links = ("run/config.json", "run/00-smckpt")
    swaps = ()

    def __init__(self, top: Path) -> None:
        self.top, self.model = top, references.model("llama")
        (top / "hub").mkdir()
        save_file(references.on_disk(self.model, top / "own"), top / "hub" / "model.safetensors")
        self.model.config.save_pretrained(top / "hub")
        (top / "run").mkdir()

    def act(self) -> None:
        import_hf(
            self.top / "hub", self.top / "run", Parallel("mcore_te", tp=2),
            options=smckpt.ImportOptions(overwrite=True),
        )  # fmt: skip


ALL = (FilesOfTheTrainer, Trainers, Lightnings, Removal, WholeFile, LocalCheckpoints, Merge,
       Convert, Import)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "link"), [(make, link) for make in ALL for link in make.links],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
@pytest.mark.parametrize("to_file", [False, True])
def test_a_link_that_is_there_is_not_followed(
    tmp_path: Path, make: Callable[[Path], Any], link: str, to_file: bool
) -> None:
    """To somebody's directory, or to one of their files."""
    work, victim = make(tmp_path), _victim(tmp_path)
    before = below(victim)
    path = tmp_path / link
    if path.is_dir():
        path.rename(path.with_name("aside"))
    path.unlink(missing_ok=True)
    path.symlink_to(victim / "notes" if to_file else victim)
    with suppress(CheckpointError, OSError):
        work.act()
    with suppress(CheckpointError):
        smckpt.maybe_finalize_async_calls()
    assert below(victim) == before


@pytest.mark.parametrize("count", [4, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("make", "link"), [(make, link) for make in ALL for link in make.swaps],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_a_link_that_comes_at_a_call_is_not_followed(
    tmp_path: Path, make: Callable[[Path], Any], link: str, count: int
) -> None:
    """At so many of its calls, evenly spread. The first run only counts them."""

    def calls(top: Path, moment: int) -> int:
        top.mkdir()
        work, victim = make(top), _victim(top)
        before = below(victim)

        def change() -> None:
            if (top / link).is_dir() and not (top / link).is_symlink():
                swap(top / link, victim)

        def act() -> None:
            with suppress(CheckpointError, OSError):
                work.act()

        found = swapped_at(moment, act, change)
        with suppress(CheckpointError):
            smckpt.maybe_finalize_async_calls()
        assert below(victim) == before, f"at call {moment}"
        shutil.rmtree(top, ignore_errors=True)  # a removal in the background may go on
        return found

    total = calls(tmp_path / "counted", 1 << 30)
    assert total > 10
    for moment in range(0, total, max(total // count, 1)):
        calls(tmp_path / str(moment), moment)


def test_a_step_of_the_trainer_that_is_a_link_is_refused_by_name(tmp_path: Path) -> None:
    work, victim = Trainers(tmp_path), _victim(tmp_path)
    (tmp_path / "run" / "checkpoint-7").symlink_to(victim)
    with pytest.raises(CheckpointError, match="'checkpoint-7' below .* is a symbolic link"):
        work.act()


def test_a_session_that_is_a_link_is_refused_by_name(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path / "run", "session")
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "session").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="'session' below .* is a symbolic link"):
        manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), 4)


def test_a_directory_that_is_named_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    save_whole({"w": torch.ones(3)}, tmp_path / "run" / "state.pt")
    assert torch.load(tmp_path / "disk" / "state.pt")["w"].sum() == 3
    assert os.listdir(tmp_path / "disk") == ["state.pt"]
