"""Which calls count as moments, and what stands still at one of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from smckpt.errors import UsageError
from smckpt.run import ending, moments
from smckpt.run.moments import Moments

SHELL = "mkdir r/d; echo one > r/d/a; mv r/d/a r/d/b; cat r/d/b > elsewhere; ln r/d/b r/c; rm r/d/b"
# Two processes; the second one writes in a thread.
TWO = """
import os, subprocess, sys, threading
if len(sys.argv) == 2:
    open(sys.argv[1] + "/first", "w").close()
    subprocess.run([sys.executable, "-S", __file__, sys.argv[1], "second"], check=True)
else:
    thread = threading.Thread(target=lambda: open(sys.argv[1] + "/second", "w").close())
    thread.start()
    thread.join()
"""


def run(folder: Path, command: list[str], stop_at: int | None = None) -> tuple[int, Moments]:
    with Moments(str(folder / "r"), stop_at) as found:
        status = ending.run(
            found.wrap(command), directory=folder, inherited=[found.inherited], until=found.reached
        )
    return status, found


def shell(folder: Path, stop_at: int | None = None) -> Moments:
    (folder / "r").mkdir()
    status, found = run(folder, ["sh", "-c", SHELL], stop_at)
    assert status == 0 if stop_at is None else status < 0
    return found


def test_calls_that_change_files_below_the_root_are_counted(tmp_path: Path) -> None:
    found = shell(tmp_path)
    # mkdir, open, mv, ln, rm; a shell's write is to its stdout, which is passed over
    assert found.count == 5 and not found.stopped
    assert os.listdir(tmp_path / "r" / "d") == []
    assert (tmp_path / "elsewhere").read_text() == "one\n"


@pytest.mark.parametrize(
    ("moment", "call", "left"),
    [
        (2, "openat d/a", ["d"]),
        (3, "renameat2 d/a d/b", ["d", "d/a"]),
        (5, "unlinkat d/b", ["c", "d", "d/b"]),
    ],
)
def test_the_run_stands_still_before_the_call(
    tmp_path: Path, moment: int, call: str, left: list[str]
) -> None:
    found = shell(tmp_path, moment)
    name, _, ways = call.partition(" ")
    assert found.stopped.endswith(ways) and found.stopped.startswith(name.rstrip("at2"))
    root = tmp_path / "r"
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == left


def test_processes_and_threads_that_it_starts_count_too(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "two.py").write_text(TWO)
    command = [sys.executable, "-S", "two.py", str(tmp_path / "r")]
    status, found = run(tmp_path, command)
    assert (status, found.count) == (0, 2)
    (tmp_path / "r" / "second").unlink()
    status, found = run(tmp_path, command, 2)
    assert status < 0 and found.stopped == "openat second"
    assert os.listdir(tmp_path / "r") == ["first"]


def test_a_link_to_the_root_and_a_way_through_its_parent_lead_there(tmp_path: Path) -> None:
    (tmp_path / "r" / "d").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "r" / "d")
    status, found = run(tmp_path, ["sh", "-c", "echo a > link/a; echo b > r/d/../b; echo c > c"])
    assert (status, found.count) == (0, 2)


def test_a_command_that_cannot_start_has_no_moments(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    status, found = run(tmp_path, [str(tmp_path / "absent")])
    assert status == 1 and found.count == 0


def test_a_system_without_notifications_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments.platform, "machine", lambda: "riscv64")
    with pytest.raises(UsageError, match="does not tell the calls"):
        Moments(str(tmp_path))
