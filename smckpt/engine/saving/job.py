"""One save: its request, its timings, and the handle that the user gets."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from smckpt.calls import changed
from smckpt.checkpoint.records.format import attempt_of
from smckpt.checkpoint.records.prefixes import spread_of
from smckpt.engine.groups import Partition
from smckpt.engine.saving.alarms import Alarms, Last
from smckpt.engine.saving.moment import Moment
from smckpt.errors import CheckpointError, SaveFailedError, UsageError
from smckpt.layout.image import DEFAULT_MAX_FILE_BYTES
from smckpt.meeting.group import Group
from smckpt.staging.copies import Stager
from smckpt.storage import Access, Storage
from smckpt.storage.budget import Share, Spread
from smckpt.topology import ParallelState

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save. The defaults suit a cluster; each line says when to change it.

    timeout: how many seconds each stage may take (agreeing, writing, gathering, publishing). Raise
        it for very slow storage; lower it to notice a dead peer sooner.
    max_consecutive_failures: how many failed saves in a row are only logged; the next one raises.
        0: every failure raises. Raise it if a disk that is full for an hour must not end the run.
    max_file_bytes: a rank's data is split into files of at most this size. Lower it for stores that
        limit the size of an object.
    sweep: delete what a new commit in the same directory supersedes. Switch it off to keep every
        save if you reuse one `checkpoint_id`.
    stager: carries out the copies from the state to host memory (docs/extending.md). By default
        `async_save` returns when the copies have ended. With a stager of your own they may go on
        after that.
    staging: "block": `async_save` returns when the state is copied. "overlap": parameters and
        optimizers' state on a CUDA device are copied after it has returned, and each step of an
        optimizer waits for what is left. "auto": as "overlap" where the state is on such a device.
        Choose it if the copies cost you too much; see docs/guide.md for what else must wait.
    alarms: what a save watches for in the state; see `Alarms`. Change it to make an alarm an error,
        or to compare replicas and count NaN and infinity.
    per_rank: globs of names of counters that differ between ranks on purpose, such as
        "optimizer.step" if each rank steps as it likes. Other counters that differ refuse the save,
        because a rank would bring another step than the others.
    queue: a name. The saves of one queue are made in order; queues are independent. Give each
        thread that saves a queue of its own.
    metadata: a dict to record; JSON must be able to hold it.
    groups: the groups (lists of global ranks) that make a step together. It is needed only if
        neither `parallel_state` nor the model's sharding says so.
    parallel_state: a `ParallelState`. It is recorded, and its replication groups make the step.
    on_commit: called once after the commit, on the coordinator, in the background. An exception in
        it is logged.
    allow_objects: types that may be stored with `torch.save` although they are not plain data.
    """

    timeout: float = 1800.0
    max_consecutive_failures: int = 0
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    sweep: bool = True
    stager: Stager | None = None
    staging: Literal["block", "overlap", "auto"] = "block"
    alarms: Alarms = field(default_factory=Alarms)
    per_rank: tuple[str, ...] = ()
    queue: str = "default"
    metadata: dict[str, Any] | None = None
    groups: Sequence[Sequence[int]] | None = None
    parallel_state: ParallelState | None = None
    on_commit: Callable[[SaveHandle], None] | None = None
    allow_objects: Sequence[type] = ()

    def __post_init__(self) -> None:
        if self.timeout <= 0:
            raise UsageError(f"timeout={self.timeout} is not positive", remedy="pass seconds > 0")
        if self.max_consecutive_failures < 0:
            raise UsageError("max_consecutive_failures is negative", remedy="0 raises on each")
        if self.max_file_bytes < 1 << 20:
            raise UsageError("max_file_bytes is below 1 MiB", remedy="leave it at its default")
        if self.stager is not None and not callable(self.stager):
            raise UsageError(f"stager is {self.stager!r}", remedy="pass a function of the copies")
        if self.staging not in ("block", "overlap", "auto"):
            known = 'pass "block", "overlap" or "auto"'
            raise UsageError(f"staging is {self.staging!r}", remedy=known)
        if self.stager is not None and self.staging == "overlap":
            raise UsageError(
                'staging="overlap" has no effect together with stager=',
                remedy="leave one of them out: a stager carries out all copies",
            )
        if not isinstance(self.alarms, Alarms):
            raise UsageError(f"alarms is {self.alarms!r}", remedy="pass smckpt.Alarms(...)")
        if isinstance(self.per_rank, str) or not all(isinstance(n, str) for n in self.per_rank):
            raise UsageError(f"per_rank is {self.per_rank!r}", remedy="pass a tuple of globs")
        object.__setattr__(self, "per_rank", tuple(self.per_rank))
        for name, right in (
            ("queue", isinstance(self.queue, str) and self.queue != ""),
            ("metadata", isinstance(self.metadata, (dict, type(None)))),
            ("parallel_state", isinstance(self.parallel_state, (ParallelState, type(None)))),
            ("on_commit", self.on_commit is None or callable(self.on_commit)),
            ("allow_objects", all(isinstance(kind, type) for kind in self.allow_objects)),
        ):
            if not right:
                raise UsageError(
                    f"{name} is {getattr(self, name)!r}", remedy="see smckpt.SaveOptions"
                )


@dataclass(frozen=True)
class SaveRequest:
    """The checked arguments of a call of `async_save`."""

    directory: str
    coordinator: int
    step: int | None
    options: SaveOptions
    access: Access

    def __post_init__(self) -> None:
        if self.directory:
            spread_of(self.storage)  # raises here, before anything is staged

    @property
    def storage(self) -> Storage:
        """The access to the directory's store."""
        return self.access.open(self.directory)

    def recorded(self) -> dict[str, Any]:
        """A copy of what the part records, as JSON values, so that the caller may change it later.

        Raises:
            UsageError: JSON cannot hold them.
        """
        try:
            step = None if self.step is None else operator.index(self.step)
        except TypeError:
            raise UsageError(
                f"step is {self.step!r}, which is a {type(self.step).__name__} and not an integer",
                remedy="pass a whole number",
            ) from None
        if step is not None and step.bit_length() > 63:
            raise UsageError(f"step {step} has more than 64 bits", remedy="pass a smaller number")
        try:
            metadata = json.loads(json.dumps(self.options.metadata or {}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"JSON cannot hold SaveOptions(metadata=): {error}",
                remedy="pass text, finite numbers, lists and dicts; put other values in the state",
            ) from error
        degrees = self.options.parallel_state
        topology = None if degrees is None else degrees.to_json()
        return {"step": step, "metadata": metadata, "topology": topology}


@dataclass(frozen=True)
class Timings:
    """The seconds that a save took on this rank, and the bytes that it wrote.

    blocked: until `async_save` returned, with `waited`. waited: for the save before this one. The
        others count from the end of that wait. staged: until the state was in host memory, and with
        overlap compared with that of the call. written: until this rank's files were durable.
        committed: until this rank knew of the commit.
    """

    blocked: float
    waited: float
    staged: float
    written: float
    committed: float
    nbytes: int


class SaveHandle(concurrent.futures.Future[Timings]):
    """A save in flight, as a future. Its result is the save's `Timings`. It cannot be cancelled.

    number: counts the saves of its queue from 0. error: why it was not committed. alarms: what the
    save warned of, once it is committed; the same on all ranks of the group. copied: ends when the
    state may change again; None if it may since the call returned.
    """

    def __init__(self, number: int, checkpoint_id: str, step: int | None) -> None:
        super().__init__()
        self.number = number
        self.checkpoint_id = checkpoint_id
        self.step = step
        self.timings: Timings | None = None
        self.error: CheckpointError | None = None
        self.alarms: tuple[str, ...] = ()
        self.failure_seen = False  # whether a caller has seen its failure
        self.copied: concurrent.futures.Future[None] | None = None
        self._announced_by: int | None = None  # the thread that runs on_commit
        self._pid = os.getpid()
        self.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        what = "is under way"
        if self.error is not None:
            what = f"failed: {self.error.message}"
        elif self.timings is not None:
            at = self.timings
            what = f"committed in {at.committed:.2f} s, {bytes_text(at.nbytes)} by this rank"
        step = "" if self.step is None else f", step {self.step}"
        return f"<SaveHandle: save {self.number}{step}, to {self.checkpoint_id}: {what}>"

    def result(self, timeout: float | None = None) -> Timings:
        """Wait until the save is committed. Runs no communication.

        A failure that is raised here is not raised again by the queue's next call on this rank.

        Raises:
            SaveFailedError: it was not committed; with the cause and the rank where it happened.
            TimeoutError: `timeout` seconds passed.
        """
        failed = self.exception(timeout)
        if failed is not None:
            raise failed
        assert self.timings is not None
        return self.timings

    wait = result

    def wait_for_staging(self, timeout: float | None = None) -> None:
        """Wait until the state is copied and may be changed again. Whether it was copied well,
        `result` says.

        Raises:
            TimeoutError: `timeout` seconds passed.
        """
        copied = [] if self.copied is None else [self.copied]
        if concurrent.futures.wait(copied, timeout).not_done:
            raise TimeoutError(f"save {self.number} was not copied within {timeout} s")

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does. Returns the error of a save that was not committed, or None."""
        self.ended(timeout, or_raise=True)
        self.failure_seen = self.error is not None
        return None if self.error is None else self.failure()

    def ended(self, timeout: float | None = None, *, or_raise: bool = False) -> bool:
        """Wait for the verdict without raising it. Returns whether it is there."""
        if self._announced_by == threading.get_ident():  # in on_commit it would wait for itself
            return True
        if os.getpid() != self._pid and not self.done():
            raise UsageError(
                f"a forked child waits for save {self.number} of its parent, and would never hear "
                "of its end",
                remedy="wait in the training process itself",
            )
        try:
            super().exception(timeout)
        except concurrent.futures.TimeoutError:
            if or_raise:
                text = f"save {self.number} did not finish within {timeout} s"
                raise TimeoutError(text) from None
            return False
        return True

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the handle once the verdict is there: in the queue's thread, or at once.
        An exception in `fn` is logged."""

        def call(handle: Any) -> None:
            try:
                fn(handle)
            except BaseException:  # SystemExit too, since it would end the queue's thread
                log.exception("a callback of save %d raised", handle.number)

        super().add_done_callback(call)

    def failure(self) -> SaveFailedError:
        cause = self.error
        assert cause is not None
        failed = SaveFailedError(
            f"save {self.number} to {self.checkpoint_id} was not committed: {cause.message}",
            remedy=cause.remedy,
            path=cause.path or self.checkpoint_id,
            rank=cause.rank,
            host=cause.host,
        )
        failed.__cause__ = cause
        return failed

    def finish(self, timings: Timings, error: CheckpointError | None) -> None:
        """Set the verdict and run the callbacks."""
        self.timings, self.error = timings, error
        if error is None:
            self.set_result(timings)
        else:
            self.set_exception(self.failure())

    def given_up(self, waited: float) -> SaveHandle:
        """Mark this save as failed, because the process ends and no longer waits for it."""
        lost = SaveHandle(self.number, self.checkpoint_id, self.step)
        lost.error = SaveFailedError(
            f"the save had not finished {waited:.0f} s after the end of the program",
            remedy="raise SMCKPT_EXIT_TIMEOUT, or call maybe_finalize_async_calls at the end",
        )
        return lost


class SavesOfGroup:
    """The saves of one group, in order: the last one, and what no call has heard yet of those that
    have ended."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.flying: SaveHandle | None = None
        self._unreported: list[SaveHandle] = []
        self._committed: list[int] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def failed(self) -> list[SaveHandle]:
        """Saves that failed and whose failure nobody has seen."""
        with self._lock:
            return self._unseen()

    def finalize(self, blocking: bool, timeout: float | None = None) -> list[int]:
        """Return the numbers of the saves committed since the last call. Raise if a save failed.

        With `blocking` it waits for the save in flight. Runs no collective.
        """
        flying = self.flying
        if blocking and flying is not None and not flying.ended(timeout):
            raise SaveFailedError(
                f"save {flying.number} did not finish within {timeout} s",
                remedy="wait longer, or read the logs of the other ranks",
                path=flying.checkpoint_id,
                rank=self.group.rank,
            )
        self._raise_failures()
        with self._lock:
            committed, self._committed = self._committed, []
        return committed

    def close(self, timeout: float) -> list[SaveHandle]:
        """Wait at most `timeout` seconds for the save in flight, and end.

        Returns:
            The saves whose failure nobody has seen: those that failed and the one that was given
            up.
        """
        if os.getpid() != self._pid:  # a forked child owns nothing here
            return []
        flying = self.flying
        late = flying is not None and not flying.ended(timeout)
        return self.failed + ([flying.given_up(timeout)] if flying is not None and late else [])

    def _unseen(self) -> list[SaveHandle]:
        return [handle for handle in self._unreported if not handle.failure_seen]

    def _raise_failures(self) -> None:
        """Raise failures, even if later saves succeeded. Each failure is raised once, by its handle
        or here."""
        with self._lock:
            failed, self._unreported = self._unseen(), []
        for handle in failed[:-1]:
            log.error("%s", handle.failure())
        if failed:
            raise failed[-1].failure()


@dataclass
class SaveJob:
    """A save on its way through the queue. `error`: set if it failed before the queue's thread got
    it. call: which call of this queue made it; the handle's number counts also the saves that this
    rank skipped. refused: the moment of the last of those."""

    handle: SaveHandle
    request: SaveRequest
    partition: Partition
    call: int = 0
    moment: Moment = field(default_factory=Moment)
    refused: Moment | None = None
    error: CheckpointError | None = None
    reported: bool = False  # already raised to the caller
    began: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    staged: float = 0.0
    blocked: float = 0.0
    written: float = 0.0
    brought: float | None = None  # when this rank's part was durable, by time.monotonic
    nbytes: int = 0
    retries: int | None = None
    last: Last | None = None  # what the next save is compared with once this one is committed

    @property
    def timeout(self) -> float:
        """Seconds that each of its stages may take."""
        return self.request.options.timeout

    @property
    def called(self) -> str:
        """How messages call it."""
        step = self.handle.step
        return f"save {self.handle.number}" if step is None else f"step {step}"

    def activity(self) -> str:
        """What it is doing now."""
        to = self.handle.checkpoint_id
        if not self.written:
            return f"{self.called} is being written to {to}"
        return (
            f"{self.called} waits to be committed in {to}, {bytes_text(self.nbytes)} of this rank"
        )

    def elapsed(self) -> float:
        """Seconds since the end of the wait for the save before this one."""
        return time.perf_counter() - self.began - self.waited

    def timings(self) -> Timings:
        return Timings(
            self.blocked, self.waited, self.staged, self.written, self.elapsed(), self.nbytes
        )

    def attempt(self, session: str) -> str:
        return attempt_of(session, self.handle.number)

    @property
    def spread(self) -> Spread | None:
        """The prefixes of the ranks' files that the options of the call ask for."""
        if not self.request.directory:
            return None
        return spread_of(self.request.storage, len(self.partition.groups))

    def as_one_of_all(self, group: Group) -> Access:
        """The access for work that every rank does at once, with this rank's share of the
        budget."""
        spread = self.spread
        share = Share.of_rank(group.rank, group.world_size, spread.prefixes if spread else 1)
        return self.request.access.holding(share, spread)

    def as_coordinator(self) -> Access:
        """The access for work that only the coordinator of a group does."""
        spread, groups = self.spread, len(self.partition.groups)
        prefixes = spread.prefixes if spread else 1
        share = Share.of_coordinator(self.partition.mine, groups, prefixes)
        return self.request.access.holding(share, spread)

    def finish(self, error: CheckpointError | None) -> None:
        self.handle.finish(self.handle.timings or self.timings(), error)


def options_of(options: SaveOptions | None, timeout: float) -> SaveOptions:
    """The options of a manager's saves, from its arguments.

    Raises:
        UsageError: they contradict each other.
    """
    given = SaveOptions(timeout=timeout) if options is None else options
    own = "queue", "metadata", "groups", "on_commit"
    if names := [f"{name}=" for name in own if name in changed(given)]:
        raise UsageError(
            f"SaveOptions({', '.join(names)}) has no effect in the options of a manager",
            remedy="leave it out: the manager's own arguments and those of its `save` say it",
        )
    return given


def bytes_text(count: float) -> str:
    """Bytes for people: "1.2 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
