"""Paths and URLs of directories: joined, cut and compared without touching a store.

A location is an absolute or relative path, `file:///path`, or `scheme://bucket/prefix/`. In an
object store `//`, `.` and `..` mean nothing and are kept byte for byte; the one spelling of a
location there ends with a slash, so that location + name is the object's key.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Sequence
from urllib.parse import unquote

from smckpt.errors import UsageError

__all__ = [
    "common_parent",
    "is_local",
    "join_url",
    "local_path",
    "normal_url",
    "parent_url",
    "relative_url",
    "scheme_of",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(url: str) -> str:
    """ "s3" of "s3://bucket/key", "" of a path."""
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else ""


def is_local(url: str) -> bool:
    """Whether `url` is on a file system."""
    return scheme_of(url) in ("", "file")


def local_path(url: str) -> str:
    """The absolute path of a path or a file:// URL, without `.`, `..` and doubled slashes.

    Raises:
        UsageError: it is empty, names another host, or is no file URL.
    """
    if not url:
        raise UsageError("an empty path", remedy="pass the checkpoint's directory")
    if "\0" in url:
        raise UsageError(f"a NUL byte in the path {url!r}", remedy="pass a plain path")
    scheme = scheme_of(url)
    if scheme == "file":
        host, slash, rest = url[len("file://") :].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(
                "a file URL needs three slashes", remedy="write file:///directory", path=url
            )
        url = slash + unquote(rest)
    elif scheme:
        raise UsageError(f"{scheme}:// is no file system", remedy="pass a directory", path=url)
    return os.path.abspath(url)


def normal_url(url: str) -> str:
    """One spelling of a location: an absolute path, or the URL with a slash at its end."""
    if is_local(url):
        return local_path(url)
    scheme, bucket, parts = _split(url)
    return _unsplit(scheme, bucket, parts)


def parent_url(url: str) -> str:
    """The location that holds `url`. The parent of "/" is "/".

    Raises:
        UsageError: `url` is a whole bucket.
    """
    if is_local(url):
        return os.path.dirname(local_path(url))
    scheme, bucket, parts = _split(url)
    if not parts:
        raise UsageError(
            "a bucket has no parent", remedy="name a prefix inside the bucket", path=url
        )
    return _unsplit(scheme, bucket, parts[:-1])


def common_parent(urls: Sequence[str]) -> str:
    """The deepest location that is a proper parent of each of `urls`.

    Raises:
        UsageError: no URL, or they lie in different stores or buckets.
    """
    if not urls:
        raise UsageError("no directory given", remedy="pass at least one")
    parents = [parent_url(url) for url in urls]
    if all(is_local(url) for url in urls):
        return os.path.commonpath(parents)
    heads = {(scheme_of(url), "" if is_local(url) else _split(url)[1]) for url in urls}
    if len(heads) > 1:
        raise UsageError(
            f"the groups' directories have no common parent: {', '.join(urls)}",
            remedy="keep all groups of a step in one store and bucket",
        )
    scheme, bucket, _ = _split(urls[0])
    shared: list[str] = []
    for names in zip(*(_split(parent)[2] for parent in parents), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return _unsplit(scheme, bucket, shared)


def relative_url(url: str, base: str) -> str:
    """The rest of `url` below `base`, so that `join_url(base, rest) == url`; "" for itself.

    Raises:
        UsageError: `url` is not below `base`.
    """
    whole, start = normal_url(url), normal_url(base)
    if whole == start:
        return ""
    lead = start if start.endswith("/") else start + "/"
    if not whole.startswith(lead):
        raise UsageError(f"it is not below {base}", remedy="pass a directory below it", path=url)
    rest = whole[len(lead) :]
    # An object store's empty names ("a//") end in a slash that belongs to them.
    return rest if is_local(whole) or rest == "/" or rest.endswith("//") else rest[:-1]


def join_url(base: str, rel: str) -> str:
    """`rel`, as `relative_url` gives it, below `base`.

    Raises:
        UsageError: on a file system, `rel` would lead out of `base`.
    """
    start = normal_url(base)
    if not rel:
        return start
    if is_local(start):
        parts = rel.split("/")
        if "" in parts or "." in parts or ".." in parts or "\0" in rel:
            raise UsageError(
                f"{rel!r} does not name a directory below this one",
                remedy="pass a relative path without '.', '..' and empty parts",
                path=start,
            )
        return posixpath.join(start, rel)
    return start + (rel if rel.endswith("/") else rel + "/")


def _split(url: str) -> tuple[str, str, list[str]]:
    """Scheme, bucket, and the parts of the prefix: ["a", "", "b"] of "s3://bucket/a//b/"."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise UsageError("the URL names no bucket", remedy="write s3://bucket/prefix", path=url)
    if key and not key.endswith("/"):
        key += "/"
    return scheme.lower(), bucket, key.split("/")[:-1]


def _unsplit(scheme: str, bucket: str, parts: Sequence[str]) -> str:
    return f"{scheme}://{bucket}/" + "".join(part + "/" for part in parts)
