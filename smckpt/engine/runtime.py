"""What lives as long as the process: queues and loaders by group, and the wait for saves at
exit.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from smckpt.calls import alone, end_process, undisturbed, while_alive
from smckpt.engine.events import Sinks
from smckpt.engine.load import Loader
from smckpt.engine.saving.job import SaveHandle
from smckpt.engine.saving.queue import LEAVE_SECONDS, SaveQueue
from smckpt.errors import UsageError
from smckpt.layout.entries import Path
from smckpt.meeting.group import Group, Membership, inherited_store
from smckpt.meeting.keys import Clients
from smckpt.meeting.presence import began, start_of
from smckpt.staging.overlap import Overlap

# seconds that a program which ends by an exception waits for other ranks; torchrun kills after 30
DYING_SECONDS = 20.0
EXIT_SECONDS = 600.0  # seconds that a normal exit waits, unless SMCKPT_EXIT_TIMEOUT is set

log = logging.getLogger("smckpt")


class Finalizable(Protocol):
    """A queue of saves, as code that waits for it sees it. flying: its last save, if it has one."""

    @property
    def flying(self) -> SaveHandle | None: ...

    def finalize(self, blocking: bool, timeout: float | None = None) -> list[int]: ...

    def close(self, timeout: float) -> list[SaveHandle]: ...


class Runtime:
    """Queues and loaders of this process, by name and by the ranks of their group.

    The key is the group's ranks, so a new but equal `dist.new_group` finds the save in flight. If
    the process group was destroyed and made again (an elastic restart in this process), the same
    ranks may be other processes. Then nothing that was agreed before is valid.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[str, tuple[int, ...]], SaveQueue] = {}
        self._adopted: dict[tuple[str, tuple[int, ...]], Finalizable] = {}
        self._loaders: dict[tuple[int, ...], Loader] = {}
        self._clients: Clients | None = None  # of the job's store
        self.sinks = Sinks()
        self.overlap = Overlap()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._watching = False
        self._wait_first = while_alive(self._at_exit)
        # When the process began, in nanoseconds since 1970; the time of this module's first use if
        # the system does not say
        self._since = int((began(start_of(os.getpid())) or time.time()) * 1e9)
        self._inherited: object = None  # in a forked child: the job's store of the parent
        os.register_at_fork(after_in_child=while_alive(self.note_fork))

    def queue(self, group: Group, name: str) -> SaveQueue:
        self._refuse_inherited(group)
        key = (name, group.ranks)
        with self._lock:
            self._forget_if_forked()
            self._watch()
            old = self._queues.get(key)
            if old is not None and old.group.same_life(group):
                return old
            if old is not None:
                self._since = time.time_ns()
            membership = self._membership(group, f"save/{name}")
            fresh = SaveQueue(membership, name, self._since, self.sinks, self.overlap)
            self._queues[key] = fresh
            loader = self._loaders.get(group.ranks)
            if loader is not None and loader.group.same_life(group):
                fresh.note_loaded(loader.loaded)
        if old is not None:
            log.info("the process group is new; waiting for the saves of the earlier one")
            fresh.inherit(old.close(_exit_timeout()))
        return fresh

    def adopt(
        self, name: str, ranks: tuple[int, ...], make: Callable[[], Finalizable]
    ) -> Finalizable:
        """A queue of saves by other code (DCP's). It is made on first use, and we wait for it as
        for our own."""
        with self._lock:
            self._forget_if_forked()
            key = (name, ranks)
            if key not in self._adopted:
                self._adopted[key] = make()
                self._watch()
            return self._adopted[key]

    def in_flight(self, directory: str) -> list[SaveHandle]:
        """The saves of this process to a directory, or below it, that have not ended."""
        with self._lock:
            self._forget_if_forked()
            flying = [queue.flying for _, queue in self._all()]
        below = directory.rstrip("/") + "/"
        return [
            handle
            for handle in flying
            if handle is not None
            and not handle.done()
            and (handle.checkpoint_id.rstrip("/") + "/").startswith(below)
        ]

    def loader(self, group: Group) -> Loader:
        """What loads, once no save copies the tensors that a load may change."""
        self._refuse_inherited(group)
        self.overlap.wait()
        with self._lock:
            self._forget_if_forked()
            old = self._loaders.get(group.ranks)
            if old is None or not old.group.same_life(group):
                self._since = self._since if old is None else time.time_ns()
                membership = self._membership(group, "load")
                note = partial(self._note_loaded, group.ranks)
                self._loaders[group.ranks] = Loader(group, membership, self.sinks, note)
                self._watch()
            return self._loaders[group.ranks]

    def _note_loaded(self, ranks: tuple[int, ...], steps: Mapping[Path, float]) -> None:
        with self._lock:
            queues = [queue for (_, of), queue in self._queues.items() if of == ranks]
        for queue in queues:
            queue.note_loaded(steps)

    def membership(self, group: Group, name: str) -> Membership:
        """What meets in the group for another purpose than a save or a load."""
        with self._lock:
            self._forget_if_forked()
            return self._membership(group, name)

    def queues(self, ranks: tuple[int, ...] | None, name: str | None) -> list[Finalizable]:
        """The existing queues of these ranks and this name; None: any ranks, any name."""
        with self._lock:
            self._forget_if_forked()
            return [
                queue
                for (queue_name, queue_ranks), queue in self._all()
                if (ranks is None or queue_ranks == ranks) and (name is None or queue_name == name)
            ]

    def close(self, timeout: float) -> list[SaveHandle]:
        """Wait for all queues and end them within `timeout` seconds, plus a few seconds for those
        that hang.

        Returns:
            The saves whose failure nobody has seen: those that failed or were given up.
        """
        deadline = time.monotonic() + timeout

        def left() -> float:
            return max(deadline - time.monotonic(), 0)

        with self._lock:
            queues = [queue for _, queue in self._all()]
            loaders = list(self._loaders.values())
            members = [queue.membership for queue in self._queues.values()]
            members += [loader.membership for loader in loaders]
            self._queues, self._adopted, self._loaders = {}, {}, {}
        failed: list[SaveHandle] = []
        for queue in list(queues):
            given_up = _drained(queue, deadline)
            if given_up:
                failed += given_up
                queues.remove(queue)
        # Peers leave the store that this process may host. It has waited for those that are gone.
        patience = 0.0 if failed else LEAVE_SECONDS
        for membership in members[:1]:
            membership.post_end()
        for queue in queues:
            failed += queue.close(left())
        for loader in loaders:
            loader.announce_end()
        leave_by = min(time.monotonic() + patience, deadline)
        for membership in members:
            membership.leave(max(leave_by - time.monotonic(), 0))
        return failed

    def drop(self, name: str, timeout: float) -> list[SaveHandle]:
        """Close the queues of this name, in which this process saves no more. The next save under
        the name makes a new queue."""
        with self._lock:
            self._forget_if_forked()
            keys = [key for key in self._queues if key[0] == name]
            queues = [self._queues.pop(key) for key in keys]
        return [lost for queue in queues for lost in queue.close(timeout)]

    def note_fork(self) -> None:
        """In a forked child."""
        self._inherited = inherited_store()

    def _refuse_inherited(self, group: Group) -> None:
        """A forked child is no rank of its parent's job: the peers would take what it says for the
        parent's."""
        if group.store is not None and group.store is self._inherited:
            raise UsageError(
                f"a forked child of rank {group.rank} saves or loads as that rank",
                remedy="save and load in the training process itself; a child that is a job of its "
                "own first makes its own process group",
                rank=group.rank,
            )

    def _forget_if_forked(self) -> None:
        if os.getpid() != self._pid:  # threads and workers belong to the parent
            self._pid = os.getpid()
            self._queues, self._adopted, self._loaders, self._watching = {}, {}, {}, False
            self._clients = None

    def _membership(self, group: Group, name: str) -> Membership:
        if self._clients is None or self._clients.store is not group.store:
            self._clients = Clients(group.store)
        return Membership(group, name, self._clients)

    def _all(self) -> list[tuple[tuple[str, tuple[int, ...]], Finalizable]]:
        return [*self._queues.items(), *self._adopted.items()]

    def _watch(self) -> None:
        late = not threading.main_thread().is_alive()
        if late or (not self._watching and multiprocessing.parent_process() is not None):
            # A forked child of multiprocessing ends without the handlers of `atexit`, and one that
            # is registered while they run is not called. torch has imported multiprocessing before.
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        self._watching = True
        # Once more for each save, to wait before the handlers of whoever makes that save: a manager
        # hears signals until its last one is committed.
        atexit.unregister(self._wait_first)
        atexit.register(self._wait_first)

    @alone("the end of the program")
    def _at_exit(self) -> None:
        """Wait for saves within a limit. A failure that nobody has seen makes the exit status
        non-zero.

        An exception inside `atexit` leaves the status 0, so the process ends itself here.
        """
        if os.getpid() != self._pid:
            return
        _end_with(self.close(_exit_timeout()))

    def wait_in_handler(self, handle: SaveHandle) -> None:
        """Wait for a save at once in an exit handler that runs after those of multiprocessing, as
        one that was registered before torch was imported: nothing of ours runs any more.

        Raises:
            SaveFailedError: it was not committed.
        """
        if not multiprocessing.util.is_exiting():
            return
        limit = _exit_timeout()
        if not handle.ended(limit):
            raise handle.given_up(limit).failure()
        handle.result()


def _end_with(failed: Sequence[SaveHandle]) -> None:
    """End the program with status 1 if saves have failed that nobody has seen."""
    if not failed:
        return
    for handle in failed:
        undisturbed(print, f"smckpt: {handle.failure()}", file=sys.stderr)
    undisturbed(
        print,
        "smckpt: a save was not committed, and the program did not see the error; exit status 1",
        file=sys.stderr,
    )
    end_process(1)


def _drained(queue: Finalizable, deadline: float) -> list[SaveHandle]:
    """Wait for the save in flight. A program that ends by an exception does not wait long for other
    ranks, which may be gone; the launcher would kill it. Returns the saves that it gives up."""
    flying, dying = queue.flying, getattr(sys, "last_value", None) is not None
    while flying is not None and not flying.ended(min(1.0, max(deadline - time.monotonic(), 0))):
        now, brought = time.monotonic(), getattr(queue, "brought", None)
        if now >= deadline:
            break
        if dying and brought is not None and now - brought > DYING_SECONDS:
            undisturbed(
                print,
                f"smckpt: the program ends by an exception, and save {flying.number} has waited "
                f"{now - brought:.0f} s for other ranks: it is given up",
                file=sys.stderr,
            )
            return queue.close(0)
    return []


def _exit_timeout() -> float:
    """The timeout from the environment. An exit cannot raise, so a value that is no number is
    logged and ignored."""
    text = os.environ.get("SMCKPT_EXIT_TIMEOUT", "")
    try:
        limit = float(text) if text else EXIT_SECONDS
        if limit >= 0:
            return limit
    except ValueError:
        pass
    log.error("SMCKPT_EXIT_TIMEOUT=%r is not a number of seconds; using %.0f", text, EXIT_SECONDS)
    return EXIT_SECONDS
