"""A prefix of an S3 bucket, or of a compatible store with conditional writes; and how a new object
is uploaded: its parts go from the caller's memory to the socket without a copy."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from smckpt.errors import CorruptCheckpointError, StorageError, UsageError
from smckpt.storage.base import Access, FileInfo, FileWriter, Storage
from smckpt.storage.budget import Share, part_size
from smckpt.storage.faults import (
    name_taken,
    refuse_incomplete,
    refuse_outside,
    refuse_size,
    too_short,
)
from smckpt.storage.preflight import try_out
from smckpt.storage.s3.bodies import split
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.faults import code_of, status_of
from smckpt.storage.s3.objects import Objects, new_mark
from smckpt.storage.urls import parse_s3_url

_PAGES = 100  # of a list of parts; S3 puts 1,000 of at most 10,000 on each


class S3Writer(FileWriter):
    """One new object. A file of one part is one PUT.

    A write of whole parts is sent without a copy, in the calling thread. Smaller writes are
    gathered, which takes one part's memory for each part begun.
    """

    def __init__(self, objects: Objects, key: str, size: int, replace: bool) -> None:
        self._objects = objects
        self._key = key
        self._path = objects.url(key)
        self._size = size
        self._replace = replace
        self._sum = objects.checksum
        self.piece = part_size(size, objects.config.part_bytes)
        self._lock = threading.Lock()
        self._gathered: dict[int, tuple[memoryview, int]] = {}  # number → part, bytes missing
        self._parts: dict[int, tuple[str, int, int]] = {}  # number → ETag, checksum, length
        self._upload = ""
        self._mark = new_mark()
        self._done = False
        self._single = size <= self.piece
        if not self._single:
            fields: dict[str, Any] = {"Metadata": self._mark}
            if self._sum:
                fields |= {"ChecksumAlgorithm": self._sum.algorithm, "ChecksumType": "FULL_OBJECT"}
            answer = objects.call("begin an upload", key, "create_multipart_upload", **fields)
            self._upload = str(answer["UploadId"])

    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        data = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        refuse_outside(offset, data.nbytes, self._size, self._path)
        at = 0
        while at < len(data):
            number, inside = divmod(offset + at, self.piece)
            length = min(self.piece, self._size - number * self.piece)
            take = min(length - inside, len(data) - at)
            piece = data[at : at + take]
            if take == length:
                self._send(number, piece, crc64 if take == len(data) else None)
            else:
                self._gather(number, length, inside, piece)
            at += take

    def finish(self) -> None:
        if self._size == 0:
            self._put(memoryview(b""), None)
        written = sum(length for _, _, length in self._parts.values())
        refuse_incomplete(written, self._size, self._path)
        if not self._single:
            self._objects.run("complete the upload", self._path, self._complete)
        self._done = True

    def abort(self) -> None:
        self._gathered.clear()
        upload, self._upload = self._upload, ""
        if upload and not self._done:
            self._objects.abort_upload(self._key, upload)
        elif (self._done or self._parts) and not self._replace:  # it may be another writer's
            self._objects.delete(self._key)

    def _gather(self, number: int, length: int, inside: int, piece: memoryview) -> None:
        """Copy a piece of a part, because the caller may reuse its memory. The last piece sends the
        part."""
        with self._lock:
            data, missing = self._gathered.get(number) or (memoryview(bytearray(length)), length)
            data[inside : inside + len(piece)] = piece
            missing -= len(piece)
            self._gathered[number] = data, missing
            if not missing:
                del self._gathered[number]
        if not missing:
            self._send(number, data, None)

    def _send(self, number: int, data: memoryview, crc64: int | None) -> None:
        known = crc64 if crc64 is not None and self._sum.kind == "crc64nvme" else None
        value = self._sum.of(data) if known is None else known
        if self._single:
            etag = self._put(data, value)
        else:
            etag = self._objects.run(
                f"write part {number + 1}",
                self._path,
                lambda client: self._upload_part(client, number, data, value),
            )
        with self._lock:
            self._parts[number] = (etag, value, len(data))

    def _put(self, data: memoryview, value: int | None) -> str:
        if not self._objects.put(self._key, data, value, self._replace):
            raise name_taken(self._path)
        return ""

    def _upload_part(self, client: Any, number: int, data: memoryview, value: int) -> str:
        answer = client.upload_part(
            Bucket=self._objects.bucket,
            Key=self._key,
            UploadId=self._upload,
            PartNumber=number + 1,
            Body=self._objects.body(data),
            ContentLength=len(data),
            **self._sum.field(value),
        )
        return str(answer["ETag"])

    def _complete(self, client: Any, again: bool = True) -> None:
        parts, whole = [], 0
        for number in sorted(self._parts):
            etag, value, length = self._parts[number]
            parts.append({"ETag": etag, "PartNumber": number + 1, **self._sum.field(value)})
            whole = self._sum.combine(whole, value, length)
        fields: dict[str, Any] = {}
        if self._sum:
            fields = {"ChecksumType": "FULL_OBJECT", **self._sum.field(whole)}
        if not self._replace:
            fields["IfNoneMatch"] = "*"
        try:
            client.complete_multipart_upload(
                Bucket=self._objects.bucket,
                Key=self._key,
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
                **fields,
            )
        except Exception as error:
            if again and code_of(error) == "InvalidPart" and self._looked_up(client):
                return self._complete(client, again=False)
            # An earlier try may have succeeded although its answer was lost.
            if code_of(error) not in ("PreconditionFailed", "NoSuchUpload", "412", "404"):
                raise
            if not self._objects.has_mark(client, self._key, self._mark):
                if status_of(error) == 412:
                    raise name_taken(self._path) from error
                raise

    def _looked_up(self, client: Any) -> bool:
        """Take the parts' ETags from the store's list, because one may have been changed on its way
        here. Returns whether any differs. A part counts by its length, and by its checksum if the
        store lists it."""
        found: dict[int, Any] = {}
        for _ in range(_PAGES):
            page = client.list_parts(
                Bucket=self._objects.bucket, Key=self._key, UploadId=self._upload,
                PartNumberMarker=max(found, default=0),
            )  # fmt: skip
            more = {each["PartNumber"]: each for each in page.get("Parts", ())}
            if not more.keys() - found.keys():
                break
            found |= more
        wrong = {}
        for number, (etag, value, length) in self._parts.items():
            there = found.get(number + 1, {})
            ours = {"Size": length, **self._sum.field(value)}
            same = all(there.get(field, ours[field]) == ours[field] for field in ours)
            if same and there.get("ETag", etag) != etag:
                wrong[number] = str(there["ETag"]), value, length
        self._parts |= wrong
        return bool(wrong)


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
