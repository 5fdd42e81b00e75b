"""Lightning's `CheckpointIO`: what one rank has (one process, DDP) is saved through smckpt."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.integrations.lightning.s3 import (
    DEFAULT_CHUNK_SIZE_MB,
    DEFAULT_MAX_READ_CONCURRENCY,
    DEFAULT_MAX_WRITE_CONCURRENCY,
)
from smckpt.integrations.lightning.saves import (
    Saves,
    device_of,
    refuse_storage_options,
    written_by_lightning,
)
from smckpt.storage import StoreOptions, open_storage
from smckpt.storage.urls import is_local, is_s3_url, scheme_of
from smckpt.translate.conversion.stock import checkpoint_of, state_of

__all__ = ["S3CheckpointIO", "SmckptCheckpointIO", "load_any"]


class SmckptCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """`Trainer(plugins=[SmckptCheckpointIO()])`: checkpoints on disk, in S3 and the other stores.

    Each path is a directory with one committed checkpoint. What Lightning itself wrote is loaded
    too. Lightning's sharded strategies do not use plugins: see `SmckptFSDPStrategy`.

    Args:
        async_checkpointing: return when the state is in memory, and commit in the background.
            `teardown` waits, and raises if a save failed.
        storage: as for `smckpt.save`.
    """

    def __init__(
        self,
        async_checkpointing: bool = True,
        *,
        storage: StoreOptions | Mapping[str, Any] | None = None,
    ) -> None:
        self.async_checkpointing = async_checkpointing
        self.saves = Saves({"storage": storage})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """
        Raises:
            SaveFailedError: a save was not committed: this one, or under `async_checkpointing` an
                earlier one.
        """
        refuse_storage_options(storage_options)
        state = state_of(checkpoint)
        self.saves.make_room(os.fspath(path))
        self.saves.save(
            state,
            os.fspath(path),
            wait=not self.async_checkpointing,
            step=checkpoint.get("global_step"),
            no_dist=True,  # Lightning saves on rank 0 alone
        )

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """
        Args:
            weights_only: as in `torch.load`. It concerns only what smckpt cannot store without
                code, such as hyper-parameters of your own classes.

        Raises:
            FileNotFoundError, as from Lightning's own plugin: nothing committed is at `path`.
        """
        location = os.fspath(path)
        if written_by_lightning(location):
            stock: dict[str, Any] = TorchCheckpointIO().load_checkpoint(
                location, map_location, weights_only
            )
            return stock
        device = device_of(map_location)
        try:
            if not is_local(location) and not self.saves.find(location):  # an object, or nothing
                raise CheckpointNotFoundError(
                    "nothing committed is there",
                    remedy="pass the path of a checkpoint; smckpt ls shows those below a directory",
                    path=location,
                )
            state = self.saves.load(location, no_dist=True)
        except CheckpointNotFoundError as error:
            return self._other(location, map_location, weights_only, error)
        checkpoint = checkpoint_of(state, weights_only)
        if device is not None and device.type != "cpu":
            checkpoint = apply_to_collection(checkpoint, torch.Tensor, lambda t: t.to(device))
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it when the save that replaces it is committed."""
        location = os.fspath(path)
        executor = _executor_around()
        if executor is None:
            self.saves.drop(location)
        else:  # after the saves that wait there
            executor.submit(self.saves.drop, location)

    def teardown(self) -> None:
        """
        Raises:
            SaveFailedError: the last save was not committed.
        """
        self.saves.finish()

    def _other(
        self, location: str, map_location: Any, weights_only: bool | None, error: Exception
    ) -> dict[str, Any]:
        """One object of torch.save, as the plugins of Lightning and NeMo write it to a store."""
        try:
            if is_local(location):
                raise error
            packed = io.BytesIO(self.saves.read(location))
        except CheckpointNotFoundError:
            raise FileNotFoundError(str(error)) from error
        found: dict[str, Any] = torch.load(
            packed, map_location=map_location, weights_only=weights_only
        )
        return found


class S3CheckpointIO(SmckptCheckpointIO):
    """NeMo's plugin of this name. None for an argument, as `cfg.get` gives it, is its default.

    Args:
        dirpath: the s3:// URL below which `ModelCheckpoint` saves.
        chunk_size_MB: of the parts of an upload, in MiB; 64.
        max_read_concurrency, max_write_concurrency: requests in flight of one rank; 15 and 10.
        async_checkpointing: as for `SmckptCheckpointIO`; False.
        storage: as for `smckpt.save`; a mapping here.

    Raises:
        UsageError: `dirpath` is not in S3, or a value is not possible.
    """

    def __init__(
        self,
        dirpath: Any,
        chunk_size_MB: int | None = None,
        max_read_concurrency: int | None = None,
        max_write_concurrency: int | None = None,
        async_checkpointing: bool | None = None,
        *,
        storage: Mapping[str, Any] | None = None,
    ) -> None:
        _refuse_elsewhere("dirpath", dirpath)
        given = {
            "chunk_size_MB": DEFAULT_CHUNK_SIZE_MB if chunk_size_MB is None else chunk_size_MB,
            "max_read_concurrency": DEFAULT_MAX_READ_CONCURRENCY
            if max_read_concurrency is None
            else max_read_concurrency,
            "max_write_concurrency": DEFAULT_MAX_WRITE_CONCURRENCY
            if max_write_concurrency is None
            else max_write_concurrency,
        }
        super().__init__(
            bool(async_checkpointing),
            storage={**(storage or {}), **given},
        )
        self.dirpath = os.fspath(dirpath)
        open_storage(self.dirpath, **self.saves.arguments)  # refuses impossible values
        self.chunk_size_MB = given["chunk_size_MB"]
        self.max_read_concurrency = given["max_read_concurrency"]
        self.max_write_concurrency = given["max_write_concurrency"]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        _refuse_elsewhere("the checkpoint's path", path)
        super().save_checkpoint(checkpoint, path, storage_options)


def _refuse_elsewhere(name: str, given: Any) -> None:
    if not is_s3_url(str(given)):
        raise UsageError(
            f"{name} is {given!r}, which is not in S3",
            remedy="write s3://bucket/prefix, or use SmckptCheckpointIO",
        )


def load_any(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Lightning's function behind `load_from_checkpoint`, which takes smckpt's checkpoints too."""

    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        path = os.fspath(path_or_url) if isinstance(path_or_url, (str, os.PathLike)) else ""
        if not _may_be_ours(path) or written_by_lightning(path):
            return stock(path_or_url, map_location, weights_only)
        return SmckptCheckpointIO().load_checkpoint(path, map_location, weights_only)

    return load


def _may_be_ours(path: str) -> bool:
    if is_local(path):
        return os.path.isdir(path)
    if is_s3_url(path):  # Lightning's own file is an object there, which the plugin reads
        return True
    return scheme_of(path) not in ("http", "https") and bool(Saves({}).find(path))


def _executor_around() -> Any:
    """The executor of an `AsyncCheckpointIO` that passes a removal on. It holds the saves that this
    plugin has not seen yet, and the checkpoint may go only after them."""
    caller = sys._getframe(2).f_locals.get("self")
    return caller._executor if isinstance(caller, AsyncCheckpointIO) else None
