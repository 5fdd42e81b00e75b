"""`smckpt doctor`, `status` and `prune`, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smckpt import find_checkpoints
from smckpt.checkpoint.commits.choose import choose_commit
from smckpt.checkpoint.commits.commit import take_lease
from smckpt.checkpoint.commits.remove import pinned
from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
from smckpt.storage import open_storage
from tests.support.faults.copies import killed_at
from tests.support.limits import seconds
from tests.support.main_job import ROOT
from tests.support.saves import Group


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None; from smckpt.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        input="",
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10 to 30 are whole."""
    for step in (10, 20, 30):
        group = Group(tmp_path / str(step), (0, 1), session=f"{step:012x}")
        group.save(step=step, metadata={"metrics": {"loss": float(step)}})
    return tmp_path


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_a_sound_root_is_restorable_at_its_newest(root: Path) -> None:
    done = command("doctor", root, "--read")
    assert (done.returncode, done.stdout) == (0, "restorable: 30, step 30\n"), done.stderr
    unread = f"restorable: 30, step 30; its data was not read: `smckpt doctor --read {root}` does\n"
    assert command("doctor", root).stdout == unread


@pytest.mark.parametrize("kind", ["data-*.safetensors", "data-*.crc", "part-*"])
@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_flipped_byte_makes_the_step_no_restorable_one(root: Path, kind: str, at: float) -> None:
    found = next((root / "30").glob(kind))
    content = bytearray(found.read_bytes())
    content[round(at * (len(content) - 1))] ^= 1
    found.write_bytes(content)
    done = command("doctor", root, "--read")
    assert done.returncode == 1 and "30: damaged: " in done.stdout, done.stdout
    assert "smckpt repair" in done.stdout
    assert done.stdout.splitlines()[-1] == "restorable: 20, step 20"


def test_ls_gives_metrics_the_best_and_the_state(root: Path) -> None:
    next((root / "20").glob("data-*.safetensors")).unlink()
    rows = [line.split() for line in command("ls", root).stdout.splitlines()[1:]]
    assert rows[0] == ["checkpoint", "step", "kind", "size", "groups", "committed", "loss"]
    assert [row[-1] for row in rows[2:]] == ["30", "20", "10"]
    rows = [
        line.split()
        for line in command("ls", root, "--best", "loss:max:2", "--state").stdout.splitlines()[1:]
    ]
    assert rows[0][-3:] == ["loss", "best", "state"]
    assert [row[-2:] for row in (rows[2], rows[4])] == [["1", "whole"], ["-", "whole"]]
    assert "missing" in rows[3]
    (thirty, twenty, ten) = told(command("ls", root, "--best", "loss:min:1", "--state", "--json"))
    assert (thirty["best"], ten["best"], ten["state"]) == (None, 1, "whole")
    assert "is missing" in twenty["state"]
    plain = told(command("ls", root, "--json"))
    assert not {"best", "state"} & plain[0].keys()


@pytest.mark.parametrize("at", [".", "run", "runs/one"])
@pytest.mark.parametrize("name", ["ls", "doctor", "status"])
def test_another_formats_checkpoint_is_named(tmp_path: Path, name: str, at: str) -> None:
    step = tmp_path / at / "step_20"
    for folder in (step, tmp_path / at / "step_3"):
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"")
        (folder / "__0_0.distcp").write_bytes(b"")
    done = command(name, tmp_path / at if at == "runs/one" else tmp_path)
    assert f"{step}: this is a checkpoint of torch.distributed.checkpoint (DCP)" in done.stdout


@pytest.mark.parametrize("line", ["ls", "doctor", "status", "prune --yes --keep-last 1"])
def test_a_directory_that_is_absent_is_no_empty_root(tmp_path: Path, line: str) -> None:
    done = command(*line.split(), tmp_path / "mistyped")
    assert (done.returncode, done.stdout) == (2, "")
    assert "mistyped: no such directory" in done.stderr
    (tmp_path / "one.pt").write_bytes(b"")
    done = command(*line.split(), tmp_path / "one.pt")
    assert done.returncode == 2 and "one.pt: this is a file, not a directory" in done.stderr


def test_the_status_of_a_step_itself_names_it(root: Path) -> None:
    shown = command("status", root / "30").stdout
    assert f"; the newest is {root / '30'}, committed " in shown, shown


def test_a_link_to_a_step_is_no_other_step(root: Path) -> None:
    for name, to in (("latest", "30"), ("best", "10")):
        (root / name).symlink_to(to)
    assert "3 steps, " in command("status", root).stdout
    assert told(command("status", root, "--json"))["newest"]["place"] == "30"
    assert command("doctor", root, "--read").stdout == "restorable: 30, step 30\n"
    assert [one["place"] for one in told(command("doctor", root, "--json"))["steps"]] == [
        "30", "20", "10",
    ]  # fmt: skip
    listed = [Path(one["path"]).name for one in told(command("ls", root, "--json"))]
    assert listed == ["30", "20", "10"]


@pytest.mark.parametrize("broken", ["removed", "cut"])
@pytest.mark.parametrize("kind", ["manifest-*", "part-*"])
def test_each_fault_has_one_remedy(root: Path, broken: str, kind: str) -> None:
    found = next((root / "30").glob(kind))
    content = found.read_bytes()
    found.unlink()
    if broken == "cut":
        found.write_bytes(content[:100])
    done = command("doctor", root)
    assert done.returncode == 1
    faults = [line for line in done.stdout.splitlines() if line.startswith("30")]
    assert [line.count("What to do: ") for line in faults] == [1]
    assert (kind == "part-*" or broken == "cut") <= (found.name in faults[0])
    summary = command("verify", root / "30").stdout.splitlines()[-1:]
    assert not any(line.endswith("of ") for line in summary)


def test_each_newer_step_is_told_with_its_cause(root: Path) -> None:
    data = next((root / "20").glob("data-*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    next((root / "30").glob("manifest-*")).write_text("{}")
    cut = Group(root / "40", (0, 1), session="d" * 12)
    cut.lease()
    cut.write_rank(1, 0, step=40)  # rank 0 was killed
    done = command("doctor", root, "--json")
    assert done.returncode == 1
    answer = told(done)
    assert answer["restorable"] == "10"
    states = {one["place"]: one["state"] for one in answer["steps"]}
    assert states == {"40": "unfinished", "30": "damaged", "20": "cut", "10": "whole"}
    said = command("doctor", root).stdout
    assert data.name in said and "manifest" in said and "1 ranks have written" in said
    assert said.splitlines()[-1].startswith("restorable: 10, step 10; ")
    left = told(command("status", root, "--json"))
    assert [one["place"] for one in left["under_way"]] == ["40"]
    assert left["newest"]["step"] == 10


def test_status_and_ls_name_one_newest_step_where_an_older_one_was_saved_later(
    tmp_path: Path,
) -> None:
    for step in (20, 10):
        Group(tmp_path / str(step), (0,), session="a" * 12).save(step=step)
    assert told(command("status", tmp_path, "--json"))["newest"]["step"] == 20
    assert told(command("ls", tmp_path, "--json"))[0]["step"] == 20


def test_the_rank_the_host_and_the_command_are_named(root: Path) -> None:
    data = next((root / "20").glob("data-*-r00001-*.safetensors"))
    data.unlink()
    cut = Group(root / "40", (0, 1), session="d" * 12)
    lease = take_lease(cut.access, str(cut.directory), cut.session, cut.host, ranks=(0, 1))
    cut.fencing_token = lease["fencing_token"]
    cut.write_rank(1, 0, step=40)  # rank 0 was killed
    steps = {one["place"]: one for one in told(command("doctor", root, "--json"))["steps"]}
    host = next(iter(found_hosts(root / "30")))
    assert steps["20"]["why"].endswith(f"{data.name} is missing (rank 1 on {host})")
    assert f"`smckpt repair {root / '20'}`" in steps["20"]["remedy"]
    why = f"1 ranks have written their part, ranks [0] have not (in the newest step on {host})"
    assert steps["40"]["why"].startswith(why)


def found_hosts(step: Path) -> set[str]:
    commit = choose_commit(open_storage(str(step)))
    return {part.host for _, manifest in commit.manifests for part in manifest.parts}


def test_where_nothing_is_whole_it_says_so(tmp_path: Path) -> None:
    done = command("doctor", tmp_path)
    assert done.returncode == 1 and "nothing below" in done.stdout
    assert command("status", tmp_path).returncode == 0


def test_prune_deletes_what_the_rules_do_not_keep(root: Path) -> None:
    looked = told(command("prune", root, "--keep-last", "1", "--dry-run", "--json"))
    assert [one["step"] for one in looked["doomed"]] == [10, 20]
    said = command("prune", root, "--keep-last", "1", "--dry-run").stdout.splitlines()[-1]
    assert said.startswith("2 steps (") and said.endswith(" would be deleted")
    assert command("prune", root, "--keep-last", "1").returncode != 0  # nobody said yes
    assert len(find_checkpoints(root)) == 3
    best = ("--keep-best", "loss:min:1")
    done = told(command("prune", root, "--keep-last", "1", *best, "--yes", "--json"))
    assert done["deleted"] == [str(root / "20")]
    assert sorted(os.listdir(root)) == ["10", "30"]


def test_prune_spares_what_is_pinned_and_finishes_what_was_cut_short(root: Path) -> None:
    run = RunDirectory(open_storage(str(root)), Template("{step}"))
    (ten, *_) = find_checkpoints(root)
    assert killed_at(3, lambda: run.remove(ten))
    states = {
        one["place"]: one["state"] for one in told(command("doctor", root, "--json"))["steps"]
    }
    assert states["10"] == "removing"
    with pinned(root / "20"):
        done = command("prune", root, "--keep-last", "1", "--yes")
        assert sorted(os.listdir(root)) == ["20", "30"]
        assert "step 20 stays" in done.stderr and "has pinned" in done.stderr, done
        assert done.stdout.endswith("0 steps deleted, 2 steps kept\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--keep-best", "los:min:1"], "metric 'los' — give --keep-best one of loss"),
        (["--keep-best", "loss:mni:1"], "'--keep-best': 'loss:mni:1': write METRIC:min:N"),
        (["--keep-best", "loss:min:0"], "'--keep-best': 'loss:min:0': write METRIC:min:N"),
    ],
)
def test_prune_refuses_a_metric_that_would_keep_no_step(
    root: Path, arguments: list[str], error: str
) -> None:
    done = command("prune", root, "--keep-last", "1", "--yes", *arguments)
    assert done.returncode == 2 and error in done.stderr, done
    assert len(find_checkpoints(root)) == 3
    done = command("ls", root, "--best", arguments[1])
    assert done.returncode == 2 and error.replace("--keep-best", "--best") in done.stderr, done


@pytest.mark.parametrize("names", ["step_{step}", "run-{step:06d}-a"])
def test_prune_of_steps_with_other_names_says_what_to_write(tmp_path: Path, names: str) -> None:
    for step in (1, 2):
        Group(tmp_path / names.format(step=step), (0,), session=f"{step:012x}").save(step=step)
    done = command("prune", tmp_path, "--keep-last", "1", "--yes")
    assert done.returncode == 2 and done.stderr.endswith(f"such as {tmp_path}/{names}\n"), done
    command("prune", done.stderr.split()[-1], "--keep-last", "1", "--yes")
    (left,) = tmp_path.iterdir()
    inside = command("prune", left, "--keep-last", "1", "--yes")
    assert inside.returncode == 2 and "pass the directory above it" in inside.stderr, inside


def test_prune_deletes_nothing_where_the_newest_is_not_whole(root: Path) -> None:
    next((root / "30").glob("part-*")).unlink()
    done = command("prune", root, "--keep-last", "1", "--yes")
    assert "not whole" in done.stderr + done.stdout
    assert sorted(os.listdir(root)) == ["10", "20", "30"]


@pytest.mark.parametrize("kind", ["data-*.safetensors", "data-*.crc", "part-*"])
def test_prune_deletes_nothing_where_doctor_finds_the_newest_damaged(root: Path, kind: str) -> None:
    found = next((root / "30").glob(kind))
    content = bytearray(found.read_bytes())
    content[len(content) // 2] ^= 1
    found.write_bytes(content)
    done = command("prune", root, "--keep-last", "1", "--yes")
    assert "0 steps deleted" in done.stdout and found.name in done.stderr
    assert command("doctor", root).stdout.count("restorable: 20, step 20") == 1
    assert len(find_checkpoints(root)) == 3


@pytest.mark.parametrize("name", ["doctor", "status"])
def test_a_save_that_was_killed_before_it_wrote_is_seen(root: Path, name: str) -> None:
    (root / "40").mkdir()
    (root / "40" / "probe-0123456789ab.json").write_bytes(b"x")
    done = command(name, root)
    assert "40: unfinished: a save has tried the directory" in done.stdout, done.stdout


def test_prune_takes_a_root_that_ends_in_the_names_of_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        Group(tmp_path / f"step-{step}", (0,), session=f"{step:012x}").save(step=step)
    command("prune", f"{tmp_path}/step-{{step}}", "--keep-last", "1", "--yes")
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.parametrize("arguments", [["doctor"], ["prune", "--keep-last", "3"]])
def test_what_a_cut_save_left_in_a_step_that_the_run_has_passed_is_named(
    root: Path, arguments: list[str]
) -> None:
    for at in (root / "15", root / "another" / "3"):  # its run may be writing it
        Group(at, (0, 1), session=f"{int(at.name):012x}").write(0)
    name, *more = arguments
    done = command(name, root, *more)
    assert done.returncode == 0, done.stderr
    assert "15: unfinished, " in done.stdout and done.stdout.count("delete the directory") == 1
    assert list((root / "15").iterdir())
