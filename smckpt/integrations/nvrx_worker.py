"""The worker of a queue of NVRx: a spawned process with torch that runs one function after the
other; and the trainer's side, which starts it, sends it requests and hears of their ends.

It is a process of its own for each caller, and ends with the trainer, even in the middle of a
function: what a killed trainer was writing must not go on beside the restarted one.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from smckpt.errors import CheckpointError, SaveFailedError, UsageError, WorkerError
from smckpt.integrations.nvrx_snapshot import ResultsQueue, SnapshotRanges, restored, taken
from smckpt.staging.arena import Arena
from smckpt.storage.disk.linux import lower_priority

log = logging.getLogger("smckpt")

_GUARD = (
    'put the start of the script under `if __name__ == "__main__":`, because the worker imports '
    "the script for its functions; the worker's traceback, further up, says what failed"
)


@dataclass(frozen=True)
class Run:
    """To the worker: run a request, which lies in the arena of that number.

    size: of an arena that is new to the worker; its descriptor follows. gone: arenas to forget.
    """

    number: int
    arena: int
    ranges: SnapshotRanges
    size: int | None
    gone: tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """From the worker, once: it has imported the trainer's script, and takes requests."""


@dataclass(frozen=True)
class CallEnded:
    """From the worker: the function has ended, with what it put into each results queue; or has
    raised `error`."""

    number: int
    results: list[list[Any]] = field(default_factory=list)
    error: str = ""
    trace: str = ""


@dataclass
class Call:
    """A request under way. ended: whether its function has; error: why it failed."""

    queues: tuple[ResultsQueue, ...] = ()
    arena: int = -1
    ended: bool = False
    error: CheckpointError | None = None


@dataclass
class _Alive:
    """A started process: its pipe, the pipe that says an end is wanted, and a pidfd of it.

    arenas: by number. free: those that no call uses. known, gone: those that the process has, and
    those that it should forget. ready: whether it has imported the script and serves requests.
    """

    process: Any
    messages: connection.Connection
    stop: connection.Connection
    pidfd: int | None
    arenas: dict[int, Arena] = field(default_factory=dict)
    free: deque[int] = field(default_factory=deque)
    known: set[int] = field(default_factory=set)
    gone: list[int] = field(default_factory=list)
    made: int = 0
    ready: bool = False

    def watched(self) -> list[Any]:
        return [self.messages, self.process.sentinel if self.pidfd is None else self.pidfd]

    def room(self, size: int) -> int:
        """The number of a free arena that is large enough, or of a new one. Smaller ones go."""
        while self.free:
            number = self.free.popleft()
            if self.arenas[number].size >= size:
                return number
            self.arenas.pop(number).close()
            if number in self.known:
                self.known.remove(number)
                self.gone.append(number)
        self.made += 1
        self.arenas[self.made] = Arena(max(size, 1))
        return self.made

    def send(self, number: int, arena: int, ranges: SnapshotRanges) -> None:
        new = None if arena in self.known else self.arenas[arena]
        size = None if new is None else new.size
        self.messages.send(Run(number, arena, ranges, size, tuple(self.gone)))
        self.gone.clear()
        if new is not None:
            send_handle(self.messages, new.fd, self.process.pid)
            self.known.add(arena)


class PersistentAsyncCaller:
    """The worker of a queue, under NVRx's name. It starts with the first request, and again after
    its death.

    Args:
        is_daemon: as of multiprocessing: such a process may start none of its own.
        cpu_priority, io_priority: niceness and class of I/O of the worker; None leaves them.
        sigterm_timeout: seconds from SIGTERM to SIGKILL, where it is ended in the middle of its
            work.
        cpu_shm_mode: either value: tensors always go to the worker through host memory.

    Raises:
        UsageError: a value out of its range.
    """

    def __init__(
        self,
        is_daemon: bool = True,
        cpu_priority: int | None = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        if cpu_priority is not None and cpu_priority not in range(20):
            raise UsageError(f"cpu_priority={cpu_priority!r}", remedy="pass 0 to 19, or None")
        if io_priority is not None and io_priority not in range(4):
            raise UsageError(
                f"io_priority={io_priority!r}", remedy="pass 3 (idle), or None to leave it"
            )
        if sigterm_timeout < 0:
            raise UsageError(f"sigterm_timeout={sigterm_timeout}", remedy="pass seconds >= 0")
        self.options = (is_daemon, cpu_priority, io_priority, sigterm_timeout)
        self._alive: _Alive | None = None
        self._calls: dict[int, Call] = {}
        self._number = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        return self._alive is not None and bool(self._alive.process.is_alive())

    def _debug_is_async_process_running(self) -> bool:  # NVRx's own tests ask
        return self.running

    def start(self) -> None:
        """Start the process, if it is not running; returns before it is ready."""
        with self._lock:
            self._started()

    def run(self, request: Any) -> Call:
        """Copy a request and have its function run after those before it.

        Raises:
            UsageError, MemoryBudgetError: as `taken`.
            WorkerError: the process cannot be started.
        """
        with self._lock:
            self._hear(0.0)
            alive = self._started()
            chosen: list[int] = []

            def arena_of(size: int) -> Arena:
                chosen.append(alive.room(size))
                return alive.arenas[chosen[0]]

            try:
                ranges, queues = taken(request, arena_of)
            except BaseException:
                alive.free.extend(chosen)
                raise
            self._number += 1
            call = self._calls[self._number] = Call(queues, chosen[0])
            try:
                alive.send(self._number, call.arena, ranges)
            except OSError:  # it died before
                self._lost()
            return call

    def wait(self, call: Call, seconds: float | None) -> bool:
        """Whether the function has ended, well or not, within so many seconds. A dead worker ends
        all its calls. None waits as long as the worker lives."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            while not call.ended:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                if not self._hear(left) and left is not None:
                    break
            return call.ended

    def close(self, *, abort: bool = False, seconds: float | None = None) -> None:
        """End the process: after its calls, or at once. A later request starts another.

        Args:
            seconds: how long its calls may take; None: as long as they need.
        """
        if os.getpid() != self._pid:  # a forked child: the worker is the parent's
            self._alive = None
            return
        with self._lock:
            if (alive := self._alive) is None:
                return
            if abort:
                self._kill(alive)
                return
            if not self._calls and not alive.ready:
                self._kill(alive)  # it may need a minute to import what it will not use
                return
            try:
                alive.messages.send(None)
                deadline = None if seconds is None else time.monotonic() + seconds
                while self._alive is alive:  # its last answers come before its end
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        self._kill(alive)
                        return
                    self._hear(left)
            except OSError:
                self._lost()

    # -- the process ---------------------------------------------------------------------------

    def _started(self) -> _Alive:
        if self._alive is not None and os.getpid() == self._pid:
            return self._alive
        if os.getpid() != self._pid:
            raise WorkerError(
                "a forked child cannot use the worker, which belongs to the parent process",
                remedy="make an AsyncCallsQueue in the child",
            )
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        stopped, stop = context.Pipe(duplex=False)
        is_daemon, niceness, io_class, _ = self.options
        process = context.Process(
            target=_serve,
            args=(theirs, stopped, niceness, io_class),
            daemon=is_daemon,
            name="smckpt-nvrx",
        )
        try:
            process.start()
        except OSError as error:
            raise WorkerError(
                f"the worker could not be started: {error}",
                remedy="check the limits on processes and memory (ulimit -u, the cgroup)",
            ) from error
        except RuntimeError as error:  # multiprocessing's: this is a worker that imports the script
            ours.close()
            stop.close()
            raise UsageError("the script saves while a worker imports it", remedy=_GUARD) from error
        finally:
            theirs.close()
            stopped.close()
        pidfd = None
        with contextlib.suppress(AttributeError, OSError):  # macOS, Linux before 5.3: the sentinel
            pidfd = os.pidfd_open(process.pid or 0)
        self._alive = _Alive(process, ours, stop, pidfd)
        return self._alive

    def _hear(self, seconds: float | None) -> bool:
        """Take the worker's next answer, or its death, if one comes within so many seconds."""
        if (alive := self._alive) is None:
            return False
        ready = connection.wait(alive.watched(), seconds)
        if not ready:
            return False
        try:
            # answers that it sent before it died come first
            answer = alive.messages.recv() if alive.messages in ready else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            self._lost()
            return True
        if isinstance(answer, Ready):
            alive.ready = True
            return True
        call = self._calls.pop(answer.number)
        alive.free.append(call.arena)
        for results, given in zip(call.queues, answer.results, strict=False):
            for one in given:
                results.put(one)
        if answer.error:
            log.error("a function failed in the worker:\n%s", answer.trace or answer.error)
            call.error = SaveFailedError(
                f"the function failed in the worker: {answer.error}",
                remedy="see its traceback in the log of this rank, and save again",
            )
        call.ended = True
        return True

    def _kill(self, alive: _Alive) -> None:
        try:
            alive.stop.send_bytes(b"stop")
            alive.process.terminate()
            alive.process.join(self.options[-1])
            if alive.process.is_alive():
                log.warning("the worker did not end within sigterm_timeout; it is killed")
        except OSError:
            pass  # it has ended
        alive.process.kill()
        self._lost(asked=True)

    def _lost(self, *, asked: bool = False) -> None:
        """The process has ended: so have its calls, and its arenas are free."""
        if (alive := self._alive) is None:
            return
        self._alive = None
        alive.process.join()
        code = alive.process.exitcode
        alive.messages.close()
        alive.stop.close()
        if alive.pidfd is not None:
            os.close(alive.pidfd)
        for arena in alive.arenas.values():
            arena.close()
        again = "save again: the next save starts a new worker"
        if asked:
            what, remedy = "the worker was ended before it had written this save", again
        elif not alive.ready and code is not None and code >= 0:
            what, remedy = f"the worker could not import the script (exit status {code})", _GUARD
        else:
            at = "while it wrote this save" if alive.ready else "before it was ready"
            what = f"the worker died {at} (exit status {code})"
            remedy = again + ("; the kernel may have killed it for memory" if code == -9 else "")
        for call in self._calls.values():
            call.ended = True
            call.error = WorkerError(what, remedy=remedy)
        self._calls.clear()


# -- in the worker -----------------------------------------------------------------------------


def _serve(
    messages: connection.Connection,
    stop: connection.Connection,
    niceness: int | None,
    io_class: int | None,
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

    def end(*_: object) -> None:
        if stop.poll(0):
            raise SystemExit(128 + signal.SIGTERM)  # the function's `finally` blocks run

    signal.signal(signal.SIGTERM, end)
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
                unsent = f"its results cannot be sent: {error}"
                messages.send(CallEnded(call.number, error=unsent))


def _answer(call: Run, memory: mmap.mmap) -> CallEnded:
    try:
        request, outboxes = restored(memory, call.ranges)
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()  # NVRx's contract: the second argument
        request.async_fn(*arguments, **(request.async_fn_kwargs or {}))
        return CallEnded(call.number, [list(box) for box in outboxes])
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        return CallEnded(call.number, error=raised, trace=traceback.format_exc())


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
