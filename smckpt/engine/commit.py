"""The commit state machine: written → gathered → manifest → record → verdict.

It runs in the queue's thread on every rank. Every rank arrives with what it wrote, or with its
error; the coordinator turns all arrivals into one verdict; all ranks read that.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from smckpt.checkpoint.format import record_name
from smckpt.checkpoint.spread import Spread
from smckpt.engine.job import SaveJob
from smckpt.engine.membership import Membership
from smckpt.engine.session import Session, absent
from smckpt.engine.steps import Steps, refuse_unequal
from smckpt.engine.worker_client import Worker
from smckpt.errors import (
    CheckpointError,
    PeerError,
    StorageError,
    UsageError,
    as_checkpoint_error,
    error_from_json,
)
from smckpt.layout.image import Layout
from smckpt.storage.budget import Share
from smckpt.storage.s3_pace import sharing
from smckpt.storage.urls import common_parent, is_s3_url, parent_url, parse_s3_url, relative_url

__all__ = ["Committer"]

CLAIMS_KEPT = 64  # directories whose epoch is remembered

log = logging.getLogger("smckpt")


class Committer:
    """Carries the saves of one queue from the arena to the commit. Used by one thread.

    Args:
        since: when this life of the job began, in nanoseconds since 1970.
    """

    def __init__(self, membership: Membership, worker: Worker, since: int) -> None:
        self._since = since
        self.membership = membership
        self.worker = worker
        self.group = membership.group
        self._session: Session | None = None
        self._steps = Steps(membership)
        self._epochs: dict[tuple[str, ...], int] = {}
        self._probed = False
        self._tried: set[str] = set()

    def run(self, job: SaveJob, arena_id: int | None) -> dict[str, Any]:
        """Write this rank's part and see the save through.

        Returns the verdict: {"manifest", "record", …}.

        Raises:
            CheckpointError: the save was not committed; the cause, from whichever rank.
        """
        timeout = job.request.options.timeout
        if self._session is None:
            self._session = self._agreed(job, timeout)
        session = self._session
        body = self._write(session, job, arena_id, timeout)
        point = f"save/{job.handle.number}"
        coordinator = self.group.ranks.index(job.request.coordinator)
        if session.channel is None:
            return _opened(self._coordinate(session, job, point, timeout, {0: body}))
        message = session.channel.arrive(point, session.member, body)
        try:
            if session.member == coordinator:
                verdict = self._coordinate(session, job, point, timeout, None)
                session.channel.set(f"{point}/verdict", verdict)
            else:  # gathering, the step's two meetings and publishing have `timeout` each
                verdict = session.channel.get(f"{point}/verdict", 6 * timeout + 5)
        except PeerError:
            raise  # the store is gone: a TimeoutError too, as in the places below
        except TimeoutError as error:
            raise PeerError(
                f"the coordinator, rank {job.request.coordinator}, gave no verdict on save "
                f"{job.handle.number}",
                remedy="look at that rank's log",
                path=job.request.directory,
                rank=self.group.rank,
            ) from error
        session.channel.part(point, message, session.count, [f"{point}/verdict"])
        return _opened(verdict)

    def _agreed(self, job: SaveJob, timeout: float) -> Session:
        """The session; who leads gave up the saves before this one, if there were any, and a rank
        that comes late to them must not wait for a word on them."""
        session = self.membership.session(timeout)
        for number in range(job.handle.number if session.channel is not None else 0):
            assert session.channel is not None
            over = self._given_up(number)
            if session.member == 0:
                session.channel.set(f"probe/{number}/made", over)
                session.channel.set(f"probe/{number}/decision", over)
            if self.group.rank == job.request.coordinator:
                session.channel.set(f"save/{number}/verdict", over)
        return session

    def _given_up(self, number: int) -> dict[str, Any]:
        error = PeerError(
            f"rank {self.group.rank} had given up save {number} before this rank came",
            remedy="see what held this rank up; raise timeout= if it was merely slow",
            rank=self.group.rank,
        )
        return {"error": error.to_json()}

    # -- this rank's part ------------------------------------------------------------------

    def _write(
        self, session: Session, job: SaveJob, arena_id: int | None, timeout: float
    ) -> dict[str, Any]:
        try:
            if not self._probed and len(self.group.ranks) > 1:
                self._probe(session, job, timeout)
            elif session.member == 0 and job.error is None:
                self._try_out(session, job, timeout)
            if job.error is not None:
                raise job.error
            layout = job.layout
            assert layout is not None
            part = {
                **job.part,
                "attempt": job.attempt(session.id),
                "session": session.id,
                "number": job.handle.number,
            }
            done = self._write_part(job, layout, part, arena_id, timeout)
            job.written, job.nbytes = job.elapsed(), int(done["bytes"])
            return {
                "rank": self.group.rank,
                "host": part["host"],
                "coordinator": job.request.coordinator,
                "directory": job.request.directory,
                "spread": job.spread(),
                "part": done["part"],
                "crc64": done["crc64"],
            }
        except Exception as error:  # whatever it is: who waits for this rank hears of it
            return {"error": as_checkpoint_error(error, self.group.rank).to_json()}

    def _write_part(
        self,
        job: SaveJob,
        layout: Layout,
        part: dict[str, Any],
        arena_id: int | None,
        timeout: float,
    ) -> dict[str, Any]:
        files = [
            {"arena_offset": f.arena_offset, "size": f.size, "header_bytes": len(f.header)}
            for f in layout.files
        ]
        directory, spread = job.request.directory, Spread.from_json(job.spread())
        with self._as_one_of_all(spread.prefixes if spread else 1):
            return self.worker.call(
                "write_part",
                {
                    "directory": spread.home(directory, self.group.rank) if spread else directory,
                    "attempt": part["attempt"],
                    "rank": self.group.rank,
                    "arena": arena_id,
                    "files": files,
                    "part": part,
                },
                timeout=timeout,
            )

    def _as_one_of_all(self, prefixes: int = 1) -> AbstractContextManager[None]:
        """What follows is done by every rank at once, so each has but its share of a budget."""
        return sharing(Share.of_rank(self.group.rank, self.group.world_size, prefixes))

    def _probe(self, session: Session, job: SaveJob, timeout: float) -> None:
        """Once per session: can the store hold checkpoints, and do all hosts see one directory?

        A rank whose save failed before it had a directory takes part, so that nobody waits.
        """
        point = f"probe/{job.handle.number}"
        leader = session.member == 0
        channel = session.channel
        assert channel is not None
        if leader:
            made = self._try_probe(session, job, True, timeout)
            channel.set(f"{point}/made", made)
        else:
            try:
                made = channel.get(f"{point}/made", 2 * timeout)
            except PeerError:
                raise
            except TimeoutError as error:
                raise absent({}, 1, self.membership.rank_name, "probing the directory") from error
        here = made if "error" in made else self._try_probe(session, job, False, timeout)

        def decide(bodies: dict[int, dict[str, Any]]) -> dict[str, Any]:
            blind = sorted({b["host"] for b in bodies.values() if not b["seen"]})
            where = sorted({b["directory"] for b in bodies.values()})
            if len(where) > 1:
                raise _different_ids(where)
            if blind:
                seeing = sorted({b["host"] for b in bodies.values() if b["seen"]})
                raise StorageError(
                    f"the directory is not shared by all hosts of the group: what host "
                    f"{seeing[0] if seeing else bodies[0]['host']} writes is not seen on {blind}",
                    remedy="mount one file system on all hosts, or use an s3:// checkpoint_id",
                    path=job.request.directory,
                )
            return {}

        session.meet(point, here, decide, timeout=timeout, name=self.membership.rank_name)
        self._probed = True

    def _try_out(self, session: Session, job: SaveJob, timeout: float) -> None:
        """Before the first save into a bucket, whether it can hold checkpoints. One rank looks; if
        it cannot, the others hear so from the verdict."""
        bucket = _bucket(job.request.directory)
        if bucket and bucket not in self._tried:
            payload = {"token": session.id, "create": True, "leave": False}
            payload["directory"] = job.request.directory
            self._remark(self.worker.call("probe", payload, timeout=timeout))
            self._tried.add(bucket)

    def _remark(self, answer: dict[str, Any]) -> None:
        if "remark" in answer:
            log.warning("%s", answer["remark"])

    def _try_probe(
        self, session: Session, job: SaveJob, create: bool, timeout: float
    ) -> dict[str, Any]:
        directory = job.request.directory
        try:
            if job.error is not None:
                raise job.error
            payload = {"directory": directory, "token": session.id, "create": create}
            if create:
                answer = self.worker.call("probe", payload, timeout=timeout)
                self._tried.add(_bucket(directory))
            else:
                with self._as_one_of_all():
                    answer = self.worker.call("probe", payload, timeout=timeout)
            self._remark(answer)
            return {"host": socket.gethostname(), "directory": directory, "seen": answer["seen"]}
        except CheckpointError as error:
            return {"error": error.to_json()}

    # -- the coordinator -------------------------------------------------------------------

    def _coordinate(
        self,
        session: Session,
        job: SaveJob,
        point: str,
        timeout: float,
        bodies: dict[int, dict[str, Any]] | None,
    ) -> dict[str, Any]:
        """The verdict: {"ok": …} or {"error": …}; a failure is told to all, never just raised."""
        failure: CheckpointError | None = None
        gathered: dict[int, dict[str, Any]] = {}
        try:
            gathered = self._gather(session, point, timeout, bodies)
        except Exception as error:
            failure = as_checkpoint_error(error, self.group.rank)
        try:
            self._steps.count(job)
            if not job.partition.alone:
                return {"ok": self._commit_step(session, job, gathered, failure, timeout)}
            if failure is not None:
                raise failure
            epoch = self._epoch(
                session, job.request.directory, self.group.ranks, timeout, spread=job.spread()
            )
            return {"ok": self._publish(session, job, gathered, epoch, None, timeout)}
        except Exception as error:
            return {"error": as_checkpoint_error(error, self.group.rank).to_json()}

    def _gather(
        self,
        session: Session,
        point: str,
        timeout: float,
        bodies: dict[int, dict[str, Any]] | None,
    ) -> dict[int, dict[str, Any]]:
        got: dict[int, dict[str, Any]] = {}
        try:
            if bodies is None:
                assert session.channel is not None
                deadline = time.monotonic() + timeout
                for arrival in session.channel.arrivals(point, session.count, deadline):
                    if "error" in arrival.body:
                        raise error_from_json(arrival.body["error"])
                    got[arrival.member] = arrival.body
            else:
                got = bodies
                if "error" in got[0]:
                    raise error_from_json(got[0]["error"])
        except PeerError:
            raise
        except TimeoutError as error:
            raise absent(got, session.count, self.membership.rank_name, "writing") from error
        coordinators = {body["coordinator"] for body in got.values()}
        if len(coordinators) > 1:
            raise UsageError(
                f"the ranks of the group named different coordinators: {sorted(coordinators)}",
                remedy="pass the same coordinator_rank on all ranks of process_group",
            )
        directories = sorted({body["directory"] for body in got.values()})
        if len(directories) > 1:
            raise _different_ids(directories)
        spreads = {str(body["spread"]): rank for rank, body in got.items()}
        if len(spreads) > 1:
            raise UsageError(
                f"the ranks of the group spread their files differently: {sorted(spreads)[:4]}",
                remedy="give all ranks the same S3Config.prefixes and prefix_root",
                path=directories[0],
            )
        return got

    def _epoch(
        self,
        session: Session,
        directory: str,
        ranks: Sequence[int],
        timeout: float,
        groups: Sequence[str] = (),
        spread: dict[str, Any] | None = None,
    ) -> int:
        """The epoch under which this session publishes in `directory`; claimed once."""
        key = (directory, *groups)
        if key not in self._epochs:
            claim = self.worker.call(
                "claim_epoch",
                {
                    "directory": directory,
                    "session": session.id,
                    "host": socket.gethostname(),
                    "groups": list(groups),
                    "spread": spread,
                    "ranks": list(ranks),
                    "since": self._since,
                },
                timeout=timeout,
            )
            self._epochs[key] = int(claim["epoch"])
            if len(self._epochs) > CLAIMS_KEPT:  # a directory for each step: old ones are over
                del self._epochs[next(iter(self._epochs))]
        return self._epochs[key]

    def _publish(
        self,
        session: Session,
        job: SaveJob,
        bodies: dict[int, dict[str, Any]],
        epoch: int,
        record: str | None,
        timeout: float,
    ) -> dict[str, Any]:
        published = self.worker.call(
            "publish_manifest",
            {
                "directory": job.request.directory,
                "attempt": job.attempt(session.id),
                "session": session.id,
                "number": job.handle.number,
                "epoch": epoch,
                "ranks": list(self.group.ranks),
                "parts": {
                    str(b["rank"]): {"part": b["part"], "crc64": b["crc64"], "host": b["host"]}
                    for b in bodies.values()
                },
                "record": record,
                "spread": job.spread(),
            },
            timeout=timeout,
        )
        return {**published, "epoch": epoch}

    # -- several groups --------------------------------------------------------------------

    def _commit_step(
        self,
        session: Session,
        job: SaveJob,
        bodies: dict[int, dict[str, Any]],
        failure: CheckpointError | None,
        timeout: float,
    ) -> dict[str, Any]:
        """This group's share in committing a step of several groups; on coordinators only."""
        step = self._steps.session(job, timeout)

        def name(member: int) -> str:
            ranks = job.partition.groups[member]
            return f"the coordinator of group {list(ranks[:4])}{'…' if len(ranks) > 4 else ''}"

        directory = job.request.directory
        body: dict[str, Any] = {"directory": directory, "apart": self._steps.apart(job)}
        ticket = step.meet(
            f"ticket/{job.handle.number}",
            {"error": failure.to_json()} if failure else body,
            lambda all_: self._ticket(step, job, all_, timeout),
            timeout=timeout,
            name=name,
        )
        pointer = relative_url(f"{ticket['directory'].rstrip('/')}/{ticket['record']}", directory)
        published: dict[str, Any] = {}
        try:
            published = self._publish(session, job, bodies, ticket["epoch"], pointer, timeout)
            body = {
                "directory": relative_url(directory, ticket["directory"]),
                "manifest": published["manifest"],
                "crc64": published["crc64"],
                "coordinator": self.group.rank,
            }
        except CheckpointError as error:
            body = {"error": error.to_json()}
        decision = step.meet(
            f"record/{job.handle.number}",
            body,
            lambda all_: self.worker.call(
                "publish_record",
                {
                    "directory": ticket["directory"],
                    "session": step.id,
                    "number": job.handle.number,
                    "epoch": ticket["epoch"],
                    "groups": [all_[m] for m in sorted(all_)],
                },
                timeout=timeout,
            ),
            timeout=timeout,
            name=name,
        )
        return {**published, **decision, "record_directory": ticket["directory"]}

    def _ticket(
        self, step: Session, job: SaveJob, bodies: dict[int, dict[str, Any]], timeout: float
    ) -> dict[str, Any]:
        """The lead: where the record will stand, under which epoch and name."""
        refuse_unequal(job, bodies)
        urls = [bodies[m]["directory"] for m in sorted(bodies)]
        if len(set(urls)) != len(urls):
            twice = next(u for u in urls if urls.count(u) > 1)
            owners = [job.partition.groups[m] for m in sorted(bodies) if urls[m] == twice]
            raise UsageError(
                f"groups {[list(o) for o in owners]} have one checkpoint_id",
                remedy="give each replication group its own directory: put the TP, EP, PP and "
                "shard coordinates that tell them apart in the path",
                path=twice,
            )
        parent = common_parent(urls)
        parent = parent_url(parent) if parent in urls else parent
        ranks = [rank for group in job.partition.groups for rank in group]
        epoch = self._epoch(step, parent, ranks, timeout, urls)
        return {
            "directory": parent,
            "epoch": epoch,
            "record": record_name(epoch, job.handle.number, step.id),
        }


def _different_ids(directories: list[str]) -> UsageError:
    return UsageError(
        f"the ranks of one group gave different checkpoint ids: {directories[:4]}",
        remedy="all ranks of process_group must pass the same checkpoint_id",
        path=directories[0],
    )


def _bucket(directory: str) -> str:
    """Where it lies in S3; "" on a file system."""
    return parse_s3_url(directory)[0] if is_s3_url(directory) else ""


def _opened(verdict: dict[str, Any]) -> dict[str, Any]:
    if "error" in verdict:
        raise error_from_json(verdict["error"])
    ok: dict[str, Any] = verdict["ok"]
    return ok
