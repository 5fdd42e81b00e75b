"""Resume a run from the newest step that loads on all ranks.

Member 0 reads the book. All ranks load the step that it names, and bring the outcome to a round. If
a rank found the step damaged, all ranks load the next older one, over what the first load left.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.discover import FoundCheckpoint
from smckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    as_checkpoint_error,
    error_from_json,
)
from smckpt.manager.book import Damaged
from smckpt.meeting.round import Meeting

__all__ = ["Resumed", "is_damage", "resume"]

log = logging.getLogger("smckpt")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a load on a rank. bad: the checkpoint is at fault, so that an older step may
    load. error: the failure."""

    failed: bool = False
    bad: bool = False
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class Turn:
    """What all ranks do next. found: the checkpoint to load; None ends the resume. lost: a text for
    each step given up, newest first."""

    found: dict[str, Any] | None
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that was loaded, or None if there is none; and the steps given up."""

    found: FoundCheckpoint | None
    lost: tuple[str, ...]


def resume(
    meeting: Meeting,
    point: str,
    pages: Callable[[], Iterator[FoundCheckpoint | Damaged]],
    load: Callable[[FoundCheckpoint], None],
    timeout: float,
) -> Resumed:
    """Load the newest step that all ranks can load. All ranks call it.

    Args:
        point: a name for this call, the same on all ranks.
        pages: on member 0: the steps, newest first.
        load: fills this rank's state.

    Raises:
        CorruptCheckpointError: there are steps, but none of them loads; on all ranks. The state is
            undefined then.
        CheckpointError: the checkpoint is not at fault: the program does not fit it, or the store
            does not answer.
    """
    remaining: list[Iterator[FoundCheckpoint | Damaged]] = []
    lost: list[str] = []
    trying: list[FoundCheckpoint] = []

    def next_turn(brought: Callable[[], dict[int, Outcome]]) -> Turn:
        outcomes = brought()
        failed = {member: each for member, each in outcomes.items() if each.failed}
        if failed and not any(each.bad for each in failed.values()):
            raise _error_of(failed[min(failed)])
        if not remaining:
            remaining.append(pages())
        elif not failed:
            return Turn(None, tuple(lost))
        else:
            first = min(member for member, each in failed.items() if each.bad)
            lost.append(f"step {trying[-1].step} ({_error_of(failed[first])})")
        for page in remaining[0]:
            if isinstance(page, FoundCheckpoint):
                trying.append(page)
                return Turn(page.to_json(), tuple(lost))
            lost.append(f"step {page.step} ({page.error})")
        trying.clear()
        if lost:
            raise CorruptCheckpointError(
                f"no checkpoint can be loaded: {'; '.join(lost)}",
                remedy="repair one of them (`smckpt verify` says what is wrong with it), or give "
                "another root to start from step 0",
            )
        return Turn(None)

    outcome, found, count = Outcome(), None, 0

    def mine() -> Outcome:
        return outcome

    while True:
        turn = meeting.round(
            f"{point}/{count}",
            mine,
            next_turn,
            timeout=timeout,
            brings=Outcome,
            gives=Turn,
        )
        if turn.found is None:
            return Resumed(found, turn.lost)
        found, count = FoundCheckpoint.from_json(turn.found), count + 1
        outcome = _tried(load, found)


def _tried(load: Callable[[FoundCheckpoint], None], found: FoundCheckpoint) -> Outcome:
    try:
        load(found)
        return Outcome()
    except Exception as error:
        ours = as_checkpoint_error(error)
        return Outcome(True, is_damage(ours), ours.to_json())


def is_damage(error: CheckpointError) -> bool:
    """Whether the checkpoint is at fault. A program that does not fit it fits no older one either.
    A store that does not answer may hold the newest step."""
    looked_at: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in looked_at:
        looked_at.append(cause)
        if isinstance(
            cause, (CorruptCheckpointError, CheckpointNotFoundError, CheckpointReplacedError)
        ):
            return True
        if isinstance(cause, OSError) and cause.errno == errno.EIO:  # of a disk: a bad sector
            return True
        cause = cause.__cause__
    return False


def _error_of(outcome: Outcome) -> CheckpointError:
    return error_from_json(outcome.error)
