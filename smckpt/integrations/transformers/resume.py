"""Where a Trainer's checkpoints are, and which of them a run resumes from.

The main process looks, and all ranks take what it found. Further below: the steps that are in the
memory of the hosts.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint as stock_last_checkpoint

import smckpt
from smckpt.checkpoint.commits.run_directory import RunDirectory
from smckpt.checkpoint.reading.committed import open_catalogue
from smckpt.checkpoint.records.format import parse_name
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    StorageError,
    UsageError,
    as_checkpoint_error,
    error_from_json,
)
from smckpt.integrations.kept import KeptSteps, memory_of
from smckpt.integrations.replaced import (
    below_run,
    remove_or_keep,
    run_directory,
    stock_files,
)
from smckpt.integrations.transformers.files import STEPS, empty_store, open_seen
from smckpt.manager.room import get_memory
from smckpt.storage import Storage, access_to
from smckpt.storage.faults import twice
from smckpt.storage.urls import disk_path, is_local, parent_url

log = logging.getLogger("transformers.smckpt")


@dataclass(frozen=True)
class StepToResume:
    """A checkpoint, as the Trainer names it. keys: the top keys of its commit; None: the Trainer
    itself wrote it. url: where it is, if in memory."""

    directory: str
    keys: tuple[str, ...] | None
    url: str = ""


@dataclass(frozen=True)
class ResumedStep:
    """The checkpoint of smckpt that a run resumes from, and its values that are no tensors."""

    chosen: StepToResume
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    The Trainer names each by a directory below `output_dir`, and reads small files there.
    `url_of` tells where smckpt has it.
    """

    output_dir: str
    root: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def url_of(self, directory: str) -> str:
        if self.root is None or (there := disk_path(directory)) is None:
            return directory
        root = self.root.rstrip("/")
        below = os.path.relpath(there, disk_path(self.output_dir) or self.output_dir)
        if below == os.curdir:
            return root
        if not below.startswith(os.pardir):
            return f"{root}/{below}"
        # of another machine's output_dir, unless it is here
        return directory if os.path.isdir(directory) else f"{root}/{os.path.basename(directory)}"

    def elsewhere(self, directory: str) -> bool:
        """Whether smckpt's files are not in the directory that the Trainer sees."""
        return self.root is not None or not is_local(directory)

    def below_run(self, directory: str) -> str:
        return below_run(self.url_of(directory))

    def storage(self, directory: str) -> Storage:
        url = self.below_run(directory)
        return access_to(url, **self.arguments).open(url)

    def steps(self, run: str) -> list[int]:
        """The steps that have a directory, whole or not, oldest first."""
        return sorted({step for one in self._runs(run) for step, _ in one.directories()})

    def _runs(self, run: str) -> list[RunDirectory]:
        """Where smckpt has its checkpoints, and where the Trainer has its own."""
        return [
            run_directory(url, STEPS.text, self.arguments)
            for url in dict.fromkeys((self.url_of(run), run))
        ]

    def keys(self, directory: str) -> tuple[str, ...] | None:
        """The top keys of what smckpt committed; None: nothing whole.

        Raises:
            StorageError: the store does not answer.
        """
        if not self.elsewhere(directory) and not self._begun_by_us(directory):
            return None
        try:
            catalogue = open_catalogue(self.storage(directory))
            with closing(catalogue.stores):
                found = {str(tensor.path[0]) for tensor in catalogue.logical.values()}
                for path, _ in catalogue.objects(min(catalogue.object_ranks)).values():
                    found.add(str(path[0]))
        except CheckpointNotFoundError:
            return None
        except (CorruptCheckpointError, FormatVersionError) as error:
            log.warning("%s is passed over: %s", directory, error)
            return None
        return tuple(sorted(found))

    def ranks(self, directory: str) -> int:
        """How many ranks have saved what is committed."""
        catalogue = open_catalogue(self.storage(directory))
        with closing(catalogue.stores):
            return len(catalogue.object_ranks)

    def _begun_by_us(self, directory: str) -> bool:
        names = self.storage(directory).names() if os.path.isdir(directory) else ()
        return any(parse_name(name) is not None for name in names)

    def begun(self, directory: str) -> bool:
        """Whether a save has begun in a directory."""
        if self.elsewhere(directory) and self.storage(directory).names():
            return True
        return os.path.isdir(directory)

    def newest(self, run: str, lost: Collection[str] = ()) -> StepToResume | None:
        """The newest whole checkpoint that is none of `lost`. One that cannot be read is passed
        over.

        Raises:
            StorageError: the store as a whole fails, or can read none of them.
        """

        def look(step: int, name: str) -> tuple[int, StepToResume] | None:
            directory = f"{run.rstrip('/')}/{name}"
            if directory in lost:
                return None
            keys = self.keys(directory)
            whole = keys is not None or is_whole_stock(directory)
            return (step, StepToResume(directory, keys)) if whole else None

        found = [one for each in self._runs(run) if (one := each.first(look)) is not None]
        return max(found, key=lambda one: one[0])[1] if found else None

    def choose(self, asked: str | bool, lost: Collection[str] = ()) -> StepToResume | None:
        """The checkpoint to resume from: the requested one if it is whole, else the newest whole
        one. None: the run was killed before its first commit, and begins anew.

        Args:
            asked: True: the newest in `output_dir`.
            lost: directories of which a load has failed.
        """
        if isinstance(asked, str):
            run = parent_url(asked).rstrip("/")
            if asked not in lost:
                try:
                    keys = twice(partial(self.keys, asked))
                except StorageError as error:
                    newest = self.steps(run)[-1:]
                    if error.of_store or newest != [_step_of(asked)]:
                        raise  # a user who named an older one meant it
                else:
                    begun = self._begun_by_us(asked) or self.elsewhere(asked)
                    if keys is not None or is_whole_stock(asked) or not begun:
                        return StepToResume(asked, keys)
        else:
            run = self.output_dir
        found = self.newest(run, lost)
        if found is not None and isinstance(asked, str) and not lost:
            log.warning("%s is not whole: resuming from %s", asked, found.directory)
        if found is None and isinstance(asked, str) and not self.begun(asked):
            raise CheckpointNotFoundError(
                "there is no checkpoint",
                remedy="pass one that `smckpt ls` shows, or resume_from_checkpoint=True",
                path=self.url_of(asked),
            )
        if found is None and not lost and self.steps(run):
            log.warning("no checkpoint in %s is whole: training begins anew", self.url_of(run))
        return found

    def in_memory(
        self, kept: KeptSteps, disk: StepToResume | None, lost: Collection[str]
    ) -> StepToResume | None:
        """The newest whole checkpoint in memory that is none of `lost`, if it is newer than the one
        on disk."""
        for one in kept.newest_first():
            if one.step is None or (disk and one.step <= (_step_of(disk.directory) or 0)):
                break
            directory = f"{self.output_dir.rstrip('/')}/{STEPS.subpath(one.step)}"
            keys = Checkpoints(one).keys(one)
            if directory not in lost and keys is not None:
                return StepToResume(directory, keys, one)
        return disk

    def remove(self, directory: str) -> None:
        """Remove a checkpoint, of smckpt or not, with all that is beside it, unless a reader has
        pinned it."""
        if not remove_or_keep(self.url_of(directory), self.arguments):
            return
        if self.elsewhere(directory):
            storage = self.storage(directory)
            storage.delete_many([one for one in storage.names() if parse_name(one) is not None])
            empty_store(storage)
        shutil.rmtree(directory, ignore_errors=True)


def is_whole_stock(directory: str) -> bool:
    """Whether the Trainer itself wrote a checkpoint here to its end; its last file says so."""
    weights = ("model", "pytorch_model", "adapter_model", "global_step")
    return os.path.isfile(os.path.join(directory, TRAINER_STATE_NAME)) and any(
        name.startswith(weights) or os.path.isdir(os.path.join(directory, name))
        for name in stock_files(directory)
    )


def agreed(look: Callable[[], Any]) -> Any:
    """What the main process finds, on all ranks.

    Raises:
        CheckpointError: it cannot look; on all ranks.
    """
    answer: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            answer[0] = look()
        except Exception as error:
            if PartialState().num_processes == 1:
                raise
            answer[1] = as_checkpoint_error(error).to_json()
    broadcast_object_list(answer)
    if answer[1] is not None:
        raise error_from_json(answer[1])
    return answer[0]


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """transformers' function of this name; of a URL it finds the newest committed checkpoint."""
    checkpoints = Checkpoints(os.fspath(folder))
    if not checkpoints.elsewhere(checkpoints.output_dir):
        found: str | None = stock_last_checkpoint(folder)  # type: ignore[no-untyped-call]
        return found
    newest = checkpoints.newest(checkpoints.output_dir)
    return None if newest is None else newest.directory


def _step_of(directory: str) -> int | None:
    return STEPS.step_of(os.path.basename(directory.rstrip("/")))


def next_step(
    checkpoints: Checkpoints, asked: Any, lost: dict[str, CheckpointError]
) -> StepToResume | None:
    if asked is not True:
        asked = asked.rstrip("/")
        if os.path.islink(asked) and os.path.exists(asked):
            asked = os.path.realpath(asked)  # what the user means; below a run no link is followed
    if lost and asked is not True:
        newest = checkpoints.steps(os.path.dirname(asked))[-1:]
        if newest != [_step_of(asked)]:
            return None  # a user who named an older one meant it
    return checkpoints.choose(asked, lost)


def random_goes_on(trainer: Any, directory: str) -> bool:
    """Whether this rank takes the random numbers of a checkpoint. The Trainer's rule: where they
    are one rank's own. Its files have the rank's number in their names, unless one process saves.
    """
    resumed = trainer._smckpt_resumed
    url = resumed.chosen.url if resumed is not None else ""
    checkpoints = Checkpoints(url) if url else trainer._checkpoints
    saved: int = agreed(lambda: checkpoints.ranks(url or directory))
    ranks, own = trainer.args.world_size, trainer.args.process_index
    if saved != ranks and own == 0:
        log.warning(
            "%s was saved by %d ranks and is resumed by %d: %s", directory, saved, ranks,
            "random numbers begin anew" if 1 in (saved, ranks) else
            "each takes the random numbers of its own" if ranks < saved else
            f"the first {saved} take their random numbers, the others begin anew",
        )  # fmt: skip
    return bool((saved == 1) == (ranks == 1) and own < saved)


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
