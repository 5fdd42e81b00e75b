"""The clients that `benchmarks/s3.py` compares: each puts memory into an object and gets it."""

from __future__ import annotations

import io
import os
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

PART = 64 << 20
AUTHORITY = os.environ.get("AWS_CA_BUNDLE")  # a file of certificates; boto3 takes it from there
THREADS = 8


class MemoryFile(io.RawIOBase):
    """A file over memory, for clients that want one. Reads copy."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: len(self.data)}[whence]
        self.at = start + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        piece = self.data[self.at : self.at + len(buffer)]
        buffer[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)

    def write(self, piece: Any) -> int:
        self.data[self.at : self.at + len(piece)] = piece
        self.at += len(piece)
        return len(piece)


class Client(Protocol):
    """Puts `data` under a key, and fills `target` from one."""

    def put(self, key: str, data: memoryview) -> None: ...

    def get(self, key: str, target: memoryview) -> None: ...


class Smckpt:
    """smckpt's store: parts with their CRC-64/NVME; checksummed reads like those of a load (two per
    thread, of at most 64 MiB)."""

    checked = True
    most = PART  # bytes of a request

    def __init__(self, endpoint: str, bucket: str) -> None:
        from smckpt.storage.s3.config import StoreOptions
        from smckpt.storage.s3.storage import S3Storage

        config = StoreOptions(endpoint=endpoint, region="us-east-1")
        self.store = S3Storage(f"s3://{bucket}/", config)
        self.pool = ThreadPoolExecutor(THREADS)

    def put(self, key: str, data: memoryview) -> None:
        writer = self.store.create_file(key, len(data))
        starts = range(0, len(data), writer.piece)
        list(self.pool.map(lambda at: writer.write_at(at, data[at : at + writer.piece]), starts))
        writer.finish()

    def get(self, key: str, target: memoryview) -> None:
        from smckpt.checkpoint.records.crc import BLOCK, crc64

        def check(stretch: memoryview) -> None:
            for at in range(0, len(stretch), BLOCK):
                crc64(stretch[at : at + BLOCK])

        each = min(self.most, len(target) // (2 * THREADS))

        def one(at: int) -> None:
            seen = check if self.checked else None
            self.store.read_into(key, at, [target[at : at + each]], seen)

        list(self.pool.map(one, range(0, len(target), each)))


class SmckptUnchecked(Smckpt):
    """The same, without checksums on reads."""

    checked = False


class SmckptSmall(Smckpt):
    """The same, with reads of 8 MiB, so with up to eight times as many requests."""

    most = 8 << 20


class Boto3:
    """boto3's upload_fileobj and download_fileobj with their defaults."""

    tuned = False

    def __init__(self, endpoint: str, bucket: str) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        more: dict[str, Any] = {}
        self.transfer = TransferConfig()
        if self.tuned:
            more = {
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "max_pool_connections": THREADS,
            }
            self.transfer = TransferConfig(
                multipart_chunksize=PART,
                multipart_threshold=PART,
                max_concurrency=THREADS,
                io_chunksize=1 << 20,
                preferred_transfer_client="classic",
            )
        s3 = {"addressing_style": "path", "payload_signing_enabled": not self.tuned}
        config = Config(s3=s3, **more)
        self.client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", config=config
        )
        self.bucket = bucket

    def put(self, key: str, data: memoryview) -> None:
        self.client.upload_fileobj(
            io.BufferedReader(MemoryFile(data)), self.bucket, key, Config=self.transfer
        )

    def get(self, key: str, target: memoryview) -> None:
        self.client.download_fileobj(self.bucket, key, MemoryFile(target), Config=self.transfer)


class Boto3Tuned(Boto3):
    """The same with 64 MiB parts, 8 threads, without SHA-256 and without checksums."""

    tuned = True


class Crt:
    """s3transfer with the CRT."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        import botocore.session
        from awscrt.auth import AwsCredentialsProvider
        from botocore.config import Config
        from s3transfer.crt import (
            BotocoreCRTRequestSerializer,
            CRTTransferManager,
            create_s3_crt_client,
        )

        keys = AwsCredentialsProvider.new_static(
            os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        )
        client = create_s3_crt_client(
            "us-east-1",
            keys,
            part_size=PART,
            use_ssl=endpoint.startswith("https"),
            verify=AUTHORITY,
        )
        serializer = BotocoreCRTRequestSerializer(
            botocore.session.Session(),
            {
                "endpoint_url": endpoint,
                "region_name": "us-east-1",
                "config": Config(s3={"addressing_style": "path"}),
            },
        )
        self.manager = CRTTransferManager(client, serializer)
        self.bucket = bucket

    def put(self, key: str, data: memoryview) -> None:
        self.manager.upload(io.BufferedReader(MemoryFile(data)), self.bucket, key).result()

    def get(self, key: str, target: memoryview) -> None:
        self.manager.download(self.bucket, key, MemoryFile(target)).result()


class Connector:
    """s3torchconnector's writer and reader, used as its checkpoints do."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        config = S3ClientConfig(part_size=PART, force_path_style=True)
        self.checkpoint = S3Checkpoint("us-east-1", endpoint=endpoint, s3client_config=config)
        self.bucket = bucket

    def put(self, key: str, data: memoryview) -> None:
        with self.checkpoint.writer(f"s3://{self.bucket}/{key}") as writer:
            for at in range(0, len(data), 16 << 20):
                writer.write(data[at : at + (16 << 20)])

    def get(self, key: str, target: memoryview) -> None:
        reader, at = self.checkpoint.reader(f"s3://{self.bucket}/{key}"), 0
        while at < len(target):
            at += reader.readinto(target[at : at + (16 << 20)])


class Obstore:
    """obstore (Rust), without checksums."""

    checked = False

    def __init__(self, endpoint: str, bucket: str) -> None:
        from obstore.store import S3Store

        self.store = S3Store(
            bucket,
            endpoint=endpoint,
            region="us-east-1",
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            **({"checksum_algorithm": "CRC64NVME"} if self.checked else {}),
            client_options={"allow_http": True, "timeout": "120s"}
            | ({"root_certificate": Path(AUTHORITY).read_text()} if AUTHORITY else {}),
        )
        self.pool = ThreadPoolExecutor(THREADS)

    def put(self, key: str, data: memoryview) -> None:
        import obstore

        obstore.put(self.store, key, data, chunk_size=PART, max_concurrency=THREADS)

    def get(self, key: str, target: memoryview) -> None:
        import obstore

        def one(at: int) -> None:
            length = min(PART // 4, len(target) - at)
            target[at : at + length] = obstore.get_range(self.store, key, start=at, length=length)

        list(self.pool.map(one, range(0, len(target), PART // 4)))


class ObstoreChecked(Obstore):
    """The same, with the CRC-64/NVME of each part, and of each block that is read."""

    checked = True

    def get(self, key: str, target: memoryview) -> None:
        """As smckpt reads: requests of the same size, each block checked once it is copied."""
        import obstore

        from smckpt.checkpoint.records.crc import BLOCK, crc64

        each = min(PART, len(target) // (2 * THREADS))

        def one(at: int) -> None:
            wanted = {"range": (at, min(at + each, len(target)))}
            for chunk in obstore.get(self.store, key, options=wanted).stream(BLOCK):
                for low in range(0, len(chunk), BLOCK):
                    piece = memoryview(chunk)[low : low + BLOCK]
                    target[at : at + len(piece)] = piece
                    crc64(target[at : at + len(piece)])
                    at += len(piece)

        list(self.pool.map(one, range(0, len(target), each)))


class Raw:
    """The limit: plain sockets, 8 threads; URLs are signed, bodies neither signed nor checked."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        import boto3
        from botocore.config import Config

        config = Config(s3={"addressing_style": "path"}, signature_version="s3v4")
        self.client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", config=config
        )
        self.bucket = bucket
        self.pool = ThreadPoolExecutor(THREADS)
        where = urlsplit(endpoint)
        self.address = (where.hostname, where.port)
        secure = where.scheme == "https"
        self.tls = ssl.create_default_context(cafile=AUTHORITY) if secure else None

    def put(self, key: str, data: memoryview) -> None:
        """Each part is an object of its own: the completion of an upload is not measured."""

        def one(at: int) -> None:
            part = data[at : at + PART]
            fields = {"Bucket": self.bucket, "Key": f"{key}.{at}"}
            url = urlsplit(self.client.generate_presigned_url("put_object", fields))
            with self._send("PUT", url, f"Content-Length: {len(part)}\r\n") as sock:
                sock.sendall(part)
                _status(sock)

        list(self.pool.map(one, range(0, len(data), PART)))

    def get(self, key: str, target: memoryview) -> None:
        fields = {"Bucket": self.bucket, "Key": key}
        url = urlsplit(self.client.generate_presigned_url("get_object", fields))

        def one(at: int) -> None:
            part = target[at : at + PART // 4]
            wanted = f"Range: bytes={at}-{at + len(part) - 1}\r\n"
            with self._send("GET", url, wanted) as sock:
                body = _status(sock)
                part[: len(body)] = body
                done = len(body)
                while done < len(part):
                    done += sock.recv_into(part[done:])

        list(self.pool.map(one, range(0, len(target), PART // 4)))

    def _send(self, method: str, url: Any, fields: str) -> socket.socket:
        sock = socket.create_connection(self.address)
        if self.tls is not None:
            sock = self.tls.wrap_socket(sock, server_hostname=self.address[0])
        host = f"Host: {self.address[0]}:{self.address[1]}\r\nConnection: close\r\n"
        head = f"{method} {url.path}?{url.query} HTTP/1.1\r\n{host}{fields}\r\n"
        sock.sendall(head.encode())
        return sock


def _status(sock: socket.socket) -> bytes:
    """Read the head of an answer, which must be 2xx. Returns the part of the body that came with
    it."""
    head = b""
    while b"\r\n\r\n" not in head:
        more = sock.recv(4096)
        if not more:
            raise ConnectionError("no answer")
        head += more
    if not head.startswith(b"HTTP/1.1 2"):
        raise ConnectionError(head.decode(errors="replace"))
    return head.partition(b"\r\n\r\n")[2]


CLIENTS: dict[str, Callable[[str, str], Client]] = {
    "smckpt": Smckpt,
    "smckpt, reads unchecked": SmckptUnchecked,
    "smckpt, reads of 8 MiB": SmckptSmall,
    "boto3, as it comes": Boto3,
    "boto3, tuned": Boto3Tuned,
    "s3transfer with CRT": Crt,
    "s3torchconnector": Connector,
    "obstore": Obstore,
    "obstore, CRC-64/NVME": ObstoreChecked,
    "raw sockets": Raw,
}
