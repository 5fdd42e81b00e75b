"""The saves of one Trainer, and the removal of the checkpoints that its callbacks drop.

`ModelCheckpoint` saves a checkpoint and drops an older one right after. Here the older one is
removed when the newer one is committed. If that save fails, the older one stays until a later save
is committed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

import smckpt
from smckpt.checkpoint.records.format import parse_name
from smckpt.engine.saving.job import SaveHandle
from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError, UsageError
from smckpt.integrations.replaced import remove_or_keep
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import is_local, is_s3_url, local_path, parent_url

__all__ = [
    "Saves",
    "device_of",
    "refuse_storage_options",
    "written_by_lightning",
]

log = logging.getLogger("smckpt")

_QUEUE = "lightning"
_OPTIONS = smckpt.SaveOptions(queue=_QUEUE)
_REMOVAL_SECONDS = 600.0


class Saves:
    """
    Args:
        arguments: more arguments for smckpt's functions (`storage`).
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = dict(arguments)
        self._begun = 0  # saves; the last one has this number
        self._committed = 0  # the number of the last one that is committed
        self._dropped: list[tuple[int, str]] = []  # the number of the save that replaces it, path
        self._lock = threading.Lock()
        self._settled = threading.Event()  # the last save has ended, and what it replaces is gone
        self._settled.set()

    def save(self, state: dict[str, Any], path: str, *, wait: bool, **arguments: Any) -> None:
        """
        Args:
            wait: return when it is committed.
            arguments: for `smckpt.async_save`.

        Raises:
            SaveFailedError: an earlier save was not committed; with `wait`, also this one.
        """
        with self._lock:
            self._begun += 1
            number = self._begun
            self._dropped = [(at, other) for at, other in self._dropped if other != path]
        if is_local(path):  # save_last="link" links to it at once; the save names a fault here
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(local_path(path)), exist_ok=True)
        handle = smckpt.async_save(
            state, checkpoint_id=path, options=_OPTIONS, **self._s3(path), **arguments
        )
        assert handle is not None
        self._settled = settled = threading.Event()
        handle.add_done_callback(lambda done: self._ended(number, done, settled))
        if wait:
            handle.wait()

    def make_room(self, path: str) -> None:
        """Move what Lightning itself wrote at the path of the next save aside: a file, a directory
        or a link. It goes when that save is committed.

        Its new name has a number, as Lightning numbers names that are taken. So `"last"` finds it
        if the save never ends.
        """
        if not is_local(path) or not (os.path.islink(path) or written_by_lightning(path)):
            return
        stem, extension = os.path.splitext(path)
        numbers = itertools.count(1)
        aside = next(
            name for one in numbers if not os.path.lexists(name := f"{stem}-v{one}{extension}")
        )
        os.rename(path, aside)
        with self._lock:
            self._dropped.append((self._begun + 1, aside))

    def drop(self, path: str) -> None:
        """Remove a checkpoint, as soon as the save before this call is committed. If that fails,
        the checkpoint stays until a later one is."""
        with self._lock:
            if self._committed < self._begun:
                self._dropped.append((self._begun, path))
                return
        self._remove(path)

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            SaveFailedError: a save was not committed.
        """
        try:
            smckpt.maybe_finalize_async_calls(queue=_QUEUE)
        finally:
            self._settled.wait(_REMOVAL_SECONDS)

    def load(self, path: str, target: dict[str, Any] | None = None, **arguments: Any) -> Any:
        return smckpt.load(target, checkpoint_id=path, **self._s3(path), **arguments)

    def find(self, location: str, depth: int = 0) -> list[smckpt.FoundCheckpoint]:
        """The committed checkpoints at `place` or below it; none if there is no such place."""
        try:
            return smckpt.find_checkpoints(location, depth, sure=True, **self._s3(location))
        except CheckpointNotFoundError:
            return []
        except StorageError as error:
            if isinstance(error.__cause__, NotADirectoryError):  # a file, in a store on a disk
                return []
            raise

    def read(self, path: str) -> bytes:
        """
        Raises:
            CheckpointNotFoundError: there is no such object.
        """
        storage, name = self._object(path)
        return storage.read(name)

    def _object(self, path: str) -> tuple[Storage, str]:
        """A name in a store: of one object, as the plugins of Lightning and NeMo write it."""
        name = path.rstrip("/").rpartition("/")[2]
        return open_storage(parent_url(path), **self._s3(path)).with_links(), name

    def _s3(self, path: str) -> dict[str, Any]:
        return self.arguments if is_s3_url(path) else {}

    def _ended(self, number: int, handle: SaveHandle, settled: threading.Event) -> None:
        due: list[str] = []
        if handle.error is None:
            with self._lock:
                self._committed = max(self._committed, number)
                due = [path for at, path in self._dropped if at <= number]
                self._dropped = [one for one in self._dropped if one[0] > number]
        for path in due:
            try:
                self._remove(path)
            except CheckpointError as error:
                log.warning("%s was not removed: %s", path, error)
        settled.set()

    def _remove(self, path: str) -> None:
        if is_local(path) and os.path.islink(path):  # save_last="link"
            os.unlink(path)
            return
        if written_by_lightning(path):
            TorchCheckpointIO().remove_checkpoint(path)
        else:
            if not is_local(path) and not self.find(path):
                self._remove_object(path)
            elif not remove_or_keep(path, self._s3(path)):
                return
            self._remove_rest(path)
        log.info("removed %s", path)

    def _remove_object(self, path: str) -> None:
        storage, name = self._object(path)
        if name in storage.names(name):  # a store may be a disk, with a directory of the name
            storage.delete(name)

    def _remove_rest(self, path: str) -> None:
        """Leases, and what a save that was never committed has left."""
        if is_local(path) and not os.path.isdir(path):
            return
        storage = open_storage(path, **self._s3(path))
        storage.delete_many([one.name for one in storage.list() if parse_name(one.name)])
        storage.remove_directory()


def refuse_storage_options(given: Any) -> None:
    """
    Raises:
        UsageError: some are given.
    """
    if given is not None:
        raise UsageError(
            f"storage_options={given!r} is not honoured",
            remedy="leave it out of Trainer.save_checkpoint; options of S3 go to the plugin or "
            "strategy",
        )


def device_of(map_location: Any) -> torch.device | None:
    """Where `torch.load` would put tensors of the CPU; None: it leaves them there."""
    if callable(map_location):
        moved = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if moved is None else torch.device(moved.device)
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    return None if map_location is None else torch.device(map_location)


def written_by_lightning(location: str) -> bool:
    """Whether it is a file, or a directory of Lightning's sharded strategies."""
    paths = (location, os.path.join(location, "meta.pt"))
    return is_local(location) and any(map(os.path.isfile, paths))
