"""This process as a member of a group: its meeting and, for the group's first rank or coordinator,
the meeting of all groups of a step."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from smckpt.errors import CheckpointError, PeerError
from smckpt.meeting.group import Group, ranks_digest
from smckpt.meeting.keys import Keys, Store, client_of
from smckpt.meeting.round import Meeting, Round, alone
from smckpt.meeting.store import OverStore, agree

__all__ = ["Membership"]

log = logging.getLogger("smckpt")


class Membership:
    """This process as a member of `group`, for one purpose (`name`).

    The ranks agree on a meeting when one first asks for it; it lives as long as the process. Each
    thread has its own store client, since a wait on a shared one blocks its other users. The thread
    keeps its client: c10d resolves the host's name at each connection, which takes seconds where
    the resolver does not answer.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._meetings: dict[str, Meeting] = {}
        self._own = threading.local()  # the client is closed when its thread ends
        self._farewell: Store | None = None  # the client for `leave`: no thread waits on it

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

        return self._agreed(prefix, mine, groups, timeout, name)

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
            meetings, store = dict(self._meetings), self._farewell
        for prefix, meeting in meetings.items():
            next_rounds = rounds if "/group/" in prefix else step_rounds
            try:
                if store is not None:
                    _over(meeting, store).transport.announce(next_rounds)
            except CheckpointError as error:
                log.debug("the job's store is gone: %s", error)

    def leave(self, timeout: float) -> None:
        """Leave all meetings. The leader waits at most `timeout` seconds for the others to leave.

        The last answers vanish with the process that hosts the store. So the members of each group
        leave first, then the coordinators of the other groups, then the lead.
        """
        with self._lock:
            meetings, self._meetings = self._meetings, {}
            store, self._farewell = self._farewell, None
            self._own = threading.local()
        for prefix in sorted(meetings):  # ".../group/…" before ".../step/…"
            try:
                if store is not None:
                    _over(meetings[prefix], store).leave(timeout)
            except CheckpointError as error:
                log.info("a peer ended without leaving the meeting: %s", error)

    def post_end(self) -> None:
        """Post that this rank's program ends, for those that would begin to meet it."""
        if len(self.group.ranks) > 1 and os.getpid() == self._pid:
            try:
                store = self._farewell or client_of(self.group.store)
                self._ends(store).set(str(self.group.rank), {})
            except CheckpointError as error:
                log.debug("the job's store is gone: %s", error)

    def _ends(self, store: Store) -> Keys:
        """Who has ended, in this attempt of torchrun."""
        return Keys(store, f"smckpt/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}")

    def rank_name(self, member: int) -> str:
        return f"rank {self.group.ranks[member]}"

    def _agreed(
        self,
        prefix: str,
        member: int,
        members: Sequence[object],
        timeout: float,
        name: Callable[[int], str],
        ranks: Sequence[int] = (),
    ) -> Meeting:
        with self._lock:
            if len(members) == 1:
                return self._meetings.setdefault(prefix, alone())
            store = self._client()
            if prefix not in self._meetings:
                self._farewell = self._farewell or client_of(self.group.store)
                ends = self._ends(store)
                ends.drop([str(self.group.rank)])  # of an earlier life on this store

                def has_left(member: int) -> PeerError | None:
                    if not ranks or ends.peek(str(ranks[member])) is None:
                        return None
                    return PeerError(
                        f"{name(member)} has left: its program has ended",
                        remedy="all ranks make the same saves and loads; look at its log",
                    )

                self._meetings[prefix] = agree(
                    store,
                    prefix,
                    member=member,
                    count=len(members),
                    timeout=timeout,
                    name=name,
                    rank=self.group.rank,
                    sideways=self._farewell,
                    has_left=has_left,
                )
            return _over(self._meetings[prefix], store)

    def _client(self) -> Store:
        """This thread's client."""
        known: Store | None = getattr(self._own, "store", None)
        if known is None:
            known = self._own.store = client_of(self.group.store)
        return known


def _over(meeting: Meeting, store: Store) -> Meeting:
    """The same meeting over another client."""
    transport = meeting.transport
    if isinstance(transport, OverStore):
        return replace(meeting, transport=transport.over(store))
    return meeting
