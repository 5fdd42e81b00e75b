"""Resume a run from the newest step that loads on all ranks.

Member 0 lists the steps. All ranks load the one that it names, and bring the outcome to a round. If
a rank found it damaged or could not read it, all ranks load the next older one, over what the first
load left. A read that failed in a way that may pass is tried again first.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.commits.run_directory import Damaged
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    StorageError,
    as_checkpoint_error,
    causes,
    error_from_json,
)
from smckpt.manager.memory import Tiers
from smckpt.meeting.round import Meeting
from smckpt.storage.faults import PAUSE, may_pass

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a load on a rank. bad: the checkpoint is at fault, so that an older step may
    load. passing: this rank could not read it, and may a moment later. error: the failure."""

    failed: bool = False
    bad: bool = False
    passing: bool = False
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class Turn:
    """What all ranks do next. found: the checkpoint to load; None ends the resume. lost: a text for
    each step given up, newest first. pause: seconds to wait before the load."""

    found: dict[str, Any] | None
    lost: tuple[str, ...] = ()
    pause: float = 0.0


def resume(
    meeting: Meeting,
    point: str,
    steps: Tiers,
    load: Callable[[FoundCheckpoint], None],
    timeout: float,
) -> tuple[FoundCheckpoint | None, tuple[str, ...]]:
    """Load the newest step that all ranks can load. All ranks call it.

    Args:
        point: a name for this call, the same on all ranks.
        steps: member 0 reads them, newest first.
        load: fills this rank's state.

    Returns:
        The checkpoint that was loaded, or None if there is none; and a text for each step given up.

    Raises:
        Exception: what `load` raised, on the rank where it did; the others raise ours with its
            text.
        CorruptCheckpointError: there are steps, but none of them loads; on all ranks. The state is
            undefined then.
        StorageError: likewise, where the store could read none of them.
        CheckpointError: the checkpoint is not at fault: the program does not fit it, or the store
            does not answer.
    """
    remaining: list[Iterator[FoundCheckpoint | Damaged]] = []
    lost: list[str] = []
    kinds: set[type[CheckpointError]] = set()
    trying: list[FoundCheckpoint] = []

    def give_up(step: str, error: CheckpointError, in_memory: bool = False) -> None:
        if isinstance(error, StorageError) and not in_memory:
            steps.root.list_dirs()  # raises if the whole store fails, which may hold a newer step
        lost.append(f"{step} ({error})")
        kinds.add(StorageError if isinstance(error, StorageError) else CorruptCheckpointError)

    def next_turn(brought: Callable[[], dict[int, Outcome]]) -> Turn:
        outcomes = brought()
        failed = {member: each for member, each in outcomes.items() if each.failed}
        if failed and not any(each.bad for each in failed.values()):
            raise _error_of(failed[min(failed)])
        if not remaining:
            remaining.append(steps.newest_first())
        elif not failed:
            return Turn(None, tuple(lost))
        else:
            first = min(member for member, each in failed.items() if each.bad)
            passing = any(each.passing for each in failed.values())
            if passing and trying.count(trying[-1]) == 1:
                log.warning("%s is read again: %s", trying[-1], _error_of(failed[first]))
                trying.append(trying[-1])
                return Turn(trying[-1].to_json(), tuple(lost), PAUSE)
            at = trying[-1]
            give_up(f"step {at.step}", _error_of(failed[first]), steps.is_in_memory(at))
        for page in remaining[0]:
            if isinstance(page, FoundCheckpoint):
                trying.append(page)
                return Turn(page.to_json(), tuple(lost))
            give_up(page.name, page.error)
        trying.clear()
        if lost:
            kind = StorageError if kinds == {StorageError} else CorruptCheckpointError
            raise kind(
                f"no checkpoint can be loaded: {'; '.join(lost)}",
                remedy="repair one of them (`smckpt verify` says what is wrong with it), or give "
                "another root to start from step 0",
            )
        return Turn(None)

    outcome, found, count = Outcome(), None, 0
    own: Exception | None = None

    def mine() -> Outcome:
        return outcome

    while True:
        try:
            turn = meeting.round(
                f"{point}/{count}",
                mine,
                next_turn,
                timeout=timeout,
                brings=Outcome,
                gives=Turn,
            )
        except CheckpointError as error:
            if own is None:
                raise
            if error.to_json() != outcome.error:
                raise error from own
            break  # it came back to its rank
        if turn.found is None:
            return found, turn.lost
        found, count = FoundCheckpoint.from_json(turn.found), count + 1
        time.sleep(turn.pause)
        try:
            load(found)
            outcome, own = Outcome(), None
        except Exception as error:
            own, ours = error, as_checkpoint_error(error, meeting.rank)
            passing = any(map(may_pass, causes(ours)))
            bad = is_damage(ours, steps.is_in_memory(found))
            outcome = Outcome(True, bad, passing, ours.to_json())
    raise own


def is_damage(error: CheckpointError, in_memory: bool = False) -> bool:
    """Whether the checkpoint is at fault, or the files that make it. A program that does not fit it
    fits no older one either. A store that does not answer at all may hold the newest step; but one
    in memory went with its keeper."""
    bad = (CorruptCheckpointError, CheckpointNotFoundError, CheckpointReplacedError)
    for cause in causes(error):
        if isinstance(cause, bad):
            return True
        if isinstance(cause, StorageError):
            return in_memory or not cause.of_store
        if isinstance(cause, OSError) and cause.errno == errno.EIO:  # of a disk: a bad sector
            return True
    return False


def _error_of(outcome: Outcome) -> CheckpointError:
    return error_from_json(outcome.error)
