"""Hugging Face's Trainer, saving and resuming through smckpt.

One line of a script changes: `class MyTrainer(SmckptTrainerMixin, Trainer)`, or `SmckptTrainer` in
place of `Trainer`. A callback cannot do it, since the Trainer has saved before it calls `on_save`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, logging

import smckpt
from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.storage import Storage, access_to
from smckpt.translate.config import TEMPLATES, is_beside_config

__all__ = ["SmckptTrainer", "SmckptTrainerMixin"]

log = logging.get_logger("smckpt.transformers")

_STEP = re.compile(r"checkpoint-(\d+)")


class SmckptTrainerMixin:
    """Put before `Trainer` among the bases of a class. Arguments and calls stay as they are.

    A save commits in the background, and only then does `save_total_limit` remove older
    checkpoints. A resume takes the newest whole checkpoint, also one of the stock Trainer. `train`
    returns when the last save is committed; if a save failed, it raises. The model's config and the
    tokenizer or processor are written beside each checkpoint, where an export finds them.

    smckpt_root: the directory of checkpoints, such as "s3://bucket/run"; None: `output_dir`.
    smckpt_arguments: more arguments for `smckpt.async_save` and `smckpt.load` (`s3client_config`).

    Raises:
        UsageError: an argument of the Trainer is not honoured; the message names it.
        SaveFailedError: from the next save, or the end of `train`: a save was not committed.
    """

    smckpt_root: str | None = None
    smckpt_arguments: dict[str, Any] = {}  # noqa: RUF012 - a user's class or object sets its own

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    state: Any
    control: Any
    callback_handler: Any
    _smckpt_beside: Mapping[str, bytes] | None = None

    # -- saving ------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any, *_: Any, **__: Any) -> None:
        self._refuse_arguments()
        if self.hp_search_backend is None and trial is None:  # type: ignore[attr-defined]
            self.store_flos()  # type: ignore[attr-defined]
        step = self.state.global_step
        run = self._get_output_dir(trial=trial)  # type: ignore[attr-defined]
        directory = os.path.join(run, f"checkpoint-{step}")
        self._note_best(run, step)
        self._note_callbacks()
        if self.args.should_save:
            self._write_trainer_state(directory)
        smckpt.async_save(
            self._state_to_save(),
            checkpoint_id=self._place(directory),
            step=step,
            on_commit=self._after_commit(run, step),
            **self.smckpt_arguments,
        )

    def _refuse_arguments(self) -> None:
        for name, given in (
            ("deepspeed", getattr(self, "is_deepspeed_enabled", False)),
            ("push_to_hub", self.args.push_to_hub),
            ("save_on_each_node", self.args.save_on_each_node),
        ):
            if given:
                raise UsageError(
                    f"{name} of TrainingArguments is not honoured by SmckptTrainerMixin",
                    remedy="leave it out, or use the Trainer without the mixin",
                )

    def _note_best(self, run: str, step: int) -> None:
        best = self.state.best_global_step
        if not best or self.args.save_strategy == "no":
            return
        directory = os.path.join(run, f"checkpoint-{best}")
        if best == step or os.path.isdir(directory):
            self.state.best_model_checkpoint = directory

    def _note_callbacks(self) -> None:
        """On all ranks, for each saves its own state and goes on from it. The Trainer itself notes
        them on the one that writes its file."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(callback, ExportableState):
                continue
            name, told = callback.__class__.__name__, callback.state()
            if isinstance(self.state.stateful_callbacks.get(name), list):
                self.state.stateful_callbacks[name].append(told)
            else:
                self.state.stateful_callbacks[name] = told

    def _write_trainer_state(self, directory: str) -> None:
        """Write the Trainer's file before the save. If the save is never committed, a resume skips
        the directory."""
        os.makedirs(directory, exist_ok=True)
        self.state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "save_pretrained"):  # an export needs it
            config.save_pretrained(directory)

    def _state_to_save(self) -> dict[str, Any]:
        with self._block():
            state = {"model": self._wrapped.state_dict()}
            if not self.args.save_only_model:
                state["optimizer"] = self.optimizer.state_dict()
        if not self.args.save_only_model:
            state["scheduler"] = self.lr_scheduler.state_dict()
            state["rng"] = _rng_state()
            if getattr(self.accelerator, "scaler", None) is not None:
                state["scaler"] = self.accelerator.scaler.state_dict()
        state["trainer"] = self.state.__dict__.copy()
        return state

    def _after_commit(self, run: str, step: int) -> Callable[[smckpt.SaveHandle], None]:
        """The function that the coordinator calls after the commit."""
        directory, rotate = os.path.join(run, f"checkpoint-{step}"), self._rotation(run, step)
        beside = self._files_beside() if self.args.should_save else {}
        with contextlib.suppress(FileNotFoundError):
            beside = {**beside, CONFIG_NAME: Path(directory, CONFIG_NAME).read_bytes()}

        def act(handle: smckpt.SaveHandle) -> None:
            try:
                there = self._storage(directory)
                for path, data in beside.items():
                    folder, _, name = path.rpartition("/")
                    (there.join(folder) if folder else there).put_exclusive(name, data)
            finally:
                if rotate is not None:
                    rotate(handle)

        return act

    def _files_beside(self) -> Mapping[str, bytes]:
        """What the Trainer saves with each model besides its weights and config. It is made once,
        and in this thread: a fast tokenizer fails where one thread uses it and another saves it."""
        if self._smckpt_beside is None:
            made: Any = getattr(self, "processing_class", None)
            if made is None:  # in the Trainer's order
                made = getattr(getattr(self, "data_collator", None), "tokenizer", None)
            can_generate = getattr(self.model, "can_generate", lambda: False)
            with tempfile.TemporaryDirectory() as folder:
                if hasattr(made, "save_pretrained"):
                    made.save_pretrained(folder)
                if can_generate():
                    try:
                        self.model.generation_config.save_pretrained(folder)
                    except ValueError as error:  # settings that contradict each other
                        log.warning("%s is not saved: %s", GENERATION_CONFIG_NAME, error)
                files = [path for path in Path(folder).rglob("*") if path.is_file()]
                self._smckpt_beside = {
                    path.relative_to(folder).as_posix(): path.read_bytes() for path in files
                }
        return self._smckpt_beside

    def _rotation(self, run: str, step: int) -> Callable[[smckpt.SaveHandle], None] | None:
        """The function that removes older checkpoints after a commit."""
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if not limit or limit < 0:
            return None

        def rotate(_: smckpt.SaveHandle) -> None:
            kept = {step}
            if best is not None and (found := _STEP.fullmatch(os.path.basename(best))):
                kept.add(int(found[1]))
            steps = sorted(s for s in _steps_in(run) if s <= step and s not in kept)
            for old in steps[: len(steps) - max(limit - len(kept), 0)]:
                self._remove(os.path.join(run, f"checkpoint-{old}"))

        return rotate

    def _remove(self, directory: str) -> None:
        if self.smckpt_root is not None:
            there = self._storage(directory)
            templates = there.join(TEMPLATES)
            templates.delete_many(templates.names())
            templates.remove_directory()
            there.delete_many([name for name in there.names() if is_beside_config(name)])
        with contextlib.suppress(CheckpointNotFoundError):  # never committed, or not smckpt's
            smckpt.remove(self._place(directory), **self.smckpt_arguments)
        shutil.rmtree(directory, ignore_errors=True)

    # -- resuming ----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            resume_from_checkpoint = self._whole(resume_from_checkpoint)
        out = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        smckpt.maybe_finalize_async_calls()
        return out

    def _whole(self, asked: Any) -> Any:
        """The checkpoint to resume from: the requested one if it is whole, else the newest whole
        one. None: the run was killed before its first commit, and begins anew."""
        run = self.args.output_dir if asked is True else os.path.dirname(os.path.abspath(asked))
        newest = smckpt.latest_checkpoint(self.smckpt_root or run, **self.smckpt_arguments)
        if asked is not True and (not _unfinished(asked) or self._is_whole(asked)):
            found = asked
        elif newest is None:
            begun = get_last_checkpoint(run) if asked is True else asked  # type: ignore[no-untyped-call]
            if begun is None or not _unfinished(begun):
                return asked  # the Trainer itself decides
            log.warning("%s is not whole, and no step is: training begins anew", begun)
            return None
        else:
            found = os.path.join(run, f"checkpoint-{newest.step}")
            if asked is not True:
                log.warning("%s is not whole: resuming from %s", asked, found)
        if self._is_whole(found):
            self._bring_trainer_state(found)
        return found

    def _bring_trainer_state(self, directory: str) -> None:
        """Write the file that the Trainer reads first, if this machine did not save it."""
        path = os.path.join(directory, TRAINER_STATE_NAME)
        told = self._loaded(directory, "trainer")
        if os.path.isfile(path):
            return
        os.makedirs(directory, exist_ok=True)
        own = f"{path}.{os.getpid()}"
        TrainerState(**told).save_to_json(own)
        os.replace(own, path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._is_whole(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        self._fill_model(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        smckpt.maybe_finalize_async_calls()
        best = self.state.best_model_checkpoint
        if not self._is_whole(best):
            super()._load_best_model()  # type: ignore[misc]
            return
        self._fill_model(self._wrapped, best)

    def _fill_model(self, model: Any, directory: str) -> None:
        with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
            target = {"model": model.state_dict()}
        self._load(target, directory)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._is_whole(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        with self._block():
            target = {"optimizer": self.optimizer.state_dict()}
        self._load(target, checkpoint)
        self.lr_scheduler.load_state_dict(self._loaded(checkpoint, "scheduler"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._is_whole(checkpoint):
            super()._load_scaler(checkpoint)  # type: ignore[misc]
        elif getattr(self.accelerator, "scaler", None) is not None:
            self.accelerator.scaler.load_state_dict(self._loaded(checkpoint, "scaler"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._is_whole(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            return
        _set_rng_state(self._loaded(checkpoint, "rng"))

    # -- where, and of what ------------------------------------------------------------------

    @property
    def _wrapped(self) -> Any:
        return self.model if self.model_wrapped is None else self.model_wrapped

    def _block(self) -> Any:
        return smckpt.sm_state_dict_type(self._wrapped, smckpt.SHARDED)

    def _place(self, directory: str) -> str:
        if self.smckpt_root is None:
            return directory
        return f"{self.smckpt_root.rstrip('/')}/{os.path.basename(directory)}"

    def _storage(self, directory: str) -> Storage:
        place = self._place(directory)
        return access_to(place, **self.smckpt_arguments).open(place)

    def _is_whole(self, directory: str) -> bool:
        place = self._place(directory)
        if self.smckpt_root is None and not _begun_by_us(directory):
            return False
        return any(True for _ in smckpt.find_checkpoints(place, **self.smckpt_arguments))

    def _load(self, target: Any, directory: str) -> None:
        smckpt.load(target, checkpoint_id=self._place(directory), **self.smckpt_arguments)

    def _loaded(self, directory: str, key: str) -> Any:
        place = self._place(directory)
        state = smckpt.load(checkpoint_id=place, only=[key], **self.smckpt_arguments)
        assert state is not None
        return state[key]


class SmckptTrainer(SmckptTrainerMixin, Trainer):
    """transformers' `Trainer`, through smckpt."""


def _steps_in(run: str) -> list[int]:
    found = (_STEP.fullmatch(name) for name in os.listdir(run))
    return [int(match[1]) for match in found if match]


def _ours(name: str) -> bool:
    return name.startswith(("data-", "part-", "manifest-", "epoch-", "probe-", "record-"))


def _begun_by_us(directory: str) -> bool:
    with contextlib.suppress(OSError):
        return any(map(_ours, os.listdir(directory)))
    return False


def _unfinished(directory: str) -> bool:
    """Whether a directory has nothing but files of smckpt, whole or not, and what the Trainer
    writes before a save."""
    before = (TRAINER_STATE_NAME, CONFIG_NAME, GENERATION_CONFIG_NAME)
    with contextlib.suppress(OSError):
        names = os.listdir(directory)
        return all(_ours(name) or name.startswith((".", *before)) for name in names)
    return False


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
