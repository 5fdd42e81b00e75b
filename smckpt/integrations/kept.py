"""The last steps of a framework's run in the memory of its hosts, beside those that a door saves.

`smckpt_arguments={"memory": Memory(interval=20)}` of a door. All ranks call each method that does
not say otherwise.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import smckpt
from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.run_directory import RunDirectory, Template
from smckpt.engine.api import membership
from smckpt.engine.groups import ReplicationGroup
from smckpt.engine.saving.job import SaveHandle
from smckpt.errors import UsageError
from smckpt.manager.memory import Memory, MemoryTier, Tiers
from smckpt.manager.resume import resume
from smckpt.manager.schedule import Schedule
from smckpt.manager.state import Failed
from smckpt.meeting.group import group_of
from smckpt.storage.urls import normal_url

log = logging.getLogger("smckpt")

_SECONDS = 1800.0  # for each round of the ranks, as of the manager


def memory_of(given: Mapping[str, Any]) -> Memory | None:
    """The tier of memory among the `smckpt_arguments` of a door.

    Raises:
        UsageError: it is something else.
    """
    found = given.get("memory")
    if isinstance(found, Memory) and found.daemon is not None:
        raise UsageError(
            "daemon of Memory is not honoured by this door",
            remedy="leave it out: keepers hold the steps",
        )
    if found is None or isinstance(found, Memory):
        return found
    raise UsageError(
        f"memory of smckpt_arguments is {found!r}", remedy="give smckpt.Memory(interval=...)"
    )


class KeptSteps:
    """
    Args:
        disk: the run, as the door saves it.
        named: of a run that is in memory alone, its name, with `template`.
    """

    def __init__(
        self,
        memory: Memory,
        disk: RunDirectory | None,
        *,
        named: str = "",
        template: str = "{step}",
    ) -> None:
        group = group_of(None)
        assert group is not None
        root = named if disk is None else normal_url(disk.root.url)
        self._template = Template(template) if disk is None else disk.template
        digest = hashlib.sha256(f"{root}\0{self._template.text}".encode()).hexdigest()[:12]
        self._membership = membership(group, f"door/{digest}")
        schedule = Schedule(self._membership, memory.interval, _SECONDS)
        self._tier = MemoryTier(memory, root, self._template, smckpt.SaveOptions(), schedule)
        self._group = ReplicationGroup(None, group.ranks, "")
        self._disk = disk
        self._begun = False
        self._rounds = count(1)  # the ranks call it alike

    def save(
        self,
        step: int,
        state: Callable[[], dict[str, Any]],
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> SaveHandle | None:
        """Save a step that is due in memory. None: it is not due, or memory takes none.

        Args:
            state: makes what is saved. If it raises on a rank, the save fails on all of them.
            metadata: of the checkpoint.

        Raises:
            UsageError: a later job saves there. Rank 0 raises it, and the save fails on the others.
            Exception: what `state` raised on this rank, likewise.
        """
        self.begin()
        if not self._tier.is_due(step):
            return None
        live: Mapping[str, Any]
        try:
            live = state()
        except Exception as error:
            live = Failed(error)  # async_save tells the peers, who count this save too, and raises
        save = partial(smckpt.async_save, step=step)
        subpath = self._template.subpath(step)
        return self._tier.save(save, live, subpath, self._group, dict(metadata))

    def resume(
        self,
        load: Callable[[FoundCheckpoint], None],
        after: int = -1,
        only: int | None = None,
    ) -> bool:
        """Load the newest step of memory and disk that all ranks can load; False: there is none.

        Args:
            load: fills this rank's state.
            after: a step of another system; older ones do not count.
            only: the one step that counts.

        Raises:
            CheckpointError: there are steps, but none of them loads, or the program does not fit.
        """
        self.begin()
        meeting, point = self._membership.meeting(_SECONDS), f"restore/{next(self._rounds)}"
        self._tier.discard_unfinished()
        tiers = Tiers(self._disk, self._tier.steps, after, only)
        found, lost = resume(meeting, point, tiers, load, _SECONDS)
        if lost and self._group.ranks[0] == self._membership.group.rank:
            log.warning("resumed from %s; lost: %s", found, "; ".join(lost))
        self.restored(max(after, 0) if found is None else found.step or 0)
        return found is not None

    def newest(self, fits: Callable[[FoundCheckpoint], bool]) -> int:
        """The newest whole step in memory that `fits`, the same on all ranks; -1: there is none."""
        self.begin()

        def look() -> int:
            self._tier.discard_unfinished()
            return next((one.step or 0 for one in self.newest_first() if fits(one)), -1)

        meeting, point = self._membership.meeting(_SECONDS), f"newest/{next(self._rounds)}"
        return meeting.round(point, lambda: None, lambda _: look(), timeout=_SECONDS)

    def newest_first(self) -> Iterator[FoundCheckpoint]:
        """The whole steps in memory; one rank may ask, after `begin`."""
        found = Tiers(self._disk, self._tier.steps).in_memory()
        return (one for one in found if isinstance(one, FoundCheckpoint))

    def restored(self, step: int) -> None:
        """Go on from this step, which the door itself has loaded."""
        self._tier.restored(step)

    def close(self) -> None:
        """Wait for the saves under way. Failed ones are in the log."""
        self._tier.close(_SECONDS)

    def begin(self) -> None:
        """Find the keepers, once."""
        if not self._begun:
            self._begun = True
            self._tier.begin(self._membership, None, _SECONDS)
