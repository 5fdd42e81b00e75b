"""Attempts of a run that ended before they committed anything. No manifest tells of them.

Rank 0 counts them in one small file in the directory of the step that they began from, or in the
root before the run has a step. An attempt adds itself at its first `should_save` or `save`. Once it
has committed a step, its manifests tell of it, and it deletes the file.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.records.files import read_file
from smckpt.checkpoint.records.format import ATTEMPTS
from smckpt.checkpoint.records.sealed import FORMAT_VERSION, seal_json
from smckpt.decoding import Count
from smckpt.errors import CheckpointError
from smckpt.meeting.presence import has_ended, own_process
from smckpt.storage import Storage
from smckpt.storage.urls import file_url

__all__ = ["RunAttempt", "Uncommitted", "uncommitted_at"]

log = logging.getLogger("smckpt")

_MOST_BYTES = 1 << 12


@dataclass(frozen=True)
class Uncommitted:
    """The attempts that began from one step and have committed nothing.

    Args:
        identity: of the commit that they began from; "" before the first one.
        count: how many have begun.
        process: rank 0 of the last one, as `own_process` names it.
    """

    identity: str
    count: Count = 0
    process: tuple[str, int, int] | None = None

    @property
    def failed(self) -> int:
        """Those that are known to have ended. The last one counts if this system has seen it."""
        return self.count - (self.count > 0 and not has_ended(self.process))


def uncommitted_at(step: Storage, identity: str) -> Uncommitted:
    """What the file in a step's directory, or in the root, says. Nothing if there is none, if it is
    damaged, or if it is of another commit in this directory."""
    try:
        if ATTEMPTS not in step.names(ATTEMPTS):
            return Uncommitted(identity)
        found = read_file(Uncommitted, step, ATTEMPTS, most=_MOST_BYTES)
    except CheckpointError as error:
        log.debug("attempts at %s are not counted: %s", step.url, error)
        return Uncommitted(identity)
    return found if found.identity == identity else Uncommitted(identity)


class RunAttempt:
    """This attempt, on rank 0. A store that refuses the file costs the count, and nothing else."""

    def __init__(self) -> None:
        self._at: Storage | None = None
        self._root: Storage | None = None
        self._before: Uncommitted | None = None
        self._lock = threading.Lock()
        self._noted = self._committed = False

    def began(self, root: Storage, step: Storage, identity: str) -> int:
        """How many attempts before this one began at `step` and committed nothing."""
        self._root, self._at, self._before = root, step, uncommitted_at(step, identity)
        return self._before.count

    def note(self) -> None:
        """Add this attempt, once, in a thread of its own."""
        if self._noted or self._before is None:
            return
        self._noted = True
        threading.Thread(target=self._write, name="smckpt-attempt", daemon=True).start()

    def committed(self) -> None:
        """Delete the file, once; in the root too, where an attempt that was killed as it committed
        the first step has left it."""
        with self._lock:
            known, self._committed = self._committed, True
            if known or self._at is None or self._root is None:
                return
            for directory in {at.url: at for at in (self._at, self._root)}.values():
                try:
                    directory.delete(ATTEMPTS)
                except CheckpointError as error:
                    log.debug("%s stays: %s", file_url(directory.url, ATTEMPTS), error)

    def _write(self) -> None:
        with self._lock:
            if self._committed:
                return
            assert self._at is not None and self._before is not None
            now = Uncommitted(self._before.identity, self._before.count + 1, own_process())
            body: dict[str, Any] = {"format": list(FORMAT_VERSION), **asdict(now)}
            try:
                self._at.overwrite(ATTEMPTS, seal_json(body))
            except CheckpointError as error:
                log.debug("this attempt is not counted: %s", error)
