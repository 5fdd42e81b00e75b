"""NeMo's helpers for S3, over smckpt's store: its retries, checksums and request rates. And
fsspec's view of S3, for Lightning's `ModelCheckpoint`.

`S3Utils` and the functions beside it have NeMo's names and arguments. A checkpoint of smckpt, which
is many objects, is one name here: that of its directory.
"""

from __future__ import annotations

import importlib.util
import io
import mmap
import os
import re
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from smckpt.calls import Threads
from smckpt.checkpoint.records.format import parse_name
from smckpt.errors import CheckpointNotFoundError, UsageError
from smckpt.integrations.replaced import remove_or_keep
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import build_s3_url, is_s3_url, parse_s3_url

__all__ = [
    "DEFAULT_CHUNK_SIZE_MB",
    "DEFAULT_MAX_READ_CONCURRENCY",
    "DEFAULT_MAX_WRITE_CONCURRENCY",
    "S3Names",
    "S3Utils",
    "provide_s3",
]

DEFAULT_CHUNK_SIZE_MB = 64
DEFAULT_MAX_READ_CONCURRENCY = 15
DEFAULT_MAX_WRITE_CONCURRENCY = 10

_MB = 1 << 20
_STEP = re.compile(r".*step=\d+-")


class S3Utils:
    """NeMo's class of this name. Its functions need no instance."""

    @staticmethod
    def s3_path_exists(s3_path: Any, match_directory: bool = False) -> bool:
        """Whether an object's key begins so; with `match_directory`, whether it is a directory. A
        bucket alone is none."""
        bucket, key = parse_s3_url(str(s3_path))
        if not key:
            return False
        above, _, name = key.rstrip("/").rpartition("/")
        storage = open_storage(build_s3_url(bucket, above))
        if match_directory:
            return name in storage.list_dirs()
        return any(one.startswith(name) for one in (*storage.list_dirs(), *storage.names()))

    @staticmethod
    def remove_object(s3_path: Any) -> None:
        """Remove an object, or the checkpoint at this name."""
        storage, name = _object(s3_path)
        storage.delete(name)
        below = storage.join(name)
        if below.names() and remove_or_keep(below.url, {}):
            below.delete_many([one for one in below.names() if parse_name(one)])

    @staticmethod
    def download_s3_file_to_stream(
        s3_path: Any,
        chunk_size_MB: int = DEFAULT_CHUNK_SIZE_MB,
        max_concurrency: int = DEFAULT_MAX_READ_CONCURRENCY,
    ) -> io.BytesIO:
        storage, name = _object(s3_path)
        made = bytearray(storage.size(name))
        _download(storage, name, memoryview(made), chunk_size_MB, max_concurrency)
        return io.BytesIO(made)

    @staticmethod
    def download_s3_file_to_path(
        s3_path: Any,
        file_path: str | os.PathLike[str],
        chunk_size_MB: int = DEFAULT_CHUNK_SIZE_MB,
        max_concurrency: int = DEFAULT_MAX_READ_CONCURRENCY,
    ) -> None:
        storage, name = _object(s3_path)
        size = storage.size(name)
        with open(file_path, "w+b") as file:
            file.truncate(size)
            if size:
                with mmap.mmap(file.fileno(), size) as mapped, memoryview(mapped) as target:
                    _download(storage, name, target, chunk_size_MB, max_concurrency)

    @staticmethod
    def upload_file_stream_to_s3(
        bytes_buffer: io.BytesIO,
        s3_path: Any,
        chunk_size_MB: int = DEFAULT_CHUNK_SIZE_MB,
        max_concurrency: int = DEFAULT_MAX_WRITE_CONCURRENCY,
    ) -> None:
        """Upload all of the buffer, wherever it stands."""
        with bytes_buffer.getbuffer() as data:
            _upload(s3_path, data, chunk_size_MB, max_concurrency)

    @staticmethod
    def upload_file(
        file_path: str | os.PathLike[str],
        s3_path: Any,
        chunk_size_MB: int = DEFAULT_CHUNK_SIZE_MB,
        max_concurrency: int = DEFAULT_MAX_WRITE_CONCURRENCY,
        remove_file: bool = False,
    ) -> None:
        """
        Raises:
            UsageError: the file is empty.
        """
        if not os.path.getsize(file_path):
            raise UsageError("the file is empty", remedy="write it first", path=str(file_path))
        with (
            open(file_path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            _upload(s3_path, data, chunk_size_MB, max_concurrency)
        if remove_file:
            os.remove(file_path)

    @staticmethod
    def find_files_with_suffix(
        base_path: Any,
        suffix: str | None = None,
        return_key_only: bool = True,
        profile: str | None = None,
        creds: Any = None,
    ) -> list[str]:
        """The keys, or URLs, of all objects below. A committed checkpoint of smckpt counts as one;
        one that is not committed does not count.

        Args:
            profile: of the AWS configuration.
            creds: refused: pass a profile.
        """
        if creds is not None:
            raise UsageError(
                "creds= is not honoured", remedy="pass profile=, or set the AWS environment"
            )
        top = open_storage(base_path, storage={"profile": profile} if profile else None)
        bucket, _ = parse_s3_url(top.url)
        keys = [key for key in _keys(top) if key.endswith(suffix or "")]
        return keys if return_key_only else [build_s3_url(bucket, key) for key in keys]

    @staticmethod
    def parse_s3_url(s3_url: str) -> tuple[str, str] | tuple[None, None]:
        """Bucket and key; (None, None) of what is no URL of an object in S3."""
        if not is_s3_url(s3_url) or "/" not in s3_url[len("s3://") :]:
            return None, None
        return parse_s3_url(s3_url)

    @staticmethod
    def build_s3_url(bucket: str, key: str) -> str:
        return build_s3_url(bucket, key)

    @staticmethod
    def is_s3_url(path: Any) -> bool:
        return path is not None and is_s3_url(str(path).strip())

    @staticmethod
    def parse_prefix_with_step(path: str) -> str:
        """Up to "step=900-" of a checkpoint's name; all of a name without it."""
        found = _STEP.match(path)
        return found[0] if found else path


def _object(url: Any, **arguments: Any) -> tuple[Storage, str]:
    bucket, key = parse_s3_url(str(url))
    above, _, name = key.rstrip("/").rpartition("/")
    return open_storage(build_s3_url(bucket, above), **arguments), name


def _keys(storage: Storage) -> list[str]:
    """All keys below, with those of a checkpoint as one."""
    prefix = parse_s3_url(storage.url)[1]
    files = [one.name for one in storage.list()]
    if any((parsed := parse_name(name)) and parsed.kind == "manifest" for name in files):
        return [prefix.rstrip("/")]
    keys = [prefix + name for name in files if parse_name(name) is None]
    for name in storage.list_dirs():
        keys += _keys(storage.join(name))
    return keys


def _upload(url: Any, data: memoryview, chunk_size_MB: int, concurrency: int) -> None:
    options = {"chunk_size_MB": chunk_size_MB, "max_write_concurrency": concurrency}
    storage, name = _object(url, storage=options)
    writer = storage.create_file(name, len(data), replace=True)
    piece = writer.piece or chunk_size_MB * _MB
    try:
        with Threads(concurrency, "smckpt-upload") as pool:
            starts = range(0, len(data), piece)
            list(pool.map(lambda at: writer.write_at(at, data[at : at + piece]), starts))
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def _download(
    storage: Storage, name: str, target: memoryview, chunk_size_MB: int, concurrency: int
) -> None:
    piece = chunk_size_MB * _MB

    def read(at: int) -> None:
        storage.read_into(name, at, [target[at : at + piece]])

    with Threads(concurrency, "smckpt-download") as pool:
        list(pool.map(read, range(0, len(target), piece)))


def provide_s3() -> None:
    """Let fsspec find s3:// here, unless s3fs is installed or something else is registered.

    s3fs wants another botocore than boto3."""
    if importlib.util.find_spec("s3fs") is None and "s3" not in fsspec.registry:
        fsspec.register_implementation("s3", S3Names)


class S3Names(AbstractFileSystem):  # type: ignore[misc]
    """Names in S3 as files and directories: `ModelCheckpoint(dirpath="s3://…")` asks for no more. A
    whole small file can be read and written too. The options of S3 are those of the environment."""

    protocol = ("s3",)
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found = self._listed(path)
        if not found and not self._is_file(path):
            raise FileNotFoundError(path)
        found = found or [self._file(path)]
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if self._is_file(path):
            return self._file(path)
        if "/" in self._strip_protocol(path) and not self._listed(path):
            raise FileNotFoundError(path)
        return {"name": self._strip_protocol(path), "size": 0, "type": "directory"}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """S3 has none."""

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """S3 has none."""

    def rm_file(self, path: str) -> None:
        storage, name = self._storage_and_name(path)
        storage.delete(name)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        storage, name = self._storage_and_name(path)
        if mode == "rb":
            try:
                return io.BytesIO(storage.read(name))
            except CheckpointNotFoundError as error:
                raise FileNotFoundError(path) from error
        if mode == "wb":
            return _Whole(storage, name)
        raise NotImplementedError(f"mode {mode!r} of {path}: only whole files, with rb and wb")

    def _storage_and_name(self, path: str) -> tuple[Storage, str]:
        above, _, name = self._strip_protocol(path).rpartition("/")
        bucket, _, key = above.partition("/")
        return open_storage(build_s3_url(bucket, key)), name

    def _is_file(self, path: str) -> bool:
        if "/" not in self._strip_protocol(path):
            return False
        storage, name = self._storage_and_name(path)
        try:
            return storage.size(name) >= 0
        except CheckpointNotFoundError:
            return False

    def _file(self, path: str) -> dict[str, Any]:
        storage, name = self._storage_and_name(path)
        return {"name": self._strip_protocol(path), "size": storage.size(name), "type": "file"}

    def _listed(self, path: str) -> list[dict[str, Any]]:
        here = self._strip_protocol(path).rstrip("/")
        bucket, _, key = here.partition("/")
        storage = open_storage(build_s3_url(bucket, key))
        found: list[dict[str, Any]] = [
            {"name": f"{here}/{name}", "size": 0, "type": "directory"}
            for name in storage.list_dirs()
        ]
        for one in storage.list():
            found.append({"name": f"{here}/{one.name}", "size": one.size, "type": "file"})
        return found


class _Whole(io.BytesIO):
    """A file that is uploaded when it is closed, unless the block that wrote it raised."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__()
        self._storage, self._name = storage, name

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            super().close()
        self.close()

    def close(self) -> None:
        if not self.closed:
            self._storage.overwrite(self._name, self.getvalue())
        super().close()
