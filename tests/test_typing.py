"""What type checkers see from a user's script, in which smckpt is installed and typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.limits import seconds

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import smckpt

found = smckpt.latest_checkpoint("run")
if found is not None:
    reveal_type(found / "part0")
    reveal_type(found.step)
reveal_type(smckpt.async_save({}, checkpoint_id="run"))
reveal_type(smckpt.save({}, checkpoint_id="run"))
"""
SEEN = [
    "str",
    "int | None",
    "smckpt.engine.saving.job.SaveHandle | None",
    "smckpt.engine.saving.job.SaveHandle | None",
]


def test_a_users_script_sees_the_types(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    # other packages take a minute to read, and say nothing of what smckpt returns
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nfollow_imports = skip\n[mypy-smckpt.*]\nfollow_imports = silent\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--cache-dir"]
    done = subprocess.run(
        [*mypy, str(tmp_path / "cache"), "script.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds(280),
    )
    lines = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert [line.split('"')[1].removeprefix("builtins.") for line in lines] == SEEN, done.stdout
