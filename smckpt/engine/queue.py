"""A queue of saves: the front that `async_save` calls, and the thread that commits.

The front selects, compiles, stages and returns; the thread hands the arena to the worker and
meets the other ranks. Every rank takes part in every numbered save, with its bytes or with its
error, so that ranks cannot fall out of step when one of them fails.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smckpt.checkpoint.format import FORMAT_VERSION
from smckpt.checkpoint.objects import encode_object
from smckpt.checkpoint.rows import encode_rows
from smckpt.engine.commit import Committer
from smckpt.engine.groups import Group, Partition, partition_of
from smckpt.engine.job import SaveHandle, SaveJob, SaveRequest
from smckpt.engine.membership import Membership
from smckpt.engine.worker_client import Worker
from smckpt.errors import (
    CheckpointError,
    SaveFailedError,
    UsageError,
    as_checkpoint_error,
)
from smckpt.layout.image import Layout, compile_layout
from smckpt.staging.arena import Arena, check_memory, stage
from smckpt.state_dict.select import Selection, Selector
from smckpt.storage.budget import Share
from smckpt.storage.s3_config import using_s3
from smckpt.storage.s3_pace import sharing

__all__ = ["SaveQueue"]

LEAVE_SECONDS = 30.0  # how long the store's host waits at exit for peers that still read from it

log = logging.getLogger("smckpt")


class SaveQueue:
    """The saves of one group, in order; one in flight at a time.

    It owns its thread, its worker process and its arena, and closes them. `since`: see `Committer`.
    """

    def __init__(self, group: Group, name: str = "default", since: int = 0) -> None:
        self.group = group
        self._since = since
        self.name = name
        self.membership = Membership(group, f"save/{name}")
        self._selector = Selector(group.rank)
        self._worker = Worker()
        self._arena: Arena | None = None
        self._arena_id: int | None = None
        self._selection: Selection | None = None
        self._layout: Layout | None = None
        self._rows: dict[str, Any] = {}
        self._partition: Partition | None = None
        self._partition_key: object = None
        self._coordinator: int | None = None
        self._max_file_bytes = 0
        self._numbers = 0
        self._failures = 0
        self._unreported: list[SaveHandle] = []
        self._committed: list[int] = []
        self._flying: SaveHandle | None = None
        self._lock = threading.Lock()
        # Threads take turns in the arena. Reentrant, so that a signal handler is refused instead of
        # waiting for the code that it interrupted.
        self._front = threading.RLock()
        self._submitting = False
        self._inbox: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # -- the front: called by the training thread -------------------------------------------

    def submit(
        self,
        state_dict: Mapping[str, Any] | None,
        request: SaveRequest,
        refusal: Exception | None = None,
    ) -> SaveHandle:
        """Take, stage and hand over. See `smckpt.async_save`.

        Args:
            refusal: why the call cannot be done, which this save is used up for telling.
        """
        if threading.current_thread() is self._thread:
            raise UsageError(
                "a save was begun in on_commit of the same queue, and would wait for itself",
                remedy="save from the training loop, or with a queue= of its own",
            )
        with self._front:
            if self._submitting:
                raise UsageError(
                    "a save was begun while this thread was in async_save of the same queue",
                    remedy="a signal handler should set a flag that the training loop looks at",
                )
            self._submitting = True
            try:
                return self._submit(state_dict, request, refusal)
            finally:
                self._submitting = False

    def _submit(
        self,
        state_dict: Mapping[str, Any] | None,
        request: SaveRequest,
        refusal: Exception | None,
    ) -> SaveHandle:
        began = time.perf_counter()
        handle = SaveHandle(self._numbers, request.directory, request.step)
        self._numbers += 1  # used up before anything can raise: peers count along
        job = SaveJob(handle, request, Partition((self.group.ranks,), 0), began=began)
        refused: BaseException | None = None
        try:
            if refusal is not None and self._coordinator is not None:
                job.request = replace(request, coordinator=self._coordinator)
            job.partition = self._expected(request)
            if refusal is not None:
                raise refusal
            self._wait_for_room()
            self._prepare(job, state_dict)
        except BaseException as error:
            refused = error
            job.error = as_checkpoint_error(error, self.group.rank)
            job.reported = True
        job.blocked = job.elapsed()
        self._launch(job)
        if refused is not None:
            raise refused
        self._raise_failures()
        return handle

    def finalize(self, blocking: bool, timeout: float | None = None) -> list[int]:
        """The numbers of the saves committed since the last call; raises what failed.

        With `blocking` the save in flight is waited for. Runs no collective.
        """
        if threading.current_thread() is self._thread:
            raise UsageError(
                "maybe_finalize_async_calls was called from on_commit, and would wait for itself",
                remedy="call it from the training loop",
            )
        flying = self._flying
        if blocking and flying is not None and not flying._done.wait(timeout):
            raise SaveFailedError(
                f"save {flying.number} is still under way after {timeout} s",
                remedy="wait longer, or look at the logs of the other ranks",
                path=flying.checkpoint_id,
                rank=self.group.rank,
            )
        self._raise_failures()
        with self._lock:
            committed, self._committed = self._committed, []
        return committed

    def close(self, timeout: float, *, leave: bool = True) -> list[SaveHandle]:
        """Drain the save in flight for at most `timeout` seconds, then stop the thread and the
        worker and free the arena.

        Args:
            leave: also see that no peer still needs the store that this process may host.

        Returns:
            The saves that nobody was told of: those that failed, and that which was given up.
        """
        if os.getpid() != self._pid:  # a forked child owns nothing of this
            return []
        deadline = time.monotonic() + timeout
        flying = self._flying
        late = flying is not None and not flying._done.wait(timeout)
        failed = self.failed
        if flying is not None and late:
            failed.append(flying.given_up(timeout))
            self._worker.close(timeout=0)  # first: then the thread tells the peers, and is free
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(timeout=1 if late else 5)
            self._thread = None
            if leave:
                self.membership.leave(min(max(deadline - time.monotonic(), 0), LEAVE_SECONDS))
        self._worker.close(timeout=5)
        if self._arena is not None and (flying is None or flying.done()):
            self._arena.close()
            self._arena = None
        return failed

    def inherit(self, failed: list[SaveHandle]) -> None:
        """Failures of the queue whose place this one takes; told at the next call."""
        with self._lock:
            self._unreported += failed

    @property
    def failed(self) -> list[SaveHandle]:
        """Saves that failed and that nobody was told of."""
        with self._lock:
            return list(self._unreported)

    def _wait_for_room(self) -> None:
        flying = self._flying
        if flying is None or flying.done():
            return
        began = time.perf_counter()
        log.info("a save waits for save %d, which is still being written", flying.number)
        # Each stage of the save in flight is bounded by its own timeout: this wait is too.
        flying._done.wait()
        log.info("waited %.2f s for save %d", time.perf_counter() - began, flying.number)

    def _prepare(self, job: SaveJob, state_dict: Mapping[str, Any] | None) -> None:
        self._refuse_other_coordinator(job)
        request = job.request
        recorded = request.recorded()
        selection = self._selector.select(state_dict)
        changed = self._selection is None or selection.entries is not self._selection.entries
        self._partition_for(job, selection, changed)
        if not request.directory:
            raise _no_directory(self.group.rank)
        objects = {
            leaf.key: {
                "path": list(leaf.path),
                "value": encode_object(leaf.value, request.allow_objects, leaf.key),
            }
            for leaf in selection.objects
        }
        limit = request.options.max_file_bytes
        if changed or self._layout is None or limit != self._max_file_bytes:
            self._selection, self._max_file_bytes = None, limit
            self._compile(selection, request)
        assert self._layout is not None
        job.layout = self._layout
        if self._layout.arena_size:
            arena = self._room(self._layout.arena_size)
            order = {id(e): t for e, t in zip(selection.entries, selection.tensors, strict=True)}
            stage(arena, self._layout, [order[id(e)] for e in self._layout.entries])
        job.staged = job.elapsed()
        job.part = {**self._static_part(request, selection, objects), **recorded}
        self._selection = selection

    def _refuse_other_coordinator(self, job: SaveJob) -> None:
        """The coordinator holds the epochs and the other groups' ear: it stays who it was."""
        known, asked = self._coordinator, job.request.coordinator
        if known is None:
            self._coordinator = asked
        elif known != asked:
            job.request = replace(job.request, coordinator=known)  # who tells the others
            raise UsageError(
                f"coordinator_rank is {asked}; it was {known} in earlier saves",
                remedy="pass the same coordinator_rank in every save, or another queue=",
                rank=self.group.rank,
            )

    def _expected(self, request: SaveRequest) -> Partition:
        """The groups of the step as far as they are known before the state is looked at: who leads
        a group without one has to tell the other groups so."""
        told = request.groups is not None or request.parallel_state is not None
        if self._partition is not None and (not told or _key(request) == self._partition_key):
            return self._partition
        if not told:
            return Partition((self.group.ranks,), 0)
        return partition_of(
            self.group, (), groups=request.groups, parallel_state=request.parallel_state
        )

    def _partition_for(self, job: SaveJob, selection: Selection, changed: bool) -> None:
        request = job.request
        key = _key(request)
        if changed or self._partition is None or key != self._partition_key:
            self._partition = partition_of(
                self.group,
                selection.entries,
                groups=request.groups,
                parallel_state=request.parallel_state,
            )
            self._partition_key = key
        job.partition = self._partition

    def _compile(self, selection: Selection, request: SaveRequest) -> None:
        if self._layout is not None:
            log.info("the state changed since the last save: laid out anew")
        self._layout = compile_layout(
            selection.entries,
            rank=self.group.rank,
            group_ranks=self.group.ranks,
            max_file_bytes=request.options.max_file_bytes,
        )
        self._rows = encode_rows(self._layout.entries)

    def _room(self, size: int) -> Arena:
        """The arena, large enough; made anew when the state has grown."""
        if self._arena is not None and self._arena.size >= size:
            return self._arena
        if self._arena is not None:
            if self._arena_id is not None and self._worker.alive:
                self._worker.detach(self._arena_id)
            self._arena.close()
            self._arena = self._arena_id = None
        check_memory(size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._arena = Arena(size, pin=_cuda())
        return self._arena

    def _static_part(
        self, request: SaveRequest, selection: Selection, objects: dict[str, Any]
    ) -> dict[str, Any]:
        assert self._layout is not None
        return {
            "format": list(FORMAT_VERSION),
            "checkpoint_id": request.directory,
            "kind": selection.kind,
            "rank": self.group.rank,
            "host": socket.gethostname(),
            "group_ranks": list(self.group.ranks),
            "fingerprint": self._layout.fingerprint,
            "classes": self._layout.classes,
            "layout": self._rows,
            "objects": objects,
            "optimizers": selection.optimizers,
            "topology": request.topology,
            "versions": _versions(),
        }

    def _launch(self, job: SaveJob) -> None:
        self._flying = job.handle
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name=f"smckpt-{self.name}", daemon=True
            )
            self._thread.start()
        self._inbox.put(job)

    def _raise_failures(self) -> None:
        """Whatever succeeded since: a failure is told, once."""
        with self._lock:
            failed, self._unreported = self._unreported, []
        if not failed:
            return
        for handle in failed[:-1]:
            log.error("%s", handle.failure())
        raise failed[-1].failure()

    # -- the thread --------------------------------------------------------------------------

    def _serve(self) -> None:
        committer = Committer(self.membership, self._worker, self._since)
        while (job := self._inbox.get()) is not None:
            try:
                groups = job.partition.groups
                prefixes = job.request.s3.prefixes if job.request.s3 else 1
                share = Share.of_coordinator(job.partition.mine, len(groups), prefixes)
                with using_s3(job.request.s3), sharing(share):
                    if job.layout is not None and self._arena is not None:
                        self._attach()
                    verdict = committer.run(job, self._arena_id)
                    self._announce(job)
                    self._done(job, None)
                    self._sweep(job, verdict)
            except BaseException as error:  # the thread must outlive any failure, and report it
                self._done(job, as_checkpoint_error(error, self.group.rank))

    def _attach(self) -> None:
        assert self._arena is not None
        if not self._worker.alive:  # died, or not started: it knows no arena
            self._arena_id = None
        if self._arena_id is None:
            self._arena_id = self._worker.attach(self._arena)

    def _done(self, job: SaveJob, error: CheckpointError | None) -> None:
        with self._lock:
            if error is None:
                self._failures = 0
                self._committed.append(job.handle.number)
            else:
                self._failures += 1
                tolerated = self._failures <= job.request.options.max_consecutive_failures
                if not job.reported and not tolerated:
                    self._unreported.append(job.handle)
                log.error("save %d was not committed: %s", job.handle.number, error)
        job.finish(error)

    def _announce(self, job: SaveJob) -> None:
        """`on_commit`, on the coordinator. What it raises does not undo the commit."""
        handle = job.handle
        handle.timings = job.timings()
        if job.request.on_commit is None or job.request.coordinator != self.group.rank:
            return
        handle._announced_by = threading.get_ident()
        try:
            job.request.on_commit(handle)
        except BaseException:  # sys.exit too: it would end this thread, and nobody would know
            log.exception("on_commit of save %d raised; the save is committed", handle.number)
        finally:
            handle._announced_by = None

    def _sweep(self, job: SaveJob, verdict: dict[str, Any]) -> None:
        """Delete what the commit supersedes; after the verdict, so that nobody waits for it."""
        if job.request.coordinator != self.group.rank or not job.request.options.sweep:
            return
        leads = {}
        if "record" in verdict and job.partition.mine == 0:
            leads = {
                "record_directory": verdict["record_directory"],
                "keep_records": [verdict["record"]],
            }
        try:
            self._worker.call(
                "sweep",
                {
                    "directory": job.request.directory,
                    "keep": [verdict["manifest"]],
                    "epoch": verdict["epoch"],
                    **leads,
                },
                timeout=job.request.options.timeout,
            )
        except CheckpointError as error:
            log.warning("what save %d supersedes is not swept: %s", job.handle.number, error)


def _key(request: SaveRequest) -> object:
    return request.parallel_state, repr(request.groups)  # kept: an id may be reused


def _no_directory(rank: int) -> CheckpointError:
    return UsageError(
        "checkpoint_id was left out",
        remedy="pass checkpoint_id= (a directory), or a storage_writer that has a path",
        rank=rank,
    )


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _versions() -> dict[str, str]:
    import platform

    import torch

    from smckpt._version import __version__

    return {
        "smckpt": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
