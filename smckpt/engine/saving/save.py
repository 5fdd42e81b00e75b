"""A save: select → compile → stage → write → publish.

`Saver.save` shows the whole save. The first three steps run while the caller of `async_save` waits,
the last two in the queue's thread. Every rank takes part in every save, with what it wrote or with
its error, so ranks keep the same count when one of them fails.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from smckpt.checkpoint.commits.part import part_body, table_of, tables_digest
from smckpt.checkpoint.records.objects import encode_object
from smckpt.checkpoint.records.rows import encode_rows
from smckpt.engine.background.commands import ArenaFile, WritePart
from smckpt.engine.background.worker_client import Worker
from smckpt.engine.groups import Partition, partition_of
from smckpt.engine.saving.alarms import Last, Observer
from smckpt.engine.saving.commit import Committed, Committer, Written
from smckpt.engine.saving.job import SaveJob, SaveOptions, SaveRequest
from smckpt.engine.saving.moment import moment_of
from smckpt.errors import StateError, UsageError, as_checkpoint_error
from smckpt.layout.entries import Path
from smckpt.layout.image import Layout, compile_layout
from smckpt.meeting.group import Group
from smckpt.meeting.round import Meeting
from smckpt.staging.arena import Arena, check_memory
from smckpt.staging.copies import stage
from smckpt.staging.overlap import Flight, Overlap
from smckpt.state_dict.modes import neutral
from smckpt.state_dict.select import Selection, Selector

if TYPE_CHECKING:
    from concurrent.futures import Future


log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Compiled:
    """Where a rank's arrays are in its files. rows: their table, which the part records."""

    layout: Layout
    rows: dict[str, Any]


@dataclass(frozen=True)
class Staged:
    """A state in the arena, or on its way there.

    arena: None if the state has no bytes. copies: None if they have ended. part: `part_body`.
        held: checksums for the comparison of replicas.
    """

    layout: Layout
    arena: Arena | None
    copies: Future[None] | None
    part: dict[str, Any]
    observer: Observer
    held: dict[tuple[int, ...], list[int]]


class Saver:
    """Makes the saves of one queue, one at a time. Owns the arena.

    It keeps what the next save can reuse: the selector's view of the state, the layout, the groups
    of the step, the arena.
    """

    def __init__(
        self, group: Group, worker: Worker, committer: Committer, overlap: Overlap
    ) -> None:
        self.group = group
        self._overlap = overlap
        self._worker = worker
        self._committer = committer
        self._selector = Selector(group.rank)
        self._ahead: tuple[object, Selection] | None = None  # of the save that comes next
        self._compiled: Compiled | None = None
        # entries; max_file_bytes and the kinds of containers
        self._compiled_from: tuple[object, object] | None = None
        self._partition: Partition | None = None
        self._partition_from: tuple[object, object] | None = None  # entries, passed groups
        self._coordinator: int | None = None
        self._arena: Arena | None = None
        self._arena_id: int | None = None
        self._copies: Future[None] | None = None  # into the arena, which may be under way
        self._observer: Observer | None = None
        self._warned: set[str] = set()  # of what, about tensors that a load makes
        self._last: Last | None = None  # the last committed save
        # path of a parameter's state → its step in a load that came after that
        self.loaded: Mapping[Path, float] = {}
        self._claimed: list[str] = []  # keys of the job's store, of the last save

    def save(
        self,
        job: SaveJob,
        state_dict: Mapping[str, Any] | None,
        refusal: Exception | None,
        wait: Callable[[SaveJob], None],
    ) -> tuple[Callable[[], Committed], BaseException | None]:
        """Take and stage the state. The queue's thread does the rest.

        Args:
            refusal: why the call fails. This save then only brings the error to the peers.
            wait: called to wait until the arena is free.

        Returns:
            The function that writes and publishes, which every rank must call even if something
            failed here; and the error, or None.
        """
        staged: Staged | None = None
        failed: BaseException | None = None
        loaded = self.loaded
        try:
            job.partition = self._expected(job, refusal)
            if refusal is not None:
                raise refusal
            wait(job)
            selection = self.select(job, state_dict)
            request = job.request
            job.moment = moment_of(
                request.directory,
                job.handle.step,
                request.options.metadata or {},
                selection,
                request.options.per_rank,
                loaded,
            )
            compiled = self.compile(job, selection)
            staged = self.stage(job, selection, compiled)
        except BaseException as error:
            failed = error
            job.error = as_checkpoint_error(error, self.group.rank)
            if not job.moment.directory:
                job.moment = moment_of(job.request.directory, job.handle.step, {}, None)

        def write(meeting: Meeting) -> Written:
            if staged is None:
                assert job.error is not None
                raise job.error
            return self.write(job, staged, meeting)

        def commit() -> Committed:
            committed = self._committer.publish(job, write)
            self._last = job.last
            if self.loaded is loaded:  # no load came meanwhile
                self.loaded = {}
            return committed

        return commit, failed

    # -- the steps ---------------------------------------------------------------------------

    def select(self, job: SaveJob, state_dict: Mapping[str, Any] | None) -> Selection:
        """Select the tensors and values of the state, each with its path and geometry."""
        # Refuse another coordinator than before. The coordinator holds the leases, and other groups
        # listen to it, so it must stay the same.
        known, asked = self._coordinator, job.request.coordinator
        if known is None:
            self._coordinator = asked
        elif known != asked:
            job.request = replace(job.request, coordinator=known)  # it tells the others
            raise UsageError(
                f"coordinator_rank is {asked}, but it was {known} in earlier saves",
                remedy="pass the same coordinator_rank in every save, or another "
                "SaveOptions(queue=)",
                rank=self.group.rank,
            )
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is state_dict:
            return ahead[1]
        return self._selector.select(state_dict)

    @neutral()
    def compile(self, job: SaveJob, selection: Selection) -> Compiled:
        """Find which groups make the step, and where this rank's arrays are in its files."""
        request, entries = job.request, selection.entries
        if selection.unmade:
            path, what, remedy = selection.unmade[0]
            raise StateError(
                f"{path} is a {what}, so a load could not make it",
                remedy=remedy,
                rank=self.group.rank,
            )
        if selection.bare and "attributes" not in self._warned:
            self._warned.add("attributes")
            log.warning(
                "the attributes of plain tensors are not saved, and a load leaves those of its "
                "target: %s%s. Put them into the state as values",
                ", ".join(selection.bare[:5]),
                f" and {more} more" if (more := len(selection.bare) - 5) > 0 else "",
            )
        if selection.tied and "memory" not in self._warned:
            self._warned.add("memory")
            log.warning(
                "%s and %s share memory. Where a load makes them, each has memory of its own",
                *selection.tied,
            )
        named = _named(request)
        if self._partition is None or _changed(self._partition_from, (entries, named)):
            self._partition = partition_of(self.group, entries, request.options)
            self._partition_from = entries, named
        job.partition = self._partition
        if not request.directory:
            raise UsageError(
                "checkpoint_id was left out",
                remedy="pass checkpoint_id= (a directory), or a storage_writer that has a path",
                rank=self.group.rank,
            )
        return self._laid_out(selection, request.options)

    def _laid_out(self, selection: Selection, options: SaveOptions) -> Compiled:
        """Where this rank's arrays are in its files; the last one while nothing changes."""
        entries, limit = selection.entries, options.max_file_bytes
        laid_out = limit, selection.containers
        if self._compiled is None or _changed(self._compiled_from, (entries, laid_out)):
            if self._observer is not None:  # a save was staged
                log.info("the state changed since the last save: making a new layout")
            layout = compile_layout(
                entries,
                rank=self.group.rank,
                group_ranks=self.group.ranks,
                max_file_bytes=limit,
            )
            rows = encode_rows(entries, selection.containers)  # in the order of the user's dicts
            self._compiled = Compiled(layout, rows)
            self._compiled_from = entries, laid_out
        return self._compiled

    @neutral()
    def stage(self, job: SaveJob, selection: Selection, compiled: Compiled) -> Staged:
        """Copy the state to its files' places in the arena."""
        # The part record with copies of the values, so that the caller may change them later
        objects = {
            leaf.key: {
                "path": list(leaf.path),
                "value": encode_object(leaf.value, job.request.options.allow_objects, leaf.key),
            }
            for leaf in selection.objects
        }
        part = part_body(
            compiled.layout,
            compiled.rows,
            checkpoint_id=job.request.directory,
            kind=selection.kind,
            objects=objects,
            optimizers=selection.optimizers,
            versions={"torch": str(torch.__version__)},
            **job.request.recorded(),
        )
        layout, arena, copies = compiled.layout, None, None
        observer, held = self._observer, {}  # what looks at this save for alarms
        of = job.request.options.alarms, layout, selection.parameters
        if observer is None or (observer.alarms, observer.layout, observer.parameters) != of:
            self._observer = observer = Observer(*of)
        if layout.arena_size:
            self._wait_for_copies(job)  # of an earlier save, which failed before they ended
            arena = self.room(layout.arena_size)
            order = {id(e): t for e, t in zip(selection.entries, selection.tensors, strict=True)}
            tensors = [order[id(entry)] for entry in layout.entries]
            options = job.request.options
            begun = stage(
                arena,
                layout,
                tensors,
                options.stager,
                pin=True,
                overlap=self._overlapping(options, selection),
                stepped=selection.stepped,
                timeout=options.timeout,
            )
            if isinstance(begun, Flight):
                self._copies, job.handle.copied = begun.proven, begun.copied
            else:
                self._copies = job.handle.copied = begun
            copies = self._copies
            held = observer.hold(job.handle.number, tensors)
        job.staged = job.elapsed()
        return Staged(layout, arena, copies, part, observer, held)

    def write(self, job: SaveJob, staged: Staged, meeting: Meeting) -> Written:
        """Wait for the copies. Then the worker writes this rank's files and its part."""
        if staged.copies is not None:
            self._wait_for_copies(job)
            staged.copies.result()
            job.staged = job.elapsed()
        request, layout = job.request, staged.layout
        observer = staged.observer
        slots = observer.watched(compares=bool(staged.held))
        part = staged.part
        if len(self.group.ranks) > 1:
            part = self._with_one_table(job.handle.number, part, meeting)
        arena_id = None
        if staged.arena is not None:
            if not self._worker.alive:  # it died or was not started, so it knows no arena
                self._arena_id = None
            if self._arena_id is None:
                self._arena_id = self._worker.attach(staged.arena)
            arena_id = self._arena_id
        done = self._worker.call(
            WritePart(
                directory=request.directory,
                attempt=job.attempt(meeting.id),
                rank=self.group.rank,
                arena=arena_id,
                files=tuple(ArenaFile(file.arena_offset, file.size) for file in layout.files),
                part=part,
                watched=tuple(slot.where for slot in slots),
            ),
            timeout=job.timeout,
            access=job.as_one_of_all(self.group),
        )
        job.written, job.nbytes, job.retries = job.elapsed(), done.bytes, done.retries
        job.brought = time.monotonic()
        now = Last("", job.handle.step, job.called, ())
        looked, job.last = observer.looked(staged.held, slots, done, now, self._last)
        return Written(
            rank=self.group.rank,
            host=socket.gethostname(),
            coordinator=request.coordinator,
            moment=job.moment,
            prefixes=str(job.spread),
            part=done.part,
            crc64=done.crc64,
            looked=looked,
        )

    def needs(
        self, state_dict: Mapping[str, Any], options: SaveOptions, *, ahead: bool = False
    ) -> tuple[int, int, torch.device | None]:
        """The bytes of this state's files and of the arena that it needs, and a CUDA device that it
        is on. What an overlapped copy from that needs is compiled.

        Args:
            ahead: the next save takes the state as it was found here, if it is one of this dict.
        """
        selection = self._selector.select(state_dict)
        if ahead:
            self._ahead = state_dict, selection
        with neutral():
            layout = self._laid_out(selection, options).layout
            cuda = next((tensor.device for tensor in selection.tensors if tensor.is_cuda), None)
            if cuda is not None and self._overlapping(options, selection) is not None:
                self._overlap.prepare(cuda)
        return sum(file.size for file in layout.files), layout.arena_size, cuda

    def room(self, size: int, copies: int = 1) -> Arena:
        """An arena that is large enough. A new one is made when the state has grown.

        Raises:
            MemoryBudgetError: the host has no memory for so many copies on each of its ranks.
        """
        if self._arena is not None and self._arena.size >= size:
            return self._arena
        if self._arena is not None:
            if self._arena_id is not None and self._worker.alive:
                self._worker.detach(self._arena_id)
            self._arena.close()
            self._arena = self._arena_id = None
        check_memory(size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), copies)
        self._arena = Arena(size)
        return self._arena

    @property
    def coordinator(self) -> int:
        """The rank that publishes, as far as it is known."""
        return self.group.ranks[0] if self._coordinator is None else self._coordinator

    # -- what the steps need -----------------------------------------------------------------

    def _expected(self, job: SaveJob, refusal: Exception | None) -> Partition:
        """The groups of the step, as far as they are known before the state is selected. A group
        without a state needs them to bring its error to the other groups."""
        request = job.request
        if refusal is not None and self._coordinator is not None:
            job.request = replace(request, coordinator=self._coordinator)
        options = request.options
        named = options.groups is not None or options.parallel_state is not None
        known = self._partition_from[1] if self._partition_from is not None else None
        if self._partition is not None and (not named or _named(request) == known):
            return self._partition
        if not named:
            return Partition((self.group.ranks,), 0)
        return partition_of(self.group, (), options)

    def _with_one_table(
        self, number: int, part: dict[str, Any], meeting: Meeting
    ) -> dict[str, Any]:
        """The part, without its tables where another rank that has equal ones came first. Otherwise
        the coordinator would read them once for each rank."""
        meeting.drop(self._claimed)  # of the last save: its verdict is out, so nobody asks any more
        digest = tables_digest(part["layout"], part["optimizers"])
        key = f"tables/{number}/{digest}"
        owner = meeting.first(key, self.group.rank)
        self._claimed = [key] if owner == self.group.rank else []
        if owner == self.group.rank:
            return part
        return {**part, "layout": table_of(owner, digest), "optimizers": {}}

    def _overlapping(self, options: SaveOptions, selection: Selection) -> Overlap | None:
        """What copies parameters and optimizers' state after the call; None if nothing does."""
        if options.staging == "block" or options.stager is not None:
            return None
        if options.staging == "auto" and all(tensor.is_cpu for tensor in selection.tensors):
            return None
        why = self._overlap.refusal
        if selection.swapped_by:
            why = f"{selection.swapped_by} changes parameters in train() and eval() too"
        if why is None:
            return self._overlap
        self._overlap.block(why)
        return None

    def _wait_for_copies(self, job: SaveJob) -> None:
        """Wait until nothing is copied to the arena. Copies that go on keep it for themselves."""
        timeout = job.timeout
        if self._copies is not None and concurrent.futures.wait([self._copies], timeout).not_done:
            self.close()
            raise StateError(
                f"the state's copies did not end within {timeout:.0f} s",
                remedy="find out what delays the stager or the device, or raise "
                "SaveOptions(timeout=)",
                rank=self.group.rank,
            )
        self._copies = None

    def close(self) -> None:
        """Free the arena once nothing is copied to it."""
        arena, copies = self._arena, self._copies
        self._arena = self._arena_id = self._copies = None
        if arena is not None and copies is not None:
            copies.add_done_callback(lambda _: arena.close())
        elif arena is not None:
            arena.close()


def _named(request: SaveRequest) -> object:
    """What the caller passed about groups."""
    options = request.options
    return options.parallel_state, repr(options.groups)  # the object: an id may be reused


def _changed(known: tuple[object, object] | None, now: tuple[object, object]) -> bool:
    """Whether something changed. Entries are unchanged while the selector returns the same list."""
    return known is None or known[0] is not now[0] or known[1] != now[1]
