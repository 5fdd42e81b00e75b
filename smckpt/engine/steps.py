"""Where the coordinators of several groups meet, and whether they mean the same save.

Groups count their saves each for itself, and meet by that number. A save that one of them makes
without the others (of another step's groups, or alone) shifts its numbers: what then has one number
is of two moments, and is refused here instead of becoming one step.
"""

from __future__ import annotations

from typing import Any

from smckpt.engine.job import SaveJob
from smckpt.engine.membership import Membership
from smckpt.engine.session import Session
from smckpt.errors import PeerError, UsageError

__all__ = ["Steps", "refuse_unequal"]

Groups = tuple[tuple[int, ...], ...]


class Steps:
    """The meetings of one queue's coordinator with those of other groups. Used by one thread."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._sessions: dict[Groups, Session] = {}
        self._made: dict[Groups, int] = {}
        self._failed = 0

    def count(self, job: SaveJob) -> None:
        """A save has come this far. The coordinators of other groups than its own that wait for
        its number hear that it is none of theirs."""
        mine = job.partition.groups
        if job.error is None:
            self._made[mine] = self._made.get(mine, 0) + 1
        else:
            self._failed += 1
        for groups, session in self._sessions.items():
            if groups != mine:
                self._tell_passed(session, job.handle.number)

    def session(self, job: SaveJob, timeout: float) -> Session:
        """The session of the coordinators of all groups of this save's step."""
        groups = job.partition.groups
        if groups not in self._sessions:
            self._sessions[groups] = self._membership.step_session(job.partition, timeout)
            # Others may wait for a word on saves that failed before this rank knew of them.
            for number in range(job.handle.number):
                self._tell_passed(self._sessions[groups], number)
        return self._sessions[groups]

    def apart(self, job: SaveJob) -> list[int]:
        """How many saves of this queue were not of these groups: at least, and at most (whose one
        was that failed before its state was looked at is not known)."""
        least = sum(n for groups, n in self._made.items() if groups != job.partition.groups)
        return [least, least + self._failed]

    def _tell_passed(self, session: Session, number: int) -> None:
        channel, rank = session.channel, self._membership.group.rank
        assert channel is not None  # there are several groups
        error = PeerError(
            f"rank {rank} had given up save {number}, or made it without this group, before this "
            "rank came",
            remedy="see what held this rank up; give saves that not all groups make a queue= of "
            "their own",
            rank=rank,
        )
        over = {"error": error.to_json()}
        if session.member == 0:
            channel.set(f"ticket/{number}/decision", over)
        else:
            channel.arrive(f"ticket/{number}", session.member, over)


def refuse_unequal(job: SaveJob, bodies: dict[int, dict[str, Any]]) -> None:
    """
    Raises:
        UsageError: the groups made unequally many saves apart: their numbers mean other moments.
    """
    apart = {member: body["apart"] for member, body in bodies.items()}
    most = max(apart, key=lambda member: apart[member][0])
    least = min(apart, key=lambda member: apart[member][1])
    if apart[most][0] > apart[least][1]:
        names = [list(job.partition.groups[member][:8]) for member in (most, least)]
        raise UsageError(
            f"group {names[0]} made {apart[most][0]} saves of this queue that were not of this "
            f"step's groups, group {names[1]} {apart[least][1]}: which saves are of one moment "
            "cannot be told",
            remedy="give saves that not all groups make a queue= of their own",
            path=job.request.directory,
        )
