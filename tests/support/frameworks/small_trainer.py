"""A Trainer of a tiny model that saves every other step, and callbacks that look at it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

import smckpt
from smckpt.integrations.transformers import SmckptTrainer
from tests.support.frameworks.trainer_run import take_cpus

DATA = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2,
        )
    )  # fmt: skip


def arguments(out: Any, steps: int = 4, **more: Any) -> TrainingArguments:
    made = TrainingArguments(
        str(out), max_steps=steps, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=1, **more,
    )  # fmt: skip
    if "fsdp" in more:
        assert made.device.type == "cpu"
        take_cpus()
    return made


def trainer(
    out: Any,
    steps: int = 4,
    *callbacks: Any,
    kind: Any = SmckptTrainer,
    model: Any = None,
    eval_dataset: Any = None,
    **more: Any,
) -> Any:
    return kind(
        model=tiny() if model is None else model, args=arguments(out, steps, **more),
        train_dataset=DATA, eval_dataset=eval_dataset, callbacks=[*callbacks],
    )  # fmt: skip


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Begins(TrainerCallback):
    """Notes the step at which a run begins, and the weights that it has there."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.step = state.global_step
        self.weights = weights(others["model"])


class Opens(TrainerCallback):
    """Opens each checkpoint in `on_save`, as an upload or an evaluation does."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[set[str], bool]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        directory = f"{args.output_dir}/checkpoint-{state.global_step}"
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        known = same(weights(loaded), weights(others["model"]))
        self.seen[state.global_step] = {*os.listdir(directory)}, known
        assert [*smckpt.find_checkpoints(directory)], "it is not committed"


@contextmanager
def heard(name: str, level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines that a logger of transformers writes; it does not propagate them."""
    lines: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger(name), Keeps()
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def flip(directory: Path, what: str, rank: int = 0) -> None:
    """Damage a checkpoint: data of a model or an optimizer that a rank wrote, or that another one
    did if it wrote none; the record of a part, or the commit."""
    if what in ("part", "manifest"):
        path = min(directory.glob(f"{what}-*.json"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        return
    files = sorted(directory.glob("data-*.safetensors"))
    path = next((one for one in files if f"-r{rank:05d}-" in one.name), files[0])
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    rows = [row["data_offsets"] for name, row in header.items() if name.startswith(what)]
    data[8 + length + rows[0][0]] ^= 1
    path.write_bytes(data)
