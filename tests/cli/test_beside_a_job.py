"""Commands beside a job that saves and deletes steps: each says what is true, and disturbs nothing.

`SMCKPT_COMMANDS` says how many (60).
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

import smckpt
from smckpt.cli.app import app
from smckpt.errors import CheckpointError
from tests.support.limits import seconds
from tests.support.main_job import environment

JOB = """
import os, sys, torch
from smckpt import CheckpointManager

root, until = sys.argv[1:]
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with CheckpointManager(root, interval=1, keep_last_n=3, signals=()) as manager:
    step = manager.restore(into=state)
    while not os.path.exists(until):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        step += 1
        if manager.should_save(step):
            manager.save(step, state)
print(step, flush=True)
"""
COUNT = int(os.environ.get("SMCKPT_COMMANDS", "60"))


@pytest.mark.timeout(COUNT + 300)
def test_no_command_is_wrong_or_disturbs_a_job_that_saves_and_deletes(tmp_path: Path) -> None:
    seed = int(os.environ.get("SMCKPT_SEED", str(random.randrange(1 << 30))))
    print("seed", seed)
    chosen, root, until = random.Random(seed), tmp_path / "run", tmp_path / "until"
    outcomes = Counter[str]()
    with subprocess.Popen(
        [sys.executable, "-c", JOB, str(root), str(until)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as job, contextlib.ExitStack() as end:  # fmt: skip
        end.callback(job.kill)
        began = time.monotonic()
        while len(smckpt.find_checkpoints(root)) < 2:
            assert time.monotonic() - began < seconds(60) and job.poll() is None, "no steps"
            time.sleep(0.05)
        for number in range(COUNT):
            *_, older, newest = smckpt.find_checkpoints(root)
            command = chosen.choice([
                ["ls", str(root)], ["ls", "--state", str(root)], ["status", str(root)],
                ["doctor", str(root)], ["doctor", "--read", str(root)],
                ["verify", newest], ["verify", "--quick", older], ["show", newest],
                ["diff", older, newest], ["prune", str(root), "--keep-last", "2", "--dry-run"],
                ["cp", newest, str(tmp_path / "copies" / str(number))],
            ])  # fmt: skip
            done = CliRunner().invoke(app, command)
            kept = done.exception is None or isinstance(
                done.exception, (SystemExit, CheckpointError)
            )
            assert kept, (command, done.exception, done.output)
            assert "Traceback" not in done.output and "please report" not in done.output, command
            outcomes[f"{command[0]}: {done.exit_code}"] += 1
            if command[0] == "doctor":  # the newest may be under way
                assert "restorable: " in done.output, done.output
                assert "damaged" not in done.output, done.output
            elif command[0] in ("ls", "status", "prune"):  # of the run, which is well
                assert done.exit_code == 0, f"{command} {done.output}"
            elif done.exit_code and command[0] != "diff":  # its step went meanwhile
                assert not Path(newest).exists() or not Path(older).exists(), done.output
            if command[0] == "cp" and not done.exit_code:
                assert smckpt.verify_checkpoint(command[2]).ok
        until.touch()
        out, error = job.communicate(timeout=seconds(60))
    assert job.returncode == 0 and "Traceback" not in error, error
    print(dict(outcomes))
    left = [one.step for one in smckpt.find_checkpoints(root)]
    assert left == [int(out) - 2, int(out) - 1, int(out)]
    assert smckpt.verify_checkpoint(smckpt.find_checkpoints(root)[-1]).ok
