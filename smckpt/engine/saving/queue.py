"""A queue of saves: their order, the thread that commits them, and how failures are reported."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from smckpt.calls import started, undisturbed
from smckpt.engine.background.worker_client import Worker
from smckpt.engine.events import SaveEvent, Sinks, telling
from smckpt.engine.groups import Partition
from smckpt.engine.saving.commit import Committed, Committer, Written
from smckpt.engine.saving.differing import ranks_text, refuse_different
from smckpt.engine.saving.job import (
    SaveHandle,
    SaveJob,
    SaveOptions,
    SaveRequest,
    SavesOfGroup,
    bytes_text,
)
from smckpt.engine.saving.moment import Moment, moment_read
from smckpt.engine.saving.save import Saver
from smckpt.errors import CheckpointError, UsageError, as_checkpoint_error
from smckpt.layout.entries import Path
from smckpt.meeting.group import Membership
from smckpt.meeting.round import Round
from smckpt.staging.arena import beside_captures
from smckpt.staging.overlap import Overlap

LEAVE_SECONDS = 30.0  # seconds in which a thread ends, and in which peers leave the store's host

IDLE_SECONDS = 1.0  # how often an idle queue looks whether its process group still exists

log = logging.getLogger("smckpt")

_Staged = tuple[SaveJob, Callable[[], Committed]]


class SaveQueue(SavesOfGroup):
    """The saves of one group, in order. One save is in flight at a time.

    It owns its thread, its worker process and its arena, and closes them.

    Args:
        since: see `Committer`.
        sinks: they get an event for every save that has ended.
        overlap: of all queues of the process.
    """

    def __init__(
        self, membership: Membership, name: str, since: int, sinks: Sinks, overlap: Overlap
    ) -> None:
        group = membership.group
        super().__init__(group)
        self.name = name
        self.membership = membership
        self._sinks = sinks
        self._worker = Worker()
        self._committer = Committer(self.membership, self._worker, since)
        self._saver = Saver(group, self._worker, self._committer, overlap)
        self._calls = 0
        self._skipped = 0  # saves of the others that this rank did not make
        self._stays = group.world_size > 1  # others may expect another save
        self._meets: float | None = None  # seconds in which ranks meet before the first save
        self._job: SaveJob | None = None  # that the thread works on
        self._failures = 0
        self._durable: float | None = None  # when the state of the newest committed save was taken
        self._front = threading.Lock()  # only one thread uses the arena at a time
        self._inbox: queue.SimpleQueue[_Staged | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reserving: threading.Thread | None = None
        self._pinning = threading.Lock()  # held while its thread calls CUDA

    # -- the front: called by the training thread -------------------------------------------

    def prewarm(self, state_dict: Mapping[str, Any] | None, options: SaveOptions) -> None:
        """Start the worker, and the threads in which the ranks meet and the memory for this state
        is provided. A failure there is that of the first save, which tries again."""

        def provide() -> None:
            # Twice the memory: a rank that is refused here must not be refused by the first save of
            # this queue, when the others on its host have their arenas already.
            with self._front, contextlib.suppress(CheckpointError, RuntimeError):
                if self._reserving is None or self._calls:
                    return
                arena = self._saver.room(size, copies=2)
                with self._pinning:
                    if self._reserving is not None and cuda is not None and beside_captures():
                        arena.pin(cuda)
                    if self._reserving is None:  # the queue was closed meanwhile
                        self._saver.close()

        if not self._front.acquire(blocking=False):
            return  # a save, or another call of this, is under way
        try:
            if self._calls:
                return
            with contextlib.suppress(CheckpointError):
                self._worker.start()
            self._meets = options.timeout
            self._start_thread()
            size, cuda = 0, None
            if state_dict is not None:
                _, size, cuda = self._saver.needs(state_dict, options)
        finally:
            self._front.release()
        if size:
            self._reserving = threading.Thread(target=provide, name="smckpt-arena", daemon=True)
            self._reserving.start()

    def bytes_of(self, state_dict: Mapping[str, Any], options: SaveOptions) -> int:
        """The bytes that this rank writes of a state: its part of those that its group shares. The
        next save, of this same dict, comes at once, and takes what was found."""
        with self._front:
            return self._saver.needs(state_dict, options, ahead=True)[0]

    def submit(
        self,
        state_dict: Mapping[str, Any] | None,
        request: SaveRequest,
        refusal: Exception | None = None,
    ) -> SaveHandle:
        """Take the state, stage it and give the save to the thread. See `smckpt.async_save`.

        Args:
            refusal: why the call fails. This save then only brings the error to the peers.
        """
        if threading.current_thread() is self._thread:
            raise UsageError(
                "on_commit began a save in its own queue, which would wait for itself",
                remedy="save from the training loop, or with SaveOptions(queue=) of its own",
            )
        began = time.perf_counter()
        with self._front:  # while `prewarm` gets the memory, the save waits for it here
            call = self._calls
            self._calls += 1  # counted before anything can raise, because the peers count too
            handle = SaveHandle(call + self._skipped, request.directory, request.step)
            alone = Partition((self.group.ranks,), 0)
            job = SaveJob(handle, request, alone, call=call, began=began)
            self._start_thread()
            commit, failed = self._saver.save(job, state_dict, refusal, self._wait_for_room)
            job.reported = failed is not None
            job.blocked = job.elapsed() + job.waited
            self.flying = job.handle
            if self._thread is not None:
                self._inbox.put((job, commit))
            else:  # in an exit handler
                while not self._ended(job, commit):
                    pass
            if failed is not None:
                raise failed
            self._raise_failures()
            return handle

    def meet(self, refusal: Exception | None = None) -> str:
        """Count a save that DCP makes, and meet the ranks that make it too: in the rounds in which
        a save of ours begins, so that a rank that makes one hears of the other.

        Args:
            refusal: why this rank's call fails.

        Returns:
            A name on which the ranks agree, and which nobody has used.

        Raises:
            CheckpointError: a rank refuses it, or makes a save of ours. Every rank raises it.
        """
        with self._front:
            number, timeout = self._calls + self._skipped, SaveOptions().timeout
            self._calls += 1
            if self.flying is not None:
                self.flying.ended()
            meeting = self.membership.meeting(timeout)
            self._committer.met_before = number + 1
        ranks, name, host = self.group.ranks, uuid4().hex, socket.gethostname()
        first = not self._committer.probed and len(ranks) > 1
        moment = Moment(holds=False, planned=True)

        def bring() -> Any:
            if refusal is not None:
                raise refusal
            return moment if first else Written(self.group.rank, host, ranks[0], moment)

        def decide(brought: Callable[[], dict[int, Any]]) -> str:
            moments = {ranks[at]: getattr(one, "moment", one) for at, one in brought().items()}
            refuse_different(moments, ranks_text)
            return name

        point, kind = ("made", Moment) if first else ("save", Written)
        try:
            return meeting.round(f"{point}/{number}", bring, decide, timeout=timeout, brings=kind)
        except Exception as error:
            if first:  # a rank with a save of ours brings it to this round too
                meeting.refuse(f"save/{number}", as_checkpoint_error(error, self.group.rank))
            raise

    def finalize(self, blocking: bool, timeout: float | None = None) -> list[int]:
        if threading.current_thread() is self._thread:
            raise UsageError(
                "on_commit called maybe_finalize_async_calls, which would wait for itself",
                remedy="call it from the training loop",
            )
        return super().finalize(blocking, timeout)

    def close(self, timeout: float) -> list[SaveHandle]:
        """As of any saves. Then stop the thread and the worker, free the arena, and announce to
        peers that this rank makes no other save."""
        if os.getpid() != self._pid:  # a forked child owns nothing here
            return []
        deadline = time.monotonic() + timeout
        failed, flying = super().close(timeout), self.flying
        late = flying is not None and not flying.done()
        if late:
            self._worker.close(timeout=0)  # first: then the thread tells the peers and ends
        if self._thread is not None:
            self._inbox.put(None)
            # A process that exits while the thread connects may be aborted.
            left = max(5.0, min(deadline - time.monotonic(), LEAVE_SECONDS))
            self._thread.join(timeout=1 if late else left)
            self._thread = None
        self._reserving = None  # its thread frees what it gets from now on
        # no process should end, and no memory go, amid a call of CUDA
        if idle := self._pinning.acquire(timeout=5):
            self._pinning.release()
        self._announce_end()
        self._worker.close(timeout=5)
        if (flying is None or flying.done()) and idle:
            self._saver.close()
        return failed

    def note_loaded(self, steps: Mapping[Path, float]) -> None:
        """The group loaded these steps of parameters, from which the next save counts."""
        self._saver.loaded = {**self._saver.loaded, **steps}

    def inherit(self, failed: list[SaveHandle]) -> None:
        """Take over the failures of the queue that this one replaces. The next call raises them."""
        with self._lock:
            self._unreported += failed

    def _wait_for_room(self, job: SaveJob) -> None:
        flying = self.flying
        if flying is None or flying.done():
            return
        began = time.perf_counter()
        log.info("a save waits for save %d, which is still being written", flying.number)
        # Its own timeout bounds each stage of the save in flight, so this wait is bounded too.
        flying.ended()
        job.waited = time.perf_counter() - began
        log.info("waited %.2f s for save %d", job.waited, flying.number)

    # -- the thread --------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None:
            name = f"smckpt-{self.name}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread = thread if started(thread) else None

    def _serve(self) -> None:
        if len(self.group.ranks) > 1:
            with contextlib.suppress(CheckpointError):
                if self._meets is not None:
                    self.membership.meeting(self._meets)
                else:
                    self.membership.connect()
        while (staged := self._next()) is not None:
            job, commit = staged
            while not self._ended(job, commit):
                pass

    def _next(self) -> _Staged | None:
        """The next save. If the program destroys the process group meanwhile, none comes, and the
        peers hear so."""
        while True:
            try:
                return self._inbox.get(timeout=IDLE_SECONDS if self._stays else None)
            except queue.Empty:
                if not self.group.exists():
                    self._announce_end()

    def _announce_end(self) -> None:
        """Tell peers that wait for another save of this rank that none comes."""
        if self._stays:
            self._stays = False
            number = self._calls + self._skipped
            self.membership.announce(
                self._committer.rounds_of(number, self._saver.coordinator),
                [Round(f"ticket/{number}")],
            )

    @property
    def brought(self) -> float | None:
        """When the save in flight had nothing left to do but to wait for other ranks."""
        return self._job.brought if self._job and len(self.group.ranks) > 1 else None

    def _ended(self, job: SaveJob, commit: Callable[[], Committed]) -> bool:
        """Commit the save. Returns False if it is to be brought to the next round, because this
        rank skipped the save that the others made in this one."""
        job.handle.number, self._job = job.call + self._skipped, job
        try:
            with telling(self.group.rank, job.activity):
                committed = commit()
            undisturbed(self._announce, job, committed)
            self._done(job, None)
            undisturbed(self._committer.sweep, job, committed)
        except BaseException as error:  # the thread must survive any failure and report it
            ours = as_checkpoint_error(error, self.group.rank)
            behind = moment_read(ours.moment)
            if job.error is None and job.moment.is_beyond(behind) and behind != job.refused:
                job.refused = behind
                # Count a save that the others made without this rank. It failed, here too.
                path = ours.path or job.request.directory
                lost = SaveHandle(job.handle.number, path, None)
                lost.error = ours
                undisturbed(log.error, "save %d was not committed: %s", lost.number, ours)
                again = "%s of this rank is brought again, as save %d"
                undisturbed(log.warning, again, job.called, lost.number + 1)
                self._skipped += 1
                self._count_failure(job, lost)
                return False
            self._done(job, ours)
        return True

    def _count_failure(self, job: SaveJob, failed: SaveHandle) -> None:
        with self._lock:
            self._failures += 1
            tolerated = self._failures <= job.request.options.max_consecutive_failures
            if not job.reported and not tolerated:
                self._unreported.append(failed)

    def _done(self, job: SaveJob, error: CheckpointError | None) -> None:
        if error is None:
            with self._lock:
                self._failures = 0
                self._committed.append(job.handle.number)
                self._durable = job.began + job.waited + job.staged
        else:
            self._count_failure(job, job.handle)
            undisturbed(log.error, "save %d was not committed: %s", job.handle.number, error)
        job.finish(error)
        assert job.handle.timings is not None
        undisturbed(
            self._sinks.deliver,
            SaveEvent(
                directory=job.request.directory,
                step=job.handle.step,
                queue=self.name,
                number=job.handle.number,
                rank=self.group.rank,
                outcome="committed" if error is None else "failed",
                error=error,
                **vars(job.handle.timings),
                retries=job.retries,
                age=None if self._durable is None else time.perf_counter() - self._durable,
                alarms=job.handle.alarms,
            ),
        )

    def _announce(self, job: SaveJob, committed: Committed) -> None:
        """On the coordinator: log a line and call `on_commit`. An exception in it does not undo the
        commit."""
        handle = job.handle
        handle.timings, handle.alarms = job.timings(), committed.alarms
        if job.request.coordinator != self.group.rank:
            return
        seconds = handle.timings.committed
        undisturbed(
            log.info,
            "committed %s: %s in %.2f s, %s/s, to %s",
            job.called,
            bytes_text(committed.nbytes),
            seconds,
            bytes_text(committed.nbytes / max(seconds, 1e-9)),
            handle.checkpoint_id,
        )
        if job.request.options.on_commit is None:
            return
        handle._announced_by = threading.get_ident()
        try:
            job.request.options.on_commit(handle)
        except BaseException:  # also sys.exit, which would end this thread unnoticed
            log.exception("on_commit of save %d raised; the save is committed", handle.number)
        finally:
            handle._announced_by = None
