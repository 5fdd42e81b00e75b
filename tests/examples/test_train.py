"""The main job does what it says: killed at a random moment, it ends like one that was not.

Most tests look at one run of it, that of the quickstart notebook.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from smckpt import find_checkpoints, verify_checkpoint
from tests.support.limits import seconds
from tests.support.main_job import ROOT, SMALL, Outcome, run_main_job
from tests.support.s3 import server_program
from tests.support.tools.notebooks import executed

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where the notebook ran, and the outputs of its cells."""
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, executed("quickstart", folder)


@pytest.fixture(scope="module")
def finished(quickstart: tuple[Path, list[Any]]) -> Outcome:
    """The main job of the notebook: with its defaults, but for the steps."""
    folder, outputs = quickstart
    (printed,) = (out.text for out in outputs if "SIGKILL to rank" in out.get("text", ""))
    return Outcome(folder / "runs" / "quickstart", 0, printed)


def test_the_quickstart_runs_to_its_end(quickstart: tuple[Path, list[Any]]) -> None:
    folder, outputs = quickstart
    assert "image/png" in {kind for out in outputs for kind in out.get("data", ())}
    assert os.listdir(folder / "runs") == ["quickstart"]


def assert_killed_and_equal(outcome: Outcome, ranks: int = 4) -> None:
    """It was killed once, resumed from a checkpoint, and lost no bit by it."""
    assert outcome.status == 0, outcome.output
    (kill,) = outcome.of("kill")
    first, second = outcome.of("start", phase="run")
    assert first["step"] == 0
    assert 0 < second["step"] <= kill["step"]
    assert f"SIGKILL to rank {kill['rank']}" in outcome.output
    losses, uninterrupted = outcome.losses("run"), outcome.losses("reference")
    assert sorted(losses) == list(range(1, len(uninterrupted) + 1))
    assert losses == uninterrupted
    assert {len(row) for row in losses.values()} == {ranks}
    # and what the first attempt had computed is the same, too
    for row in outcome.of("step", attempt=first["attempt"]):
        assert row["losses"] == uninterrupted[row["step"]]


def test_the_main_job_is_killed_resumes_and_every_loss_equals_the_uninterrupted_runs(
    finished: Outcome,
) -> None:
    assert_killed_and_equal(finished)
    assert "equal the uninterrupted run's" in " ".join(finished.output.split())


@pytest.mark.long
def test_so_it_is_with_all_its_defaults(tmp_path: Path) -> None:
    outcome = run_main_job(tmp_path)
    assert_killed_and_equal(outcome)
    assert_it_learns(outcome)


def test_it_learns_and_every_rank_reads_other_text(finished: Outcome) -> None:
    assert_it_learns(finished)


def assert_it_learns(outcome: Outcome) -> None:
    losses = outcome.losses("reference")
    first, last = ([float.fromhex(loss) for loss in losses[step]] for step in (1, max(losses)))
    assert all(loss < 0.6 * start for loss, start in zip(last, first, strict=True))
    assert len(set(last)) == 4


def test_each_save_is_logged_with_what_it_cost(finished: Outcome) -> None:
    last = finished.of("start", phase="run")[-1]["attempt"]
    saves = finished.of("save", attempt=last)
    ranks_of = {row["step"]: set() for row in saves}
    for row in saves:
        ranks_of[row["step"]].add(row["rank"])
        assert 0 < row["blocked"] <= row["committed"]
        assert 0 < row["staged"] <= row["written"] <= row["committed"]
        assert row["bytes"] > 0
    assert all(ranks == {0, 1, 2, 3} for ranks in ranks_of.values())
    for word in ("blocked", "staged", "written", "committed", "MB/s"):
        assert word in finished.output


def test_replicas_share_the_writing_so_a_step_is_stored_once(finished: Outcome) -> None:
    saves = finished.of("save")
    step = max(row["step"] for row in saves)
    written = sum(row["bytes"] for row in saves if row["step"] == step)
    model = AutoModelForCausalLM.from_pretrained(finished.directory / "exported")
    state = 3 * 4 * sum(weight.numel() for weight in model.parameters())  # weight, two moments
    assert state < written < 1.1 * state + 4 * 200_000  # headers, scalars, generators


def test_every_checkpoint_that_is_left_is_whole(finished: Outcome) -> None:
    found = find_checkpoints(str(finished.directory))
    assert [one.step for one in found][-1] == max(finished.losses("run"))
    assert all(len(one.groups) == 2 for one in found)
    report = verify_checkpoint(found[-1].path)
    assert not report.problems


def test_the_exported_model_is_the_trained_one(finished: Outcome) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished.directory / "exported").eval()
    text = (ROOT / "examples" / "train.py").read_bytes()[:1024]
    tokens = torch.tensor(list(text)).reshape(16, 64)
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    assert loss < 3.7 < math.log(256)  # text it never saw; 3.44 after 24 steps
    (written,) = finished.of("text")
    assert written["text"].startswith("def ")


def test_the_figure_is_drawn(finished: Outcome) -> None:
    figure = (finished.directory / "train.png").read_bytes()
    assert figure.startswith(b"\x89PNG")
    assert len(figure) > 30_000


@pytest.mark.long
def test_a_finished_run_is_not_trained_again(finished: Outcome) -> None:
    steps = ("--steps", str(max(finished.losses("run"))))
    again = run_main_job(finished.directory, *steps, "--no-reference", "--kill-at", "never")
    assert again.status == 0, again.output
    assert "resumed from the checkpoint of step" in again.output
    start = again.of("start", phase="run")[-1]
    assert start["step"] == max(finished.losses("run"))
    assert not again.of("step", attempt=start["attempt"])


def test_one_bit_of_one_loss_is_noticed(
    finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import accident
    import report

    steps = len(finished.losses("run"))
    lines = (finished.directory / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    number = max(n for n, row in enumerate(rows) if row.get("phase") == "run" and "losses" in row)
    row = rows[number]
    loss = struct.pack("<d", float.fromhex(row["losses"][3]))
    row["losses"][3] = struct.unpack("<d", bytes([loss[0] ^ 1]) + loss[1:])[0].hex()
    lines[number] = json.dumps(row)
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert not report.publish(tmp_path, accident.Log(tmp_path / "log.jsonl"))
    printed = capsys.readouterr().out
    assert "LOSSES DIFFER" in printed
    assert f"step {steps}:" in printed


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--tp", "2", "--parallel", "ddp"), "--tp needs --parallel fsdp2"),
        (("--kill-at", "later"), "--kill-at is auto, never, or a step"),
        (("--kill-at", "9", "--steps", "5"), "--kill-at 9 is none of the 5 steps"),
        (("--save-every", "0"), "--save-every 0"),
        (("--data", "/nowhere"), "--data /nowhere"),
        (("--shard", "3"), "--shard 3 times --tp 1 does not divide 4 processes"),
        (("--data", "/dev/null"), "--data has 0 bytes of text; these options need 1088 or more"),
    ],
)
def test_impossible_options_are_refused(
    options: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import launch

    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    with pytest.raises(SystemExit) as refused:
        launch.arguments(None)
    assert refused.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.long
def test_fsdp1_is_killed_and_resumes_equal(tmp_path: Path) -> None:
    assert_killed_and_equal(
        run_main_job(tmp_path, *SMALL, "--parallel", "fsdp1", "--world", "2"), ranks=2
    )


COMBINATIONS = [
    ("--parallel", "fsdp1"),
    ("--parallel", "ddp"),
    ("--tp", "2"),
    ("--state-dict", "sharded"),
    ("--parallel", "fsdp1", "--state-dict", "sharded"),
    ("--parallel", "ddp", "--state-dict", "sharded"),
    ("--tp", "2", "--state-dict", "sharded"),
    ("--shard", "4"),
    ("--shard", "1"),
]


@pytest.mark.long
@pytest.mark.parametrize("options", COMBINATIONS, ids=" ".join)
def test_every_kind_of_parallelism_is_killed_and_resumes_equal(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    assert_killed_and_equal(run_main_job(tmp_path, *SMALL, *options))


@pytest.mark.long
def test_a_loss_that_differs_fails_the_run(tmp_path: Path) -> None:
    # other text in the reference: the script must notice
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 400)
    first = run_main_job(tmp_path / "run", *SMALL, "--kill-at", "never", "--no-reference")
    assert first.status == 0, first.output
    other = run_main_job(
        tmp_path / "run", *SMALL, "--kill-at", "never", "--data", str(text), "--world", "4"
    )
    assert other.status != 0
    assert "LOSSES DIFFER" in other.output


@pytest.mark.long
def test_a_kill_before_the_first_commit_starts_over(tmp_path: Path) -> None:
    outcome = run_main_job(tmp_path, *SMALL, "--kill-at", "2")
    assert outcome.status == 0, outcome.output
    assert [start["step"] for start in outcome.of("start", phase="run")] == [0, 0]
    assert outcome.losses("run") == outcome.losses("reference")


@pytest.mark.long
def test_users_own_text_files_are_taken(tmp_path: Path) -> None:
    outcome = run_main_job(tmp_path, *SMALL, "--data", str(ROOT / "docs"), str(ROOT / "README.md"))
    assert_killed_and_equal(outcome)


SAVE = """
import smckpt, torch
smckpt.save({"weights": torch.arange(4.0)}, checkpoint_id="s3://demo/run/first", step=7)
"""


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "SMCKPT_S3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    if server_program() is None:
        pytest.skip("no S3 server here: pip install smckpt[s3-test]")


@pytest.mark.long
def test_without_aws_a_server_is_started_for_the_run_and_what_is_printed_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, no_aws: None
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    import launch

    options = ["--checkpoint-dir", "s3://demo/run", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    args = launch.arguments(None)
    assert launch.s3_is_configured() == ""
    with launch.reachable(args):
        command = [sys.executable, "-c", SAVE]
        subprocess.run(command, check=True, timeout=seconds(120))
        look = launch.look_command(args)
    assert "No AWS credentials and no endpoint" in capfd.readouterr().out
    # the server is gone by now; the command that was printed starts it again
    subprocess.run(look, shell=True, check=True, timeout=seconds(120), cwd=Path.cwd())
    assert " 7 " in capfd.readouterr().out
    monkeypatch.setenv("SMCKPT_S3_ENDPOINT", "http://127.0.0.1:9")
    assert "SMCKPT_S3_ENDPOINT" in launch.s3_is_configured()


def test_the_command_for_checkpoints_on_disk_can_be_pasted(
    finished: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (look,) = re.findall(r"^Checkpoints: (.*)$", finished.output, re.MULTILINE)
    done = subprocess.run(
        look, shell=True, capture_output=True, text=True, timeout=seconds(60),
        cwd=finished.directory.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"step_{max(finished.losses('run'))}" in done.stdout


@pytest.mark.long
def test_with_its_checkpoints_in_s3_it_is_killed_and_resumes_equal(
    tmp_path: Path, no_aws: None
) -> None:
    options = (*SMALL, "--checkpoint-dir", "s3://demo/run")
    outcome = run_main_job(tmp_path, *options)
    assert_killed_and_equal(outcome)
    assert "started an S3 server" in outcome.output
    again = run_main_job(tmp_path, *options, "--no-reference")
    assert "resumed from the checkpoint of step 12" in again.output


@pytest.mark.long
def test_checkpoints_of_another_run_are_not_taken_for_its_own(tmp_path: Path) -> None:
    options = (*SMALL, "--no-reference", "--kill-at", "never", "--checkpoint-dir")
    first = run_main_job(tmp_path / "first", *options, str(tmp_path / "shared"))
    assert first.status == 0, first.output
    other = run_main_job(tmp_path / "other", *options, str(tmp_path / "shared"))
    assert other.status != 0
    assert "is of another run" in other.output
