"""torchtitan: its trainer's checkpoints through smckpt.

One line of a config changes: `checkpoint=SmckptCheckpointManager.Config(…)` in place of
`CheckpointManager.Config(…)`. torchtitan's own class decides what belongs to a checkpoint, and
reads and writes Hugging Face's files. This one saves, finds, loads and removes everything else.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any

import torch
from torchtitan.components.checkpointer import AsyncMode, CheckpointManager
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER
from torchtitan.tools import filesystem

import smckpt
from smckpt.checkpoint.commits.discover import FoundCheckpoint, found_at
from smckpt.checkpoint.commits.run_directory import RunDirectory
from smckpt.checkpoint.reading.committed import open_any
from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.integrations import refuse_untested
from smckpt.integrations.kept import KeptSteps, memory_of
from smckpt.integrations.replaced import below_run, keep_last, run_directory, store_arguments
from smckpt.manager.room import get_memory
from smckpt.meeting.round import over_group
from smckpt.storage import access_to
from smckpt.storage.urls import normal_url

refuse_untested("torchtitan")

__all__ = ["SmckptCheckpointManager", "take_over"]

log = logging.getLogger("smckpt")

_NAME = re.compile(r"step-(\d+)")


class SmckptCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager, which saves and loads through smckpt.

    Step 100 is in `dump_folder/folder/step-100`. It loads checkpoints that torchtitan's own manager
    wrote in the same folder, and removes only its own.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's config, with these fields.

        async_mode: "async" (here the default) and "async_with_pinned_mem" return when the state is
            in memory. "disabled" waits for the commit.
        folder: may be the URL of a store that smckpt knows ("s3://bucket/run").
        smckpt_arguments: more arguments for `smckpt.async_save` and `smckpt.load`
            (`storage`). `{"memory": smckpt.Memory(interval=20)}` keeps the last steps in the hosts'
            memory too.
        """

        async_mode: str = "async"
        smckpt_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    _arguments: Mapping[str, Any] = MappingProxyType({})  # for `smckpt.async_save` and `load`
    _kept: KeptSteps | None = None  # with `memory` among the arguments

    def __init__(self, config: Any, **kwargs: Any) -> None:
        # torchtitan's class would make a process group for DCP, and a thread that removes
        # directories whether or not anything newer is committed.
        quiet = dataclasses.replace(config, async_mode="disabled", keep_latest_k=0)
        super().__init__(quiet, **kwargs)
        if not self.enable:
            return
        self.async_mode = AsyncMode(config.async_mode)
        self.keep_latest_k = config.keep_latest_k
        if "://" in config.folder:  # torchtitan would join it to the dump folder
            self.folder = normal_url(config.folder).rstrip("/")
        self.save_future: smckpt.SaveHandle | None = None
        given = getattr(config, "smckpt_arguments", {})
        self._arguments = MappingProxyType(store_arguments(given, "memory"))
        if (memory := memory_of(given)) is not None:
            self._kept = KeptSteps(memory, self._run(self.folder))

    # -- saving ------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save, if a save is due. All ranks call it, after every step.

        Returns:
            whether it saved.

        Raises:
            SaveFailedError: an earlier save was not committed; or this one, if it is waited for.
        """
        if not self._should_save(curr_step, last_step):
            if curr_step == 1:
                self._get_memory(curr_step)
            if self._kept is not None:
                self._kept.save(curr_step, self._flattened_model_states_sd)
            return False
        self.maybe_wait_for_saving()
        if last_step:
            self._save_last_step(curr_step)
            return True
        directory = self._create_checkpoint_id(curr_step)
        self.save_future = self._start(self._flattened_model_states_sd(), directory, curr_step)
        if self.async_mode is AsyncMode.DISABLED:
            self._wait_for_saving()
        return True

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save as torchtitan asks for it: here its last step, which is waited for. torchtitan
        writes Hugging Face's files itself."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        saved = self._start(state_dict, checkpoint_id, _step_of(checkpoint_id))
        if async_mode is not AsyncMode.DISABLED:
            return saved
        saved.result()
        return None

    def _start(
        self, state_dict: dict[str, Any], directory: str, step: int | None
    ) -> smckpt.SaveHandle:
        saved = smckpt.async_save(
            state_dict,
            checkpoint_id=below_run(directory),
            step=step,
            options=smckpt.SaveOptions(
                on_commit=self._remove_older if self.keep_latest_k > 0 else None
            ),
            **self._arguments,
        )
        assert saved is not None  # this rank is in the group: it is the job
        return saved

    def _wait_for_saving(self) -> None:
        saved: Any = self.save_future
        self.save_future = None
        saved.result()

    def _maybe_wait_for_staging(self) -> None:
        """The state is in memory when `save` returns."""

    def _close(self) -> None:
        """smckpt ends a save to the folder when the process ends."""
        if self._kept is not None:
            self._kept.close()

    def _remove_older(self, saved: smckpt.SaveHandle) -> None:
        """Called by the coordinator after the commit."""
        assert saved.step is not None
        keep_last(self._run(self.folder), self.keep_latest_k, saved.step)

    # -- loading -----------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load the step, or the newest one that is whole (-1). Where the folder has none, load what
        the config names as a beginning. All ranks call it.

        Returns:
            False if there is nothing to load.

        Raises:
            CheckpointNotFoundError: the step, or what the config names, is not there.
        """
        newest = step == -1
        step = self._find_load_step() if newest else step
        directory = self._create_checkpoint_id(step)
        if newest and self._kept is not None:
            theirs = step if step != -1 and self._is_of_dcp(directory) else -1

            def fill(found: FoundCheckpoint) -> None:
                self._fill(self._states_to_load(found.step == 0), found)

            if self._kept.resume(fill, theirs):
                self._get_memory(step=1)
                return True
            step = theirs
        if step != -1:
            self._fill(self._states_to_load(step == 0), directory)
            self._get_memory(step)
            return True
        directory = self.initial_load_path
        if self.initial_load_in_hf:
            directory = directory or getattr(self.sd_adapter, "hf_assets_path", None)
            if directory is None:
                raise UsageError(
                    "initial_load_in_hf is set, and no directory is named",
                    remedy="set checkpoint.initial_load_path or hf_assets_path",
                )
        if not directory:
            log.info("no checkpoint in %s: the run begins", self.folder)
            return False
        self._fill(self._states_to_load(self.initial_load_model_only), directory, initial=True)
        return True

    def _fill(self, target: dict[str, Any], directory: str, *, initial: bool = False) -> None:
        from_hf = initial and self.initial_load_in_hf
        if "://" not in directory and not filesystem.isdir(directory):
            named = f"load_step={_step_of(directory)}" if not initial else "initial_load_path"
            raise CheckpointNotFoundError(
                f"--checkpoint.{named} is not there",
                remedy="name one that `smckpt ls` shows, or leave it out",
                path=directory,
            )
        if from_hf or self._is_of_dcp(directory):
            quantized = initial and self.initial_load_in_hf_quantized
            self.dcp_load(target, directory, from_hf=from_hf, from_quantized=quantized)
            return
        arguments = {} if directory.startswith("keeper://") else self._arguments
        saved: Mapping[str, Any] = {}
        if initial or _step_of(directory) == 0:  # perhaps in an `export_dtype`, which DCP converts
            catalogue = open_any(access_to(directory, **arguments).open(directory))
            with closing(catalogue.stores):
                saved = catalogue.logical
        other = {
            key: torch.empty_like(value, dtype=getattr(torch, saved[key].dtype))
            for key, value in target.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and key in saved
            if saved[key].dtype != str(value.dtype).removeprefix("torch.")
        }
        read = {**target, **other} if other else target
        smckpt.load(read, checkpoint_id=directory, **arguments)
        for key, converted in other.items():
            read[key] = target[key].copy_(converted)
        self.states[MODEL].load_state_dict(read)  # a module may give its state as copies

    def _get_memory(self, step: int) -> None:
        """Begin to get that of the first save, after a resume or the first step. An optimizer that
        was not loaded has no state yet; to ask for it would give it one."""
        if step and not self.load_only and OPTIMIZER not in self.exclude_from_loading:
            get_memory(self._flattened_model_states_sd, None, [smckpt.SaveOptions()])

    def _run(self, folder: str) -> RunDirectory:
        return run_directory(folder, "step-{step}", self._arguments)

    def _is_of_dcp(self, path: str) -> bool:
        """Whether torchtitan's own manager saved it last. In S3 it could not without s3fs."""
        metadata = filesystem.join(path, ".metadata")
        if path.startswith(("s3://", "keeper://")) or not filesystem.isfile(metadata):
            return False
        try:  # a run that was killed after its commit has not deleted what it replaced
            return found_at(self._run(path).root) is None
        except UsageError:  # DCP saved after that commit
            return True

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that is whole, smckpt's or torchtitan's own; -1: there is none. Rank 0
        looks, so that all ranks load the same, and all raise its error."""

        def look() -> int:
            directory = folder or self.folder
            theirs = (
                -1
                if smckpt.is_s3_url(directory)
                else super(SmckptCheckpointManager, self)._find_load_step(directory)
            )
            own = self._run(directory).newest()
            return theirs if own is None or own.step is None else max(theirs, own.step)

        return over_group().round("newest step", lambda: None, lambda _: look())


def take_over(kind: Any = CheckpointManager) -> Callable[[], None]:
    """Make configs of torchtitan's own manager build this one. A manager of another class, such as
    torchft's, would save by itself, and is refused when it is made.

    Returns:
        A function that undoes it.
    """
    owner, init = kind.Config._owner, kind.__init__

    @functools.wraps(init)
    def made(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.enable and not isinstance(self, SmckptCheckpointManager):
            raise UsageError(
                f"{type(self).__qualname__} is not honoured: it saves and loads without smckpt",
                remedy="derive it from smckpt.integrations.torchtitan.SmckptCheckpointManager, "
                "build torchtitan's own by its config, or leave torchtitan out of --for",
            )
        init(self, config, *args, **kwargs)

    kind.Config._owner, kind.__init__ = SmckptCheckpointManager, made

    def undo() -> None:
        kind.Config._owner, kind.__init__ = owner, init

    return undo


def _step_of(path: str) -> int | None:
    name = _NAME.fullmatch(path.rstrip("/").rpartition("/")[2])
    return int(name[1]) if name else None
