"""Stores of files: one interface over file systems and object stores. `Access` opens them; the
public arguments about stores become one here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smckpt.errors import UsageError
from smckpt.storage.base import Access, FileInfo, FileWriter, Storage, register_store
from smckpt.storage.s3.config import StoreOptions, s3_options
from smckpt.storage.spool import SpooledWriter
from smckpt.storage.urls import Below, is_s3_url, normal_url

__all__ = [
    "Access",
    "FileInfo",
    "FileWriter",
    "SpooledWriter",
    "Storage",
    "StoreOptions",
    "access_to",
    "open_storage",
    "own_access",
    "register_store",
]


def access_to(
    *urls: str | os.PathLike[str],
    storage: StoreOptions | Mapping[str, Any] | None = None,
    own: Access | None = None,
) -> Access:
    """Make the access through which a public call reaches the places that it names.

    Args:
        urls: the places that the call names. Of a `Below` the user named only what is above it.
        storage: the call's argument of this name; it concerns places in S3.
        own: the access of a reader or writer that was passed to the call; it may have options too.

    Raises:
        UsageError: options are given and no place is in S3, two options contradict each other, or
            an option is not honoured.
    """
    named_urls = [os.fspath(url) for url in urls]
    url_of_store = next(filter(is_s3_url, named_urls), named_urls[0] if named_urls else "")
    above = [url.named if isinstance(url, Below) else url for url in named_urls]
    named = tuple(normal_url(url) for url in above if url)
    if own is not None and own.options:
        if storage is not None:
            raise UsageError(
                "S3 options are given both to the call and to its reader or writer",
                remedy="give them to one of the two",
                path=url_of_store,
            )
        return replace(own, named=named)
    config = s3_options(url_of_store, storage)
    return Access({} if config is None else {"s3": config.to_json()}, named=named)


def own_access(
    url: str | os.PathLike[str], storage: StoreOptions | Mapping[str, Any] | None
) -> Access:
    """Make the access of a reader or writer that may be passed to a call. It has no options unless
    some are given here, so that the call's options then hold."""
    return Access() if storage is None else access_to(url, storage=storage)


def open_storage(
    url: str | os.PathLike[str], *, storage: StoreOptions | Mapping[str, Any] | None = None
) -> Storage:
    """Open the store at `url` with these options. `Storage.at` opens places beside it.

    Raises:
        UsageError: as `access_to` and `Access.open` say.
    """
    return access_to(url, storage=storage).open(url)
