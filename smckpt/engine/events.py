"""Events for monitoring: one for each save and each load of this rank.

On rank 0 a long save or load also logs a line each half minute. Errors are logged by every rank.
The log is the logger `smckpt`, at the level INFO.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from smckpt.calls import undisturbed
from smckpt.errors import CheckpointError

__all__ = ["EVERY", "LoadEvent", "SaveEvent", "Sink", "Sinks", "telling"]

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
    sent again while it read headers and data, if the store counts them. fetched: bytes of blocks
    that this rank read from the store. received: bytes that other ranks had read and passed on.
    read_ratio: bytes that all ranks fetched, divided by those that any of them needs; None if they
    did not share their reads.
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
    fetched: int = 0
    received: int = 0
    read_ratio: float | None = None

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


EVERY = 30.0  # seconds


@contextmanager
def telling(rank: int, text: Callable[[], str], every: float = EVERY) -> Iterator[None]:
    """Log what is under way each `every` seconds of the block.

    Args:
        rank: this global rank. Any other than 0 is silent.
        text: what is done so far; called in a thread.
    """
    if rank != 0 or not log.isEnabledFor(logging.INFO):
        yield
        return
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every):
            undisturbed(log.info, "%s, for %.0f s", text(), time.monotonic() - began)

    thread = threading.Thread(target=tell, name="smckpt-telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
