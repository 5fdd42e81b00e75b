"""What ./dev removes, what it says that it tested, and which tests it runs a second time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import torch

import smckpt
from tests.support.limits import seconds
from tests.support.main_job import ROOT, run_main_job

OURS = ("0123abcd", "ffffffff")
OTHERS = ("named", "0123abcde", "0123ABCD")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone with runs: two that ./dev train named, others, a link to somebody's folder."""
    (tmp_path / "clone").mkdir()
    shutil.copy2(ROOT / "dev", tmp_path / "clone")
    for name in ("examples", "smckpt"):
        shutil.copytree(ROOT / name, tmp_path / "clone" / name)
    for name in (*OURS, *OTHERS):
        folder = tmp_path / "clone" / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(bytes(2_000_000))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_bytes(b"theirs")
    (tmp_path / "clone" / "runs" / "aaaaaaaa").symlink_to(tmp_path / "theirs")
    return tmp_path / "clone"


def clean(tree: Path, answer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-S",
            str(tree / "dev"),
            "clean",
            *arguments,
        ],  # -S: with no package at all
        input=answer,
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )


def left(tree: Path) -> set[str]:
    return {path.name for path in (tree / "runs").iterdir()}


@pytest.mark.parametrize("answer", ["", "\n", "n\n", "maybe\n"])
def test_clean_removes_nothing_without_a_yes(tree: Path, answer: str) -> None:
    done = clean(tree, answer)
    assert (done.returncode, done.stderr) == (0, "")
    assert "runs/0123abcd  2 MB" in done.stdout and "Remove these 2 runs?" in done.stdout
    assert left(tree) == {*OURS, *OTHERS, "aaaaaaaa"}


@pytest.mark.parametrize(("answer", "arguments"), [("y\n", ()), ("", ("--yes",))])
def test_clean_removes_the_runs_that_got_no_name_and_follows_no_link(
    tree: Path, answer: str, arguments: tuple[str, ...]
) -> None:
    done = clean(tree, answer, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert left(tree) == {*OTHERS, "aaaaaaaa"}
    assert (tree.parent / "theirs" / "file").read_bytes() == b"theirs"
    assert "no runs to remove" in clean(tree, "").stdout


def test_clean_refuses_arguments_that_it_does_not_know(tree: Path) -> None:
    done = clean(tree, "", "--all")
    assert done.returncode != 0 and "--all" in done.stderr
    assert left(tree) == {*OURS, *OTHERS, "aaaaaaaa"}


def test_what_cannot_begin_is_said_in_one_line_and_tried_once(tmp_path: Path) -> None:
    theirs = smckpt.save({"a": torch.ones(1), "step": 3}, checkpoint_id=tmp_path / "run" / "theirs")
    assert theirs is not None
    outcome = run_main_job(tmp_path / "mine", "--checkpoint-dir", str(tmp_path / "run"))
    (line,) = outcome.output.strip().splitlines()
    assert outcome.status == 1 and "is of another run" in line
    assert not (tmp_path / "mine" / "log.jsonl").exists()


@pytest.fixture(scope="module")
def dev() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as before:
        before.setattr(sys, "path", [*sys.path])  # it puts the examples there
        yield SourceFileLoader("dev", str(ROOT / "dev")).load_module()


def test_the_environment_holds_this_clone_and_no_copy_of_it(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(dev, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(dev, "ENV", tmp_path / "env")
    monkeypatch.setattr(dev.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(dev, "run", lambda command, **_: ran.append([*map(str, command)]) or 0)
    dev.make_environment()
    assert ran[-1][-2:] == ["--editable", str(ROOT)]
    before = len(ran)
    dev.make_environment()  # the pins are the same
    assert len(ran) == before


def test_an_environment_of_another_clone_behind_a_link_is_not_emptied(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other" / "bin").mkdir(parents=True)
    (tmp_path / "env").symlink_to(tmp_path / "other")
    monkeypatch.setattr(dev, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(dev, "ENV", tmp_path / "env")
    with pytest.raises(SystemExit, match="is a link"):
        dev.make_environment()
    assert (tmp_path / "other" / "bin").is_dir()


def test_the_versions_that_are_told_are_those_of_the_interpreter_that_tests(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "PYTHON", Path(sys.executable))
    dev.say_versions()
    python = ".".join(map(str, sys.version_info[:3]))
    said = f"==> tested with Python {python} and torch {torch.__version__}\n"
    assert capsys.readouterr().out == said


def test_the_versions_stand_at_the_top_and_at_the_end_of_what_is_tested(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(dev, "references", dict)
    monkeypatch.setattr(dev, "CHECKS", ())
    monkeypatch.setattr(dev, "say_versions", lambda: told.append("versions"))
    monkeypatch.setattr(dev, "run", lambda command, **_: told.append(str(command[0])) or 0)
    assert dev.test([]) == 0
    assert told == ["versions", str(dev.PYTHON), "versions"]


def test_a_check_that_fails_beside_the_tests_is_named_and_fails_the_run(
    dev: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bin").mkdir()
    for name, line in (("right", "echo all is well"), ("wrong", "echo a fault; exit 3")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line} >&2\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("references", "say_versions"):
        monkeypatch.setattr(dev, name, dict)
    monkeypatch.setattr(dev, "ENV", tmp_path)
    monkeypatch.setattr(dev, "run", lambda command, **_: 0)  # all tests pass
    monkeypatch.setattr(dev, "CHECKS", (["right"], ["wrong", "."]))
    assert dev.test([]) == 1
    printed = capfd.readouterr().out
    assert "==> right\nall is well\n==> wrong .\na fault\n" in printed
    assert printed.endswith("==> failed: wrong .\n")
    monkeypatch.setattr(dev, "CHECKS", (["right"],))
    assert dev.test([]) == 0


def once(name: str, what: str = "assert not first") -> str:
    """A test that fails the first time that it runs."""
    return f"""
import os, pathlib

def test_{name}():
    seen = pathlib.Path(__file__).with_name("{name}")
    first = not seen.exists()
    seen.touch()
    {what}
"""


@pytest.fixture
def suite(dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with one test file, the conftest of this one, and no checks."""
    support = (
        "__init__", "limits", "msc", "process_state", "s3", "models/judged", "models/servers",
    )  # fmt: skip
    for name in ("__init__.py", "conftest.py", *(f"support/{module}.py" for module in support)):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / "tests" / name
        (tmp_path / "tests" / name).write_text(source.read_text() if source.exists() else "")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = long\n")
    for name, value in {"ROOT": tmp_path, "CHECKS": (), "PYTHON": Path(sys.executable)}.items():
        monkeypatch.setattr(dev, name, value)
    monkeypatch.setattr(dev, "references", dict)
    monkeypatch.setenv("SMCKPT_TEST_AGAIN", "1")
    return tmp_path / "tests" / "test_it.py"


def test_a_test_that_passes_alone_is_named_and_does_not_fail_the_run(
    dev: ModuleType, suite: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    suite.write_text(once("passes_the_second_time"))
    assert dev.test([]) == 0
    said = capfd.readouterr().out
    assert "UNSTEADY" in said and "test_it.py::test_passes_the_second_time" in said


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def test_broken():\n    assert False\n", "it fails again"),
        (once("one") + once("two"), "more failed than may run again"),
        (once("dies", "first and os._exit(1)"), "its process died, and others of it never ran"),
    ],
)
@pytest.mark.long
def test_a_run_fails_where_a_second_try_shows_nothing(
    dev: ModuleType, suite: Path, code: str, why: str
) -> None:
    suite.write_text(code)
    assert dev.test([]) != 0, why


@pytest.mark.long
def test_nothing_runs_again_where_nobody_asked(
    dev: ModuleType, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SMCKPT_TEST_AGAIN")
    suite.write_text(once("passes_the_second_time"))
    assert dev.test([]) == 1


def test_the_demos_environment_grows_into_that_of_the_tests(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []
    made: list[object] = []
    monkeypatch.setattr(dev, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(dev, "ENV", tmp_path / "env")
    monkeypatch.setattr(dev.venv, "create", lambda *_, **__: made.append(True))
    monkeypatch.setattr(dev, "run", lambda command, **_: ran.append([*map(str, command)]) or 0)
    dev.make_environment(dev.TRAIN_PINS)
    assert [str(dev.TRAIN_PINS) in line for line in ran].count(True) == 1 and len(made) == 1
    ran.clear()
    dev.make_environment(dev.TRAIN_PINS)
    assert not ran
    dev.make_environment()  # what is there stays
    assert [str(dev.PINS) in line for line in ran].count(True) == 1 and len(made) == 1
    ran.clear()
    dev.make_environment(dev.TRAIN_PINS)  # the larger one serves
    dev.make_environment()
    assert not ran
