"""Finding out, before training time is lost, whether checkpoints can be kept at a place in S3."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from smckpt.errors import CheckpointError, CheckpointNotFoundError, StorageError

if TYPE_CHECKING:
    from smckpt.storage.s3 import S3Storage

__all__ = ["try_out"]

_LONGEST = "x" * 64  # no name of ours is longer


def try_out(store: S3Storage, name: str) -> str:
    """Write, write again under the same name, read, list and delete one small object.

    Returns:
        A remark for the user, or "".

    Raises:
        StorageError: the store refused one of these, or ignored the condition of the second.
        UsageError: keys would be too long here.
    """
    store.key(_LONGEST)
    path, body, other = store.path(name), os.urandom(16), os.urandom(17)
    if not store.put_exclusive(name, body):
        raise StorageError(
            "cannot try out the store: the name exists already",
            remedy="delete that object and try again; do two jobs have one session?",
            path=path,
        )
    try:
        if store.put_exclusive(name, other):
            raise StorageError(
                "the store ignores If-None-Match: of two that create one name both succeed, so no "
                "checkpoint would be safe from being overwritten by another",
                remedy="use a store with conditional writes (AWS S3 has them), or a newer version "
                "of this one",
                path=path,
            )
        _read_back(store, name, body)
        _list_it(store, name)
    except BaseException:
        with contextlib.suppress(CheckpointError):  # the failure before it is the one to report
            store.delete(name)
        raise
    return _delete(store, name)


def _read_back(store: S3Storage, name: str, body: bytes) -> None:
    try:
        found = store.read(name)
    except CheckpointNotFoundError as error:
        raise _not_kept(store.path(name), "is not there when it is read") from error
    if found != body:
        raise _not_kept(store.path(name), "reads back otherwise")


def _list_it(store: S3Storage, name: str) -> None:
    """What is not listed under its key is never found again."""
    if all(info.name != name for info in store.list(name)):
        raise StorageError(
            "an object that was just written is not listed",
            remedy="use a store that lists at once what was written; if the URL has // in it, "
            "write /: some stores take them for the same and keep the other",
            path=store.path(name),
        )


def _not_kept(path: str, what: str) -> StorageError:
    return StorageError(
        f"an object that was just written {what}",
        remedy="use a store that is consistent: what was written must be seen at once by all",
        path=path,
    )


def _delete(store: S3Storage, name: str) -> str:
    path = store.path(name)
    try:
        answer: dict[str, Any] = store.run(
            "delete", path, lambda client: client.delete_object(**store.common, Key=store.key(name))
        )
    except StorageError as error:
        raise StorageError(
            f"objects can be written here but not deleted ({error.message}), so neither failed "
            "saves nor superseded checkpoints could be removed",
            remedy="allow s3:DeleteObject, and choose a bucket whose object lock retains nothing "
            "by default; to keep everything all the same set SMCKPT_S3_PREFLIGHT=0 and "
            "SaveOptions(sweep=False)",
            path=path,
        ) from error
    if answer.get("DeleteMarker") or answer.get("VersionId"):
        return (
            f"{store.url}: the bucket keeps versions, so deleted checkpoints go on costing "
            "storage; give it a lifecycle rule (NoncurrentVersionExpiration)"
        )
    return ""
