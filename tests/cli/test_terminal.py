"""No character of a checkpoint that acts on a terminal reaches one as it is."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import smckpt
from smckpt.cli.app import app
from smckpt.cli.output import VisibleFormatter, span_text, time_text
from smckpt.errors import CheckpointError, error_from_json
from tests.support.limits import seconds

# C0, C1 (CSI, OSC), bidi overrides and isolates, spaces without width, line separators, a tag
ACTING = (
    "\x1b[31m", "\x07", "\x9b31m", "\x9d0;t\x9c", "\x85", "\u202e", "\u2066", "\u200f", "\u200b",
    "\ufeff", "\u2028", "\u2060", "\U000e0041",
)  # fmt: skip
NAME = "n" + "".join(ACTING) + "ame"


def shows_nothing_that_acts(text: str) -> None:
    left = {c for c in text if not c.isprintable() and c not in "\n\t"}
    assert not left, left


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step, directory in enumerate(("1", "\u202e2\x9b"), 1):
        state = {"model": {NAME: torch.arange(9.0)}, NAME: NAME, "n": step}
        smckpt.save(
            state,
            checkpoint_id=tmp_path / directory,
            step=step,
            options=smckpt.SaveOptions(metadata={NAME: [NAME], "metrics": {NAME: 1.0}}),
        )
    return tmp_path


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_names_and_values_are_printed_with_escapes(root: Path, options: list[str]) -> None:
    one, two = str(root / "1"), str(root / "\u202e2\x9b")
    for arguments in (
        ["ls", str(root)], ["doctor", str(root)], ["status", str(root)], ["show", two],
        ["show", two, "--stats"], ["diff", one, two], ["verify", two],
        ["prune", str(root), "--keep-last", "1", "--dry-run"], ["cp", two, str(root / "3\u202e")],
    ):  # fmt: skip
        done = CliRunner().invoke(app, [*arguments, *options])
        assert done.exit_code in (0, 1), (arguments, done)
        shows_nothing_that_acts(done.output)
        if options:
            json.loads(done.stdout)
    told = json.loads(CliRunner().invoke(app, ["show", two, "--json"]).stdout)
    assert NAME in told["metadata"] and any(NAME in each["name"] for each in told["tensors"])


def test_errors_show_names_with_escapes_in_a_job_too(root: Path) -> None:
    for path in (root / "\u202e2\x9b").glob("part-*"):
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        smckpt.load(None, checkpoint_id=root / "\u202e2\x9b")
    with pytest.raises(CheckpointError) as other:
        smckpt.load({"model": {"w": torch.zeros(2)}}, checkpoint_id=root / "1")
    for error in (caught.value, other.value, error_from_json(caught.value.to_json())):
        shows_nothing_that_acts(str(error))
        shows_nothing_that_acts(error.message)
    assert caught.value.path is not None and "\u202e" in caught.value.path  # as the system has it


def test_a_log_on_a_terminal_shows_names_with_escapes() -> None:
    record = logging.LogRecord("smckpt", logging.WARNING, "f", 1, "skipped: %s", (NAME,), None)
    shows_nothing_that_acts(VisibleFormatter("smckpt: %(message)s").format(record))


@pytest.mark.parametrize(
    "arguments", [["ls"], ["ls", "--json"], ["verify"], ["show", "--json"], ["--help"]]
)
def test_a_reader_that_ends_early_is_no_finding(root: Path, arguments: list[str]) -> None:
    """1 would say that the checkpoint is damaged."""
    command = [sys.executable, "-m", "smckpt.cli", *arguments, str(root / "1")]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=seconds(60))
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["ls"], "Missing argument 'ROOT' — see python -m smckpt ls --help"),
        (["lss"], "No such command 'lss'. Did you mean"),
        (["prune", "x"], "Missing option '--keep-last' — see python -m smckpt prune --help"),
        (["convert", "a", "b"], "Missing option '--to'. Choose from: smckpt, dcp,"),
        (["ls", "--jsn", "x"], "No such option '--jsn'."),
        (
            ["reshard", "a", "b"],
            "give either --shard N or --full — see python -m smckpt reshard --help",
        ),
    ],
)
def test_a_wrong_call_is_one_line_that_names_the_help(arguments: list[str], line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "smckpt", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"smckpt: {line}") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_breaks_no_number_time_or_name(root: Path, width: int) -> None:
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm"}
    shown = ""
    for arguments in (["ls", "--state", root], ["show", root / "1"]):
        parent, child = pty.openpty()
        command = [sys.executable, "-m", "smckpt.cli", *map(str, arguments)]
        with subprocess.Popen(command, stdout=child, env=environment) as done:
            os.close(child)
            with contextlib.suppress(OSError):  # EIO: the command closed its terminal
                while chunk := os.read(parent, 4096):
                    shown += chunk.decode()
            os.close(parent)
        assert done.returncode == 0, shown
    (found,) = (one for one in smckpt.find_checkpoints(root) if one.step == 1)
    for text in ("checkpoint", "committed", "float32", time_text(found.committed_at), "whole"):
        assert text in shown, shown
    assert found.identity in "".join(shown.split())  # folded, and whole


def test_the_age_of_a_step_is_in_a_unit_that_is_read_at_once() -> None:
    spans = (0.2, 119, 121, 7300, 345_000, 864_000)
    assert [*map(span_text, spans)] == [
        "0 s", "119 s", "2 min", "2 h", "96 h", "10 days",
    ]  # fmt: skip
