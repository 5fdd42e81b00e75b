"""The Trainer's methods that save and load, through smckpt."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging
from transformers.utils.import_utils import is_torch_xla_available

import smckpt
from smckpt.errors import CheckpointError, SaveFailedError, UsageError
from smckpt.integrations.kept import KeptSteps, memory_of
from smckpt.integrations.replaced import (
    fsdp_of,
    remove_stale,
    stamps,
    stock_files,
    store_arguments,
)
from smckpt.integrations.transformers.files import (
    STEPS,
    adapter_only,
    empty_store,
    files_of_run,
    files_of_tokenizer,
    is_looked_at,
    make_directory,
    model_state,
    put_file,
    read_all,
    replace_file,
    rng_state,
    send,
    set_rng_state,
)
from smckpt.integrations.transformers.resume import (
    Checkpoints,
    ResumedStep,
    StepToResume,
    agreed,
    go_on,
    keep,
    kept_steps,
    next_step,
    note_callbacks,
    random_goes_on,
)
from smckpt.manager.resume import is_damage
from smckpt.manager.state import optimizer_state
from smckpt.storage import access_to
from smckpt.storage.urls import is_local

log = logging.get_logger("transformers.smckpt")
stock_log = logging.get_logger("transformers.trainer")

# The Trainer's methods that write a checkpoint. A class that overrides one wants it called.
_OTHER_WRITERS = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
_WRITERS = ("save_model", "_save", *_OTHER_WRITERS)
_VALUES = ("trainer", "scheduler", "scaler", "rng")  # of a commit, that are no tensors


class SmckptTrainerMixin:
    """Put before `Trainer` among the bases of a class. Arguments and calls stay as they are.

    A save commits in the background, and only then does `save_total_limit` remove older
    checkpoints. A resume takes the newest whole checkpoint, also one of the stock Trainer. `train`
    returns when the last save is committed; if a save failed, it raises. The model's config and the
    tokenizer or processor are written beside each checkpoint, where an export finds them.

    A callback that overrides `on_save` finds a committed checkpoint and, beside it, the weights
    that the Trainer itself writes; such a save waits for its commit. If `on_save` does not look at
    the checkpoint, `smckpt_looks = False` in the callback's class says so.

    smckpt_root: the directory of checkpoints, such as "s3://bucket/run"; None: `output_dir`, which
        may be such a URL too.
    smckpt_arguments: more arguments for `smckpt.async_save` and `smckpt.load` (`storage`).
        `{"memory": smckpt.Memory(interval=20)}` keeps the last steps in the hosts' memory too.

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
    _smckpt_resumed: ResumedStep | None = None
    _smckpt_loading = False  # until a resume has filled the model and the optimizer
    _smckpt_kept: KeptSteps | None = None  # with `memory` among the arguments, in `train`
    _smckpt_saved = -1  # the last step that was saved, on disk or in memory
    _smckpt_looked_at: bool | None = None  # by a callback of any rank; None: not asked yet

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = (one for one in (*args, *kwargs.values()) if isinstance(one, TrainingArguments))
        if (arguments := next(given, None)) is not None:
            _refuse(arguments)
        super().__init__(*args, **kwargs)
        self._refuse_arguments()
        if not is_local(self.args.output_dir) and self.args.should_save:
            log.warning(
                "checkpoints and saved models go to %s. Other files that the Trainer writes "
                "(logs, metrics, copies of trainer_state.json) go to %s",
                self.args.output_dir, os.path.abspath(self.args.output_dir),
            )  # fmt: skip

    def _refuse_arguments(self) -> None:
        _refuse(self.args, deepspeed=getattr(self, "is_deepspeed_enabled", False))
        store_arguments(self.smckpt_arguments, "memory")
        memory_of(self.smckpt_arguments)

    @property
    def _stored(self) -> dict[str, Any]:
        return store_arguments(self.smckpt_arguments, "memory")

    # -- saving ------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any, *_: Any, **__: Any) -> None:
        self._refuse_arguments()
        if self.hp_search_backend is None and trial is None:  # type: ignore[attr-defined]
            self.store_flos()  # type: ignore[attr-defined]
        step = self._smckpt_saved = self.state.global_step
        run = self._get_output_dir(trial=trial)  # type: ignore[attr-defined]
        directory = os.path.join(run, f"checkpoint-{step}")
        looked_at = self._is_looked_at()
        # the Trainer's methods that a class of the user's overrides
        owners = [self, *(kind for kind in type(self).__mro__ if kind is not SmckptTrainerMixin)]
        writers = tuple(
            name
            for name in _WRITERS
            if next((one for one in owners if name in vars(one)), Trainer) is not Trainer
        )
        before = stock_files(directory) if self.args.should_save else {}
        if self.args.should_save:
            mixed = bool(writers and not looked_at and before)  # from now on, until the commit
            make_directory(directory, TRAINER_STATE_NAME if mixed else "")
        if writers and not looked_at:
            self._write_stock_files(directory, writers)
        elif self.args.should_save and not looked_at:
            stock_log.info(f"Saving model checkpoint to {directory}")
        best = self.state.best_global_step
        if best and self.args.save_strategy != "no":
            best_directory = os.path.join(run, f"checkpoint-{best}")
            if best == step or os.path.isdir(best_directory):
                self.state.best_model_checkpoint = best_directory
        note_callbacks(self)
        after = self._after_commit(run, step, before, bool(writers) and not looked_at)
        handle = smckpt.async_save(
            self._state_to_save(), checkpoint_id=self._checkpoints.below_run(directory), step=step,
            options=smckpt.SaveOptions(on_commit=after, metadata=fsdp_of(self.accelerator)),
            **self._stored,
        )  # fmt: skip
        if looked_at:
            assert handle is not None
            handle.result()
            self._write_stock_files(directory, writers)
            if self.args.should_save and self._checkpoints.elsewhere(directory):
                send(self._checkpoints.storage(directory), directory, stamps(directory))
            self.accelerator.wait_for_everyone()  # a callback of another rank looks there too

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """The Trainer's method after each step. What it does not save may be due in memory."""
        super()._maybe_log_save_evaluate(  # type: ignore[misc]
            tr_loss, grad_norm, model, trial, *args, **kwargs
        )
        keep(self, trial)

    def _is_looked_at(self) -> bool:
        """Whether a callback of any rank looks at the checkpoint. The ranks ask each other once in
        each `train`, since all of them write what it sees."""
        if self._smckpt_looked_at is None:
            own = [any(map(is_looked_at, self.callback_handler.callbacks))]
            self._smckpt_looked_at = any(gather_object(own) if self.args.world_size > 1 else own)
        return self._smckpt_looked_at

    def _write_stock_files(self, directory: str, writers: tuple[str, ...]) -> None:
        """What the Trainer itself writes of the model, and by the methods that are overridden."""
        self.save_model(directory, _internal_call=True)
        if not self.args.save_only_model:
            for name in _OTHER_WRITERS:
                if name in writers:
                    getattr(self, name)(directory)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The Trainer's method. A URL gets a copy of what it writes."""
        directory = self.args.output_dir if output_dir is None else os.fspath(output_dir)
        copied = not _internal_call and self.args.should_save and not is_local(directory)
        before = stamps(directory) if copied else {}
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if copied:
            now = stamps(directory)
            written = {name: now[name] for name in now if before.get(name) != now[name]}
            where = access_to(directory, **self._stored).open(directory)
            send(where, directory, {name: 0 for name in written if STEPS.step_of(name) is None})

    def _state_to_save(self) -> dict[str, Any]:
        state = model_state(self)
        if not self.args.save_only_model:
            state["optimizer"] = self._optimizer_state()
            state["scheduler"] = self.lr_scheduler.state_dict()
            state["rng"] = rng_state()
            if getattr(self.accelerator, "scaler", None) is not None:
                state["scaler"] = self.accelerator.scaler.state_dict()
        # as the Trainer itself does, without what callbacks have set beside its fields
        state["trainer"] = {one.name: getattr(self.state, one.name) for one in fields(self.state)}
        return state

    def _after_commit(
        self, run: str, step: int, before: Mapping[str, tuple[int, int]], sends: bool
    ) -> Callable[[smckpt.SaveHandle], None]:
        """The function that the coordinator calls after the commit. Only then does it replace what
        an earlier run left in the directory: until the commit, that is the checkpoint.

        Args:
            before: the Trainer's own files of an earlier run.
            sends: whether methods of the user's have written files that belong to the checkpoint.
        """
        checkpoints, directory = self._checkpoints, os.path.join(run, f"checkpoint-{step}")
        limit, best = self.args.save_total_limit or 0, self.state.best_model_checkpoint
        beside: Mapping[str, bytes] = {}
        if self.args.should_save:
            if self._smckpt_beside is None:
                # once, and here: a fast tokenizer fails if a thread saves it while another uses it
                self._smckpt_beside = files_of_tokenizer(self)
            beside = {**self._smckpt_beside, **files_of_run(self)}

        def act(_: smckpt.SaveHandle) -> None:
            try:
                remove_stale(directory, before)
                elsewhere = checkpoints.elsewhere(directory)
                for path, data in beside.items():
                    if not elsewhere or path == TRAINER_STATE_NAME:
                        replace_file(directory, path, data)
                if elsewhere:
                    there = checkpoints.storage(directory)
                    sent = stock_files(directory) if sends else {}
                    empty_store(there, stock_only=True, kept=sent)
                    for path, data in beside.items():
                        put_file(there, path, data)
                    send(there, directory, sent)
            finally:
                # the Trainer's rule, not a policy of `RunDirectory`: it counts directories, those
                # that the Trainer itself wrote too, and the best among the limit
                kept = {step, STEPS.step_of(os.path.basename(best or ""))} - {None}
                steps = checkpoints.steps(run) if limit > 0 else []
                steps = [one for one in steps if one <= step and one not in kept]
                for old in steps[: max(len(steps) - max(limit - len(kept), 0), 0)]:
                    gone = os.path.join(run, f"checkpoint-{old}")
                    stock_log.info(
                        f"Deleting older checkpoint [{gone}] due to args.save_total_limit"
                    )
                    checkpoints.remove(gone)

        return act

    # -- resuming ----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._refuse_arguments()
        self._smckpt_looked_at, self._smckpt_saved = None, -1
        self._smckpt_kept = kept_steps(self)
        asked, lost = resume_from_checkpoint, dict[str, CheckpointError]()
        while True:
            self._smckpt_resumed, self._smckpt_loading = None, bool(asked)
            if asked:
                resume_from_checkpoint = self._chosen(asked, lost)
            try:
                out = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
                break
            except CheckpointError as error:
                resumed = self._smckpt_resumed
                if resumed is None or not self._smckpt_loading:
                    raise
                if not is_damage(error, bool(resumed.chosen.url)):
                    raise
                lost[resumed.chosen.directory] = error
                if (handle := getattr(self, "neftune_hook_handle", None)) is not None:
                    handle.remove()  # the Trainer adds it again
        smckpt.maybe_finalize_async_calls()
        if self._smckpt_kept is not None:
            self._smckpt_kept.close()
            self._smckpt_kept = None
        # do to a run that is elsewhere what the Trainer does to its local directory: with
        # save_total_limit=1, keep the best alone
        checkpoints, run = self._checkpoints, self.args.output_dir
        best = self.state.best_model_checkpoint
        if self.args.should_save and best and self.args.save_total_limit == 1:
            steps = checkpoints.steps(run) if checkpoints.elsewhere(run) else []
            for name in (f"checkpoint-{one}" for one in steps if one <= self.state.global_step):
                if os.path.dirname(best) == run.rstrip("/") and os.path.basename(best) != name:
                    checkpoints.remove(os.path.join(run, name))
        return out

    def _chosen(self, asked: Any, lost: dict[str, CheckpointError]) -> Any:
        """The checkpoint to resume from, as the Trainer itself takes it.

        Args:
            lost: the directories that did not load, and why. This adds to them.
        """
        try:
            smckpt.maybe_finalize_async_calls()  # the newest may be in flight
        except SaveFailedError as error:
            log.warning("an earlier save was not committed: %s", error)
        checkpoints, kept = self._checkpoints, self._smckpt_kept
        asked = asked if asked is True else os.fspath(asked)

        def look() -> StepToResume | None:
            found = next_step(checkpoints, asked, lost)
            if kept is None or asked is not True:
                return found
            return checkpoints.in_memory(kept, found, lost)

        while True:
            chosen = agreed(look)
            if chosen is None:
                if lost:
                    raise next(iter(lost.values()))
                begun = agreed(lambda: bool(checkpoints.steps(checkpoints.output_dir)))
                return None if asked is not True or begun else asked
            if lost:
                log.warning("%s cannot be loaded: %s", [*lost][-1], [*lost.values()][-1])
            if chosen.keys is None:
                return chosen.directory
            try:
                self._bring(chosen)
            except CheckpointError as error:
                if not is_damage(error, bool(chosen.url)):
                    raise
                lost[chosen.directory] = error
                continue
            return chosen.directory

    def _bring(self, chosen: StepToResume) -> None:
        """Load the values that are no tensors, and write the file that the Trainer reads first."""
        self._smckpt_resumed = ResumedStep(chosen, {})
        values = self._load(
            None, chosen.directory, only=[key for key in _VALUES if key in (chosen.keys or ())]
        )
        self._smckpt_resumed = ResumedStep(chosen, values)
        if "trainer" not in values:
            return

        def with_best() -> dict[str, Any]:
            """The Trainer's state, with the best checkpoint by the name that it has here."""
            of_version = {one.name for one in fields(TrainerState)}
            state = {key: value for key, value in values["trainer"].items() if key in of_version}
            best = state.get("best_model_checkpoint")
            if best is None or (is_local(best) and os.path.isdir(best)):
                return state
            here = os.path.join(os.path.dirname(chosen.directory), os.path.basename(best))
            known = os.path.isdir(here) or self._checkpoints.keys(here) is not None
            return {**state, "best_model_checkpoint": here if known else None}

        state = agreed(with_best)
        if self.args.local_process_index == 0:
            with tempfile.TemporaryDirectory() as folder:
                TrainerState(**state).save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
                for name, data in read_all(folder).items():
                    replace_file(chosen.directory, name, data)
            if (best := state.get("best_model_checkpoint")) is not None:
                os.makedirs(best, exist_ok=True)  # the Trainer forgets one that it does not see
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if self._keys(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(  # type: ignore[misc]
                resume_from_checkpoint, *args, **kwargs
            )
            return
        model = next(iter((*args, *kwargs.values())), None)
        stock_log.info(f"Loading model from {resume_from_checkpoint}.")
        self._fill_model(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        smckpt.maybe_finalize_async_calls()
        best = self.state.best_model_checkpoint
        if self._keys(best) is None:
            super()._load_best_model()  # type: ignore[misc]
            return
        stock_log.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        self._fill_model(self._wrapped, best)

    def _fill_model(self, model: Any, directory: str) -> None:
        with smckpt.sm_state_dict_type(model, smckpt.SHARDED):
            whole = model.state_dict()
            target = {"model": adapter_only(model, whole)}
        # a checkpoint may have the frozen base too
        matched = "target" if len(target["model"]) < len(whole) else True
        self._load(target, directory, check_keys_matched=matched)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or (keys := self._keys(checkpoint)) is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif "optimizer" not in keys:
            log.warning(
                "%s was saved with save_only_model: the optimizer, the scheduler and the random "
                "numbers begin anew",
                checkpoint,
            )
        else:
            self._load({"optimizer": self._optimizer_state()}, checkpoint)
            self.lr_scheduler.load_state_dict(self._value(checkpoint, "scheduler"))
        self._smckpt_loading = False
        go_on(self)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or (keys := self._keys(checkpoint)) is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]
        elif "scaler" in keys and getattr(self.accelerator, "scaler", None) is not None:
            self.accelerator.scaler.load_state_dict(self._value(checkpoint, "scaler"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or (keys := self._keys(checkpoint)) is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif "rng" in keys and random_goes_on(self, checkpoint):
            set_rng_state(self._value(checkpoint, "rng"))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """In transformers 5. It removes and shows checkpoints: all must be committed."""
        smckpt.maybe_finalize_async_calls()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _sorted_checkpoints(self, *args: Any, **kwargs: Any) -> Any:  # the same, transformers 4
        smckpt.maybe_finalize_async_calls()
        return super()._sorted_checkpoints(*args, **kwargs)  # type: ignore[misc]

    @property
    def _wrapped(self) -> Any:
        return self.model if self.model_wrapped is None else self.model_wrapped

    def _block(self) -> Any:
        return smckpt.sm_state_dict_type(self._wrapped, smckpt.SHARDED)

    def _optimizer_state(self) -> Any:
        return optimizer_state(self.optimizer.optimizer, [self._wrapped], smckpt.SHARDED)

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.args.output_dir, self.smckpt_root, self._stored)

    def _keys(self, directory: str | None) -> tuple[str, ...] | None:
        """The top keys of a commit of smckpt; None: the Trainer itself wrote the checkpoint."""
        if directory is None:
            return None
        resumed = self._smckpt_resumed
        if resumed is not None and resumed.chosen.directory == directory:
            return resumed.chosen.keys
        keys: tuple[str, ...] | None = agreed(lambda: self._checkpoints.keys(directory))
        return keys

    def _load(self, target: Any, directory: str, **more: Any) -> Any:
        more["options"] = smckpt.LoadOptions(only=more.pop("only", target and [*target]))
        resumed = self._smckpt_resumed
        if resumed is not None and resumed.chosen.url and resumed.chosen.directory == directory:
            return smckpt.load(target, checkpoint_id=resumed.chosen.url, **more)
        return smckpt.load(
            target, checkpoint_id=self._checkpoints.url_of(directory), **more, **self._stored
        )

    def _value(self, directory: str, key: str) -> Any:
        resumed = self._smckpt_resumed
        if resumed is not None and resumed.chosen.directory == directory:
            return resumed.values[key]
        return self._load(None, directory, only=[key])[key]


class SmckptTrainer(SmckptTrainerMixin, Trainer):
    """transformers' `Trainer`, through smckpt."""


def _refuse(arguments: Any, *, deepspeed: Any = None) -> None:
    for name, given in (
        ("deepspeed", deepspeed or arguments.deepspeed),
        ("push_to_hub", arguments.push_to_hub),
        ("save_on_each_node", arguments.save_on_each_node),
        ("XLA", is_torch_xla_available()),
    ):
        if given:
            raise UsageError(
                f"{name} of TrainingArguments is not honoured by SmckptTrainerMixin",
                remedy="leave it out, or use the Trainer without the mixin",
            )
