"""`nvidia_resiliency_ext.checkpointing.async_ckpt`: torch.save in the background. It writes one
file, which torch.load opens.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any, BinaryIO, cast

import torch

from smckpt.integrations.nvrx.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from smckpt.integrations.url_files import UrlFileSystem, is_url
from smckpt.storage.disk.directory import Directory
from smckpt.storage.urls import Below

__all__ = ["TorchAsyncCheckpoint", "save_whole", "sweep_unfinished"]

log = logging.getLogger("smckpt")

_UNFINISHED = re.compile(r"(.+)\.\d+\.tmp")  # of `save_whole`: the name, and the rank


class _OfClassToo:
    """A method of objects. Called on the class, as NVRx's usage guide does, it acts on one object
    of the process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._function.__get__(_of_process(owner) if instance is None else instance, owner)


class TorchAsyncCheckpoint:
    """
    Args:
        persistent_queue: one worker for all saves; otherwise one for each.
    """

    def __init__(self, persistent_queue: bool = True) -> None:
        self.save = torch.save
        self._async_calls_queue = AsyncCallsQueue(persistent=persistent_queue)

    @_OfClassToo
    def async_save(self, state_dict: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """`torch.save` in the background. When this returns, training may change the state.

        The file gets its name when it is whole and durable.

        Args:
            f: a path, or a URL such as s3://bucket/key. A file object is refused.
            args, kwargs: of torch.save.

        Raises:
            UsageError: the state, or `f`, cannot be pickled.
            MemoryBudgetError: the host has no memory for the copy.
        """
        request = AsyncRequest(save_whole, (state_dict, f, *args), [], kwargs)
        self._async_calls_queue.schedule_async_request(request)

    @_OfClassToo
    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Notice the saves that have ended.

        Args:
            blocking: wait for all saves.
            no_dist: of this rank alone; otherwise all ranks call this.
            terminate: end the worker, too.

        Raises:
            AsyncCallFailedError: a save failed.
        """
        self._async_calls_queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        if terminate:
            self._async_calls_queue.close()

    @_OfClassToo
    def close(self, abort: bool = False) -> None:
        """Finish all saves and end the worker; or, with `abort`, end it at once."""
        if not abort:  # its saves are of this rank alone
            self._async_calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        self._async_calls_queue.close(abort=abort)

    def _get_async_calls_queue(self) -> AsyncCallsQueue:  # NVRx's own tests ask
        return self._async_calls_queue


def save_whole(state_dict: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """torch.save into a file that gets its name when it is whole and durable."""
    if is_url(f):
        with UrlFileSystem().create_stream(f, "wb") as stream:
            torch.save(state_dict, cast(Any, stream), *args, **kwargs)
        return
    with _holder(os.fspath(f)) as directory:
        name = os.path.basename(os.fspath(f))
        # of this rank: several may save one path. What a killed save left, the next one replaces
        fresh = f"{name}.{os.environ.get('RANK', '0')}.tmp"
        if not _remove_dead(directory, fresh):
            fresh = f"{name}.{os.getpid()}.tmp"
        try:
            with _locked(directory, fresh) as file:
                torch.save(state_dict, file, *args, **kwargs)
                file.flush()
                os.fsync(file.fileno())
            directory.rename(fresh, name)
        except BaseException:
            with contextlib.suppress(OSError):
                directory.remove(fresh)
            raise
        directory.sync()


def sweep_unfinished(directory: Directory, names: re.Pattern[str]) -> None:
    """Delete what killed calls of `save_whole` have left of files with these names. A file that a
    living process writes is locked, and stays."""
    found = [
        name
        for name in directory.names()
        if (named := _UNFINISHED.fullmatch(name)) and names.fullmatch(named[1])
    ]
    for name in found:
        if _remove_dead(directory, name):
            log.info("removed %s/%s, which a killed save has left", directory.path, name)


def _remove_dead(directory: Directory, name: str) -> bool:
    """Remove what a killed save, or somebody else, has left under a name, so that it is free.
    False: a living process writes there, or the file system has no locks that tell."""
    try:
        with open(directory.open_file(name), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            directory.remove(name)
    except FileNotFoundError:
        return True
    except OSError:
        if not directory.is_link(name):
            return False
        directory.remove(name)
    return True


def _holder(path: str) -> Directory:
    """The directory of a file. Of a `Below`, the user named one above it."""
    above = os.path.dirname(os.path.abspath(path))
    if not isinstance(path, Below):
        return Directory.open(above)
    names = os.path.relpath(above, path.named).split(os.sep)
    return Directory.open(path.named, [name for name in names if name != os.curdir], make=True)


def _locked(directory: Directory, name: str) -> BinaryIO:
    """A new file that this process has locked, so that no sweep takes it for a killed save's."""
    while True:
        if not _remove_dead(directory, name):  # of an older process, where there are no locks
            directory.remove(name)
        try:
            file = open(directory.create(name), "wb")  # noqa: SIM115 - the caller closes it
        except FileExistsError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return file  # no locks on this file system: nor does a sweep get one
        there = directory.status(name)
        if there is not None and os.path.samestat(os.fstat(file.fileno()), there):
            return file
        file.close()  # a sweep was faster


@cache
def _of_process(kind: type[TorchAsyncCheckpoint]) -> TorchAsyncCheckpoint:
    return kind()
