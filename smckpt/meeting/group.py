"""The ranks that meet: those of a torch process group, by their global numbers.

Ranks meet over the job's store, so smckpt needs no process group of its own. It makes one only for
collectives of others (`gloo_group`). It never asks torch for a group that its members alone make
(`use_local_synchronization`): torch 2.13 puts the number of the groups that the rank is in into the
new group's name, so ranks in different numbers of groups wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from smckpt.errors import CheckpointError, PeerError, UsageError
from smckpt.meeting.keys import Clients, Store
from smckpt.meeting.presence import Lives
from smckpt.meeting.round import Meeting, Round, alone
from smckpt.meeting.store import OverStore, agree


@dataclass(frozen=True)
class Group:
    """The ranks that commit together. Every `process_group=` of smckpt takes one.

    It is no `ProcessGroup` of torch: collectives cannot run over it, and making one needs no other
    rank. ranks: global, ascending. rank: this one. store: the job's default c10d store, or None
    without a process group, where this process is the whole job.
    """

    ranks: tuple[int, ...]
    rank: int
    world_size: int
    store: Any = field(default=None, compare=False, repr=False)

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    def size(self) -> int:
        """How many ranks, as `ProcessGroup.size`."""
        return len(self.ranks)

    def exists(self) -> bool:
        """Whether the process group of the job has not been destroyed since."""
        distributed = sys.modules.get("torch.distributed")
        if self.store is None or distributed is None:
            return True
        return distributed.is_initialized() and _default_store() is self.store

    def same_life(self, other: Group) -> bool:
        """Whether both groups come from one initialisation of the job's process group."""
        return self == other and self.store is other.store


def get_global_ranks(process_group: Any = None) -> list[int]:
    """The global ranks of a process group, ascending; of all processes for None."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    if process_group is None:
        return list(range(dist.get_world_size()))
    if isinstance(process_group, Group):
        if process_group.store is not _default_store():
            raise UsageError(
                f"{process_group!r} is of a process group that the job has destroyed",
                remedy="call replication_group again after init_process_group",
            )
        return list(process_group.ranks)
    try:
        return sorted(dist.get_process_group_ranks(process_group))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{process_group!r} is not a process group of this job",
            remedy="pass a group from dist.new_group or a DeviceMesh, not yet destroyed, or None",
        ) from error


def group_of(process_group: Any, no_dist: bool = False) -> Group | None:
    """The group, or None for a process outside it. no_dist: this process is a group by itself.

    Raises:
        UsageError: both are given.
    """
    import torch.distributed as dist

    if no_dist and process_group is not None:
        raise UsageError(
            "process_group= and no_dist=True contradict each other",
            remedy="leave one out: no_dist=True means this process alone",
        )
    if not (dist.is_available() and dist.is_initialized()):
        return Group((0,), 0, 1)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    rank = dist.get_rank()
    ranks = (rank,) if no_dist else tuple(get_global_ranks(process_group))
    if rank not in ranks:
        return None
    return Group(ranks, rank, dist.get_world_size(), _default_store())


def group_at(ranks: Iterable[int]) -> Group:
    """A group of these global ranks, this one among them. No other rank takes part."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Group((0,), 0, 1)
    return Group(tuple(sorted(ranks)), dist.get_rank(), dist.get_world_size(), _default_store())


def torch_group_of(process_group: Any) -> Any:
    """The caller's process group, for collectives.

    Raises:
        UsageError: it is a `Group`, over which none can run.
    """
    if isinstance(process_group, Group):
        raise UsageError(
            f"{process_group!r} names ranks alone, and this call runs collectives",
            remedy="pass a process group of torch with these ranks, such as mesh.get_group(dim)",
        )
    return process_group


def gloo_group(group: Group, name: str) -> Any:
    """A process group of torch with these ranks, for collectives of others on the CPU. All of them
    call it.

    Args:
        name: the same on all of them, and never used before in this job.
    """
    world = _private("_world")
    made, _ = _private("_new_process_group_helper")(
        len(group.ranks),
        group.index,
        list(group.ranks),
        "gloo",
        group.store,
        f"smckpt/{name}",
        timeout=_private("default_pg_timeout"),
        group_desc="smckpt",
    )
    world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(group.ranks)}
    return made


def _default_store() -> Any:
    return _private("_get_default_store")()


def _private(name: str) -> Any:
    from torch.distributed import distributed_c10d

    found = getattr(distributed_c10d, name, None)
    if found is None:
        import torch

        raise UsageError(
            f"torch {torch.__version__} has no distributed_c10d.{name}",
            remedy="use a torch between 2.11 and 2.13, or report this version",
        )
    return found


def inherited_store() -> Any:
    """The job's store that this process had before it was forked; None without one. Call it in the
    child, at once."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _default_store()


def ranks_digest(groups: Iterable[Sequence[int]]) -> str:
    """A name for a set of groups, the same on all ranks."""
    text = ";".join(",".join(map(str, ranks)) for ranks in groups)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


log = logging.getLogger("smckpt")


class Membership:
    """This process as a member of `group`, for one purpose (`name`).

    The ranks agree on a meeting when one first asks for it; it lives as long as the process.

    Args:
        clients: of the process; None: its own.
    """

    def __init__(self, group: Group, name: str, clients: Clients | None = None) -> None:
        self.group = group
        self.name = name
        self._clients = clients or Clients(group.store)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held for no wait: who leaves takes it
        self._agreeing = threading.Lock()  # held while this process agrees on a meeting
        self._meetings: dict[str, Meeting] = {}

    def meeting(self, timeout: float) -> Meeting:
        """The group's meeting. On first use, all its ranks agree on it."""
        prefix = f"smckpt/{self.name}/group/{ranks_digest([self.group.ranks])}"
        ranks = self.group.ranks
        return self._agreed(prefix, self.group.index, ranks, timeout, self.rank_name, ranks)

    def of_step(self, groups: Sequence[Sequence[int]], mine: int, timeout: float) -> Meeting:
        """The meeting of the coordinators of a step's groups; member i coordinates group i."""
        prefix = f"smckpt/{self.name}/step/{ranks_digest(groups)}"

        def name(member: int) -> str:
            ranks = list(groups[member])
            return f"the coordinator of group {ranks[:4]}{'…' if len(ranks) > 4 else ''}"

        lowest = [
            min(ranks) for ranks in groups
        ]  # a group whose lowest rank has ended saves nothing
        return self._agreed(prefix, mine, groups, timeout, name, lowest)

    def connect(self) -> None:
        """Make this thread's connection to the job's store, for the first meeting, and post this
        process: who waits for it to come hears of its end."""
        with self._agreeing:
            Lives(self._clients.own()).post(self.group.rank)

    def announce(
        self, rounds: Sequence[Round], step_rounds: Sequence[Round] = (), *, ends: bool = False
    ) -> None:
        """Say in the rounds that this process would hold next, of the group and of the steps, that
        it has left. Who waits in them, or comes to them later, hears it at once.

        Args:
            ends: the program ends.
        """
        if ends:
            self.post_end()
        with self._lock:
            meetings, store = dict(self._meetings), self._clients.spare
        for prefix, meeting in meetings.items():
            next_rounds = rounds if "/group/" in prefix else step_rounds
            try:
                if store is not None:
                    _over(meeting, store).transport.announce(next_rounds)
            except CheckpointError as error:
                log.debug("the job's store is gone: %s", error)

    def leave(self, timeout: float) -> None:
        """Leave all meetings. A leader waits at most `timeout` seconds in all for others to leave.

        The last answers vanish with the process that hosts the store. So the members of each group
        leave first, then the coordinators of the other groups, then the lead.
        """
        with self._lock:
            meetings, self._meetings = self._meetings, {}
        store, deadline = self._clients.spare, time.monotonic() + timeout
        for prefix in sorted(meetings):  # ".../group/…" before ".../step/…"
            try:
                if store is not None:
                    left = max(deadline - time.monotonic(), 0)
                    _over(meetings[prefix], store).leave(left)
            except CheckpointError as error:
                log.info("a peer ended without leaving the meeting: %s", error)

    def post_end(self) -> None:
        """Post that this rank's program ends, for those that would begin to meet it."""
        if self.group.world_size > 1 and os.getpid() == self._pid:
            try:
                Lives(self._clients.unused()).post(self.group.rank, over=True)
            except CheckpointError as error:
                log.debug("the job's store is gone: %s", error)

    def rank_name(self, member: int) -> str:
        return f"rank {self.group.ranks[member]}"

    def _agreed(
        self,
        prefix: str,
        member: int,
        members: Sequence[object],
        timeout: float,
        name: Callable[[int], str],
        ranks: Sequence[int],
    ) -> Meeting:
        if len(members) == 1:
            with self._lock:
                return self._meetings.setdefault(prefix, alone())
        with self._agreeing:
            store = self._clients.own()
            meeting = self._meetings.get(prefix)
            if meeting is None:
                lives = Lives(store)
                lives.post(self.group.rank)

                def first_end(members: Collection[int]) -> PeerError | None:
                    return lives.first_end([ranks[member] for member in members])

                meeting = agree(
                    store,
                    prefix,
                    member=member,
                    count=len(members),
                    timeout=timeout,
                    name=name,
                    rank=self.group.rank,
                    sideways=self._clients.unused(),
                    first_end=first_end,
                    absent=self._clients.absent,
                )
                with self._lock:
                    self._meetings[prefix] = meeting
            return _over(meeting, store)


def _over(meeting: Meeting, store: Store) -> Meeting:
    """The same meeting over another client."""
    transport = meeting.transport
    if isinstance(transport, OverStore):
        return replace(meeting, transport=transport.over(store))
    return meeting
