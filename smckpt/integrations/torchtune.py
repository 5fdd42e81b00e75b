"""torchtune: the intermediate checkpoints of a recipe through smckpt.

One line of a config changes, the `_component_` of its checkpointer. The recipe then saves its
intermediate checkpoints through smckpt, in the background. The last checkpoint is written by the
checkpointer of torchtune that the rest of the section configures, in the format that it has.

torchtune's `CheckpointClient` makes its distributed checkpointer itself, so `take_over` replaces
three methods of it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch.distributed as dist
from torchtune import training
from torchtune.config._utils import _get_component_from_path
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient

import smckpt
import smckpt.state_dict  # its hook: an optimizer's state dict knows the optimizer from a step on
from smckpt.checkpoint.commits.run_directory import RunDirectory
from smckpt.errors import UsageError
from smckpt.integrations import refuse_untested
from smckpt.integrations.dcp.reader import DistributedFileSystemReader
from smckpt.integrations.replaced import keep_last, run_directory, store_arguments
from smckpt.meeting.group import group_at
from smckpt.storage.urls import Below, normal_url

refuse_untested("torchtune")

__all__ = ["OWN", "DistributedCheckpointer", "take_over"]

log = logging.getLogger("smckpt")

_ADAPTER = "adapter_model"  # torchtune's folder for the adapters of a checkpoint that has more
_FINAL = "torchtune.training.FullModelHFCheckpointer"
OWN = (  # torchtune's checkpointers of whole models
    training.FullModelHFCheckpointer,
    training.FullModelMetaCheckpointer,
    training.FullModelTorchTuneCheckpointer,
)


class DistributedCheckpointer:
    """torchtune's checkpointer of this name, and the `_component_` of a recipe's checkpointer.

    A checkpoint of epoch 3 is in `output_dir/dist_epoch_3`. As a `_component_` it takes the
    arguments of the checkpointer that stood there too (`checkpoint_files`, `model_type`, …).

    Args:
        checkpoint_dir: the directory of the base model.
        output_dir: the directory of all that is saved.
        process_group: the ranks that save and load together; None: all.
        keep_last_n_checkpoints: how many intermediate checkpoints stay. None: all. 0: none is
            saved. Older ones are removed after the commit of a newer one.
        final_component: the class of torchtune that loads the base model and saves the last
            checkpoint.
        smckpt_root: the directory of the intermediate checkpoints, such as "s3://bucket/run"; None:
            `output_dir`.
        smckpt_arguments: more arguments for `smckpt.async_save` and `smckpt.load`
            (`storage`).
        should_load_recipe_state: as for torchtune's: `load_checkpoint` without a target also gives
            the newest intermediate state. A recipe sets it.

    Raises:
        UsageError: an argument is not honoured; names it.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        output_dir: str | os.PathLike[str],
        process_group: Any = None,
        *,
        keep_last_n_checkpoints: int | None = None,
        final_component: str = _FINAL,
        smckpt_root: str | None = None,
        smckpt_arguments: Mapping[str, Any] | None = None,
        should_load_recipe_state: bool = False,
        **final: Any,
    ) -> None:
        if keep_last_n_checkpoints is not None and (
            type(keep_last_n_checkpoints) is not int or keep_last_n_checkpoints < 0
        ):
            raise UsageError(
                f"keep_last_n_checkpoints is {keep_last_n_checkpoints!r}",
                remedy="give a whole number from 0, or None to keep all",
            )
        self._checkpoint_dir = checkpoint_dir
        self._output_dir = output_dir
        self._process_group = process_group
        self._keep = keep_last_n_checkpoints
        self._root = normal_url(os.fspath(smckpt_root or output_dir)).rstrip("/")
        self._arguments = store_arguments(smckpt_arguments or {})
        self._resumes = should_load_recipe_state and not (
            final.get("recipe_checkpoint") or final.get("adapter_checkpoint")  # torchtune's own
        )
        self._resumes = self._resumes and self._newest(adapter_only=False) is not None
        self._final: Any = None
        if final:
            kind = _get_component_from_path(final_component)
            _refuse_unknown(kind, final)
            self._final = kind(
                checkpoint_dir=os.fspath(checkpoint_dir),
                output_dir=os.fspath(output_dir),
                should_load_recipe_state=should_load_recipe_state and not self._resumes,
                **final,
            )
            self._output_dir = self._final._output_dir  # of the type that torchtune gives it
            take_over()

    @property
    def output_dir(self) -> Any:
        return self._output_dir

    # -- saving ------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        state_dict: MutableMapping[str, Any],
        epoch: int,
        save_async: bool = False,
        adapter_only: bool = False,
        *,
        step: int | None = None,
        dir_prefix: str = "epoch",
        intermediate_checkpoint: bool | None = None,
    ) -> None:
        """Save; all ranks of the group call it.

        Args:
            save_async: return when the state is in memory, and commit it in the background. Such a
                save is an intermediate checkpoint.
            adapter_only: the state is that of adapters; it goes to `adapter_model` in the
                checkpoint's directory.
            step: the number of the checkpoint if `dir_prefix` is "step".
            dir_prefix: "epoch" or "step".
            intermediate_checkpoint: as a recipe passes it to the checkpointer that the config
                names, on rank 0 alone, with whole tensors. True: save here. False: the last
                checkpoint, which `final_component` saves.

        Raises:
            SaveFailedError: an earlier save was not committed; or this one, without `save_async`.
            UsageError: an argument is not honoured; names it.
        """
        if intermediate_checkpoint is False:
            self._save_final(state_dict, epoch, adapter_only)
            return
        number = _number(epoch, step, dir_prefix)
        directory = f"{self._root}/dist_{dir_prefix}_{number}"
        group = self._process_group
        if intermediate_checkpoint:
            group, save_async = self._of_this_rank(), True
            if adapter_only:
                if training.ADAPTER_KEY not in state_dict:
                    raise UsageError(
                        "adapter_only is set, and the state has no adapters",
                        remedy=f"put them under {training.ADAPTER_KEY!r}",
                    )
                state_dict = {k: v for k, v in state_dict.items() if k != training.MODEL_KEY}
        elif adapter_only:
            directory = f"{directory}/{_ADAPTER}"
        if save_async and self._keep == 0:
            log.info("%s is not saved: keep_last_n_checkpoints is 0", directory)
            return
        nested = adapter_only and not intermediate_checkpoint
        save = smckpt.async_save if save_async else smckpt.save
        save(
            state_dict,
            checkpoint_id=Below(directory, self._root),
            process_group=group,
            step=number,
            options=smckpt.SaveOptions(
                metadata={"torchtune": {"epoch": epoch, "keys": sorted(state_dict)}},
                on_commit=self._rotation(dir_prefix, number, nested),
            ),
            **self._arguments,
        )

    def _save_final(
        self, state_dict: MutableMapping[str, Any], epoch: int, adapter_only: bool
    ) -> None:
        if self._final is None:
            raise UsageError(
                "intermediate_checkpoint=False is not honoured: no checkpointer of torchtune is "
                "configured that could save the last checkpoint",
                remedy="pass its arguments too, such as checkpoint_files and model_type",
            )
        self._final.save_checkpoint(
            state_dict, epoch=epoch, intermediate_checkpoint=False, adapter_only=adapter_only
        )
        smckpt.maybe_finalize_async_calls()

    def _of_this_rank(self) -> Any:
        """A group of this rank alone."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return group_at([dist.get_rank()])

    def _rotation(
        self, prefix: str, number: int, nested: bool
    ) -> Callable[[smckpt.SaveHandle], None] | None:
        """The function that the coordinator calls after the commit."""
        if self._keep is None:
            return None
        keep = max(self._keep, 1)

        def rotate(_: smckpt.SaveHandle) -> None:
            run = self._run(prefix, nested)
            keep_last(run, keep, number)
            for each in run.directories() if nested else ():
                run.root.join(os.path.dirname(each[1])).remove_directory()  # if it is empty

        return rotate

    # -- loading -----------------------------------------------------------------------------

    def get_latest_intermediate_checkpoint(self, adapter_only: bool = False) -> str | None:
        """The directory of the newest checkpoint, or None. One that torchtune's own checkpointer
        saved counts too: by its epoch, and beside checkpoints of steps by its time."""
        found = self._newest(adapter_only)
        theirs = None if adapter_only else self._newest_of_torchtune()
        if found is None or (theirs is not None and _is_later(theirs, found)):
            return theirs
        return str(found)

    _get_latest_intermediate_checkpoint = get_latest_intermediate_checkpoint  # torchtune's name

    def load_checkpoint(
        self,
        state_dict: MutableMapping[str, Any] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        adapter_only: bool = False,
    ) -> MutableMapping[str, Any]:
        """Fill `state_dict`; all ranks call it.

        Args:
            state_dict: the target. None: the state of the configured checkpointer: the base model
                and, with `should_load_recipe_state`, the newest intermediate state.
            checkpoint_path: None: that of `get_latest_intermediate_checkpoint`.
            adapter_only: load the adapters of the newest checkpoint.

        Raises:
            UsageError: there is nothing to load, or no target. It is also a ValueError, as in
                torchtune.
        """
        if state_dict is None:
            return self._load_base()
        if checkpoint_path is None:
            checkpoint_path = self.get_latest_intermediate_checkpoint(adapter_only)
        if checkpoint_path is None:
            raise UsageError(
                "there is no intermediate checkpoint to load",
                remedy="start without resume_from_checkpoint, or pass checkpoint_path",
                path=self._root,
            )
        if _is_of_dcp(checkpoint_path):
            self._stock().load_checkpoint(state_dict, checkpoint_path)
        else:
            smckpt.load(
                state_dict,
                checkpoint_id=checkpoint_path,
                process_group=self._process_group,
                **self._arguments,
            )
        return state_dict

    def _stock(self) -> Any:
        return training.DistributedCheckpointer(
            self._checkpoint_dir, self._output_dir, self._process_group
        )

    def _newest_of_torchtune(self) -> str | None:
        if not os.path.isdir(self._output_dir):
            return None
        found: str | None = self._stock()._get_latest_intermediate_checkpoint()
        return found

    def _load_base(self) -> MutableMapping[str, Any]:
        if self._final is None:
            raise UsageError(
                "load_checkpoint has no state_dict to load into",
                remedy="pass state_dict; or configure the checkpointer of the base model, with "
                "checkpoint_files and model_type",
            )
        state: dict[str, Any] = self._final.load_checkpoint()
        found = self._newest(adapter_only=False) if self._resumes else None
        if found is None:
            return state
        keys = set(found.metadata["torchtune"]["keys"])
        if training.ADAPTER_KEY in keys:  # the adapters belong on top of the base model
            keys.discard(training.MODEL_KEY)
        only = smckpt.LoadOptions(only=sorted(keys))
        saved = smckpt.load(checkpoint_id=found, options=only, **self._arguments)
        assert saved is not None
        return {**state, **saved}

    def _run(self, prefix: str, nested: bool) -> RunDirectory:
        template = f"dist_{prefix}_{{step}}" + (f"/{_ADAPTER}" if nested else "")
        return run_directory(self._root, template, self._arguments)

    def _newest(self, adapter_only: bool) -> smckpt.FoundCheckpoint | None:
        runs = [self._run(prefix, adapter_only) for prefix in ("epoch", "step")]
        newest = [one for run in runs if (one := run.newest()) is not None]
        return max(newest, key=lambda one: one.committed_at, default=None)


def take_over(client: Any = CheckpointClient, *, always: bool = False) -> Callable[[], None]:
    """Make torchtune's `CheckpointClient` save and load intermediate checkpoints here, where its
    config names `DistributedCheckpointer`.

    Args:
        always: whatever its config names. A top key `keep_last_n_checkpoints` of the config counts
            then. What torchtune's own checkpointers save beside it is named by a warning.

    Returns:
        A function that undoes it.
    """
    made, sync = client._get_dcp_checkpointer, client._save_checkpoint_sync
    load = client.load_distributed_checkpoint
    own = {kind: kind.save_checkpoint for kind in (OWN if always else ())}
    if getattr(made, "of_smckpt", False):
        return lambda: None

    def get_dcp_checkpointer(self: Any) -> Any:
        theirs = self._get_checkpointer()
        if isinstance(theirs, DistributedCheckpointer):
            return theirs
        if not always:
            return made(self)
        if self._dcp_checkpointer is None:
            self._dcp_checkpointer = DistributedCheckpointer(
                theirs._checkpoint_dir,
                theirs._output_dir,
                keep_last_n_checkpoints=self._cfg.get("keep_last_n_checkpoints"),
            )
        return self._dcp_checkpointer

    def save_checkpoint_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        sync(self, *args, **kwargs)
        smckpt.maybe_finalize_async_calls()  # all ranks learn if the last save was not committed

    def load_distributed_checkpoint(self: Any, model: Any, optimizer: Any) -> Any:
        # torchtune makes room for the state of an optimizer, and not for those of optimizer_in_bwd
        for each in getattr(optimizer, "optim_map", {}).values():
            smckpt.init_optim_state(each)
        return load(self, model, optimizer)

    get_dcp_checkpointer.of_smckpt = True  # type: ignore[attr-defined]
    client._get_dcp_checkpointer = get_dcp_checkpointer
    client._save_checkpoint_sync = save_checkpoint_sync
    client.load_distributed_checkpoint = load_distributed_checkpoint

    def warning(save: Any) -> Callable[..., None]:
        taken = inspect.signature(save)

        @functools.wraps(save)
        def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
            given = taken.bind(self, *args, **kwargs).arguments
            if given.get("intermediate_checkpoint"):
                log.warning(
                    "%s saves this intermediate checkpoint, and not smckpt, since the recipe does "
                    "not save with enable_async_checkpointing. For smckpt name %s as the "
                    "_component_ of the config's checkpointer",
                    type(self).__qualname__,
                    f"{__name__}.{DistributedCheckpointer.__qualname__}",
                )
            save(self, *args, **kwargs)

        return save_checkpoint

    for kind, save in own.items():
        kind.save_checkpoint = warning(save)

    def undo() -> None:
        client._get_dcp_checkpointer, client._save_checkpoint_sync = made, sync
        client.load_distributed_checkpoint = load
        for kind, save in own.items():
            kind.save_checkpoint = save

    return undo


def _number(epoch: int, step: int | None, prefix: str) -> int:
    if prefix not in ("epoch", "step"):
        raise UsageError(f"dir_prefix is {prefix!r}", remedy='pass "epoch" or "step"')
    if prefix == "epoch":
        return epoch
    if step is None:
        raise UsageError('step is None, and dir_prefix is "step"', remedy="pass step")
    return step


def _refuse_unknown(kind: Any, given: Mapping[str, Any]) -> None:
    taken = inspect.signature(kind).parameters
    for name in given:
        if name not in taken:
            raise UsageError(
                f"{name} is not honoured: neither DistributedCheckpointer nor {kind.__name__} "
                "takes it",
                remedy="leave it out, or name another final_component",
            )


def _is_of_dcp(path: str | os.PathLike[str]) -> bool:
    """Whether torchtune's own checkpointer saved it, and smckpt nothing after it."""
    metadata = os.path.join(path, ".metadata")
    return os.path.isfile(metadata) and DistributedFileSystemReader.leaves_to_dcp(path)


def _is_later(theirs: str, ours: smckpt.FoundCheckpoint) -> bool:
    """Whether torchtune's own checkpoint is a later one than this."""
    if os.path.basename(ours).startswith("dist_epoch_"):
        return int(theirs.rpartition("_")[2]) > int(os.path.basename(ours).rpartition("_")[2])
    return os.stat(os.path.join(theirs, ".metadata")).st_mtime_ns > ours.committed_at
