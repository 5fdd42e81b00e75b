"""Few verbs over any store. `open_storage` chooses the store by the URL."""

from __future__ import annotations

import os

from smckpt.errors import UsageError
from smckpt.storage.base import FileInfo, FileWriter, Storage
from smckpt.storage.posix import PosixStorage
from smckpt.storage.urls import local_path, scheme_of

__all__ = ["FileInfo", "FileWriter", "Storage", "open_storage"]


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """The store at `url`: a path, file://…, or s3://bucket/prefix with the options in force.

    Raises:
        UsageError: an empty path, or a scheme that is not built (yet).
    """
    text = os.fspath(url)
    scheme = scheme_of(text)
    if scheme in ("", "file"):
        return PosixStorage(local_path(text))
    if scheme == "s3":
        from smckpt.storage.s3 import S3Storage
        from smckpt.storage.s3_config import current_s3

        return S3Storage(text, current_s3())
    if scheme == "msc":
        raise UsageError(
            "msc:// is not built yet",
            remedy="save to a file system (FSx, NFS, a local disk) or to s3://",
            path=text,
        )
    raise UsageError(
        f"no store is known for {scheme}://",
        remedy="pass a directory, file://… or s3://…",
        path=text,
    )
