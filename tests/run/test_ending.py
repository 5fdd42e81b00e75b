"""What ends with a command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from smckpt.run import ending
from tests.support.limits import seconds


def test_a_process_whose_name_the_kernel_cuts_within_a_character_is_no_obstacle(
    tmp_path: Path,
) -> None:
    odd = tmp_path / ("é" * 8)  # 16 bytes, of which 15 are kept
    odd.write_text("#!/bin/sh\nread line\n")
    odd.chmod(0o755)
    with subprocess.Popen([str(odd)], stdin=subprocess.PIPE) as process:
        assert ending.run([sys.executable, "-c", ""]) == 0
        assert process.poll() is None  # it was there before
        process.communicate(timeout=seconds(60))


@pytest.mark.parametrize("cause", ["from error", ""])
def test_a_signal_that_a_library_made_an_error_of_still_ends_the_process_by_it(cause: str) -> None:
    """As a module in C does that is being imported. An error while the signal is handled is one."""
    code = f"""
import os, signal
from smckpt.run import ending
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which the tests may run under, ignores it
ending.watch()
try:
    os.kill(os.getpid(), signal.SIGHUP)
    signal.sigwait([])
except ending.Ended as error:
    raise ImportError("initialization failed") {cause}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60)
    )
    if cause:
        assert (done.returncode, done.stderr) == (-signal.SIGHUP, "\nEnded by SIGHUP.\n")
    else:
        assert done.returncode == 1 and "initialization failed" in done.stderr
