"""The record of a run in the manifest of each of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smckpt.checkpoint.commits.discover import FoundCheckpoint
from smckpt.errors import UsageError

__all__ = [
    "History",
    "claim_of",
    "history_of",
    "mark_of",
    "recorded",
    "run_in",
    "run_of",
    "save_seconds_of",
]


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
    return {**given, "manager": own, "metrics": _numbers(metrics)}


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics as JSON numbers. NaN and infinity become None, which is never the best."""
    numbers: dict[str, float | None] = {}
    for name, value in (metrics or {}).items():
        try:
            # torch warns of a scalar taken from a tensor that requires a gradient
            number = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the metric {name!r} is {value!r}, not a number", remedy="pass numbers"
            ) from error
        numbers[str(name)] = number if math.isfinite(number) else None
    return numbers


def save_seconds_of(found: FoundCheckpoint, ranks: int) -> float | None:
    """The seconds until the commit of the run's save before this one; None if it is not known for
    a job of so many ranks."""
    manager = found.metadata.get("manager")
    if not isinstance(manager, dict) or manager.get("ranks") != ranks:
        return None
    recorded_value = manager.get("save_seconds")
    if not isinstance(recorded_value, (int, float)) or not 0 < recorded_value < math.inf:
        return None
    return float(recorded_value)
