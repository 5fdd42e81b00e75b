"""This process as a member of a group: its meeting and, for the group's first rank or coordinator,
the meeting of all groups of a step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from smckpt.errors import CheckpointError
from smckpt.meeting.group import Group, ranks_digest
from smckpt.meeting.keys import Store, client_of
from smckpt.meeting.round import Meeting, alone
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
        self._lock = threading.Lock()
        self._meetings: dict[str, Meeting] = {}
        self._own = threading.local()  # the client is closed when its thread ends
        self._farewell: Store | None = None  # the client for `leave`: no thread waits on it

    def meeting(self, timeout: float) -> Meeting:
        """The group's meeting. On first use, all its ranks agree on it."""
        prefix = f"smckpt/{self.name}/group/{ranks_digest([self.group.ranks])}"
        return self._agreed(prefix, self.group.index, self.group.ranks, timeout, self.rank_name)

    def of_step(self, groups: Sequence[Sequence[int]], mine: int, timeout: float) -> Meeting:
        """The meeting of the coordinators of a step's groups; member i coordinates group i."""
        prefix = f"smckpt/{self.name}/step/{ranks_digest(groups)}"

        def name(member: int) -> str:
            ranks = list(groups[member])
            return f"the coordinator of group {ranks[:4]}{'…' if len(ranks) > 4 else ''}"

        return self._agreed(prefix, mine, groups, timeout, name)

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

    def rank_name(self, member: int) -> str:
        return f"rank {self.group.ranks[member]}"

    def _agreed(
        self,
        prefix: str,
        member: int,
        members: Sequence[object],
        timeout: float,
        name: Callable[[int], str],
    ) -> Meeting:
        with self._lock:
            if len(members) == 1:
                return self._meetings.setdefault(prefix, alone())
            store = self._client()
            if prefix not in self._meetings:
                self._farewell = self._farewell or client_of(self.group.store)
                self._meetings[prefix] = agree(
                    store,
                    prefix,
                    member=member,
                    count=len(members),
                    timeout=timeout,
                    name=name,
                    rank=self.group.rank,
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
