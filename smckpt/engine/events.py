"""Events for monitoring: one for each save and each load of this rank."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from smckpt.errors import CheckpointError

__all__ = ["LoadEvent", "SaveEvent", "Sink", "Sinks"]

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class SaveEvent:
    """A save has ended on this rank. Seconds and bytes are those of `Timings`.

    directory: the group's directory. number: counts the saves of its queue. outcome: "committed" or
    "failed". error: why it failed. retries: how many requests were sent again while this rank wrote
    its part, if the store counts them. age: how old the state of the queue's newest committed save
    is now, in seconds: so much training a crash would lose. None before the first commit of this
    process. alarms: what the save warned of (`Alarms`).
    """

    directory: str
    step: int | None
    queue: str
    number: int
    rank: int
    outcome: str
    error: CheckpointError | None
    blocked: float
    waited: float
    staged: float
    written: float
    committed: float
    nbytes: int
    retries: int | None = None
    age: float | None = None
    alarms: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes per second that this rank wrote, from staged to durable; 0 if it wrote nothing."""
        seconds = self.written - self.staged
        return self.nbytes / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class LoadEvent:
    """A load has ended on this rank.

    directory: the given directory. step: the checkpoint's step, if it is known. outcome: "loaded"
    or "failed". chosen, planned, read, ended: seconds from the call until the commit was chosen,
    the plan was agreed on, the bytes were read and given back, and the load ended; 0 for a step
    that was not reached. nbytes: bytes of the tensors that this rank filled. begun_anew: how often
    the load started again because a newer save swept its files. retries: how many requests were
    sent again while it read headers and data, if the store counts them.
    """

    directory: str
    step: int | None
    rank: int
    outcome: str
    error: CheckpointError | None
    chosen: float
    planned: float
    read: float
    ended: float
    nbytes: int
    begun_anew: int = 0
    retries: int | None = None

    @property
    def rate(self) -> float:
        """Bytes per second, from the plan until they were given back; 0 if nothing was read."""
        seconds = self.read - self.planned
        return self.nbytes / seconds if seconds > 0 else 0.0


Sink = Callable[["SaveEvent | LoadEvent"], None]


class Sinks:
    """The sinks of the process. The runtime owns them; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sinks: list[Sink] = []

    def add(self, sink: Sink) -> Callable[[], None]:
        """Send every event to `sink` from now on. Returns a function that ends it."""

        def remove() -> None:
            with self._lock:
                self._sinks = [other for other in self._sinks if other is not sink]

        with self._lock:
            self._sinks.append(sink)
        return remove

    def deliver(self, event: SaveEvent | LoadEvent) -> None:
        """Call all sinks, one after the other, in the calling thread."""
        with self._lock:
            sinks = list(self._sinks)
        for sink in sinks:
            try:
                sink(event)
            except BaseException:  # sys.exit too: a sink must not end a save or its thread
                log.exception("a sink of events raised; the event was %s", event)
