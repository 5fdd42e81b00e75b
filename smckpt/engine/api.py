"""The functions that users call; checked here, done in the queue and the loader."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from smckpt.checkpoint.discover import Found, latest
from smckpt.engine.groups import Group, get_global_ranks, group_of
from smckpt.engine.job import SaveHandle, SaveOptions, SaveRequest, Timings
from smckpt.engine.load import LoadRequest
from smckpt.engine.runtime import Runtime
from smckpt.errors import UsageError
from smckpt.storage.budget import Share
from smckpt.storage.s3_config import given_s3, s3_options, using_s3
from smckpt.storage.s3_pace import sharing
from smckpt.storage.urls import normal_url

__all__ = [
    "SaveHandle",
    "SaveOptions",
    "Timings",
    "async_save",
    "get_global_ranks",
    "latest_checkpoint",
    "load",
    "maybe_finalize_async_calls",
    "save",
]

LOAD_THREADS, LOAD_TIMEOUT = 4, 1800.0

# The one object of the process: SMP's functions take no handle, so queues must live somewhere.
_RUNTIME = Runtime()


def async_save(
    state_dict: MutableMapping[str, Any] | None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    coordinator_rank: int | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    queue: str | None = None,
    step: int | None = None,
    metadata: dict[str, Any] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    parallel_state: Any = None,
    on_commit: Callable[[SaveHandle], None] | None = None,
    allow_objects: Sequence[type] = (),
    options: SaveOptions | None = None,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> Any:
    """Copy the state into memory and return; write and commit it in the background.

    Runs no collective. All ranks of `process_group` call it, each with its own state; a process
    that is no member returns None at once. A save still in flight in the same queue is waited for.
    Threads take turns in a queue, in the same order on all ranks; or give each its own `queue=`.

    Args:
        state_dict: nested dicts, lists and tuples of tensors and values; what
            `sm_state_dict_type` gives, or DTensors, ShardedTensors and plain tensors.
        checkpoint_id: the group's directory. May come from `storage_writer` instead.
        process_group: who commits together; None for all processes.
        coordinator_rank: the global rank that publishes; by default the lowest of the group. The
            same in all saves of a queue.
        storage_writer: `DistributedFileSystemWriter`, or any stock DCP writer: that one is run
            by DCP, with DCP's collectives.
        planner: a DCP save planner; DCP then plans, with its collectives.
        queue: a name; saves of one queue are in order, queues are independent.
        step: the training step, recorded.
        metadata: a dict that JSON can hold, to record.
        groups: the groups (lists of global ranks) that make a step together, when neither
            `parallel_state` nor the model's sharding tells.
        parallel_state: a `ParallelState`; recorded, and its replication groups make the step.
        on_commit: called once, on the coordinator, in the background, after the commit. What it
            raises is logged.
        allow_objects: types that may be stored with `torch.save` although they are no plain data.
        options: see `SaveOptions`.
        s3_region, s3client_config: for s3:// ids: the bucket's region, and an `S3Config` (or a
            mapping of some of its fields). Left out: from SMCKPT_S3_* and the AWS settings.

    Returns:
        A `SaveHandle`; None for a process that is no member.

    Raises:
        UsageError, StateError: this call's arguments or state; nothing is saved under this number.
        SaveFailedError: an *earlier* save was not committed. This call's save is under way all
            the same, on every rank.
    """
    group = group_of(process_group)
    if group is None:
        return None
    if _is_foreign(storage_writer, "DistributedFileSystemWriter") or planner is not None:
        from smckpt.engine.dcp import foreign_save

        _directory(checkpoint_id, storage_writer, "storage_writer")
        _refuse_with_foreign(
            "DCP writer or planner",
            step=step,
            metadata=metadata,
            groups=groups,
            parallel_state=parallel_state,
            on_commit=on_commit,
            allow_objects=allow_objects,
            options=options,
            coordinator_rank=_other_than_lowest(group, coordinator_rank),
            s3_region=s3_region,
            s3client_config=s3client_config,
        )
        return foreign_save(
            _RUNTIME,
            group,
            state_dict,
            checkpoint_id,
            storage_writer,
            planner,
            process_group,
            queue=queue or "default",
        )
    refusal: Exception | None = None
    try:
        directory = _directory(checkpoint_id, storage_writer, "storage_writer")
        request = SaveRequest(
            directory=directory,
            coordinator=_coordinator(group, coordinator_rank),
            step=step,
            metadata={} if metadata is None else metadata,
            topology=None if parallel_state is None else parallel_state.to_json(),
            groups=groups,
            parallel_state=parallel_state,
            on_commit=on_commit,
            allow_objects=tuple(allow_objects),
            options=SaveOptions() if options is None else options,
            s3=given_s3(directory, s3_region, s3client_config, storage_writer)
            or s3_options(directory),
        )
    except Exception as error:  # told to the peers, who count this save too, then raised
        refusal, request = error, SaveRequest.refused(group.ranks[0], options, groups)
    return _RUNTIME.queue(group, queue or "default").submit(state_dict, request, refusal)


def save(
    state_dict: MutableMapping[str, Any] | None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    **arguments: Any,
) -> Any:
    """`async_save`, then wait until it is committed.

    Raises:
        SaveFailedError: it was not committed; on every rank, with the cause.
    """
    handle = async_save(state_dict, checkpoint_id=checkpoint_id, **arguments)
    if handle is None:
        return None
    group = group_of(arguments.get("process_group"))
    assert group is not None
    for its_queue in _RUNTIME.queues(group.ranks, arguments.get("queue") or "default"):
        its_queue.finalize(blocking=True)
    handle.wait()
    return handle


def maybe_finalize_async_calls(
    blocking: bool = True,
    process_group: Any = None,
    *,
    queue: str | None = None,
    timeout: float | None = None,
) -> list[int]:
    """Numbers of the saves committed since the last call; raises what failed.

    With `process_group=None` all queues of this process are looked at. `blocking=False` is
    rank-local: it asks nobody. With nothing ever saved it does nothing.

    Raises:
        SaveFailedError: a save was not committed; on every rank, with the cause.
    """
    ranks = None
    if process_group is not None:
        group = group_of(process_group)
        if group is None:
            return []
        ranks = group.ranks
    done: list[int] = []
    for its_queue in _RUNTIME.queues(ranks, queue):
        done += its_queue.finalize(blocking, timeout)
    return done


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    coordinator_rank: int | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    check_keys_matched: bool = True,
    preverify: bool = False,
    threads: int = LOAD_THREADS,
    timeout: float = LOAD_TIMEOUT,
    groups: Sequence[Sequence[int]] | None = None,
    parallel_state: Any = None,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> MutableMapping[str, Any] | None:
    """Fill `state_dict` from the newest commit at `checkpoint_id`.

    Live tensors are filled in place; values that are no tensors are put into the dict, and into
    the optimizers that it came from. Structure, shapes, dtypes and coverage are checked on all
    ranks before a tensor is touched. Runs no collective.

    Args:
        state_dict: the target, made like the one that was saved.
        checkpoint_id: a group's directory for a LOCAL load; the directory above the groups'
            directories, or that of a single group, for any other. May come from `storage_reader`.
        process_group: who loads together; None for all processes.
        coordinator_rank: accepted for SMP scripts; the lowest rank of the group looks.
        storage_reader: `DistributedFileSystemReader`, or a stock DCP reader: DCP then loads.
        planner: a DCP load planner; DCP then plans, with its collectives.
        check_keys_matched: False takes what both have and logs the rest.
        preverify: read everything twice: first to check, so that a bad block leaves the targets
            untouched.
        threads: readers per rank. A rank that has one processor begins with none but itself, and
            starts them when it waits for data of a file system.
        timeout: seconds for each meeting of the ranks.
        groups, parallel_state, s3_region, s3client_config: as for `async_save`. Where ranks saved
            plain tensors of their own (tensor or expert parallelism), `parallel_state` says which
            of them this rank follows; in a job of another size the load is refused without it.

    Returns:
        `state_dict`, or None for a process that is no member of `process_group`.

    Raises:
        CheckpointNotFoundError, KeysMismatchError, TensorMismatchError, TopologyError: before
            anything is touched. CorruptCheckpointError: a bad block, naming file and offset; on
            every rank; the targets are undefined unless `preverify`. CheckpointReplacedError: newer
            saves landed and swept what was being read, again and again; once, it is begun anew.
    """
    group = group_of(process_group)
    if group is None:
        return None
    if _is_foreign(storage_reader, "DistributedFileSystemReader") or planner is not None:
        from smckpt.engine.dcp import foreign_load

        _directory(checkpoint_id, storage_reader, "storage_reader")
        _coordinator(group, coordinator_rank)
        _refuse_with_foreign(
            "DCP reader or planner",
            check_keys_matched=None if check_keys_matched else False,
            preverify=preverify or None,
            threads=None if threads == LOAD_THREADS else threads,
            timeout=None if timeout == LOAD_TIMEOUT else timeout,
            groups=groups,
            parallel_state=parallel_state,
            s3_region=s3_region,
            s3client_config=s3client_config,
        )
        return foreign_load(state_dict, checkpoint_id, storage_reader, planner, process_group)
    s3 = None
    try:
        directory = _directory(checkpoint_id, storage_reader, "storage_reader")
        _coordinator(group, coordinator_rank)
        s3 = given_s3(directory, s3_region, s3client_config, storage_reader) or s3_options(
            directory
        )
        request = LoadRequest(
            directory=directory,
            strict=check_keys_matched,
            preverify=preverify,
            threads=threads if s3 is None else max(threads, s3.max_read_concurrency),
            timeout=timeout,
            groups=groups,
            parallel_state=parallel_state,
        )
    except Exception as error:  # told to the peers, who count this load too, then raised
        request = LoadRequest("", True, False, LOAD_THREADS, LOAD_TIMEOUT, groups, None, error)
    with using_s3(s3), sharing(Share.of_rank(group.rank, group.world_size)):
        _RUNTIME.loader(group).load(state_dict, request)
    return state_dict


def latest_checkpoint(
    root: str | os.PathLike[str],
    *,
    process_group: Any = None,
    timeout: float = 1800.0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> Found | None:
    """The newest complete step under `root`, or None.

    One rank of `process_group` looks and tells the others through the store: all ranks call it.
    Unfinished, half-written and foreign directories are passed over.

    Raises:
        StorageError: the store fails to read a directory, which may hold the newest; on all ranks.
    """
    group = group_of(process_group)
    if group is None:
        return None
    directory = normal_url(os.fspath(root))
    with using_s3(s3_options(directory, s3_region, s3client_config)):
        return _RUNTIME.loader(group).find(directory, latest, timeout)


def _directory(checkpoint_id: Any, other: Any, argument: str) -> str:
    """The directory from `checkpoint_id` or from a reader or writer; "" when neither tells."""
    path = getattr(other, "checkpoint_id", None) or getattr(other, "path", None)
    theirs = _url(path, argument) if path else ""
    ours = _url(checkpoint_id, "checkpoint_id") if checkpoint_id else ""
    if ours and theirs and ours != theirs:
        raise UsageError(
            f"checkpoint_id is {ours}, but {argument} is for {theirs}",
            remedy="give one of the two, or the same path in both",
            path=ours,
        )
    return ours or theirs


def _url(path: Any, argument: str) -> str:
    text = path if isinstance(path, str) else getattr(path, "__fspath__", lambda: None)()
    if not isinstance(text, str):
        raise UsageError(
            f"{argument} is {path!r}, a {type(path).__name__}",
            remedy="pass a path or an s3:// URL, as text or as an os.PathLike",
        )
    return normal_url(text)


def _is_foreign(other: Any, ours: str) -> bool:
    return other is not None and type(other).__name__ != ours


def _coordinator(group: Group, coordinator_rank: int | None) -> int:
    chosen = group.ranks[0] if coordinator_rank is None else coordinator_rank
    if chosen not in group.ranks:
        raise UsageError(
            f"coordinator_rank {chosen} is no member of the process group {group.ranks}",
            remedy="pass the global rank of a member, such as min(get_global_ranks(group))",
            rank=group.rank,
        )
    return chosen


def _other_than_lowest(group: Group, coordinator_rank: int | None) -> int | None:
    """A coordinator that DCP would not take: its own is the lowest rank."""
    chosen = _coordinator(group, coordinator_rank)
    return None if chosen == group.ranks[0] else chosen


def _refuse_with_foreign(with_what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and value not in ((), {}, []):
            raise UsageError(
                f"{name}= is not honoured together with a {with_what}",
                remedy="leave it out, or use DistributedFileSystemWriter and "
                "DistributedFileSystemReader without a planner",
            )
