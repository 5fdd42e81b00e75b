"""The store for any scheme that fsspec knows (gs, abfs, hdfs, memory and so on), and for msc.

`Storage.exclusive` and `Storage.one_process` say what a scheme cannot do. Options and credentials
are fsspec's own (its configuration files and FSSPEC_… variables).
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    UsageError,
)
from smckpt.storage.base import Access, FileInfo, Storage
from smckpt.storage.disk.posix import PosixStorage
from smckpt.storage.faults import replaced, storage_error, too_short
from smckpt.storage.preflight import try_out
from smckpt.storage.spool import SpooledWriter
from smckpt.storage.urls import file_url, scheme_of

# For these, pipe_file(mode="create") is one conditional request (gcsfs, adlfs), or stays within one
# process.
_EXCLUSIVE = frozenset({"memory", "gs", "gcs", "abfs", "abfss", "az"})
_ONE_PROCESS = frozenset({"memory"})
# Schemes with real directories: an empty one is removed. For other schemes `rmdir` may remove a
# bucket.
_DIRECTORIES = frozenset({"memory", "file", "local", "hdfs", "arrow_hdfs", "sftp", "ssh", "smb"})
# What stores say of a file's bytes: S3, GCS, Azure, HDFS, SFTP and SMB, memory
_OF_BYTES = ("size", "ETag", "etag", "VersionId", "generation", "md5Hash", "LastModified",
             "last_modified", "updated", "mtime", "created")  # fmt: skip
_IN_MEMORY = threading.Lock()  # memory:// needs two steps to create a file if it is absent


class FsspecStorage(Storage):
    """The directory `url`. Thread-safe if the file system is."""

    read_once = True
    request_bytes = 16 << 20
    rereads = 2

    def __init__(self, url: str, access: Access | None = None) -> None:
        super().__init__(url, access)
        self.scheme = scheme_of(self.url)
        self.exclusive = self.scheme in _EXCLUSIVE
        self.one_process = self.scheme in _ONE_PROCESS
        self.fs = _file_system(self.scheme, self.url)
        self._versions: dict[str, str] | None = None  # path → fsspec's key of what is read
        self._root = str(self.fs._strip_protocol(self.url)).rstrip("/")

    def create_file(self, name: str, size: int, *, replace: bool = False) -> SpooledWriter:
        path = self._path(name)

        def send(file: BinaryIO) -> None:
            with self._own_errors(name, "write"):
                if not replace and self.fs.exists(path):
                    raise FileExistsError(path)
                try:
                    self._send(path, file)
                except Exception:
                    with contextlib.suppress(Exception):  # the earlier failure is the cause
                        self.fs.rm_file(path)
                    raise
            if (there := self.size(name)) != size:
                self.delete(name)
                raise too_short(name, there, size, file_url(self.url, name))

        return SpooledWriter(file_url(self.url, name), size, send, lambda: self.delete(name))

    def put_exclusive(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with self._own_errors(name, "create exclusively"):
            try:
                if self.exclusive:
                    self._create(path, data)
                elif self.fs.exists(path):
                    return False
                else:
                    self._made(path, lambda: self.fs.pipe_file(path, data))
                return True
            except FileExistsError:
                pass
        return self.read(name) == data  # an earlier try made it, but its answer was lost

    def try_out(self, name: str) -> str:
        try_out(self, name, self.delete)
        if self.exclusive:
            return ""
        return (
            f"{self.url}: {self.scheme}:// has no exclusive create. Only one process at a time "
            "may save here; a second job would overwrite its files"
        )

    def read_into(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        wanted = [b if b.format == "B" and b.ndim == 1 else b.cast("B") for b in buffers]
        length = sum(map(len, wanted))
        if not length:
            self.size(name)
            return
        path = self._path(name)
        with self._own_errors(name, "read"):
            self._refuse_replaced(path, again=False)
            data = memoryview(self._range(path, offset, offset + length))
            self._refuse_replaced(path)
        if len(data) != length:
            path = file_url(self.url, name)
            raise too_short(name, offset + len(data), offset + length, path)
        for buffer in wanted:
            buffer[:] = data[: len(buffer)]
            data = data[len(buffer) :]
            if seen is not None:
                seen(buffer)

    def _refuse_replaced(self, path: str, *, again: bool = True) -> None:
        """Of a store `of_one_version`. again: also a file that was looked at before."""
        if self._versions is not None and (again or path not in self._versions):
            now = self._version(path)
            if self._versions.setdefault(path, now) != now:
                raise replaced(file_url(self.url, path.rpartition("/")[2]))

    def _version(self, path: str) -> str:
        """What tells the file's bytes from others. fsspec's own key is of all that it knows, which
        may have the time of the last read."""
        from fsspec import AbstractFileSystem

        if type(self.fs).ukey is not AbstractFileSystem.ukey:
            return str(self.fs.ukey(path))
        found = self.fs.info(path)
        return repr([found.get(key) for key in _OF_BYTES])

    def of_one_version(self) -> FsspecStorage:
        store = copy.copy(self)
        store._versions = {}
        return store

    def size(self, name: str) -> int:
        with self._own_errors(name, "look up the size"):
            found = self.fs.info(self._path(name))
            self._refuse_replaced(self._path(name), again=False)
            if found["type"] != "file":
                raise IsADirectoryError(self._path(name))
            return int(found["size"])

    def list_dirs(self) -> list[str]:
        return sorted(_name(entry) for entry in self._entries() if entry["type"] == "directory")

    def list(self, prefix: str = "") -> list[FileInfo]:
        found = [
            FileInfo(_name(entry), int(entry["size"]))
            for entry in self._entries()
            if entry["type"] == "file" and _name(entry).startswith(prefix)
        ]
        return sorted(found, key=lambda info: info.name)

    def delete(self, name: str) -> None:
        with contextlib.suppress(CheckpointNotFoundError), self._own_errors(name, "delete"):
            self.fs.rm_file(self._path(name))

    def remove_directory(self) -> None:
        if self.scheme in _DIRECTORIES:
            with contextlib.suppress(Exception):  # it is not empty, or does not exist
                self.fs.rmdir(self._root)

    # -- inside --------------------------------------------------------------------------------

    def _send(self, path: str, file: BinaryIO) -> None:
        """Write a whole file. After a failure the file is discarded and not closed, because `close`
        would publish what was written so far."""

        def write() -> None:
            file.seek(0)
            made = self.fs.open(path, "wb")
            try:
                shutil.copyfileobj(file, made, 16 << 20)
            except BaseException:
                with contextlib.suppress(Exception):
                    made.discard()
                with contextlib.suppress(AttributeError):
                    made.closed = True
                raise
            made.close()

        self._made(path, write)

    def _create(self, path: str, data: bytes) -> None:
        """Create the file, or raise FileExistsError."""
        with _IN_MEMORY if self.one_process else contextlib.nullcontext():
            self.fs.pipe_file(path, data, mode="create")

    def _range(self, path: str, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(path, start=start, end=end)
        return data

    def _made(self, path: str, write: Callable[[], None]) -> None:
        """Write. If the directory is missing, and the scheme has real directories, make it
        first."""
        try:
            write()
        except FileNotFoundError:
            self.fs.makedirs(self._root, exist_ok=True)
            write()

    def _entries(self) -> Sequence[dict[str, Any]]:
        with self._own_errors("", "list the directory"):
            self.fs.invalidate_cache(self._root)
            try:
                found = self.fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            here = self._root.strip("/")  # some schemes list the directory itself too
            return [entry for entry in found if entry["name"].strip("/") != here]

    def _path(self, name: str) -> str:
        self.refuse_name(name)
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _own_errors(self, name: str, action: str) -> Iterator[None]:
        """Turn errors of the file system, of any class, into errors of smckpt."""
        path = file_url(self.url, name) if name else self.url
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"cannot {action}: there is no such file",
                remedy="check the URL; `smckpt ls` on its parent shows what is there",
                path=path,
            ) from error
        except OSError as error:
            if error.errno is not None:
                raise storage_error(error, path, action) from error
            raise self._failed(error, path, action) from error
        except Exception as error:
            raise self._failed(error, path, action) from error

    def _failed(self, error: Exception, path: str, action: str) -> StorageError:
        return StorageError(
            f"cannot {action}: {type(error).__name__}: {error}",
            remedy=f"check this path with the tools of {self.scheme}://",
            path=path,
        )


class MscStorage(FsspecStorage):
    """msc://profile/path: a profile of the Multi-Storage Client's configuration."""

    def __init__(self, url: str, access: Access | None = None) -> None:
        super().__init__(url, access)
        client, inside = self._client(self._root)
        if getattr(client, "_metadata_provider", None) is not None:
            raise UsageError(
                f"the profile {client.profile} has a metadata_provider: it lists files only after "
                "a commit of its own, so no rank would see what another one has written",
                remedy="name a profile of the same store without it",
                path=self.url,
            )
        self._provider = client._storage_provider  # not public
        kind = getattr(self._provider, "_provider_name", "")
        self.exclusive = kind in ("s3", "s8k", "oci") and hasattr(self._provider, "put_object")
        self.folder = os.path.join(self._provider._base_path, inside) if kind == "file" else None

    def _client(self, path: str) -> tuple[Any, str]:
        with self._own_errors("", "open the profile"):
            try:
                client, inside = self.fs.resolve_path_and_storage_client(path)
            except ValueError as error:
                raise UsageError(
                    f"cannot open the profile: {error}",
                    remedy="name a profile of MSC's configuration, and let MSC_CONFIG lead to it "
                    "on every rank",
                    path=self.url,
                ) from error
            return client, inside

    def _send(self, path: str, file: BinaryIO) -> None:
        client, inside = self._client(path)
        client.upload_file(inside, file)

    def _range(self, path: str, start: int, end: int) -> bytes:
        """Past the profile's cache and replicas, which may hold what has been replaced."""
        from multistorageclient.types import Range

        part = Range(offset=start, size=end - start)
        data: bytes = self._tried(path, lambda name: self._provider.get_object(name, part))
        return data

    def _create(self, path: str, data: bytes) -> None:
        from multistorageclient.types import PreconditionFailedError

        def put(name: str) -> None:
            self._provider.put_object(name, data, if_none_match="*")

        try:
            self._tried(path, put)
        except PreconditionFailedError as error:
            raise FileExistsError(path) from error

    def _tried(self, path: str, call: Callable[[str], Any]) -> Any:
        """Call with the name in the profile, as often as the profile says."""
        from multistorageclient.retry import retry

        client, inside = self._client(path)
        return retry(lambda _: call(inside))(client)


def open_msc(url: str, access: Access | None = None) -> Storage:
    """The store at msc://profile/path. A profile of type "file" is a directory: MSC neither syncs
    its files nor creates them exclusively, so the file system's own store takes it."""
    store = MscStorage(url, access)
    return store if store.folder is None else PosixStorage(url, access, folder=store.folder)


def _file_system(scheme: str, url: str) -> Any:
    """fsspec's file system, without its cache of listings, because other processes write here
    too."""
    try:
        import fsspec
    except ImportError as error:
        raise _unknown(scheme, url, "fsspec is not installed") from error
    try:
        # some file systems take the host from the URL
        return fsspec.url_to_fs(url, use_listings_cache=False)[0]
    except ValueError as error:  # no installed package brings this protocol
        raise _unknown(scheme, url, str(error)) from error
    except ImportError as error:
        raise UsageError(
            f"the store of {scheme}:// is not installed: {error}",
            remedy=f"install the package that fsspec names for {scheme}",
            path=url,
        ) from error
    except Exception as error:  # each file system raises errors of its own
        raise StorageError(
            f"fsspec cannot open {scheme}://: {type(error).__name__}: {error}",
            remedy="set what this file system needs, in the URL or in fsspec's configuration "
            "(FSSPEC_<SCHEME>_… variables, ~/.config/fsspec)",
            path=url,
        ) from error


def _unknown(scheme: str, url: str, why: str) -> UsageError:
    return UsageError(
        f"no store is known for {scheme}:// ({why})",
        remedy="pass a directory or s3://…, install a package that brings this scheme to fsspec, "
        "or register a store of your own (docs/extending.md)",
        path=url,
    )


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
