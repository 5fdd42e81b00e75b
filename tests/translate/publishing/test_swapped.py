"""What exports, publishes and applies write or delete is below the directory that the user named,
whatever links are there, or come at any moment."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from smckpt import ExportOptions, apply_published, export_hf, publish
from smckpt.checkpoint.commits.remove import remove_newest
from smckpt.checkpoint.commits.sweep import sweep
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from smckpt.errors import CheckpointError, UsageError
from smckpt.manager.follow import follow
from smckpt.storage import access_to
from tests.support.faults.swaps import below, swap, swapped_at
from tests.support.saves import Group, hybrid, state_of
from tests.support.synthetic import Step

GROUPS = {"deep/part0": (0, 2), "part1": (1, 3)}
OPTIONS = ExportOptions(overwrite=True, against_model=False, allow_nonfinite=True, naming="module")


def _model(directory: Path, value: float) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({"a": np.full(3000, value)}, directory / "model.safetensors")
    save_file({"b": np.ones(3)}, directory / "other.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def _victim(top: Path) -> Path:
    """Somebody's directory, with names that every one of these writes or deletes."""
    victim = top / "victim"
    for inner in (victim, victim / "additional_chat_templates"):
        inner.mkdir(parents=True)
        for name in (
            *("model.safetensors", "config.json", "params.json", "a.jinja", "notes", "other"),
            *("tokenizer.json", "smckpt_export.json", "publish.json", ".publish-files.json"),
            *("other.safetensors", ".smckpt_publish.json", "generation_config.json"),
        ):
            (inner / name).write_bytes(b"precious")
    return victim


class Export:
    """An export over an older one."""

    links = ("out/1/additional_chat_templates",)
    swaps = links

    def __init__(self, top: Path) -> None:
        self.top = top
        Group(top / "run" / "1", (0, 1)).save()
        (top / "tok").mkdir()
        (top / "tok" / "config.json").write_text(json.dumps({"model_type": "custom_x"}))
        (top / "tok" / "tokenizer.json").write_text("{}")
        templates = top / "out" / "1" / "additional_chat_templates"
        templates.mkdir(parents=True)
        (templates / "old.jinja").write_text("old")
        (top / "out" / "1" / "tokenizer.json").write_text("old")

    def act(self) -> None:
        export_hf(
            self.top / "run" / "1", self.top / "out" / "1", options=OPTIONS, prefix="",
            config=self.top / "tok",
        )  # fmt: skip


class Follow(Export):
    """Each step of a run is exported to a directory of its own."""

    links = ("out/1", "out/1/additional_chat_templates")
    swaps = links

    def act(self) -> None:
        def export(found: Any, directory: str) -> None:
            export_hf(found, directory, options=OPTIONS, prefix="", config=self.top / "tok")

        for done in follow(self.top / "run", self.top / "out", export, once=True):
            if done.error is not None:
                raise done.error


class Publish:
    """A full publish, after which the oldest ones are deleted."""

    links = ("published/00000000", "published/00000002", "published/00000007")
    swaps = ("published/00000000", "published/00000003")

    def __init__(self, top: Path) -> None:
        self.top = top
        for number in range(3):
            publish(_model(top / "model", number), top / "published", full_every=1)
        _model(top / "model", 4)

    def act(self) -> None:
        publish(self.top / "model", self.top / "published", full_every=1)


class Apply:
    """A newer publish, after which the oldest applied one goes."""

    links = ("host/00000000", "host/00000001", "host/00000002", "host/.applying-0123abcd",
             "host/.applying-link", "host/latest")  # fmt: skip
    swaps = ("host/00000000", "host/00000001")

    def __init__(self, top: Path) -> None:
        self.top = top
        for number in range(3):
            publish(_model(top / "model", number), top / "published")
            if number < 2:
                apply_published(top / "published", top / "host")

    def act(self) -> None:
        apply_published(self.top / "published", self.top / "host", keep=1)


class Steps:
    """A step of two groups."""

    links = ("run/part1", "run/deep", "run/deep/part0")
    swaps = links

    def __init__(self, top: Path) -> None:
        self.top = top
        self.saves = Step(top / "run", GROUPS, state_of(hybrid((0, 1, 2, 3), 2)))
        self.saves.save()
        self.run = str(top / "run")


class Remove(Steps):
    def act(self) -> None:
        remove_newest(access_to(self.run).open(self.run))


class Copy(Steps):
    links = ("copy/part1", "copy/deep", "copy/deep/part0")
    swaps = links

    def __init__(self, top: Path) -> None:
        super().__init__(top)
        for directory in GROUPS:
            (top / "copy" / directory).mkdir(parents=True)

    def act(self) -> None:
        copy_checkpoint(self.run, str(self.top / "copy"))


class Sweep(Steps):
    """The files of an older save of a group, which its newer manifest supersedes."""

    def __init__(self, top: Path) -> None:
        super().__init__(top)
        self.saves.save()
        self.groups = [top / "run" / directory for directory in GROUPS]
        self.kept = [sorted(p.name for p in g.glob("manifest-*"))[-1] for g in self.groups]

    def act(self) -> None:
        for group, kept in zip(self.groups, self.kept, strict=True):
            sweep(access_to(self.run), str(group), [kept], int(kept.split("-")[1]))


ALL = (Export, Follow, Publish, Apply, Remove, Copy, Sweep)


@pytest.mark.parametrize(
    ("make", "link"), [(make, link) for make in ALL for link in make.links],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_a_link_that_is_there_is_not_followed(
    tmp_path: Path, make: Callable[[Path], Any], link: str
) -> None:
    work, victim = make(tmp_path), _victim(tmp_path)
    before = below(victim)
    path = tmp_path / link
    if path.is_symlink():
        path.unlink()
    if path.exists():
        swap(path, victim)
    else:
        path.symlink_to(victim)
    with suppress(CheckpointError):
        work.act()
    assert below(victim) == before


@pytest.mark.parametrize("count", [6, pytest.param(1000, marks=pytest.mark.long)])
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
            with suppress(CheckpointError):
                work.act()

        found = swapped_at(moment, act, change)
        assert below(victim) == before, f"at call {moment}"
        shutil.rmtree(top)
        return found

    total = calls(tmp_path / "counted", 1 << 30)
    assert total > 30
    for moment in range(0, total, max(total // count, 1)):
        calls(tmp_path / str(moment), moment)


def test_an_export_over_a_link_says_so_before_it_removes_anything(tmp_path: Path) -> None:
    work, victim = Export(tmp_path), _victim(tmp_path)
    old = tmp_path / "out" / "1" / "model.safetensors"
    old.write_bytes(b"the old model")
    swap(tmp_path / "out/1/additional_chat_templates", victim)
    with pytest.raises(UsageError, match="'additional_chat_templates' below .* is a symbolic link"):
        work.act()
    assert old.read_bytes() == b"the old model"


def test_a_followed_step_whose_directory_is_a_link_fails_and_says_so(tmp_path: Path) -> None:
    work, victim = Follow(tmp_path), _victim(tmp_path)
    swap(tmp_path / "out/1", victim)
    with pytest.raises(UsageError, match="'1' below .* is a symbolic link"):
        work.act()
    os.unlink(tmp_path / "out/1")
    work.act()
    assert (tmp_path / "out/1/model.safetensors").is_file()
