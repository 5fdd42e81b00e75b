"""Where the coordinators of several groups meet, and the check that they mean the same save.

Each group counts its own saves, and groups meet by that number. A save that one group makes without
the others shifts its numbers. Then one number means two different moments. Such saves are refused
here instead of becoming one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from smckpt.engine.saving.differing import of_moment, refuse_different
from smckpt.engine.saving.job import SaveJob
from smckpt.engine.saving.moment import Moment
from smckpt.errors import CheckpointError, PeerError, UsageError
from smckpt.meeting.group import Membership
from smckpt.meeting.round import Meeting

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GroupSave:
    """A group's directory, how many saves of its queue were made without this step's groups, at
    least and at most, and the moment of this save."""

    directory: str
    least: int
    most: int
    moment: Moment


@dataclass(frozen=True)
class Ticket:
    """The future record of a step: its directory, fencing token and name."""

    directory: str
    fencing_token: int
    record: str


class Steps:
    """The meetings of one queue's coordinator with the coordinators of other groups. Used by one
    thread."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._meetings: dict[Groups, Meeting] = {}
        self._made: dict[Groups, int] = {}
        self._failed = 0

    def count(self, job: SaveJob) -> None:
        """Count a save. Coordinators of other groupings that wait for its number learn that it is
        not for them."""
        mine = job.partition.groups
        if job.error is None:
            self._made[mine] = self._made.get(mine, 0) + 1
        else:
            self._failed += 1
        for groups, meeting in self._meetings.items():
            if groups != mine:
                self._tell_passed(meeting, job.handle.number)

    def meeting(self, job: SaveJob) -> Meeting:
        """The meeting of the coordinators of all groups of this save's step."""
        groups = job.partition.groups
        if groups not in self._meetings:
            mine = job.partition.mine
            self._meetings[groups] = self._membership.of_step(groups, mine, job.timeout)
            # Others may wait for the answer to saves that failed before this rank knew of them.
            for number in range(job.handle.number):
                self._tell_passed(self._meetings[groups], number)
        return self._meetings[groups]

    def apart(self, job: SaveJob) -> GroupSave:
        """The counts of this group. For a save that failed before its state was selected, the
        groups are not known."""
        least = sum(n for groups, n in self._made.items() if groups != job.partition.groups)
        moment = replace(job.moment, directory="", values={})
        return GroupSave(job.request.directory, least, least + self._failed, moment)

    def ticket(
        self,
        meeting: Meeting,
        job: SaveJob,
        gather: Callable[[], GroupSave],
        decide: Callable[[Callable[[], dict[int, GroupSave]]], Ticket],
    ) -> Ticket:
        """Bring what this group gathered, and get the ticket of the step."""
        own: list[Exception] = []
        moment = replace(job.moment, directory="")  # that of all groups has no directory

        def bring() -> GroupSave:
            try:
                return gather()
            except Exception as error:
                own.append(error)
                raise

        try:
            return meeting.round(
                f"ticket/{job.handle.number}",
                bring,
                lambda groups: of_moment(moment, lambda: decide(groups)),
                timeout=job.timeout,
                brings=GroupSave,
                gives=Ticket,
            )
        except CheckpointError as error:
            if error not in own and error.moment and error.moment["directory"]:
                error.moment = None  # which of its ranks are behind is the other group's affair
            raise

    def _tell_passed(self, meeting: Meeting, number: int) -> None:
        rank = self._membership.group.rank
        error = PeerError(
            f"rank {rank} gave up save {number}, or made it without this group, before this rank "
            "joined it",
            remedy="find out what delayed this rank; give saves that not all groups make a "
            "SaveOptions(queue=) of their own",
            rank=rank,
        )
        meeting.refuse(f"ticket/{number}", error)


def refuse_unequal(job: SaveJob, groups: dict[int, GroupSave]) -> None:
    """
    Raises:
        UsageError: the groups save different steps; or they made different numbers of separate
            saves, so their save numbers mean different moments.
    """

    def name(members: Sequence[int]) -> str:
        return " and ".join(f"group {list(job.partition.groups[m][:8])}" for m in members[:4])

    refuse_different({member: apart.moment for member, apart in groups.items()}, name)
    most = max(groups, key=lambda member: groups[member].least)
    least = min(groups, key=lambda member: groups[member].most)
    if groups[most].least > groups[least].most:
        names = [list(job.partition.groups[member][:8]) for member in (most, least)]
        raise UsageError(
            f"group {names[0]} made {groups[most].least} saves in this queue without the other "
            f"groups of this step, group {names[1]} made {groups[least].most}: it is not known "
            "which saves belong together",
            remedy="give saves that not all groups make a SaveOptions(queue=) of their own",
            path=job.request.directory,
        )
