"""DCP's file layout, written by the worker; and a reader that parses its metadata once."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import queue
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import get_all_start_methods
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from smckpt.errors import SaveFailedError, UsageError
from smckpt.integrations.nvrx_snapshot import ResultsQueue
from smckpt.integrations.url_files import UrlFileSystem, is_url

__all__ = ["CachedMetadataFileSystemReader", "FileSystemWriterAsync", "get_write_results_queue"]


# NVRx's functions that write; here DCP's own do. A class that overrides one wants it called.
_WRITERS = frozenset(
    ["preload_tensors", "write_preloaded_data", "write_preloaded_data_multiproc",
     "write_preloaded_data_multithread", "write_preloaded_data_proc"]
)  # fmt: skip

_results_queue = None  # Megatron-core looks whether the name is there


def get_write_results_queue(mp_mode: str = "spawn") -> ResultsQueue:
    """A queue that a function of an AsyncRequest puts results into, for the trainer.

    Args:
        mp_mode: of a manager's process, which is not needed here: any of multiprocessing's.
            Megatron-LM passes "fork". Nothing is forked.

    Raises:
        UsageError: no start method of multiprocessing.
    """
    if mp_mode not in (known := get_all_start_methods()):
        raise UsageError(f"mp_mode={mp_mode!r} is not known", remedy=f"pass one of {known}")
    return ResultsQueue()


class FileSystemWriterAsync(FileSystemWriter):
    """A DCP writer in three parts: `prepare_write_data` on the trainer, the function of
    `get_save_function_and_args` in the worker, `finish` on the coordinator. One for each save.

    Args:
        path: a directory, or a URL: s3://…, msc://….
        separation_hint: what has a name with this beginning goes into files of its own; half of the
            `thread_count` threads write them.
        use_msc: either value: the scheme of the path says what writes it.
        is_multiproc_io: either value: threads write, in the worker.
        use_cached_data_structure, use_cpu_shm_for_gpu_tensors: either value: each save sends the
            tensors as they are then, through host memory.
        args, kwargs: of DCP's FileSystemWriter. open_file: in place of `open`, for files of data.

    Raises:
        UsageError: an argument that is not honoured.
    """

    can_run_decentralized_global_plan = True
    # NVRx's own tests empty its caches; here is none
    _cached_identifiers: ClassVar[set[str]] = set()
    _cached_tensor_data_ptrs: ClassVar[dict[str, Any]] = {}
    _shm_tensor_cache: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if overridden := sorted(_WRITERS & vars(cls).keys()):
            raise UsageError(
                f"{cls.__name__}.{overridden[0]} would never be called: the functions of DCP write",
                remedy="leave it out, or pass open_file= or _extensions= of DCP's writer",
            )

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        open_file: Callable[..., Any] = open,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, *args, **kwargs)
        if not self.single_file_per_rank:
            raise NotImplementedError(
                "single_file_per_rank=False is not honoured by FileSystemWriterAsync"
            )
        if separation_hint is not None and self.thread_count < 2:
            raise UsageError(
                f"separation_hint={separation_hint!r} with thread_count={self.thread_count}",
                remedy="pass thread_count=2 or more: half of the threads write each part",
            )
        self.checkpoint_dir = path
        self.use_msc = use_msc
        self.open_file = open_file
        self.separation_hint = separation_hint
        self.results_queue: ResultsQueue | None = None
        self._items: list[tuple[WriteItem, Any]] = []
        self._plan = SavePlan([])
        if is_url(path):
            if open_file is not open:
                raise UsageError("open_file is not honoured for a URL", remedy="leave it out")
            self.fs: Any = UrlFileSystem()
            self.path: Any = self.fs.init_path(path)

    @property
    def has_data_to_write(self) -> bool:
        return bool(self._items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank writes. What is here loses its metadata first: ranks
        that fail later would leave files of two saves under it."""
        path = self._get_metadata_path()
        if self.fs.exists(path):
            self.fs.rm_file(path)
        return super().prepare_global_plan(plans)

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """What the coordinator's `prepare_global_plan` would give this rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super().prepare_global_plan([local_plan] * (rank + 1))[rank]

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Resolve the data. The bytes are copied when the request is scheduled."""
        self._plan = dataclasses.replace(plan, planner_data=None)
        self._items = [(item, _alone(planner.resolve_data(item))) for item in plan.items]
        self.results_queue = get_write_results_queue() if self._items else None

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, list[Any]]:
        """What an AsyncRequest takes.

        Returns:
            The function, the function that gives its second argument, and its arguments. None,
            None and an empty list where this rank has nothing to write.
        """
        if not self._items:
            return None, None, []
        parts, data = [], []
        for items, prefix in self._parts():
            own = [item for item, _ in items]
            parts.append(dataclasses.replace(self._plan, items=own, storage_data=prefix))
            data += [value for _, value in items]
        threads = self.thread_count // len(parts)
        options = {
            "sync_files": self.sync_files,
            "thread_count": max(threads, 1),
            "serialization_format": self.serialization_format,
            "per_thread_copy_ahead": 0,  # else DCP makes streams of a device for host tensors
        }
        write = partial(_write, str(self.checkpoint_dir), self.open_file, self.transforms, options)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return write, partial(tuple, (parts, data)), [rank, None, self.results_queue]

    def _parts(self) -> list[tuple[list[tuple[WriteItem, Any]], Any]]:
        """The items and the beginning of their files' names."""
        prefix, hint = self._plan.storage_data, self.separation_hint
        if hint is None:
            return [(self._items, prefix)]
        named = [pair for pair in self._items if pair[0].index.fqn.startswith(hint)]
        others = [pair for pair in self._items if not pair[0].index.fqn.startswith(hint)]
        own = dataclasses.replace(prefix, prefix=f"{hint}{prefix.prefix}")
        return [(items, where) for items, where in ((others, prefix), (named, own)) if items]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        raise NotImplementedError("FileSystemWriterAsync writes by get_save_function_and_args")

    def retrieve_write_results(self) -> list[WriteResult] | tuple[BaseException, Any]:
        """What the worker wrote; or the error, as DCP wraps it."""
        if self.results_queue is None:
            return []
        try:
            found = self.results_queue.get_nowait()
        except queue.Empty:
            found = SaveFailedError(
                "the worker has not written this save",
                remedy="schedule the request, and finalize it when it has ended",
            )
        if isinstance(found, BaseException):
            error = SaveFailedError(
                f"Worker failure: {getattr(found, 'message', found)}",
                remedy=getattr(found, "remedy", ""),
                path=str(self.checkpoint_dir),
            )
            return error, traceback.StackSummary()
        written: list[WriteResult] = found
        return written

    @classmethod
    def cleanup_tensor_caches(cls) -> None:
        """Nothing is kept from one save to the next."""

    @property
    def checkpoint_id(self) -> str:
        return str(self.checkpoint_dir)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url(checkpoint_id) or FileSystemWriter.validate_checkpoint_id(checkpoint_id)


# -- in the worker -----------------------------------------------------------------------------


class _Noting:
    """A file system that keeps the first error of its streams: DCP loses one of its threads'.

    Args:
        create: makes a stream of a path and a mode; None: as the file system does.
    """

    def __init__(self, fs: Any, create: Callable[[Any, str], Any] | None = None) -> None:
        self._fs, self._create = fs, create or fs.create_stream
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with self._create(path, mode) as stream:
                yield stream
        except Exception as error:
            self.error = self.error or error
            raise


def _write(
    path: str,
    open_file: Callable[..., Any],
    transforms: Any,
    options: dict[str, Any],
    rank: int,
    resolved: tuple[list[SavePlan], list[Any]],
    results_queue: Any,
) -> None:
    """Write this rank's files by DCP's own writer."""
    writer: Any = FileSystemWriter(path, **options)
    writer.transforms = transforms
    if is_url(path):
        writer.fs, writer.path = UrlFileSystem(), path
    opens = None if open_file is open else lambda path, mode: open_file(os.fspath(path), mode)
    noting = writer.fs = _Noting(writer.fs, opens)
    parts, data = resolved
    items = [item for part in parts for item in part.items]
    values = {id(item): value for item, value in zip(items, data, strict=True)}
    # DCP's writer asks its planner for the data of an item, and for nothing else
    planner: Any = SimpleNamespace(resolve_data=lambda item: values[id(item)])
    written: list[WriteResult] = []
    for part in parts:
        done = writer.write_data(part, planner).value()
        if noting.error is not None:
            raise noting.error
        if len(done) != len(part.items):
            raise SaveFailedError(
                f"{len(done)} of {len(part.items)} parts were written",
                remedy="see the log: one of DCP's threads has failed",
                path=path,
                rank=rank,
            )
        written += done
    results_queue.put(written)


def _alone(value: Any) -> Any:
    """A tensor without the rest of the memory that it is a view of."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.is_cuda and "dequantize" in vars(type(value)):  # Transformer Engine's
        value = value.dequantize()
    if value.untyped_storage().nbytes() == value.numel() * value.itemsize:
        return value
    return value.clone() if value.is_cpu else value.cpu()


class CachedMetadataFileSystemReader(FileSystemReader):
    """
    Args:
        path: a directory, or a URL.
        cache_metadata: keep the metadata for other readers of the directory, for as long as the
            file is the same one: a checkpoint that was replaced is read anew.
    """

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cached = cache_metadata and not is_url(path)
        if is_url(path):
            self.fs: Any = UrlFileSystem()
            self.path: Any = self.fs.init_path(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if not self._cached or args or kwargs.get("rank") is not None:
            return super().read_metadata(*args, **kwargs)
        file = os.stat(self._get_metadata_path())
        identity = (file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns)
        return copy.copy(_read(os.path.abspath(self.path), identity))

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read. With a path too, all of it: it is read again where needed."""
        _read.cache_clear()


@lru_cache(maxsize=16)
def _read(path: str, identity: tuple[int, ...]) -> Metadata:
    return FileSystemReader(path).read_metadata()
