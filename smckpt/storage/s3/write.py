"""Upload one new object. Parts go from the caller's memory to the socket without a copy."""

from __future__ import annotations

import threading
from typing import Any

from smckpt.storage.base import FileWriter
from smckpt.storage.budget import part_size
from smckpt.storage.faults import name_taken, refuse_incomplete, refuse_outside
from smckpt.storage.s3.faults import code_of, status_of
from smckpt.storage.s3.objects import Objects, new_mark

__all__ = ["S3Writer"]

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
