"""A log that survives SIGKILL, and the process that sends the SIGKILL."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Log:
    """Events, one JSON object a line; many processes may append at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **values}) + "\n"
        # one write call, so a process that is killed leaves a whole line or none
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())

    def events(self, event: str) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


class Accident:
    """Kills one rank of this host, once in a run, at a random moment.

    Args:
        when: "auto": a random moment after the first commit; "never"; or a step: a random moment in
            it.
        steps: of the whole training. Step n is the n-th, counted from 1.
        log: shows whether it has happened already, and gets an event before it happens.
    """

    def __init__(self, when: str, steps: int, log: Log) -> None:
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        here = int(os.environ["LOCAL_WORLD_SIZE"])  # rank 0's host has the first ranks
        self.victims, self.steps, self.log = pids[:here], steps, log
        self.chance = random.SystemRandom()  # not one of the generators that a checkpoint restores
        self.earlier = log.events("kill")
        self.due = dist.get_rank() == 0 and when != "never" and not self.earlier
        self.moment = float(when) - self.chance.random() if when.isdigit() else None
        self.step, self.seconds, self.began = 1, 0.0, time.perf_counter()
        self.timer: threading.Timer | None = None

    def __enter__(self) -> Accident:
        return self

    def first_commit(self) -> None:
        """From now on the kill may happen. May be called from any thread."""
        if self.moment is None:
            self.moment = self.chance.uniform(self.step - 1, self.steps)

    def step_begins(self, step: int) -> None:
        """On rank 0, start the timer if the moment is in this step."""
        if self.timer is not None:
            # the step before was shorter than its timer: the kill is still due
            self.timer.join()
        now = time.perf_counter()
        self.step, self.seconds, self.began = step, now - self.began, now
        if self.due and step == self.steps:
            self.first_commit()  # nothing was committed yet, and this is the last step
        if self.due and self.moment is not None and step >= self.moment:
            self.due = False
            part = self.moment % 1
            self.timer = threading.Timer(part * self.seconds, self._happen, [step, part])
            self.timer.start()

    def __exit__(self, kind: type[BaseException] | None, error: Any, _: Any) -> None:
        """Wait for a kill that is under way. A rank that loses its peer prints one line."""
        if self.timer is not None:
            self.timer.join()
        if isinstance(error, Exception) and self.log.events("kill") != self.earlier:
            line = str(error).partition("\n")[0]
            raise SystemExit(
                f"rank {dist.get_rank()} ends, because its peer is gone: {line}"
            ) from None

    def _happen(self, step: int, part: float) -> None:
        rank = self.chance.randrange(len(self.victims))
        self.log.append("kill", step=step, moment=step - 1 + part, rank=rank)
        print(f"\n*** SIGKILL to rank {rank} in step {step} ***\n", flush=True)
        os.kill(self.victims[rank], signal.SIGKILL)
        if rank:
            time.sleep(60)  # the launcher ends this rank too
