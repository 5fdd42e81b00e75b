"""What lives as long as the process: queues and loaders by group, and the drain at exit."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from smckpt.engine.groups import Group
from smckpt.engine.job import SaveHandle
from smckpt.engine.load import Loader
from smckpt.engine.membership import Membership
from smckpt.engine.queue import LEAVE_SECONDS, SaveQueue

__all__ = ["Runtime"]

EXIT_SECONDS = 600.0  # how long a normal exit waits for saves, unless SMCKPT_EXIT_TIMEOUT says

log = logging.getLogger("smckpt")


class Finalizable(Protocol):
    """What a queue of saves is to those who wait for it."""

    def finalize(self, blocking: bool, timeout: float | None = None) -> list[int]: ...

    def close(self, timeout: float) -> list[SaveHandle]: ...


class Runtime:
    """Queues and loaders of this process, by name and by the ranks of their group.

    Keyed by ranks: a new but equal `dist.new_group` finds the save that is in flight. But when the
    process group was destroyed and made anew (an elastic restart in this process), the same ranks
    may be other processes: then all that was agreed before is over.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[str, tuple[int, ...]], SaveQueue] = {}
        self._adopted: dict[tuple[str, tuple[int, ...]], Finalizable] = {}
        self._loaders: dict[tuple[int, ...], Loader] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._watching = False

    def queue(self, group: Group, name: str) -> SaveQueue:
        with self._lock:
            self._forget_if_forked()
            key = (name, group.ranks)
            old = self._queues.get(key)
            if old is not None and not old.group.same_life(group):
                log.info("the process group was made anew: earlier saves are waited for")
                failed = old.close(_exit_timeout(), leave=False)
                self._queues[key] = SaveQueue(group, name)
                self._queues[key].inherit(failed)
            elif old is None:
                self._queues[key] = SaveQueue(group, name)
                self._watch()
            return self._queues[key]

    def adopt(
        self, name: str, ranks: tuple[int, ...], make: Callable[[], Finalizable]
    ) -> Finalizable:
        """A queue of saves by other means (DCP's), made on first use; waited for like our own."""
        with self._lock:
            self._forget_if_forked()
            key = (name, ranks)
            if key not in self._adopted:
                self._adopted[key] = make()
                self._watch()
            return self._adopted[key]

    def loader(self, group: Group) -> Loader:
        with self._lock:
            self._forget_if_forked()
            old = self._loaders.get(group.ranks)
            if old is None or not old.group.same_life(group):
                self._loaders[group.ranks] = Loader(group, Membership(group, "load"))
                self._watch()
            return self._loaders[group.ranks]

    def queues(self, ranks: tuple[int, ...] | None, name: str | None) -> list[Finalizable]:
        """Existing queues: of these ranks (all for None), of this name (all for None)."""
        with self._lock:
            self._forget_if_forked()
            return [
                queue
                for (its_name, its_ranks), queue in self._all()
                if (ranks is None or its_ranks == ranks) and (name is None or its_name == name)
            ]

    def close(self, timeout: float) -> list[SaveHandle]:
        """Drain and end all queues within `timeout` seconds, and a few to end what hangs.

        Returns:
            The saves that nobody was told of: those that failed or were given up.
        """
        deadline = time.monotonic() + timeout

        def left() -> float:
            return max(deadline - time.monotonic(), 0)

        with self._lock:
            queues = [queue for _, queue in self._all()]
            loaders = list(self._loaders.values())
            self._queues, self._adopted, self._loaders = {}, {}, {}
        failed = []
        for queue in queues:
            failed += queue.close(left())
        for loader in loaders:
            loader.membership.leave(min(left(), LEAVE_SECONDS))
        return failed

    def _forget_if_forked(self) -> None:
        if os.getpid() != self._pid:  # threads and workers stayed with the parent
            self._pid = os.getpid()
            self._queues, self._adopted, self._loaders, self._watching = {}, {}, {}, False

    def _all(self) -> list[tuple[tuple[str, tuple[int, ...]], Finalizable]]:
        return [*self._queues.items(), *self._adopted.items()]

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Drain within a limit. A failure that nobody saw makes the exit status non-zero.

        An exception inside `atexit` leaves the status 0, so the process ends itself here.
        """
        if os.getpid() != self._pid:
            return
        failed = self.close(_exit_timeout())
        if not failed:
            return
        for handle in failed:
            print(f"smckpt: {handle.failure()}", file=sys.stderr)
        print(
            "smckpt: a save was not committed and nobody was told; exit status 1", file=sys.stderr
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _exit_timeout() -> float:
    """An exit cannot raise, so what is no number is said and passed over."""
    text = os.environ.get("SMCKPT_EXIT_TIMEOUT", "")
    try:
        limit = float(text) if text else EXIT_SECONDS
        if limit >= 0:
            return limit
    except ValueError:
        pass
    log.error("SMCKPT_EXIT_TIMEOUT=%r is not a number of seconds: %.0f", text, EXIT_SECONDS)
    return EXIT_SECONDS
