"""The objects of one bucket: the requests to S3, and what the answers mean."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from smckpt.errors import StorageError
from smckpt.storage.budget import Share
from smckpt.storage.faults import replaced, too_long
from smckpt.storage.s3.bodies import Body, Filling
from smckpt.storage.s3.config import StoreOptions
from smckpt.storage.s3.faults import BadBody, code_of, is_transient, length_of, status_of
from smckpt.storage.s3.requests import Requests

Result = TypeVar("Result")

_LOOKS = 2  # at an object that seems to be another writer's
_MISSING = ("404", "NoSuchKey", "NotFound")


class Objects(Requests):
    """The objects of `bucket`, with one set of options. Thread-safe.

    Methods that take a `client` are called inside `run`, which retries.
    """

    def __init__(self, config: StoreOptions, bucket: str, share: Share) -> None:
        super().__init__(config, bucket, share)
        self.checksum = Checksum(config.checksum)

    def url(self, key: str) -> str:
        """Of an object, for errors."""
        return f"s3://{self.bucket}/{key}"

    def body(self, data: memoryview) -> Body:
        return Body(data, self.config.timeout_s)

    # -- write -------------------------------------------------------------------------------------

    def put(
        self, key: str, data: memoryview, crc: int | None = None, replace: bool = False
    ) -> bool:
        """PUT the object, unless the key exists and may not be replaced.

        Args:
            crc: the checksum of `data`, of the kind in the options, if the caller has it.
        """
        mark = new_mark()
        fields = self.checksum.field(self.checksum.of(data) if crc is None else crc)
        if not replace:
            fields["IfNoneMatch"] = "*"

        def request(client: Any) -> bool:
            try:
                client.put_object(
                    Bucket=self.bucket,
                    Key=key,
                    Body=self.body(data),
                    ContentLength=len(data),
                    Metadata=mark,
                    **fields,
                )
            except Exception as error:
                if status_of(error) != 412:
                    raise
                ours = self.has_mark(client, key, mark)
                if ours is None:  # it went meanwhile, or the answer does not come from S3
                    raise BadBody("412 for a key that has no object") from error
                return ours
            return True

        return self.run("write", self.url(key), request)

    def has_mark(self, client: Any, key: str, mark: Mapping[str, str]) -> bool | None:
        """Whether the object was made by the request that carried `mark`: an earlier try succeeded,
        but its answer was lost. None: there is no object."""
        with _passing_over(*_MISSING):
            for _ in range(_LOOKS):
                kept: Mapping[str, str] = self.head(client, key).get("Metadata", {})
                if mark.items() <= kept.items():
                    return True
                if all(_unlike(kept.get(name, ""), value) for name, value in mark.items()):
                    return False
            return False
        return None

    def delete(self, key: str) -> Mapping[str, Any]:
        """Delete an object. A missing one is no error. Returns the store's answer."""
        # S3 itself answers 204 if there is no object.
        return self.call("delete", key, "delete_object", "NoSuchKey")

    def delete_many(self, keys: Sequence[str]) -> bool:
        """Delete at most 1,000 objects by one request. Missing ones are no error.

        Returns:
            False if the store refused the request or some of the objects: some stores lack it, and
            `delete` says why an object cannot be deleted.
        """

        def request(client: Any) -> bool:
            from botocore.exceptions import ClientError

            doomed = {"Objects": [{"Key": key} for key in keys]}
            try:
                answer = client.delete_objects(Bucket=self.bucket, Delete=doomed)
            except Exception as error:
                if is_transient(error) or status_of(error) not in (*range(400, 500), 501):
                    raise
                return False
            refused = answer.get("Errors", ())
            left = [one for one in refused if one.get("Code") not in _MISSING]
            for one in left:
                if is_transient(failure := ClientError({"Error": one}, "DeleteObjects")):
                    raise failure  # objects that are already gone are no error in the next try
            # Not "Quiet": a page of a proxy, with status 200, lists nothing as deleted.
            return not left and len(answer.get("Deleted", ())) + len(refused) >= len(keys)

        return self.run(f"delete {len(keys)} objects, first", self.url(keys[0]), request)

    def abort_upload(self, key: str, upload: str) -> None:
        gone = ("NoSuchUpload", "404")
        self.call("abort the upload", key, "abort_multipart_upload", *gone, UploadId=upload)

    def call(
        self, action: str, key: str, method: str, *missing: str, **fields: Any
    ) -> Mapping[str, Any]:
        """One request about an object. Returns the answer, which is empty where the store's error
        has one of the codes `missing`."""

        def request(client: Any) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = {}
            with _passing_over(*missing):
                answer = getattr(client, method)(Bucket=self.bucket, Key=key, **fields)
            return answer

        return self.run(action, self.url(key), request)

    # -- read --------------------------------------------------------------------------------------

    def size(self, key: str, etags: dict[str, str] | None = None) -> int:
        """The size of an object in bytes. etags: see `read_into`."""

        def fact(answer: Mapping[str, Any]) -> int:
            if etags is not None and (tag := answer.get("ETag")):
                etags.setdefault(key, tag)
            return length_of(answer)

        return self._described(key, fact)

    def kept_crc64(self, key: str) -> int | None:
        """See `Storage.stored_crc64`."""
        return self._described(key, kept_crc64)

    def _described(self, key: str, fact: Callable[[Mapping[str, Any]], Result]) -> Result:
        url = self.url(key)
        return self.run("look up the size", url, lambda client: fact(self.head(client, key)))

    def read_into(
        self,
        key: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
        etags: dict[str, str] | None = None,
    ) -> int:
        """Fill `buffers` with bytes of an object from `offset` on, by one ranged GET.

        Args:
            etags: key → the ETag at the first look. An object that has another one is refused.

        Returns:
            How many bytes the object has, as far as is known. If that is too few, the buffers are
            not filled.
        """
        length = sum(len(b) for b in buffers)
        filling = Filling(buffers, self.config.timeout_s, seen)
        size = offset + length

        def request(client: Any) -> int:
            nonlocal size
            start, stop = offset + filling.done, offset + length
            if start == stop:  # only the end of the answer was missing
                return size
            asked = f"bytes={start}-{stop - 1}"
            try:
                answer = client.get_object(Bucket=self.bucket, Key=key, Range=asked)
            except Exception as error:
                if status_of(error) != 416:
                    raise
                if length_of(self.head(client, key)) > start:
                    raise BadBody("416 for a range that the object has") from error
                return start
            begins, size = _range_of(answer)
            tag = answer.get("ETag")  # a store may have none
            if etags is not None and tag and etags.setdefault(key, tag) != tag:
                answer["Body"].close()
                if self.head(client, key).get("ETag") == etags[key]:
                    raise BadBody("the answer has another ETag than the object")
                raise replaced(self.url(key))
            if begins == start and length_of(answer) == stop - start:
                filling.take(answer["Body"])
                return size
            answer["Body"].close()
            if begins == start and size < stop:
                return size
            raise BadBody("the answer is not the requested range")

        return self.run("read", self.url(key), request)

    def read(self, key: str, most: int | None = None) -> bytes:
        """Read a whole object of at most `most` bytes. botocore compares it with the checksum that
        the store keeps, because ChecksumMode asks for that."""

        def request(client: Any) -> bytes:
            answer = client.get_object(Bucket=self.bucket, Key=key, ChecksumMode="ENABLED")
            size = length_of(answer)
            if most is not None and size > most:
                answer["Body"].close()
                raise too_long(key.rpartition("/")[2], size, most, self.url(key))
            try:
                data = memoryview(bytearray(size))
            except MemoryError as error:
                raise BadBody(
                    f"the answer states {size:,} bytes, for which no memory is"
                ) from error
            Filling([data], self.config.timeout_s).take(answer["Body"])
            return bytes(data)

        return self.run("read", self.url(key), request)

    def head(self, client: Any, key: str) -> Mapping[str, Any]:
        """What the store says about an object, or the client's error if there is none."""
        try:
            answer: Mapping[str, Any] = client.head_object(
                Bucket=self.bucket, Key=key, ChecksumMode="ENABLED"
            )
        except Exception as error:
            if code_of(error) in _MISSING:
                self._refuse_missing_bucket(client)
            raise
        return answer

    def _refuse_missing_bucket(self, client: Any) -> None:
        """Raise if the whole bucket is missing. The answer to HEAD has no body that says so."""
        try:
            client.head_bucket(Bucket=self.bucket)
        except Exception as error:
            if status_of(error) == 404:
                missing = {"Error": {"Code": "NoSuchBucket"}}
                raise type(error)(missing, "HeadBucket") from error
            if status_of(error) != 403:  # 403: we may not look at the bucket
                raise

    # -- list --------------------------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[dict[str, Any]]:
        """The pages of a listing: keys that begin with `prefix`, up to the next slash."""
        tokens = {"NextContinuationToken": "ContinuationToken"}
        yield from self._pages("list", "list_objects_v2", prefix, tokens)

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """(key, upload id) of each unfinished upload whose key begins with `prefix` and has no
        further slash."""
        # A compatible store may return only one of the two tokens.
        tokens = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
        for page in self._pages("list the uploads", "list_multipart_uploads", prefix, tokens):
            for each in page.get("Uploads", ()):
                key = each["Key"]  # a store may ignore the prefix, or the delimiter
                if key.startswith(prefix) and "/" not in key[len(prefix) :]:
                    yield key, each["UploadId"]
            if not page.get("IsTruncated"):  # S3 names its last upload as the next marker then, too
                return

    def _pages(
        self, action: str, method: str, prefix: str, tokens: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """The pages of a listing.

        Raises:
            StorageError: a page says that the next one begins where it does itself.
        """
        fields = {"Bucket": self.bucket, "Prefix": prefix, "Delimiter": "/"}
        after: dict[str, str] = {}
        while True:
            before = after

            def request(client: Any, before: dict[str, str] = before) -> dict[str, Any]:
                page: dict[str, Any] = getattr(client, method)(**fields, **before)
                return page

            page = self.run(action, self.url(prefix), request)
            yield page
            after = {mine: page[theirs] for theirs, mine in tokens.items() if page.get(theirs)}
            if not after:  # a page that names a next one is not the last, whatever it says
                return
            if after == before:
                raise StorageError(
                    f"cannot {action}: a page of the store's answer names itself as the next one",
                    remedy="check the store and the proxies between here and the store",
                    path=self.url(prefix),
                )


def _range_of(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Where the body of a GET's answer begins in the object, and how many bytes the whole object
    has."""
    length = length_of(answer)
    header = str(answer.get("ContentRange", ""))  # "bytes 5-9/100"
    if not header:  # the whole object
        return 0, length
    span, _, whole = header.removeprefix("bytes ").partition("/")
    first, _, last = span.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        raise BadBody(f"the answer has the range {header!r}")
    size = int(whole) if whole.isdecimal() else int(first) + length
    if int(last) - int(first) + 1 != length or int(last) >= size:
        raise BadBody(f"the answer has {length} bytes and the range {header!r}")
    return int(first), size


def _unlike(one: str, other: str) -> bool:
    """Whether these are two marks. Otherwise one of them may be the other, changed on its way."""
    same = sum(a == b for a, b in zip(one, other, strict=False))
    return len(one) == len(other) and same < len(other) // 2


def new_mark() -> dict[str, str]:
    """Metadata that tells an object of one call from those of all others."""
    return {"smckpt-upload": secrets.token_hex(8)}


@contextmanager
def _passing_over(*codes: str) -> Iterator[None]:
    """Errors of the store with these codes are passed over."""
    try:
        yield
    except Exception as error:
        if code_of(error) not in codes:
            raise


_KINDS = {"crc64nvme": ("CRC64NVME", 8), "crc32": ("CRC32", 4)}  # S3's name, bytes


class Checksum:
    """One kind of checksum, "crc64nvme", "crc32" or "none": computes values and makes the fields of
    requests."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.algorithm, self._width = _KINDS.get(kind, ("", 0))

    def __bool__(self) -> bool:
        return bool(self.algorithm)

    def of(self, data: memoryview | bytes) -> int:
        from awscrt import checksums

        return int(getattr(checksums, self.kind)(data)) if self else 0

    def combine(self, first: int, second: int, second_length: int) -> int:
        """Combine the values of two consecutive parts."""
        from awscrt import checksums

        join = getattr(checksums, f"combine_{self.kind}", None)
        return int(join(first, second, second_length)) if join else 0

    def field(self, value: int) -> dict[str, Any]:
        """The field for a request, such as {"ChecksumCRC64NVME": …}; empty for "none"."""
        text = base64.b64encode(value.to_bytes(self._width, "big")).decode() if self else ""
        return {f"Checksum{self.algorithm}": text} if self else {}


def kept_crc64(answer: Mapping[str, Any]) -> int | None:
    """The CRC-64/NVME that the store keeps for a whole object; None if it keeps none."""
    whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    found = answer.get("ChecksumCRC64NVME") if whole else None
    if found is None:
        return None
    try:
        return int.from_bytes(base64.b64decode(found, validate=True), "big")
    except ValueError as error:
        raise BadBody(f"the answer has the checksum {found!r}") from error
