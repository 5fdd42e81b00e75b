"""What a run records of itself: in the manifest of each of its steps; and, of attempts that ended
before they committed anything, in a file.

No manifest tells of such attempts. Rank 0 counts them in one small file in the directory of the
step that they began from, or in the root before the run has a step. An attempt adds itself at its
first `should_save` or `save`. Once it has committed a step, its manifests tell of it, and it
deletes the file.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.checkpoint.records.format import ATTEMPTS, FORMAT_VERSION
from smckpt.checkpoint.records.sealed import read_file, seal_json
from smckpt.decoding import Count
from smckpt.errors import CheckpointError, UsageError
from smckpt.meeting.presence import has_ended, own_process
from smckpt.storage import Storage
from smckpt.storage.urls import file_url, is_in_memory_here

log = logging.getLogger("smckpt")

_MOST_BYTES = 1 << 12


@dataclass(frozen=True)
class History:
    """The failures of a run, and the seconds that it ran, in all its attempts."""

    failures: int = 0
    seconds: float = 0.0


def _manager_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    manager = metadata.get("manager")
    return manager if isinstance(manager, dict) else {}


def mark_of(found: FoundCheckpoint) -> str | None:
    """The run that saved a checkpoint; None if no manager did."""
    run = _manager_of(found.metadata).get("run")
    return run if isinstance(run, str) else None


def claim_of(found: FoundCheckpoint) -> tuple[int, str]:
    """Generation and name of the manager that saved a checkpoint; (0, "") if it recorded none."""
    claim = _manager_of(found.metadata).get("claim")
    if isinstance(claim, dict) and type(claim.get("generation")) is int:
        return claim["generation"], str(claim.get("name", ""))
    return 0, ""


def not_abandoned(steps: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Without those that the run has left behind: a later manager went on from an older step, and
    has saved one of the same number or a lower one. Oldest first, as the steps are given."""
    found, latest = [], 0
    for one in steps:
        generation = claim_of(one)[0]
        if not 0 < generation < latest:  # 0: its manager knew none
            found.append(one)
        latest = max(latest, generation)
    return found


def memory_of(found: FoundCheckpoint) -> str:
    """Where the run's steps in memory were when a manager saved this one; "" if nowhere, or if this
    host does not give access to them."""
    url = _manager_of(found.metadata).get("memory")
    return url if isinstance(url, str) and is_in_memory_here(url) else ""


def run_of(found: FoundCheckpoint) -> dict[str, Any] | None:
    """`run_in` of a checkpoint's metadata."""
    return run_in(found.metadata)


def run_in(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """The run's failures and seconds, and {"seconds", "why"} of the interval if "auto" chose one;
    None if no manager recorded them."""
    manager = _manager_of(metadata)
    failures, seconds = manager.get("failures"), manager.get("seconds")
    if type(failures) is not int or not isinstance(seconds, (int, float)):
        return None
    recorded_value = manager.get("interval")
    chosen = None
    if isinstance(recorded_value, dict) and isinstance(recorded_value.get("seconds"), (int, float)):
        chosen = {
            "seconds": float(recorded_value["seconds"]),
            "why": str(recorded_value.get("why", "")),
        }
    return {"failures": failures, "seconds": float(seconds), "interval": chosen}


def history_of(found: FoundCheckpoint) -> History:
    """The history of a run that resumes here. The attempt that saved the checkpoint failed, unless
    a notice ended it."""
    run = run_of(found)
    if run is None:
        return History()
    failed = _manager_of(found.metadata).get("ended") is None
    return History(run["failures"] + failed, run["seconds"])


def recorded(
    own: dict[str, Any], metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The metadata of a save: `own` under "manager", and the user's.

    Raises:
        UsageError: a metric is not a number, or a key is reserved.
    """
    given = dict(metadata or {})
    if taken := {"manager", "metrics"} & given.keys():
        raise UsageError(
            f"metadata has the key {sorted(taken)[0]!r}",
            remedy="rename it; pass metrics as metrics=",
        )
    numbers: dict[str, float | None] = {}
    for name, value in (metrics or {}).items():
        try:
            # torch warns of a scalar taken from a tensor that requires a gradient
            number = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the metric {name!r} is {value!r}, not a number", remedy="pass numbers"
            ) from error
        # NaN and infinity are never the best
        numbers[str(name)] = number if math.isfinite(number) else None
    return {**given, "manager": own, "metrics": numbers}


def save_seconds_of(found: FoundCheckpoint, ranks: int) -> float | None:
    """The seconds until the commit of the run's save before this one; None if it is not known for
    a job of so many ranks."""
    manager = _manager_of(found.metadata)
    if manager.get("ranks") != ranks:
        return None
    recorded_value = manager.get("save_seconds")
    if not isinstance(recorded_value, (int, float)) or not 0 < recorded_value < math.inf:
        return None
    return float(recorded_value)


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
        return self.count - (self.count > 0 and not has_ended(self.process, own_process()))


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
