"""fsspec's view of S3, for Lightning's `ModelCheckpoint`, if s3fs is absent.

s3fs wants another botocore than boto3. `ModelCheckpoint(dirpath="s3://…")` asks fsspec for names
only; this answers through smckpt's store. A whole small file can be read and written too.
"""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from smckpt.errors import CheckpointNotFoundError
from smckpt.storage import Storage, open_storage
from smckpt.storage.urls import build_s3_url

__all__ = ["S3Names", "provide_s3"]


def provide_s3() -> None:
    """Let fsspec find s3:// here, unless s3fs is installed or something else is registered."""
    if importlib.util.find_spec("s3fs") is None and "s3" not in fsspec.registry:
        fsspec.register_implementation("s3", S3Names)


class S3Names(AbstractFileSystem):  # type: ignore[misc]
    """Names in S3 as files and directories. The options of S3 are those of the environment."""

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
            data = self.getvalue()
            writer = self._storage.create_file(self._name, len(data), replace=True)
            if data:
                writer.write_at(0, memoryview(data))
            writer.finish()
        super().close()
