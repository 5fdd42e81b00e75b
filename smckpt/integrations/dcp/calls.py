"""`save`, `async_save`, `load`, `FileSystemWriter` and `FileSystemReader` as
torch.distributed.checkpoint has them: its arguments, its errors, and our engine.

What DCP would plan in its own way (a planner, a reader or writer of others) goes to DCP itself,
with our reader and writer where none is passed.
"""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from smckpt.engine import api
from smckpt.engine.saving.job import SaveHandle, Timings
from smckpt.errors import CheckpointError, KeysMismatchError, TensorMismatchError, UsageError
from smckpt.integrations.dcp.foreign import CopyStager, set_whole_values
from smckpt.integrations.dcp.reader import DistributedFileSystemReader
from smckpt.integrations.dcp.writer import DistributedFileSystemWriter
from smckpt.layout.containers import PLAIN_DICTS
from smckpt.meeting.group import group_of, torch_group_of
from smckpt.storage import open_storage
from smckpt.storage.urls import disk_path, path_on_disk

__all__ = ["FileSystemReader", "FileSystemWriter", "async_save", "load", "save"]

log = logging.getLogger("smckpt")

CheckpointId = str | os.PathLike[str] | None
T = TypeVar("T")

# DCP's own, which stay when `smckpt run --for dcp` has replaced the names
_save, _async_save = state_dict_saver.save, state_dict_saver.async_save
_load, _Reader = state_dict_loader.load, filesystem.FileSystemReader
_Writer = filesystem.FileSystemWriter
_TORCH_SAVE = filesystem.SerializationFormat.TORCH_SAVE
_OF_DCP = inspect.signature(_Writer).parameters.keys()  # the arguments of its writer


class FileSystemWriter(DistributedFileSystemWriter):
    """Our writer with the arguments of DCP's `FileSystemWriter`.

    Args:
        path, overwrite: as in DCP.
        thread_count: of writing threads where DCP plans the save.
        single_file_per_rank, per_thread_copy_ahead, cache_staged_state_dict: any value. A rank
            writes as many files as its bytes need, from one copy in host memory that it keeps.
        sync_files: False is refused.
        _extensions, serialization_format: what is not DCP's default makes this DCP's own writer,
            which writes DCP's files. Its reader reads them.
        more: arguments of `DistributedFileSystemWriter`.

    Raises:
        UsageError: an argument that smckpt cannot honour.
    """

    def __new__(cls, path: str | os.PathLike[str], *given: Any, **named: Any) -> Any:
        stock = inspect.signature(_Writer).bind_partial(path, *given, **{
            name: value for name, value in named.items() if name in _OF_DCP
        })  # fmt: skip
        asked = stock.arguments
        kept = asked.get("serialization_format", _TORCH_SAVE) == _TORCH_SAVE
        if cls is not FileSystemWriter or (kept and not asked.get("_extensions")):
            return super().__new__(cls)
        if unknown := named.keys() - _OF_DCP:
            raise UsageError(
                f"{', '.join(sorted(unknown))} is not honoured by DCP's own writer",
                remedy="leave it out, or leave _extensions and serialization_format out",
                path=os.fspath(path),
            )
        path_on_disk(
            path,
            "_extensions and another serialization_format are not honoured in a store",
            "leave them out, or save to a disk",
        )
        log.info("%s: DCP's own writer saves here, since smckpt has no extensions", path)
        return _Writer(*stock.args, **stock.kwargs)

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 4,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: Any = _TORCH_SAVE,
        **more: Any,
    ) -> None:
        del single_file_per_rank, per_thread_copy_ahead, cache_staged_state_dict
        if not sync_files:
            raise UsageError(
                "sync_files=False is not honoured",
                remedy="leave it out: a commit is durable",
                path=os.fspath(path),
            )
        super().__init__(path, threads=thread_count, overwrite=overwrite, **more)

    def __reduce__(self) -> Any:
        return object.__new__, (type(self),), vars(self)  # DCP may save in a process of its own


class FileSystemReader(DistributedFileSystemReader):
    """Our reader in the place of DCP's `FileSystemReader`: it is DCP's own where the directory
    holds what DCP wrote.

    Args:
        path, _extension_registry: as in DCP.
        more: arguments of `DistributedFileSystemReader`.

    Raises:
        UsageError: both DCP and smckpt have saved there, and nothing tells which is newer.
    """

    def __new__(
        cls, path: str | os.PathLike[str], _extension_registry: Any = None, **more: Any
    ) -> Any:
        if os.path.isdir(path) and DistributedFileSystemReader.leaves_to_dcp(path):
            return _Reader(path, _extension_registry)
        return super().__new__(cls)

    def __init__(
        self, path: str | os.PathLike[str], _extension_registry: Any = None, **more: Any
    ) -> None:
        del _extension_registry  # smckpt writes without extensions, so none is looked up
        super().__init__(path, **more)

    def __reduce__(self) -> Any:
        return object.__new__, (type(self),), vars(self)  # `__new__` needs a path


def save(
    state_dict: dict[str, Any],
    positional: Any = None,
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """`torch.distributed.checkpoint.save` through our engine, which runs no collective.

    Args:
        positional: the writer as the second argument, as DCP still takes it.
        use_collectives: any value, where our engine saves.

    Returns:
        The save's `Timings`, where DCP returns its `Metadata`; what DCP returns if it plans.

    Raises:
        CheckpointException: a rank failed; on every rank, with that rank's error.
        RuntimeError: no store is known for `checkpoint_id`.
    """
    storage_writer = storage_writer if positional is None else positional
    if not _ours(storage_writer, DistributedFileSystemWriter) or not is_plain_save(planner):
        stock = _for_dcp(checkpoint_id, storage_writer, process_group)
        return _save(
            state_dict, planner=planner, no_dist=no_dist, use_collectives=use_collectives, **stock
        )
    handle = _by_engine(api.save, state_dict, checkpoint_id, storage_writer, process_group, no_dist)
    return None if handle is None else handle.result()


def _for_dcp(checkpoint_id: CheckpointId, writer: Any, process_group: Any) -> dict[str, Any]:
    """Arguments of DCP's own save, with our writer where none is passed."""
    return {
        "checkpoint_id": None if writer is None else checkpoint_id,
        "storage_writer": writer or FileSystemWriter(_detected(checkpoint_id)),
        "process_group": torch_group_of(process_group),
    }


def _by_engine(
    call: Any, state_dict: Any, checkpoint_id: Any, writer: Any, process_group: Any, no_dist: bool
) -> SaveHandle | None:
    """A save of our engine, by `call`."""
    handle: SaveHandle | None = as_dcp(
        lambda: call(
            state_dict,
            checkpoint_id=_detected(checkpoint_id, writer),
            storage_writer=writer,
            process_group=process_group,
            no_dist=no_dist,
        ),
        process_group,
    )
    if writer is not None:
        writer.used_by_engine = True
    return handle


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """`torch.distributed.checkpoint.async_save` through our engine.

    Args:
        async_checkpointer_type: any value: a process of ours writes.
        async_stager: None or a `DefaultStager`: our engine copies the state, whatever the options.
            Another stager is called, by DCP.
        use_collectives: any value, where our engine saves.

    Returns:
        A future, or an `AsyncSaveResponse` for a stager that copies in the background. The copy is
        there already. What the future returns and raises is as in `save`.

    Raises:
        CheckpointException: this call, or an earlier save that nobody asked about, failed.
        RuntimeError: no store is known for `checkpoint_id`.
    """
    stager_ours = async_stager is None or type(async_stager) is DefaultStager
    ours = _ours(storage_writer, DistributedFileSystemWriter) and is_plain_save(planner)
    if not ours or not stager_ours:
        return _async_save(
            state_dict,
            planner=planner,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager
            or (None if isinstance(storage_writer, AsyncStager) else CopyStager()),
            no_dist=no_dist,
            use_collectives=use_collectives,
            **_for_dcp(checkpoint_id, storage_writer, process_group),
        )
    handle = _by_engine(
        api.async_save, state_dict, checkpoint_id, storage_writer, process_group, no_dist
    )
    if handle is None:
        return None
    upload = Upload(handle, ranks_of(process_group))
    if getattr(getattr(async_stager, "_config", None), "use_async_staging", False):
        staged: Future[None] = Future()
        staged.set_result(None)
        return AsyncSaveResponse(staging_completion=staged, upload_completion=upload)
    return upload


def load(
    state_dict: MutableMapping[str, Any],
    positional: Any = None,
    *,
    checkpoint_id: CheckpointId = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """`torch.distributed.checkpoint.load` through our engine. All names of `state_dict` must be
    saved; what else is saved is left. A target that our engine refuses, DCP loads through our
    reader: it converts dtypes, and its errors have the texts that its callers know.

    Args:
        positional: the reader as the second argument, as DCP still takes it.

    Raises:
        CheckpointException: a rank failed; on every rank, with that rank's error.
        RuntimeError: no store is known for `checkpoint_id`.
    """
    storage_reader = storage_reader if positional is None else positional

    def by_dcp() -> None:
        reader = storage_reader
        if reader is None:
            reader = FileSystemReader(_detected(checkpoint_id))
        _load(
            state_dict,
            checkpoint_id=None if storage_reader is None else checkpoint_id,
            storage_reader=reader,
            planner=planner,
            process_group=torch_group_of(process_group),
            no_dist=no_dist,
        )
        set_whole_values(state_dict, planner)

    ours = _ours(storage_reader, DistributedFileSystemReader)
    if not ours or not _loads_by_engine(planner, checkpoint_id):
        by_dcp()
        return
    before, shape = dict(state_dict), _shape(state_dict)
    partly = planner is not None and planner.allow_partial_load
    location = _detected(checkpoint_id, storage_reader)
    try:
        api.load(
            state_dict,
            checkpoint_id=location,
            storage_reader=storage_reader,
            process_group=process_group,
            check_keys_matched=False if partly else "target",
            no_dist=no_dist,
        )
    except (KeysMismatchError, TensorMismatchError):  # on all ranks, and nothing is changed yet
        by_dcp()
    except CheckpointError as error:
        if storage_reader is not None or not _has_extensions(location):
            raise dcp_error(error, ranks_of(process_group)) from error
        by_dcp()
    else:
        _cut_to(state_dict, shape)
    for key, value in before.items():  # DCP sets what has no load_state_dict
        if not isinstance(value, Stateful):
            state_dict[key] = state_dict[key]


_Shape = dict[Any, tuple[Any, Any]]


def _shape(state: Mapping[Any, Any]) -> _Shape:
    """Each key with its value, and the shape of a dict in it."""
    return {key: (v, _shape(v) if type(v) in PLAIN_DICTS else None) for key, v in state.items()}


def _cut_to(now: MutableMapping[Any, Any], shape: _Shape) -> None:
    """Give dicts without tensors the keys that the target had, as DCP, which fills leaf by leaf.
    Our engine loads such a dict as one value."""
    for key, (was, below) in shape.items():
        if below is None or not isinstance(found := now.get(key), dict):
            continue
        _cut_to(found, below)
        if found is not was:
            filled = {inner: found.get(inner, old) for inner, (old, _) in below.items()}
            was.clear()
            was.update(filled)
            now[key] = was


class Upload(Future[Any]):
    """A save as the future that DCP's callers know: it fails with `CheckpointException`."""

    def __init__(self, handle: SaveHandle, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self._begun, self._ranks = handle, ranks
        self.set_running_or_notify_cancel()
        handle.add_done_callback(self._end)

    def _end(self, handle: Future[Timings]) -> None:
        if (failure := self._begun.error) is not None:
            self.set_exception(dcp_error(failure, self._ranks))
        else:
            self.set_result(handle.result())

    def result(self, timeout: float | None = None) -> Any:
        if (failed := self.exception(timeout)) is not None:
            raise failed
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._begun.exception(timeout)  # a failure that is told here is not told again
        return super().exception(timeout)


def _ours(given: Any, kind: type[Any]) -> bool:
    return given is None or isinstance(given, kind)


def is_plain_save(planner: Any) -> bool:
    """Whether our engine saves what this planner would. It has caches and a balance of its own."""
    return planner is None or (
        type(planner) is DefaultSavePlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and not planner.dedup_save_to_lowest_rank
    )


def _loads_by_engine(planner: Any, checkpoint_id: CheckpointId) -> bool:
    """Whether our engine loads: a planner that was passed is used. In a store DCP's reader reads
    nothing, so there our engine does what DCP's own planner would."""
    return planner is None or (
        type(planner) is DefaultLoadPlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and checkpoint_id is not None
        and disk_path(checkpoint_id) is None
    )


def _has_extensions(location: Any) -> bool:
    """Whether DCP's writer has stored values here through extensions, which DCP alone reads."""
    path = disk_path(location)
    if path is None or not os.path.isfile(os.path.join(path, ".metadata")):
        return False
    stored = _Reader(path).read_metadata().storage_data
    return any(getattr(info, "transform_descriptors", None) for info in stored.values())


def _detected(checkpoint_id: CheckpointId, storage: Any = None) -> Any:
    """
    Raises:
        RuntimeError: there is no store for the id, as DCP says it.
    """
    if checkpoint_id is None and storage is not None:
        return None
    try:
        if not checkpoint_id:
            raise UsageError("checkpoint_id was left out", remedy="pass a directory or a URL")
        open_storage(checkpoint_id)
    except UsageError as error:
        raise RuntimeError(f"Cannot detect a reader or writer: {error}") from error
    if storage is None:
        return checkpoint_id
    storage.reset(checkpoint_id)  # one writer for the directories of many saves, as in DCP
    return None


def as_dcp(call: Callable[[], T], process_group: Any) -> T:
    """The call, with DCP's error for ours."""
    try:
        return call()
    except CheckpointError as error:
        raise dcp_error(error, ranks_of(process_group)) from error


def ranks_of(process_group: Any) -> tuple[int, ...]:
    """The global ranks of the group. When a save ends, the job may have destroyed the group."""
    group = group_of(process_group)
    return (0,) if group is None else group.ranks


def dcp_error(error: CheckpointError, ranks: tuple[int, ...]) -> CheckpointException:
    """DCP's error: ours, under the number of its rank in the group."""
    rank = ranks.index(error.rank) if error.rank in ranks else 0
    stack = traceback.extract_tb(error.__traceback__)
    return CheckpointException(str(error), {rank: (error, stack)})
