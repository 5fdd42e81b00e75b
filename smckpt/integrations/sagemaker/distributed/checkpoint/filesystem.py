"""Readers and writers, with SMP's hooks; the file system beside a checkpoint, also in S3."""

from __future__ import annotations

import functools
import io
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

import smckpt
from smckpt.errors import StorageError, UsageError
from smckpt.integrations.url_files import UrlFileSystem
from smckpt.staging.copies import Copies, copy_all
from smckpt.storage import Storage, open_storage
from smckpt.storage.s3.client import make_client
from smckpt.storage.s3.config import MIN_PART_MB, StoreOptions
from smckpt.storage.urls import build_s3_url, parse_s3_url

__all__ = [
    "DistributedFileSystemReader",
    "DistributedFileSystemWriter",
    "S3FileSystem",
    "format_s3_path",
    "get_s3_region_from_uri",
    "is_s3_uri",
    "parse_s3_uri",
    "path_to_file_system",
    "retry_with_jitter",
    "store_options",
]


P = ParamSpec("P")
T = TypeVar("T")
_TRIES, _SECONDS = 3, 0.5


def is_s3_uri(uri: str | os.PathLike[str]) -> bool:
    """Whether it is an s3:// URL, also one that lost a slash in pathlib."""
    return os.fspath(uri).startswith("s3:/")


def format_s3_path(path: str | os.PathLike[str]) -> str:
    """The full URL of one that lost a slash in `pathlib.Path`."""
    text = os.fspath(path)
    if not is_s3_uri(text):
        raise UsageError("this is not a URL in S3", remedy="write s3://bucket/key", path=text)
    return "s3://" + text.removeprefix("s3:").lstrip("/")


def parse_s3_uri(uri: str | os.PathLike[str]) -> tuple[str, str]:
    """Bucket and key."""
    return parse_s3_url(format_s3_path(uri))


def get_s3_region_from_uri(uri: str | os.PathLike[str]) -> str | None:
    """The bucket's region, from the bucket itself, else from the AWS settings.

    Raises:
        StorageError: the bucket does not answer, or refuses.
    """
    client = make_client(StoreOptions.from_environment())
    try:
        bucket_region = client.head_bucket(Bucket=parse_s3_uri(uri)[0]).get("BucketRegion")
    except Exception as error:  # botocore has many kinds
        raise StorageError(
            f"the bucket did not tell its region: {error}",
            remedy="check its name and your credentials",
            path=format_s3_path(uri),
        ) from error
    region: str | None = bucket_region or client.meta.region_name
    return region


def retry_with_jitter(function: Callable[P, T]) -> Callable[P, T]:
    """Call the function up to three times while the store fails."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(1, _TRIES):
            try:
                return function(*args, **kwargs)
            except (OSError, StorageError):
                time.sleep(random.uniform(0, _SECONDS * 2**attempt))
        return function(*args, **kwargs)

    return call


def store_options(
    s3_region: str | None, s3client_config: Any
) -> StoreOptions | Mapping[str, Any] | None:
    """SMP's two arguments about S3 as the `storage=` of `smckpt.save`. None if neither is given.

    Args:
        s3client_config: what `storage=` takes, or an `S3ClientConfig` of s3torchconnector.

    Raises:
        UsageError: they contradict each other, or are not honoured.
    """
    config: StoreOptions | Mapping[str, Any] = (
        s3client_config
        if isinstance(s3client_config, (StoreOptions, Mapping))
        else _of_connector(s3client_config)
    )
    if s3_region is None:
        return config or None
    known = config.region if isinstance(config, StoreOptions) else config.get("region")
    if known not in (None, s3_region):
        raise UsageError(
            f"s3_region={s3_region!r}, but s3client_config says {known!r}",
            remedy="give one of the two",
        )
    if isinstance(config, StoreOptions):
        return replace(config, region=s3_region)
    return {**config, "region": s3_region}


def _of_connector(config: Any) -> dict[str, Any]:
    """Translate the fields of an S3ClientConfig that smckpt has too."""
    if config is None:
        return {}
    if not hasattr(config, "part_size"):
        raise UsageError(
            f"s3client_config is a {type(config).__name__}, which is not possible",
            remedy="pass a smckpt.StoreOptions, a mapping of its fields, or an S3ClientConfig",
        )
    if getattr(config, "unsigned", False):
        raise UsageError("unsigned=True is not honoured", remedy="use credentials that may write")
    fields: dict[str, Any] = {"chunk_size_MB": max(MIN_PART_MB, int(config.part_size) >> 20)}
    if getattr(config, "profile", None):
        fields["profile"] = config.profile
    if getattr(config, "max_attempts", None):
        fields["retries"] = int(config.max_attempts) - 1
    return fields


class S3FileSystem(UrlFileSystem):
    """Small files in S3, through smckpt's store. A file is in memory as a whole.

    `fs` lists: `fs.fs.listdir(path)`, as s3fs does.
    """

    def __init__(self, s3_region: str | None = None, s3client_config: Any = None) -> None:
        self._storage = store_options(s3_region, s3client_config)
        self.fs = self

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BytesIO]:
        """A file to read ("rb") or to write ("wb"). It appears when the block ends, and does not
        if the block raises.

        Raises:
            CheckpointNotFoundError: no such file. StorageError: the store refused.
        """
        directory, name = self._file(path)
        if mode == "rb":
            yield io.BytesIO(directory.read(name))
        elif mode == "wb":
            written = io.BytesIO()
            yield written
            directory.overwrite(name, written.getvalue())
        else:
            raise UsageError(f"mode={mode!r} is not honoured", remedy='pass "rb" or "wb"')

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{format_s3_path(path).rstrip('/')}/{suffix}"

    def listdir(self, path: str | os.PathLike[str], detail: bool = False) -> list[str]:
        """Files and directories there, as "bucket/key"."""
        if detail:
            raise UsageError("detail=True is not honoured", remedy="pass detail=False")
        url = format_s3_path(path).rstrip("/")
        directory = open_storage(url, storage=self._storage)
        names = sorted([*directory.list_dirs(), *(info.name for info in directory.list())])
        return [f"{url.removeprefix('s3://')}/{name}" for name in names]

    def _file(self, path: str | os.PathLike[str]) -> tuple[Storage, str]:
        bucket, key = parse_s3_uri(path)
        above, _, name = key.rpartition("/")
        return open_storage(build_s3_url(bucket, above), storage=self._storage), name


Hook = Callable[["DistributedFileSystemWriter"], object]


def path_to_file_system(path: str | os.PathLike[str]) -> Any:
    """The file system for small files beside a checkpoint: torch's `FileSystem`, or an
    `S3FileSystem`."""
    return S3FileSystem() if is_s3_uri(path) else FileSystem()


class DistributedFileSystemReader(smckpt.DistributedFileSystemReader):
    """smckpt's reader, with `fs` and `path`."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(_url_of(path), **_with_store(options))
        self.fs = path_to_file_system(self.checkpoint_id)


class DistributedFileSystemWriter(smckpt.DistributedFileSystemWriter):
    """smckpt's writer, with `fs`, `path`, `is_coordinator` and hooks.

    Args:
        pre_write_hooks: called with the writer on each rank, after its state is in host memory and
            before a byte is written. If one raises, the save fails on all ranks.
        post_write_hooks: called with the writer on each rank after the commit, in the background.
            The next `maybe_finalize_async_calls` of the queue raises the error of a hook.
        options: as in `smckpt.DistributedFileSystemWriter`, with `s3_region` and `s3client_config`
            in place of `storage`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pre_write_hooks: Iterable[Hook] = (),
        post_write_hooks: Iterable[Hook] = (),
        **options: Any,
    ) -> None:
        super().__init__(_url_of(path), **_with_store(options))
        self.fs = path_to_file_system(self.checkpoint_id)
        self.is_coordinator = False
        self._before = tuple(pre_write_hooks)
        self._after = tuple(post_write_hooks)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Called by DCP, where a planner is given."""
        if self._after:
            raise UsageError(
                "post_write_hooks= is not honoured together with a planner",
                remedy="leave the planner out",
                path=self.checkpoint_id,
            )
        self._run(self._before)
        return super().write_data(plan, planner)

    def hooked(self, process_group: Any, coordinator_rank: int | None) -> dict[str, Any]:
        """The options of a save that run the hooks before the write."""
        import torch.distributed as dist

        ranks = smckpt.get_global_ranks(process_group)
        rank = dist.get_rank() if dist.is_initialized() else 0
        lead = ranks[0] if coordinator_rank is None else coordinator_rank
        self.is_coordinator = rank == lead
        if not self._before:
            return {}

        def stager(copies: Copies) -> None:
            copy_all(copies)
            self._run(self._before)

        return {"stager": stager}

    def after(self, handle: smckpt.SaveHandle) -> Future[None]:
        """Start the hooks that follow the commit."""
        done: Future[None] = Future()

        def run(saved: Any) -> None:
            try:
                if saved.error is None:  # if the save failed, the queue raises it
                    self._run(self._after)
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        handle.add_done_callback(run)
        return done

    def _run(self, hooks: Iterable[Hook]) -> None:
        for hook in hooks:
            hook(self)


def _url_of(path: str | os.PathLike[str]) -> str:
    return format_s3_path(path) if is_s3_uri(path) else os.fspath(path)


def _with_store(options: dict[str, Any]) -> dict[str, Any]:
    region, config = options.pop("s3_region", None), options.pop("s3client_config", None)
    given = store_options(region, config)
    return options if given is None else {**options, "storage": given}
