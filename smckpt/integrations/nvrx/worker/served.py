"""The worker: a spawned process with torch that runs one function after the other.

It is a process of its own for each caller, and ends with the trainer, even in the middle of a
function: what a killed trainer was writing must not go on beside the restarted one.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import select
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from smckpt.integrations.nvrx.worker.snapshot import SnapshotRanges, restored
from smckpt.storage.disk.linux import lower_priority

__all__ = ["CallEnded", "CallFailed", "Ready", "Run", "serve"]


@dataclass(frozen=True)
class Run:
    """To the worker: run a request, which lies in the arena of that number.

    size: of an arena that is new to the worker; its descriptor follows. gone: arenas to forget.
    """

    number: int
    arena: int
    place: SnapshotRanges
    size: int | None
    gone: tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """From the worker, once: it has imported the trainer's script, and takes requests."""


@dataclass(frozen=True)
class CallEnded:
    """From the worker: the function has ended, with what it put into each results queue."""

    number: int
    results: list[list[Any]]


@dataclass(frozen=True)
class CallFailed:
    """From the worker: the function raised."""

    number: int
    error: str
    trace: str


def serve(
    messages: Connection, stop: Connection, niceness: int | None, io_class: int | None
) -> None:
    """Run requests until the trainer sends None, or ends.

    Args:
        stop: readable once the trainer has asked for an end by SIGTERM.
        niceness: of this process, 0 to 19; never less than it has.
        io_class: 0 to 3, as of `ionice -c`.
    """
    # Ctrl-C and a batch system's SIGTERM go to every process of the job. The trainer may still want
    # to save; this process ends when the trainer does, or when it asks.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _end_if_asked(stop))
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    lower_priority(niceness, io_class)
    arenas: dict[int, mmap.mmap] = {}
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer closed its end
        messages.send(Ready())
        while (call := messages.recv()) is not None:
            for number in call.gone:
                del arenas[number]
            if call.size is not None:
                fd = recv_handle(messages)
                arenas[call.arena] = mmap.mmap(fd, call.size)
                os.close(fd)
            answer = _answer(call, arenas[call.arena])
            gc.collect()  # the next save may use the arena: nothing refers to it
            try:
                messages.send(answer)
            except (TypeError, AttributeError, ValueError) as error:  # what it put has no pickle
                messages.send(CallFailed(call.number, f"its results cannot be sent: {error}", ""))


def _answer(call: Run, memory: mmap.mmap) -> CallEnded | CallFailed:
    try:
        request, outboxes = restored(memory, call.place)
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()  # NVRx's contract: the second argument
        request.async_fn(*arguments, **(request.async_fn_kwargs or {}))
        return CallEnded(call.number, [list(box) for box in outboxes])
    except Exception as error:
        return CallFailed(call.number, f"{type(error).__name__}: {error}", traceback.format_exc())


def _end_if_asked(stop: Connection) -> None:
    if stop.poll(0):
        raise SystemExit(128 + signal.SIGTERM)  # the function's `finally` blocks run


def _end_with_trainer() -> None:
    """End this process when the trainer has ended, however it did.

    multiprocessing's own sentinel is a pipe, which ends only when every child that the trainer
    forked has ended too.
    """
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    poll = select.poll()
    try:
        assert trainer.pid is not None
        poll.register(os.pidfd_open(trainer.pid), select.POLLIN)
    except (AttributeError, OSError):  # before Linux 5.3; or it has ended
        poll.register(trainer.sentinel, select.POLLIN)
    if os.getppid() == trainer.pid:
        poll.poll()
    os._exit(0)
