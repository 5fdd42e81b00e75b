"""Other jobs that save below the same root at the same time.

Each manager has a claim, which is in the manifests of its steps: a generation, above those that it
finds when it begins, and a random name. So of two that save at the same time, both know which claim
is the higher one. The job with the lower claim is the older one, or a process that outlived a
restart: it saves no more, and says so. It learns of the other from steps that have come since.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.commits.discover import FoundCheckpoint, found_at
from smckpt.checkpoint.commits.run_directory import RunDirectory
from smckpt.errors import CheckpointError, StorageError, UsageError
from smckpt.manager.record import claim_of, mark_of

__all__ = ["Rivals"]

log = logging.getLogger("smckpt")

_LOOKS_BACK = 16  # steps whose generation counts at the start: those of the latest manager


@dataclass(frozen=True, order=True)
class Claim:
    """generation: above those of all managers that saved here before. name: of this manager."""

    generation: int
    name: str


class Rivals:
    """What rank 0 knows of them. The training thread calls `refuse`, retention `look`."""

    def __init__(self, steps: RunDirectory) -> None:
        self._steps = steps
        self._claim: Claim | None = None
        self._before: frozenset[str] = frozenset()  # directories of the steps when we began
        self._others: dict[str, str] = {}  # directory → the run that saved there since
        self._ours: frozenset[str] = frozenset()  # directories of our steps that are still there
        self._last: str | None = None  # that of our last step
        self._over: StorageError | None = None

    def claim(self) -> dict[str, Any] | None:
        """For the manifests."""
        return None if self._claim is None else asdict(self._claim)

    def refuse(self, subpath: str, run: str) -> None:
        """Refuse a save to this directory, if another job has the root, or another run the step.

        Raises:
            StorageError: a later job saves below this root.
            UsageError: a step of another run is there; it would be lost.
        """
        if self._claim is None:
            self._begin()
        if self._over is not None:
            raise self._over
        owner = self._others.get(subpath)
        if subpath in self._before and subpath not in self._ours:
            found = self._found(subpath)
            owner = None if found is None else mark_of(found)
        if owner not in (None, run):
            raise UsageError(
                f"a step of another run ({owner}) is there, which this save would replace",
                remedy="restore it first, then this run goes on from it; or give this run a root "
                "of its own",
                path=self._steps.root.join(subpath).url,
            )

    def look(self, subpath: str) -> bool:
        """After a commit of ours: whether this job may go on saving and deleting here.

        Raises:
            StorageError: the store fails to list the root.
        """
        again = [] if self._last is None else [self._last]  # who saves to the same is found there
        present = [other for _, other in self._steps.places()]
        self._last = subpath
        self._ours = self._ours.intersection(present) | {subpath}
        self._others = {
            other: run for other, run in self._others.items() if other in {*present, subpath}
        }
        fresh = [other for other in present if other not in self._before]
        known = {*self._ours, *self._others}
        for other in [*again, subpath, *(other for other in fresh if other not in known)]:
            found = self._found(other)
            if found is not None:
                self._meet(other, found)
        return self._over is None

    def _begin(self) -> None:
        subpaths = [subpath for _, subpath in self._steps.places()]
        self._before = frozenset(subpaths)
        claims = [
            claim_of(found) for subpath in subpaths[:_LOOKS_BACK] if (found := self._found(subpath))
        ]
        latest = max((generation for generation, _ in claims), default=0)
        self._claim = Claim(latest + 1, secrets.token_hex(6))

    def _found(self, subpath: str) -> FoundCheckpoint | None:
        try:
            return found_at(self._steps.root.join(subpath))
        except CheckpointError:  # damaged, or deleted meanwhile: it tells nothing
            return None

    def _meet(self, subpath: str, found: FoundCheckpoint) -> None:
        claim = Claim(*claim_of(found))
        assert self._claim is not None
        if not claim.name or claim == self._claim:
            return
        if subpath not in self._others:
            log.warning(
                "another job saves below %s too: step %s is not of this one. Give each a root of "
                "its own",
                self._steps.root.url,
                found.step,
            )
        self._others[subpath] = mark_of(found) or ""
        if claim > self._claim:
            self._over = StorageError(
                f"a later job has saved step {found.step} below this root: this one saves no more "
                "here",
                remedy="end the older of the two jobs; give each its own root if both are meant to "
                "run",
                path=found.path,
            )
