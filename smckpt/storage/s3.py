"""A prefix of an S3 bucket, or of a compatible store with conditional writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

from smckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UsageError
from smckpt.storage.base import FileInfo, Storage
from smckpt.storage.budget import Share, part_size
from smckpt.storage.s3_checksums import Checksum
from smckpt.storage.s3_client import Requests
from smckpt.storage.s3_config import S3Config
from smckpt.storage.s3_faults import BadBody, code_of, length_of, status_of
from smckpt.storage.s3_pace import current_share
from smckpt.storage.s3_preflight import try_out
from smckpt.storage.s3_read import Filling, fill, split
from smckpt.storage.s3_transfer import TooLongError, receive_file, send_file
from smckpt.storage.s3_write import Body, PublicBody, S3Writer
from smckpt.storage.urls import join_url, normal_url, parse_s3_url

__all__ = ["S3Storage"]

Result = TypeVar("Result")

_MAX_KEY = 1024  # bytes
_REREADS = 2
_READ = 64 << 20  # bytes of one ranged GET at most: each costs milliseconds of the client


class S3Storage:
    """The prefix `url`. Thread-safe; implements `Storage`. Keys are kept byte for byte.

    share: of the bucket's budget; None for the one in force where it is opened.
    """

    def __init__(self, url: str, config: S3Config, share: Share | None = None) -> None:
        self.url = normal_url(url)
        self.bucket, self._prefix = parse_s3_url(self.url)
        self.config = config
        self._share = share or current_share()
        self._requests = Requests(config, self.bucket, self._share)
        self._lock = threading.Lock()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @property
    def write_threads(self) -> int:
        return self.config.max_write_concurrency

    @property
    def request_bytes(self) -> int:
        return _READ

    @property
    def rereads(self) -> int:
        return _REREADS

    def create_file(self, name: str, size: int, *, replace: bool = False) -> S3Writer:
        if size < 0:
            raise UsageError(f"a file of {size} bytes", remedy="pass a size >= 0", path=self.url)
        if part_size(size, self.config.part_bytes) > 5 << 30:
            raise UsageError(
                f"an object of {size} bytes", remedy="S3 takes 48.8 TiB at most", path=self.url
            )
        return S3Writer(self, name, size, replace)

    def put(self, name: str, data: bytes) -> None:
        if not self.put_exclusive(name, data):
            raise StorageError(
                "cannot write: the name exists already",
                remedy="names are unique to an attempt: do two jobs write here with one session?",
                path=self.path(name),
            )

    def put_exclusive(self, name: str, data: bytes) -> bool:
        return self.put_object(self.key(name), self.path(name), memoryview(data), None)

    def try_out(self, name: str) -> str:
        return try_out(self, name) if self.config.preflight else ""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if length is None:
            if offset == 0:
                return self._read_whole(name)
            length = max(self.size(name) - offset, 0)
        data = bytearray(length)
        self.read_into(name, offset, [memoryview(data)])
        return bytes(data)

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
        elif len(requests) == 1:
            self._get(name, *requests[0], seen)
        else:
            self._get_all(name, requests)
            if seen is not None:  # in order: not before all is there
                for buffer in wanted:
                    seen(buffer)

    def fetch(self, name: str, target: memoryview) -> None:
        key, path = self.key(name), self.path(name)
        try:
            have = self.run("read", path, lambda c: receive_file(c, self.common, key, target))
        except TooLongError as error:
            raise CorruptCheckpointError(
                f"{name} does not end at byte {len(target)}",
                remedy="something was added to the file after it was written: use an older "
                "checkpoint",
                path=path,
            ) from error
        if have != len(target):
            raise _too_short(name, have, len(target), path)

    def size(self, name: str) -> int:
        return length_of(self._look_up(name))

    def stored_crc64(self, name: str) -> int | None:
        return Checksum("crc64nvme").stored_value(self._look_up(name))

    def _look_up(self, name: str) -> dict[str, Any]:
        key, path = self.key(name), self.path(name)
        head = self.run("look up the size", path, lambda client: self.head(client, key))
        if head is None:
            raise CheckpointNotFoundError(
                "cannot look up the size: there is no such object",
                remedy="look at the URL; `smckpt ls` on its parent shows what is there",
                path=path,
            )
        return head

    def list_unfinished(self) -> list[str]:
        return sorted({key[len(self._prefix) :] for key, _ in self._uploads()})

    def discard_unfinished(self, names: Collection[str]) -> None:
        doomed = {self.key(name): self.path(name) for name in names}
        for key, upload in tuple(self._uploads()) if doomed else ():
            if key in doomed:
                self.abort_upload(key, upload, doomed[key])

    def list_dirs(self) -> list[str]:
        found = {
            each["Prefix"][len(self._prefix) : -1] or "/"  # of "a//": the way there from "a/"
            for page in self._pages("")
            for each in page.get("CommonPrefixes", ())
            if each["Prefix"].startswith(self._prefix)  # a store may take "a//" for "a/"
        }
        return sorted(found - {".."})  # others made that one: no way leads there

    def list(self, prefix: str = "") -> list[FileInfo]:
        infos = [
            FileInfo(each["Key"][len(self._prefix) :], int(each["Size"]))
            for page in self._pages(prefix)
            for each in page.get("Contents", ())
            if each["Key"] != self._prefix  # the empty object that consoles make for a "folder"
        ]
        return sorted(infos, key=lambda info: info.name)

    def delete(self, name: str) -> None:
        self.delete_key(self.key(name), self.path(name))

    def remove_directory(self) -> None:
        """There are none."""

    def join(self, name: str) -> Storage:
        if name == ".." or name.startswith("../"):
            raise UsageError(
                f"{name!r} leads out of the directory", remedy="use join_url", path=self.url
            )
        return S3Storage(join_url(self.url, name), self.config, self._share)

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and pool[0] == os.getpid():
            pool[1].shutdown(wait=False)

    # -- for the writer ------------------------------------------------------------------------

    @property
    def common(self) -> dict[str, Any]:
        """Fields of every request."""
        payer = {"RequestPayer": "requester"} if self.config.requester_pays else {}
        return {"Bucket": self.bucket, **payer}

    def new_object_fields(self) -> dict[str, Any]:
        """Fields of the request that makes an object."""
        fields = self.common
        if self.config.sse_kms_key:
            fields |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.config.sse_kms_key}
        if self.config.storage_class:
            fields["StorageClass"] = self.config.storage_class
        if self.config.tags:
            fields["Tagging"] = urlencode(self.config.tags)
        return fields

    def key(self, name: str) -> str:
        # Names come from manifests too, which anyone may have written: none leads elsewhere.
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise UsageError(
                f"{name!r} is no file name", remedy="pass a name without directory", path=self.url
            )
        key = self._prefix + name
        if len(key.encode()) > _MAX_KEY:
            raise UsageError(
                f"the key of {name} has {len(key.encode()):,} bytes, and S3 takes {_MAX_KEY:,}",
                remedy="choose a shorter prefix",
                path=self.url,
            )
        return key

    def path(self, name: str) -> str:
        return self.url + name

    def run(self, action: str, path: str, request: Callable[[Any], Result]) -> Result:
        return self._requests.run(action, path, request)

    def body(self, data: memoryview) -> Body:
        """Of a request that sends `data`."""
        kind = Body if self._requests.direct else PublicBody
        return kind(data, self.config.timeout_s)

    def put_file(self, key: str, path: str, data: memoryview, crc: int | None) -> None:
        """PUT a whole file, in the place of what has the name."""
        fields = {**self.new_object_fields(), **self._checksum_field(data, crc)}
        self.run("write", path, lambda client: send_file(client, fields, key, data))

    def put_object(self, key: str, path: str, data: memoryview, crc: int | None) -> bool:
        """PUT unless the key exists. True too where it exists with these very bytes: an earlier
        try made it, whose answer was lost."""
        checksum = self._checksum_field(data, crc)

        def request(client: Any) -> bool:
            try:
                client.put_object(
                    **self.new_object_fields(),
                    Key=key,
                    Body=self.body(data),
                    ContentLength=len(data),
                    IfNoneMatch="*",
                    **checksum,
                )
            except Exception as error:
                if status_of(error) != 412:
                    raise
                return self._holds_these(client, key, data)
            return True

        return self.run("write", path, request)

    def head(self, client: Any, key: str) -> dict[str, Any] | None:
        """What the store says about an object; None if there is none."""
        try:
            answer: dict[str, Any] = client.head_object(
                **self.common, Key=key, ChecksumMode="ENABLED"
            )
        except Exception as error:
            if code_of(error) not in ("404", "NoSuchKey", "NotFound"):
                raise
            self._refuse_missing_bucket(client)
            return None
        return answer

    def delete_key(self, key: str, path: str) -> None:
        def request(client: Any) -> None:
            try:
                client.delete_object(**self.common, Key=key)
            except Exception as error:  # S3 answers 204 to this too, others do not
                if code_of(error) != "NoSuchKey":
                    raise

        self.run("delete", path, request)

    def abort_upload(self, key: str, upload: str, path: str) -> None:
        def request(client: Any) -> None:
            try:
                client.abort_multipart_upload(**self.common, Key=key, UploadId=upload)
            except Exception as error:
                if code_of(error) not in ("NoSuchUpload", "404"):
                    raise

        self.run("abort the upload", path, request)

    # -- inside --------------------------------------------------------------------------------

    def _checksum_field(self, data: memoryview, crc: int | None) -> dict[str, str]:
        checksum = Checksum(self.config.checksum)
        return checksum.field(checksum.of(data) if crc is None else crc)

    def _refuse_missing_bucket(self, client: Any) -> None:
        """HEAD has no body to say that the bucket is what is missing."""
        try:
            client.head_bucket(Bucket=self.bucket)
        except Exception as error:
            if status_of(error) == 404:
                missing = {"Error": {"Code": "NoSuchBucket"}}
                raise type(error)(missing, "HeadBucket") from error
            if status_of(error) != 403:  # who may not look at the bucket is not told
                raise

    def _holds_these(self, client: Any, key: str, data: memoryview) -> bool:
        head = self.head(client, key)
        if head is None or length_of(head) != len(data):
            return False
        checksum = Checksum(self.config.checksum)
        if checksum and (kept := checksum.stored(head)) is not None:
            return kept == checksum.text(checksum.of(data))
        body = client.get_object(**self.common, Key=key)["Body"]
        there = memoryview(bytearray(len(data)))
        fill(body, [there], self.config.timeout_s, directly=self._requests.direct)
        return there == data

    def _read_whole(self, name: str) -> bytes:
        key = self.key(name)

        def request(client: Any) -> bytes:
            answer = client.get_object(**self.common, Key=key, ChecksumMode="ENABLED")
            data = bytearray(length_of(answer))
            seconds = self.config.timeout_s
            fill(answer["Body"], [memoryview(data)], seconds, directly=self._requests.direct)
            self._refuse_changed(answer, data)
            return bytes(data)

        return self.run("read", self.path(name), request)

    def _refuse_changed(self, answer: dict[str, Any], data: bytearray) -> None:
        """A whole object's body, against the checksum that the store keeps of it."""
        checksum = Checksum(self.config.checksum)
        kept = checksum.stored(answer) if checksum else None
        if kept is not None and kept != checksum.text(checksum.of(memoryview(data))):
            raise BadBody("the answer's body is not what the store keeps (checksum differs)")

    def _get(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        key = self.key(name)
        length = sum(len(b) for b in buffers)
        filling = Filling(buffers, self.config.timeout_s, seen)

        def request(client: Any) -> int:
            """The bytes that the object has from `offset`, up to `length`."""
            done = filling.done
            if done == length:  # what broke off was the end of the answer before
                return length
            wanted = f"bytes {offset + done}-"
            asked = wanted.replace(" ", "=") + str(offset + length - 1)
            try:
                answer = client.get_object(**self.common, Key=key, Range=asked)
            except Exception as error:
                if status_of(error) == 416:
                    return done
                raise
            # Of an answer that is the whole object nobody says where it begins.
            if not answer.get("ContentRange", "bytes 0-").startswith(wanted):
                answer["Body"].close()
                raise BadBody("the answer is not the range that was asked for")
            if length_of(answer) != length - done:
                answer["Body"].close()
                return done + length_of(answer)
            filling.take(answer["Body"], directly=self._requests.direct)
            return length

        have = self.run("read", self.path(name), request)
        if have != length:
            raise _too_short(name, self.size(name), offset + length, self.path(name))

    def _get_all(self, name: str, requests: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """All of them at once. When it is over, well or not, none writes into memory any more:
        the caller may put something else there."""
        gets = [self._readers().submit(self._get, name, *request) for request in requests]
        try:
            wait(gets, return_when=FIRST_EXCEPTION)
        finally:
            for get in gets:
                get.cancel()
            wait(gets)
        for get in gets:
            if not get.cancelled():
                get.result()

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            fields = {"Prefix": self._prefix + prefix, "Delimiter": "/", **more, **self.common}
            page = self.run("list", self.url, partial(_list, fields))
            yield page
            if not page.get("IsTruncated"):
                return
            before, more = more, {"ContinuationToken": page.get("NextContinuationToken", "")}
            if more in (before, {"ContinuationToken": ""}):
                raise StorageError(
                    "cannot list: the store says that there is more, and not where",
                    remedy="look at the store, and at proxies between here and there",
                    path=self.url,
                )

    def _uploads(self) -> Iterator[tuple[str, str]]:
        """(key, id) of the unfinished uploads of keys directly here."""
        more: dict[str, str] = {}
        while True:
            fields = {"Prefix": self._prefix, "Delimiter": "/", **more, **self.common}
            page = self.run("list the uploads", self.url, partial(_list_uploads, fields))
            for each in page.get("Uploads", ()):
                if "/" not in each["Key"][len(self._prefix) :]:  # a store may know no delimiter
                    yield each["Key"], each["UploadId"]
            before, more = (
                more,
                {
                    marker: page[f"Next{marker}"]  # a compatible store may give but one of them
                    for marker in ("KeyMarker", "UploadIdMarker")
                    if page.get(f"Next{marker}")
                },
            )
            if not page.get("IsTruncated") or more == before:
                return

    def _readers(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pool[0] != os.getpid():  # threads do not survive a fork
                pool = ThreadPoolExecutor(self.config.max_read_concurrency, "smckpt-s3")
                self._pool = (os.getpid(), pool)
            return self._pool[1]


def _too_short(name: str, size: int, needed: int, path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name} ends at byte {size}; {needed} were needed",
        remedy="the file was cut after it was written: use an older checkpoint",
        path=path,
    )


def _list(fields: dict[str, Any], client: Any) -> dict[str, Any]:
    page: dict[str, Any] = client.list_objects_v2(**fields)
    return page


def _list_uploads(fields: dict[str, Any], client: Any) -> dict[str, Any]:
    page: dict[str, Any] = client.list_multipart_uploads(**fields)
    return page
