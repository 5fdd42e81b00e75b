"""Two exports to one empty directory. Kills are in tests/kills/test_others.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from smckpt import ExportOptions, export_hf
from smckpt.errors import UsageError
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
