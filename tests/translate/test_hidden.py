"""Two exports to one empty directory. Kills are in tests/kills/test_others.py."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from smckpt import ExportOptions, export_hf
from smckpt.errors import StorageError, UsageError
from smckpt.translate import hidden
from smckpt.translate.exports.export import ExportReport
from tests.support.saves import Group, hybrid, state_of

SOMEBODYS = ".smckpt-export-0123456789abcdef-1-1-01234567"  # of a host that this one cannot see


def export(tmp_path: Path, seed: int, out: Path, **more: Any) -> ExportReport:
    checkpoint = tmp_path / f"c{seed}"
    if not checkpoint.exists():
        state = state_of(hybrid((0, 1), 1), rows=20, seed=seed)
        Group(checkpoint, (0, 1), state=state).save(step=seed)
    options = ExportOptions(
        against_model=False, naming="module", threads=1, allow_nonfinite=True, **more
    )
    return export_hf(checkpoint, out, config={"model_type": "llama"}, options=options)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_of_two_exports_at_once_one_completes_and_the_other_says_what_it_met(
    tmp_path: Path,
) -> None:
    out, alone = tmp_path / "out", tmp_path / "alone"
    export(tmp_path, 2, alone)
    reports: list[ExportReport] = []

    def meanwhile(done: int, total: int) -> None:
        if not reports:
            (running,) = (path.name for path in out.iterdir())
            reports.append(export(tmp_path, 2, out))
            assert any(running in note for note in reports[0].notes), "it is not removed"

    with pytest.raises(UsageError, match="now it holds"):
        export(tmp_path, 1, out, progress=meanwhile)
    assert files(out) == files(alone)


def test_what_others_have_in_the_directory_stays_beside_the_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "pipe")
    for name in ("link\n", "README.md"):
        (out / name).symlink_to("nowhere")

    def meanwhile(done: int, total: int) -> None:
        (out / "export.log").write_text(f"{done} of {total}")
        (out / "runs").mkdir(exist_ok=True)

    notes = export(tmp_path, 1, out, progress=meanwhile).notes
    assert any("README.md was left as it is" in note for note in notes)
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", "export.log", "link\n", "model.safetensors", "pipe", "runs",
    }  # fmt: skip
    assert (out / "README.md").is_symlink() and (out / "pipe").is_fifo()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_name_of_a_model_that_others_have_is_refused_and_left_alone(
    tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    calls: list[int] = []

    def meanwhile(done: int, total: int) -> None:
        calls.append(done)
        (out / name).write_text("a user's")

    with pytest.raises(UsageError, match=f"now it holds .*{name}"):
        export(tmp_path, 1, out, progress=meanwhile)
    assert calls and files(out) == {name: b"a user's"}
    calls.clear()
    (out / name).unlink()
    (out / name).symlink_to("nowhere")
    with pytest.raises(UsageError, match=f"already holds .*{name}"):
        export(tmp_path, 1, out, progress=meanwhile)
    assert not calls, "at once, and not when all is made"
    assert os.listdir(out) == [name] and (out / name).is_symlink()


@pytest.mark.parametrize("links", [True, False])
def test_a_name_that_others_take_at_the_last_moment_stays_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    out, link = tmp_path / "out", os.link

    def late(source: str, name: str, **more: Any) -> None:
        if name == "config.json":
            (out / name).write_text("a user's")
        if not links:
            raise OSError(errno.EPERM, "a file system without hard links")
        link(source, name, **more)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(UsageError, match=r"now it holds \['config.json'\]"):
        export(tmp_path, 1, out)
    assert files(out) == {"config.json": b"a user's"}


def test_a_link_whose_answer_was_lost_on_its_way_is_the_exports_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, link = tmp_path / "out", os.link

    def twice(source: str, name: str, **more: Any) -> None:  # as NFS repeats a request
        link(source, name, **more)
        link(source, name, **more)

    monkeypatch.setattr(os, "link", twice)
    export(tmp_path, 1, out)
    assert files(out).keys() == {"README.md", "config.json", "model.safetensors"}


def test_an_export_whose_files_are_removed_meanwhile_does_not_look_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(StorageError, match=r"does not see 1 files .*'model.safetensors'"):
        export(tmp_path, 1, out, progress=lambda *_: shutil.rmtree(out, ignore_errors=True))
    assert not out.exists()


@pytest.mark.parametrize("shown", [0, 1, 2])
def test_an_export_from_which_its_claim_is_taken_shows_no_further_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    out, calls, link = tmp_path / "out", list[str](), os.link
    out.mkdir()
    (out / SOMEBODYS).mkdir()

    def taken(source: str, name: str, **more: Any) -> None:
        if source.startswith(f"{hidden.CLAIM}/"):
            calls.append(name)
            if len(calls) == shown + 1:
                assert hidden.clear(str(out)) == [SOMEBODYS]
                assert os.listdir(out) == [SOMEBODYS], "what was shown is gone"
        link(source, name, **more)

    monkeypatch.setattr(os, "link", taken)
    with pytest.raises(UsageError, match="another export shows its files"):
        export(tmp_path, 1, out)
    assert os.listdir(out) == [SOMEBODYS]
    assert len(calls) == shown + 1


def test_files_of_others_stay_where_an_export_is_cleared_away(tmp_path: Path) -> None:
    name = hidden.begin(str(tmp_path))
    (tmp_path / name / "config.json").write_text("ours")
    (tmp_path / hidden.CLAIM).mkdir()
    os.rename(tmp_path / name, tmp_path / hidden.CLAIM / name)
    os.link(tmp_path / hidden.CLAIM / name / "config.json", tmp_path / "config.json")
    (tmp_path / "notes.txt").write_text("a user's")
    (tmp_path / SOMEBODYS).symlink_to("/etc")
    assert hidden.clear(str(tmp_path)) == [SOMEBODYS]
    assert sorted(os.listdir(tmp_path)) == [SOMEBODYS, "notes.txt"]
