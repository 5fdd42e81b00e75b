"""A run's last steps in the memory of its hosts, beside those on disk or in S3.

Each host has a keeper (`storage/memory/keeper.py`), which the first rank there starts and which
ends with the job. So after a restart the steps are still there, on all hosts that are.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import logging
import math
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.run_directory import Damaged, RunDirectory, Template, Whole
from smckpt.engine.api import leave_queue, maybe_finalize_async_calls, prewarm
from smckpt.engine.background.worker_client import command_of
from smckpt.engine.groups import ReplicationGroup
from smckpt.engine.saving.job import SaveHandle, SaveOptions
from smckpt.errors import (
    CheckpointError,
    MemoryBudgetError,
    SaveFailedError,
    StorageError,
    UsageError,
    as_checkpoint_error,
    count_text,
)
from smckpt.manager.record import not_abandoned
from smckpt.manager.retention import Newest, Retention, Rivals, refuse_count
from smckpt.manager.schedule import Interval, Schedule, refused
from smckpt.manager.state import Failed
from smckpt.meeting.group import Membership
from smckpt.staging.arena import free_memory
from smckpt.storage import open_storage
from smckpt.storage.memory.hyperpod import RETAINED, HyperPodStorage, daemon_url
from smckpt.storage.memory.keeper import listening
from smckpt.storage.memory.store import KeeperStorage, asked_locally, job_of
from smckpt.storage.memory.wire import Peer, own_address
from smckpt.storage.urls import Below

log = logging.getLogger("smckpt")

MEMORY_QUEUE = "manager-memory"
MOST_LEFT_OUT = 64  # saves to memory, while they fail
SERVICE = "SMCKPT_KEEPER"  # the name of the keepers that run as services (`smckpt keeper`)


@dataclass(frozen=True)
class Memory:
    """Keep the last steps in the memory of hosts too; an argument of `CheckpointManager`.

    Args:
        interval: when a step is saved there, unless it is due on disk: a number of steps, a
            `datetime.timedelta` or "auto", as `interval` of the manager.
        keep: how many steps stay. They need the memory of one step more while one is written.
        replicas: how many other hosts get a copy of what a host saves. Where there are fewer other
            hosts, each gets one.
        budget: bytes that the keeper of a host may hold, for all ranks there and the copies of
            others; None: half of what is free when the first rank starts it.
        domain: what may fail together with this rank's host, such as the name of its rack. Copies
            go to other domains, as far as there are any. None: the host by itself.
        daemon: "http://HOST:9200/NAMESPACE" of HyperPod's managed tier, which then holds the bytes
            in place of keepers and copies them by its own rules; the commits go below the root.
    """

    interval: Interval
    keep: int = 2
    replicas: int = 1
    budget: int | None = None
    domain: str | None = None
    daemon: str | None = None

    def __post_init__(self) -> None:
        refused(self.interval)
        refuse_count("keep of Memory", self.keep, 1)
        refuse_count("replicas of Memory", self.replicas, 0)
        if self.budget is not None:
            refuse_count("budget of Memory", self.budget, 1)
        if self.domain is not None and not (isinstance(self.domain, str) and self.domain):
            raise UsageError(
                f"domain of Memory is {self.domain!r}", remedy="give the name of a rack or zone"
            )
        if self.daemon is None:
            return
        daemon_url(self.daemon, "/")
        for name in ("replicas", "budget", "domain"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise UsageError(
                    f"{name} of Memory is not honoured by HyperPod's daemon",
                    remedy="leave it out: the cluster's managed tier says it",
                )
        if self.keep > RETAINED - 2:
            raise UsageError(
                f"keep of Memory is {self.keep}, and the daemon drops all but {RETAINED} steps",
                remedy=f"give at most {RETAINED - 2}: two more may be unfinished",
            )


class MemoryTier:
    """The keepers of a job, as one rank sees them. `begin` finds them."""

    def __init__(
        self,
        memory: Memory | None,
        root: str,
        template: Template,
        options: SaveOptions,
        schedule: Schedule,
    ) -> None:
        self.memory = memory
        self.schedule = schedule
        # a save that fails here costs speed; the next one on disk counts
        self.options = replace(options, max_consecutive_failures=1 << 30, queue=MEMORY_QUEUE)
        self.root = ""  # of the steps; "": the tier is off
        self.steps: RunDirectory | None = None
        self.retention: Retention | None = None
        self._rivals: Rivals | None = None
        self._template, self._disk_root = template, root
        self._member = -1
        self._policy = _WhatFits(1)
        self._newest = ""  # of the commits
        # an error: the call itself failed on this rank, and a handle fails on the others
        self._last: SaveHandle | CheckpointError | None = None
        self._saves = False  # whether a save of this process has begun
        self._failed = self._left_out = 0  # saves in a row; of those that are due from now on
        self._without_room = 0  # of those that failed in a row
        self._joins = 0  # the ranks count alike
        self._join: Callable[[], tuple[str, list[list[Any]], str]]
        self._run = hashlib.sha256(f"{root}\0{template.text}".encode()).hexdigest()[:12]

    def begin(self, membership: Membership, process_group: Any, timeout: float) -> None:
        """Find the keepers of all hosts, and start those that are not there; all ranks call it.
        Where a rank finds none, the tier is off on all of them, and the log says why."""
        memory, self._member = self.memory, membership.group.index
        if memory is None:
            return
        found = self._joined if memory.daemon is None else self._reached
        self._join = partial(found, memory, membership, timeout)
        root, peers, failed = self._join()
        if failed:
            log.warning("no step is kept in memory: %s", failed)
            self.memory = None
            return
        self.root = root
        self.steps = RunDirectory(open_storage(self.root), self._template)
        self._policy = _WhatFits(memory.keep)
        self._rivals = Rivals(self.steps)
        self.retention = Retention(self.steps, (self._policy,), None, self._rivals)
        prewarm(process_group=process_group, options=replace(self.options, timeout=timeout))
        if self._member == 0 and memory.daemon is not None:
            log.info("steps are kept in memory (interval %s) below %s", memory.interval, self.root)
        elif self._member == 0:
            have = min(memory.replicas, len(peers) - 1)
            hosts = count_text(len(peers), "host")
            text = "steps are kept in memory (interval %s) below %s, on %s"
            log.info(text, memory.interval, self.root, hosts)
            if have < memory.replicas:
                text = "Memory(replicas=%d) wants a host for each copy, but the job has %s"
                log.warning(text, memory.replicas, hosts)
            if have and len({domain for *_, domain in peers}) == 1:
                log.warning("all hosts are in domain %s: copies do not leave it", memory.domain)

    def _reached(
        self, memory: Memory, membership: Membership, timeout: float
    ) -> tuple[str, list[list[Any]], str]:
        """As `_joined`, of HyperPod's daemon, which every rank has to reach."""
        meeting, self._joins = membership.meeting(timeout), self._joins + 1
        root = daemon_url(str(memory.daemon), self._disk_root)

        def mine() -> str:
            try:
                HyperPodStorage(root).reach()
            except CheckpointError as error:
                return str(error)
            return ""

        failed = meeting.round(f"memory/{self._joins}/daemon", mine, _first, timeout=timeout)
        return root, [], failed

    def _joined(
        self, memory: Memory, membership: Membership, timeout: float
    ) -> tuple[str, list[list[Any]], str]:
        """Tell the keepers of all hosts of each other: the URL of what they hold, the keepers, and
        the first error; the same on all ranks."""
        meeting, self._joins = membership.meeting(timeout), self._joins + 1
        point = f"memory/{self._joins}"

        def named(_: Callable[[], Any]) -> list[Any]:
            if service := os.environ.get(SERVICE):
                if memory.budget is not None:
                    raise UsageError(
                        f"budget of Memory has no effect on the keepers of {SERVICE}={service}",
                        remedy="leave it out: `smckpt keeper --budget` says it",
                    )
                return [service, True]
            job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID")
            job = job or f"{socket.gethostname()}-{os.getpid()}"
            return [f"{''.join(c if c.isalnum() else '-' for c in job)}-{self._run}".lower(), False]

        def mine() -> list[Any]:
            try:
                if not is_service:
                    _start_here(job, memory.budget)
                own = Peer(*asked_locally(job, {"do": "hello"})["own"])
                return [replace(own, domain=memory.domain or own.secret).to_json(), ""]
            except (CheckpointError, OSError) as error:
                return [None, str(error)]

        def all_of(brought: Callable[[], dict[int, list[Any]]]) -> list[Any]:
            found = [each for _, each in sorted(brought().items())]
            failed = next((error for _, error in found if error), "")
            peers = {peer[3]: peer for peer, _ in found if peer is not None}
            cut_off = [host for host, address, *_ in peers.values() if not address]
            if cut_off and len(peers) > 1 and memory.replicas:
                failed = failed or f"no network leads to {cut_off[0]}"
            return [[*peers.values()], failed]

        def joined() -> str:
            """Tell this host's keeper of the others; the error."""
            try:
                asked_locally(job, {"do": "join", "peers": peers, "replicas": memory.replicas})
            except CheckpointError as error:
                return str(error)
            return ""

        job, is_service = meeting.round(f"{point}/job", lambda: None, named, timeout=timeout)
        peers, failed = meeting.round(f"{point}/keepers", mine, all_of, timeout=timeout)
        failed = failed or meeting.round(f"{point}/joined", joined, _first, timeout=timeout)
        return f"keeper://{job}/{self._run}" if is_service else f"keeper://{job}", peers, failed

    def is_due(self, step: int) -> bool:
        due = self.memory is not None and self.schedule.is_due(step)
        if due and self._left_out:
            self._left_out -= 1
            return False
        return due

    def save(
        self,
        save: Callable[..., SaveHandle | None],
        state: Any,
        subpath: str,
        group: ReplicationGroup,
        metadata: dict[str, Any],
    ) -> SaveHandle | None:
        """Save a step into memory with `save`, an `async_save` that lacks what, where and how.
        None: the tier is off or fails, and the step belongs on disk.

        Raises:
            UsageError: a later job saves there. Rank 0 raises it, and the save fails on the others.
            Exception: a rank's state cannot be taken, likewise.
        """

        def committed(handle: SaveHandle) -> None:
            if self._member == 0 and self.retention is not None and handle.timings is not None:
                self.schedule.measured(handle.timings)
                self._newest = subpath
                self.retention.committed(subpath)

        if not self.root:
            return None
        before, self._last, self._saves = self._last, None, True
        if isinstance(before, SaveHandle):
            before.ended()  # this save would wait for it anyway
            self._count(before.error)
        elif before is not None:
            self._count(before)
        if self._failed and (error := self._join()[-1]):
            log.warning("the step in %s is not saved to memory: %s", subpath, error)
            self._count(StorageError(error))
            return None
        if self._failed:
            self._heal()
        if self._member == 0 and self._rivals is not None:
            try:
                self._rivals.refuse_older()
            except StorageError as error:
                if not error.of_store:  # else the save itself finds no keeper
                    state = Failed(UsageError(error.message, remedy=error.remedy, path=error.path))
            claimed = {**metadata.get("manager", {}), "claim": self._rivals.claim()}
            metadata = {**metadata, "manager": claimed}
        try:
            self._last = save(
                state,
                checkpoint_id=Below(group.directory(f"{self.root}/{subpath}"), self.root),
                options=replace(self.options, metadata=metadata, on_commit=committed),
            )
            return self._last
        except Exception as error:
            self._last = as_checkpoint_error(error)  # counted when the others count their handles
            if not isinstance(error, StorageError):
                raise
            log.warning("the step in %s is not saved to memory: %s", subpath, error)
            return None

    def _count(self, error: CheckpointError | None) -> None:
        """A save has ended, on all ranks alike. While saves fail, leave out ever more of those that
        are due: a keeper that hangs would hold training up in each of them."""
        self._failed = 0 if error is None else self._failed + 1
        self._left_out = min(2**self._failed, MOST_LEFT_OUT) - 1
        self._without_room = self._without_room + 1 if isinstance(error, MemoryBudgetError) else 0
        if self._without_room and not self._member:
            self._make_room()
        if self._left_out and self._member == 0:
            text = "%d saves to memory have failed in a row: the next %d are left out"
            log.warning(text, self._failed, self._left_out)

    def _make_room(self) -> None:
        """Keep one step from now on: without room for another one, none would ever be deleted."""
        if self.retention is None or self.steps is None:
            return
        if self._policy.short:
            if self._without_room == 3:  # the second may have come before the deletion
                log.warning(
                    "memory has no room for a second step while the first is there: the step in %s "
                    "stays, and no newer one is saved there. Give Memory(budget=) room for two "
                    "steps, or save less in memory",
                    self._newest,
                )
            return
        if not self._newest and (found := self.steps.all()):
            self._newest = self.steps.subpath_of(found[-1])
        if self._newest:
            log.warning("memory is short: it holds one step from now on")
            self._policy.short = True
            self.retention.committed(self._newest)

    def discard_unfinished(self) -> None:
        """Delete what a job left there that ended in the middle of a save. Once this one has begun
        a save, nothing is deleted: that may be its own, under way. The caller lets no rank begin
        one meanwhile."""
        if self.steps is None or self._member or self._saves:
            return
        store = open_storage(self.root)
        assert isinstance(store, KeeperStorage | HyperPodStorage)
        try:
            self.steps.forget()
            steps = [
                one.subpath if isinstance(one, Damaged) else self.steps.subpath_of(one)
                for one in self.steps.newest_first()
            ]
            for directory, names in store.tree().items():
                if not any(
                    f"{directory}/".startswith(f"{step}/" if step else "") for step in steps
                ):
                    log.info("%s in memory was never committed: deleted", directory)
                    store.join(directory).delete_many(names)
        except StorageError as error:
            log.warning("what was not committed stays in memory: %s", error)

    def restored(self, step: int) -> None:
        """Start again from this step, on all ranks. The hosts that are left give what they hold
        its copies again, in the background."""
        self.schedule.restored(step)
        self._last, self._failed, self._left_out = None, 0, 0
        if self.root:
            self._heal()

    def _heal(self) -> None:
        if self.memory is None or self.memory.daemon is not None:
            return
        with contextlib.suppress(StorageError):  # the next save says what is wrong
            asked_locally(job_of(self.root), {"do": "heal"})

    def close(self, timeout: float) -> None:
        """Wait for the saves and deletions under way. Failed ones are in the log."""
        self.schedule.close()
        if self.retention is None:
            return
        with contextlib.suppress(SaveFailedError):
            maybe_finalize_async_calls(queue=MEMORY_QUEUE)
        leave_queue(MEMORY_QUEUE, timeout)
        self.retention.close(timeout)


@dataclass
class _WhatFits:
    """A policy: the newest steps of the run's last life; one of them once memory is `short`."""

    count: int
    short: bool = False

    def kept(self, steps: Sequence[FoundCheckpoint], whole: Whole) -> Sequence[FoundCheckpoint]:
        return Newest(1 if self.short else self.count).kept(not_abandoned(steps), whole)


@dataclass(frozen=True)
class Tiers:
    """The steps in memory and on disk, for `resume`: newest first, of one step that in memory.
    Those up to the step `after` do not count, and where there is an `only`, no other one does."""

    disk: RunDirectory | None
    memory: RunDirectory | None
    after: int = -1
    only: int | None = None

    @property
    def root(self) -> Any:
        found = self.disk or self.memory
        assert found is not None  # only then is there a step
        return found.root

    def is_in_memory(self, one: FoundCheckpoint) -> bool:
        return self.memory is not None and one.path.startswith(self.memory.root.url)

    def newest_first(self) -> Iterator[FoundCheckpoint | Damaged]:
        """As `RunDirectory.newest_first`. Keepers that do not answer cost their steps."""
        on_disk = iter(()) if self.disk is None else self.disk.newest_first()
        for one in heapq.merge(
            self.in_memory(), on_disk, key=lambda one: -math.inf if one.step is None else -one.step
        ):
            if one.step is None or (one.step > self.after and self.only in (None, one.step)):
                yield one

    def in_memory(self) -> Iterator[FoundCheckpoint | Damaged]:
        """The steps there of which every file is: others went with their hosts, and a load of one
        would change the state before it fails. A step that the run has left behind may come back
        with its host: it is none of them."""
        if self.memory is None:
            return
        found: list[FoundCheckpoint | Damaged] = []
        try:
            found.extend(self.memory.newest_first())
        except StorageError as error:
            log.warning("some steps in memory are passed over: %s", error)
        stay = not_abandoned(one for one in reversed(found) if isinstance(one, FoundCheckpoint))
        for one in found:
            if isinstance(one, Damaged):
                lost = str(one.error)
            elif one in stay:
                lost = self.memory.missing(one)
            else:
                lost = "the run went back to an older step, and has saved since"
            if lost:
                log.warning("step %s in memory is lost: %s", one.step, lost)
            else:
                yield one


def _first(brought: Callable[[], dict[int, str]]) -> str:
    """The first error of those that the ranks bring; "" if there is none."""
    return next((error for error in brought().values() if error), "")


def _start_here(job: str, budget: int | None) -> None:
    """Start this host's keeper, if there is none."""
    local = listening(job)
    if local is None:
        return
    with local, contextlib.ExitStack() as stack:
        # Under torchrun the parent is the agent, which outlives the ranks; otherwise the job is
        # this process.
        of_job = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
        ends = os.pidfd_open(of_job)
        stack.callback(os.close, ends)
        asked = {
            "budget": budget if budget is not None else free_memory() // 2,
            "address": own_address(),
            "local": local.fileno(),
            "ends": [ends],
        }
        subprocess.Popen(
            [
                *command_of("from smckpt.storage.memory.keeper import main; main(sys.argv[1])"),
                json.dumps(asked),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[local.fileno(), ends],
            cwd="/",
            start_new_session=True,  # it outlives this rank
        )
