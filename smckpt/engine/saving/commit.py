"""The rounds that commit a save: written → gathered → manifest → record → verdict.

They run in the queue's thread on every rank. Every rank brings its part, or its error. The
coordinator decides, and all ranks hear the one verdict.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from smckpt.checkpoint.records.format import GroupManifest, record_name
from smckpt.engine.background.commands import (
    Probe,
    Published,
    PublishManifest,
    PublishRecord,
    Sweep,
    TakeLease,
)
from smckpt.engine.background.worker_client import Worker
from smckpt.engine.saving.alarms import Observed, judge
from smckpt.engine.saving.commit_groups import GroupSave, Steps, Ticket, refuse_unequal
from smckpt.engine.saving.differing import (
    of_moment,
    ranks_text,
    refuse_different,
    tells_nothing,
)
from smckpt.engine.saving.job import SaveJob
from smckpt.engine.saving.moment import Moment
from smckpt.errors import (
    CheckpointError,
    PeerError,
    StorageError,
    UsageError,
    WorkerError,
)
from smckpt.meeting.group import Membership
from smckpt.meeting.round import Meeting, Round
from smckpt.storage import Access
from smckpt.storage.urls import bucket_url, common_parent, parent_url, relative_url

LEASES_KEPT = 64  # directories whose lease is remembered
PROBES_SOUGHT = 8  # directories in which a rank looks for a probe
PROBE_SECONDS = 10.0  # the ranks wait for the verdict while a probe of a refused save is written

log = logging.getLogger("smckpt")


T = TypeVar("T")
Brought = Callable[[], dict[int, T]]  # returns the messages of all members of a round


@dataclass(frozen=True)
class Written:
    """A rank's durable part. prefixes: those of its files, as a text, for comparison. crc64: the
    checksum of the part record, in hex. looked: what the rank saw, for alarms."""

    rank: int
    host: str
    coordinator: int
    moment: Moment
    prefixes: str = ""
    part: str = ""
    crc64: str = ""
    looked: Observed | None = None


@dataclass(frozen=True)
class Committed:
    """A committed save. nbytes: of the data files of the group. record, record_directory: for
    a step of several groups. alarms: what the group's coordinator warned of."""

    manifest: str
    fencing_token: int
    nbytes: int
    record: str | None = None
    record_directory: str | None = None
    alarms: tuple[str, ...] = ()


class Committer:
    """Commits the saves of one queue. Used by one thread.

    Args:
        since: when this run of the job began, in nanoseconds since 1970.

    met_before: the saves below this number, which DCP made, had a meeting. probed: whether a first
    save has looked at the storage.
    """

    def __init__(self, membership: Membership, worker: Worker, since: int) -> None:
        self._since = since
        self.membership = membership
        self.worker = worker
        self.group = membership.group
        self._meeting: Meeting | None = None
        self._steps = Steps(membership)
        self._tokens: dict[tuple[str, ...], int] = {}
        self.probed = False
        # until this rank has seen a probe: where they are, and the host that wrote the first
        self._unseen: list[str] = []
        self._prober = ""
        self._tried: set[str] = set()
        self.met_before = 0
        self._unmet: dict[int, Moment] = {}  # the saves that were given up without a meeting
        # of the refused save before this one: rank → its directory
        self._refused: dict[int, str] = {}
        self._last: dict[int, Moment] = {}  # of the last save that was not refused
        self._directories: dict[str, None] = {}  # those of earlier saves
        self._warned = False
        self._warned_of_metadata = False

    def publish(self, job: SaveJob, write: Callable[[Meeting], Written]) -> Committed:
        """Carry out a save: all ranks write, then the coordinator publishes.

        Raises:
            CheckpointError: the save was not committed. It is the cause, from any rank.
        """
        if self._meeting is None:
            self._unmet[job.handle.number] = job.moment
            self._meeting = self._met(job)
        meeting = self._meeting

        def bring() -> Written:
            if not self.probed and len(self.group.ranks) > 1:
                self._probe(meeting, job)
            elif meeting.member == 0 and job.error is None:
                # Before the first save into a bucket, one rank checks that it can hold checkpoints.
                # The others learn of a failure from the verdict.
                bucket = bucket_url(job.request.directory)
                if bucket and bucket not in self._tried:
                    self._look(meeting, job, job.as_coordinator(), create=True, leave=False)
                    self._tried.add(bucket)
            if self._unseen:
                self._refuse_unshared(meeting, job)
            return write(meeting)

        def decide(written: Brought[Written]) -> Committed:
            try:
                return of_moment(job.moment, lambda: self._decide(meeting, job, written))
            except (StorageError, WorkerError) as error:
                if error.rank not in (None, self.group.rank):
                    # It may be that rank's first save, and the probe be gone when it looks again.
                    access, most = job.as_coordinator(), min(job.timeout, PROBE_SECONDS)
                    with suppress(CheckpointError):
                        self._look(meeting, job, access, create=True, timeout=most)
                raise

        return meeting.round(
            f"save/{job.handle.number}",
            bring,
            decide,
            leader=self.group.ranks.index(job.request.coordinator),
            timeout=job.timeout,
            brings=Written,
            gives=Committed,
            moment=vars(job.moment),
        )

    def rounds_of(self, number: int, coordinator: int) -> list[Round]:
        """The rounds with which save `number` may begin."""
        return [
            Round(f"made/{number}"),
            Round(f"save/{number}", self.group.ranks.index(coordinator)),
        ]

    def _met(self, job: SaveJob) -> Meeting:
        """The meeting for this save. If earlier saves had no meeting, the leader gave them up, and
        posts that, so that a late rank does not wait for their answer."""
        meeting = self.membership.meeting(job.timeout)
        coordinator = self.group.ranks.index(job.request.coordinator)
        for number in range(self.met_before, job.handle.number):
            over = PeerError(
                f"rank {self.group.rank} gave up save {number} before this rank joined it",
                remedy="find out what delayed this rank; raise timeout= if it was only slow",
                rank=self.group.rank,
            )
            if number in self._unmet:
                over.moment = vars(self._unmet[number])
            for point, leader in ((f"made/{number}", 0), (f"save/{number}", coordinator)):
                if meeting.member == leader:
                    meeting.refuse(point, over, leader=leader)
        return meeting

    # -- the first save ----------------------------------------------------------------------

    def _probe(self, meeting: Meeting, job: SaveJob) -> None:
        """Check once per meeting that the store can hold checkpoints and that all hosts see one
        directory. A rank whose host does not brings that to the round of the save, without writing.

        A rank whose save failed before it had a directory takes part too, so that nobody waits.
        """
        number, path = job.handle.number, job.request.directory

        def here() -> Moment:
            if job.error is not None:
                raise job.error
            return job.moment

        def make(brought: Callable[[], dict[int, Moment]]) -> str:
            self._refuse_different(job, {ranks[at]: one for at, one in brought().items()})
            self._look(meeting, job, job.as_coordinator(), create=True)
            self._tried.add(bucket_url(path))
            return socket.gethostname()

        ranks = self.group.ranks
        wrote = meeting.round(
            f"made/{number}",
            here,
            lambda brought: of_moment(job.moment, lambda: make(brought)),
            timeout=job.timeout,
            brings=Moment,
            gives=str,
            moment=vars(job.moment),
        )
        self.probed = True  # on all ranks alike
        self._prober, self._unseen = wrote, [path] if meeting.member else []

    def _refuse_unshared(self, meeting: Meeting, job: SaveJob) -> None:
        """Look for a probe, in each save until one is seen; after each that this rank refuses there
        is one more. Below another directory there is none, and the coordinator misses this rank's
        part if it does not see it."""
        path = job.request.directory
        probed = [each for each in self._unseen if parent_url(each) == parent_url(path)]
        if not probed:
            return
        self._unseen = list(dict.fromkeys([*self._unseen, path]))[-PROBES_SOUGHT:]
        access = job.as_one_of_all(self.group)
        for each in reversed(probed):
            if self._look(meeting, job, access, create=False, directory=each):
                self._unseen = []
                return
        raise StorageError(
            "the directory is not shared by all hosts of the group: "
            f"{socket.gethostname()} does not see what host {self._prober} writes",
            remedy="mount one file system on all hosts, or use an s3:// checkpoint_id",
            path=path,
        )

    def _look(
        self,
        meeting: Meeting,
        job: SaveJob,
        access: Access,
        *,
        create: bool,
        leave: bool = True,
        directory: str = "",
        timeout: float | None = None,
    ) -> bool:
        probe = Probe(directory or job.request.directory, meeting.id, create, leave)
        answer = self.worker.call(probe, timeout=timeout or job.timeout, access=access)
        if answer.remark is not None:
            log.warning("%s", answer.remark)
        return answer.seen

    # -- the coordinator -------------------------------------------------------------------

    def _decide(self, meeting: Meeting, job: SaveJob, written: Brought[Written]) -> Committed:
        self._steps.count(job)
        if not job.partition.alone:
            return self._commit_step(meeting, job, written)
        parts = self._checked(job, written())
        alarms = self._judged(job, parts)
        fencing_token = self._token(meeting, job, job.request.directory, self.group.ranks)
        published = self._publish(meeting, job, parts, fencing_token, None)
        return Committed(published.manifest, fencing_token, published.bytes, alarms=alarms)

    def _refuse_different(self, job: SaveJob, moments: dict[int, Moment]) -> None:
        """Refuse the saves of ranks that are at different steps."""
        again = job.request.directory in self._directories
        try:
            refuse_different(
                moments, ranks_text, values=again, earlier=self._refused, last=self._last
            )
        except UsageError:
            self._refused = {who: moment.directory for who, moment in moments.items()}
            raise
        lowest, *_ = sorted(moments)
        others = [who for who in moments if moments[who].metadata != moments[lowest].metadata]
        if others and not self._warned_of_metadata:
            self._warned_of_metadata = True
            log.warning(
                "the metadata and metrics of %s are not those of rank %d, which are recorded. What "
                "to do: pass the same on all ranks (a mean of their losses, say), or name what is "
                "each rank's own in SaveOptions(per_rank=)",
                ranks_text(others),
                lowest,
            )
        if again and not self._warned and tells_nothing(moments, self._last):
            self._warned = True
            log.warning(
                "nothing in the state tells two steps apart, and saves go to %s again: if a rank "
                "skipped a save, two steps would be committed as one. What to do: pass step= to "
                "each save, or put the step into the state",
                job.request.directory,
            )

    def _checked(self, job: SaveJob, written: dict[int, Written]) -> dict[int, Written]:
        """Check that the parts of all ranks belong to one save, and return them."""
        coordinators = {part.coordinator for part in written.values()}
        if len(coordinators) > 1:
            raise UsageError(
                f"the ranks of the group passed different coordinators: {sorted(coordinators)}",
                remedy="pass the same coordinator_rank on all ranks of process_group",
            )
        moments = {part.rank: part.moment for part in written.values()}
        self._refuse_different(job, moments)
        self._last, self._refused = moments, {}
        self._directories[job.request.directory] = None
        if len(self._directories) > LEASES_KEPT:
            del self._directories[next(iter(self._directories))]
        prefixes = sorted({part.prefixes for part in written.values()})
        if len(prefixes) > 1:
            raise UsageError(
                f"the ranks of the group shard their files over different prefixes: {prefixes[:4]}",
                remedy="give all ranks the same options of the store (prefixes, prefix_root)",
                path=job.request.directory,
            )
        return written

    def _judged(self, job: SaveJob, parts: dict[int, Written]) -> tuple[str, ...]:
        """What the save warns of. An alarm that is an error is raised."""
        brought = {part.rank: (part.host, part.looked) for part in parts.values()}
        alarms, path = job.request.options.alarms, job.request.directory
        return judge(alarms, job.called, brought, path)

    def _token(
        self,
        meeting: Meeting,
        job: SaveJob,
        directory: str,
        ranks: Sequence[int],
        groups: Sequence[str] = (),
    ) -> int:
        """The fencing token under which this session publishes in `directory`; its lease is taken
        once."""
        key = (directory, *groups)
        if key not in self._tokens:
            lease = self.worker.call(
                TakeLease(
                    directory=directory,
                    session=meeting.id,
                    host=socket.gethostname(),
                    groups=tuple(groups),
                    ranks=tuple(ranks),
                    since=self._since,
                ),
                timeout=job.timeout,
                access=job.as_coordinator(),
            )
            if lease.remark is not None:
                log.warning("%s", lease.remark)
            self._tokens[key] = lease.fencing_token
            # if each step has a directory, the oldest ones are done
            if len(self._tokens) > LEASES_KEPT:
                del self._tokens[next(iter(self._tokens))]
        return self._tokens[key]

    def _publish(
        self,
        meeting: Meeting,
        job: SaveJob,
        parts: dict[int, Written],
        fencing_token: int,
        record: str | None,
    ) -> Published:
        return self.worker.call(
            PublishManifest(
                directory=job.request.directory,
                attempt=job.attempt(meeting.id),
                fencing_token=fencing_token,
                ranks=self.group.ranks,
                parts={
                    str(p.rank): {"part": p.part, "crc64": p.crc64, "host": p.host}
                    for p in parts.values()
                },
                record=record,
            ),
            timeout=job.timeout,
            access=job.as_coordinator(),
        )

    def sweep(self, job: SaveJob, committed: Committed) -> None:
        """Delete the files that the commit supersedes. It runs after all ranks know of the commit,
        so that nobody waits."""
        if job.request.coordinator != self.group.rank or not job.request.options.sweep:
            return
        leads = committed.record is not None and job.partition.mine == 0
        sweep = Sweep(
            directory=job.request.directory,
            keep=(committed.manifest,),
            fencing_token=committed.fencing_token,
            record_directory=committed.record_directory if leads else None,
            keep_records=(committed.record,) if leads and committed.record else (),
        )
        try:
            self.worker.call(sweep, timeout=job.timeout, access=job.as_coordinator())
        except CheckpointError as error:
            log.warning("could not delete what save %d supersedes: %s", job.handle.number, error)

    # -- several groups --------------------------------------------------------------------

    def _commit_step(self, meeting: Meeting, job: SaveJob, written: Brought[Written]) -> Committed:
        """Do this group's share in the commit of a step of several groups. Only coordinators call
        it."""
        step = self._steps.meeting(job)
        number, directory = job.handle.number, job.request.directory
        parts: dict[int, Written] = {}
        alarms: tuple[str, ...] = ()

        def gather() -> GroupSave:
            nonlocal alarms
            parts.update(self._checked(job, written()))
            alarms = self._judged(job, parts)
            return self._steps.apart(job)

        ticket = self._steps.ticket(
            step, job, gather, lambda groups: self._ticket(step, job, groups())
        )
        pointer = relative_url(f"{ticket.directory.rstrip('/')}/{ticket.record}", directory)
        manifest, nbytes = "", 0

        def publish() -> GroupManifest:
            nonlocal manifest, nbytes
            published = self._publish(meeting, job, parts, ticket.fencing_token, pointer)
            manifest, nbytes = published.manifest, published.bytes
            return GroupManifest(
                relative_url(directory, ticket.directory),
                manifest,
                published.crc64,
                self.group.rank,
            )

        def commit(groups: Brought[GroupManifest]) -> None:
            """On the lead: create the record, which commits the step."""
            manifests = groups()
            record = PublishRecord(
                directory=ticket.directory,
                session=step.id,
                number=number,
                fencing_token=ticket.fencing_token,
                groups=tuple(manifests[member] for member in sorted(manifests)),
            )
            self.worker.call(record, timeout=job.timeout, access=job.as_coordinator())

        step.round(
            f"record/{number}",
            publish,
            commit,
            timeout=job.timeout,
            brings=GroupManifest,
        )
        return Committed(
            manifest, ticket.fencing_token, nbytes, ticket.record, ticket.directory, alarms
        )

    def _ticket(self, step: Meeting, job: SaveJob, groups: dict[int, GroupSave]) -> Ticket:
        """On the lead: choose the record's directory, fencing token and name."""
        refuse_unequal(job, groups)
        urls = [groups[member].directory for member in sorted(groups)]
        if len(set(urls)) != len(urls):
            twice = next(u for u in urls if urls.count(u) > 1)
            owners = [job.partition.groups[m] for m in sorted(groups) if urls[m] == twice]
            raise UsageError(
                f"the groups {[list(o) for o in owners]} have one checkpoint_id",
                remedy="give each replication group its own directory: put the TP, EP, PP and "
                "shard coordinates that distinguish them into the path",
                path=twice,
            )
        parent = common_parent(urls)
        parent = parent_url(parent) if parent in urls else parent
        ranks = [rank for group in job.partition.groups for rank in group]
        fencing_token = self._token(step, job, parent, ranks, urls)
        return Ticket(parent, fencing_token, record_name(fencing_token, job.handle.number, step.id))
