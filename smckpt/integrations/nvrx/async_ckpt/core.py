"""Requests, and the queue that has them run in a worker and finalizes them on all ranks."""

from __future__ import annotations

import logging
import os
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from smckpt.engine.saving.job import SaveHandle, Timings
from smckpt.errors import CheckpointError, SaveFailedError, UsageError, as_checkpoint_error
from smckpt.integrations.nvrx_worker import Call, PersistentAsyncCaller
from smckpt.meeting.round import alone, over_group

__all__ = [
    "AsyncCallFailedError",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PendingSave",
    "PersistentAsyncCaller",
    "abort_nvrx_checkpoint",
]

log = logging.getLogger("smckpt")


class AsyncCallFailedError(SaveFailedError, CheckpointException):
    """A call failed on a rank; raised on every rank. Code that catches DCP's error catches it."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error.message, remedy=error.remedy, path=error.path, rank=error.rank)
        self.host = error.host
        self._failures = {error.rank: (error, traceback.StackSummary())}


class AsyncRequest(NamedTuple):
    """A function to run in the worker, and what follows when it has ended on all ranks.

    async_fn: of an importable module, or of the script; None: nothing to do on this rank.
    async_fn_args: copied, tensors included, by `schedule_async_request`. finalize_fns: run on the
    trainer, in order. preload_fn: gives the second argument of `async_fn`; it runs in the worker,
    on copies.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Any
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """
        Raises:
            RuntimeError: the request was scheduled, or frozen.
        """
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Do in this process, at once, what a queue does in the background."""
        arguments = list(self.async_fn_args)
        if self.preload_fn is not None:
            arguments[1] = self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*arguments, **(self.async_fn_kwargs or {}))
        if dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run the finalize functions; returns `call_idx`.

        Args:
            validate_matching_call_idx: refuse it where another rank finalizes another call.
        """
        for function in self.finalize_fns:
            function()
        if validate_matching_call_idx:
            _agreed(0, 0, self.call_idx)
        return self.call_idx


class PendingSave:
    """As the function of a request: waits for a save that this process makes, and no worker. It is
    its own caller.

    Args:
        handle: an error: the save could not begin on this rank.
    """

    def __init__(self, handle: SaveHandle | CheckpointError) -> None:
        self._handle = handle

    def __call__(self) -> None:
        if isinstance(self._handle, CheckpointError):
            raise self._handle
        self._handle.result()

    def wait(self, call: Call, seconds: float | None) -> None:
        if isinstance(self._handle, CheckpointError):
            call.ended, call.error = True, self._handle
        elif self._handle.ended(seconds):
            call.ended, call.error = True, self._handle.error
            self._handle.failure_seen = True

    def close(self, *, abort: bool = False) -> None:
        """The save ends by itself."""


class _Active(NamedTuple):
    idx: int
    async_caller: PersistentAsyncCaller | PendingSave | None
    async_request: AsyncRequest
    call: Call


class AsyncCallsQueue:
    """Runs requests in a worker of this rank, one after the other, and finalizes them in order.

    Args:
        persistent: one worker for all requests. Otherwise each request starts one of its own.
        others: of `PersistentAsyncCaller`.

    Raises:
        UsageError: a value out of its range.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int | None = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        self.async_calls: deque[_Active] = deque()
        self.call_idx = -1
        self.persistent = persistent
        self.cpu_shm_mode = cpu_shm_mode
        self.persistent_caller: PersistentAsyncCaller | None = None
        self._pid = os.getpid()
        self._options = (is_daemon, cpu_priority, io_priority, sigterm_timeout)
        PersistentAsyncCaller(*self._options)  # refuses a value now
        _queues().known.add(self)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int | None = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Start a worker now, for the first request of a queue with the same arguments."""
        caller = PersistentAsyncCaller(is_daemon, cpu_priority, io_priority, sigterm_timeout)
        caller.start()
        before, _queues().warm = _queues().warm, caller
        if before is not None:
            before.close()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Copy the request and have it run in the background; all ranks call this.

        Returns:
            The number of the call, from 0.

        Raises:
            UsageError: the request cannot be pickled.
            MemoryBudgetError: the host has no memory for the copy.
        """
        request = async_request
        if not isinstance(request, AsyncRequest):  # of the package that this stands for
            request = AsyncRequest(**request._asdict())
        idx = self.call_idx + 1
        request = request.freeze()._replace(call_idx=idx)
        caller: PersistentAsyncCaller | PendingSave | None = None
        call = Call(ended=True)
        if isinstance(request.async_fn, PendingSave):
            caller, call = request.async_fn, Call()
        elif request.async_fn is not None:
            caller = self._get_async_caller()
            call = caller.run(request._replace(finalize_fns=[]))
        self.call_idx = idx
        self.async_calls.append(_Active(idx, caller, request, call))
        return idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Run the finalize functions of the calls that have ended, in order.

        Args:
            blocking: wait for all calls.
            no_dist: look at this rank's worker alone. Otherwise all ranks call this, and a call has
                ended when it has on all of them.

        Returns:
            The numbers of the calls that were finalized.

        Raises:
            AsyncCallFailedError: a call failed; on every rank, unless `no_dist`. It is not
                finalized, and is told once.
            CheckpointException: DCP's, by `save_state_dict_async_finalize`.
        """
        finalized: list[int] = []
        while self.async_calls:
            active = self.async_calls[0]
            call = active.call
            if active.async_caller is not None:
                active.async_caller.wait(call, None if blocking else 0.0)
            # results queues carry an error to the finalize functions of all ranks: then it is no
            # failure of the call
            running, failed = not call.ended, call.error is not None and not call.queues
            if not no_dist:
                running, failed = _agreed(running, failed, active.idx)
            if running:
                break
            self.async_calls.popleft()
            if not self.persistent and active.async_caller is not None:
                active.async_caller.close()
            if failed:
                _raise_failure(active, no_dist)
            for results in call.queues if call.error is not None else ():
                results.put(call.error)
            active.async_request.execute_finalize_fns(validate_matching_call_idx=False)
            if call.error is not None and any(not results.empty() for results in call.queues):
                raise AsyncCallFailedError(call.error) from call.error  # nobody has looked
            finalized.append(active.idx)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all calls and end the worker. A later request starts another.

        Args:
            abort: end the worker in the middle of its work, and forget its calls. No rank waits for
                another.
        """
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
        self._end(abort)
        self.call_idx = -1

    def __del__(self) -> None:
        # No collective here: garbage is collected at another moment on each rank.
        if hasattr(self, "_options"):
            lost = self.end(None)
            for handle in lost:
                log.error("%s", handle.failure())
            if lost:
                _queues().lost += lost

    def end(self, timeout: float | None) -> list[SaveHandle]:
        """End without the other ranks: wait for the worker, finalize nothing.

        Returns:
            The calls that failed, or have finalize functions that never ran.
        """
        if os.getpid() != self._pid:  # a forked child: the calls are the parent's
            return []
        deadline = None if timeout is None else time.monotonic() + timeout
        left = [active for active in self.async_calls if not active.call.ended]
        for active in left:
            if active.async_caller is not None:
                seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                active.async_caller.wait(active.call, seconds)
        handles = []
        for active in self.async_calls:
            if (error := _lost(active)) is not None:
                handle = SaveHandle(active.idx, error.path or "an async call of NVRx", None)
                handle.finish(Timings(0.0, 0.0, 0.0, 0.0, 0.0, 0), as_checkpoint_error(error))
                handles.append(handle)
        self._end(abort=bool(timeout is not None and not all(a.call.ended for a in left)))
        return handles

    def _get_async_caller(self) -> PersistentAsyncCaller:
        if not self.persistent:
            return PersistentAsyncCaller(*self._options)
        if self.persistent_caller is None:
            fresh = PersistentAsyncCaller(*self._options)
            warm, _queues().warm = _queues().warm, None
            if warm is not None and warm.running and warm.options == fresh.options:
                fresh = warm
            self.persistent_caller = fresh
        return self.persistent_caller

    def _end(self, abort: bool) -> None:
        callers = {id(a.async_caller): a.async_caller for a in self.async_calls}
        callers[id(self.persistent_caller)] = self.persistent_caller
        for caller in callers.values():
            if caller is not None:
                caller.close(abort=abort)
        if abort and self.async_calls:
            log.warning("%d async calls were aborted", len(self.async_calls))
        self.async_calls.clear()
        self.persistent_caller = None


def abort_nvrx_checkpoint() -> None:
    """End the workers of all queues of this process in the middle of their work."""
    for queue in list(_queues().known):
        queue.close(abort=True)
    if (warm := _queues().warm) is not None:
        _queues().warm = None
        warm.close(abort=True)


class _Queues:
    """The queues of this process. At its end they are waited for, as saves of smckpt are."""

    flying = None  # no save of smckpt

    def __init__(self) -> None:
        self.known: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()
        self.warm: PersistentAsyncCaller | None = None
        self.lost: list[SaveHandle] = []  # of queues that are gone; they make the exit status 1

    def finalize(self, blocking: bool, timeout: float | None = None) -> list[int]:
        """Their own `maybe_finalize_async_calls` does that."""
        return []

    def close(self, timeout: float) -> list[SaveHandle]:
        warm, self.warm = self.warm, None
        if warm is not None:
            warm.close(seconds=timeout)
        deadline = time.monotonic() + timeout
        lost, self.lost = self.lost, []
        return lost + [
            handle
            for queue in list(self.known)
            for handle in queue.end(max(deadline - time.monotonic(), 0.0))
        ]


def _queues() -> _Queues:
    from smckpt.engine.api import _RUNTIME  # it waits for what ends with the process

    found = _RUNTIME.adopt("nvrx", (), _Queues)
    assert isinstance(found, _Queues)
    return found


def _raise_failure(active: _Active, no_dist: bool) -> NoReturn:
    """
    Raises:
        AsyncCallFailedError: of the call, here or, unless `no_dist`, of the first rank.
    """

    def bring() -> None:
        if active.call.error is not None:
            raise active.call.error

    try:
        (alone() if no_dist else over_group()).round("nvrx", bring, lambda brought: brought())
    except CheckpointError as error:
        raise AsyncCallFailedError(error) from error
    raise AssertionError("never reached")


def _lost(active: _Active) -> CheckpointError | None:
    """Why the work of a call that was never finalized is lost, if it is."""
    if active.call.error is not None:
        return active.call.error
    if not active.call.ended:
        return SaveFailedError("the worker was still writing", remedy="wait longer at the end")
    if active.async_request.finalize_fns:
        return SaveFailedError(
            f"async call {active.idx} has ended, but was never finalized",
            remedy="call maybe_finalize_async_calls(blocking=True) before the program ends",
        )
    return None


def _agreed(running: int, failed: int, idx: int) -> tuple[bool, bool]:
    """Whether a call runs, or has failed, on any rank: one collective.

    Raises:
        UsageError: the ranks are at different calls.
    """
    if not dist.is_initialized():
        return bool(running), bool(failed)
    backend = dist.Backend.backend_capability.get(dist.get_backend(), [])
    device = "cpu" if "cpu" in backend else torch.accelerator.current_accelerator()
    status = torch.tensor([int(running), int(failed), idx, -idx], dtype=torch.int64, device=device)
    dist.all_reduce(status, op=dist.ReduceOp.MAX)
    on_any, broken, highest, lowest = status.tolist()
    if highest != -lowest:
        raise UsageError(
            f"this rank is at async call {idx}, others at {-lowest} to {highest}",
            remedy="schedule the same calls, in the same order, on all ranks; a rank without data "
            "passes async_fn=None. Or pass no_dist=True",
        )
    return bool(on_any), bool(broken)
