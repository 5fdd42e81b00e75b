"""A group's meetings: its session and, for its coordinator, the session of the whole step."""

from __future__ import annotations

import logging
import threading
import time

from smckpt.engine.groups import Group, Partition, ranks_digest
from smckpt.engine.session import Session, Store, agree, client_of, lone_session

__all__ = ["Membership"]

log = logging.getLogger("smckpt")


class Membership:
    """This process as a member of `group`, for one purpose (`name`).

    Sessions are agreed when first asked for and live as long as the process. Each thread talks over
    one store client of its own, since a wait on a shared one blocks its other users. It is kept for
    the thread's later calls: c10d asks for the host's name at each connection, and where the
    resolver does not answer that takes seconds.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.name = name
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._own = threading.local()  # gone, and closed, with its thread
        self._farewell: Store | None = None  # of whoever leaves: no thread can be waiting on it

    def session(self, timeout: float) -> Session:
        """The group's session, agreed on with all its ranks on first use."""
        prefix = f"smckpt/{self.name}/group/{ranks_digest([self.group.ranks])}"
        return self._agreed(
            prefix, self.group.index, len(self.group.ranks), timeout, self.group.ranks
        )

    def step_session(self, partition: Partition, timeout: float) -> Session:
        """The session of the coordinators of all groups of a step; member i speaks for group i."""
        prefix = f"smckpt/{self.name}/step/{ranks_digest(partition.groups)}"
        lowest = tuple(ranks[0] for ranks in partition.groups)
        return self._agreed(prefix, partition.mine, len(partition.groups), timeout, lowest)

    def leave(self, timeout: float) -> None:
        """Say good-bye; who leads waits for the others' for at most `timeout` seconds.

        The process that hosts the store would take the last verdicts with it. Its group's members
        go first, then the coordinators of the other groups, then the lead.
        """
        with self._lock:
            sessions, self._sessions = self._sessions, {}
            store, self._farewell = self._farewell, None
            self._own = threading.local()
        for prefix in sorted(sessions):  # ".../group/…" before ".../step/…"
            if sessions[prefix].channel is None or store is None:
                continue
            session = sessions[prefix].over(store)
            assert session.channel is not None
            try:
                if session.member:
                    session.channel.arrive("bye", session.member, {})
                    continue
                deadline = time.monotonic() + timeout
                for _ in session.channel.arrivals("bye", session.count - 1, deadline):
                    pass
            except (TimeoutError, RuntimeError) as error:
                log.info("a peer left without a good-bye: %s", error)

    def rank_name(self, member: int) -> str:
        return f"rank {self.group.ranks[member]}"

    def _agreed(
        self, prefix: str, member: int, count: int, timeout: float, ranks: tuple[int, ...]
    ) -> Session:
        if count == 1:
            with self._lock:
                return self._sessions.setdefault(prefix, lone_session())
        with self._lock:
            store = self._client()
            if prefix not in self._sessions:
                self._farewell = self._farewell or client_of(self.group.store)
                self._sessions[prefix] = agree(
                    store,
                    prefix,
                    member=member,
                    count=count,
                    timeout=timeout,
                    name=lambda m: f"rank {ranks[m]}",
                )
            return self._sessions[prefix].over(store)

    def _client(self) -> Store:
        """This thread's."""
        known: Store | None = getattr(self._own, "store", None)
        if known is None:
            known = self._own.store = client_of(self.group.store)
        return known
