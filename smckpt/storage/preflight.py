"""Find out whether a store can hold checkpoints, before training time is lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from smckpt.storage.base import Storage, name_taken
from smckpt.storage.urls import file_url

__all__ = ["try_out"]

Result = TypeVar("Result")


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
