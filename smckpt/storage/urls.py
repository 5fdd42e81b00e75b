"""Paths and URLs of directories. They are joined, cut and compared without touching a store.

A location is an absolute or relative path, `file:///path`, or `scheme://bucket/prefix/`. In an
object store `//`, `.` and `..` have no meaning and are kept byte for byte. A location there is
always spelled with a slash at its end, so location + name is the object's key.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Sequence
from urllib.parse import unquote

from smckpt.errors import UsageError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OWN_DAEMON = re.compile(r"hyperpod://(127\.0\.0\.1|localhost)(:\d+)?/")
# A URL after pathlib, os.path.normpath or os.path.abspath: one slash is lost.
_SLASH_LOST = re.compile(r"(?:^|/)((?:s3a?|gs|gcs|az|abfss?|hdfs|msc|https?|file):)/(?!/)")


class Below(str):
    """A path or URL below the one that the user named. What `access_to` opens for it is not reached
    through a symbolic link from there on.

    Args:
        named: what the user named.
    """

    named: str

    def __new__(cls, url: str, named: str) -> Below:
        made = super().__new__(cls, url)
        made.named = named
        return made


def scheme_of(url: str) -> str:
    """ "s3" of "s3://bucket/key", "" of a path."""
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else ""


def is_local(url: str) -> bool:
    """Whether `url` is on a file system."""
    return scheme_of(url) in ("", "file")


def is_s3_url(url: str | os.PathLike[str]) -> bool:
    """Whether `url` begins with s3://."""
    return scheme_of(os.fspath(url)) == "s3"


def is_in_memory(url: str) -> bool:
    """Whether `url` is in the memory of a job's hosts."""
    return scheme_of(url) in ("keeper", "hyperpod")


def is_in_memory_here(url: str) -> bool:
    """Whether `url` is in memory that this host itself gives access to: a checkpoint that names it
    makes no process call another host."""
    return scheme_of(url) == "keeper" or _OWN_DAEMON.match(url) is not None


def parse_s3_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Split an s3:// URL into bucket and key. The key is kept byte for byte; "" means the whole
    bucket.

    Raises:
        UsageError: it is not an s3:// URL, or names no bucket.
    """
    text = os.fspath(url)
    bucket, _, key = text.partition("://")[2].partition("/")
    if not is_s3_url(text) or not bucket:
        raise UsageError(
            "this is not an s3:// URL with a bucket", remedy="write s3://bucket/prefix", path=text
        )
    return bucket, key


def build_s3_url(bucket: str, key: str = "") -> str:
    """The inverse of `parse_s3_url`.

    Raises:
        UsageError: `bucket` is empty or holds a slash.
    """
    if not bucket or "/" in bucket:
        raise UsageError(f"{bucket!r} is not a bucket name", remedy="pass the bucket's name")
    return f"s3://{bucket}/{key}"


def local_path(url: str) -> str:
    """The absolute path of a path or a file:// URL, without `.`, `..` and doubled slashes.

    Raises:
        UsageError: it is empty, names another host, is not a file URL, or is a URL that lost a
            slash.
    """
    if not url:
        raise UsageError("the path is empty", remedy="pass the checkpoint's directory")
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
    elif not scheme and (lost := _SLASH_LOST.search(url)):
        raise UsageError(
            f"the path contains {lost[1]}/: a URL that lost a slash, as pathlib and os.path cause",
            remedy=f"pass the URL as text, with {lost[1]}//",
            path=url,
        )
    elif scheme:
        raise UsageError(f"{scheme}:// is not a file system", remedy="pass a directory", path=url)
    try:
        return os.path.abspath(url)
    except FileNotFoundError as error:
        raise UsageError(
            "the path is relative, but this process's working directory was removed",
            remedy="pass an absolute path",
            path=url,
        ) from error


def disk_path(url: str | os.PathLike[str]) -> str | None:
    """`local_path` of what is on a file system; None: it is in a store."""
    text = os.fspath(url)
    return local_path(text) if is_local(text) else None


def path_on_disk(url: str | os.PathLike[str], why: str, remedy: str) -> str:
    """`local_path` of what must be on a file system.

    Raises:
        UsageError: it is in a store, with the text `why`.
    """
    if (path := disk_path(url)) is None:
        raise UsageError(why, remedy=remedy, path=os.fspath(url))
    return path


def normal_url(url: str) -> str:
    """The normal spelling of a location: an absolute path, or the URL with a slash at its end."""
    if is_local(url):
        return local_path(url)
    scheme, bucket, parts = _split(url)
    return _unsplit(scheme, bucket, parts)


def bucket_url(url: str) -> str:
    """ "s3://bucket" of a URL; "" of a path."""
    return "" if is_local(url) else "{}://{}".format(*_split(url))


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
        UsageError: no URL is given, or they are in different stores or buckets.
    """
    if not urls:
        raise UsageError("no directory given", remedy="pass at least one")
    parents = [parent_url(url) for url in urls]
    if all(is_local(url) for url in urls):
        return os.path.commonpath(parents)
    if len({_bucket_of(url) for url in urls}) > 1:
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
    """The relative path from `base` to `url`, such as "tp0", "" or "../tp1". `join_url(base, path)`
    gives `url` again.

    Raises:
        UsageError: they are in different stores or buckets, or (in an object store) a part of the
            path is itself named "..".
    """
    whole, start = normal_url(url), normal_url(base)
    if _bucket_of(whole) != _bucket_of(start):
        raise UsageError(
            f"there is no relative path from {base} to here",
            remedy="keep all groups of a step in one store and bucket",
            path=url,
        )
    if is_local(whole):
        relative = os.path.relpath(whole, start)
        return "" if relative == "." else relative
    ups = 0
    while not whole.startswith(start):
        start, ups = parent_url(start), ups + 1
    rest = whole[len(start) :]
    if rest.startswith("../"):
        raise UsageError(
            'a part of the key is named ".."', remedy="choose another prefix", path=url
        )
    # The slash at the end is left out, except after an empty name ("a//").
    rest = rest if rest == "/" or rest.endswith("//") else rest[:-1]
    return "../" * ups + rest if rest or not ups else "../" * (ups - 1) + ".."


def join_url(base: str, rel: str) -> str:
    """The location that the relative path `rel` (from `relative_url`) leads to from `base`.

    Raises:
        UsageError: `rel` is absolute, goes above the parents of `base`, or (on a file system) has
            an empty part, "." or a ".." after a name.
    """
    start, rest = normal_url(base), rel
    while rest == ".." or rest.startswith("../"):
        start, rest = parent_url(start), rest[3:]
    if not rest:
        return start
    if not is_local(start):
        return start + (rest if rest.endswith("/") else rest + "/")
    if {"", ".", ".."} & set(rest.split("/")) or "\0" in rest:
        raise UsageError(
            f"{rel!r} is not a relative path of a directory",
            remedy="pass one without '.', empty parts, or '..' after a name",
            path=start,
        )
    return posixpath.join(start, rest)


def is_plain_name(name: object) -> bool:
    """Whether a name from a file is the name of something directly in a directory: it leads neither
    out of it nor down."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return {"/", "\\", "\0"}.isdisjoint(name)


def is_below(url: str, above: str) -> bool:
    """Whether a location is another one or below it; both in their normal spelling."""
    return url == above or url.startswith(above.rstrip("/") + "/")


def file_url(directory: str, name: str) -> str:
    """The path or URL of a file in a location, for messages, without a slash at its end."""
    start = normal_url(directory)
    return posixpath.join(start, name) if is_local(start) else start + name


def _bucket_of(url: str) -> tuple[str, str]:
    """Store and bucket."""
    return ("", "") if is_local(url) else (scheme_of(url), _split(url)[1])


def _split(url: str) -> tuple[str, str, list[str]]:
    """Scheme, bucket, and the parts of the prefix: ["a", "", "b"] of "s3://bucket/a//b/"."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket and not key.strip("/"):  # hdfs:///run has no host
        written = "JOB/prefix" if scheme.lower() == "keeper" else "bucket/prefix"
        raise UsageError(
            f"the URL names no {written.partition('/')[0]}",
            remedy=f"write {scheme}://{written}", path=url,
        )  # fmt: skip
    if key and not key.endswith("/"):
        key += "/"
    return scheme.lower(), bucket, key.split("/")[:-1]


def _unsplit(scheme: str, bucket: str, parts: Sequence[str]) -> str:
    return f"{scheme}://{bucket}/" + "".join(part + "/" for part in parts)
