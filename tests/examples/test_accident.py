"""The accident of the main job happens in the step that the log names."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.limits import seconds
from tests.support.main_job import ROOT, environment

STEPS = """
import sys
from pathlib import Path
import torch.distributed as dist
from accident import Accident, Log

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
accident = Accident("2", 5, Log(Path(sys.argv[1])))
accident.step_begins(1)
accident.began -= 3  # the first step took three seconds, as one that compiles does
accident.step_begins(2)  # and this one takes none
accident.step_begins(3)
print("in step 3")
"""


def test_a_step_shorter_than_the_one_before_does_not_outrun_its_accident(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(log)],
        env={**environment(), "LOCAL_WORLD_SIZE": "1"},
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=seconds(120),
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "in step 3" not in done.stdout
    (kill,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (kill["event"], kill["step"], kill["rank"]) == ("kill", 2, 0)
