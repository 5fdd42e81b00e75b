"""The Trainer's steps in the memory of its hosts."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

import smckpt
from smckpt.errors import UsageError
from smckpt.integrations.kept import KeptSteps, memory_of
from smckpt.integrations.replaced import run_directory
from smckpt.integrations.transformers.files import STEPS, open_seen
from smckpt.manager.room import get_memory

__all__ = ["go_on", "keep", "kept_steps", "note_callbacks"]


def kept_steps(trainer: Any) -> KeptSteps | None:
    """Those of a run that begins, where the Trainer's arguments ask for them."""
    if (memory := memory_of(trainer.smckpt_arguments)) is None:
        return None
    root = trainer._checkpoints.url_of(trainer.args.output_dir)
    kept = KeptSteps(memory, run_directory(root, STEPS.text, trainer._stored))
    kept.begin()
    return kept


def keep(trainer: Any, trial: Any) -> None:
    """After each step: what the Trainer did not save may be due in memory. After a new run's first
    one: begin to get the first save's memory."""
    step = trainer.state.global_step
    if step == 1 and trainer._smckpt_saved != 1 and trainer.args.save_strategy != "no":
        get_memory(trainer._state_to_save, None, [smckpt.SaveOptions()])
    if trainer._smckpt_kept is None or step == trainer._smckpt_saved:
        return
    if trial is not None:
        raise UsageError(
            "memory of smckpt_arguments is not honoured in a search for hyperparameters",
            remedy="leave it out: each trial is a run of its own",
        )
    trainer._smckpt_saved = step

    def state() -> dict[str, Any]:
        note_callbacks(trainer)
        saved: dict[str, Any] = trainer._state_to_save()
        return saved

    trainer._smckpt_kept.save(step, state)


def go_on(trainer: Any) -> None:
    """After a resume, and at a run's beginning: begin what the first save waits for. The file that
    the Trainer read first is no checkpoint of its own where the step is in memory."""
    resumed = trainer._smckpt_resumed
    if trainer.args.save_strategy != "no":
        take = (lambda: None) if resumed is None else trainer._state_to_save
        get_memory(take, None, [smckpt.SaveOptions()])
    if trainer._smckpt_kept is not None:
        trainer._smckpt_kept.restored(trainer.state.global_step)
    if resumed is not None and resumed.chosen.url:
        trainer.accelerator.wait_for_everyone()  # all have read it
        if trainer.args.local_process_index == 0:
            seen = os.path.abspath(resumed.chosen.directory)
            with open_seen(seen) as here:
                here.remove(TRAINER_STATE_NAME)
            with suppress(OSError):  # a save was killed there
                os.rmdir(seen)


def note_callbacks(trainer: Any) -> None:
    """On all ranks, for each saves its own state and goes on from it. The Trainer itself notes
    them on the one that writes its file."""
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if not isinstance(callback, ExportableState):
            continue
        name, callback_state = callback.__class__.__name__, callback.state()
        if isinstance(trainer.state.stateful_callbacks.get(name), list):
            trainer.state.stateful_callbacks[name].append(callback_state)
        else:
            trainer.state.stateful_callbacks[name] = callback_state
