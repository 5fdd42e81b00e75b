"""A prefix of an S3 bucket, or of a compatible store with conditional writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from smckpt.errors import CorruptCheckpointError, StorageError, UsageError
from smckpt.storage.base import Access, FileInfo, Storage
from smckpt.storage.budget import Share, part_size
from smckpt.storage.faults import refuse_size, too_short
from smckpt.storage.preflight import try_out
from smckpt.storage.s3.bodies import split
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.objects import Objects
from smckpt.storage.s3.write import S3Writer
from smckpt.storage.urls import parse_s3_url

__all__ = ["S3Storage", "open_s3"]

Result = TypeVar("Result")

_MAX_KEY = 1024  # bytes
_LONGEST_NAME = "x" * 64  # our names are not longer
_MAX_PART = 5 << 30  # bytes
_BATCH = 1000  # objects that S3 deletes by one request
_READ = 64 << 20  # bytes; the largest ranged GET. Each GET costs milliseconds of the client


def open_s3(url: str, access: Access) -> S3Storage:
    """Open the prefix `url` with the options of the access, or with those of the environment."""
    given = access.options.get("s3")
    config = StoreOptions.from_environment() if given is None else StoreOptions.from_mapping(given)
    return S3Storage(url, config, access.share)


class S3Storage(Storage):
    """The prefix `url`. Thread-safe. Keys are kept byte for byte.

    share: this process's part of the bucket's budget; None: all of it.
    """

    read_once = True
    request_bytes = _READ
    rereads = 2
    shards_prefixes = True

    def __init__(self, url: str, config: StoreOptions, share: Share | None = None) -> None:
        super().__init__(url, Access({"s3": config.to_json()}, share or Share()))
        self.bucket, self._prefix = parse_s3_url(self.url)
        self.config = config
        self.write_threads = config.max_write_concurrency
        self.read_threads = config.max_read_concurrency
        self.prefixes, self.prefix_root = config.prefixes, config.prefix_root
        self._objects = Objects(config, self.bucket, self.access.share)
        self._etags: dict[str, str] | None = None  # key → of the version that is read

    @property
    def retries(self) -> int:
        return self._objects.sent_again

    def run(self, action: str, path: str, request: Callable[[Any], Result]) -> Result:
        """Call `request(client)` with boto3's client, and again while its failures are
        temporary."""
        return self._objects.run(action, path, request)

    # -- write -------------------------------------------------------------------------------------

    def create_file(self, name: str, size: int, *, replace: bool = False) -> S3Writer:
        refuse_size(size, self.url)
        if part_size(size, self.config.part_bytes) > _MAX_PART:
            raise UsageError(
                f"an object of {size} bytes", remedy="S3 takes 48.8 TiB at most", path=self.url
            )
        return S3Writer(self._objects, self._key(name), size, replace)

    def put_exclusive(self, name: str, data: bytes) -> bool:
        return self._objects.put(self._key(name), memoryview(data))

    def delete(self, name: str) -> None:
        self._objects.delete(self._key(name))

    def delete_many(self, names: Collection[str]) -> None:
        left = list(names)
        while left:
            batch, left = left[:_BATCH], left[_BATCH:]
            if len(batch) == 1 or not self._objects.delete_many([*map(self._key, batch)]):
                super().delete_many(batch)

    def list_unfinished(self) -> list[str]:
        uploads = self._objects.uploads(self._prefix)
        return sorted({key[len(self._prefix) :] for key, _ in uploads})

    def discard_unfinished(self, names: Collection[str]) -> None:
        doomed = {self._key(name) for name in names}
        uploads = self._objects.uploads(self._prefix) if doomed else ()
        for key, upload in tuple(uploads):
            if key in doomed:
                self._objects.abort_upload(key, upload)

    def try_out(self, name: str) -> str:
        if not self.config.preflight:
            return ""
        self._key(_LONGEST_NAME)
        return try_out(self, name, self._delete_tried)

    def _delete_tried(self, name: str) -> str:
        try:
            answer = self._objects.delete(self._key(name))
        except StorageError as error:
            raise StorageError(
                f"objects can be written here but not deleted ({error.message}), so failed saves "
                "and old checkpoints could not be removed",
                remedy="allow s3:DeleteObject, and choose a bucket whose object lock retains "
                "nothing by default; if you want to keep everything, set SMCKPT_S3_PREFLIGHT=0 "
                "and SaveOptions(sweep=False)",
                path=error.path,
            ) from error
        if not (answer.get("DeleteMarker") or answer.get("VersionId")):
            return ""
        return (
            f"{self.url}: the bucket keeps versions, so deleted checkpoints still cost storage; "
            "give it a lifecycle rule (NoncurrentVersionExpiration)"
        )

    # -- read --------------------------------------------------------------------------------------

    def read(
        self, name: str, offset: int = 0, length: int | None = None, *, most: int | None = None
    ) -> bytes:
        if length is None and offset == 0:
            return self._objects.read(self._key(name), most)
        return super().read(name, offset, length, most=most)

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        wanted = [b if b.format == "B" and b.ndim == 1 else b.cast("B") for b in buffers]
        requests = split(wanted, offset, _READ)
        if not requests:
            self.size(name)
        key = self._key(name)
        for start, pieces in requests:
            stop = start + sum(len(piece) for piece in pieces)
            if self._objects.read_into(key, start, pieces, seen, self._etags) < stop:
                raise too_short(name, self.size(name), stop, self._objects.url(key))

    def fetch(self, name: str, target: memoryview) -> None:
        key = self._key(name)
        path = self._objects.url(key)
        size = self._objects.read_into(key, 0, [target]) if target else self.size(name)
        if size < len(target):
            raise too_short(name, size, len(target), path)
        if size > len(target):
            raise CorruptCheckpointError(
                f"{name} is longer than {len(target)} bytes",
                remedy="the file grew after it was written: use an older checkpoint",
                path=path,
            )

    def size(self, name: str) -> int:
        return self._objects.size(self._key(name), self._etags)

    def of_one_version(self) -> S3Storage:
        store = copy.copy(self)
        store._etags = {}
        return store

    def stored_crc64(self, name: str) -> int | None:
        return self._objects.kept_crc64(self._key(name))

    # -- names -------------------------------------------------------------------------------------

    def list_dirs(self) -> list[str]:
        found = {
            each["Prefix"][len(self._prefix) : -1] or "/"  # "a//" is "/" from "a/"
            for page in self._objects.list(self._prefix)
            for each in page.get("CommonPrefixes", ())
            if each["Prefix"].startswith(self._prefix)  # a store may take "a//" for "a/"
        }
        return sorted(found - {".."})  # no URL of ours leads to ".."

    def list(self, prefix: str = "") -> list[FileInfo]:
        infos = [
            FileInfo(each["Key"][len(self._prefix) :], int(each["Size"]))
            for page in self._objects.list(self._prefix + prefix)
            for each in page.get("Contents", ())
            # neither the empty object that consoles make for a "folder", nor what is in a folder,
            # which a store that ignores the delimiter lists too
            if each["Key"] != self._prefix and "/" not in each["Key"][len(self._prefix) :]
        ]
        return sorted(infos, key=lambda info: info.name)

    def _key(self, name: str) -> str:
        self.refuse_name(name)
        key = self._prefix + name
        if len(key.encode()) > _MAX_KEY:
            raise UsageError(
                f"the key of {name} has {len(key.encode()):,} bytes, but S3 takes at most "
                f"{_MAX_KEY:,}",
                remedy="choose a shorter prefix",
                path=self.url,
            )
        return key
