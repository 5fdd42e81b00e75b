"""The saves of one Trainer; and Lightning's `CheckpointIO`, which saves what one rank has (one
process, DDP).

`ModelCheckpoint` saves a checkpoint and drops an older one right after. Here the older one is
removed when the newer one is committed. If that save fails, the older one stays until a later save
is committed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning_utilities.core.apply_func import apply_to_collection

import smckpt
from smckpt.checkpoint.records.format import parse_name
from smckpt.engine.saving.job import SaveHandle
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    UsageError,
)
from smckpt.formats.conversion.stock import LIGHTNING_KEYS, checkpoint_of, state_of
from smckpt.integrations.lightning.alone import Announcements, wait_for_save
from smckpt.integrations.lightning.s3 import (
    DEFAULT_CHUNK_SIZE_MB,
    DEFAULT_MAX_READ_CONCURRENCY,
    DEFAULT_MAX_WRITE_CONCURRENCY,
)
from smckpt.integrations.replaced import below_run, remove_or_keep
from smckpt.storage import Storage, StoreOptions, open_storage
from smckpt.storage.urls import disk_path, is_s3_url, parent_url, scheme_of

log = logging.getLogger("smckpt")

_QUEUE = "lightning"
SAVE_OPTIONS = smckpt.SaveOptions(queue=_QUEUE)
_KINDS_ALONE = smckpt.LoadOptions(only=LIGHTNING_KEYS[1:])
_REMOVAL_SECONDS = 600.0
OF_SLURM = re.compile(r"hpc_ckpt_(\d+)\.ckpt")  # saved before the job is queued again
_MB = 1 << 20


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
        self.alone = Announcements()
        # ends when the saves that AsyncCheckpointIO was asked for have begun
        self.asked: Future[Any] | None = None
        self._pickled = set[str]()  # keys of which a warning was given

    def save(self, state: dict[str, Any], path: str, *, wait: bool, **arguments: Any) -> None:
        """
        Args:
            wait: return when it is committed; a save before SLURM ends the job always does.
            arguments: for `smckpt.async_save`.

        Raises:
            SaveFailedError: an earlier save was not committed; with `wait`, also this one.
        """
        values, kinds = (state[key] for key in LIGHTNING_KEYS)
        for key in [one for one, kind in kinds["keys"].items() if kind == "pickled"]:
            if len(values[key]) > _MB and key not in self._pickled:
                self._pickled.add(key)
                log.warning(
                    "the checkpoint's %r is pickled as one (%d MB) while training waits, since it "
                    "holds more than plain tensors (objects, parameters): put those under a key of "
                    "their own, or detach() them",
                    key,
                    len(values[key]) // _MB,
                )
        there = disk_path(path)
        with self._lock:
            self._begun += 1
            number = self._begun
            kept = [(at, other) for at, other in self._dropped if other not in (path, there)]
            self._dropped = kept
        if there:  # save_last="link" links to it at once; the save names a fault
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(there), exist_ok=True)
        with _signals_wait():
            handle = smckpt.async_save(
                state,
                checkpoint_id=below_run(path),
                options=SAVE_OPTIONS,
                **self._s3(path),
                **arguments,
            )
        assert handle is not None
        self._settled = settled = threading.Event()
        tell_end = self.alone.begin(path) if arguments.get("no_dist") else None

        def ended(done: SaveHandle) -> None:
            if tell_end is not None:
                tell_end()
            due: list[str] = []
            if done.error is None:
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

        handle.add_done_callback(ended)
        if wait or OF_SLURM.fullmatch(os.path.basename(path)):
            handle.wait()

    def make_room(self, path: str) -> None:
        """Move what Lightning itself wrote at the path of the next save aside: a file, a directory
        or a link. It goes when that save is committed.

        Its new name has a number, as Lightning numbers names that are taken. So `"last"` finds it
        if the save never ends.
        """
        there = disk_path(path)
        if there is None or not (os.path.islink(there) or written_by_lightning(there)):
            return
        stem, extension = os.path.splitext(there)
        numbers = itertools.count(1)
        aside = next(
            name for one in numbers if not os.path.lexists(name := f"{stem}-v{one}{extension}")
        )
        os.rename(there, aside)
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

    def has_optimizers(self, path: str) -> bool:
        """Whether they were saved with the checkpoint, as without `save_weights_only`."""
        try:
            kinds = self.load(path, no_dist=True, options=_KINDS_ALONE)[LIGHTNING_KEYS[1]]
            return not isinstance(kinds, Mapping) or kinds.get("optimizers") is not None
        except (CheckpointError, KeyError):
            return True  # the load that follows says what is wrong, on all ranks

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

    def _remove(self, path: str) -> None:
        there = disk_path(path)
        if there is not None and os.path.islink(there):  # save_last="link"
            os.unlink(there)
            return
        if written_by_lightning(path):
            TorchCheckpointIO().remove_checkpoint(path)
        else:
            if there is None and not self.find(path):
                above, name = self._object(path)
                if name in above.names(name):  # a store may be a disk, with a directory of the name
                    above.delete(name)
            elif not remove_or_keep(path, self._s3(path)):
                return
            if there is None or os.path.isdir(there):
                # leases, and what a save that was never committed has left
                storage = open_storage(below_run(path), **self._s3(path))
                storage.delete_many([one for one in storage.names() if parse_name(one)])
                storage.remove_directory()
        log.info("removed %s", path)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Lightning's handlers of signals run at the end: that of SLURM's saves, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = ((number, signal.getsignal(number)) for number in signal.valid_signals())
    handlers: dict[int, Any] = {at: one for at, one in known if isinstance(one, _HandlersCompose)}
    received = list[tuple[Any, Any]]()
    try:
        for number in handlers:
            signal.signal(number, lambda *given: received.append(given))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in received:
            handlers[number](number, frame)


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


def _device_of(map_location: Any) -> torch.device | None:
    """Where `torch.load` would put tensors of the CPU; None: it leaves them there."""
    if callable(map_location):
        moved = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if moved is None else torch.device(moved.device)
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    return None if map_location is None else torch.device(map_location)


def written_by_lightning(location: str) -> bool:
    """Whether it is a file, or a directory of Lightning's sharded strategies."""
    there = disk_path(location)
    return there is not None and any(map(os.path.isfile, (there, os.path.join(there, "meta.pt"))))


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
        if self.saves.asked is not None:
            self.saves.asked.result()  # the saves of an AsyncCheckpointIO around this have begun
        if not written_by_lightning(location):
            wait_for_save(location)
        if written_by_lightning(location):
            stock: dict[str, Any] = TorchCheckpointIO().load_checkpoint(
                location, map_location, weights_only
            )
            return stock
        device, in_store = _device_of(map_location), disk_path(location) is None
        try:
            if in_store and not self.saves.find(location):  # an object, or nothing
                raise CheckpointNotFoundError(
                    "nothing committed is there",
                    remedy="pass the path of a checkpoint; smckpt ls shows those below a directory",
                    path=location,
                )
            state = self.saves.load(location, no_dist=True)
        except CheckpointNotFoundError as error:
            # one object of torch.save, as the plugins of Lightning and NeMo write it to a store
            try:
                if not in_store:
                    raise error
                packed = io.BytesIO(self.saves.read(location))
            except CheckpointNotFoundError:
                raise FileNotFoundError(str(error)) from error
            found: dict[str, Any] = torch.load(packed, map_location, weights_only=weights_only)
            return found
        checkpoint = checkpoint_of(state, weights_only)
        if device is not None and device.type != "cpu":
            checkpoint = apply_to_collection(checkpoint, torch.Tensor, lambda t: t.to(device))
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it when the save that replaces it is committed."""
        location = os.fspath(path)
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, AsyncCheckpointIO):  # its executor holds saves that are not seen yet
            caller._executor.submit(self.saves.drop, location)
        else:
            self.saves.drop(location)

    def teardown(self) -> None:
        """
        Raises:
            SaveFailedError: the last save was not committed.
        """
        self.saves.finish()


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
        ours = False
        if path and scheme_of(path) not in ("http", "https"):
            if not written_by_lightning(path):
                wait_for_save(path)
            if there := disk_path(path):
                ours = os.path.isdir(there) and not written_by_lightning(there)
            else:
                with contextlib.suppress(CheckpointError):  # the stock function says what is wrong
                    ours = bool(Saves({}).find(path))
                # Lightning's own file in S3 is an object, which the plugin reads, too
                ours = ours or (is_s3_url(path) and importlib.util.find_spec("s3fs") is None)
        if not ours:
            return stock(path_or_url, map_location, weights_only)
        return SmckptCheckpointIO().load_checkpoint(path, map_location, weights_only)

    return load


def announced(stock: Callable[..., None]) -> Callable[..., None]:
    """`AsyncCheckpointIO.save_checkpoint`: other ranks hear of a save that its thread has not yet
    begun. Around another plugin than smckpt's it is as it was."""

    @functools.wraps(stock)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin = self.checkpoint_io
        if not isinstance(plugin, SmckptCheckpointIO):
            return stock(self, *args, **kwargs)
        tell_end = plugin.saves.alone.begin(os.fspath(kwargs.get("path") or args[1]))
        try:
            stock(self, *args, **kwargs)
        finally:
            # by then the save itself is announced, or has failed
            plugin.saves.asked = self._executor.submit(tell_end)

    return save_checkpoint
