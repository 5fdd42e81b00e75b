"""The programs that serve models, as judges of exports: vLLM, llama.cpp and mlx-lm.

Each reads directories in an interpreter of its own (`server_run.py`), which a variable names, and
says what it computes. Beside every export it reads what `save_pretrained` of the same model writes,
the control. Its verdicts are a table in docs/evidence/families.md.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.limits import seconds

VARIABLES = {"vLLM": "SMCKPT_VLLM_PYTHON", "llama.cpp": "SMCKPT_LLAMA_CPP_PYTHON",
             "mlx-lm": "SMCKPT_MLX_PYTHON"}  # fmt: skip
SERVERS = tuple(VARIABLES)
# Apart at most, in log-probabilities: GELU is a table of float16 in llama.cpp, and approximate in
# mlx-lm.
EQUAL = {"vLLM": 1e-4, "llama.cpp": 5e-3, "mlx-lm": 1e-3}
OURS, CONTROL = "ours", "control"
_RUN = Path(__file__).with_name("server_run.py")
LONG = 3000  # seconds for all models of a server


@dataclass(frozen=True)
class Answer:
    """What a server made of one directory: how far its log-probabilities are apart from those of
    transformers, or why it computes none."""

    apart: float | None
    reason: str = ""
    bound: float = 0.0

    @property
    def equal(self) -> bool:
        return self.apart is not None and self.apart <= self.bound

    def __str__(self) -> str:
        if self.equal:
            return "equal"
        return f"differs by {self.apart:.0e}" if self.apart is not None else f"no: {self.reason}"


@dataclass(frozen=True)
class Verdict:
    ours: Answer
    control: Answer

    @property
    def fault(self) -> bool:
        """Whether the export is worse than what `save_pretrained` writes."""
        return not self.ours.equal and self.control.equal

    def __str__(self) -> str:
        """A cell of the table."""
        ours, control = str(self.ours), str(self.control)
        if ours == control:
            return ours if self.ours.equal else f"{ours}, as the control"
        return f"{ours}; the control: {control}"


def made(folder: Path, model: Any, tokens: Sequence[int]) -> None:
    """Leave what transformers computes beside `ours` and `control`."""
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([list(tokens)])).logits[0]
    torch.save((list(tokens), logits.double().log_softmax(-1)), folder / "wanted.pt")


def interpreter(server: str) -> str:
    """Unset, it is no failure even where all tests are wanted: a server is large."""
    named = os.environ.get(VARIABLES[server])
    if not named:
        pytest.skip(f"{VARIABLES[server]} can name an interpreter with {server}")
    return named


def judge(server: str, root: Path) -> tuple[str, dict[str, Verdict]]:
    """The server's version, and its verdict on each folder in `root` that `made` has completed."""
    python, results = interpreter(server), root / f"{server}.jsonl"
    wanted = {path.parent.name: torch.load(path) for path in sorted(root.glob("*/wanted.pt"))}
    jobs = deque(
        {"name": f"{name}/{which}", "folder": str(root / name / which), "tokens": tokens}
        for name, (tokens, _) in wanted.items()
        for which in (OURS, CONTROL)
    )
    version, found = "", dict[str, Answer]()
    while jobs:  # once more after each model that ends the process
        results.unlink(missing_ok=True)
        done = subprocess.run(
            [python, "-W", "ignore", _RUN, server, results], text=True, capture_output=True,
            input="".join(json.dumps(job) + "\n" for job in jobs), timeout=seconds(LONG),
            env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
        lines = results.read_text().splitlines() if results.exists() else []
        assert lines, f"{server} does not start: {done.stderr[-2000:]}"
        version = json.loads(lines[0])["version"]
        for line in lines[1:]:
            said = json.loads(line)
            name = jobs.popleft()["name"]
            assert said["name"] == name
            found[name] = _answer(said, wanted[name.rpartition("/")[0]][1], EQUAL[server])
        if jobs and done.returncode:
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            found[str(jobs.popleft()["name"])] = Answer(None, _short(f"it ends: {said}"))
    return version, {
        name: Verdict(found[f"{name}/{OURS}"], found[f"{name}/{CONTROL}"]) for name in wanted
    }


def _answer(said: Mapping[str, Any], wanted: torch.Tensor, bound: float) -> Answer:
    if "error" in said:
        return Answer(None, _short(said["error"]))
    scores = torch.tensor(said["scores"], dtype=torch.float64)
    if scores.shape != wanted.shape:
        return Answer(None, f"scores of shape {tuple(scores.shape)}, not {tuple(wanted.shape)}")
    apart = (scores - wanted).abs().max().item()
    return Answer(apart if apart == apart else float("inf"), bound=bound)


def _short(text: str) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= 110 else text[:109] + "…"
