"""What ends with a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
