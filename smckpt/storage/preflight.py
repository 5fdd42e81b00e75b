"""Find out whether a store can hold checkpoints, before training time is lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError, UsageError
from smckpt.storage.base import Storage
from smckpt.storage.faults import name_taken
from smckpt.storage.urls import file_url, scheme_of

Result = TypeVar("Result")


def refuse_save(storage: Storage, writers: int, *, by_worker: bool = True) -> None:
    """Refuse a save that cannot become a checkpoint in this store.

    Args:
        writers: ranks of the job.
        by_worker: whether a worker process writes for each of them.

    Raises:
        UsageError: several processes would write, and the store cannot create exclusively, or
            does not show a process what another one wrote.
    """
    scheme = scheme_of(storage.url)
    if storage.one_process and (by_worker or writers > 1):
        raise UsageError(
            f"{scheme}:// keeps files in the process that wrote them, but a worker process "
            "writes the save",
            remedy="save to a file system (/dev/shm is one in memory) or an object store; "
            "exports, imports and copies in one process may go here",
            path=storage.url,
        )
    if writers > 1 and not storage.exclusive:
        raise UsageError(
            f"{scheme}:// has no exclusive create, so {writers} ranks, or an older attempt, "
            "could overwrite each other's commits",
            remedy="save to a file system or to s3://, and copy from there with `smckpt cp`; "
            "one rank alone may save here",
            path=storage.url,
        )


def try_out(store: Storage, name: str, delete: Callable[[str], Result]) -> Result:
    """Write, write again under the same name, read, list and delete one small file.

    Args:
        delete: deletes the file. Its result is returned.

    Raises:
        StorageError: the store refused one of these steps, or created the name twice.
    """
    path, body = file_url(store.url, name), os.urandom(16)
    if not store.put_exclusive(name, body):
        raise name_taken(path)
    try:
        _find(store, name, body, path)
    except BaseException:
        with contextlib.suppress(CheckpointError):  # the earlier failure is the one to report
            store.delete(name)
        raise
    return delete(name)


def _find(store: Storage, name: str, body: bytes, path: str) -> None:
    if store.put_exclusive(name, os.urandom(17)):
        raise StorageError(
            "the store lets a second create replace an existing file (it ignores If-None-Match): "
            "two jobs could create the same name, and one would overwrite the other's checkpoint",
            remedy="use a store with conditional writes (AWS S3 has them), or a newer version of "
            "this one or of its fsspec package",
            path=path,
        )
    try:
        found = store.read(name)
    except CheckpointNotFoundError as error:
        raise _not_kept(path, "cannot be found when it is read") from error
    if found != body:
        raise _not_kept(path, "reads back with other bytes")
    if all(info.name != name for info in store.list(name)):  # then it would never be found
        raise StorageError(
            "the listing lacks a file that was just written",
            remedy="use a store that lists new files at once; if the URL contains //, write / "
            "instead, because some stores treat the two as one",
            path=path,
        )


def _not_kept(path: str, what: str) -> StorageError:
    return StorageError(
        f"a file that was just written {what}",
        remedy="use a store in which all clients see a new file at once",
        path=path,
    )
