"""`smckpt cp` and `smckpt rm`, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.faults.copies import contents
from tests.support.limits import seconds
from tests.support.models import shards

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def step7(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = {f"layer{i}.weight": torch.randn(64, 48) for i in range(4)}
    place = tmp_path_factory.mktemp("cli") / "step-7"
    return shards.write(place, 2, lambda rank: shards.fsdp2(weights, rank, 2), step=7)


def command(*arguments: str | Path, answer: str = "") -> subprocess.CompletedProcess[str]:
    """As in a shell without torch: the command needs none."""
    code = "import sys; sys.modules['torch'] = None; from smckpt.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        input=answer,
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )


def test_a_checkpoint_goes_to_s3_and_back_and_is_removed_there(
    step7: Path, s3_root: str, tmp_path: Path
) -> None:
    there = f"{s3_root}/step-7"
    up = command("cp", step7, there, "--json")
    assert up.returncode == 0, up.stderr
    report = json.loads(up.stdout)
    assert (report["target"], report["files"], report["files_present"]) == (f"{there}/", 7, 0)
    again = command("cp", step7, there)
    assert "of which 7 files" in again.stdout
    back = command("cp", there, tmp_path / "back", "--threads", "2")
    assert back.stdout.startswith("7 files, ")
    assert contents(tmp_path / "back") == contents(step7)
    removed = command("rm", there, "--yes", "--json")
    assert json.loads(removed.stdout)["files"] == 7
    assert contents(there) == {}


def test_rm_asks_and_takes_anything_but_yes_for_no(step7: Path, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    command("cp", step7, place)
    whole = contents(place)
    for answer in ("n\n", ""):
        kept = command("rm", place, answer=answer)
        assert kept.returncode == 1
        assert f"Remove the checkpoint of step 7 at {place} (7 files, " in kept.stderr
        assert contents(place) == whole
    assert "removed 7 files" in command("rm", place, answer="y\n").stdout
    assert contents(place) == {}


def test_rm_of_a_directory_without_checkpoint_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = command("rm", tmp_path, "--yes")
    assert done.returncode == 2
    assert "no committed checkpoint" in done.stderr
    assert (tmp_path / "notes.txt").exists()
