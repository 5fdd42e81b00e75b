"""The functions that users call. They check the arguments; the queue and the loader do the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from smckpt.calls import alone, changed, checked
from smckpt.checkpoint.commits.choose import refuse_committed
from smckpt.checkpoint.commits.discover import FoundCheckpoint, latest
from smckpt.engine.events import LoadEvent, SaveEvent, Sink
from smckpt.engine.groups import coordinator_of, other_than_lowest
from smckpt.engine.load_plan import LoadOptions, LoadRequest
from smckpt.engine.runtime import Runtime
from smckpt.engine.saving.job import SaveHandle, SaveOptions, SaveRequest, Timings
from smckpt.errors import UsageError
from smckpt.meeting.group import Group, Membership, get_global_ranks, group_of
from smckpt.registry import BACKENDS
from smckpt.state_dict.modes import concrete
from smckpt.storage import Access, StoreOptions, access_to
from smckpt.storage.budget import Share
from smckpt.storage.preflight import refuse_save
from smckpt.storage.urls import Below, normal_url

if TYPE_CHECKING:
    from smckpt.checkpoint.commits.remove import RemoveReport

__all__ = [
    "LoadEvent",
    "LoadOptions",
    "SaveEvent",
    "SaveHandle",
    "SaveOptions",
    "Timings",
    "add_sink",
    "async_save",
    "get_global_ranks",
    "latest_checkpoint",
    "load",
    "maybe_finalize_async_calls",
    "prewarm",
    "remove",
    "save",
]

# One object for the process: SMP's functions take no handle, so the queues live here.
_RUNTIME = Runtime()


@alone()
@concrete()
def async_save(
    state_dict: MutableMapping[str, Any] | None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    coordinator_rank: int | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    no_dist: bool = False,
    step: int | None = None,
    options: SaveOptions | None = None,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> SaveHandle | None:
    """Copy the state into memory and return; write and commit it in the background.

    Runs no collective. All ranks of `process_group` call it, each with its own state. A process
    that is not a member returns None at once. If a save of the same queue is in flight, the call
    waits for it. Threads that save in one queue must do so in the same order on all ranks;
    otherwise give each thread a queue of its own (`SaveOptions(queue=)`).

    Args:
        state_dict: nested dicts, lists and tuples of tensors and values: what `sm_state_dict_type`
            gives, or DTensors, ShardedTensors and plain tensors.
        checkpoint_id: the group's directory. `storage_writer` may give it instead.
        process_group: the ranks that commit together; None: all ranks.
        coordinator_rank: the global rank that publishes; by default the lowest of the group. It
            must be the same in all saves of a queue.
        storage_writer: a `DistributedFileSystemWriter`; or any other DCP writer, with which DCP
            makes the save, with DCP's collectives.
        planner: a DCP save planner; DCP then plans, with its collectives.
        no_dist: this process saves alone, as in DCP: other ranks neither write nor wait.
        step: the training step to record. By default the integer under "step" in the state, if
            there is one.
        options: everything else: the queue, metadata, the groups of a step; see `SaveOptions`.
        storage: for s3:// ids: a `StoreOptions`, or a mapping of some of its fields that goes
            over the environment's. By default SMCKPT_S3_* and the AWS settings give them.

    Returns:
        A `SaveHandle`; None for a process that is not a member.

    Raises:
        UsageError, StateError: this call's arguments or state are wrong. Nothing is saved under
            this number.
        SaveFailedError: an *earlier* save was not committed. This call's save is nevertheless under
            way, on every rank. Or this one was not: in an exit handler that was registered before
            torch was imported, the call waits for it.
    """
    group = group_of(process_group, no_dist)
    if group is None:
        return None
    if _is_foreign(storage_writer, "DistributedFileSystemWriter") or planner is not None:
        known = SaveOptions()
        try:
            known = checked(SaveOptions, options)
            _directory(checkpoint_id, storage_writer, "storage_writer")
            _refuse_with_foreign(
                "DCP writer or planner",
                replace(known, queue="default"),
                step=step,
                coordinator_rank=other_than_lowest(group, coordinator_rank),
                storage=storage,
            )
        except Exception as error:
            _RUNTIME.queue(group, known.queue).meet(error)  # raises it, on all ranks
            raise
        begun: SaveHandle = BACKENDS["dcp"].save(
            _RUNTIME,
            group,
            state_dict,
            checkpoint_id,
            storage_writer,
            planner,
            process_group,
            queue=known.queue,
        )
        return begun
    refusal: Exception | None = None
    known = SaveOptions()
    try:
        known = checked(SaveOptions, options)
        directory = _directory(checkpoint_id, storage_writer, "storage_writer")
        if step is None and isinstance(state_dict, Mapping):
            found = state_dict.get("step")
            step = found if type(found) is int else None
        request = SaveRequest(
            directory=directory,
            coordinator=coordinator_of(group, coordinator_rank),
            step=step,
            options=known,
            access=_access(directory, storage, storage_writer),
        )
        if directory:
            refuse_save(request.storage, group.world_size)
        if directory and not getattr(storage_writer, "overwrite", True):
            _wait_for_own(directory)  # all ranks have the same saves in flight, so they agree
            refuse_committed(request.storage)
    except Exception as error:  # tell the peers, which count this save too, and then raise
        refusal, request = error, SaveRequest("", group.ranks[0], None, known, Access())
    handle = _RUNTIME.queue(group, known.queue).submit(state_dict, request, refusal)
    _RUNTIME.wait_in_handler(handle)
    return handle


def save(
    state_dict: MutableMapping[str, Any] | None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    **arguments: Any,
) -> SaveHandle | None:
    """`async_save`, then wait until it is committed.

    Raises:
        SaveFailedError: it was not committed. Every rank raises it, with the cause.
    """
    handle = async_save(state_dict, checkpoint_id=checkpoint_id, **arguments)
    if handle is None:
        return None
    group = group_of(arguments.get("process_group"), arguments.get("no_dist", False))
    assert group is not None
    _finalize(group.ranks, checked(SaveOptions, arguments.get("options")).queue)
    handle.wait()
    return handle


@alone("save")
def _finalize(ranks: tuple[int, ...], queue: str) -> None:
    for each in _RUNTIME.queues(ranks, queue):
        each.finalize(blocking=True)


@alone()
@concrete()
def prewarm(
    state_dict: Mapping[str, Any] | None = None,
    *,
    process_group: Any = None,
    options: SaveOptions | None = None,
) -> None:
    """Begin what the first save of a process waits for: start the worker, meet the other ranks, and
    get host memory for a state like this one, at half a second to a second for each GiB.

    All ranks that will save call it, after a load, or after the first step of an optimizer, which
    has no state before. It selects the state, compiles what an overlapped copy from its device
    needs, and returns; the rest goes on in threads, for which a save that comes earlier waits. If
    that fails, or the host has not twice as much memory, the first save does it again. Once a save
    of the queue has begun, the call does nothing.

    Args:
        state_dict: as the one to be saved. None: the worker and the meeting alone.
        process_group: as for the saves.
        options: as for the saves, of which the queue, the staging and what shapes the files count.

    Raises:
        UsageError, StateError: this state or these options cannot be saved.
    """
    known = checked(SaveOptions, options)
    if (group := group_of(process_group)) is not None:
        _RUNTIME.queue(group, known.queue).prewarm(state_dict, known)


@concrete()
def bytes_of(state_dict: Mapping[str, Any], process_group: Any, options: SaveOptions) -> int:
    """The bytes that this process writes in a save of this state, for a caller that saves the same
    dict next. That save does not take the state again."""
    if (group := group_of(process_group)) is None:
        return 0
    return _RUNTIME.queue(group, options.queue).bytes_of(state_dict, options)


@alone()
def maybe_finalize_async_calls(
    blocking: bool = True,
    process_group: Any = None,
    *,
    queue: str | None = None,
    timeout: float | None = None,
) -> list[int]:
    """Return the numbers of the saves committed since the last call. Raise if a save failed.

    With `process_group=None` it covers all queues of this process. `blocking=False` only looks at
    this rank and does not communicate. If nothing was ever saved, it does nothing.

    Raises:
        SaveFailedError: a save was not committed. Every rank raises it, with the cause.
    """
    ranks = None
    if process_group is not None:
        group = group_of(process_group)
        if group is None:
            return []
        ranks = group.ranks
    done: list[int] = []
    for each in _RUNTIME.queues(ranks, queue):
        done += each.finalize(blocking, timeout)
    return done


def membership(group: Group, name: str) -> Membership:
    """This process as a member of `group`, for what else than saves and loads its ranks meet."""
    return _RUNTIME.membership(group, name)


def leave_queue(queue: str, timeout: float) -> None:
    """End a queue, in which this process saves no more. Its peers hear so."""
    _RUNTIME.drop(queue, timeout)


def add_sink(sink: Sink) -> Callable[[], None]:
    """Call `sink` for every save and load of this process that ends from now on.

    Args:
        sink: called with a `SaveEvent` in the queue's thread, a moment after the handle is done, or
            with a `LoadEvent` in the caller's thread. An exception in it is logged and changes
            nothing. It should be quick, because the next save of the queue waits for it.

    Returns:
        A function that removes the sink.
    """
    return _RUNTIME.sinks.add(sink)


@alone()
@concrete()
def load(
    state_dict: MutableMapping[str, Any] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    process_group: Any = None,
    coordinator_rank: int | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    no_dist: bool = False,
    check_keys_matched: bool | Literal["target"] = True,
    options: LoadOptions | None = None,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> MutableMapping[str, Any] | None:
    """Fill `state_dict` from the newest commit at `checkpoint_id`. Without a `state_dict`, return
    the whole saved state.

    Live tensors are filled in place. Values that are not tensors go into the dict, and into the
    live optimizers whose state it holds. Structure, shapes, dtypes and coverage are checked on all
    ranks before a tensor is changed. Runs no collective.

    Args:
        state_dict: the target, made in the same way as the saved one. Its top keys say what to
            load: `{"model": …}` loads the model alone. The content of each key must match, and
            tensors at the top belong together. None: `load` makes the containers as they were
            saved, with whole tensors on the CPU, by name.
        checkpoint_id: for a LOCAL load the group's directory; for any other the directory above the
            groups' directories, or that of a single group. `storage_reader` may give it instead.
        process_group: the ranks that load together; None: all ranks.
        coordinator_rank: accepted for SMP scripts, without effect: the lowest rank of the group
            looks.
        storage_reader: a `DistributedFileSystemReader`; or another DCP reader, with which DCP
            loads.
        planner: a DCP load planner; DCP then plans, with its collectives. A directory that DCP
            itself wrote is read too, if it is on a disk.
        no_dist: this process loads alone, as in DCP.
        check_keys_matched: False loads the names that both sides have, and logs the others.
            "target": all names of the target must be saved; what else is saved is left, as in DCP.
        options: everything else: a part of the state, other names, the groups of a step; see
            `LoadOptions`.
        storage: as for `async_save`.

    Returns:
        `state_dict`, or the new state; None for a process that is not a member of `process_group`.

    Raises:
        CheckpointNotFoundError, KeysMismatchError, TensorMismatchError, TopologyError: raised
            before anything is changed. CorruptCheckpointError: a block is damaged; the message
            names file and offset. Every rank raises it, and the targets are undefined, unless
            `LoadOptions(preverify=True)` was given. CheckpointReplacedError: newer saves replaced
            the checkpoint three times while it was read. After the first and second time the load
            starts again by itself.
    """
    group = group_of(process_group, no_dist)
    if group is None:
        return None
    if _is_foreign(storage_reader, "DistributedFileSystemReader") or planner is not None:
        refusal: Exception | None = None
        try:
            _wait_for_own(_directory(checkpoint_id, storage_reader, "storage_reader"))
            coordinator_of(group, coordinator_rank)
            _refuse_with_foreign(
                "DCP reader or planner",
                checked(LoadOptions, options),
                check_keys_matched=None if check_keys_matched is True else check_keys_matched,
                storage=storage,
            )
            if state_dict is None:
                raise UsageError(
                    "a DCP reader or planner needs a target to fill, and there is none",
                    remedy="pass a state_dict",
                )
        except Exception as error:  # tell the peers, which count this load too, and then raise
            refusal = error
        loaded: MutableMapping[str, Any] = BACKENDS["dcp"].load(
            _RUNTIME, state_dict, checkpoint_id, storage_reader, planner, process_group, no_dist,
            refusal,
        )  # fmt: skip
        return loaded
    known = LoadOptions()
    try:
        known = checked(LoadOptions, options)
        directory = _directory(checkpoint_id, storage_reader, "storage_reader")
        coordinator_of(group, coordinator_rank)
        _wait_for_own(directory)
        access = _access(directory, storage, storage_reader)
        request = LoadRequest(
            directory=directory,
            access=access.holding(Share.of_rank(group.rank, group.world_size)),
            keys=check_keys_matched,
            options=known,
        )
        request.refuse_target(state_dict)
    except Exception as error:  # tell the peers, which count this load too, and then raise
        request = LoadRequest("", Access(), True, known, refusal=error)
    return _RUNTIME.loader(group).load(state_dict, request)


@alone()
def latest_checkpoint(
    root: str | os.PathLike[str],
    *,
    process_group: Any = None,
    timeout: float = 1800.0,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> FoundCheckpoint | None:
    """Find the newest complete step under `root`; None if there is none.

    All ranks of `process_group` call it. One rank looks and sends the result to the others through
    the store. Unfinished, half-written and foreign directories are skipped.

    Raises:
        StorageError: the store as a whole fails, or can read none of the checkpoints. All ranks
            raise it. One that cannot be read is skipped, with a warning in the log.
    """
    group = group_of(process_group)
    if group is None:
        return None
    access = access_to(root, storage=storage)
    top = access.open(root)
    return _RUNTIME.loader(group).find(lambda: latest(top), timeout)


@alone()
def remove(
    checkpoint_id: str | os.PathLike[str],
    *,
    storage: StoreOptions | Mapping[str, Any] | None = None,
) -> RemoveReport:
    """Remove the newest committed checkpoint in a directory: the files that its manifests name.
    Only one process calls it.

    It deletes the record and manifests first, so a removal that is cut short leaves no half
    checkpoint. Call it again then: it finishes that one, and removes no older checkpoint.

    Args:
        checkpoint_id: the directory that the group saved to. For a step of several groups, the
            directory above theirs.
        storage: as for `async_save`.

    Returns:
        What was removed, and the older commit that is the newest there now, if there is one.

    Raises:
        CheckpointNotFoundError: nothing committed is there.
        CheckpointPinnedError: a reader holds it (`smckpt.pinned`).
        CheckpointReplacedError: a newer save has just replaced it.
        UsageError: it is one group of a step, or a save of this process to it is in flight.
        StorageError: the store refused. CorruptCheckpointError, FormatVersionError: the commit
            cannot be read, so its files are not known.
    """
    directory = _url(checkpoint_id, "checkpoint_id")
    if flying := _RUNTIME.in_flight(directory):
        raise UsageError(
            f"save {flying[0].number} of this process is still under way there",
            remedy="wait for its handle first",
            path=directory,
        )
    access = access_to(directory, storage=storage)
    from smckpt.checkpoint.commits.remove import remove_newest  # no save or load needs it

    return remove_newest(access.open(directory))


def _access(directory: str, storage: StoreOptions | Mapping[str, Any] | None, other: Any) -> Access:
    """The access to the directory. `other` is a reader or writer of ours, or None."""
    own = getattr(other, "access", None)
    return access_to(directory, storage=storage, own=own if isinstance(own, Access) else None)


def _directory(checkpoint_id: Any, other: Any, argument: str) -> str:
    """The directory from `checkpoint_id` or from a reader or writer; "" if neither has one."""
    path = getattr(other, "checkpoint_id", None) or getattr(other, "path", None)
    theirs = _url(path, argument) if path else ""
    ours = _url(checkpoint_id, "checkpoint_id") if checkpoint_id else ""
    if ours and theirs and ours != theirs:
        raise UsageError(
            f"checkpoint_id is {ours}, but {argument} is for {theirs}",
            remedy="pass one of the two, or the same path in both",
            path=ours,
        )
    return ours or theirs


def _url(path: Any, argument: str) -> str:
    text = path if isinstance(path, str) else getattr(path, "__fspath__", lambda: None)()
    if not isinstance(text, str):
        raise UsageError(
            f"{argument} is {path!r}, which is a {type(path).__name__} and not a path",
            remedy="pass a path or an s3:// URL, as text or as an os.PathLike",
        )
    return Below(normal_url(text), text.named) if isinstance(text, Below) else normal_url(text)


def _wait_for_own(directory: str) -> None:
    """Wait for the saves of this process to the directory, so that a load finds them. The timeouts
    of the save's stages bound the wait. A failed save is reported at the usual place."""
    for handle in _RUNTIME.in_flight(directory) if directory else ():
        handle.ended()


def _is_foreign(other: Any, ours: str) -> bool:
    return other is not None and all(kind.__name__ != ours for kind in type(other).__mro__)


def _refuse_with_foreign(with_what: str, options: SaveOptions | LoadOptions, **given: Any) -> None:
    names = [f"{type(options).__name__}({name}=)" for name in changed(options)]
    names += [f"{name}=" for name, value in given.items() if value not in (None, {})]
    if names:
        raise UsageError(
            f"{', '.join(names)} has no effect together with a {with_what}",
            remedy="leave it out, or use DistributedFileSystemWriter and "
            "DistributedFileSystemReader without a planner",
        )
