"""`smckpt repair` as a user runs it, after a save under torchrun whose coordinator was killed."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smckpt import find_checkpoints, verify_checkpoint
from smckpt.checkpoint.upkeep.transfer import copy_checkpoint
from tests.support import synthetic
from tests.support.faults import dead_coordinator
from tests.support.faults.copies import contents
from tests.support.limits import seconds
from tests.support.main_job import ROOT
from tests.support.saves import Group


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


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def named_by(text: str) -> list[str]:
    """The arguments of the first `smckpt repair` command in a text."""
    match = re.search(r"smckpt repair ([^`;(\n]+)", text)
    assert match is not None, text
    return shlex.split(match[1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Step 10 is whole; of step 20 all parts are there."""
    Group(tmp_path / "10", (0, 1), session="a" * 12).save(step=10)
    dead = Group(tmp_path / "20", (0, 1), session="b" * 12)
    dead.lease()
    dead.write(0, step=20)
    return tmp_path


def test_it_asks_before_a_commit_and_takes_anything_but_yes_for_no(root: Path) -> None:
    before = contents(root)
    for answer in ("n\n", ""):
        kept = command("repair", root / "20", answer=answer)
        assert kept.returncode == 1
        assert "All parts of step 20" in kept.stderr and "its next save there fails" in kept.stderr
        assert contents(root) == before
    looked = command("repair", root / "20", "--dry-run")
    assert looked.returncode == 0 and "would commit step 20" in looked.stdout
    assert contents(root) == before
    done = command("repair", root / "20", answer="y\n")
    assert done.returncode == 0 and "committed step 20" in done.stdout, done.stderr
    assert [one.step for one in find_checkpoints(root)] == [10, 20]
    again = told(command("repair", root / "20", "--json"))
    assert (again["whole"], again["commits"], again["mended"]) == (True, False, [])


def test_the_doctor_names_the_command_and_the_command_mends(root: Path) -> None:
    sick = command("doctor", root)
    assert sick.returncode == 1 and "restorable: 10, step 10" in sick.stdout
    assert command("repair", *named_by(sick.stdout), "--yes").returncode == 0
    well = command("doctor", root)
    assert well.returncode == 0 and well.stdout.startswith("restorable: 20, step 20; ")
    copy_checkpoint(root / "20", root.parent / "copy")
    next((root / "20").glob("data-*r00001-0.safetensors")).unlink()
    sick = command("doctor", root)
    assert sick.returncode == 1 and "--from COPY" in sick.stdout
    done = command("repair", *named_by(sick.stdout), "--from", root.parent / "copy")
    assert done.returncode == 0 and "mended" in done.stdout, done.stdout
    assert command("doctor", root).returncode == 0


def test_what_is_left_is_named_and_the_status_says_so(root: Path) -> None:
    data = next((root / "10").glob("data-*r00001-0.safetensors"))
    synthetic.flip(data, data.stat().st_size - 1)
    for option in ("--dry-run", "--threads=1"):
        done = command("repair", root / "10", option)
        assert done.returncode == 1
        line = next(one for one in done.stdout.splitlines() if "cannot be mended" in one)
        for word in (data.name, "rank 1", "bytes 0 to ", "optimizer.step", "--from COPY"):
            assert word in line, line
    (left,) = told(command("repair", root / "10", "--json"))["left"]
    assert left["rank"] == 1 and left["path"] == str(data)
    assert not list((root / "10").glob("pin-*"))
    assert command("repair", root / "absent").returncode == 2
    next((root / "20").glob("part-*r00000.json")).unlink()
    gone = command("repair", root / "20", "--yes")
    assert gone.returncode == 1 and "rank 0 wrote no part" in gone.stdout


# -- real processes --------------------------------------------------------------------------------


def repaired(folder: Path) -> None:
    """Repair step 2 by the commands that `repair` itself names."""
    done = command("repair", folder / "run" / "2", "--yes")
    if done.returncode == 1 and "--group" in done.stdout:  # no lease was taken yet
        done = command("repair", *named_by(done.stdout), "--yes")
    assert done.returncode == 0, done.stdout + done.stderr


def assert_loads_what_was_saved(folder: Path, groups: bool) -> None:
    assert [one.step for one in find_checkpoints(folder / "run")] == [1, 2]
    assert verify_checkpoint(folder / "run" / "2").ok
    ranks = dead_coordinator.load(folder, groups, 2)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["names"] > 15 and rank["other"] == []


@pytest.mark.parametrize("groups", [pytest.param(False, marks=pytest.mark.long, id="one"),
                                    pytest.param(True, id="groups")])  # fmt: skip
def test_a_save_whose_coordinator_was_killed_is_repaired_and_loads_bit_for_bit(
    tmp_path: Path, groups: bool
) -> None:
    assert dead_coordinator.die(tmp_path, groups, 14 if groups else 8)
    assert [one.step for one in find_checkpoints(tmp_path / "run")] == [1]
    repaired(tmp_path)
    assert_loads_what_was_saved(tmp_path, groups)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("groups", [False, True], ids=["one", "groups"])
def test_at_whichever_call_the_coordinator_was_killed(tmp_path: Path, groups: bool) -> None:
    uncommitted = 0
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        folder.mkdir()
        killed = dead_coordinator.die(folder, groups, moment)
        steps = [one.step for one in find_checkpoints(folder / "run")]
        uncommitted += steps == [1]
        repaired(folder)
        if moment % 5 == 0:
            assert_loads_what_was_saved(folder, groups)
        else:
            assert verify_checkpoint(folder / "run" / "2").ok
        shutil.rmtree(folder)
        if not killed:
            break
    print(f"{moment} kills, {uncommitted} of them before the commit")
    assert uncommitted > 5
