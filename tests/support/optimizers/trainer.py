"""Which `optim=` names of transformers' Trainer resume exactly, with its own checkpoints and ours.

For each name a Trainer trains four steps, another one saves at the second and is stopped in the
third, and a fresh process resumes that one to the fourth. It is right if all weights are, bit for
bit, those of the run that was not stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.limits import seconds

DOORS = ("stock", "ours")
# what some of them do not go without
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "galore": {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=200"},
    "apollo": {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=200"},
    "lomo": {"max_grad_norm": 0.0},
    "adalomo": {"max_grad_norm": 0.0},
}


def everyone() -> list[str]:
    from transformers.training_args import OptimizerNames

    return [each.value for each in OptimizerNames]


def rows(
    names: Sequence[str], say: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, str]]:
    """Name → door → what happened, as in the cells of `optimizer_table`.

    Args:
        say: is called with a line at the start of each phase, and for each result.
    """

    def run(phase: str, door: str) -> dict[str, str]:
        say(f"Trainer: {len(names)} optimizers, {phase}, {door}")
        return _in_child(phase, door, names, folder)

    with tempfile.TemporaryDirectory() as folder:
        straight = run("straight", "stock")
        found: dict[str, dict[str, str]] = {name: {} for name in names}
        for door in DOORS:
            cut, resumed = run("cut", door), run("resume", door)
            for name in names:
                found[name][door] = _cell(straight[name], cut[name], resumed[name])
                say(f"Trainer: {name}, {door}: {found[name][door].partition(':')[0]}")
    return found


def _cell(straight: str, cut: str, resumed: str) -> str:
    if straight.startswith("!"):
        return f"untrained: {straight[1:]}"
    if cut.startswith("!"):
        return f"refused: {cut[1:]}"
    if resumed.startswith("!"):
        return f"fails: {resumed[1:]}"
    return "exact" if resumed == straight else "differs"


def _in_child(phase: str, door: str, names: Sequence[str], folder: str) -> dict[str, str]:
    """Name → the digest of the weights at the end, or "!" and what went wrong. A name at which the
    child dies gets the blame, and another child goes on."""
    found: dict[str, str] = {}
    while waiting := [name for name in names if name not in found]:
        output = Path(folder, f"{phase}-{door}-{len(found)}.jsonl")
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.optimizers.trainer"]
        arguments = [phase, door, folder, str(output), *waiting]
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # torchao compiles each step anew
        ended = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True,
            timeout=seconds(60 + 20 * len(waiting)),
        )  # fmt: skip
        lines = output.read_text().splitlines() if output.exists() else []
        found |= dict(json.loads(line) for line in lines)
        if ended.returncode and (last := next((n for n in waiting if n not in found), None)):
            found[last] = f"!the process ended with {ended.returncode}: {ended.stderr[-200:]}"
    return found


class _Stop(Exception):
    pass


def one(phase: str, door: str, name: str, folder: Path) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

    import smckpt
    from smckpt.integrations.transformers import SmckptTrainer
    from tests.support.frameworks.small_trainer import arguments

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if phase == "cut" and state.global_step == 3:
                raise _Stop

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
            num_attention_heads=2,
        )
    )  # fmt: skip
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
    more = _ARGUMENTS.get(name.split("_")[0], {})
    trainer = (Trainer if door == "stock" else SmckptTrainer)(
        model=model,
        args=arguments(
            folder / f"{phase == 'straight'}-{door}-{name}", optim=name, learning_rate=1e-2, **more
        ),
        train_dataset=data,
        callbacks=[Stops()],
    )
    try:
        trainer.train(resume_from_checkpoint=phase == "resume")
    except _Stop:
        smckpt.maybe_finalize_async_calls()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(phase: str, door: str, folder: str, output: str, *names: str) -> None:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in names:
        try:
            result = one(phase, door, name, Path(folder))
        except Exception as error:
            result = f"!{type(error).__name__} {error}"
        with open(output, "a") as file:
            file.write(json.dumps([name, result]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
