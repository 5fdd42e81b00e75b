"""The small files that the Trainer saves with each model: path → content."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.utils import GENERATION_CONFIG_NAME, logging

__all__ = ["files_of_run", "files_of_tokenizer", "read_all"]

log = logging.get_logger("transformers.smckpt")


def files_of_tokenizer(trainer: Any) -> Mapping[str, bytes]:
    """Those of the tokenizer or processor, and the generation config."""
    made: Any = getattr(trainer, "processing_class", None)
    if made is None:  # in the Trainer's order
        made = getattr(getattr(trainer, "data_collator", None), "tokenizer", None)
    can_generate = getattr(trainer.model, "can_generate", lambda: False)
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(made, "save_pretrained"):
            made.save_pretrained(folder)
        if can_generate():
            try:
                trainer.model.generation_config.save_pretrained(folder)
            except ValueError as error:  # settings that contradict each other
                log.warning("%s is not saved: %s", GENERATION_CONFIG_NAME, error)
        return read_all(folder)


def files_of_run(trainer: Any) -> Mapping[str, bytes]:
    """The Trainer's state and arguments, and the config of the model or of its adapters."""
    made = io.BytesIO()
    try:
        torch.save(trainer.args, made)
    except Exception as error:  # pickle raises what it likes
        log.warning("%s is not saved: %s", TRAINING_ARGS_NAME, error)
        made = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        trainer.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
        adapters: Any = getattr(trainer.model, "peft_config", None)
        config: Any = getattr(trainer.model, "config", None)
        if adapters is not None:
            for name, adapter in adapters.items():
                adapter.save_pretrained(folder if name == "default" else os.path.join(folder, name))
        elif hasattr(config, "save_pretrained"):  # an export needs it
            config.save_pretrained(folder)
        arguments = {TRAINING_ARGS_NAME: made.getvalue()} if made.tell() else {}
        return {**read_all(folder), **arguments}


def read_all(folder: str) -> dict[str, bytes]:
    """The files below a local directory."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
