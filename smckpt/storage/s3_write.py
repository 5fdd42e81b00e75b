"""Uploading one new object: parts go from the caller's memory to the socket without a copy."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from smckpt.errors import StorageError, UsageError
from smckpt.storage.budget import part_size
from smckpt.storage.s3_checksums import Checksum
from smckpt.storage.s3_faults import BadBody, code_of, length_of, status_of
from smckpt.storage.s3_transfer import Cursor

if TYPE_CHECKING:
    from smckpt.storage.s3 import S3Storage

__all__ = ["Body", "PublicBody", "S3Writer"]

_TOKEN = "smckpt-upload"  # the name of an object's metadata that says whose upload it was
_SEND = 2 << 20  # bytes handed to the socket at once: it takes them within its timeout


class Body(Cursor):
    """A request's body over memory: `read` gives slices, longer than it is asked for, and
    `readinto`, which is how a body is signed, copies.

    seconds: after its first byte was asked for, there are no more.
    """

    def __init__(self, data: memoryview, seconds: float) -> None:
        super().__init__(data)
        self._seconds = seconds
        self._ends: float | None = None

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int | None = -1) -> memoryview | bytes:
        self._refuse_late()
        # Clients ask for a few KiB at a time: a longer answer reaches `sendall` as it is.
        piece = self._data[self._at : self._at + max(_SEND, size or 0)]
        self._at += len(piece)
        return piece if len(piece) else b""

    def _refuse_late(self) -> None:
        if self._ends is None:
            self._ends = time.monotonic() + self._seconds
        if time.monotonic() > self._ends:
            raise BadBody(f"the body had not been sent after {self._seconds:g} s")


class PublicBody(Body):
    """The same as files do it: no more than was asked for, and copied."""

    def read(self, size: int | None = -1) -> bytes:
        self._refuse_late()
        stop = None if size is None or size < 0 else self._at + size
        piece = bytes(self._data[self._at : stop])
        self._at += len(piece)
        return piece


class _Gathered:
    """A part that arrives in pieces smaller than it; each is copied, as it may go away."""

    def __init__(self, size: int) -> None:
        self.data = memoryview(bytearray(size))
        self.missing = size


class S3Writer:
    """One new object; implements `FileWriter`. A file of one part is one PUT.

    A write of whole parts goes out as it stands, in the calling thread. Smaller ones are gathered:
    then a part's memory is held for each part begun.
    """

    def __init__(self, store: S3Storage, name: str, size: int, replace: bool) -> None:
        self._store = store
        self._key = store.key(name)
        self._path = store.path(name)
        self._size = size
        self._replace = replace
        self._sum = Checksum(store.config.checksum)
        self.piece = part_size(size, store.config.part_bytes)
        self._lock = threading.Lock()
        self._gathered: dict[int, _Gathered] = {}
        self._parts: dict[int, tuple[str, int, int]] = {}  # number → ETag, checksum, length
        self._upload = ""
        self._token = secrets.token_hex(8)
        self._done = False
        self._single = size <= self.piece
        if not self._single:
            self._upload = store.run("begin an upload", self._path, self._create)

    def write_at(self, offset: int, data: memoryview, crc64: int | None = None) -> None:
        data = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        if offset < 0 or offset + data.nbytes > self._size:
            raise UsageError(
                f"bytes {offset} to {offset + data.nbytes} of a file of {self._size}",
                remedy="write within the size that create_file was given",
                path=self._path,
            )
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
        if written != self._size:
            raise StorageError(
                f"{written} of {self._size} bytes were written",
                remedy="this is a fault of smckpt: please report it",
                path=self._path,
            )
        if not self._single:
            self._store.run("complete the upload", self._path, self._complete)
        self._done = True

    def abort(self) -> None:
        self._gathered.clear()
        upload, self._upload = self._upload, ""
        if upload and not self._done:
            self._store.abort_upload(self._key, upload, self._path)
        elif (self._done or self._parts) and not self._replace:  # it would be others' too
            self._store.delete_key(self._key, self._path)

    def _gather(self, number: int, length: int, inside: int, piece: memoryview) -> None:
        with self._lock:
            part = self._gathered.get(number)
            if part is None:
                part = self._gathered[number] = _Gathered(length)
        part.data[inside : inside + len(piece)] = piece
        with self._lock:
            part.missing -= len(piece)
            whole = part.missing == 0
            if whole:
                self._gathered.pop(number, None)
        if whole:
            self._send(number, part.data, None)

    def _send(self, number: int, data: memoryview, crc64: int | None) -> None:
        known = crc64 if crc64 is not None and self._sum.kind == "crc64nvme" else None
        value = self._sum.of(data) if known is None else known
        if self._single:
            etag = self._put(data, value)
        else:
            etag = self._store.run(
                f"write part {number + 1}",
                self._path,
                lambda client: self._upload_part(client, number, data, value),
            )
        with self._lock:
            self._parts[number] = (etag, value, len(data))

    def _put(self, data: memoryview, value: int | None) -> str:
        if self._replace:
            self._store.put_file(self._key, self._path, data, value)
        elif not self._store.put_object(self._key, self._path, data, value):
            raise _exists(self._path)
        return ""

    def _create(self, client: Any) -> str:
        fields = self._store.new_object_fields()
        if self._sum:
            fields |= {"ChecksumAlgorithm": self._sum.algorithm, "ChecksumType": "FULL_OBJECT"}
        fields["Metadata"] = {_TOKEN: self._token}
        answer = client.create_multipart_upload(Key=self._key, **fields)
        return str(answer["UploadId"])

    def _upload_part(self, client: Any, number: int, data: memoryview, value: int) -> str:
        answer = client.upload_part(
            **self._store.common,
            Key=self._key,
            UploadId=self._upload,
            PartNumber=number + 1,
            Body=self._store.body(data),
            ContentLength=len(data),
            **self._sum.field(value),
        )
        return str(answer["ETag"])

    def _complete(self, client: Any) -> None:
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
                **self._store.common,
                Key=self._key,
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
                **fields,
            )
        except Exception as error:
            # An earlier try may have been carried out though its answer was lost.
            if code_of(error) not in ("PreconditionFailed", "NoSuchUpload", "412", "404"):
                raise
            if not self._is_ours(client, whole):
                if status_of(error) == 412:
                    raise _exists(self._path) from error
                raise

    def _is_ours(self, client: Any, whole: int) -> bool:
        head = self._store.head(client, self._key)
        if head is None or length_of(head) != self._size:
            return False
        stored = self._sum.stored(head) if self._sum else None
        if stored is None:  # then only this tells it from another's of the same size
            return bool(head.get("Metadata", {}).get(_TOKEN) == self._token)
        return stored == self._sum.text(whole)


def _exists(path: str) -> StorageError:
    return StorageError(
        "cannot create the file: the name exists already",
        remedy="names are unique to an attempt: do two jobs write here with one session?",
        path=path,
    )
