"""What a rank that saves alone tells the others, over the job's store.

Under DDP rank 0 saves alone and goes on before the commit, so the barrier of Lightning does not say
to the other ranks that the checkpoint is there: they would load what stood there before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from smckpt.errors import CheckpointError, JobStoreError, PeerError
from smckpt.meeting.group import group_of
from smckpt.meeting.keys import Keys, client_of
from smckpt.meeting.presence import has_ended, own_process

log = logging.getLogger("smckpt")

_SAVE_SECONDS = 1800.0  # as a round of the ranks
_KEYS = "smckpt/lightning"  # in the job's store


class Announcements:
    """Those of this rank's saves."""

    def __init__(self) -> None:
        self._keys: tuple[Any, Keys] | None = None  # of the job, and its store
        self._lock = threading.Lock()  # the last one has the highest number

    def begin(self, path: str) -> Callable[[], None]:
        """Announce a save. Returns a function that says that it has ended. It has a connection of
        its own, since the job's may be in use for a wait."""
        group, process = group_of(None), own_process()
        if group is None or group.world_size == 1:
            return lambda: None
        keys: Keys | None = None

        def end() -> None:
            with suppress(CheckpointError):  # the job has ended
                if keys is not None:
                    keys.count(_count_of("ended", process))

        try:
            known = self._keys
            if known is None or known[0] is not group.store:
                # not under the lock: to connect may take half a minute
                self._keys = known = group.store, Keys(client_of(group.store), _KEYS)
            with self._lock:
                begun = known[1].count(_count_of("begun", process))
                keys = known[1]  # it counts, so its end will
                keys.set("saver", [group.rank, _listed(process), begun, path])
        except CheckpointError as error:
            log.info("other ranks do not hear of the save of %s: %s", path, error)
        return end


def wait_for_save(path: str) -> None:
    """Wait for the end of the save that was announced last, by whatever rank.

    Raises:
        PeerError: it has not ended in time.
    """
    group, own = group_of(None), own_process()
    if group is None or group.world_size == 1:
        return
    keys, until, pause = Keys(group.store, _KEYS), time.monotonic() + _SAVE_SECONDS, 0.01
    try:
        while (saver := keys.peek("saver")) is not None:
            rank, process, *_ = saver
            if rank == group.rank and process != _listed(own):
                keys.set("saver", None)  # of one that was killed: its job's store goes on
                return
            ended = keys.peek(_count_of("ended", process)) or 0
            # read after the count: `announced` ends after the save inside has been announced
            now = keys.peek("saver") or saver
            _, _, begun, where = now
            if now[:2] == saver[:2] and (
                ended >= begun or has_ended(process and tuple(process), own)
            ):
                return
            if time.monotonic() > until:
                raise PeerError(
                    f"rank {rank} has not ended its save of {where} for {_SAVE_SECONDS:.0f} s, and "
                    "this load waits for it",
                    remedy=f"see the log of rank {rank}",
                    path=path,
                    rank=group.rank,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
    except JobStoreError as error:
        log.info("no save of another rank is waited for: %s", error)


def _listed(process: tuple[str, int, int] | None) -> list[Any] | None:
    return None if process is None else list(process)


def _count_of(what: str, process: Sequence[Any] | None) -> str:
    return f"{what}/{'-'.join(map(str, process or ()))}"
